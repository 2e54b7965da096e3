"""What gave a policy is noted beside it, in this thread, and decides nothing."""

from policy import use_policy
from policy.core.scope import Source, current_scope, enter


def test_blocks_note_what_gave_the_policy_in_force_and_undo_it():
    assert str(current_scope().source) == "global"
    with use_policy("bf16"):
        assert str(current_scope().source) == "scope"
        with enter(
            current_scope(), Source("rule", "'a'")
        ):  # an equal scope: the note changes all the same
            assert str(current_scope().source) == "rule: 'a'"
            with enter(current_scope()):
                assert str(current_scope().source) == "rule: 'a'"
        assert str(current_scope().source) == "scope"
    assert str(current_scope().source) == "global"


def test_what_is_inside_of_a_module_names_the_module_for_an_argument_and_the_rule_for_a_rule():
    argument, rule = Source("argument", "dtype_policy", own=True), Source("rule", "'a'", own=True)
    assert str(argument.for_those_inside("enc")) == "enclosing module: enc"
    assert str(rule.for_those_inside("enc")) == "rule: 'a'" and not rule.for_those_inside("enc").own
    overridden = Source("scope", dtypes="dtype=float32")
    assert str(overridden) == "argument: dtype=float32; else scope"
    assert str(overridden.for_those_inside("enc")) == "enclosing module: enc"


def test_sources_are_equal_where_both_are_a_module_s_own_or_neither_is():
    assert Source("scope") == Source("global") and hash(Source("scope")) == hash(Source("global"))
    assert Source("argument", own=True) != Source("scope")

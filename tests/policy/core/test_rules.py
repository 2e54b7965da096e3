"""Rules: ordered, matched in full, first match wins."""

import pickle
import re

import pytest

from policy import DtypePolicyWarning, PolicyRules, get_policy

BF16, F32 = get_policy("bf16"), get_policy("f32")


class Layer:
    pass


class OurLayer(Layer):
    _upstream_class = Layer


class UsersLayer(OurLayer):
    pass


def test_a_pattern_is_matched_in_full_against_the_path():
    rules = PolicyRules({"encoder/layer_1": "f32"})
    assert rules.match("encoder/layer_1") == F32
    assert rules.match("encoder/layer_10") is None
    assert rules.match("my/encoder/layer_1") is None
    assert rules.match(None) is None
    assert PolicyRules({".*/layer_[13]": "f32"}).match("encoder/layer_3") == F32


def test_the_first_match_wins():
    assert PolicyRules([("a/.*", "bf16"), ("a/b", "f32")]).match("a/b") == BF16
    assert PolicyRules([("a/b", "f32"), ("a/.*", "bf16")]).match("a/b") == F32
    assert PolicyRules([(Layer, "bf16"), ("a/b", "f32")]).match("a/b", Layer) == BF16


def test_a_class_of_ours_stands_for_the_framework_s_and_a_user_s_for_itself():
    assert PolicyRules({OurLayer: "f32"}).match("x", Layer) == F32
    assert PolicyRules({OurLayer: "f32"}).match("x", UsersLayer) == F32
    assert PolicyRules({Layer: "f32"}).match("x", OurLayer) == F32
    assert PolicyRules({UsersLayer: "f32"}).match("x", OurLayer) is None
    assert PolicyRules({UsersLayer: "f32"}).match("x", UsersLayer) == F32


def test_rules_are_values():
    rules = PolicyRules({"a": "bf16", Layer: "f32"})
    assert rules == PolicyRules([("a", get_policy("bfloat16")), (Layer, F32)]) == PolicyRules(rules)
    assert hash(rules) == hash(PolicyRules(rules))
    assert rules != PolicyRules(rules, strict=False)
    assert pickle.loads(pickle.dumps(rules)) == rules
    assert len(rules) == 2 and bool(rules) and not PolicyRules()
    assert list(rules) == [("a", BF16), (Layer, F32)]
    assert rules.has_paths and not PolicyRules({Layer: "f32"}).has_paths
    assert repr(PolicyRules({"a": "bf16"}, strict=False)) == (
        "PolicyRules([('a', 'params=bfloat16,compute=bfloat16,output=bfloat16')], strict=False)"
    )
    with pytest.raises(AttributeError, match="strict"):
        rules.strict = False  # type: ignore[misc]


def test_texts_of_rules_divide_at_the_first_equals_sign():
    rules = PolicyRules.from_texts(["block_.*=p=f32,c=bf16,o=f32", "head=f32"], strict=False)
    assert rules == PolicyRules([("block_.*", "mixed_bfloat16"), ("head", "f32")], strict=False)
    assert not PolicyRules.from_texts([])
    with pytest.raises(ValueError, match=r"Rule 'head' should be PATH=TEXT, such as head=f32\."):
        PolicyRules.from_texts(["body=f32", "head"])
    with pytest.raises(TypeError, match="a list of PATH=TEXT, but got the string 'head=f32'"):
        PolicyRules.from_texts("head=f32")


def test_rules_that_match_nothing_are_rejected_all_at_once_with_the_paths():
    rules = PolicyRules({"encoder/.*nrom": "f32", "head": "f32", "tail": "f32"})
    told = r"Rules 'encoder/\.\*nrom', 'tail' matched no module. Modules seen: encoder/norm, head\."
    with pytest.raises(ValueError, match=told):
        rules.check(["", "encoder/norm", "head"])
    told = r"Rule 'a' matched no module. Modules seen: only the root, whose path is empty\."
    with pytest.raises(ValueError, match=told):
        PolicyRules({"a": "f32"}).check([""])
    PolicyRules(rules, strict=False).check(["head"])
    PolicyRules({".*": "f32"}).check([""])


def test_an_error_about_many_modules_lists_numbered_ones_as_one():
    layers = [f"layers/{i}{below}" for i in range(30) for below in ("", "/norm", "/mlp")]
    many = r"layers/0\.\.29"
    told = rf"Modules seen: embed, layers, {many}, {many}/mlp, {many}/norm\. "
    with pytest.raises(ValueError, match=told):
        PolicyRules({"layers/30/norm": "f32"}).check(["", "embed", "layers", *layers])


def test_class_rules_are_checked_where_classes_are_known():
    rules = PolicyRules({OurLayer: "f32"})
    rules.check(["a"])
    rules.check({"a": Layer})
    rules.check({"a": [int, Layer], "b": None})
    with pytest.raises(ValueError, match=r"Rule OurLayer matched no module. Modules seen: a\."):
        rules.check({"a": int})


class Inner: ...


class Outer: ...


@pytest.mark.parametrize(
    ("rules", "hidden", "by"),
    [
        ({".*": "f32", "head": "bf16"}, "'head'", "'.*'"),
        ({"block_.*": "f32", "Net:block_0/norm": "bf16"}, "'Net:block_0/norm'", "'block_.*'"),
        ({Inner: "f32", "block_0/norm": "bf16"}, "'block_0/norm'", "Inner"),
        ({".*norm": "f32", Inner: "bf16"}, "Inner", "'.*norm'"),
    ],
)
def test_a_rule_that_an_earlier_rule_hides_is_told_by_both_patterns(rules, hidden, by):
    modules = {"": Outer, "head": Outer, "block_0": Outer, "block_0/norm": Inner}
    expected = rf"Rule {re.escape(hidden)} never applies: rule {re.escape(by)} comes first"
    with pytest.warns(DtypePolicyWarning, match=expected):
        PolicyRules(rules).check(modules, model="Net")
    PolicyRules(rules, strict=False).check(modules, model="Net")


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "rules",
    [
        {"head": "bf16", ".*": "f32"},
        {"head": "bf16", "block_0": "f32", "head|block_0": "f16"},  # by two rules together
        {"head": "bf16", "head|head": "bf16"},  # to the same effect
    ],
)
def test_a_rule_that_applies_or_changes_nothing_is_no_warning(rules):
    PolicyRules(rules).check_places([("", ""), ("head", ""), ("block_0", "")])

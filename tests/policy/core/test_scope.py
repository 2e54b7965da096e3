"""The policy in force is part of JAX's cache keys, and of no other thread's business."""

import threading
import types

import jax
import jax.numpy as jnp
import pytest

from policy import (
    DtypePolicyWarning,
    Policy,
    PolicyRules,
    current_policy,
    get_policy,
    set_policy,
    use_policy,
)
from policy.core.dtypes import half_dtype
from policy.core.scope import Scope, Source, current_scope, enter, traced_for

A, B = get_policy("bf16"), get_policy("f16")


def test_the_innermost_scope_is_in_force():
    assert current_policy() is None
    with use_policy("bf16") as entered:
        assert entered == current_policy() == A
        with use_policy(B):
            assert current_policy() == B
            with use_policy(None):
                assert current_policy() is None
        assert current_policy() == A
    assert current_policy() is None


def test_a_scope_is_left_when_its_block_raises_and_can_be_entered_again_and_decorate():
    scope = use_policy("bf16")
    with pytest.raises(RuntimeError, match="inside"), scope:
        raise RuntimeError("inside")
    assert current_policy() is None
    with scope, scope:
        assert current_policy() == A
    assert scope(current_policy)() == scope(current_policy)() == A
    assert current_policy() is None


def test_an_inner_scope_without_rules_keeps_the_outer_ones():
    rules = PolicyRules({"head": "f32"})
    with use_policy("bf16", rules):
        with use_policy("f16"):
            assert current_scope().rules == rules
        with use_policy("f16", {}):
            assert not current_scope().rules


def test_the_global_policy_holds_outside_of_every_scope():
    set_policy("bf16", {"head": "f32"})
    assert current_policy() == A
    assert current_scope().rules == PolicyRules({"head": "f32"})
    with use_policy("f16"):
        assert current_policy() == B
    set_policy(None)
    assert current_scope() == Scope()


def test_a_new_thread_sees_the_global_policy_and_not_the_scope_of_another():
    set_policy("f16")
    seen = []
    with use_policy("bf16"):
        thread = threading.Thread(target=lambda: seen.append(current_policy()))
        thread.start()
        thread.join()
        assert current_policy() == A
    assert seen == [B]


def _traced(transform):
    """A jitted function that casts to the policy in force, and the list of its traces."""
    traces = []

    def body(x):
        traces.append(current_policy())
        policy = current_policy()
        return x if policy is None else x.astype(policy.compute_dtype).astype(jnp.float32)

    return transform(body), traces


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda body: jax.jit(jax.jit(body)),
        lambda body: jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: body(x), x)),
        lambda body: jax.jit(jax.checkpoint(body)),
        lambda body: jax.jit(jax.vmap(body)),
        lambda body: jax.jit(lambda x: jax.eval_shape(body, x).update().shape and body(x)),
    ],
    ids=["jit", "nested jit", "scan", "checkpoint", "vmap", "eval_shape"],
)
def test_a_policy_change_between_calls_retraces_and_going_back_reuses(transform):
    function, traces = _traced(transform)
    x = jnp.full((2,), 1 + 2**-9)  # rounds to 1 in bfloat16, not in float16
    results = []
    for policy in (A, B, A):
        with use_policy(policy):
            results.append(float(function(x)[0]))
    assert results == [1.0, 1 + 2**-9, 1.0]
    assert set(traces) == {A, B}
    assert traces == sorted(traces, key=[A, B].index)  # A's traces, then B's, and none after that


def test_equal_policies_share_a_program():
    function, traces = _traced(jax.jit)
    for policy in (
        Policy("f32", "bf16", "f32"),
        "mixed_bfloat16",
        Policy(jnp.float32, jnp.bfloat16, jnp.float32),
    ):
        with use_policy(policy):
            function(jnp.ones(2))
    assert len(traces) == 1


def test_a_change_of_the_global_policy_retraces():
    function, traces = _traced(jax.jit)
    for policy in ("bf16", "f16", "bf16"):
        set_policy(policy)
        function(jnp.ones(2))
    assert traces == [A, B]


def test_a_scope_rejects_float64_without_x64_before_it_is_entered():
    with pytest.raises(ValueError, match="x64 disabled"):
        use_policy("float32", {"head": "float64"})
    with pytest.raises(ValueError, match="x64 disabled"):
        set_policy("p=f32,r=f64")
    assert current_scope() == Scope()
    with jax.enable_x64(True), use_policy("float64"):
        assert current_policy() == get_policy("float64")


def test_a_program_is_traced_for_a_device_that_is_not_there():
    devices = {
        "v5e": types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite"),
        "h100": types.SimpleNamespace(platform="gpu", device_kind="H100", compute_capability="9.0"),
    }
    traces = []

    @jax.jit
    def run(x):
        policy = get_policy("p=f32,c=half,m=8bit")
        traces.append((policy.compute_dtype.name, policy.matmul and policy.matmul.text))
        return x

    run.trace(1.0)
    for name in ("v5e", "h100", "v5e"):
        with traced_for(devices[name]), use_policy(None):
            run.trace(1.0)
    with traced_for(jax.devices()[0]):
        run.trace(1.0)
    assert traces == [("float16", None), ("bfloat16", "i8"), ("float16", "f8")]
    assert current_scope().backend is None and half_dtype() == jnp.float16


def test_blocks_note_what_gave_the_policy_in_force_and_undo_it():
    assert str(current_scope().source) == "global"
    with use_policy("bf16"):
        assert str(current_scope().source) == "scope"
        # an equal scope: the note changes all the same
        with enter(current_scope(), Source("rule", "'a'")):
            assert str(current_scope().source) == "rule: 'a'"
            with enter(current_scope()):
                assert str(current_scope().source) == "rule: 'a'"
        assert str(current_scope().source) == "scope"
    assert str(current_scope().source) == "global"


@pytest.mark.slow
def test_what_is_inside_of_a_module_names_the_module_for_an_argument_and_the_rule_for_a_rule():
    argument, rule = Source("argument", "dtype_policy", own=True), Source("rule", "'a'", own=True)
    assert str(argument.for_those_inside("enc")) == "enclosing module: enc"
    assert str(rule.for_those_inside("enc")) == "rule: 'a'" and not rule.for_those_inside("enc").own
    overridden = Source("scope", dtypes="dtype=float32")
    assert str(overridden) == "argument: dtype=float32; else scope"
    assert str(overridden.for_those_inside("enc")) == "enclosing module: enc"


@pytest.mark.slow
def test_sources_are_equal_where_both_are_a_module_s_own_or_neither_is():
    assert Source("scope") == Source("global") and hash(Source("scope")) == hash(Source("global"))
    assert Source("argument", own=True) != Source("scope")


def test_a_block_around_a_jit_alone_is_told_whatever_obeyed_its_policy_before():
    with use_policy("bf16"):
        current_policy()
    with pytest.warns(DtypePolicyWarning, match=r"around jax\.jit alone"), use_policy("bf16"):
        step = jax.jit(lambda x: x + 1)
    with use_policy("bf16"):  # a cached program: says nothing
        step(jnp.float32(1))
        step(jnp.float32(1))

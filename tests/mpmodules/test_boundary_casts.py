"""Casts at a boundary, alike in both wings, and the scope inside of it."""

import jax
import jax.numpy as jnp
from flax import nnx

from mpmodules.calls.boundary import PLAIN, cast_outputs
from policy import get_policy
from policy.core.rules import PolicyRules
from policy.core.scope import Scope
from policy.programs.scope_names import BOUNDARY

MIXED, F32 = get_policy("mixed_bfloat16"), get_policy("f32")


def test_a_call_crosses_where_no_boundary_is_open_or_its_policy_differs():
    assert Scope(MIXED).crosses(MIXED)
    assert not Scope(MIXED, boundary_open=True).crosses(get_policy("p=f32,c=bf16,o=f32"))
    assert Scope(MIXED, boundary_open=True).crosses(F32)
    assert not Scope().crosses(None)


def test_inside_a_boundary_the_rules_stay_in_force():
    rules = PolicyRules({"a": "f32"})
    assert Scope(F32, rules).inside(MIXED) == Scope(MIXED, rules, boundary_open=True)


def _method(self, x, t, *rest, positions=None, **others):
    return x, t, rest, positions, others


def test_named_arguments_are_kept_wherever_they_stand():
    x = jnp.ones(2)
    args, kwargs = PLAIN.cast_inputs(
        MIXED,
        (x, x, x, [x]),
        {"positions": x, "other": {"deep": x}},
        keep=("t", "positions"),
        method=_method,
    )
    dtypes = [jax.tree.leaves(a)[0].dtype.name for a in args]
    assert dtypes == ["bfloat16", "float32", "bfloat16", "bfloat16"]
    assert kwargs["positions"] is x
    assert kwargs["other"]["deep"].dtype == jnp.bfloat16
    args, _ = PLAIN.cast_inputs(MIXED, (x, x, x), {}, keep=("rest",), method=_method)
    assert [a.dtype.name for a in args] == ["bfloat16", "bfloat16", "float32"]


def test_inputs_keep_casts_none():
    x = jnp.ones(2)
    kept = get_policy("c=bf16,inputs=keep")
    args, kwargs = PLAIN.cast_inputs(kept, (x,), {"y": x}, method=_method)
    assert args[0] is x and kwargs["y"] is x


def test_outputs_are_cast_and_references_handed_on():
    held = nnx.Param(jnp.ones(2, jnp.bfloat16))
    out = cast_outputs(MIXED, {"y": jnp.ones(2, jnp.bfloat16), "held": held})
    assert out["y"].dtype == jnp.float32 and out["held"] is held


def test_the_casts_carry_a_named_scope():
    def both(x):
        return cast_outputs(MIXED, PLAIN.cast_inputs(MIXED, (x,), {}, method=_method)[0])

    jaxpr = jax.make_jaxpr(both)(jnp.ones(2))
    casts = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "convert_element_type"]
    assert len(casts) == 2
    assert all(BOUNDARY in str(eqn.source_info.name_stack) for eqn in casts)

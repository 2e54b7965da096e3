"""The framework-free half of the boundary."""

import inspect

import jax
import jax.numpy as jnp

from policy import get_policy
from policy.core.boundary import cast_inputs, cast_outputs
from policy.programs.scope_names import BOUNDARY

MIXED = get_policy("mixed_bfloat16")


def _call(x, t, *rest, positions=None, **others):
    return x, t, rest, positions, others


def test_named_arguments_are_kept_wherever_they_stand():
    x = jnp.ones(2)
    args, kwargs = cast_inputs(
        MIXED,
        (x, x, x, [x]),
        {"positions": x, "other": {"deep": x}},
        keep=("t", "positions"),
        signature=lambda: inspect.signature(_call),
    )
    dtypes = [jax.tree.leaves(a)[0].dtype.name for a in args]
    assert dtypes == ["bfloat16", "float32", "bfloat16", "bfloat16"]
    assert kwargs["positions"] is x
    assert kwargs["other"]["deep"].dtype == jnp.bfloat16
    args, _ = cast_inputs(
        MIXED, (x, x, x), {}, keep=("rest",), signature=lambda: inspect.signature(_call)
    )
    assert [a.dtype.name for a in args] == ["bfloat16", "bfloat16", "float32"]


def test_inputs_keep_casts_none():
    x = jnp.ones(2)
    args, kwargs = cast_inputs(get_policy("c=bf16,inputs=keep"), (x,), {"y": x})
    assert args[0] is x and kwargs["y"] is x


def test_outputs_are_cast_and_references_handed_on():
    held = [jnp.ones(2, jnp.bfloat16)]
    out = cast_outputs(
        MIXED, {"y": jnp.ones(2, jnp.bfloat16), "held": held}, is_leaf=lambda x: x is held
    )
    assert out["y"].dtype == jnp.float32 and out["held"] is held


def test_the_casts_carry_a_named_scope():
    jaxpr = jax.make_jaxpr(lambda x: cast_outputs(MIXED, cast_inputs(MIXED, (x,), {})[0]))(
        jnp.ones(2)
    )
    casts = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "convert_element_type"]
    assert len(casts) == 2
    assert all(BOUNDARY in str(eqn.source_info.name_stack) for eqn in casts)

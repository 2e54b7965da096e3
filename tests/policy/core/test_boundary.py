"""The framework-free half of the boundary."""

import inspect

import jax
import jax.numpy as jnp

from policy import get_policy
from policy.core.boundary import cast_inputs, cast_outputs, inside, layer_crosses, module_crosses
from policy.core.rules import PolicyRules
from policy.core.scope import Scope
from policy.programs.scope_names import BOUNDARY

MIXED, F32 = get_policy("mixed_bfloat16"), get_policy("f32")


def test_a_module_crosses_where_none_is_open_or_its_policy_differs():
    assert module_crosses(Scope(MIXED), MIXED)
    assert not module_crosses(Scope(MIXED, boundary_open=True), get_policy("p=f32,c=bf16,o=f32"))
    assert module_crosses(Scope(MIXED, boundary_open=True), F32)
    assert not module_crosses(Scope(), None)


def test_a_bare_layer_crosses_only_by_a_policy_of_its_own():
    assert not layer_crosses(Scope(MIXED), MIXED, own=False)
    assert not layer_crosses(Scope(MIXED, boundary_open=True), MIXED, own=True)
    assert layer_crosses(Scope(MIXED), MIXED, own=True)  # no boundary is open yet
    assert layer_crosses(Scope(MIXED, boundary_open=True), F32, own=True)
    assert layer_crosses(Scope(), F32, own=True)
    assert not layer_crosses(Scope(), F32, own=False)


def test_inside_a_boundary_the_rules_stay_in_force():
    rules = PolicyRules({"a": "f32"})
    assert inside(Scope(F32, rules), MIXED) == Scope(MIXED, rules, boundary_open=True)


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
    assert [jax.tree.leaves(a)[0].dtype.name for a in args] == [
        "bfloat16",
        "float32",
        "bfloat16",
        "bfloat16",
    ]
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

"""The primitives that autocast rewrites the programs of, and the parameters of theirs that it
reads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from policy.autocasting.calls import HANDLERS
from policy.programs.primitives import CATEGORY_OF
from tests.policy.autocasting.models import SQUARE, normal

W, X = SQUARE, normal(4, 8)


def test_what_holds_programs_has_a_handler():
    control = {name for name, category in CATEGORY_OF.items() if category == "control"}
    aliases = {"pjit", "remat"}  # older names, which nothing traces any more
    assert set(HANDLERS) - aliases <= control
    assert control - set(HANDLERS) <= {"custom_jvp_call_jaxpr"}


# --------------------------------------------------------------------------------------------------
# The parameters that `policy.programs.control_flow` and `policy.autocast` read
# --------------------------------------------------------------------------------------------------


@jax.custom_jvp
def _jvp(x):
    return jnp.tanh(x)


_jvp.defjvp(lambda primals, tangents: (_jvp(*primals), tangents[0]))


@jax.custom_vjp
def _vjp(x):
    return jnp.tanh(x)


_vjp.defvjp(lambda x: (_vjp(x), None), lambda _, ct: (ct,))


def _mapped(x: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        jnp.tanh, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")
    )(x)


READ: dict[str, tuple[Any, set[str]]] = {
    "jit": (
        jax.jit(jnp.tanh),
        {"jaxpr", "in_shardings", "out_shardings", "donated_invars", "compiler_options_kvs"},
    ),
    "remat2": (jax.checkpoint(jnp.tanh), {"jaxpr", "policy", "prevent_cse", "differentiated"}),
    "scan": (
        lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x),
        {"jaxpr", "length", "reverse", "unroll"},
    ),
    "while": (
        lambda x: lax.while_loop(lambda c: c.sum() < 1.0, jnp.tanh, x),
        {"cond_jaxpr", "body_jaxpr", "cond_nconsts", "body_nconsts"},
    ),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.tanh, jnp.sin, x), {"branches"}),
    "custom_jvp_call": (_jvp, {"call_jaxpr"}),
    "custom_vjp_call": (_vjp, {"call_jaxpr", "num_consts"}),
    "shard_map": (_mapped, {"jaxpr", "mesh", "in_specs", "out_specs", "check_vma"}),
}


@pytest.mark.parametrize("name", READ)
def test_a_higher_order_primitive_has_the_parameters_that_are_read(name):
    fn, read = READ[name]
    jaxpr = jax.make_jaxpr(fn)(X)
    found = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == name]
    assert len(found) == 1, jaxpr
    assert read <= set(found[0].params)
    if name == "shard_map":
        assert {"newly_manual_axes", "manual_axes"} & set(found[0].params)
    params = found[0].primitive.get_bind_params(found[0].params)
    assert isinstance(params, dict)
    programs = [
        value
        for value in found[0].params.values()
        if hasattr(value, "eqns") or hasattr(value, "jaxpr")
    ]
    assert programs or name == "cond"


def test_a_platform_dependent_branch_says_so():
    jaxpr = jax.make_jaxpr(lambda x: lax.platform_dependent(x, cpu=jnp.tanh, default=jnp.sin))(X)
    conds = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "cond"]
    assert conds[0].params["branches_platforms"] is not None

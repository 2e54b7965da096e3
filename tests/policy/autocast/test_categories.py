"""The table of primitives against those of the installed JAX, and the parameters that autocast reads."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from policy._jaxpr.primitives import _TABLE, CATEGORIES, CATEGORY_OF, category_of
from policy.autocast.calls import HANDLERS
from tests.policy.autocast.models import SQUARE, normal

W, X = SQUARE, normal(4, 8)


def installed() -> set[str]:
    """The names of the primitives that JAX's public modules hold, of those that are loaded."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("jax.") and "._" not in name]
    found = [value for module in loaded for value in vars(module).values()]
    return {primitive.name for primitive in found if isinstance(primitive, jax.extend.core.Primitive)}


def test_every_primitive_of_jax_has_a_category():
    names = installed()
    assert len(names) > 150
    unknown = sorted(name for name in names if category_of(name) is None)
    assert unknown == []


def test_a_primitive_stands_in_the_table_once():
    names = [name for kinds in _TABLE.values() for names in kinds.values() for name in names.split()]
    assert len(names) == len(set(names)) == len(CATEGORY_OF)
    assert set(CATEGORIES) == {
        *("compute", "fp32", "promote", "passthrough"),
        *("explicit", "control", "opaque", "exempt"),
    }


def test_what_holds_programs_has_a_handler():
    control = {name for name, category in CATEGORY_OF.items() if category == "control"}
    aliases = {"pjit", "remat"}  # older names, which nothing traces any more
    assert set(HANDLERS) - aliases <= control
    assert control - set(HANDLERS) <= {"custom_jvp_call_jaxpr"}


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("dot_general", "compute"),
        ("conv_general_dilated", "compute"),
        ("ragged_dot_general", "compute"),
        ("exp", "fp32"),
        ("reduce_sum", "fp32"),
        ("scatter-add", "fp32"),
        ("psum", "fp32"),
        ("add", "promote"),
        ("select_n", "promote"),
        ("tanh", "passthrough"),
        ("reduce_max", "passthrough"),
        ("convert_element_type", "explicit"),
        ("scan", "control"),
        ("pallas_call", "opaque"),
        ("random_bits", "exempt"),
        ("never heard of", None),
    ],
)
def test_a_category_is(name, category):
    assert category_of(name) == category


# ---------------------------------------------------------------------------------------------------------------------
# The parameters that `policy._jaxpr.control_flow` and `policy.autocast` read
# ---------------------------------------------------------------------------------------------------------------------


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
    return jax.shard_map(jnp.tanh, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))(x)


READ: dict[str, tuple[Any, set[str]]] = {
    "jit": (jax.jit(jnp.tanh), {"jaxpr", "in_shardings", "out_shardings", "donated_invars", "compiler_options_kvs"}),
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
    programs = [value for value in found[0].params.values() if hasattr(value, "eqns") or hasattr(value, "jaxpr")]
    assert programs or name == "cond"


def test_a_platform_dependent_branch_says_so():
    jaxpr = jax.make_jaxpr(lambda x: lax.platform_dependent(x, cpu=jnp.tanh, default=jnp.sin))(X)
    conds = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "cond"]
    assert conds[0].params["branches_platforms"] is not None

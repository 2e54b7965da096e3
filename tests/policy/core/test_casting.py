"""Casts of trees touch floating arrays only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import cast_floating, cast_to_full, cast_to_half, get_policy, half_dtype
from policy.core.arrays import cast_array


def test_only_floating_arrays_are_cast():
    marker = object()
    tree = {
        "jax": jnp.ones(2),
        "numpy": np.ones(2),
        "scalar": np.float32(1),
        "abstract": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "integer": jnp.arange(2),
        "bool": jnp.array(True),
        "key": jax.random.key(0),
        "complex": jnp.ones(2, jnp.complex64),
        "python": 1.5,
        "none": None,
        "text": "x",
        "object": marker,
    }
    cast = cast_floating(tree, jnp.bfloat16)
    floating = {"jax", "numpy", "scalar", "abstract"}
    assert {name for name in tree if name != "none" and cast[name] is not tree[name]} == floating
    assert {cast[name].dtype for name in floating} == {jnp.dtype(jnp.bfloat16)}
    assert isinstance(cast["numpy"], np.ndarray) and cast["abstract"].shape == (2, 3)


def test_an_array_that_has_the_dtype_is_returned_as_it_is_and_a_weak_type_becomes_strong():
    x = jnp.ones(3, jnp.bfloat16)
    assert cast_array(x, jnp.bfloat16) is x
    assert not jax.make_jaxpr(lambda x: cast_array(x, jnp.bfloat16))(x).jaxpr.eqns
    weak = jnp.asarray(1.5)
    assert weak.weak_type and not cast_array(weak, jnp.float32).weak_type


def test_complex_arrays_are_cast_where_asked():
    z = jnp.ones(2, jnp.complex64)
    assert cast_floating(z, jnp.bfloat16) is z
    assert cast_floating(z, jnp.bfloat16, complex_too=True).dtype == jnp.complex64
    with jax.enable_x64(True):
        assert cast_floating(z, jnp.float64, complex_too=True).dtype == jnp.complex128


def test_the_walk_stops_where_it_is_told_to_and_an_empty_tree_stays_empty():
    held = [jnp.ones(2)]
    cast = cast_floating({"a": held, "b": jnp.ones(2)}, jnp.bfloat16, is_leaf=lambda x: x is held)
    assert cast["a"] is held and cast["b"].dtype == jnp.bfloat16
    assert cast_floating({}, jnp.bfloat16) == {} and cast_floating(None, jnp.bfloat16) is None


def test_the_names_of_jmp_cast_to_full_and_half():
    tree = {"h": jnp.ones(2, half_dtype()), "f": jnp.ones(2), "i": jnp.arange(2)}
    full = {name: x.dtype.name for name, x in cast_to_full(tree).items()}
    assert full == {"h": "float32", "f": "float32", "i": "int32"}
    assert {cast_to_half(tree)[name].dtype for name in "hf"} == {half_dtype()}
    policy = get_policy("p=f32,c=bf16,o=f16")
    assert policy.cast_to_param(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32
    assert policy.cast_to_compute(jnp.ones(2)).dtype == jnp.bfloat16
    assert policy.cast_to_output(jnp.ones(2)).dtype == jnp.float16


@pytest.mark.slow
def test_float64_is_rejected_when_used_without_x64_and_not_before():
    policy = get_policy("float64")
    told = "asks for float64, but JAX runs with x64 disabled.*jax_enable_x64"
    with pytest.raises(ValueError, match=told):
        policy.cast_to_compute(jnp.ones(2))
    with jax.enable_x64(True):
        assert policy.cast_to_compute(jnp.ones(2, jnp.float32)).dtype == jnp.float64

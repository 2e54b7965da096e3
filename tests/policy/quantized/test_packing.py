"""Packed codes: round trips bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from policy.core.param_formats import NF4
from policy.quantized.codes import numbers


def is_same(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(tree) == jax.tree.structure(other) and all(
        one.dtype == two.dtype and bool((one == two).all()) for one, two in pairs
    )


@pytest.mark.parametrize("stored", ["int8", "int8:32", "float8", "int4:32", "nf4"])
@pytest.mark.parametrize(
    ("name", "shape"), [("dense", (64, 6)), ("scanned", (2, 64, 6)), ("query", (64, 3, 2))]
)
def test_codes_come_back_bit_for_bit(stored, name, shape):
    def quantised(kernel):
        params = {name: {"kernel": kernel, "bias": kernel[0, 0]}}
        return policy.quantize_params(params, f"params={stored}")

    params = quantised(jax.random.normal(jax.random.key(0), shape))
    packed, kernel = policy.pack_params(params), params[name]["kernel"]
    assert {leaf.dtype.name for leaf in packed[name]["kernel"].values()} <= {
        *("uint8", "int8", "bfloat16"),
    }
    assert sum(leaf.nbytes for leaf in packed[name]["kernel"].values()) == kernel.nbytes
    like = jax.eval_shape(quantised, jax.ShapeDtypeStruct(shape, jnp.float32))
    written = jax.tree.map(np.asarray, packed)  # as a file's reader returns it
    restored = jax.tree.map(jnp.asarray, policy.unpack_params(written, like))
    assert is_same(restored, params)


def test_codes_of_another_format_are_refused_by_name():
    packed = policy.pack_params(policy.quantize_params({"w": jnp.ones((64, 4))}, "params=int8"))
    like = policy.quantize_params({"w": jnp.ones((64, 4))}, "params=nf4")
    message = r"parameter 'w' in nf4 should be uint8\(1, 32, 4\), but got int8\(64, 4\)"
    with pytest.raises(ValueError, match=message):
        policy.unpack_params(packed, like)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_table_is_looked_up_exactly_in_the_dtype_read(dtype):
    found = numbers(jnp.arange(16).astype(jnp.uint4), "nf4", dtype)
    held = np.asarray(NF4, jnp.bfloat16 if dtype == jnp.bfloat16 else np.float32)
    np.testing.assert_array_equal(found, held.astype(np.float32))

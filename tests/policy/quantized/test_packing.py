"""Packed codes: round trips bit for bit."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import mpmodules  # noqa: F401
import policy
from policy import QuantizedArray
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
    written = packed[name]["kernel"]
    assert written["codes"].nbytes + written["scales"].nbytes == kernel.nbytes
    like = jax.eval_shape(quantised, jax.ShapeDtypeStruct(shape, jnp.float32))
    written = jax.tree.map(np.asarray, packed)  # as a file's reader returns it
    restored = jax.tree.map(jnp.asarray, policy.unpack_params(written, like))
    assert is_same(restored, params)


FORMATS = ("int8", "int8:32", "float8", "int4:32", "int4:16", "uint4:32", "nf4:32")


def kernel_in(text, axis=-2):
    kernel = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64)
    return QuantizedArray.of(kernel, text, axis=axis)


@pytest.mark.parametrize("saved", FORMATS)
@pytest.mark.parametrize("wanted", FORMATS)
def test_files_of_another_format_are_rejected_by_name(saved, wanted):
    packed = {"w": policy.pack_params(kernel_in(saved))}
    like = {"w": kernel_in(wanted)}
    state: Any = serialization.msgpack_restore(serialization.to_bytes({"w": kernel_in(saved)}))
    for read in (
        lambda: policy.unpack_params(packed, like),
        lambda: serialization.from_state_dict(like, state),
    ):
        if saved == wanted:
            assert is_same(read(), like)
        else:
            with pytest.raises(ValueError, match=f"saved as {saved} along.*into {wanted} along"):
                read()


def of_scales(change):
    return lambda packed: packed | {"scales": change(packed["scales"])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_scales(lambda x: x[:1]), r"scales of parameter 'w' in int4:32 should be bfloat16\(2"),
        (of_scales(lambda x: x.astype(jnp.float32)), "scales of .* but got float32"),
        (lambda packed: packed | {"codes": packed["codes"][:1]}, r"codes of .* got uint8\(1, 16"),
        (lambda packed: {key: packed[key] for key in ("codes", "scales")}, "from a dict of codes"),
        (lambda packed: packed["codes"], "restored from Array"),
        (lambda _: policy.pack_params(kernel_in("int4:32", -1)), "saved as int4:32 along axis -1"),
    ],
)
def test_what_is_no_such_dict_is_rejected(change, message):
    stored = kernel_in("int4:32")
    with pytest.raises(ValueError, match=message):
        policy.unpack_params({"w": change(policy.pack_params(stored))}, {"w": stored})


def test_a_packed_dict_is_no_array():
    packed = {"w": policy.pack_params(kernel_in("int8"))}
    with pytest.raises(ValueError, match="'w', in no format of 8 or 4 bits, can't be restored"):
        policy.unpack_params(packed, {"w": jnp.ones((64, 64))})


def test_orbax_rejects_another_format_and_pickles_tell_it(tmp_path):
    stored, other = {"w": kernel_in("int4:32")}, {"w": kernel_in("uint4:32")}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", policy.pack_params(stored))
    for like in (stored, {"w": kernel_in("nf4:32")}):
        with ocp.StandardCheckpointer() as checkpointer:
            packed = checkpointer.restore(tmp_path / "params", policy.pack_params(like))
        if like is stored:
            assert is_same(policy.unpack_params(packed, like), stored)
        else:
            with pytest.raises(ValueError, match=r"saved as int4:32 along.*into nf4:32"):
                policy.unpack_params(packed, like)
    assert is_same(pickle.loads(pickle.dumps(other)), other)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_table_is_looked_up_exactly_in_the_dtype_read(dtype):
    found = numbers(jnp.arange(16).astype(jnp.uint4), "nf4", dtype)
    held = np.asarray(NF4, jnp.bfloat16 if dtype == jnp.bfloat16 else np.float32)
    np.testing.assert_array_equal(found, held.astype(np.float32))

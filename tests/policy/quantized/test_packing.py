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
from policy.core.param_formats import NF4
from policy.quantized import QuantizedArray, pack_params, quantize_params, unpack_params


def is_same(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(tree) == jax.tree.structure(other) and all(
        one.dtype == two.dtype and bool((one == two).all()) for one, two in pairs
    )


@pytest.mark.cases(fast=1, slow=12)
@pytest.mark.parametrize("stored", ["int8", "int8:32", "float8", "int4:32", "nf4"])
@pytest.mark.parametrize(
    ("name", "shape"), [("dense", (64, 6)), ("scanned", (2, 64, 6)), ("query", (64, 3, 2))]
)
def test_codes_come_back_bit_for_bit(stored, name, shape):
    def quantized(kernel):
        params = {name: {"kernel": kernel, "bias": kernel[0, 0]}}
        return quantize_params(params, f"params={stored}")

    params = quantized(jax.random.normal(jax.random.key(0), shape))
    packed, kernel = pack_params(params), params[name]["kernel"]
    written = packed[name]["kernel"]
    assert {leaf.dtype.name for leaf in written.values()} <= {"uint8", "int8", "bfloat16"}
    assert sum(leaf.nbytes for leaf in written.values()) == kernel.nbytes
    like = jax.eval_shape(quantized, jax.ShapeDtypeStruct(shape, jnp.float32))
    written = jax.tree.map(np.asarray, packed)  # as a file's reader returns it
    restored = jax.tree.map(jnp.asarray, unpack_params(written, like))
    assert is_same(restored, params)


FORMATS = ("int8", "int8:32", "float8", "int4:32", "int4:16", "uint4:32", "nf4:32")


def kernel_in(text, axis=-2):
    kernel = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64)
    return QuantizedArray.of(kernel, text, axis=axis)


@pytest.mark.parametrize("saved", FORMATS)
@pytest.mark.parametrize("wanted", FORMATS)
def test_files_of_another_format_are_rejected_by_name(saved, wanted):
    packed = {"w": pack_params(kernel_in(saved))}
    like, name = {"w": kernel_in(wanted)}, saved.split(":")[0]
    state: Any = serialization.msgpack_restore(serialization.to_bytes({"w": kernel_in(saved)}))
    for read in (
        lambda: unpack_params(packed, like),
        lambda: serialization.from_state_dict(like, state),
    ):
        if saved == wanted:
            assert is_same(read(), like)
        else:
            with pytest.raises(ValueError, match=rf" in {wanted} along .* saved as .*\b{name} "):
                read()


def of_scales(change):
    return lambda packed: packed | {"scales": change(packed["scales"])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            of_scales(lambda x: x[0]),
            r"in int4:32 .* scales bfloat16\[1, 2, .*, scales bfloat16\[2,",
        ),
        (of_scales(lambda x: x.astype(jnp.float32)), r"saved as .*, scales float32\[1, 2, 64\]"),
        (lambda packed: packed | {"int4": packed["int4"][:1]}, r"saved as int4 uint8\[1, 16"),
        (lambda packed: {"int4": packed["int4"]}, r"saved as int4 uint8\[2, 16, 64\]:"),
        (lambda packed: packed["int4"], r"saved as uint8\["),
        (
            lambda _: pack_params(kernel_in("int4:32", -1)),
            r"saved as int4 uint8\[64, 2, 16",
        ),
    ],
)
def test_what_is_no_such_dict_is_rejected(change, message):
    stored = kernel_in("int4:32")
    with pytest.raises(ValueError, match=message):
        unpack_params({"w": change(pack_params(stored))}, {"w": stored})


def test_a_packed_dict_is_no_array():
    packed = {"w": pack_params(kernel_in("int8"))}
    with pytest.raises(
        ValueError, match=r"'w' should be float32\[64, 64\], but was saved as int8 int8"
    ):
        unpack_params(packed, {"w": jnp.ones((64, 64))})


def test_orbax_rejects_another_format_and_pickles_tell_it(tmp_path):
    stored, other = {"w": kernel_in("int4:32")}, {"w": kernel_in("uint4:32")}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", pack_params(stored))
    with ocp.StandardCheckpointer() as checkpointer:
        packed = checkpointer.restore(tmp_path / "params", pack_params(stored))
    assert is_same(unpack_params(packed, stored), stored)
    for text in ("nf4:32", "uint4:32"):
        with (
            ocp.StandardCheckpointer() as checkpointer,
            pytest.raises(ValueError, match=rf"(?s)w.int4.*w.{text[:-3]}"),
        ):
            checkpointer.restore(tmp_path / "params", pack_params({"w": kernel_in(text)}))
    with ocp.StandardCheckpointer() as checkpointer:  # as a tree, without pack_params
        checkpointer.save(tmp_path / "tree", {"w": kernel_in("int8")})
        checkpointer.wait_until_finished()
        with pytest.raises(ValueError, match=r"(?s)float8.*int8"):
            checkpointer.restore(tmp_path / "tree", {"w": kernel_in("float8")})
    assert is_same(pickle.loads(pickle.dumps(other)), other)


@pytest.mark.parametrize("stored", ["int8", "float8", "int4:32", "uint4:32", "nf4"])
def test_arrays_without_numbers(stored):
    array = QuantizedArray.of(jnp.zeros((64, 0)), stored)
    assert array.widened().shape == (64, 0)
    assert unpack_params(pack_params(array), array).shape == (
        64,
        0,
    )


def test_the_table_of_nf4_is_the_published_one():
    """Dettmers et al., QLoRA (arXiv:2305.14314), appendix E."""
    lower = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
    lower += (-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
    upper = (0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    upper += (0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
    np.testing.assert_array_equal(
        np.asarray(NF4, np.float32), np.asarray(lower + upper, np.float32)
    )

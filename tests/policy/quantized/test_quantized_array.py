"""Arrays stored as codes and scales, beside NumPy."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy
from policy.core.param_formats import ParamFormat, format_of
from policy.quantized import QuantizedArray, products

FORMATS = ("int8", "int8:32", "float8", "float8:32", "int4:32", "int4:16", "nf4:32")

NIBBLES = np.arange(64 * 8).reshape(64, 8) % 16


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.cases(fast=1, slow=9)
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(
    ("shape", "weight", "numbers"),
    [
        ((5, 64), (64, 8), (((1,), (0,)), ((), ()))),
        ((64, 5), (64, 8), (((0,), (0,)), ((), ()))),
        ((2, 3, 8), (64, 8), (((2,), (1,)), ((), ()))),
        ((2, 3, 2, 64), (2, 64, 8), (((2, 3), (0, 1)), ((), ()))),
        ((3, 64, 2), (2, 64, 8), (((1, 2), (1, 0)), ((), ()))),
        ((2, 3, 64), (2, 64, 8), (((2,), (1,)), ((0,), (0,)))),
        ((8, 3), (64, 8), (((0,), (1,)), ((), ()))),
    ],
)
def test_matmuls_are_those_of_the_widened_array(text, shape, weight, numbers):
    x, stored = jnp.asarray(normal(*shape)), QuantizedArray.of(jnp.asarray(normal(*weight)), text)
    wide = stored.widened()

    def plain(x):
        return jax.lax.dot_general(x, wide, numbers)

    def of_codes(x):
        return products.dot_general(x, stored, numbers)

    np.testing.assert_allclose(of_codes(x), plain(x), rtol=1e-5, atol=1e-5)
    pull, ours = jax.vjp(plain, x)[1], jax.vjp(of_codes, x)[1]
    y = jnp.asarray(normal(*plain(x).shape))
    np.testing.assert_allclose(ours(y)[0], pull(y)[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        *(jax.jvp(f, (x,), (x,))[1] for f in (of_codes, plain)), rtol=1e-5, atol=1e-5
    )
    # the codes at the left
    (of_x, of_w), (batch_x, batch_w) = numbers
    swapped = (of_w, of_x), (batch_w, batch_x)
    np.testing.assert_allclose(
        products.dot_general(stored, x, swapped),
        jax.lax.dot_general(wide, x, swapped),
        rtol=1e-5,
        atol=1e-5,
    )


def test_kernels_of_several_features():
    stored = QuantizedArray.of(jnp.asarray(normal(64, 2, 8)), "int4:32", axis=0)
    assert stored.codes.shape == (2, 32, 16) and stored.shape == (64, 2, 8)
    x = jnp.asarray(normal(3, 64))
    y = products.dot_general(x, stored, (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(y, jnp.einsum("bi,ihf->bhf", x, stored.widened()), atol=1e-5)
    # no matmul: a name stands in one operand alone
    y = products.bilinear_of_codes(functools.partial(jnp.einsum, "bi,ihf->bh"), x, stored)
    np.testing.assert_allclose(y, jnp.einsum("bi,ihf->bh", x, stored.widened()), atol=1e-4)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("text", "axis"), [("int8", -1), ("int8", 0), ("int4:32", 0), ("nf4:32", 1), ("int8", -2)]
)
def test_rows_are_looked_up(text, axis):
    stored = QuantizedArray.of(jnp.asarray(normal(64, 32)), text, axis=axis)
    tokens = jnp.array([[0, 3], [63, -1]])
    np.testing.assert_array_equal(
        products.rows(stored, tokens), jnp.take(stored.widened(), tokens, axis=0)
    )
    # beyond the table, as jnp.take
    assert bool(jnp.isnan(products.rows(stored, jnp.array([64]))).all())


def test_mapped_scanned_and_sliced():
    kernels = jnp.asarray(normal(3, 64, 64))
    stored, x = QuantizedArray.of(kernels, "int4:32"), jnp.asarray(normal(64))
    wide, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stored.widened())

    def step(x, w):
        return jnp.tanh(products.dot_general(x, w, (((0,), (0,)), ((), ())))), None

    np.testing.assert_allclose(jax.lax.scan(step, x, stored)[0], wide, atol=1e-5)
    mapped = jax.vmap(lambda w: step(x, w)[0])(stored)
    each = [jnp.tanh(x @ w) for w in stored.widened()]
    np.testing.assert_allclose(mapped, jnp.stack(each), atol=1e-5)


def test_it_converts_where_an_array_is_wanted():
    stored = QuantizedArray.of(jnp.asarray(normal(64, 32)), "int8")
    x = jnp.asarray(normal(4, 64))
    array: Any = stored  # what JAX takes at run time
    for y in (x @ array, jnp.einsum("bi,io->bo", x, array), jnp.dot(x, array)):
        np.testing.assert_array_equal(y, x @ stored.widened())
    assert stored[...] is stored and stored[0].shape == (32,)
    assert np.asarray(stored).dtype == np.float32
    assert repr(stored) == "QuantizedArray('int8', (64, 32), float32)"
    again = pickle.loads(pickle.dumps(stored))
    np.testing.assert_array_equal(again.codes, stored.codes)


def test_formats():
    assert [format_of(text) for text in ("int8", jnp.int8, "i4", "nf4")] == [
        *(ParamFormat("int8"), ParamFormat("int8")),
        *(ParamFormat("int4", 32), ParamFormat("nf4", 64)),
    ]
    assert format_of("bf16") is None and format_of(jnp.float32) is None
    for text in ("int4:0", "nf4:7", "int8:x", "int8:"):
        with pytest.raises(ValueError, match="size of a block"):
            format_of(text)
    with pytest.raises(ValueError, match="no multiple of 32"):
        QuantizedArray.of(jnp.ones((40, 2)), "int4:32")
    with pytest.raises(ValueError, match="int4"):
        QuantizedArray.of(jnp.ones((64, 2)), "int2")


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("text", ["params=int4:32,compute=bfloat16,output=float32", "params=nf4"])
def test_texts_of_policies(text):
    held = policy.get_policy(text)
    assert policy.get_policy(str(held)) == held == policy.get_policy(held.short)
    assert held.param_format is not None and held.param_dtype == np.float32
    assert held.replace(output_dtype="f32").param_format == held.param_format
    assert held.replace(param_dtype="bf16").param_format is None
    assert policy.Policy(jnp.int8, "bf16", "bf16").param_format == ParamFormat("int8")
    with pytest.raises(ValueError, match="quantize_params"):
        held.cast_to_param({"kernel": jnp.ones((64, 2))})


# --------------------------------------------------------------------------------------------------
# As an array, and what it rejects
# --------------------------------------------------------------------------------------------------

OPERATIONS = {
    "w * 2": lambda w: w * 2,
    "2 - w": lambda w: 2 - w,
    "1 / (w + 9)": lambda w: 1 / (w + 9),
    "2.0 ** w": lambda w: 2.0**w,
    "w % 0.3": lambda w: w % 0.3,
    "w @ x": lambda w: w @ jnp.ones((64, 3)),
    "NumPy @ w": lambda w: np.ones((3, 64), np.float32) @ w,
    "NumPy * w": lambda w: np.float32(2) * w,
    "w + w": lambda w: w + w,
    "-w": lambda w: -w,
    "abs": abs,
    "w > 0": lambda w: w > 0,
    "w == w": lambda w: w == w,
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "reshape": lambda w: w.reshape(-1, 4),
    "sum": lambda w: w.sum(0),
    "at": lambda w: w.at[0].set(1.0),
    "rows": lambda w: jnp.stack(list(w)[: len(w) - 1]),
    "astype": lambda w: w.astype(jnp.int32),
    "stack": lambda w: jnp.stack([w, w]),
}


@pytest.mark.parametrize("run", [jax.jit, lambda function: function])
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_computes_as_the_upcast_array(name, run):
    stored = QuantizedArray.of(jnp.asarray(normal(64, 64)), "int4:32")
    y, expected = (run(OPERATIONS[name])(w) for w in (stored, stored.widened()))
    assert isinstance(y, jax.Array) and y.dtype == expected.dtype
    np.testing.assert_array_equal(y, expected)


def test_what_frameworks_probe_for_it_has_not():
    stored = QuantizedArray.of(jnp.ones((64, 4)), "int8")
    for name in ("value", "sharding", "aval", "weak_type", "is_fully_addressable", "copy"):
        assert not hasattr(stored, name)
    with pytest.raises(ValueError, match="truth value of an array"):
        bool(stored)
    mask = jax.tree.map(lambda _: True, stored)
    assert mask == mask and not hasattr(mask, "shape") and not hasattr(mask, "T")
    for leaf in (None, object(), jax.ShapeDtypeStruct((2,), jnp.float32)):
        assert jax.tree.unflatten(jax.tree.structure(stored), [leaf, leaf]).codes is leaf


@pytest.mark.parametrize("text", ["int8", "float8", "int4:32", "uint4:32", "nf4:32"])
def test_arithmetic_on_leaves_is_rejected(text):
    stored = QuantizedArray.of(jnp.asarray(normal(64, 8)), text)
    half = lambda params: jax.tree.map(lambda x: x * jnp.asarray(0.5, jnp.float32), params)  # noqa: E731
    calls: Any = (half, jax.jit(half), lambda w: jax.tree.map(lambda x: x.astype(jnp.float32), w))
    with jax.numpy_dtype_promotion("standard"):
        for call in calls if "4" not in text else calls[2:]:  # JAX promotes no 4-bit integers
            with pytest.raises(ValueError, match=rf"{text} along .* of float32.*dequantize_params"):
                call(stored)
        with pytest.raises((ValueError, TypeError)):
            optax.tree.norm({"w": stored})
        with pytest.raises((ValueError, TypeError)):
            optax.incremental_update({"w": stored}, {"w": stored}, 0.5)
    found = jax.tree.map(lambda x: x == x, stored)  # a tree of masks
    with pytest.raises(ValueError, match="values of bool"):
        found.widened()


@pytest.mark.parametrize("axis", [1, 2, -1, -2, -3])
@pytest.mark.parametrize(("text", "count"), [("int4:32", 2), ("uint4:32", 2), ("int8", 64)])
def test_mapped_along_another_axis_is_rejected(text, count, axis):
    """Also of as many stacked matrices as one has blocks, or rows and columns."""
    for stack in (count, 3):
        stored = QuantizedArray.of(jnp.asarray(normal(stack, 64, 64)), text)
        wide = jax.vmap(lambda w: w.widened())(stored)
        np.testing.assert_array_equal(wide, stored.widened())
        if axis != -stored.codes.ndim or text == "uint4:32":
            with pytest.raises(ValueError, match=r"(?s)in_axes=0|inconsistent sizes.*scales"):
                jax.vmap(lambda w: w.widened(), in_axes=axis)(stored)
        else:
            mapped = jax.vmap(lambda w: w.widened(), in_axes=axis)(stored)
            np.testing.assert_array_equal(mapped, wide)
        if axis > 0:
            with pytest.raises(ValueError, match="out_axes=0"):
                jax.vmap(lambda w: w, out_axes=axis)(stored)


def test_leaves_of_another_array_are_rejected():
    w = jnp.asarray(normal(64, 64))
    rows, columns = (QuantizedArray.of(w, "int8", axis=axis) for axis in (-1, -2))
    with pytest.raises(ValueError, match=r"scales of shape \(64, 1\)"):
        jax.tree.unflatten(jax.tree.structure(columns), jax.tree.leaves(rows))
    integers, table = (QuantizedArray.of(w, text) for text in ("uint4:32", "nf4:32"))
    with pytest.raises(ValueError, match=r"nf4:32 along .* scales of shape \(1, 2, 2, 64\)"):
        jax.tree.unflatten(jax.tree.structure(table), jax.tree.leaves(integers))


BLOCKS = ("int8", "int8:32", "float8", "int4:32", "uint4:32", "nf4:32")


@pytest.mark.parametrize("text", BLOCKS)
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_is_nan(text, number):
    x = normal(64, 4)
    x[40, 1] = number
    y = np.array(jax.jit(lambda x: QuantizedArray.of(x, text).widened())(x))
    block = slice(32 if ":" in text else 0, 64)
    assert np.isnan(y[block, 1]).all()
    y[block, 1] = 0
    assert np.isfinite(y).all()


@pytest.mark.parametrize("text", BLOCKS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_the_largest_finite_numbers_stay_finite(text, dtype):
    largest = min(float(jnp.finfo(dtype).max), 2.0**125 if "nf4" in text else np.inf)
    for pair in ((1, 0), (-1, 0), (1, 1), (-1, -1), (1, 0.5), (1, -1), (-0.4, 0.5)):
        if text == "uint4:32" and pair == (1, -1) and dtype != jnp.float16:
            continue  # they are further apart than the largest float32
        x = np.tile(np.array(pair) * largest, 32)[:, None].astype(dtype)
        y = np.asarray(QuantizedArray.of(x, text), np.float64) / largest
        np.testing.assert_allclose(y, np.asarray(x, np.float64) / largest, rtol=0, atol=0.14)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda w: QuantizedArray.of(w.astype(jnp.int32), "int8"), TypeError, "floating.*int32"),
        (
            lambda w: QuantizedArray.of(w.astype(complex), "nf4:32"),
            TypeError,
            "floating.*complex64",
        ),
        (lambda w: QuantizedArray.of(w.astype(jnp.float8_e5m2), "int8"), TypeError, "16 bits or"),
        (lambda w: QuantizedArray.of(w[:0], "int8"), ValueError, "is empty"),
        (lambda w: QuantizedArray.of(w, "int8", axis=5), ValueError, "has no axis 5"),
        (lambda w: QuantizedArray.of(w[0, 0], "int8"), ValueError, "has no axis -2"),
        (lambda w: QuantizedArray.of(w, "int8", scale_dtype=jnp.int8), TypeError, "scale_dtype"),
        (lambda w: QuantizedArray.of(w, "int8").astype(float), ValueError, "x64"),
        (lambda w: QuantizedArray.of(w, "int3"), ValueError, "int4:32, uint4:32, nf4:64"),
    ],
)
def test_what_is_no_floating_array_is_rejected(make, error, words):
    with pytest.raises(error, match=words):
        make(jnp.ones((64, 4)))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({}, ValueError, "int4:32.*-8 to 7, but got int64 from 0.0 to 15.0.*8 of GGUF's Q4_0"),
        ({"format": "nf4:32", "codes": NIBBLES - 1}, ValueError, "0 to 15, but got .* -1.0"),
        ({"format": "nf4:32", "codes": NIBBLES + 0.5}, ValueError, "numbers of uint4"),
        ({"format": "nf4:32", "codes": NIBBLES + 2**32}, ValueError, "numbers of uint4"),
        ({"format": "int8:32", "codes": NIBBLES + 250}, ValueError, "-128 to 127"),
        ({"format": "float8:32", "codes": NIBBLES * 100.0}, ValueError, "-448.0 to 448.0"),
        ({"codes": NIBBLES + 0j}, TypeError, "real numbers, but got complex128"),
        ({"codes": NIBBLES > 1}, TypeError, "real numbers, but got bool"),
        ({"axis": 5}, ValueError, "has no axis 5"),
        ({"scales": np.ones((2, 8), int)}, TypeError, "scales should be floating"),
        ({"dtype": jnp.int32}, TypeError, "dtype should be floating, .* but got int32"),
    ],
)
def test_values_that_a_format_has_not_are_rejected(change, error, words):
    given = {"codes": NIBBLES, "scales": np.ones((2, 8), np.float32), "format": "int4:32"}
    for run in (lambda make: make(), jax.jit(lambda make: make(), static_argnums=0)):
        with pytest.raises(error, match=words):
            run(lambda: QuantizedArray.of_codes(**given | change).widened())


def test_traced_values_have_the_dtype_of_the_format():
    def read(codes):
        return QuantizedArray.of_codes(codes, jnp.ones((2, 8)), "int4:32").widened()

    np.testing.assert_array_equal(jax.jit(read)(jnp.full((64, 8), -8, jnp.int4)), -8)
    with pytest.raises(TypeError, match="range is not known, should be int4, but got int32"):
        jax.jit(read)(jnp.full((64, 8), 8))


@pytest.mark.parametrize("text", ["int8", "int8:16", "int4:16"])
@pytest.mark.parametrize("spec", [("d",), (None, "d")])
def test_devices_upcast_their_parts(text, spec):
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=axes)
    stored = QuantizedArray.of(jnp.ones((64, 8)), text)
    is_blocked = text != "int8"
    of_values = (None, *spec) if is_blocked and len(spec) == 2 else spec
    of_scales = (None, *spec) if is_blocked else (None, *spec[1:])
    values, scales = (jax.sharding.PartitionSpec(*each) for each in (of_values, of_scales))
    part = jax.shard_map(
        lambda w: w.widened(),
        mesh=mesh,
        in_specs=(QuantizedArray(values, scales, stored.layout),),
        out_specs=jax.sharding.PartitionSpec(*spec),
    )
    assert jax.eval_shape(part, stored).shape == (64, 8)

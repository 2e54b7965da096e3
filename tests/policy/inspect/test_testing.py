"""The assertions for users' test suites: each finds its planted fault, names it, and rejects to
assert nothing.
"""

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

from mpmodules import linen as nn
from mpmodules import nnx
from policy.testing import (
    assert_close_in_ulps,
    assert_dots_in,
    assert_no_silent_promotion,
    assert_params_keep_dtype,
    assert_reductions_in,
    assert_same_program,
)

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def half(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def full(*shape):
    return jax.ShapeDtypeStruct(shape, F32)


class Pooled(flax_nn.Module):
    """A dot in bf16, a pool that sums in bf16, and a head in float32."""

    @flax_nn.compact
    def __call__(self, x):
        x = flax_nn.Dense(8, dtype=BF16, name="up")(x)
        with jax.named_scope("pool"):
            window = (1, 2, 1)
            x = lax.reduce_window(x, np.zeros((), x.dtype), lax.add, window, window, "VALID")
        return flax_nn.Dense(3, dtype=F32, name="head")(x)


X = half(2, 4, 8)


@pytest.fixture(scope="module")
def pooled():
    model = Pooled()
    return model.apply, (jax.eval_shape(model.init, jax.random.key(0), X), X)


def fails(message):
    return pytest.raises(AssertionError, match=message)


# --- reductions -----------------------------------------------------------------------------------


def test_a_sum_in_half_is_named_with_its_path_dtype_and_line(pooled):
    with fails(
        r"1 operation should be summed in float32:\n"
        r"  reduce_window_sum at 'pool' in bfloat16: \S+\.py:\d+ \(.+\)"
    ):
        assert_reductions_in(*pooled, dtype="f32")
    assert_reductions_in(*pooled, dtype=("bf16", F32))
    with fails(r"reduce_sum at 'up' in bfloat16, backward: test_testing.py:\d+"):
        assert_reductions_in(*pooled, dtype=F32, backward=True, allow=("pool",))


def total(x):
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, (0,))


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (jax.checkpoint(total), half(4)),
        (lambda x: lax.scan(lambda c, row: (c, total(row)), 0, x)[1], half(3, 4)),
        (lambda x: lax.cond(x[0] > 0, total, lambda x: x[1], x), half(4)),
        (lambda x: jnp.cumsum(x), half(4, dtype=F16)),
        (lambda x: jnp.zeros(4, x.dtype).at[jnp.array([0, 0])].add(x), half(2)),
        (
            jax.jit(lambda x: jax.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)),
            half(2, dtype=F16),
        ),
    ],
)
def test_sums_inside_of_loops_branches_and_checkpoints_are_found(fn, x):
    with fails(r"1 operation should be summed in float32:\n  .* outside of any module"):
        assert_reductions_in(fn, (x,), F32)


def test_sums_of_one_number_and_of_integers_and_maxima_are_no_sums():
    def fn(x):
        one = lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None)
        unique = jnp.zeros(4, x.dtype).at[jnp.array([0, 1])].add(x[0, :2], unique_indices=True)
        jnp.cumsum(x)  # which nothing depends on: XLA leaves it out
        return one, unique, x.max(), jnp.argmax(x), jnp.cumsum(jnp.arange(4))

    with fails("The program has no sum of floating numbers: nothing would be asserted"):
        assert_reductions_in(fn, (half(1, 4),), "f32")


# --- dots -----------------------------------------------------------------------------------------


def test_a_dot_in_another_dtype_is_named_with_its_path_dtypes_and_line(pooled):
    with fails(
        r"1 operation should multiply bfloat16:\n  dot_general at 'head' in float32, float32: "
        r"test_testing.py:\d+ \(Pooled.__call__\)"
    ):
        assert_dots_in(*pooled, dtype="bf16")
    assert_dots_in(*pooled, dtype=(BF16, F32))


def test_what_dots_declare_to_accumulate_in_is_asserted_on_demand(pooled):
    assert_dots_in(*pooled, dtype="bf16", accumulation="backend", allow=("head",))
    with fails(r"should accumulate in float32:\n  dot_general at 'up' in backend"):
        assert_dots_in(*pooled, dtype="bf16", accumulation="f32", allow=("head",))
    accumulating = lambda x, w: lax.dot(x, w, preferred_element_type=F32)  # noqa: E731
    assert_dots_in(accumulating, (half(2, 4), half(4, 3)), "bf16", accumulation=F32)
    with fails(r"2 operations .*\n.*float32, bfloat16, backward"):
        assert_dots_in(accumulating, (half(2, 4), half(4, 3)), "bf16", backward=True)


def test_eight_bit_dots_and_convolutions_are_dots_and_integer_ones_are_not():
    x, w = half(2, 4, dtype=jnp.float8_e4m3fn), half(4, 3, dtype=jnp.float8_e4m3fn)
    fp8 = lambda x, w: lax.dot(x, w, preferred_element_type=BF16)  # noqa: E731
    assert_dots_in(fp8, (x, w), jnp.float8_e4m3fn)
    with fails(r"dot_general .* in float8_e4m3fn, float8_e4m3fn"):
        assert_dots_in(fp8, (x, w), "bf16")
    conv = lambda x, w: lax.conv(x, w, (1,), "SAME")  # noqa: E731
    with fails(r"conv_general_dilated .* in float16, float16"):
        assert_dots_in(conv, (half(1, 2, 4, dtype=F16), half(3, 2, 1, dtype=F16)), "bf16")


# --- what all of them take ------------------------------------------------------------------------


ONES, NONE = half(2, 2, dtype=jnp.int8), "nothing would be asserted"
REJECTED = [
    (AssertionError, rf"that allow=\('Pooled:',\) excludes: {NONE}", {"allow": ("Pooled:",)}),
    (ValueError, r"allow: 'haed' matches no path\. Paths: head, pool", {"allow": ("haed",)}),
    (TypeError, r"a collection of path patterns, such as \('head',\)", {"allow": "head"}),
    (ValueError, "No accepted dtype was given", {"dtype": ()}),
]


@pytest.mark.parametrize(("error", "message", "options"), REJECTED)
def test_what_asserts_nothing_or_is_malformed_is_rejected(pooled, error, message, options):
    with pytest.raises(error, match=message):
        assert_dots_in(*pooled, **{"dtype": "bf16"} | options)


def test_integers_and_trees_without_arrays_or_of_other_structures_are_rejected():
    with fails(f"no matmul or convolution of floating numbers: {NONE}"):
        assert_dots_in(jnp.matmul, (ONES, ONES), "bf16")
    with pytest.raises(ValueError, match="The trees should have one structure, but have"):
        assert_close_in_ulps({"a": jnp.ones(1)}, [np.ones(1)], 1)
    with pytest.raises(ValueError, match=f"was given no array: {NONE}"):
        assert_close_in_ulps({}, {}, 1)


def test_our_layers_and_nnx_modules_pass():
    dense = nn.Dense(4, dtype_policy="mixed_bfloat16")
    variables = jax.eval_shape(dense.init, jax.random.key(0), full(2, 4))
    for call in (
        (dense.apply, (variables, full(2, 4))),
        (nnx.Linear(4, 4, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16"), (full(2, 4),)),
    ):
        assert_dots_in(*call, dtype="bf16")
        assert_no_silent_promotion(*call)
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16")
    assert_reductions_in(layer, (full(2, 4),), "f32", backward=True)


# --- promotions -----------------------------------------------------------------------------------


@pytest.fixture
def implicit_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_half_that_meets_float32_is_named(implicit_promotion):
    table = np.ones(4, np.float32)

    def fn(x, scale):
        with jax.named_scope("Net"):
            return jnp.dot(x * table, scale)

    with fails(
        r"float16 is combined with float32 without an explicit cast:\n"
        r"  mul at 'Net:' in bfloat16, float32: test_testing.py:\d+ \("
    ):
        assert_no_silent_promotion(fn, (half(4), full(4)))
    assert_no_silent_promotion(lambda x: x.astype(F32) * table, (half(4),))
    with fails("The program has no half-precision value: nothing would be asserted"):
        assert_no_silent_promotion(lambda x: x * table, (full(4),))


def test_a_mixed_matmul_in_one_path_can_be_allowed(implicit_promotion):
    def fn(x, w):
        with jax.named_scope("Net"), jax.named_scope("mix"):
            y = lax.dot_general(x, w, (((1,), (0,)), ((), ())))
        return y, x + x

    args = half(2, 4), full(4, 3)
    with fails("dot_general at 'mix' in bfloat16, float32"):
        assert_no_silent_promotion(fn, args)
    assert_no_silent_promotion(fn, args, allow=("mix",))


# --- parameters -----------------------------------------------------------------------------------


def step(params, gradients):
    new = jax.tree.map(lambda p, g: p.astype(g.dtype) - g, params, gradients)
    return new | {"b": params["b"]}, jnp.float32(0)


def test_parameters_that_change_their_dtype_in_a_step_are_named_with_what_made_them():
    args = (
        {"w": half(4), "b": half(4), "n": half(dtype=jnp.int32)},
        {"w": full(4), "b": full(4), "n": full()},
    )
    with fails(
        r"1 of 3 parameters of step do not come back in the right dtype:\n"
        r"  \['w'\]: float32 instead of bfloat16, from sub, test_testing.py:\d+ \("
    ):
        assert_params_keep_dtype(step, args)
    assert_params_keep_dtype(jax.jit(lambda g, p: (p, g)), (full(), args[0]), params=1)
    assert_params_keep_dtype(lambda g, p: (p, g), args[::-1], params=0, returned=1)
    with fails(r"\['b'\]: bfloat16 is not returned"):
        assert_params_keep_dtype(lambda p: {"a": p["a"]}, ({"a": half(2), "b": half(2)},))
    with fails(r"float32 instead of float16, from convert_element"):
        assert_params_keep_dtype(jax.jit(lambda p: p.astype(F32)), (half(2, dtype=F16),))


def test_what_an_init_returns_is_all_of_one_dtype():
    init, args = Pooled().init, (jax.random.key(0), X)
    assert_params_keep_dtype(init, args, "f32")
    with fails(
        r"^4 of 4 parameters of init do not come back in the right dtype:\n(.*\n)*"
        r".*\['up'\]\['kernel'\]: float32 instead of bfloat16, from mul, test_testing.py:\d+"
    ):
        assert_params_keep_dtype(init, args, BF16)
    with fails("no floating parameter: nothing would be asserted"):
        assert_params_keep_dtype(lambda x: x, (half(2, dtype=jnp.int32),))


def test_parameters_of_nnx_modules_are_looked_at_where_they_are_changed():
    layer = flax_nnx.Linear(2, 2, rngs=flax_nnx.Rngs(0), param_dtype=BF16)

    def spoil(layer, x):
        layer.kernel.set_value(layer.kernel[...].astype(F32))
        return x

    assert_params_keep_dtype(lambda layer, x: layer(x), (layer, half(1, 2)))
    with fails(r"kernel.*: float32 instead of bfloat16, from convert_element_type"):
        assert_params_keep_dtype(spoil, (layer, half(1, 2)))


# --- programs -------------------------------------------------------------------------------------


def program(x, w):
    with jax.named_scope("Net"):
        y = jax.nn.relu(x @ w)
    return lax.scan(lambda c, row: (c + 1, row * jnp.asarray(2, row.dtype)), 0, y)[1]


ARGS = full(2, 2), full(2, 2)


def test_the_same_program_under_other_names_and_lines_passes():
    def renamed(a, b):
        c = jax.nn.relu(a @ b)
        return lax.scan(lambda n, line: (n + 1, line * jnp.asarray(2, line.dtype)), 0, c)[1]

    assert_same_program(program, renamed, ARGS)
    assert_same_program(jax.jit(program), jax.jit(renamed), ARGS)
    of_sum = lambda fn: jax.grad(lambda x, w: fn(x, w).sum())  # noqa: E731
    assert_same_program(of_sum(program), of_sum(renamed), ARGS)


TABLES = np.arange(4, dtype=np.float32), np.arange(4, dtype=np.float32) + 1
DIFFERENT = [
    (
        lambda x, w: program(x.astype(BF16), w.astype(BF16)),
        r"The first has dot_general\(float32\[2,2\] %0, float32\[2,2\] %1\) -> float32\[2,2\] %2 "
        r"with .* at 'Net:', test_testing.py:\d+ \(program\); the second has "
        r"convert_element_type\(.*, test_testing.py:\d+",
    ),
    (
        lambda x, w: program(w, x),
        r"second has dot_general\(float32\[2,2\] %1, float32\[2,2\] %0\)",
    ),
    (
        lambda x, w: jax.nn.relu(lax.dot(x, w, precision="highest")),
        "precision=None, .*; the second has .*precision=\\(Precision.HIGHEST",
    ),
    (
        lambda x, w: (program(x, w), x),
        r"the results float32\[2,2\] %5; the second has the results float32\[2,2\] %5, float32",
    ),
    (lambda x, w: jnp.exp(program(x, w)), r"the second has exp\(float32\[2,2\] %5\)"),
]


@pytest.mark.parametrize(("other", "message"), DIFFERENT)
def test_the_first_difference_is_shown_with_its_place(other, message):
    with fails(r"^program and .*lambda.* are not the same program\. .*" + message):
        assert_same_program(program, other, ARGS)


def test_constants_count_by_value_and_other_arguments_and_outputs_are_differences():
    first, second = map(jnp.asarray, TABLES)
    again = jnp.asarray(TABLES[0])
    assert_same_program(lambda x: x + first, lambda x: x + again, (full(4),))
    with fails(r"the constant 0, float32\[4\] of digest .*; the second has the constant 0"):
        assert_same_program(lambda x: x + first, lambda x: x + second, (full(4),))
    with fails(r"the arguments float32\[2\] %0; the second has the arguments bfloat16"):
        assert_same_program(jnp.exp, jnp.exp, (full(2),), g_args=(half(2),))
    with fails(r"the results float32\[2\] %0; the second has the results float32\[2\] %1"):
        assert_same_program(lambda a, b: a, lambda a, b: b, (full(2), full(2)))
    minus, swapped = jax.jit(lambda a, b: a - b), jax.jit(lambda a, b: b - a)
    with fails(r"sub\(float32\[2\] %0, float32\[2\] %1\).*; the second has sub\(float32\[2\] %1"):
        assert_same_program(minus, swapped, (full(2), full(2)))


# --- numbers --------------------------------------------------------------------------------------

DTYPES = [BF16, F16, F32, jnp.float8_e4m3fn, jnp.float8_e5m2]


def in_dtype(number, dtype):
    return np.asarray(number, np.float64).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbors_are_one_ulp_apart_at_every_magnitude(dtype):
    info = jnp.finfo(dtype)
    tiny, eps = float(info.smallest_normal), float(info.eps)
    largest = 2.0 ** np.floor(np.log2(float(info.max)))
    for size in (1.0, 1.5, tiny, tiny * eps, tiny * 0.5, largest):
        step = max(2.0 ** np.floor(np.log2(size)), tiny) * eps
        for sign in (1.0, -1.0):
            there = np.asarray(sign * (size + step), np.float64)
            assert_close_in_ulps(in_dtype(sign * size, dtype), there, 1.001)
            with fails(rf"by more than 0.9 ulps of {np.dtype(dtype).name}. The worst"):
                assert_close_in_ulps(in_dtype(sign * size, dtype), there, 0.9)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_infinity_and_nan_are_right_only_where_they_are(dtype):
    def are_right(*pairs):
        for actual, desired in pairs:
            try:
                assert_close_in_ulps(in_dtype(actual, dtype), np.float64(desired), 2)
            except AssertionError:
                yield False
            else:
                yield True

    inf, nan, info = np.inf, np.nan, jnp.finfo(dtype)
    smallest, largest = float(info.smallest_normal) * float(info.eps), float(info.max)
    with np.errstate(all="ignore"):  # inf, or NaN where there is none
        overflowed = float(in_dtype(1e39, dtype).astype(np.float64))
    zeros = (0.0, -0.0), (0.0, smallest), (smallest, 0.0)
    assert all(are_right(*zeros, (nan, nan), (overflowed, 1e39)))
    wrong = (0.0, 4 * smallest), (4 * smallest, 0.0), (nan, 1.0), (1.0, nan)
    assert not any(are_right(*wrong, (1.0, 1e39), (overflowed, 1.0)))
    if np.isinf(overflowed):  # it counts as the number after the largest
        after = (largest, largest * (1 + 1e-8)), (inf, largest)
        assert all(are_right((inf, inf), (-inf, -1e39), *after))
        assert not any(are_right((inf, -inf), (-inf, 1e39), (1.0, inf)))


@pytest.mark.slow
def test_the_worst_number_of_each_wrong_array_is_named():
    actual = {"a": jnp.ones((2, 3), BF16), "b": [jnp.ones(3, F16)], "n": jnp.arange(3)}
    desired = {"a": np.ones((2, 3)), "b": [np.array([1.0, 1.0, 1.25])], "n": np.arange(3)}
    with pytest.raises(AssertionError) as error:
        assert_close_in_ulps(actual, desired, 4)
    assert str(error.value) == (
        "['b'][0]: 1 of 3 numbers are off by more than 4 ulps of float16. The worst, at (2,), is "
        "off by 256 ulps: got 1.0, expected 1.25."
    )
    assert_close_in_ulps(actual, desired, 4, dtype=ml_dtypes.float8_e4m3fn)  # of coarser ulps
    assert_close_in_ulps(jnp.asarray(1e-8, F32), 2e-8, 1, floor=1.0)
    with fails(r"\['n'\]: int32 numbers should be equal, but are not"):
        assert_close_in_ulps({"n": jnp.arange(3)}, {"n": np.arange(1, 4)}, 4)
    with fails(r"^The array.imag: 1 of 1 numbers"):
        assert_close_in_ulps(jnp.asarray(1 + 2j, jnp.complex64), 1 + 2.1j, 4)

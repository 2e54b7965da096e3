"""Ragged matmuls in 8 bits: beside a loop over experts, beside float64, and rows of no group."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy import audit, autocast
from policy.core.dtypes import ScaledMatmul, scaled_matmul_of
from policy.eight_bits.scaled_matmul import scaled_dot_general
from policy.eight_bits.scaled_ragged import scaled_ragged_dot_general
from tests.policy.errors import relative
from tests.programs import named, operations

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

RNG = np.random.default_rng(0)
SIZES = (20, 0, 33, 7)
READ, ROWS = sum(SIZES), 70  # the last ten rows belong to no expert
BASIC = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
kinds = pytest.mark.parametrize("kind", ("f8", "i8"))
bads = pytest.mark.parametrize("bad", [np.nan, np.inf])


def scaled(text: str) -> ScaledMatmul:
    by = scaled_matmul_of(text)
    assert by is not None
    return by


def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rows, kernels and a cotangent, whose rows differ in size."""
    spread = jnp.exp(2 * normal(ROWS, 1))
    return normal(ROWS, 64) * spread, normal(4, 64, 48), normal(ROWS, 48) * spread


def ragged(text: str, sizes: Any = SIZES, numbers: Any = BASIC) -> Any:
    sizes = jnp.asarray(sizes, jnp.int32)
    return lambda x, w: scaled_ragged_dot_general(x, w, sizes, numbers, scaled(text), dtype=x.dtype)


def loop(multiply: Any) -> Any:
    """Returns a ragged matmul as a loop over experts; rows of no group are zeros."""

    def run(x: Any, w: Any) -> Any:
        starts = np.cumsum((0, *SIZES))
        parts = [multiply(x[a:b], w[e]) for e, (a, b) in enumerate(itertools.pairwise(starts))]
        return jnp.concatenate([*parts, jnp.zeros((ROWS - READ, w.shape[2]), x.dtype)])

    return run


def results(operation: Any, x: Any, w: Any, ct: Any) -> tuple[Any, ...]:
    """Returns the result of an operation and both gradients."""
    y, pullback = jax.vjp(operation, x, w)
    return y, *pullback(ct.astype(y.dtype))


def planted(rows: Any, bad: float) -> Any:
    return rows.at[READ:].set(bad)


@pytest.mark.cases(slow=2)
@bads
@pytest.mark.parametrize("text", ["i8", "f8", "i8:compute", "f8:compute", "f8:fast"])
def test_each_experts_rows_are_multiplied_as_alone_whatever_other_rows_hold(text, bad):
    x, w, ct = operands()

    def alone(x: Any, w: Any) -> Any:
        return scaled_dot_general(x, w, (((1,), (0,)), ((), ())), scaled(text), dtype=x.dtype)

    found = results(ragged(text), planted(x, bad), w, planted(ct, bad))
    for ours, theirs in zip(found, results(loop(alone), x, w, ct), strict=True):
        assert ours.dtype == theirs.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("text", "bound"), [("i8", 0.015), ("f8", 0.065), ("i8:tensor", 0.05)])
def test_results_and_gradients_are_near_those_of_float64(text, bound):
    x, w, ct = normal(ROWS, 64), normal(4, 64, 48), normal(ROWS, 48)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (x, w, ct)]
        truth = results(loop(jnp.matmul), *wide)
    found = results(ragged(text), planted(x, np.nan), w, planted(ct, np.nan))
    for ours, theirs in zip(found, truth, strict=True):
        assert relative(ours, theirs) < bound


@kinds
@bads
def test_not_finite_stays_not_finite_in_its_row_and_its_experts_columns(kind, bad):
    x, w, ct = operands()
    y, dx, dw = results(ragged(kind), x.at[3, 5].set(bad), w, ct.at[25, 7].set(bad))
    assert np.flatnonzero(np.isnan(y).any(1)).tolist() == [3]
    assert np.flatnonzero(np.isnan(dx).any(1)).tolist() == [25]
    experts, _, columns = np.nonzero(np.isnan(dw))
    assert set(zip(experts, columns, strict=True)) == {(2, 7), *((0, n) for n in range(48))}


@kinds
def test_residuals_are_codes_and_scales(kind):
    x, w, _ = operands()
    saved = jax.tree.leaves(jax.eval_shape(lambda x, w: jax.vjp(ragged(kind), x, w)[1], x, w))
    assert {leaf.dtype for leaf in saved if leaf.size > 256} == {scaled(kind).operands}
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in saved) < 0.55 * 2 * (x.size + w.size)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("numbers", "x_axes", "w_axes"),
    [
        ((((0,), (0,)), ((), ())), (1, 0, 2), (1, 0, 2, 3)),
        ((((2, 0), (3, 1)), ((), ())), (2, 0, 1), (0, 2, 3, 1)),
    ],
)
def test_any_dimension_numbers_have_their_gradients(numbers, x_axes, w_axes):
    # (T, K, L) and (E, K, L, N), with axes moved
    x, w, ct = normal(8, 6, 4), normal(2, 6, 4, 5), normal(8, 5)
    if len(numbers[0][0]) == 1:
        x, w, x_axes, w_axes = x[:, :, 0], w[:, :, 0], (1, 0), (1, 0, 2)
    moved = lax.RaggedDotDimensionNumbers(numbers, (x_axes.index(0),), (w_axes.index(0),))
    flat = lambda x, w: ragged("i8", (5, 3))(x.reshape(8, -1), w.reshape(2, -1, 5))  # noqa: E731

    def run(x: Any, w: Any) -> Any:
        return ragged("i8", (5, 3), moved)(jnp.transpose(x, x_axes), jnp.transpose(w, w_axes))

    for ours, theirs in zip(results(run, x, w, ct), results(flat, x, w, ct), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_exported_programs_multiply_in_8_bits_three_times(platform):
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands()]
    step = jax.jit(lambda x, w, ct: results(ragged("i8"), x, w, ct))
    text = jax.export.export(step, platforms=[platform])(*shapes).mlir_module()
    dots = [line for line in text.splitlines() if 'composite "chlo.ragged_dot' in line]
    assert len(dots) == 3 and all(line.count("xi8>") >= 2 for line in dots)
    assert "HIGHEST" not in "".join(dots)  # Mosaic rejects it of int8


# --------------------------------------------------------------------------------------------------
# Policies
# --------------------------------------------------------------------------------------------------


def layer(params: Any, x: Any) -> Any:
    hidden = jax.nn.gelu(lax.ragged_dot(x, params["up"], jnp.asarray(SIZES)))
    return lax.ragged_dot(hidden, params["down"], jnp.asarray(SIZES))


PARAMS = {"up": normal(4, 64, 32, dtype=jnp.float32), "down": normal(4, 32, 16, dtype=jnp.float32)}


@pytest.mark.cases(fast=1, slow=6)
@bads
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float8", "mixed_int8"])
def test_rows_of_no_group_change_no_other_row_and_no_gradient(policy, bad):
    x, ct = normal(ROWS, 64, dtype=jnp.float32), normal(ROWS, 16, dtype=jnp.float32)
    cast = autocast(layer, policy, params=0)

    def run(x: Any, ct: Any) -> Any:
        y, pullback = jax.vjp(cast, PARAMS, x)
        params, rows = pullback(ct.astype(y.dtype))
        return y[:READ], rows[:READ], params

    jax.tree.map(np.testing.assert_array_equal, run(planted(x, bad), planted(ct, bad)), run(x, ct))


@pytest.mark.parametrize(
    ("policy", "operands"),
    [
        ("mixed_bfloat16", ["bfloat16", "bfloat16"]),
        ("mixed_int8", ["int8", "int8"]),
        ("mixed_float8", ["float8_e4m3fn", "float8_e4m3fn"]),
    ],
)
def test_a_ragged_matmul_of_kernels_multiplies_three_times_in_the_policys_dtype(policy, operands):
    step = jax.grad(lambda p, x: autocast(layer, policy, params=0)(p, x).sum(), (0, 1))
    found = operations(step, PARAMS, normal(ROWS, 64, dtype=jnp.float32))
    dots = [sorted(each.inputs[:2]) for each in named(found, "ragged_dot_general")]
    assert len(dots) == 6 and dots.count(operands) >= 2
    assert {name for pair in dots for name in pair} <= {*operands, "float8_e5m2"}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_int8"])
def test_an_audit_multiplies_each_row_by_one_expert(policy):
    def loss(params: Any, x: Any) -> Any:
        return jnp.square(autocast(layer, policy, params=0)(params, x)).sum()

    found = audit(jax.grad(loss, (0, 1)), PARAMS, normal(ROWS, 64, dtype=jnp.float32)).operations
    dots = [op for op in found if op.kind == "dot"]
    assert sum(op.flops for op in dots) == 3 * 2 * ROWS * (64 * 32 + 32 * 16)
    assert all(len(op.operands) == 2 for op in dots)


def test_batches_of_ragged_matmuls_and_other_modes_stay_in_compute_dtype():
    x, kernels = normal(3, 8, 6, dtype=jnp.float32), normal(3, 2, 6, 5, dtype=jnp.float32)
    sizes = jnp.tile(jnp.array([5, 3]), (3, 1))
    cast = autocast(lambda w, x: jax.vmap(lax.ragged_dot)(x, w, sizes), "mixed_int8", params=0)
    text = str(jax.make_jaxpr(cast)(kernels, x))
    assert "ragged_dot_general" in text and "i8[" not in text

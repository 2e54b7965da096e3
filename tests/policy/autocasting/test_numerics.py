"""Values that half precision must not touch: accumulators, masks, statistics, positions, sums of
gradients.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from policy.autocasting.transform import autocast
from tests.policy.autocasting.models import (
    BF16,
    FULLS,
    HALVES,
    POLICIES,
    dots,
    error,
    half_of,
    largest_error,
    normals,
    reads,
)
from tests.policy.autocasting.models import SQUARE as W
from tests.programs import named, operations

LOWEST = float(np.finfo(np.float32).min)
RNG = np.random.default_rng(1)
normal = normals(1)
X = normal(4, 8)


@pytest.mark.cases(fast=1)
@POLICIES
def test_a_sum_carried_through_4096_steps_is_float32s(policy):
    values = jnp.asarray(RNG.uniform(size=4096), jnp.float32)

    def total(w, values):
        return lax.scan(lambda total, v: (total + v * w, None), jnp.zeros(()), values)[0]

    found = autocast(total, policy, params=0)(jnp.float32(1.5), values)
    assert largest_error(found, 1.5 * np.asarray(values, np.float64).sum()) < 1e-5


@POLICIES
def test_a_number_carried_through_a_loop_sums_activations_in_float32(policy):
    def total(w, x):
        rows = (x @ w)[:, 0]
        scanned = lax.scan(lambda total, row: (total + row, None), 0.0, rows)[0]
        return scanned, lax.fori_loop(0, 4096, lambda i, total: total + rows[i], 0.0)

    found = autocast(total, policy, params=0)(jnp.ones((1, 1)), jnp.ones((4096, 1)))
    assert [float(one) for one in found] == [4096, 4096]


LABELS = np.arange(64) % 10
LABEL_LOGITS = {
    "take_along_axis": lambda y: jnp.take_along_axis(y, LABELS[:, None], -1)[:, 0],
    "indexed": lambda y: y[jnp.arange(64), LABELS],
    "jit": jax.jit(lambda y: y[jnp.arange(64), LABELS]),
    "reshape": lambda y: y.reshape(-1)[10 * jnp.arange(64) + LABELS],
    "select": lambda y: jnp.sum(jnp.where(jax.nn.one_hot(LABELS, 10) > 0, y, 0), -1),
    "einsum": lambda y: jnp.einsum("bc,bc->b", y, jax.nn.one_hot(LABELS, 10)),
    "slice": lambda y: y[:, 3],
    "sort": lambda y: jnp.sort(y, -1)[:, -1],
    "vmap": lambda y: jax.vmap(lambda row, label: row[label])(y, LABELS),
}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("name", LABEL_LOGITS)
def test_a_logsumexp_and_a_logit_that_cancel_are_of_the_same_rounded_logits(name):
    """XLA leaves out the rounding of a matmul's result that is upcast next."""
    pick = LABEL_LOGITS[name]
    w, x = (jnp.float32(RNG.integers(-20, 21, shape) / 8) for shape in ((32, 10), (64, 32)))

    def loss(w, x):
        y = x @ w
        return jax.nn.logsumexp(y, -1) - pick(y)

    rounded = (x @ w).astype(jnp.bfloat16).astype(jnp.float32)  # of an exact product
    found = jax.jit(autocast(loss, BF16, params=0))(w, x)
    assert largest_error(found, jax.nn.logsumexp(rounded, -1) - pick(rounded)) < 1e-4


@pytest.mark.parametrize(
    "cross_entropy",
    [
        lambda y: optax.softmax_cross_entropy_with_integer_labels(y, LABELS),
        lambda y: jax.nn.logsumexp(y, -1) - y[jnp.arange(64), LABELS],
    ],
    ids=["optax", "own"],
)
def test_a_cross_entropy_of_logits_that_are_parameters_is_float32s(cross_entropy):
    logits = normal(64, 10)
    found = autocast(cross_entropy, BF16, params=0)(logits)
    assert largest_error(found, cross_entropy(logits)) < 1e-6


MASK = jnp.asarray(np.tril(np.ones((4, 4), bool), -1))  # nothing is seen by the first
CONSTANT, LOW = jnp.where(MASK, 0.0, LOWEST), jnp.full((4, 4), LOWEST)


def sliced(logits: Any) -> Any:
    return jnp.where(MASK, logits, jnp.full((8, 8), LOWEST)[:4, 2:6])


def carried_into_a_scan(logits: Any) -> Any:
    lowest = jnp.full((4,), LOWEST)
    rows = (logits, MASK)
    return lax.scan(lambda carry, row: (carry, jnp.where(row[1], row[0], lowest)), None, rows)[1]


MASKS: dict[str, Any] = {
    "a literal": lambda logits: jnp.where(MASK, logits, LOWEST),
    "minus a billion": lambda logits: jnp.where(MASK, logits, -1e9),
    "a constant": lambda logits: logits + CONSTANT,
    "ones and zeros, lowest": lambda logits: logits + (1.0 - MASK.astype(jnp.float32)) * LOWEST,
    "integers": lambda logits: logits + (1 - MASK.astype(jnp.int32)).astype(jnp.float32) * LOWEST,
    "sliced": sliced,
    "joined": lambda logits: jnp.where(MASK, logits, jnp.concatenate([LOW[:, :2]] * 2, 1)),
    "carried into a scan": carried_into_a_scan,
    "in a branch": lambda x: lax.cond(x[0, 0] < 1e9, lambda: jnp.where(MASK, x, LOWEST), lambda: x),
    "given to a branch": lambda logits: lax.cond(
        logits[0, 0] < 1e9, lambda x, low: jnp.where(MASK, x, low), lambda x, low: x, logits, LOWEST
    ),
    "given to a jit": lambda logits: jax.jit(jnp.where)(MASK, logits, LOW),
}


@pytest.mark.cases(fast=1, slow=7)
@POLICIES
@pytest.mark.parametrize("mask", MASKS)
def test_a_row_that_sees_nothing_stays_finite(mask, policy):
    attention = lambda w, x: jax.nn.softmax(MASKS[mask]((x @ w) @ x.T)) @ x  # noqa: E731
    fn = autocast(attention, policy, params=0)
    out, gradient = jax.jit(jax.value_and_grad(lambda w, x: fn(w, x).sum()))(W, X)
    assert np.isfinite(out) and np.all(np.isfinite(gradient))
    assert set(dots(fn, W, X)) == {(half_of(policy),) * 2}


@pytest.mark.cases(fast=1)
@POLICIES
def test_an_additive_mask_given_as_an_input_is_not_narrowed(policy):
    fn = autocast(lambda w, x, mask: jax.nn.softmax((x @ w) @ x.T + mask) @ x, policy, params=0)
    assert reads("add", fn, W, X, CONSTANT) == {FULLS}
    assert np.all(np.isfinite(fn(W, X, CONSTANT)))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("epsilon", [1e-8, 1e-12])
def test_a_small_number_does_not_vanish_in_float16(epsilon):
    def normalized(w, x):
        h = x @ w
        return h / (jnp.abs(h) + epsilon)

    found = autocast(normalized, "mixed_float16")(W, X.at[0].set(0.0))
    np.testing.assert_array_equal(found[0], 0.0)
    assert largest_error(found, jnp.sign(X.at[0].set(0.0) @ W)) < 1e-3


@pytest.mark.slow
def test_dropout_masks_are_bit_identical():
    def dropped(w, x):
        keep = jax.random.bernoulli(jax.random.key(3), 0.7, (4, 8))
        noise = jax.random.normal(jax.random.key(4), (4, 8))
        return jnp.where(keep, x @ w, 0.0), keep, noise

    _, *found = autocast(dropped, BF16, params=0)(W, X)
    _, *expected = jax.jit(dropped)(W, X)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


NORMS = {
    "norm": lambda h: jnp.linalg.norm(h, axis=-1),
    "unit length": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
    "products": lambda h: jnp.sqrt((h * h).sum(-1)),
    "cosine": lambda h: (h * h).sum(-1) / jnp.sum(h * jnp.conj(h), -1),
}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", NORMS)
@POLICIES
def test_a_value_times_itself_is_squared_in_float32_if_it_is_summed(policy, name):
    large, truth = 1000 * X, NORMS[name](1000 * (X @ W))  # the squares overflow in float16
    fn = autocast(lambda w, x: NORMS[name](x @ w), policy, params=0)
    assert largest_error(fn(W, large), truth) < 2e-2
    assert np.all(np.isfinite(jax.grad(lambda w: fn(w, large).sum())(W)))
    assert reads("mul", fn, W, large) == {FULLS}


def test_a_value_times_itself_that_is_not_summed_runs_in_half_precision():
    fn = autocast(lambda w, x: jax.nn.relu(x @ w) * jax.nn.relu(x @ w), BF16, params=0)
    squared = autocast(lambda w, x: (lambda h: h * h)(x @ w) @ w, BF16, params=0)
    assert reads("mul", fn, W, X) == reads("mul", squared, W, X) == {HALVES}


def test_integer_positions_stay_exact():
    positions = jnp.arange(4)[:, None] + 100_001

    def turned(w, x):
        return (x @ w) * jnp.cos(positions.astype(jnp.float32) * 0.37)

    found, truth = autocast(turned, BF16)(W, X), np.cos(np.asarray(positions, np.float64) * 0.37)
    assert largest_error(found, np.asarray(X @ W) * truth) < 1.2e-2
    shifted = autocast(lambda w, x: (x @ w) + positions.astype(jnp.float32), BF16)
    assert not {"bfloat16"}.intersection(*reads("add", shifted, W, X))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "reduced",
    [
        lambda h: jnp.cumsum(h, 0),
        lambda h: jax.ops.segment_sum(h, jnp.zeros(2000, int), 1),
        lambda h: jax.nn.logsumexp(h, 0),
        lambda h: jnp.zeros((1, 8)).at[jnp.zeros(2000, int)].add(h),
        lambda h: jnp.mean(h, 0),
    ],
    ids=["cumsum", "segment_sum", "logsumexp", "scatter-add", "mean"],
)
def test_a_sum_of_many_half_numbers_is_accurate_to_their_rounding(reduced):
    x = jnp.asarray(RNG.uniform(0.5, 1.5, size=(2000, 8)), jnp.float32)
    found = autocast(lambda w, x: reduced(x @ w), BF16)(jnp.eye(8), x)
    assert largest_error(found, reduced(x)) < 1e-3


EITHER = pytest.mark.parametrize("inside", [False, True], ids=["grad(autocast)", "autocast(grad)"])


def gradient_of(fn: Any, inside: bool) -> Any:
    if inside:
        return autocast(jax.grad(fn), BF16, params=0)
    return jax.grad(autocast(fn, BF16, params=0))


@pytest.mark.cases(slow=1)
@EITHER
def test_the_gradient_of_a_recurrence_of_512_steps_is_accurate(inside):
    xs = normal(512, 2, 8)

    def loss(w, xs):
        step = lambda h, x: (jnp.tanh(h @ w + x), h)  # noqa: E731
        return jnp.mean(lax.scan(step, jnp.zeros((2, 8)), xs)[1] * xs)

    gradients = gradient_of(loss, inside), jax.grad(loss)
    found, truth = (jax.jit(gradient)(0.5 * W, xs) for gradient in gradients)
    assert error(found, truth) < 1e-2


def casts(fn: Any, *args: Any) -> list[tuple[str, ...]]:
    ops = named(operations(fn, *args), "convert_element_type")
    return sorted((*op.inputs, *op.outputs) for op in ops if op.inputs != op.outputs)


@pytest.mark.cases(fast=1)
@POLICIES
def test_autocast_twice_is_autocast_once(policy):
    def fn(w, x):
        return jax.nn.softmax(jax.nn.gelu(x @ w) @ w).sum()

    once = autocast(fn, policy)
    twice = autocast(once, policy)
    assert casts(twice, W, X) == casts(once, W, X)
    assert casts(jax.grad(twice), W, X) == casts(jax.grad(once), W, X)
    np.testing.assert_array_equal(twice(W, X), once(W, X))


@pytest.mark.slow
def test_a_softmax_and_its_gradient_are_float32s_from_the_logits_on():
    """Rounded shifts would cost up to half a unit of the largest logit; a rounded p - 1 cancels
    where p is almost 1.
    """
    logits = normal(4, 64, scale=8.0).astype(jnp.bfloat16).astype(jnp.float32)
    labels = jnp.argmax(logits, -1)

    def loss(w, x):  # an exact product, so that the logits are half and known
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)

    eye = jnp.eye(64)
    exact = -jax.nn.log_softmax(logits)[jnp.arange(4), labels]
    strict = autocast(loss, BF16, on_unknown="raise")
    np.testing.assert_allclose(strict(eye, logits), exact, rtol=1e-5, atol=1e-6)
    found = jax.grad(lambda x: autocast(loss, BF16)(eye, x).sum())(logits)
    truth = jax.nn.softmax(logits) - jax.nn.one_hot(labels, 64)
    np.testing.assert_allclose(found, truth, rtol=2**-8, atol=1e-7)
    weights = autocast(lambda w, x: jax.nn.softmax(x @ w), BF16)(eye, logits)
    np.testing.assert_allclose(weights, jax.nn.softmax(logits), rtol=1e-5, atol=1e-7)


def test_a_transposed_param_is_cast_and_then_transposed():
    """As `x @ w.T.astype(half)` is not, but `x @ w.astype(half).T`: XLA folds that transposition
    into the matmul, and the one of its gradient. XLA:CPU of jax 0.12 multiplies in another order
    past a cast, 5 times less accurately.
    """

    def loss(w, x):
        return jnp.sum(jnp.square(x @ w.T))

    ops = operations(jax.grad(autocast(loss, BF16, params=0)), W, X)
    forward = {op.inputs for op in named(ops, "transpose") if not op.is_backward}
    backward = {op.inputs for op in named(ops, "transpose") if op.is_backward}
    assert ("bfloat16",) in forward and backward == {("bfloat16",)}
    found = jax.jit(jax.grad(autocast(loss, BF16, params=0)))(W, X)
    x, w = (np.asarray(a, np.float64) for a in (X, W))
    assert largest_error(found, 2 * (x @ w.T).T @ x) < 1e-2


@pytest.mark.slow
def test_a_masks_lowest_float32_is_bfloat16s_lowest_and_never_infinite():
    def masked(w, x, mask):
        return jnp.where(mask, x @ w, jnp.finfo(jnp.float32).min)

    mask = jnp.asarray(RNG.uniform(size=(4, 8)) < 0.5)
    program = autocast(masked, BF16)
    assert {inputs[1:] for inputs in reads("select_n", program, W, X, mask)} == {HALVES}
    found = program(W, X, mask)
    assert (found[~mask] == jnp.finfo(jnp.bfloat16).min.astype(jnp.float32)).all()
    assert largest_error(found[mask], masked(W, X, mask)[mask]) < 1e-2


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("policy", "number"), [("mixed_float16", 1e5), ("mixed_float16", -1e-9)])
def test_a_number_that_half_precision_loses_keeps_its_selection_in_float32(policy, number):
    program = autocast(lambda w, x: jnp.where(x > 0, x @ w, number), policy)
    assert {inputs[1:] for inputs in reads("select_n", program, W, X)} == {FULLS}
    assert (program(W, X)[X <= 0] == jnp.float32(number)).all()


@pytest.mark.slow
def test_a_matmul_of_a_real_number_with_a_complex_one_runs_as_it_was_traced():
    def f(weights, x):
        filters = lax.complex(weights, 2 * weights)
        return jnp.real(x.astype(jnp.complex64) @ filters) + jnp.real(lax.dot(x, filters))

    weights, x = jnp.ones((8, 4)), jnp.ones((3, 8))
    np.testing.assert_allclose(jax.jit(autocast(f, BF16))(weights, x), f(weights, x))
    gradient = jax.eval_shape(jax.grad(lambda w: autocast(f, BF16)(w, x).sum()), weights)
    assert gradient.dtype == jnp.float32


def moving_average(y: Any) -> Any:
    mean = y[0]
    for row in y[1:]:
        mean = 0.95 * mean + 0.05 * row
    return mean


SCALED: dict[str, Any] = {
    "twenty times": lambda y: functools.reduce(lambda y, _: y * 1.01, range(20), y),
    "a moving average": moving_average,
    "almost all of it": lambda y: y - 0.999 * y,
    "a temperature": lambda y: jax.nn.log_softmax(y / 0.07),
    "a computed one": lambda y: jax.nn.log_softmax(y * jnp.sqrt(80.0)),
    "a label's logit": lambda y: jax.nn.logsumexp(y / 0.07, -1) - (y / 0.07)[:, 3],
    "a number's quotient": lambda y: 0.7 / (1 + jnp.exp(0.3 * y)),
}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("name", SCALED)
@POLICIES
def test_a_number_that_half_precision_rounds_scales_as_written(name, policy):
    """Of an exact product, compared with float64."""
    w, x = (jnp.asarray(RNG.integers(-8, 9, shape) / 8, jnp.float32) for shape in ((4, 8), (64, 4)))
    y = np.asarray(x @ w).astype(half_of(policy))
    with jax.enable_x64(True):
        truth, gradients = jax.vjp(SCALED[name], jnp.asarray(y, jnp.float64))
        cotangents = jnp.asarray(RNG.normal(size=truth.shape))
        (of_y,) = gradients(cotangents)
        of_w = np.asarray(x, np.float64).T @ np.asarray(of_y)
    program = autocast(lambda w, x: SCALED[name](x @ w), policy, params=0)
    found, gradients = jax.vjp(lambda w: program(w, x), w)
    unit = float(jnp.finfo(half_of(policy)).eps)
    assert error(found, truth) < unit
    assert error(gradients(jnp.asarray(cotangents, jnp.float32))[0], of_w) < 2 * unit


QUOTIENTS: dict[str, Any] = {
    "softsign": lambda y: y / (1 + jnp.abs(y)),
    "jax.nn's": jax.nn.soft_sign,
    "rational": lambda y: y * y / (1 + y * y),
    "root": lambda y: y / jnp.sqrt(1 + y * y),
    "of a product": lambda y: (lambda q: q / (1 + jnp.abs(q)))(y * y[:, ::-1]),
}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("name", QUOTIENTS)
@POLICIES
def test_the_gradients_of_a_bounded_quotient_cancel_in_float32(name, policy):
    """They are off by 0.03 to 8 if those of the numerator and the divisor are rounded."""
    w = jnp.eye(8)
    x = jnp.asarray(
        RNG.choice([-1, 1], (64, 8)) * RNG.choice([8, 11, 13, 16], (64, 8)), jnp.float32
    )
    with jax.enable_x64(True):
        truth, gradient = jax.vjp(QUOTIENTS[name], jnp.asarray(x, jnp.float64))
        (of_x,) = gradient(jnp.ones_like(truth))
    program = autocast(lambda w, x: QUOTIENTS[name](x @ w), policy, params=0)
    found, gradient = jax.vjp(lambda x: program(w, x), x)
    unit = float(jnp.finfo(half_of(policy)).eps)
    assert error(found, truth) < unit
    assert error(gradient(jnp.ones_like(found))[0], of_x) < 2 * unit
    saved = jax.eval_shape(lambda: jax.tree.leaves(jax.vjp(program, w, x)[1]))
    sizes = [leaf.dtype.itemsize for leaf in saved if leaf.shape == x.shape]
    assert 4 not in sizes


def test_a_quotient_of_exponentials_stays_in_float32():
    program = autocast(lambda w, x: jnp.exp(x @ w) / (1 + jnp.exp(x @ w)), BF16, params=0)
    found = jnp.log(1 - program(jnp.eye(1), jnp.full((1, 1), 9.0)))
    assert largest_error(found, -jax.nn.softplus(9.0)) < 1e-3


def test_a_scaled_activation_is_saved_in_half_precision():
    def scaled(w, x):
        y = x @ w
        return jax.nn.gelu(y) @ w + (0.3 * y) * (1.1 * y) + 0.7 / jnp.maximum(y, 1)

    program = autocast(scaled, BF16, params=0)
    saved = jax.eval_shape(lambda: jax.tree.leaves(jax.vjp(program, W, X)[1]))
    assert {leaf.dtype.name for leaf in saved if leaf.shape == X.shape} == {"bfloat16"}


def cross_entropy(p: Any) -> Any:
    return -jnp.log(p) - jnp.log(1 - p)


COMPLEMENTS: dict[str, Any] = {
    "cross entropy": lambda x: cross_entropy(jax.nn.sigmoid(x)),
    "clipped": lambda x: cross_entropy(jnp.clip(jax.nn.sigmoid(x), 1e-7, 1 - 1e-7)),
    "log1p": lambda x: jnp.log1p(-jax.nn.sigmoid(x)),
    "odds": lambda x: jax.nn.sigmoid(x) / (1 - jax.nn.sigmoid(x)),
    "squashed normal": lambda x: jnp.log(1 - jnp.tanh(x / 2) ** 2 + 1e-6),
    "chosen": lambda x: jnp.log(jnp.where(x > 1, 1 - jax.nn.sigmoid(x), jax.nn.sigmoid(x))),
    "a correlation": lambda x: jnp.sqrt(1 - jnp.tanh(x / 2) ** 2),
    "an inverse root": lambda x: lax.rsqrt(1.001 - jnp.tanh(x / 2) ** 2),
    "an inverse power": lambda x: (1 - jax.nn.sigmoid(x)) ** -1,
    "a Bernoulli's deviation": lambda x: jnp.sqrt(jax.nn.sigmoid(x) * (1 - jax.nn.sigmoid(x))),
    "arctanh": lambda x: jnp.arctanh(jnp.tanh(x / 2)),
    "arcsin": lambda x: jnp.arcsin(jnp.tanh(x / 2)),
    "arccos": lambda x: jnp.arccos(jnp.tanh(x / 2)),
    "erf_inv": lambda x: jax.scipy.special.erfinv(jnp.tanh(x / 2)),
    "logit": lambda x: jax.scipy.special.logit(jax.nn.sigmoid(x)),
    "a mean": lambda x: jnp.log(1 - jax.nn.sigmoid(x).mean(-1)),
    "a sum": lambda x: jnp.sqrt(jnp.sum(jnp.ones_like(x) - jax.nn.sigmoid(x), -1)),
    "a normal probability": lambda x: jnp.log(1 - jax.scipy.special.ndtr(x / 3)),
    "a maximum": lambda x: jnp.arctanh(jnp.tanh(x / 2).max(-1)),
    "stick breaking": lambda x: jnp.cumprod(1 - jax.nn.sigmoid(x), -1),
    "side by side": lambda x: jnp.sqrt(jnp.stack([1 - jnp.tanh(x / 2), 1 + jnp.tanh(x / 2)])),
}


@POLICIES
@pytest.mark.parametrize("name", COMPLEMENTS)
def test_a_steep_function_reads_the_distance_of_an_activation_from_its_bound(name, policy):
    """Of logits of 9, whose sigmoid is 1 in half precision; they round to 9 themselves."""
    w, x = jnp.eye(4), jnp.full((1, 4), 9.0)
    loss = lambda w, x: COMPLEMENTS[name](x @ w).mean()  # noqa: E731
    half = autocast(loss, policy, params=0)
    for found, wanted in zip(
        jax.value_and_grad(half)(w, x), jax.value_and_grad(loss)(w, x), strict=True
    ):
        assert largest_error(found, wanted) < 0.01
    returned = autocast(lambda w, x: 1 - jax.nn.sigmoid(x @ w), policy, params=0)(w, x)
    np.testing.assert_allclose(returned, 1 - jax.nn.sigmoid(x), rtol=1e-6)


def test_cotangents_that_cancel_are_added_in_float32_also_in_functions_that_are_called_twice():
    """Of a unit vector: the gradients of ``x`` and of the norm in ``x / norm(x)``."""
    x, w = np.zeros((4, 8), np.float32), np.eye(8, dtype=np.float32)
    x += RNG.uniform(-0.4, 0.4, x.shape).astype(np.float32)
    x[:, 2] = 6.5

    def distances(w, x):
        units = [y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (x @ w, x @ w.T)]
        return sum(jnp.sqrt(1 - u**2).sum() for u in units)

    found = jax.grad(autocast(distances, BF16, params=0), argnums=1)(w, x)
    assert error(found, jax.grad(distances, argnums=1)(w, x)) < 0.02  # 0.5 if rounded before


def rows(gate: Any) -> Any:
    step = lambda h, row: ((h := row[0] * h + row[1]), h)  # noqa: E731
    return lambda y: lax.scan(step, jnp.zeros(8, y.dtype), (gate(y), y))[1]


def steps(gate: Any) -> Any:
    step = lambda h, row: ((h := h * gate(row) + row), h)  # noqa: E731
    return lambda y: lax.scan(step, jnp.zeros(8, y.dtype), y)[1]


GATES: dict[str, Any] = {
    "sigmoid": lambda y: jax.nn.sigmoid(y + 4),
    "complement": lambda y: 1 - jax.nn.sigmoid(y - 4),
    "tanh": lambda y: jnp.tanh(y / 4 + 3),
}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("loop", [rows, steps])
@POLICIES
def test_a_recurrence_multiplies_its_carry_by_unrounded_gates(loop, gate, policy):
    """Over 256 steps, compared with float64; rounded gates are off by half a unit to 2 units."""
    w, x = (
        jnp.asarray(RNG.integers(-8, 9, shape) / 8, jnp.float32) for shape in ((4, 8), (256, 4))
    )
    recurrence = loop(GATES[gate])
    y = np.asarray(x @ w).astype(half_of(policy))
    with jax.enable_x64(True):
        truth, gradient = jax.vjp(recurrence, jnp.asarray(y, jnp.float64))
        cotangents = jnp.asarray(RNG.normal(size=truth.shape))
        of_w = np.asarray(x, np.float64).T @ np.asarray(gradient(cotangents)[0])
    program = autocast(lambda w, x: recurrence(x @ w), policy, params=0)
    found, gradient = jax.vjp(lambda w: program(w, x), w)
    unit = float(jnp.finfo(half_of(policy)).eps)
    assert error(found, truth) < unit / 4
    assert error(gradient(jnp.asarray(cotangents, jnp.float32))[0], of_w) < unit


def test_an_activation_over_its_sum_stays_in_half_precision():
    """The sum is no complement, nor is a sum with an epsilon."""

    def shares(w, x):
        s = jax.nn.sigmoid(x @ w)
        return s / (s.sum(-1, keepdims=True) + 1e-6) * jnp.log(s.var(-1, keepdims=True))

    assert reads(
        "logistic", jax.grad(lambda w, x: autocast(shares, BF16, params=0)(w, x).sum()), W, X
    ) == {("bfloat16",)}


def test_gates_stay_in_half_precision():
    def gated(w, x):
        hidden = jax.nn.sigmoid(x @ w) * jnp.tanh(x @ w)
        return -jnp.log(jax.nn.softmax(hidden @ w)).mean()

    assert reads("logistic tanh", jax.grad(autocast(gated, BF16, params=0)), W, X) == {
        ("bfloat16",)
    }


def test_statistics_of_looked_up_params_keep_what_they_meet_in_float32():
    """What was looked up is an activation: its mean is no table, whose readers are in half."""
    drawn = np.random.default_rng(0).integers(-100, 100, (8, 4))
    table, ids = jnp.asarray(drawn / 64, jnp.float32), jnp.arange(8)

    def standardized(table):
        return jnp.exp(jax.nn.standardize(table[ids, ids % 4]))

    found = autocast(standardized, BF16, params=0)(table)
    assert error(found, standardized(table)) < 1e-6  # 0.0003 if the centered values are rounded


@pytest.mark.parametrize(
    "function",
    [
        jnp.linalg.pinv,
        lambda w: jnp.linalg.lstsq(w, jnp.ones((8, 2)))[0],
        jax.scipy.linalg.expm,
    ],
)
def test_linear_algebra_multiplies_in_float32_forward_and_backward(function):
    def gradient(f: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.sin(f(w))))(W)

    assert largest_error(gradient(autocast(function, BF16)), gradient(function)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"precision": "highest"}], ids=str)
def test_positions_times_frequencies_are_not_rounded_where_a_matmul_sums_one_product(options):
    def angles(positions: Any) -> Any:
        frequencies = 10000.0 ** -(jnp.arange(4) / 4)
        columns = frequencies[None, :, None]
        return jnp.matmul(columns, positions[:, None].astype(jnp.float32), **options)

    positions = jnp.arange(2000, 2006).reshape(2, 3)
    assert largest_error(autocast(angles, BF16)(positions), angles(positions)) < 1e-6

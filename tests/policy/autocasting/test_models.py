"""Every model, forward, jitted, differentiated and mapped: matmuls in half, sums in float32.

Results are near float32's. Arguments in half precision are traced as those in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

from policy.autocasting.transform import autocast
from tests.policy.autocasting.models import (
    BF16,
    MODELS,
    POLICIES,
    Model,
    dots,
    error,
    half_of,
    normal,
)
from tests.programs import Operation, named, operations

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
SENSITIVE = ("exp", "log", "log1p", "rsqrt", "square", "reduce_sum", "cumsum", "scatter-add")
SENSITIVE += ("reduce_window_sum",)
FLOATS = ("bfloat16", "float16", "float32", "float64", "complex64")
EACH = pytest.mark.parametrize("name", MODELS)


def loss_of(model: Model, fn: Any) -> Any:
    return lambda params: jnp.mean(jnp.square(fn(params, model.x).astype(jnp.float32)))


def floating(ops: list[Operation]) -> set[str]:
    return {dtype for op in ops for dtype in op.inputs if dtype in FLOATS}


@pytest.mark.cases(fast=1, slow=4)
@EACH
@POLICIES
def test_matmuls_run_in_half_and_sums_in_float32_forward_and_backward(name, policy):
    model = MODELS[name]
    half = half_of(policy)
    loss = loss_of(model, model.fn)
    programs = [operations(jax.grad(autocast(loss, policy, params=0)), model.params)]
    if half == "bfloat16":
        programs.append(operations(autocast(jax.grad(loss), policy, params=0), model.params))
        programs.append(operations(autocast(model.fn, policy), model.params, model.x))
    for ops in programs:
        found = named(ops, *MATMULS)
        assert len(found) >= model.matmuls
        assert floating(found) == {half}
        assert floating([op for op in named(ops, *SENSITIVE) if op.terms != 1]) <= {"float32"}


@pytest.mark.cases(slow=2)
@EACH
def test_results_and_gradients_are_float32s_to_a_few_bits(name):
    model = MODELS[name]
    cast = autocast(model.fn, BF16)

    @jax.jit  # one compilation
    def run(params):
        loss = loss_of(model, model.fn)
        inside, outside = jax.grad(loss_of(model, cast)), autocast(jax.grad(loss), BF16, params=0)
        results = cast(params, model.x), model.fn(params, model.x)
        return results, [gradient(params) for gradient in (jax.grad(loss), inside, outside)]

    (found, expected), (truth, *both) = run(model.params)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert error(found, expected) < 3e-2
    for gradients in both:
        assert error(ravel_pytree(gradients)[0], ravel_pytree(truth)[0]) < 6e-2
        kinds = [jax.tree.map(lambda a: (a.dtype, a.shape), t) for t in (gradients, model.params)]
        assert kinds[0] == kinds[1]


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.batched])
def test_it_maps_over_a_batch_in_either_order(name):
    model = MODELS[name]
    batch = jnp.stack([model.x, model.x[::-1]])
    cast = autocast(model.fn, BF16)

    @jax.jit
    def run(params, batch):
        inside = autocast(jax.vmap(model.fn, (None, 0)), BF16)(params, batch)
        one_by_one = jnp.stack([cast(params, x) for x in batch])
        return one_by_one, jax.vmap(cast, (None, 0))(params, batch), inside

    expected, *others = run(model.params, batch)
    assert max(error(found, expected) for found in others) < 2e-2


W, X = normal(8, 8), normal(8, 8)
PRODUCTS: dict[str, Any] = {
    "@": lambda w, x: x @ w,
    "einsum": lambda w, x: jnp.einsum("ij,jk->ik", x, w),
    "dot_general": lambda w, x: lax.dot_general(x, w, (([1], [0]), ([], []))),
    "in float32": lambda w, x: lax.dot(x, w, preferred_element_type=jnp.float32),
    "cast by the author": lambda w, x: x.astype(jnp.float32) @ w,
}


@pytest.mark.cases(fast=2, slow=8)
@pytest.mark.filterwarnings("ignore:.*multiplies a value that was cast")
@pytest.mark.parametrize("promotion", ["strict", "standard"])
@POLICIES
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_half_argument_meets_a_float32_parameter_in_compute_dtype(name, policy, promotion):
    half = half_of(policy)
    with jax.numpy_dtype_promotion(promotion):
        fn = autocast(PRODUCTS[name], policy, params=0)
        grad = jax.grad(lambda w, x: fn(w, x).astype(jnp.float32).sum(), (0, 1))
        assert set(dots(grad, W, X.astype(half))) == {(half,) * 2}
        assert [g.dtype for g in grad(W, X.astype(half))] == [jnp.float32, half]
        assert error(fn(W, X.astype(half)), PRODUCTS[name](W, X)) < 1e-2


@pytest.mark.filterwarnings("ignore:.*are emulated")
def test_a_half_argument_meets_a_float32_parameter_in_8_bits():
    fn = autocast(lambda w, x: x @ w, "p=f32,c=bf16,o=f32,m=f8", params=0)
    found = dots(fn, normal(16, 16), jnp.ones((16, 16), jnp.bfloat16))
    assert set(found) == {("float8_e4m3fn",) * 2}


def test_a_half_constant_meets_a_float32_parameter_in_compute_dtype():
    table = X.astype(jnp.bfloat16)
    fn = autocast(lambda w, x: lax.dot(table, w, preferred_element_type=jnp.float32) + x, "bf16")
    assert set(dots(fn, W, X)) == {("bfloat16",) * 2}


@POLICIES
def test_results_have_the_dtypes_of_the_function(policy):
    half = half_of(policy)
    fn = autocast(lambda a, b: (a * 2, a.astype(jnp.float32), b + 1, a.sum()), policy)
    found = fn(X.astype(half), X)
    assert [a.dtype for a in found] == [half, jnp.float32, jnp.float32, half]


@jax.custom_jvp
def spectrum(h):
    return jnp.fft.rfft(h).real


spectrum.defjvp(lambda given, moved: (spectrum(*given), jnp.fft.rfft(moved[0]).real))


def positive(h: Any) -> Any:
    return h @ h.T + 8 * jnp.eye(8)


def rms_norm(h: Any) -> Any:
    return h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6) * jnp.arange(1.0, 9.0)[None]


def layer_norm(h: Any) -> Any:
    centered = h - jnp.mean(h, -1, keepdims=True)
    deviation = jnp.sqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-6)
    return centered / deviation * jnp.arange(1.0, 9.0)[None]


def time_embedding(h: Any) -> Any:
    t = 999 + 2 * jnp.arange(8, dtype=h.dtype)[:, None]
    angles = t * jnp.exp(-jnp.arange(4, dtype=h.dtype))[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) + 0.1 * h


KERNEL = jnp.ones((1, 1, 3, 3), jnp.complex64)
FLOAT32: dict[str, Any] = {
    "fft": lambda h: jnp.fft.fft(h).real,
    "rfft": lambda h: jnp.fft.rfft(h).real,
    "filtered": lambda h: jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(h)) * jnp.fft.rfft(h)),
    "in a scan": lambda h: lax.scan(lambda c, row: (c, jnp.fft.rfft(row).real), 0.0, h)[1],
    "in a checkpoint": jax.checkpoint(lambda h: jnp.fft.rfft(h).real),
    "in a custom_jvp": spectrum,
    "complex matmul": lambda h: (lax.complex(h, h) @ lax.complex(h, 2 * h)).real,
    "complex quotient": lambda h: (1 / (lax.complex(jnp.tanh(h), h) + 2j)).real,
    "complex conv": lambda h: lax.conv(lax.complex(h, h)[None, None], KERNEL, (1, 1), "SAME").real,
    "cholesky": lambda h: jnp.linalg.cholesky(positive(h)),
    "svd": lambda h: jnp.linalg.svd(positive(h), compute_uv=False),
    "solve": lambda h: jnp.linalg.solve(positive(h), h),
    "RMSNorm by hand": lambda h: rms_norm(1000 * h),
    "LayerNorm by hand": layer_norm,
    "time embedding": time_embedding,
}


@pytest.mark.cases(fast=1, slow=15)
@POLICIES
@pytest.mark.parametrize("given", ["float32", "half"])
@pytest.mark.parametrize("name", FLOAT32)
def test_code_that_is_wrong_in_half_precision_runs_in_float32(name, given, policy):
    def loss(w, x):
        return jnp.sum(FLOAT32[name](x @ w * 0.2 + x) ** 2)

    x = X.astype(half_of(policy)) if given == "half" else X
    found = jax.jit(jax.value_and_grad(autocast(loss, policy, params=0)))(W, x)
    truth = jax.value_and_grad(loss)(W, X)
    for a, b in zip(found, truth, strict=True):
        assert error(a, b) < (5e-2 if policy == "mixed_bfloat16" else 1e-2)

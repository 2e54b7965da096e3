"""Forward and backward see the same 16-bit numbers, also where XLA drops the cast to them.

An eager call runs each operation as a program, which rounds its result; under `jax.jit`, and in a
loop's body, XLA fuses a matmul's cast with the cast to float32 that follows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from mpmodules import linen, nnx
from policy import losses, reductions
from policy.functions.checkpointing import as_stored
from tests.programs import named, operations

RNG = np.random.default_rng(0)
HALVES = pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
ROWS, WIDTH, CLASSES = 32, 16, 8
X = 8 * RNG.normal(size=(ROWS, WIDTH)).astype(np.float32)
W = 2 * RNG.normal(size=(WIDTH, CLASSES)).astype(np.float32)
COTANGENTS = RNG.normal(size=(ROWS, CLASSES)).astype(np.float32)


@HALVES
def test_a_stored_array_has_its_own_numbers_and_the_derivative_of_the_identity(dtype):
    x = jnp.asarray([0.0, -0.0, jnp.inf, jnp.nan, 6e-8, 1.0, 65504.0], dtype)
    for run in (as_stored, jax.jit(as_stored), jax.vmap(as_stored)):
        assert run(x).dtype == dtype
        np.testing.assert_array_equal(np.asarray(run(x), np.float32), np.asarray(x, np.float32))
    y, tangent = jax.jvp(as_stored, (x[5:],), (x[5:] * 2,))
    assert y.dtype == tangent.dtype == dtype
    gradient = jax.grad(lambda x: jnp.sum(as_stored(x) * x).astype(jnp.float32))(x[5:])
    np.testing.assert_array_equal(gradient, 2 * x[5:])
    for other in (jnp.float32(1.1), jnp.int32(3), jax.random.key(0), None, 1.5):
        assert as_stored(other) is other


def test_a_cast_that_xla_would_drop_is_kept():
    x = jnp.asarray(RNG.normal(size=64), jnp.float32)
    rounded = x.astype(jnp.bfloat16)

    def run(x: Array) -> Array:
        return as_stored((x * 1).astype(jnp.bfloat16)).astype(jnp.float32)

    np.testing.assert_array_equal(jax.jit(run)(x), rounded.astype(jnp.float32))


def scanned(loss: Callable[..., Array]) -> Callable[..., Array]:
    """Returns the sum of a loss over chunks of the rows, in a loop."""

    def run(w: Array, *rows: Array) -> Array:
        chunks = [row.reshape(4, ROWS // 4, *row.shape[1:]) for row in rows]
        return lax.scan(
            lambda total, chunk: (total + loss(w, *chunk), None), jnp.zeros(()), chunks
        )[0]

    return run


LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "cross entropy": losses.softmax_cross_entropy_with_integer_labels,
    "smoothed": lambda y, labels: losses.softmax_cross_entropy_with_integer_labels(
        y, labels, label_smoothing=0.1, z_loss=1e-3
    ),
    "dense labels": lambda y, labels: losses.softmax_cross_entropy(
        y, jax.nn.one_hot(labels, CLASSES)
    ),
    "logsumexp": lambda y, labels: reductions.logsumexp(y, -1, dtype=jnp.float32),
    "softmax": lambda y, labels: jnp.square(reductions.softmax(y, dtype=jnp.float32)).sum(-1),
    "log_softmax": lambda y, labels: reductions.log_softmax(y, dtype=jnp.float32)[:, 0],
    "standardize": lambda y, labels: reductions.standardize(y, dtype=jnp.float32)[:, 0],
    "variance": lambda y, labels: reductions.var(y + 400, -1, dtype=jnp.float32),
    "deviation": lambda y, labels: reductions.std(y + 400, -1, dtype=jnp.float32),
}


@HALVES
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_a_rounded_matmul_are_the_same_in_any_program(name, dtype):
    """Of logits of about 70, where an ulp of bfloat16 is 0.5."""
    labels = jnp.asarray((X @ W).argmax(-1))

    def loss(w: Array, x: Array, labels: Array) -> Array:
        return LOSSES[name](x.astype(dtype) @ w.astype(dtype), labels).sum()

    eager = jax.value_and_grad(loss)(W, X, labels)
    for run in (jax.jit(jax.value_and_grad(loss)), jax.value_and_grad(scanned(loss))):
        for found, wanted in zip(run(W, X, labels), eager, strict=True):
            # One rounding of the cotangent, beside 12 times the gradient that was found before.
            scale = np.abs(wanted).max()
            np.testing.assert_allclose(found, wanted, rtol=0, atol=float(2e-2 * scale))


NORMS: dict[str, Callable[[Any], Any]] = {
    "LayerNorm": lambda api: api.LayerNorm,
    "RMSNorm": lambda api: api.RMSNorm,
    "GroupNorm": lambda api: api.GroupNorm,
    "BatchNorm": lambda api: api.BatchNorm,
    "InstanceNorm": lambda api: api.InstanceNorm,
}


def built(name: str, api: Any, policy: str) -> Callable[[Array], Array]:
    kwargs = {"GroupNorm": {"num_groups": 4}, "BatchNorm": {"use_running_average": False}}
    options = kwargs.get(name, {})
    if api is nnx:
        layer = NORMS[name](api)(CLASSES, rngs=nnx.Rngs(0), dtype_policy=policy, **options)
        return lambda x: nnx.merge(*nnx.split(layer), copy=True)(x)
    layer = NORMS[name](api)(dtype_policy=policy, **options)
    shape = jnp.zeros((2, 3, CLASSES))
    variables = layer.init(jax.random.key(0), shape)
    return lambda x: layer.apply(variables, x, mutable=["batch_stats"])[0]


@pytest.mark.parametrize("offset", (0, 1000))
@pytest.mark.parametrize("api", (linen, nnx), ids=("linen", "nnx"))
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_the_statistics_of_the_numbers_that_it_normalizes(name, api, offset):
    """bfloat16 numbers around 1000 are 4 or 8 apart: their variance is not that of the matmul."""
    norm = built(name, api, "mixed_bfloat16")

    def loss(x: Array) -> tuple[Array, Array]:
        y = x.astype(jnp.bfloat16) @ jnp.asarray(W, jnp.bfloat16) + jnp.bfloat16(offset)
        y = norm(y.reshape(4, ROWS // 4, CLASSES)).reshape(COTANGENTS.shape)
        return (y * COTANGENTS).sum(), y

    grad = jax.grad(loss, has_aux=True)
    wanted, found = grad(X / 8), jax.jit(grad)(X / 8)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.abs(one - other).max() < 0.02 * np.abs(other).max()


def test_the_rounding_is_in_the_program_that_a_compiler_gets():
    def loss(y: Array) -> Array:
        return losses.softmax_cross_entropy_with_integer_labels(y, jnp.zeros(4, int)).sum()

    y = jnp.zeros((4, 8), jnp.bfloat16)
    assert named(operations(jax.grad(loss), y), "as_stored")
    for platform in ("cpu", "cuda", "tpu"):
        lowered = jax.jit(jax.grad(loss)).trace(y).lower(lowering_platforms=(platform,)).as_text()
        assert "reduce_precision" in lowered

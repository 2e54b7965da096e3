"""Layers that are alike are traced once; what tells them apart is theirs all the same."""

import contextlib
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen
from mpmodules.functions import attention, normalization
from tests.mpmodules.wings import BOTH, MIXED, Text, layer_norm

HALF = jnp.bfloat16
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


@pytest.fixture(autouse=True)
def nothing_traced_yet():
    jax.clear_caches()


@pytest.fixture
def seen(monkeypatch):
    """The traces of normalisations, forward and backward."""
    found: list[int] = []
    moments = normalization.moments
    monkeypatch.setattr(normalization, "moments", lambda *args: found.append(1) or moments(*args))
    return found


def norms(*epsilons: float) -> Text:
    def call(self, x):
        for i in range(len(epsilons)):
            x = getattr(self, f"norm_{i}")(x)
        return x

    parts: Any = {f"norm_{i}": layer_norm(8, epsilon=e) for i, e in enumerate(epsilons)}
    return Text(call, **parts)


@BOTH
@pytest.mark.parametrize("way", ["ours", "port"])
@pytest.mark.parametrize("epsilons", [(1e-3,) * 5, (1e-3, 1e-3, 2.0)])
def test_normalisations_that_are_alike_are_traced_once_and_keep_their_numbers(
    seen, wing, way, epsilons
):
    x = jnp.ones((2, 8))
    make = wing.ours if way == "ours" else lambda text, policy, x: wing.port(text, policy, None, x)
    model = make(norms(*epsilons), MIXED, x)
    seen.clear()
    jax.clear_caches()
    jax.make_jaxpr(jax.grad(lambda params, x: jnp.sum(model.pure(params, x))))(model.params, X)
    assert 1 <= len(seen) <= 2  # releases differ in whether the derivative's trace is another

    expected = rows = np.random.default_rng(0).normal(size=(4, 8))
    scales = [np.linspace(0.5, 1.5 - i, 8) for i in range(len(epsilons))]
    leaves = iter(scales)
    is_scale = lambda path: "scale" in jax.tree_util.keystr(path)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(next(leaves), leaf.dtype) if is_scale(path) else leaf,
        model.params,
    )
    for epsilon, scale in zip(epsilons, scales, strict=True):
        deviation = expected - expected.mean(-1, keepdims=True)
        expected = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + epsilon) * scale
    y = model.pure(params, jnp.asarray(rows, jnp.float32))
    np.testing.assert_allclose(y, expected, atol=4 * float(jnp.finfo(HALF).eps))


def test_attention_logits_that_are_alike_are_traced_once(monkeypatch):
    seen = []
    accumulating = attention.accumulating
    monkeypatch.setattr(
        attention, "accumulating", lambda *args: seen.append(1) or accumulating(*args)
    )

    def loss(query, key):
        weights = [
            attention.dot_product_attention_weights(query, key * i, dtype=HALF) for i in range(1, 5)
        ]
        return jnp.sum(sum(weights[1:], weights[0]).astype(jnp.float32))

    x = jax.ShapeDtypeStruct((1, 3, 2, 4), HALF)
    jax.make_jaxpr(jax.grad(loss))(x, x)
    assert len(seen) == 1


def test_a_layer_of_a_users_own_is_called_itself():
    class Doubled(linen.LayerNorm):
        def param(self, name, *args, **kwargs):
            return 2 * super().param(name, *args, **kwargs)

    x = jnp.asarray([[1.0, -1.0], [3.0, 1.0]], HALF)
    plain, doubled = linen.LayerNorm(dtype_policy="bfloat16"), Doubled(dtype_policy="bfloat16")
    params = plain.init(jax.random.key(0), x)
    np.testing.assert_array_equal(doubled.apply(params, x), 2 * plain.apply(params, x))


def test_an_interceptor_inside_of_a_ported_model_is_called_for_each_of_its_layers(seen):
    def doubled(next_fun, args, kwargs, context):
        y = next_fun(*args, **kwargs)
        return 2 * y if isinstance(context.module, flax.linen.LayerNorm) else y

    class Model(flax.linen.Module):
        intercepts: bool

        @flax.linen.compact
        def __call__(self, x):
            block = flax.linen.intercept_methods(doubled) if self.intercepts else None
            with block or contextlib.nullcontext():
                for _ in range(3):
                    x = flax.linen.LayerNorm()(x)
            return x

    x = jnp.asarray([[1.0, -1.0], [3.0, 1.0]])
    plain, intercepted = (
        linen.apply_policy(Model(intercepts), MIXED) for intercepts in (False, True)
    )
    params = plain.init(jax.random.key(0), x)
    expected = 2 * plain.apply(params, x)
    seen.clear()
    np.testing.assert_array_equal(intercepted.apply(params, x), expected)
    assert not seen  # Flax's code runs for each of them, and takes its statistics

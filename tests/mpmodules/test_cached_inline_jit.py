"""Layers that are alike are traced once; what tells them apart, and what Flax refuses, is theirs
all the same.
"""

import contextlib
from typing import Any

import flax.errors
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from mpmodules.functions import attention, normalization
from policy import use_policy

HALF = jnp.bfloat16


@pytest.fixture(autouse=True)
def nothing_traced_yet():
    jax.clear_caches()


def linen_model(*epsilons):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            for epsilon in epsilons:
                x = linen.LayerNorm(epsilon=epsilon)(x)
            return x

    model = Model(dtype_policy="mixed_bfloat16")
    params = model.init(jax.random.key(0), jnp.ones((2, 8)))
    return lambda params, x: model.apply(params, x), params


def ported_model(*epsilons):
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            for epsilon in epsilons:
                x = flax.linen.LayerNorm(epsilon=epsilon)(x)
            return x

    model = linen.apply_policy(Model(), "mixed_bfloat16")
    params = model.init(jax.random.key(0), jnp.ones((2, 8)))
    return lambda params, x: model.apply(params, x), params


def nnx_model(*epsilons):
    with use_policy("mixed_bfloat16"):
        model = nnx.Sequential(
            *(nnx.LayerNorm(8, epsilon=epsilon, rngs=nnx.Rngs(0)) for epsilon in epsilons)
        )
    graph, params = nnx.split(model)
    return lambda params, x: nnx.merge(graph, params)(x), params


@pytest.mark.parametrize("wing", [linen_model, ported_model, nnx_model])
@pytest.mark.parametrize("epsilons", [(1e-3,) * 5, (1e-3, 1e-3, 2.0)])
def test_the_statistics_of_normalisations_that_are_alike_are_traced_once(
    monkeypatch, wing, epsilons
):
    apply, params = wing(*epsilons)
    seen = []
    moments = normalization.moments
    monkeypatch.setattr(normalization, "moments", lambda *args: seen.append(1) or moments(*args))
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    jax.make_jaxpr(jax.grad(lambda params, x: jnp.sum(apply(params, x))))(params, x)
    assert 1 <= len(seen) <= 2  # releases differ in whether the derivative's trace is another


def test_bias_gradients_and_attention_logits_that_are_alike_are_traced_once(monkeypatch):
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


@pytest.mark.parametrize("wing", [linen_model, ported_model, nnx_model])
def test_layers_that_share_a_trace_keep_their_own_numbers(wing):
    apply, params = wing(1e-3, 1e-3, 2.0)
    rows = np.random.default_rng(0).normal(size=(4, 8))
    scales = [np.linspace(0.5, 1.5, 8), np.linspace(2, 1, 8), np.linspace(-1, 1, 8)]
    scale_leaves = iter(scales)
    is_scale = lambda path: "scale" in jax.tree_util.keystr(path)  # noqa: E731
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(next(scale_leaves), leaf.dtype) if is_scale(path) else leaf,
        params,
    )
    expected = rows
    for epsilon, scale in zip((1e-3, 1e-3, 2.0), scales, strict=True):
        deviation = expected - expected.mean(-1, keepdims=True)
        expected = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + epsilon) * scale
    y = apply(params, jnp.asarray(rows, jnp.float32))
    np.testing.assert_allclose(y, expected, atol=4 * float(jnp.finfo(HALF).eps))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda scale: {"bias": scale}, flax.errors.ScopeParamNotFoundError),
        (lambda scale: {"scale": scale[:3]}, flax.errors.ScopeParamShapeError),
    ],
)
def test_flax_refuses_a_variable_that_is_missing_or_of_another_shape(change, error):
    model, x = (
        linen.LayerNorm(dtype_policy="mixed_bfloat16", use_bias=False),
        jnp.ones((2, 8), HALF),
    )
    params = model.init(jax.random.key(0), x)["params"]
    with pytest.raises(error):
        model.apply({"params": change(params["scale"])}, x)


def test_a_layer_of_a_user_s_own_is_called_itself():
    class Doubled(linen.LayerNorm):
        def param(self, name, *args, **kwargs):
            return 2 * super().param(name, *args, **kwargs)

    x = jnp.asarray([[1.0, -1.0], [3.0, 1.0]], HALF)
    plain, doubled = linen.LayerNorm(dtype_policy="bfloat16"), Doubled(dtype_policy="bfloat16")
    params = plain.init(jax.random.key(0), x)
    np.testing.assert_array_equal(doubled.apply(params, x), 2 * plain.apply(params, x))


def traces_of(monkeypatch, model, *inputs):
    """Counts the traces of a ported model's normalisations, forward and backward."""
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    seen = []
    moments = normalization.moments
    monkeypatch.setattr(normalization, "moments", lambda *args: seen.append(1) or moments(*args))
    jax.make_jaxpr(jax.grad(lambda variables: jnp.sum(model.apply(variables, *inputs))))(variables)
    return len(seen)


def test_normalisations_inside_a_ported_attention_are_traced_once(monkeypatch):
    attention = flax.linen.MultiHeadDotProductAttention(2, normalize_qk=True)
    model = linen.apply_policy(
        flax.linen.Sequential([attention, attention.copy(name="second")]), "mixed_bfloat16"
    )
    assert 1 <= traces_of(monkeypatch, model, jnp.ones((1, 3, 8))) <= 2


def test_an_interceptor_inside_of_a_ported_model_is_called_for_each_of_its_layers(monkeypatch):
    def doubled(next_fun, args, kwargs, context):
        y = next_fun(*args, **kwargs)
        return 2 * y if isinstance(context.module, flax.linen.LayerNorm) else y

    class Model(flax.linen.Module):
        intercepts: bool

        @flax.linen.compact
        def __call__(self, x):
            with (
                flax.linen.intercept_methods(doubled)
                if self.intercepts
                else contextlib.nullcontext()
            ):
                for _ in range(3):
                    x = flax.linen.LayerNorm()(x)
            return x

    x = jnp.asarray([[1.0, -1.0], [3.0, 1.0]])
    plain, intercepted = (
        linen.apply_policy(Model(intercepts), "mixed_bfloat16") for intercepts in (False, True)
    )
    params = plain.init(jax.random.key(0), x)
    np.testing.assert_array_equal(intercepted.apply(params, x), 2 * plain.apply(params, x))
    assert (
        traces_of(monkeypatch, intercepted, x) == 0
    )  # Flax's code runs for each of them, and takes its statistics


def test_partitioned_params_are_read_from_their_boxes():
    boxed = linen.with_partitioning(linen.initializers.ones_init(), ("features",))
    model, x = (
        linen.LayerNorm(scale_init=boxed, dtype_policy="mixed_bfloat16"),
        jnp.asarray([[1.0, -1.0]], HALF),
    )
    params = model.init(jax.random.key(0), x)
    assert isinstance(params["params"]["scale"], flax.linen.Partitioned)
    y: Any = model.apply(params, x)
    np.testing.assert_allclose(y, [[1, -1]], atol=1e-5)

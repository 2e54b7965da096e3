"""Eager calls of layers compile about as many programs as Flax's, repeated ones none, and layers
that are alike are traced once.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen
from mpmodules.functions import attention, normalization
from policy import use_policy
from tests.mpmodules.apis import (
    APIS,
    BOTH,
    MIXED,
    Text,
    batch_norm,
    dense,
    layer,
    layer_norm,
    weight,
)

ROWS = np.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), np.float32)

_compiled = 0


def _count(event: str, duration_secs: float, **kwargs: Any) -> None:
    global _compiled
    _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def programs(lines: Callable[[], Any], policy: str | None) -> tuple[int, int]:
    """Returns how many programs lines compile, and how many they compile when they run again."""
    counts = []
    jax.clear_caches()
    for _ in range(2):
        before = _compiled
        with contextlib.nullcontext() if policy is None else use_policy(policy):
            lines()
        counts.append(_compiled - before)
    return counts[0], counts[1]


def sum_of_squares(y: Any) -> jax.Array:
    return jnp.square(y.astype(jnp.float32)).sum()


def train(api: Any, part: Any, modules: Any, dtype: Any = jnp.float32) -> None:
    """Makes a layer and takes the gradient of a call."""
    x = jnp.asarray(ROWS, dtype)
    if api.name == "nnx":
        made = part.nnx(modules, api.flax.Rngs(0))
        api.flax.grad(lambda layer, x: sum_of_squares(layer(x)), argnums=(0, 1))(made, x)
        return
    made = part.linen(None, modules, "")
    params = made.init(jax.random.key(0), x)
    jax.grad(lambda params, x: sum_of_squares(made.apply(params, x)), argnums=(0, 1))(params, x)


RNN = layer(lambda nn: nn.RNN(nn.SimpleCell(3)), lambda nnx, rngs: None)
CASES: dict[str, tuple[str, Any, Any]] = {
    "Dense": ("linen", dense(4, 3), jnp.float32),
    "LayerNorm": ("linen", layer_norm(4), jnp.bfloat16),
    "RNN": ("linen", RNN, jnp.float32),
    "BatchNorm": ("nnx", batch_norm(4), jnp.float32),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("case", CASES)
def test_eager_calls_compile_about_as_many_programs_as_flax_s(case):
    name, part, dtype = CASES[case]
    api = APIS[name]
    with jax.numpy_dtype_promotion("standard"):  # Flax's promote
        first, again = programs(lambda: train(api, part, api.flax, dtype), None)
    found, found_again = programs(lambda: train(api, part, api.module, dtype), MIXED)
    assert found <= 1.5 * first
    assert found_again <= again  # Flax's loops compile their bodies anew at each call


@pytest.mark.slow
def test_without_a_policy_layers_compile_flax_s_programs_and_alike_ones_share_theirs():
    api, norm = APIS["linen"], layer_norm(4)
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = (
            programs(lambda m=m: train(api, norm, m), None) for m in (api.module, api.flax)
        )
    assert ours == theirs

    def lines(count: int) -> None:
        for _ in range(count):
            train(api, norm, linen, jnp.bfloat16)

    one, _ = programs(lambda: lines(1), MIXED)
    assert programs(lambda: lines(4), MIXED) == (one, 0)


def blocks(count: int) -> Any:
    """Own code around layers that are alike, ported."""

    def call(self: Any, x: jax.Array) -> jax.Array:
        for i in range(count):
            y = getattr(self, f"dense_{i}")(x)
            x = x + jax.nn.softmax(y * x / 3.0) * jnp.where(y > 0.0, jnp.sqrt(jnp.abs(y)), -y)
        return x

    parts: dict[str, Any] = {f"dense_{i}": dense(4, 4) for i in range(count)}
    return APIS["linen"].port(Text(call, **parts), MIXED, None, ROWS)


@pytest.mark.slow
def test_own_code_shares_the_programs_of_its_operations():
    compiled = {}
    for count in (1, 4):
        model = blocks(count)
        compiled[count], again = programs(lambda: model(ROWS), None)  # noqa: B023
        assert again == 0
    assert compiled[4] <= 1.5 * compiled[1]


@pytest.mark.cases(fast=1)
@BOTH
@pytest.mark.parametrize("way", ["ours", "port"])
def test_repeated_calls_and_gradients_of_own_code_are_not_traced_again(api, way):
    traced = []

    def call(self, x):
        traced.append(x.shape)
        return self.layer(x) @ self.w

    model = getattr(api, way)(Text(call, layer=dense(4, 4), w=weight(4, 4)), MIXED)
    traced.clear()
    outs = [model(ROWS * scale) for scale in (1, 2, 1)]
    assert len(traced) == 1
    np.testing.assert_array_equal(outs[0], outs[2])
    model(ROWS[:1])
    assert len(traced) == 2
    for _ in range(3):
        if api.name == "nnx":
            api.flax.grad(lambda m: m(ROWS).sum())(model.instance)
        else:
            jax.grad(model.total(ROWS))(model.params)
    assert len(traced) <= 4


@pytest.mark.slow
def test_own_code_returns_the_numbers_of_its_operations_one_by_one():
    model = blocks(2)
    one_by_one, _ = jax.vjp(lambda params: model.pure(params, ROWS), model.params)
    for _ in range(2):
        np.testing.assert_array_equal(model(ROWS), one_by_one)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        model(ROWS * np.nan)


HALF = jnp.bfloat16
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)


@pytest.fixture(autouse=True)
def nothing_traced_yet():
    jax.clear_caches()


@pytest.fixture
def seen(monkeypatch):
    """The traces of normalizations, forward and backward."""
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


@pytest.mark.cases(slow=2)
@BOTH
@pytest.mark.parametrize("way", ["ours", "port"])
@pytest.mark.parametrize("epsilons", [(1e-3,) * 5, (1e-3, 1e-3, 2.0)])
def test_normalizations_that_are_alike_are_traced_once_and_keep_their_numbers(
    seen, api, way, epsilons
):
    x = jnp.ones((2, 8))
    make = api.ours if way == "ours" else lambda text, policy, x: api.port(text, policy, None, x)
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


@pytest.mark.slow
def test_a_layer_of_a_users_own_is_called_itself():
    class Doubled(linen.LayerNorm):
        def param(self, name, *args, **kwargs):
            return 2 * super().param(name, *args, **kwargs)

    x = jnp.asarray([[1.0, -1.0], [3.0, 1.0]], HALF)
    plain, doubled = linen.LayerNorm(dtype_policy="bfloat16"), Doubled(dtype_policy="bfloat16")
    params = plain.init(jax.random.key(0), x)
    np.testing.assert_array_equal(doubled.apply(params, x), 2 * plain.apply(params, x))


@pytest.mark.slow
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

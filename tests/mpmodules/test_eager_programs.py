"""Eager calls of layers compile about as many programs as Flax's own do for the same lines, and
repeated ones none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen
from policy import use_policy
from tests.mpmodules.wings import MIXED, WINGS, Text, batch_norm, dense, layer, layer_norm

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


def train(wing: Any, part: Any, modules: Any, dtype: Any = jnp.float32) -> None:
    """Makes a layer and takes the gradient of a call."""
    x = jnp.asarray(ROWS, dtype)
    if wing.name == "nnx":
        made = part.nnx(modules, wing.flax.Rngs(0))
        wing.flax.grad(lambda layer, x: sum_of_squares(layer(x)), argnums=(0, 1))(made, x)
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


@pytest.mark.parametrize("case", CASES)
def test_eager_calls_compile_about_as_many_programs_as_flax_s(case):
    name, part, dtype = CASES[case]
    wing = WINGS[name]
    with jax.numpy_dtype_promotion("standard"):  # Flax's promote
        first, again = programs(lambda: train(wing, part, wing.flax, dtype), None)
    found, found_again = programs(lambda: train(wing, part, wing.module, dtype), MIXED)
    assert found <= 1.5 * first
    assert found_again <= again  # Flax's loops compile their bodies anew at each call


def test_without_a_policy_layers_compile_flax_s_programs_and_alike_ones_share_theirs():
    wing, norm = WINGS["linen"], layer_norm(4)
    with jax.numpy_dtype_promotion("standard"):
        ours, theirs = (
            programs(lambda m=m: train(wing, norm, m), None) for m in (wing.module, wing.flax)
        )
    assert ours == theirs

    def lines(count: int) -> None:
        for _ in range(count):
            train(wing, norm, linen, jnp.bfloat16)

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
    return WINGS["linen"].port(Text(call, **parts), MIXED, None, ROWS)


def test_own_code_shares_the_programs_of_its_operations():
    compiled = {}
    for count in (1, 4):
        model = blocks(count)
        compiled[count], again = programs(lambda: model(ROWS), None)  # noqa: B023
        assert again == 0
    assert compiled[4] <= 1.5 * compiled[1]


def test_own_code_returns_the_numbers_of_its_operations_one_by_one():
    model = blocks(2)
    one_by_one, _ = jax.vjp(lambda params: model.pure(params, ROWS), model.params)
    for _ in range(2):
        np.testing.assert_array_equal(model(ROWS), one_by_one)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        model(ROWS * np.nan)

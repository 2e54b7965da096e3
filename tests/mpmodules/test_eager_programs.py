"""Eager calls of layers compile about as many programs as Flax's own do for the same lines, and
repeated ones none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import use_policy

POLICY = "mixed_bfloat16"
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


def linen_lines(mod: Any, make: Callable[[Any], Any], dtype: Any) -> None:
    layer, x = make(mod), jnp.asarray(ROWS, dtype)
    variables = dict(layer.init(jax.random.key(0), x))
    params = variables.pop("params")

    def loss(params: Any, x: Any) -> jax.Array:
        return sum_of_squares(
            layer.apply({"params": params, **variables}, x, mutable=["batch_stats"])[0]
        )

    jax.grad(loss, argnums=(0, 1))(params, x)


def nnx_lines(mod: Any, make: Callable[[Any], Any], dtype: Any) -> None:
    layer, x = make(mod), jnp.asarray(ROWS, dtype)
    flax.nnx.grad(lambda layer, x: sum_of_squares(layer(x)), argnums=(0, 1))(layer, x)


def rngs() -> Any:
    return flax.nnx.Rngs(0)


class Blocks(flax.linen.Module):
    """Own code around layers that are alike."""

    count: int

    @flax.linen.compact
    def __call__(self, x: Any) -> jax.Array:
        for _ in range(self.count):
            y = flax.linen.Dense(4)(x)
            x = x + jax.nn.softmax(y * x / 3.0) * jnp.where(y > 0.0, jnp.sqrt(jnp.abs(y)), -y)
        return x


CASES: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "Dense": ("linen", lambda nn: nn.Dense(3), jnp.float32),
    "LayerNorm": ("linen", lambda nn: nn.LayerNorm(), jnp.bfloat16),
    "RNN": ("linen", lambda nn: nn.RNN(nn.SimpleCell(3)), jnp.float32),
    "BatchNorm": ("nnx", lambda nnx: nnx.BatchNorm(4, rngs=rngs()), jnp.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_eager_calls_compile_about_as_many_programs_as_flax_s(case):
    wing, make, dtype = CASES[case]
    ours, theirs, lines = (
        (linen, flax.linen, linen_lines) if wing == "linen" else (nnx, flax.nnx, nnx_lines)
    )
    with jax.numpy_dtype_promotion("standard"):  # Flax's promote
        first, again = programs(lambda: lines(theirs, make, dtype), None)
    found, found_again = programs(lambda: lines(ours, make, dtype), POLICY)
    assert found <= 1.5 * first
    assert found_again <= again  # Flax's loops compile their bodies anew at each call


def test_without_a_policy_layers_compile_flax_s_programs():
    lines = functools.partial(linen_lines, make=lambda nn: nn.LayerNorm(), dtype=jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        assert programs(lambda: lines(linen), None) == programs(lambda: lines(flax.linen), None)


def test_layers_that_are_alike_share_their_programs():
    def lines(count: int) -> None:
        x = jnp.asarray(ROWS, jnp.bfloat16)
        for i in range(count):
            layer = linen.LayerNorm(name=f"norm_{i}")
            variables = layer.init(jax.random.key(0), x)
            jax.grad(lambda v, x, layer=layer: sum_of_squares(layer.apply(v, x)))(variables, x)

    one, _ = programs(lambda: lines(1), POLICY)
    assert programs(lambda: lines(4), POLICY) == (one, 0)


def blocks(count: int) -> tuple[Any, Any]:
    model = linen.apply_policy(Blocks(count), POLICY)
    return model, model.init(jax.random.key(0), ROWS)


def test_own_code_shares_the_programs_of_its_operations():
    compiled = {}
    for count in (1, 4):
        model, variables = blocks(count)
        compiled[count], again = programs(lambda: model.apply(variables, ROWS), None)  # noqa: B023
        assert again == 0
    assert compiled[4] <= 1.5 * compiled[1]


def test_own_code_returns_the_numbers_of_its_operations_one_by_one():
    model, variables = blocks(2)
    one_by_one, _ = jax.vjp(lambda variables: model.apply(variables, ROWS), variables)
    for _ in range(2):
        np.testing.assert_array_equal(model.apply(variables, ROWS), one_by_one)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        model.apply(variables, ROWS * np.nan)

"""suggest with 50 modules, of which a few lose what they return: the fewest are kept in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as nn
from mpmodules import nnx
from policy.inspect.suggest.suggest import suggest

COUNT = 50
# The model loses a part of its outputs where all modules of a cause are in half precision.
CAUSES = [(7,), (12, 40), (12, 33)]
PLANTED = {i for cause in CAUSES for i in cause}
X = np.array([1.0, 1 + 2.0**-12], np.float32)  # bfloat16 rounds both to 1


def kernel(i: int) -> Any:
    """Returns the difference of both inputs, magnified, for a planted layer; else a small sum."""
    return jnp.array([[-4096.0], [4096.0]]) if i in PLANTED else jnp.full((2, 1), 0.01)


def total(layers: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    """Returns a little from most layers, and what the first of each cause returns that is not 0."""
    outputs = [layer(x) for layer in layers]
    found = [y for i, y in enumerate(outputs) if i not in PLANTED]
    for first, *others in CAUSES:
        y = outputs[first]
        for i in others:
            y = jnp.where(y == 0, outputs[i], y)
        found.append(y)
    return jnp.concatenate(found)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return total([nn.Dense(1, use_bias=False, name=f"layer_{i}") for i in range(COUNT)], x)


class NnxModel(nnx.Module):
    def __init__(self) -> None:
        kernels = [lambda *_, i=i: kernel(i) for i in range(COUNT)]
        self.layer = nnx.List(
            [nnx.Linear(2, 1, use_bias=False, kernel_init=one, rngs=nnx.Rngs(0)) for one in kernels]
        )

    def __call__(self, x: Any) -> Any:
        return total(self.layer, x)


def call_of(wing: str) -> tuple[Any, ...]:
    """Returns the function and its arguments."""
    if wing == "nnx":
        return NnxModel(), X
    params = {f"layer_{i}": {"kernel": kernel(i)} for i in range(COUNT)}
    return LinenModel().apply, {"params": params}, X


@pytest.mark.parametrize("wing", ("linen", "nnx"))
def test_of_fifty_modules_the_fewest_that_repair_all_causes_are_kept(wing: str) -> None:
    found = suggest(*call_of(wing), error=0.1, policy="mixed_bfloat16")
    assert len(found.paths) == len(found.rules) == 2
    assert {int(path[6:]) for path in found.paths} == {7, 12}
    assert found.error <= 0.1 < found.without
    count = len(found.evidence)
    assert count >= COUNT and found.runs <= 3 * count * math.log2(count)

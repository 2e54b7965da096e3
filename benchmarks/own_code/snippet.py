"""A piece of a model's own code, its parameters and its inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Params = Mapping[str, Any]
BATCH, TIME, WIDTH = 4, 8, 16
STREAM, IMAGE, ROWS = (BATCH, TIME, WIDTH), (BATCH, 6, 6, WIDTH), (WIDTH, WIDTH)


@dataclasses.dataclass(frozen=True)
class Param:
    """A parameter, drawn from a normal distribution.

    Attributes:
      shape: its shape.
      mean: the mean of the distribution.
      deviation: its standard deviation; None is 1 / sqrt(fan-in), as of a matmul's weight.
    """

    shape: tuple[int, ...]
    mean: float = 0.0
    deviation: float | None = None

    @property
    def scale(self) -> float:
        """The standard deviation."""
        fan_in = math.prod(self.shape[:-1])
        return 1 / math.sqrt(fan_in) if self.deviation is None else self.deviation

    def init(self, key: Any, shape: tuple[int, ...]) -> jax.Array:
        """Initializes it as a Flax initializer does."""
        return self.mean + self.scale * jax.random.normal(key, shape)

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Draws it in float32, with numpy."""
        drawn = self.mean + self.scale * generator.normal(size=self.shape)
        return np.asarray(drawn, np.float32)


@dataclasses.dataclass(frozen=True)
class Snippet:
    """A piece of code between provided layers.

    Attributes:
      name: in the table.
      body: a function of the parameters, the stream and the targets.
      params: the parameters, by name.
      shape: the stream's.
      targets: draws what a loss takes beside the stream.
      outputs: the width of the provided Dense.
      is_loss: whether `body` is a loss: it comes after the Dense. Others come before.
    """

    name: str
    body: Callable[..., Any]
    params: Mapping[str, Param]
    shape: tuple[int, ...] = STREAM
    targets: Callable[[np.random.Generator], tuple[Any, ...]] = lambda _: ()
    outputs: int = WIDTH
    is_loss: bool = False

"""The rows of the table of mistakes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

X = jnp.ones((2, 4))
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A mistake of a newcomer, and what is said of it.

    Attributes:
      what: the mistake, in a few words.
      make: makes it.
      told: the exception or the warning.
      names: texts that its message holds: the argument, the value, the way out.
    """

    what: str
    make: Callable[[], Any]
    told: type[BaseException]
    names: tuple[str, ...]

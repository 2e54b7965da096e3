"""A call of a normalisation taken apart, so that JAX traces it once for all layers that are alike."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from policy.policy import Policy

# Fields of a layer that differ from layer to layer, and are of no use once its variables are there.
UNUSED = frozenset(("scale_init", "bias_init", "rngs", "parent", "name"))


@dataclasses.dataclass(frozen=True)
class NormalizationCall(abc.ABC):
    """What a call of a normalisation does with its input; a wing says how.

    Attributes:
      method: Flax's.
      output_dtype: of the result.
      shifts: whether the variance may be taken in one pass over shifted data.
      args, rest: the other arguments of the call.
    """

    method: Callable[..., Any]
    policy: Policy
    output_dtype: Any
    shifts: bool
    args: tuple[Any, ...]
    rest: tuple[tuple[str, Any], ...]

    @property
    def use_running_average(self) -> Any:
        return self.args[0] if self.args else dict(self.rest).get("use_running_average")

    def is_of(self, layer: Any, module: str) -> bool:
        """Whether the call is Flax's own, of a class of ours in `module`, with nothing but flags beside its input."""
        flags = (*self.args, *(value for _, value in self.rest))
        is_own = type(layer).__module__ == module and self.method.__module__.startswith("flax.")
        return is_own and all(flag is None or isinstance(flag, bool) for flag in flags)

    @abc.abstractmethod
    def __call__(self, layer: Any, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The result, and the values of the running statistics after the call."""


def frozen(fields: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Hashable], ...] | None:
    """What decides a layer's program, hashable; None where something in it is not."""
    found = tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in fields if n not in UNUSED)
    try:
        hash(found)
    except TypeError:
        return None
    return found

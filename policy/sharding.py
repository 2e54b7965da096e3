"""Gradients across devices: varying values, reductions, collectives."""

from policy.grads.across_devices import all_reduce, vary
from policy.inspect.hlo.collectives import Collective, collectives_of

__all__ = ["Collective", "all_reduce", "collectives_of", "vary"]


def __dir__() -> list[str]:
    return list(__all__)

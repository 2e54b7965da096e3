"""Reductions and fragile functions, computed in reduction_dtype."""

from policy.functions.reductions import *  # noqa: F403
from policy.functions.reductions import __all__ as __all__


def __dir__() -> list[str]:
    return list(__all__)

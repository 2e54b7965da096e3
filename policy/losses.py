"""Losses computed and returned in reduction_dtype."""

from policy.functions.losses import *  # noqa: F403
from policy.functions.losses import __all__ as __all__


def __dir__() -> list[str]:
    return list(__all__)

"""Assertions about dtypes and programs, for test suites."""

from policy.inspect.testing import *  # noqa: F403
from policy.inspect.testing import __all__ as __all__


def __dir__() -> list[str]:
    return list(__all__)

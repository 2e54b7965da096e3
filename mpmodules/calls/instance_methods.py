"""Methods that the instances of a class run in place of the function that the class shows."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


class InstanceMethod:
    """A method of instances; looked up on the class, it is the function that the base class has.

    Code that asks whether a class overrides a method, as in ``type(self).encode is not
    Base.encode``, compares the functions of classes. A subclass that only puts something around a
    method must not look like an override.

    Args:
      shown: the function of the base class.
      run: the function that a call on an instance runs.
    """

    nowrap = True  # Flax wraps the descriptors of a module's class otherwise

    def __init__(self, shown: Callable[..., Any], run: Callable[..., Any]):
        self._shown, self.run = shown, run

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return self._shown if instance is None else types.MethodType(self.run, instance)

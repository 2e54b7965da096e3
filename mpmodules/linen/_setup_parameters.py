"""Parameters that a linen module's setup assigns to attributes: each reader gets them in its own
compute_dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.typing import DTypeLike

from mpmodules.linen._calls import calls
from policy.casting import is_floating
from policy.grads.parameter_reads import read_parameter
from policy.scope import current_scope

_MADE = "_parameters_made_in_setup"  # on an instance, while its setup runs
_HELD = "_held_parameters"  # on an instance, by attribute


@dataclasses.dataclass(frozen=True)
class Read:
    """A parameter as stored, and the dtype that it was asked for in.

    Returns None for that of its reader.
    """

    stored: Any
    dtype: DTypeLike | None = None

    def value(self) -> Any:
        """Returns the parameter for the code that reads it now: in compute_dtype in a call, else as
        stored.
        """
        policy = current_scope().policy if calls.paths else None
        if policy is None:
            return self.stored
        return read_parameter(
            self.stored, policy.compute_dtype if self.dtype is None else self.dtype
        )


def made_in_setup(module: Any, value: Any, read: Read) -> None:
    """Notes a parameter that setup has made, which it may assign to an attribute."""
    if any(map(is_floating, jax.tree.leaves(read.stored))):
        vars(module).setdefault(_MADE, []).append((value, read))


def hold(module: Any) -> None:
    """Takes the parameters that setup assigned out of a module's attributes, where `held` finds
    them.
    """
    namespace = vars(module)
    made: list[tuple[Any, Read]] = namespace.pop(_MADE, [])
    reads = {
        name: read
        for name, value in list(namespace.items())
        for returned, read in made
        if value is returned
    }
    for name in reads:
        del namespace[name]
    if reads:
        namespace[_HELD] = namespace.get(_HELD, {}) | reads


def is_held(module: Any, name: str) -> bool:
    """Returns whether an attribute of a module is a parameter that its setup assigned."""
    return name in vars(module).get(_HELD, ())


def held(module: Any, name: str) -> Any:
    """Returns a parameter that setup assigned, for the code that reads it now."""
    return vars(module)[_HELD][name].value()

"""Equations and jaxprs as far as they are read here, alike in all versions of JAX.

`jax.extend.core` has the classes; the abstract values of their variables are typed there without
shapes and dtypes, and closed jaxprs became open ones in jax 0.12.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import jax.extend.core as jex_core


class Equation(Protocol):
    """An equation of a jaxpr: `jax.extend.core.JaxprEqn`.

    Attributes:
      primitive: the operation.
      invars: variables and literals that it reads; each has an `aval`.
      outvars: the variables that it defines.
      effects: its side effects, such as those of a callback.
      params: the static arguments of the operation, and the programs that it runs.
      source_info: the traceback of the user's code, and the name stack.
      ctx: the settings of JAX that it was traced under.
    """

    @property
    def primitive(self) -> jex_core.Primitive: ...
    @property
    def invars(self) -> Sequence[Any]: ...
    @property
    def outvars(self) -> Sequence[Any]: ...
    @property
    def effects(self) -> Collection[Any]: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def source_info(self) -> Any: ...
    @property
    def ctx(self) -> Any: ...


class OpenJaxpr(Protocol):
    """A program whose constants are arguments: `jax.extend.core.Jaxpr`.

    Attributes:
      constvars, invars: the variables of its constants and arguments.
      outvars: variables and literals that it returns.
      eqns: its equations, in an order in which they can run.
      debug_info: the function that was traced, and the names of its arguments.
    """

    @property
    def constvars(self) -> Sequence[Any]: ...
    @property
    def invars(self) -> Sequence[Any]: ...
    @property
    def outvars(self) -> Sequence[Any]: ...
    @property
    def eqns(self) -> Sequence[Equation]: ...
    @property
    def debug_info(self) -> Any: ...

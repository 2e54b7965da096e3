"""Equations and jaxprs as far as they are read here, alike in all versions of JAX.

`jax.extend.core` has the classes; the abstract values of their variables are typed there without
shapes and dtypes, and closed jaxprs became open ones in jax 0.12.
"""

from __future__ import annotations

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

    primitive: jex_core.Primitive
    invars: Any
    outvars: Any
    effects: Any
    params: dict[str, Any]
    source_info: Any
    ctx: Any


class OpenJaxpr(Protocol):
    """A program whose constants are arguments: `jax.extend.core.Jaxpr`.

    Attributes:
      constvars, invars: the variables of its constants and arguments.
      outvars: variables and literals that it returns.
      eqns: its equations, in an order in which they can run.
      debug_info: the function that was traced, and the names of its arguments.
    """

    constvars: Any
    invars: Any
    outvars: Any
    eqns: Any
    debug_info: Any

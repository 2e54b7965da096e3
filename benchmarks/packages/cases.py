"""A published package's model as functions of its parameters: as it is, ported, under autocast,
with its own dtype.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import flax.core
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

from policy.autocasting.transform import autocast

POLICY = "mixed_bfloat16"
PORT, AUTOCAST, OWN = "port", "autocast", "own dtype"
_MADE_BY_CALLS = ("cache",)  # collections that a call makes anew
Way = Literal["float32", "port", "autocast", "own dtype"]
Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of a package.

    Attributes:
      name: as the table shows it.
      make: builds the module; its argument is the dtype for the model's own option.
      inputs: draws what it is called with.
      call: calls a module; of linen, what is bound to its variables.
      has_option: whether `make` knows what to do with a dtype: whether the model has an option of
        its own.
    """

    name: str
    make: Callable[[Any], Any]
    inputs: Callable[[np.random.Generator], tuple[Any, ...]]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)
    has_option: bool = False

    def arguments(self, seed: int) -> tuple[Any, ...]:
        """Draws the inputs, as JAX's arrays."""
        return jax.tree.map(jnp.asarray, self.inputs(np.random.default_rng(seed)))

    def ways(self) -> tuple[Way, ...]:
        """The ways to run the model in bfloat16."""
        return (PORT, AUTOCAST, *((OWN,) if self.has_option else ()))

    def program(self, way: Way) -> tuple[Function, Callable[[], tuple[Any, Any]]]:
        """Returns a function of parameters, state and inputs, and a maker of the first two."""
        module = self.make(jnp.bfloat16 if way == OWN else None)
        if isinstance(module, flax.linen.Module):
            return self._linen(module, way)
        return self._nnx(module, way)

    def _linen(self, module: Any, way: Way) -> tuple[Function, Callable[[], tuple[Any, Any]]]:
        if way == PORT:
            from mpmodules.linen import apply_policy

            module = apply_policy(module, POLICY)
        call = lambda bound, *inputs: self.call(bound, *inputs)  # noqa: E731

        def apply(params: Any, rest: Any, *inputs: Any) -> Any:
            variables, mutable = {"params": params, **rest}, [*rest, *_MADE_BY_CALLS]
            return module.apply(variables, *inputs, method=call, mutable=mutable, rngs=_rngs(0))[0]

        def initial() -> tuple[Any, Any]:
            made = jax.jit(functools.partial(module.init, method=call))(
                _rngs(0), *self.arguments(0)
            )
            variables: Mapping[str, Any] = flax.core.unfreeze(made)
            apart = ("params", *_MADE_BY_CALLS)
            return variables["params"], {
                name: variables[name] for name in variables if name not in apart
            }

        return (autocast(apply, POLICY, params=0) if way == AUTOCAST else apply), initial

    def _nnx(self, module: Any, way: Way) -> tuple[Function, Callable[[], tuple[Any, Any]]]:
        if way == PORT:
            from mpmodules.nnx import apply_policy

            module = apply_policy(module, POLICY)
        graph, params, rest = flax.nnx.split(module, flax.nnx.Param, ...)
        call = autocast(self.call, POLICY) if way == AUTOCAST else self.call

        def apply(params: Any, rest: Any, *inputs: Any) -> Any:
            return call(flax.nnx.merge(graph, params, rest, copy=True), *inputs)

        return apply, lambda: (params, rest)


def _rngs(seed: int) -> dict[str, jax.Array]:
    names = ("params", "dropout", "noise", "gaussian")
    return dict(zip(names, jax.random.split(jax.random.key(seed), len(names)), strict=True))

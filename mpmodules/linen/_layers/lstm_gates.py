"""Gradients of an OptimizedLSTMCell's biases, which Flax adds to one matmul of all four gates."""

from __future__ import annotations

import functools
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpmodules.functions.functional import trailing, with_bias_gradient

# For each function of a cell's, the gate that it is applied to at each of its calls, or None for
# something else.
Gates = dict[str, tuple[str | None, ...]]
_NAMES = ("hi", "hf", "hg", "ho")


def gates_of(cell: Any) -> Gates | None:
    """Returns the gates that the functions of `cell` are applied to, or None where they can't be
    determined.
    """
    call = inspect.unwrap(type(cell).__call__)
    for cls in reversed(
        type(cell).__mro__
    ):  # the class that the code is of; those derived from it wrap it
        own = vars(cls).get("__call__")
        if own is not None and inspect.unwrap(own) is call:
            return applied_gates(cls)
    return None


@functools.cache
def applied_gates(cls: Any) -> Gates | None:
    """Returns the gate that each call of `gate_fn` and `activation_fn` gets in a class of Flax's,
    by running it.

    The cell has one feature, kernels of zeros and another bias for each gate, so that a function
    gets exactly its gate's bias. The functions return 0, so that no other value is taken for a
    bias.

    Returns:
      None where the class can't be run so, or does not apply exactly one function to each gate.
    """
    try:
        with ThreadPoolExecutor(
            1
        ) as elsewhere:  # no scope, interceptor or trace of the call under way holds there
            given = elsewhere.submit(jax.jit(functools.partial(_given_to_functions, cls))).result()
    except (
        Exception
    ):  # whatever a newer Flax may say to other names: then the gradients are Flax's own
        return None
    gate_at = dict(enumerate(_NAMES, 1))
    gates: Gates = {
        name: tuple(gate_at.get(np.asarray(x).item()) for x in calls)
        for name, calls in given.items()
    }
    found = [gate for calls in gates.values() for gate in calls if gate is not None]
    return gates if sorted(found) == sorted(_NAMES) else None


def _given_to_functions(cls: Any) -> dict[str, list[jax.Array]]:
    """Returns the argument of each call of a cell's functions, where the biases of its gates are 1,
    2, 3 and 4.
    """
    given: dict[str, list[jax.Array]] = {"gate_fn": [], "activation_fn": []}

    def recording(name: str) -> Any:
        def function(x: jax.Array) -> jax.Array:
            given[name].append(x)
            return jnp.zeros_like(x)

        return function

    zero = jnp.zeros((1, 1), jnp.float32)
    params: dict[str, Any] = {name.replace("h", "i", 1): {"kernel": zero} for name in _NAMES}
    for i, name in enumerate(_NAMES, 1):
        params[name] = {"kernel": zero, "bias": jnp.full((1,), i, jnp.float32)}
    cell = cls(1, **{name: recording(name) for name in given}, parent=None)
    cell.apply({"params": params}, (zero, zero), zero)
    return given


class GateBiases:
    """Hooks of a cell that sum the gradients of its gates' biases in reduction_dtype.

    Flax adds all four biases to one matmul's result, and has no hook there. So they are read behind
    a `stop_gradient`, and each gets its gradient where its gate's sum is complete: where the gate's
    function is applied to it.
    """

    def __init__(self, cell: Any, gates: Gates, reduction_dtype: DTypeLike):
        self.cell, self.reduction_dtype = cell, reduction_dtype
        self.functions = {name: getattr(cell, name) for name in gates}
        self.gates = {name: list(calls) for name, calls in gates.items()}
        self.biases: dict[str, jax.Array] = {}

    def intercept(
        self, next_fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
    ) -> Any:
        returned = next_fun(*args, **kwargs)
        part = context.module
        if (
            part.path[:-1] != self.cell.path
            or context.method_name != "__call__"
            or part.name not in _NAMES
        ):
            return returned
        kernel, bias = returned
        self.biases[part.name] = bias
        return kernel, jax.lax.stop_gradient(bias)

    def hooks(self) -> dict[str, Any]:
        return {name: functools.partial(self._apply, name) for name in self.functions}

    def _apply(self, name: str, x: jax.Array) -> jax.Array:
        gate = self.gates[name].pop(0) if self.gates[name] else None
        if gate is not None:
            bias = self.biases[gate]
            x = with_bias_gradient(x, bias, trailing(x, bias), self.reduction_dtype)
        return self.functions[name](x)

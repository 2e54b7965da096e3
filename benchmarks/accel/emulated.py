"""Functions whose float32 matmuls are multiplied as a TPU or GPU multiplies them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from policy.inspect.traced.passes import Device, in_passes, is_in_passes, require_device
from policy.programs.jaxprs import Equation, bind, opened
from policy.programs.rewriting.interpreter import Interpreter, handler_of


def emulated(fn: Callable[..., Any], device: Device) -> Callable[..., Any]:
    """Returns `fn` with its float32 matmuls as a device multiplies them.

    A gradient is emulated by ``emulated(jax.grad(fn), device)``. Matmuls of another precision than
    default, high and highest, and of other dtypes, stay as they are.

    Args:
      fn: a function of trees of arrays, which returns one.
      device: "tpu" or "gpu".

    Raises:
      ValueError: another device.
    """
    require_device(device)

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        body, consts = opened(jaxpr)
        results = _Passes(device).run(body, consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run


class _Passes(Interpreter[Any]):
    """Evaluates a program, each of whose values is an array."""

    def __init__(self, device: Device):
        super().__init__()
        self.device: Device = device

    def equation(self, equation: Equation, values: list[Any]) -> list[Any]:
        if (handler := handler_of(equation)) is not None:
            return handler(self, equation, values)
        if is_in_passes(equation):
            return in_passes(equation, values, self.device)
        return bind(equation, values)

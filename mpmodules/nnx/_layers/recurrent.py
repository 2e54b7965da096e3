"""Recurrent cells and the loops over them: carries and computation in compute_dtype."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from jax.typing import DTypeLike

from mpmodules.calls import boundary
from mpmodules.calls.classes import is_upstream
from mpmodules.functions.functional import HalfSafe, half_safe_inits, is_half, mixing_allowed, widen
from mpmodules.nnx._layer import Layer
from mpmodules.nnx._module import Module
from mpmodules.nnx._resolution import is_initializer, viewed
from policy.core.arrays import cast_floating

_wraps: Any = functools.wraps  # typed, it would hide that a method is one


class RNNCellBase(Module, flax_nnx.RNNCellBase):
    """`flax.nnx.RNNCellBase` that obeys policies: the base class of a recurrent cell of your own.

    Where a cell's call is a boundary, inputs are cast to compute_dtype and outputs to output_dtype;
    the carry is never cast. Under a policy the new carry has the dtypes of the one given where
    these are wider, so that its type is kept through a scan. `initialize_carry` is no boundary: its
    result is not cast.

    Example:
      >>> class Sum(nnx.RNNCellBase):
      ...     def __call__(self, carry, x):
      ...         return carry + x.astype(carry.dtype), x
      ...     def initialize_carry(self, shape, rngs=None):
      ...         return jnp.zeros(shape)
      ...     num_feature_axes = 1
      >>> carry, y = Sum(dtype_policy="p=f32,c=bf16")(jnp.zeros(3), jnp.ones(3))
      >>> carry.dtype, y.dtype
      (dtype('float32'), dtype(bfloat16))
    """

    _crossing: ClassVar[boundary.Crossing] = boundary.STEP


class Cell(Layer):
    """Base class of Flax's cells: gates, carry and output in compute_dtype, parameters in
    param_dtype.

    A carry given in a wider dtype is cast to compute_dtype for the step and returned in its own
    dtype, so that its type is kept through a loop. With no policy, carry and output are in an
    explicit `dtype`.
    """

    carry_init: Any

    _adopts_children: ClassVar[bool] = True

    def _policy_arguments(
        self, upstream_init: Callable[..., None], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        parameters = inspect.signature(upstream_init).parameters.values()
        defaults = {
            p.name: p.default for p in parameters if is_initializer(p.name) and p.name not in kwargs
        }
        return kwargs | half_safe_inits(defaults, kwargs.get("param_dtype", jnp.float32))

    def _call_layer(self, call: boundary.MethodCall) -> Any:
        inside = [part for part in vars(self).values() if isinstance(part, Module)]
        # Those of other policies may have another output_dtype.
        with mixing_allowed(any(part.dtype_policy != self.dtype_policy for part in inside)):
            return boundary.step_in(self.dtype, self, call)

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: flax_nnx.Rngs | flax_nnx.RngStream | None = None,
        carry_init: flax_nnx.Initializer | None = None,
    ) -> Any:
        """Runs Flax's `initialize_carry`, and returns the carry in the cell's computation dtype.

        That is compute_dtype under a policy, else `dtype` where the cell has one, else param_dtype.

        Args:
          input_shape: the shape of the input of one step.
          rngs: the keys that `carry_init` draws with.
          carry_init: the initializer; None is the cell's own, or zeros.

        Returns:
          The carry: an array, or a tuple of arrays.
        """
        init: Any = self.carry_init if carry_init is None else carry_init
        if init is not None and is_half(self.param_dtype):
            init = HalfSafe(init)
        upstream: Any = super()
        return self._cast_carry(upstream.initialize_carry(input_shape, rngs, init))

    def _cast_carry(self, carry: Any) -> Any:
        """Casts a carry to the cell's computation dtype.

        A cell that infers its dtype leaves it as it is.
        """
        if self.dtype is None or not jnp.issubdtype(self.dtype, jnp.floating):
            return carry
        return cast_floating(carry, self.dtype)


class SimpleCell(Cell, flax_nnx.SimpleCell):
    """`flax.nnx.SimpleCell` that obeys policies; dtypes as in `LSTMCell`.

    With no policy its `dtype` is float32.

    Example:
      >>> layer = nnx.SimpleCell(4, 3, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry((2, 4), nnx.Rngs(0))
      >>> carry, y = layer(carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """


class LSTMCell(Cell, flax_nnx.LSTMCell):
    """`flax.nnx.LSTMCell` that obeys policies.

    Kernels and biases are created in param_dtype and cast where they are used, at every step: in an
    `RNN` the gradient of each is summed over the steps in reduction_dtype, and rounded once.
    Matmuls, gates, carry and output are in compute_dtype. A cell with a policy of its own returns
    its output in output_dtype, and its carry in compute_dtype. Initializers that JAX can't run in
    half precision run in float32.

    Example:
      >>> layer = nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry((2, 4), nnx.Rngs(0))
      >>> carry, y = layer(carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """


class OptimizedLSTMCell(Cell, flax_nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell` that obeys policies; dtypes as in `LSTMCell`.

    Example:
      >>> layer = nnx.OptimizedLSTMCell(4, 3, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry((2, 4), nnx.Rngs(0))
      >>> carry, y = layer(carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """


class GRUCell(Cell, flax_nnx.GRUCell):
    """`flax.nnx.GRUCell` that obeys policies; dtypes as in `LSTMCell`.

    Example:
      >>> layer = nnx.GRUCell(4, 3, rngs=nnx.Rngs(0), dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry((2, 4), nnx.Rngs(0))
      >>> carry, y = layer(carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """


class RNN(Module, flax_nnx.RNN):
    """`flax.nnx.RNN` that carries a policy: its call is a boundary, as any module's is, but never
    for the carry.

    The carry is in the cell's computation dtype, from `initial_carry` (cast, where the cell is one
    of Flax's) to the carry returned, so that one call can go on where another ended.

    Example:
      >>> with use_policy("p=f32,c=bf16"):
      ...     layer = nnx.RNN(nnx.LSTMCell(4, 3, rngs=nnx.Rngs(0)))
      >>> y = layer(jnp.ones((2, 5, 4)))
      >>> y.shape, y.dtype
      ((2, 5, 3), dtype(bfloat16))
    """

    _crossing: ClassVar[boundary.Crossing] = boundary.LOOP

    @_wraps(flax_nnx.RNN.__call__, assigned=("__name__",))
    def __call__(self, inputs: jax.Array, **options: Any) -> Any:
        """Runs the cell over a sequence, as Flax's `__call__` does.

        Args:
          inputs: (batch..., time, features...), or (time, batch..., features...) where
            `time_major`.
          initial_carry: a result of the cell's `initialize_carry` for one step, in any floating
            dtype.
          seq_lengths, return_carry, time_major, reverse, keep_order, rngs: as Flax has them.

        Returns:
          The outputs of all steps, or a pair of the last carry and the outputs where
          `return_carry`.
        """
        loop, policy, given = self, self.dtype_policy, options.get("initial_carry")
        if given is not None and isinstance(self.cell, Cell):
            options["initial_carry"] = self.cell._cast_carry(given)
        if policy is not None:
            options["seq_lengths"] = boundary.indexing_lengths(options.get("seq_lengths"))
            if self._may_widen():
                loop = viewed(self, cell=_widened(self.cell, policy.reduction_dtype))
        outputs = flax_nnx.RNN.__call__(loop, inputs, **options)
        if loop is not self:
            flax_nnx.update(self.cell, flax_nnx.state(loop.cell, flax_nnx.Not(flax_nnx.Param)))
        return outputs

    def _may_widen(self) -> bool:
        """Returns whether the loop may pass its half parameters to the cell in float32.

        Flax's cells cast each parameter where it is used, to the cell's computation dtype. So the
        values are the same, and the gradient of each is summed over the steps in float32: JAX sums
        that of a loop's carry in the carry's dtype.
        """
        cell: Any = self.cell
        if self.dtype_policy is None or not isinstance(cell, Cell) or cell.dtype is None:
            return False
        if not is_upstream(inspect.unwrap(type(cell).__call__)):
            return False
        return any(is_half(x.dtype) for x in jax.tree.leaves(flax_nnx.state(cell, flax_nnx.Param)))


def _widened(cell: Any, dtype: DTypeLike) -> Any:
    """Copies a cell with parameters at least as wide as `dtype`."""
    graphdef, params, rest = flax_nnx.split(cell, flax_nnx.Param, ...)
    return flax_nnx.merge(
        graphdef, jax.tree.map(lambda x: widen(x, dtype), params), rest, copy=True
    )


class Bidirectional(Module, flax_nnx.Bidirectional):
    """`flax.nnx.Bidirectional` that carries a policy: a boundary as any module's call is, but never
    for the carry.

    Example:
      >>> with use_policy("p=f32,c=bf16"):
      ...     cells = [nnx.GRUCell(4, 3, rngs=nnx.Rngs(i)) for i in range(2)]
      ...     layer = nnx.Bidirectional(*[nnx.RNN(cell) for cell in cells])
      >>> y = layer(jnp.ones((2, 5, 4)))
      >>> y.shape, y.dtype
      ((2, 5, 6), dtype(bfloat16))
    """

    _crossing: ClassVar[boundary.Crossing] = boundary.LOOP

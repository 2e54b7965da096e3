"""Recurrent cells and the loops over them: carries and computation in compute_dtype."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import lax
from jax.typing import DTypeLike

from mpmodules.calls import boundary
from mpmodules.calls.classes import is_upstream
from mpmodules.functions.functional import HalfSafe, is_half, mixing_allowed, widen
from mpmodules.layers.matmul_calls import Product, linear
from mpmodules.linen._layer import Layer
from mpmodules.linen._module import Module
from mpmodules.linen._port import adopting_inside
from mpmodules.linen._resolution import (
    declared_field,
    effective_policy,
    plain_fields,
    viewed,
)
from policy.core.arrays import cast_floating
from policy.core.scope import current_scope


class RNNCellBase(Module, flax_nn.RNNCellBase):
    """`flax.linen.RNNCellBase` that obeys policies: the base class of a recurrent cell of your own.

    Where a cell's call is a boundary, inputs are cast to compute_dtype and outputs to output_dtype;
    the carry is never cast. Under a policy the new carry has the dtypes of the one given where
    these are wider, so that its type is kept through a scan. `initialize_carry` is no boundary: its
    result is not cast.

    Example:
      >>> class Sum(linen.RNNCellBase):
      ...     def __call__(self, carry, x):
      ...         return carry + x.astype(carry.dtype), x
      ...     def initialize_carry(self, key, shape):
      ...         return jnp.zeros(shape)
      ...     num_feature_axes = 1
      >>> carry, y = Sum(dtype_policy="p=f32,c=bf16").apply({}, jnp.zeros(3), jnp.ones(3))
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

    param_dtype: DTypeLike | None = None

    def _call_layer(self, call: boundary.MethodCall) -> Any:
        fields = self._policy_fields(call.policy)
        dtype = call.effective.dtype
        if dtype is None:  # the gates are in compute_dtype also where the call is a boundary
            fields["_numerics"] = call._replace(crosses=False).numerics
        else:
            fields["dtype"] = dtype
        # Rules may give layers inside another output_dtype.
        mixing = mixing_allowed(bool(current_scope().rules))
        with viewed(self, fields) as view, adopting_inside(self, call), mixing:
            return boundary.step_in(fields["dtype"], view, call)

    @flax_nn.nowrap
    def initialize_carry(self, rng: jax.Array, input_shape: tuple[int, ...]) -> Any:
        """Runs Flax's `initialize_carry`, and returns the carry in the cell's computation dtype.

        That is compute_dtype under a policy, else an explicit `dtype`, else param_dtype.

        Args:
          rng: the key that `carry_init` draws with.
          input_shape: the shape of the input of one step.

        Returns:
          The carry: an array, or a tuple of arrays.
        """
        fields, init = self._plain_fields(), declared_field(self, "carry_init")
        if _is_floating(fields["dtype"]) and init is jax.nn.initializers.zeros:
            fields |= {"param_dtype": fields["dtype"]}  # zeros need no rounding
        else:
            fields |= {"carry_init": HalfSafe(init)}
        with viewed(self, fields) as view:
            upstream: Any = super(Cell, view)
            return self._cast_carry(upstream.initialize_carry(rng, input_shape))

    @flax_nn.nowrap
    def _plain_fields(self) -> dict[str, Any]:
        return plain_fields(self, effective_policy(self, current_scope()))

    @flax_nn.nowrap
    def _cast_carry(self, carry: Any) -> Any:
        """Casts a carry to the cell's computation dtype.

        A cell that infers its dtype leaves it as it is.
        """
        dtype = self._plain_fields()["dtype"]
        return cast_floating(carry, dtype) if _is_floating(dtype) else carry


def _is_floating(dtype: DTypeLike) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


class SimpleCell(Cell, flax_nn.SimpleCell):
    """`flax.linen.SimpleCell` that obeys policies; dtypes as in `LSTMCell`.

    Example:
      >>> layer = linen.SimpleCell(3, dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry(key, (2, 4))
      >>> ((carry, y), variables) = layer.init_with_output(key, carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """


class LSTMCell(Cell, flax_nn.LSTMCell):
    """`flax.linen.LSTMCell` that obeys policies.

    Kernels and biases are created in param_dtype and cast where they are used, at every step: in an
    `RNN` the gradient of each is summed over the steps in reduction_dtype, and rounded once.
    Matmuls, gates, carry and output are in compute_dtype. A cell with a policy of its own returns
    its output in output_dtype, and its carry in compute_dtype. Initializers that JAX can't run in
    half precision run in float32.

    Example:
      >>> layer = linen.LSTMCell(3, dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry(key, (2, 4))
      >>> ((carry, y), variables) = layer.init_with_output(key, carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """


class OptimizedLSTMCell(Cell, flax_nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell` that obeys policies; dtypes as in `LSTMCell`.

    Its matmuls are of all four gates at once: no rule can reach one of them, and a path rule that
    matches nothing but its parts is rejected.

    Example:
      >>> layer = linen.OptimizedLSTMCell(3, dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry(key, (2, 4))
      >>> ((carry, y), variables) = layer.init_with_output(key, carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """

    _hook: ClassVar[str] = "dot_general"

    _is_whole: ClassVar[bool] = True

    @flax_nn.compact
    def __call__(self, carry: Any, inputs: jax.Array) -> Any:
        """Takes a step, from carry (c, h) and inputs (..., in) to the new carry and h."""
        c, h = carry
        of_inputs: list[Any] = []
        of_carry: list[Any] = []
        parameters = functools.partial(
            flax_nn.recurrent.DenseParams,
            h.shape[-1],
            param_dtype=self.param_dtype,
            bias_init=HalfSafe(self.bias_init),
        )
        for gate in "ifgo":  # the names and the order of `LSTMCell`
            part = parameters(
                use_bias=False, kernel_init=HalfSafe(self.kernel_init), name=f"i{gate}"
            )
            of_inputs.append(part(inputs))
            part = parameters(kernel_init=HalfSafe(self.recurrent_kernel_init), name=f"h{gate}")
            of_carry.append(part(h))
        by_carry, by_inputs = self._multiplied(h, of_carry), self._multiplied(inputs, of_inputs)
        activations = self.gate_fn, self.gate_fn, self.activation_fn, self.gate_fn
        i, f, g, o = (
            run(a + b) for run, a, b in zip(activations, by_carry, by_inputs, strict=True)
        )
        c = f * c + i * g
        h = o * self.activation_fn(c)
        return (c, h), h

    @flax_nn.nowrap
    def _multiplied(self, x: jax.Array, parts: Sequence[Any]) -> list[jax.Array]:
        """Multiplies `x` by the kernels of all gates at once, and adds their biases."""
        kernels, biases = zip(*parts, strict=True)
        kernel = jnp.concatenate(kernels, axis=-1)
        bias = None if biases[0] is None else jnp.concatenate(biases, axis=-1)
        promoted = promote_dtype(x, kernel, bias, dtype=self.dtype)
        product = Product(self, promoted, bias, lax.dot_general)
        return jnp.split(linear(product), len(kernels), axis=-1)


class GRUCell(Cell, flax_nn.GRUCell):
    """`flax.linen.GRUCell` that obeys policies; dtypes as in `LSTMCell`.

    Example:
      >>> layer = linen.GRUCell(3, dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry(key, (2, 4))
      >>> ((carry, y), variables) = layer.init_with_output(key, carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """


class MGUCell(Cell, flax_nn.MGUCell):
    """`flax.linen.MGUCell` that obeys policies; dtypes as in `LSTMCell`.

    Example:
      >>> layer = linen.MGUCell(3, dtype_policy="p=f32,c=bf16")
      >>> carry = layer.initialize_carry(key, (2, 4))
      >>> ((carry, y), variables) = layer.init_with_output(key, carry, jnp.ones((2, 4)))
      >>> y.shape, y.dtype, {leaf.dtype.name for leaf in jax.tree.leaves(carry)}
      ((2, 3), dtype(bfloat16), {'bfloat16'})
    """


class ConvLSTMCell(Cell, flax_nn.ConvLSTMCell):
    """`flax.linen.ConvLSTMCell` that obeys policies; dtypes as in `LSTMCell`.

    Example:
      >>> layer = linen.ConvLSTMCell(3, (3,), dtype_policy="p=f32,c=bf16")
      >>> x = jnp.ones((2, 6, 4))
      >>> carry = layer.initialize_carry(key, x.shape)
      >>> ((carry, y), variables) = layer.init_with_output(key, carry, x)
      >>> y.shape, y.dtype
      ((2, 6, 3), dtype(bfloat16))
    """


class RNN(Module, flax_nn.RNN):
    """`flax.linen.RNN` that carries a policy: its call is a boundary, as any module's is, but never
    for the carry.

    The carry is in the cell's computation dtype, from `initial_carry` (cast, where the cell is one
    of Flax's) to the carry returned, so that one call can go on where another ended.

    Example:
      >>> layer = linen.RNN(linen.LSTMCell(3), dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 5, 4)))
      >>> y.shape, y.dtype
      ((2, 5, 3), dtype(bfloat16))
    """

    _dtype_fields: ClassVar[bool] = True
    _adopts_fields: ClassVar[tuple[str, ...]] = ("cell",)
    _crossing: ClassVar[boundary.Crossing] = boundary.LOOP

    def _call_layer(self, call: boundary.MethodCall) -> Any:
        kwargs, policy = dict(call.kwargs), call.policy
        if kwargs.get("initial_carry") is not None and isinstance(self.cell, Cell):
            kwargs["initial_carry"] = self.cell._cast_carry(kwargs["initial_carry"])
        if policy is not None and "seq_lengths" in kwargs:
            kwargs["seq_lengths"] = boundary.indexing_lengths(kwargs["seq_lengths"])
        call = call._replace(kwargs=kwargs)
        if policy is None or not self._may_widen():
            return call.run(self)

        def widened(variables: Any) -> Any:
            return jax.tree.map(lambda x: widen(x, policy.reduction_dtype), variables)

        return flax_nn.map_variables(call.run, "params", widened)(self)

    @flax_nn.nowrap
    def _may_widen(self) -> bool:
        """Returns whether the loop may pass its half parameters to the cell in float32.

        Flax's cells cast each parameter where it is used, to the cell's computation dtype. So the
        values are the same, and the gradient of each is summed over the steps in float32: JAX sums
        that of a loop's constant in the constant's own dtype.
        """
        is_upstreams = isinstance(self.cell, Cell) and is_upstream(
            inspect.unwrap(type(self.cell).__call__)
        )
        if not is_upstreams or self.is_initializing() or self.is_mutable_collection("params"):
            return False
        return any(is_half(x.dtype) for x in jax.tree.leaves(self.cell.variables.get("params", {})))


class Bidirectional(Module, flax_nn.Bidirectional):
    """`flax.linen.Bidirectional` that carries a policy: a boundary as any module's call is, but
    never for the carry.

    Example:
      >>> forward, backward = linen.RNN(linen.GRUCell(3)), linen.RNN(linen.GRUCell(3))
      >>> layer = linen.Bidirectional(forward, backward, dtype_policy="p=f32,c=bf16")
      >>> y, variables = layer.init_with_output(key, jnp.ones((2, 5, 4)))
      >>> y.shape, y.dtype
      ((2, 5, 6), dtype(bfloat16))
    """

    _crossing: ClassVar[boundary.Crossing] = boundary.LOOP

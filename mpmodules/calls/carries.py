"""Recurrent carries: boundaries leave them uncast, and a cell returns its carry in the dtype of the
one given.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mpmodules.calls.boundary import Crossing, LayerCall, given_carry, is_pair
from mpmodules.functions.functional import is_wider
from policy.core.casting import cast_array, cast_floating, is_floating


class StepCrossing(Crossing):
    """The casts of a cell's step, from carry and input to carry and output: the carry is left
    uncast.
    """

    leading: ClassVar[int] = 1
    keeps: ClassVar[tuple[str, ...]] = ("carry",)

    def returns_carry(self, module: Any, kwargs: dict[str, Any]) -> bool:
        return True

    def keep_carry(self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_given_dtypes(outputs, given_carry(args, kwargs))


class LoopCrossing(Crossing):
    """The casts of a loop over a cell: its `initial_carry` is left uncast, and the carry that it
    may return.
    """

    keeps: ClassVar[tuple[str, ...]] = ("initial_carry",)

    def returns_carry(self, module: Any, kwargs: dict[str, Any]) -> bool:
        asked = kwargs.get("return_carry")
        return bool(module.return_carry if asked is None else asked)


def with_given_dtypes(outputs: Any, given: Any) -> Any:
    """Casts the carry in a cell's outputs to the dtypes of the one given, wherever these are wider.

    Thus a float32 carry keeps its type through a loop of half-precision steps. A carry is never
    rounded to a narrower dtype of the first one.
    """
    if not is_pair(outputs) or jax.tree.structure(outputs[0]) != jax.tree.structure(given):
        return outputs
    return jax.tree.map(_as_wide, outputs[0], given), outputs[1]


def _as_wide(new: Any, given: Any) -> Any:
    if not (is_floating(new) and is_floating(given) and is_wider(given.dtype, new.dtype)):
        return new
    return cast_array(new, given.dtype)


def step_in(dtype: DTypeLike | None, cell: Any, call: LayerCall) -> Any:
    """Runs one step of a Flax cell with carry and output in `dtype`.

    Args:
      dtype: the cell's computation dtype. None (infer it), or one that is not floating, leaves the
        step as it is.
      cell: the cell.
      call: of its ``__call__``, from carry and input to carry and output; other methods run as they
        are.

    Returns:
      The new carry, in `dtype` or in the wider dtype that the given one had, and the output in
      `dtype`.
    """
    is_step = call.method.__name__ == "__call__"
    if not is_step or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return call.run(cell)
    given = call.first("carry")
    outputs = call.with_first(cast_floating(given, dtype), "carry").run(cell)
    return with_given_dtypes(cast_floating(outputs, dtype), given)


def indexing_lengths(seq_lengths: jax.Array | None) -> jax.Array | None:
    """Casts a loop's lengths to JAX's default integer dtype, that of the indices which Flax adds
    them to.

    In x64 mode strict promotion refuses int64 indices with int32 lengths.
    """
    if seq_lengths is None or not jnp.issubdtype(jnp.result_type(seq_lengths), jnp.integer):
        return seq_lengths
    return jnp.asarray(seq_lengths, jax.dtypes.canonicalize_dtype(int))

"""Parameters read by a user's own code: in compute_dtype, with gradients summed in float32.

A cast at the read alone would sum the cotangents of all uses in half precision. So a call that may
be differentiated is traced with casts marked as reads, and its program is evaluated with a separate
cast for each use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.typing import DTypeLike

from policy._jaxpr.pure_calls import PureCall, UnreturnableError
from policy.casting import cast_array, is_floating
from policy.grads.float32_cotangents import READ, evaluate, read
from policy.policy import Policy
from policy.scope import current_scope, enter

CANNOT_BE_TRACED = (
    UnreturnableError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
"""Errors of calls that need the values of arrays. Eager calls then run with casts at the reads."""


def read_parameter(value: Any, dtype: DTypeLike) -> Any:
    """Returns a parameter as user code reads it: floating arrays in `dtype`, others as stored.

    Args:
      value: an array, or a tree of arrays.
      dtype: compute_dtype where the parameter is read.
    """
    wanted, is_marked = jnp.dtype(dtype), current_scope().marks_reads

    def one(array: Any) -> Any:
        if not is_floating(array):
            return array
        if is_marked and wanted.itemsize < 4 and array.dtype.itemsize < 4:
            array = array.astype(jnp.float32)  # its cotangents are summed up before this cast
        with jax.named_scope(READ):
            return cast_array(array, wanted)

    return jax.tree.map(one, value)


def needs_float32_sums(policy: Policy | None, *trees: Any) -> bool:
    """Returns whether a call that reads parameters of its own has to be traced for their gradients.

    Args:
      policy: the policy of the module that is called.
      trees: its parameters and arguments; where none is traced, nothing is differentiated.
    """
    if policy is None or policy.compute_dtype.itemsize >= 4:
        return False
    return any(
        isinstance(leaf, jax.core.Tracer) for tree in trees for leaf in jax.tree.leaves(tree)
    )


def with_float32_sums(call: Callable[..., Any], *trees: Any) -> Any:
    """Returns ``call(*trees)`` with float32 gradient sums for its marked reads of parameters.

    Raises:
      the errors in `CANNOT_BE_TRACED`: the call needs the values of arrays, or returns an object
        that holds arrays.
    """

    def marking(*trees: Any) -> Any:
        with enter(dataclasses.replace(current_scope(), marks_reads=True)):
            return call(*trees)

    traced = PureCall.of(marking, *trees)
    return traced.returned([read(x) for x in evaluate(traced.jaxpr, traced.arrays)])

"""Casts at the boundary of a module's call, alike in both wings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import numpy as np

from mpmodules.calls.references import is_reference
from policy.core import boundary
from policy.core.policy import Policy

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Crossing:
    """The casts of a kind of modules' calls: every floating input and output is cast.

    Recurrent modules have others, which leave their carries uncast (`mpmodules.calls.carries`).
    """

    leading: ClassVar[int] = 0  # how many of the leading arguments are left uncast
    keeps: ClassVar[tuple[str, ...]] = ()  # the names of arguments that are left uncast

    def cast_inputs(
        self,
        policy: Policy,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        keep: Collection[str],
        signature: Callable[[], inspect.Signature],
    ) -> Arguments:
        """Casts a call's floating inputs to compute_dtype, but for those that hold a carry.

        Args:
          policy: the policy entered.
          args, kwargs: the call's arguments.
          keep: the names of other arguments to leave uncast.
          signature: returns the method's signature without `self`.
        """
        carry = args[: self.leading]

        def without_carry() -> inspect.Signature:
            full = signature()
            return full.replace(parameters=list(full.parameters.values())[len(carry) :])

        args, kwargs = boundary.cast_inputs(
            policy,
            args[len(carry) :],
            kwargs,
            is_leaf=is_reference,
            keep=(*keep, *self.keeps),
            signature=without_carry,
        )
        return (*carry, *args), kwargs

    def returns_carry(self, module: Any, kwargs: dict[str, Any]) -> bool:
        """Returns whether a call with these arguments returns a carry, as the first of a pair."""
        return False

    def given_carry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the carry that a call is given, or None."""
        return None

    def keep_carry(self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a call's outputs with its carry in dtypes at least as wide as those of the one
        given.
        """
        return outputs


PLAIN = Crossing()


def cast_outputs(policy: Policy, outputs: Any, *, has_carry: bool) -> Any:
    """Casts floating outputs to output_dtype, but not the carry where there is one: the first of a
    pair.
    """
    if has_carry and is_pair(outputs):
        return outputs[0], boundary.cast_outputs(policy, outputs[1], is_leaf=is_reference)
    return boundary.cast_outputs(policy, outputs, is_leaf=is_reference)


def is_pair(outputs: Any) -> bool:
    """Returns whether a call returned two values, as cells return a carry and an output."""
    return isinstance(outputs, tuple) and len(outputs) == 2


def signature_without_self(method: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a method as its callers see it."""
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def returned_dtype(policy: Policy, crosses: bool) -> np.dtype:
    """Returns the dtype of a layer's result: output_dtype where its call is a boundary, else
    compute_dtype.
    """
    return policy.output_dtype if crosses else policy.compute_dtype

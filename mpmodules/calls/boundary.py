"""Casts at the boundary of a module's call, alike in both wings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from mpmodules.calls.references import is_reference
from mpmodules.functions.functional import complex_input
from policy.core.casting import cast_floating
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.programs.marks import BOUNDARY

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
        keep: Collection[str] = (),
        method: Callable[..., Any],
    ) -> Arguments:
        """Casts the floating arrays among a call's arguments to compute_dtype.

        References are passed on by identity, because a copy would lose their holder.

        Args:
          policy: the policy entered. If its `cast_inputs` is False, nothing is cast.
          args, kwargs: the call's arguments, without `self`.
          keep: the names of arguments to leave uncast, beside those of a carry.
          method: the method, which tells the names of positional arguments; `self` is the first.
        """
        if not policy.cast_inputs:
            return args, kwargs
        names, kept = (*keep, *self.keeps), set(range(self.leading))
        if names and len(args) > self.leading:
            kept |= _kept_positions(method, len(args), names)
        with jax.named_scope(BOUNDARY):

            def cast(tree: Any) -> Any:
                return cast_floating(tree, policy.compute_dtype, is_leaf=is_reference)

            new_args = tuple(arg if i in kept else cast(arg) for i, arg in enumerate(args))
            return new_args, {
                name: value if name in names else cast(value) for name, value in kwargs.items()
            }

    def returns_carry(self, module: Any, kwargs: dict[str, Any]) -> bool:
        """Returns whether a call with these arguments returns a carry, as the first of a pair."""
        return False

    def carry_of(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Returns whether a call returns a carry, and then the one that it is given, or None."""
        has_carry = self.returns_carry(module, kwargs)
        return has_carry, given_carry(args, kwargs) if has_carry else None

    def keep_carry(self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a call's outputs with its carry in dtypes at least as wide as those of the one
        given.
        """
        return outputs


PLAIN = Crossing()


def given_carry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the carry that a cell is called with: its first argument, or `carry=`."""
    return args[0] if args else kwargs.get("carry")


def _kept_positions(method: Callable[..., Any], count: int, keep: Collection[str]) -> set[int]:
    """Returns the positions, among the first `count`, of the parameters named in `keep`."""
    kept: set[int] = set()
    for position, parameter in enumerate([*inspect.signature(method).parameters.values()][1:]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return kept | (set(range(position, count)) if parameter.name in keep else set())
        if parameter.name in keep:
            kept.add(position)
    return kept


def cast_outputs(policy: Policy, outputs: Any, *, has_carry: bool = False) -> Any:
    """Casts floating outputs to output_dtype, but not the carry where there is one: the first of a
    pair. References are returned by identity.
    """
    if has_carry and is_pair(outputs):
        return outputs[0], cast_outputs(policy, outputs[1])
    with jax.named_scope(BOUNDARY):
        return cast_floating(outputs, policy.output_dtype, is_leaf=is_reference)


def is_pair(outputs: Any) -> bool:
    """Returns whether a call returned two values, as cells return a carry and an output."""
    return isinstance(outputs, tuple) and len(outputs) == 2


class LayerCall(NamedTuple):
    """A call of a layer's method, without its boundary.

    Attributes:
      effective: the policy that the layer obeys.
      crosses: whether the call is a boundary.
      method: the method, whose first argument is the layer.
      args, kwargs: the other arguments.
    """

    effective: Effective
    crosses: bool
    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def policy(self) -> Policy | None:
        """The policy that the layer obeys, or None."""
        return self.effective.policy

    @property
    def returned_dtype(self) -> Any:
        """The dtype of the result: output_dtype where the call is a boundary, else compute_dtype;
        None without a policy.
        """
        policy = self.effective.policy
        if policy is None:
            return None
        return policy.output_dtype if self.crosses else policy.compute_dtype

    @property
    def complex_dtype(self) -> np.dtype | None:
        """The widest complex dtype among the arguments, or None."""
        return complex_input((*self.args, *self.kwargs.values()))

    def run(self, layer: Any) -> Any:
        """Calls the method of a layer, or of a view of it."""
        return self.method(layer, *self.args, **self.kwargs)

    def first(self, name: str = "inputs") -> Any:
        """Returns the first argument, whose name is `name`."""
        return self.args[0] if self.args else self.kwargs[name]

    def with_first(self, value: Any, name: str = "inputs") -> LayerCall:
        """Returns the call with another first argument."""
        if self.args:
            return self._replace(args=(value, *self.args[1:]))
        return self._replace(kwargs=self.kwargs | {name: value})

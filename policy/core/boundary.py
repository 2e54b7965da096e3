"""The policy boundary: casts inputs of calls to compute_dtype and outputs to output_dtype."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from policy.core.casting import cast_floating
from policy.core.policy import Policy
from policy.core.scope import Scope
from policy.programs.scope_names import BOUNDARY

IsLeaf = Callable[[Any], bool]


def module_crosses(scope: Scope, policy: Policy | None) -> bool:
    """Returns whether a module's call is a boundary.

    It is one if the module's policy differs from the one in force, or if no boundary is open yet.
    """
    return policy is not None and (not scope.boundary_open or policy != scope.policy)


def layer_crosses(scope: Scope, policy: Policy | None, own: bool) -> bool:
    """Returns whether a bare layer's call is a boundary.

    It is one if the layer has its own policy, and that differs from the one in force or no boundary
    is open yet.
    """
    return own and module_crosses(scope, policy)


def inside(scope: Scope, policy: Policy | None) -> Scope:
    """Returns the scope for the body of a call that crossed into `policy`."""
    return dataclasses.replace(scope, policy=policy, boundary_open=policy is not None)


def returns(scope: Scope, policy: Policy) -> Policy:
    """Returns the policy whose output_dtype holds for a call that crossed into `policy`."""
    return policy.returned_to(scope.policy if scope.boundary_open else None)


def cast_inputs(
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    is_leaf: IsLeaf | None = None,
    keep: Collection[str] = (),
    signature: Callable[[], inspect.Signature] | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Casts the floating arrays among a call's arguments to compute_dtype.

    Args:
      policy: the policy entered. If its `cast_inputs` is False, nothing is cast.
      args, kwargs: the call's arguments, without `self`.
      is_leaf: stops the walk at references, which are returned by identity because a copy would
        lose their holder.
      keep: the names of arguments to leave uncast.
      signature: returns the method's signature without `self`; needed to find `keep` among
        positional arguments.

    Returns:
      The new `(args, kwargs)`.
    """
    kwargs = dict(kwargs)
    if not policy.cast_inputs:
        return args, kwargs
    kept_positions: set[int] = set()
    if keep and args and signature is not None:
        kept_positions = _kept_positions(signature(), len(args), keep)
    with jax.named_scope(BOUNDARY):

        def cast(tree: Any) -> Any:
            return cast_floating(tree, policy.compute_dtype, is_leaf=is_leaf)

        new_args = tuple(arg if i in kept_positions else cast(arg) for i, arg in enumerate(args))
        return new_args, {
            name: value if name in keep else cast(value) for name, value in kwargs.items()
        }


def _kept_positions(signature: inspect.Signature, count: int, keep: Collection[str]) -> set[int]:
    """Returns the positions, among the first `count`, of the parameters named in `keep`."""
    kept: set[int] = set()
    for position, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return kept | (set(range(position, count)) if parameter.name in keep else set())
        if parameter.name in keep:
            kept.add(position)
    return kept


def cast_outputs(policy: Policy, outputs: Any, *, is_leaf: IsLeaf | None = None) -> Any:
    """Casts the floating arrays among a call's outputs to output_dtype.

    References are returned by identity.
    """
    with jax.named_scope(BOUNDARY):
        return cast_floating(outputs, policy.output_dtype, is_leaf=is_leaf)

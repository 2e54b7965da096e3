"""Policies in modules that are no layers: dtype fields, parameters and outputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as flax_nn
import jax

from mpmodules.calls.boundary import cast_outputs, is_pair
from mpmodules.calls.port_options import may_be_set, spelled_as
from mpmodules.linen._instances import stand_in
from mpmodules.linen._own_parameters import own_params
from policy.core.casting import cast_floating
from policy.core.policy import Policy
from policy.core.scope import current_scope


@contextlib.contextmanager
def foreign_module(module: Any, *, dtype_fields: bool) -> Iterator[Any]:
    """Yields a module that is no layer, or its stand-in, as it follows the policy in force.

    Parameters that it creates are stored in param_dtype.

    Args:
      module: the module, bound.
      dtype_fields: whether its fields `dtype` and `param_dtype` hold the policy's dtypes too.
    """
    policy = current_scope().policy
    if policy is None:
        yield module
        return
    before = {*own_params(module)}
    with stand_in(module, type(module), _dtypes_of(policy, module) if dtype_fields else {}) as seen:
        yield seen
    if module.is_mutable_collection("params"):
        for name, value in own_params(module).items():
            if name not in before:
                module.put_variable("params", name, cast_floating(value, policy.param_dtype))


# --------------------------------------------------------------------------------------------------
# Dtype fields
# --------------------------------------------------------------------------------------------------


def _dtypes_of(policy: Policy, module: Any) -> dict[str, Any]:
    """Returns the module's dtype fields that the policy decides, with its dtypes in them."""
    declared = {field.name for field in dataclasses.fields(module)} & vars(module).keys()
    wanted = {"dtype": policy.compute_dtype, "param_dtype": policy.param_dtype}
    return {
        name: spelled_as(vars(module)[name], dtype)
        for name, dtype in wanted.items()
        if name in declared and may_be_set(vars(module)[name])
    }


# --------------------------------------------------------------------------------------------------
# Outputs
# --------------------------------------------------------------------------------------------------


def in_compute_dtype(
    policy: Policy, outputs: Any, *, has_carry: bool, module: Any, args: tuple[Any, ...]
) -> Any:
    """Casts a submodule's outputs to compute_dtype, but no carry that was given in another dtype.

    Args:
      policy: the policy in force where the submodule is called.
      outputs: the outputs of its call.
      has_carry: whether the first of a pair of outputs is a recurrent cell's carry.
      module: the submodule. Inside of a lifted class (nn.scan(Block)) its parent is no module.
      args: the arguments of its call; the first may be a carry.
    """
    to_compute_dtype = dataclasses.replace(policy, output_dtype=policy.compute_dtype)
    lifted = not isinstance(module.parent, flax_nn.Module)
    if not (lifted and args and is_pair(outputs)) or has_carry:
        return cast_outputs(to_compute_dtype, outputs, has_carry=has_carry)
    carry, rest = outputs
    if jax.tree.structure(carry) == jax.tree.structure(args[0]):
        # A scan's carry keeps its dtype: a float32 one that is rounded here would have another type
        # than the first.
        carry = jax.tree.map(
            lambda new, given: _as_given(to_compute_dtype, new, given), carry, args[0]
        )
    else:
        carry = cast_outputs(to_compute_dtype, carry, has_carry=False)
    return carry, cast_outputs(to_compute_dtype, rest, has_carry=False)


def _as_given(to_compute_dtype: Policy, new: Any, given: Any) -> Any:
    same = getattr(given, "dtype", None) == to_compute_dtype.compute_dtype
    return cast_outputs(to_compute_dtype, new, has_carry=False) if same else new

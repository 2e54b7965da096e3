"""Policies in modules that are no layers: dtype fields, parameters and outputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as flax_nn
import jax
import numpy as np

from mpmodules._boundary import cast_outputs, is_pair
from mpmodules._port_options import may_be_set, spelled_as
from mpmodules.linen._resolution import fields_set
from policy._jaxpr import marks
from policy.casting import cast_floating
from policy.policy import Policy
from policy.scope import current_scope


@contextlib.contextmanager
def foreign_module_set(module: Any, *, dtype_fields: bool) -> Iterator[None]:
    """Makes a module that is no layer follow the policy in force, for the length of a block.

    Parameters that it creates come in param_dtype.

    Args:
      dtype_fields: whether its fields `dtype` and `param_dtype` hold the policy's dtypes too.
    """
    policy = current_scope().policy
    with contextlib.ExitStack() as stack:
        if policy is not None and dtype_fields and "_declared_fields" not in vars(module):
            stack.enter_context(fields_set(module, _dtypes_of(policy, module)))
        if policy is not None and module.is_mutable_collection("params"):
            stack.enter_context(_parameters_in(policy.param_dtype, module))
        yield


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
# Parameters
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _parameters_in(dtype: np.dtype, module: Any) -> Iterator[None]:
    """Makes the parameters that the module creates come in `dtype`.

    Their initialisers run as they are written.
    """

    def param(name: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        value = type(module).param(module, name, _cast_after(init_fn, dtype), *args, **kwargs)
        return jax.tree.map(marks.returned, value) if current_scope().traces_own_code else value

    def variable(
        col: str, name: str, init_fn: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if col == "params" and init_fn is not None:
            init_fn = _cast_after(init_fn, dtype)
        return type(module).variable(module, col, name, init_fn, *args, **kwargs)

    # On the instance, not its class: other threads call other instances. What a module calls so
    # itself stays.
    namespace = vars(module)
    ours = {
        name: function
        for name, function in (("param", param), ("variable", variable))
        if name not in namespace
    }
    namespace.update(ours)
    try:
        yield
    finally:
        for name, function in ours.items():
            if namespace.get(name) is function:
                del namespace[name]


def _cast_after(init_fn: Callable[..., Any], dtype: np.dtype) -> Callable[..., Any]:
    """Returns the initialiser with its floating results, boxed ones too, cast to `dtype`."""
    return lambda *args, **kwargs: cast_floating(init_fn(*args, **kwargs), dtype)


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

"""Parameters that a user's linen module creates with `self.param`, and the calls that read them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import meta
from flax.errors import TransformedMethodReturnValueError
from jax.typing import DTypeLike

from mpmodules._own_parameters import is_written_by_user, warn_of_unknown_names
from mpmodules._references import is_reference
from mpmodules.linen._boundary import NOT_BOUNDARIES
from mpmodules.linen._pure_calls import Method, lifted, put_back
from mpmodules.linen._resolution import effective_policy, where
from mpmodules.linen._setup_parameters import Read, made_in_setup
from policy.casting import cast_floating, is_floating
from policy.grads.parameter_reads import CANNOT_BE_TRACED, needs_float32_sums, with_float32_sums
from policy.policy import Policy
from policy.scope import current_scope

_call_plainly = flax_nn.Module._call_wrapped_method  # Flax's, through which it runs every method
_KEPT = "_runs_as_it_is"  # on an instance, while a call of it that can't be traced runs


def is_users(cls: type) -> bool:
    """Returns whether a class is one that a user wrote, and derives from none of Flax's layers."""
    return is_written_by_user(cls, flax_nn.Module)


def param(
    self: Any,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    unbox: bool = True,
    compute_dtype: DTypeLike | None = None,
    **init_kwargs: Any,
) -> Any:
    """Declares a parameter, and returns it in the compute_dtype of the policy in force.

    Args:
      name, init_fn, init_args, init_kwargs: as in `flax.linen.Module.param`. Under a policy,
        floating results of `init_fn` are stored in param_dtype.
      unbox: whether a boxed value is returned without its box. Boxed ones are returned as stored.
      compute_dtype: the dtype to read it in; None for the policy's. A policy must be in force for
        either.

    Returns:
      The parameter. Its gradient is summed in float32 and returned in the dtype that it is stored
      in.
    """
    cls = type(self)
    if not is_users(cls) or name in cls.keep_params:
        return flax_nn.Module.param(self, name, init_fn, *init_args, unbox=unbox, **init_kwargs)
    policy = effective_policy(self, current_scope()).policy
    if policy is not None:
        init_fn = _cast_after(init_fn, policy)
    stored = flax_nn.Module.param(self, name, init_fn, *init_args, unbox=unbox, **init_kwargs)
    if not unbox and isinstance(stored, meta.AxisMetadata):
        return stored
    read = Read(stored, compute_dtype)
    value = read.value()
    if self._state.in_setup:
        made_in_setup(self, value, read)
    return value


def _cast_after(init_fn: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Returns the initialiser with its floating results, boxed ones too, in param_dtype."""
    return lambda *args, **kwargs: cast_floating(init_fn(*args, **kwargs), policy.param_dtype)


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def install(cls: Any) -> None:
    """Makes the calls of a user's class, through which Flax runs every method, ones that may read
    parameters.
    """
    if is_users(cls) and cls._call_wrapped_method is _call_plainly:
        cls._call_wrapped_method = _call_reading


@flax_nn.nowrap
def _call_reading(
    module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a method of a module.

    Where it reads parameters of its own, their gradients are summed in float32.

    Args:
      module: the module.
      method: the function that Flax calls.
      args, kwargs: its arguments.
    """
    plainly = functools.partial(_call_plainly, module, method, args, kwargs)
    if not _reads_own_params(module, method, args, kwargs):
        outputs = plainly()
        if _has_just_initialised(module, method) and getattr(type(module), "keep_params", ()):
            warn_of_unknown_names(type(module), own_params(module), f"'{where(module)}'")
        return outputs
    try:
        return lifted(flax_nn.module.wrap_method_once(method), with_float32_sums)(
            module, *args, **kwargs
        )
    except (
        *CANNOT_BE_TRACED,
        TransformedMethodReturnValueError,
    ):  # the latter: it returns a module
        vars(module)[_KEPT] = True
        try:
            return plainly()
        finally:
            del vars(module)[_KEPT]


def _has_just_initialised(module: Any, method: Method) -> bool:
    if module.scope is None or getattr(method, "__name__", "") == "setup":
        return False
    return module.is_initializing()


def _reads_own_params(
    module: Any, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    scope = current_scope()
    if (
        scope.marks_reads
        or module.scope is None
        or not is_users(type(module))
        or _KEPT in vars(module)
    ):
        return False
    if getattr(method, "__name__", "") in NOT_BOUNDARIES or module.is_initializing():
        return False
    policy, params = (
        effective_policy(module, scope).policy,
        module.scope.variables().get("params", {}),
    )
    if not needs_float32_sums(policy, params, _arrays(args, kwargs)):
        return False
    return bool(own_params(module)) or _holds_params_of_others(module)


def _holds_params_of_others(module: Any) -> bool:
    """Returns whether a module's methods may read parameters of a user's modules that it has as
    attributes.
    """
    if _users_children(module):
        return True
    if type(module).setup is flax_nn.Module.setup:
        return False
    before = copy.deepcopy(module.scope.rng_counters)
    module._try_setup()
    found = _users_children(module)
    if found:  # the call is lifted, and its copy runs setup again
        put_back(module.scope.rng_counters, before)
    return found


def _users_children(module: Any) -> bool:
    """Returns whether a user's module with parameters of its own is an attribute of a bound module,
    as far as bound.
    """
    attributes = {name: value for name, value in vars(module).items() if name != "parent"}
    leaves = jax.tree.leaves(attributes, is_leaf=is_reference)
    children = [
        leaf for leaf in leaves if isinstance(leaf, flax_nn.Module) and is_users(type(leaf))
    ]
    return any(child.scope is not None and own_params(child) for child in children)


def _arrays(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_reference)
    return [leaf for leaf in leaves if not is_reference(leaf)]


def own_params(module: Any) -> dict[str, Any]:
    """Returns the floating parameters that a bound module holds itself, as stored.

    Those of modules in it are none.
    """
    params = module.scope.variables().get("params", {})
    return {
        name: value
        for name, value in params.items()
        if not isinstance(value, Mapping) and any(map(is_floating, jax.tree.leaves(value)))
    }

"""The policy that an nnx module captures and obeys, and the dtypes that Flax's code sees of it."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx
from jax.typing import DTypeLike

from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import is_ours, is_reference, policy_given, remedy_for, require_dtypes
from mpmodules.calls.under_way import nnx_calls as calls
from mpmodules.functions.functional import half_safe_inits
from policy.core.messages import warn_once
from policy.core.policy import Policy
from policy.core.precedence import Effective, with_explicit_dtypes
from policy.core.rules import Pattern, PolicyRules, pattern_text
from policy.core.scope import NO_SOURCE, Scope, Source, is_float32, require_usable

T = TypeVar("T")

# --------------------------------------------------------------------------------------------------
# When a module is built
# --------------------------------------------------------------------------------------------------


def own_policy(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Policy | None, dict[str, Any]]:
    """Returns the policy given as `dtype_policy=`, and the keyword arguments that go on to
    ``__init__``.

    An ``__init__`` that declares a `dtype_policy` of its own gets it too, and may be given it by
    position.
    """
    signature = inspect.signature(cls.__init__)
    if "dtype_policy" in signature.parameters:
        given = signature.bind_partial(None, *args, **kwargs)
        given.apply_defaults()
        given = given.arguments.get("dtype_policy")
    else:
        kwargs = dict(kwargs)
        given = kwargs.pop("dtype_policy", None)
    return None if given is None else policy_given(cls, given), kwargs


def policy_to_capture(cls: type, own: Policy | None, scope: Scope) -> tuple[Policy | None, Source]:
    """Returns the policy that a module of a class captures when it is built, and its source.

    Args:
      cls: the class.
      own: the policy that it is given as `dtype_policy=`, or None.
      scope: the scope that it is built in.

    Raises:
      ValueError: path rules are in force, or the policy can't be used.
    """
    source = scope.source if own is None else Source("argument", "dtype_policy", own=True)
    if scope.rules:
        if scope.rules.has_paths:
            raise ValueError(
                f"Building {cls.__name__} under use_policy(rules=...): path rules can't apply "
                "here, because an nnx module has no path while the model is being built. Build the "
                "model first and call mpmodules.nnx.apply_policy(model, policy, rules); class "
                "rules work in a scope."
            )
        rule = scope.rules.rule_for(None, cls) if own is None else None
        if rule is not None:
            own, source = of_rule(rule)
    policy = own if own is not None else scope.policy
    if policy is not None:
        require_usable(policy)
    return policy, source


def dtype_arguments(
    layer: Any,
    upstream_init: Callable[..., None],
    policy: Policy | None,
    source: Source,
    kwargs: dict[str, Any],
) -> tuple[Effective, dict[str, Any]]:
    """Returns the policy that a layer obeys, and its keyword arguments with the policy's dtypes put
    in.

    Explicit dtype arguments are noted on the layer: only here can they be told from the policy's.
    One that is None counts as not given; with no policy in force a `param_dtype` of None is
    float32. Initializers given are made to work in half precision where parameters are half.
    """
    kwargs = dict(kwargs)
    require_dtypes(type(layer).__name__, kwargs)
    accepted = set(inspect.signature(upstream_init).parameters)
    if "kwargs" in accepted:  # those of a base class
        accepted |= {"dtype", "param_dtype"}
    dtype, param_dtype = kwargs.get("dtype"), kwargs.get("param_dtype")
    if param_dtype is None:
        kwargs.pop("param_dtype", None)
    effective = with_explicit_dtypes(
        policy,
        source=source,
        dtype=dtype,
        param_dtype=param_dtype,
        what=type(layer).__name__,
        where=type(layer).__name__,
    )
    if dtype is not None:
        layer._explicit_dtype = jnp.dtype(dtype)
    if param_dtype is not None:
        layer._explicit_param_dtype = jnp.dtype(param_dtype)
    if effective.policy is not None:
        if "dtype" in accepted and effective.dtype is None:
            kwargs["dtype"] = effective.policy.compute_dtype
        if "param_dtype" in accepted and not is_complex(param_dtype):
            kwargs["param_dtype"] = effective.policy.param_dtype
    given = {name: init for name, init in kwargs.items() if is_initializer(name)}
    return effective, kwargs | half_safe_inits(given, kwargs.get("param_dtype", jnp.float32))


def is_initializer(name: str) -> bool:
    """Returns whether an argument of that name is an initializer of parameters."""
    # A carry's is no parameter's.
    return name.endswith(("_init", "_initializer")) and name != "carry_init"


def is_complex(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype argument was given, and is complex: no policy can hold it."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


def reject_children_from_outside(module: Any, policy: Policy, arguments: Any) -> None:
    """Rejects a policy given to a container whose children were built before it, which it can't
    reach.
    """
    children = (each for given in _modules(arguments) for _, each in flax_nnx.iter_modules(given))
    have_dtypes = (each for each in children if hasattr(each, "param_dtype") or is_ours(type(each)))
    if strangers := _names(each for each in have_dtypes if not _follows(each, policy)):
        raise ValueError(
            f"{type(module).__name__}(dtype_policy='{policy}'): {strangers} had been built before, "
            "under another policy or none, and their parameters keep their dtypes. Build them "
            f"inside {type(module).__name__}, or in a use_policy block, or call "
            "mpmodules.nnx.apply_policy(model, policy) on the whole model."
        )


def warn_of_strangers(module: Any, value: Any, scope: Scope) -> None:
    """Warns of layers of ours in `value`, put in a built module, that do not obey its policy.

    Where the value is the module itself, only layers without any policy are told.
    """
    policy = module.dtype_policy
    if policy is None or is_float32(policy) or scope.traces_own_code:
        return
    nodes: list[Any] = [m for given in _modules(value) for _, m in flax_nnx.iter_modules(given)]
    layers = (each for each in nodes if hasattr(each, "param_dtype") and is_ours(type(each)))
    meant = (policy, scope.policy or policy)
    others = (each for each in layers if not any(_follows(each, held) for held in meant))
    if names := _names(each for each in others if value is not module or not each.dtype_policy):
        warn_once(
            f"{names} had been built under another policy than '{policy}' or none, and keeps "
            f"to that in the {type(module).__name__} that it was put in. Build it inside "
            "use_policy(model.dtype_policy) or with a dtype_policy, or call "
            "mpmodules.nnx.apply_policy(model, policy)."
        )


def warn_of_parts(module: Any, arguments: Any) -> None:
    """Warns of a module built under no policy around parts that carry one of a model or scope."""
    parts = (each for each in _modules(arguments) if getattr(each, "dtype_policy", None))
    inherits = (each for each in parts if not each._policy_source.own)
    if names := _names(each for each in inherits if not is_float32(each.dtype_policy)):
        warn_once(
            f"{type(module).__name__} was built under no policy, but {names} in it carries one. "
            "Build it in the same use_policy block, or in use_policy(None) if that is intended."
        )


def warn_of_builder(cls: type, policy: Policy, frame: types.FrameType | None) -> None:
    """Warns where a method of a module of Flax's, which obeys no policy, builds one of ours of
    class `cls`.
    """
    while frame is not None and not is_float32(policy):
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        builder = frame.f_locals.get(arguments[0]) if arguments else None
        if isinstance(builder, flax_nnx.Module):
            if remedy := remedy_for(type(builder), "nnx"):
                warn_once(f"{remedy} Layers of mpmodules in it, such as {cls.__name__}, do.")
            return
        frame = frame.f_back


def _modules(tree: Any) -> list[Any]:
    """Returns the modules in a tree, and none of those in them."""
    leaves = jax.tree.leaves(tree, is_leaf=is_reference)
    return [leaf for leaf in leaves if isinstance(leaf, flax_nnx.Module)]


def _names(modules: Iterable[Any]) -> str:
    return ", ".join(sorted({type(module).__name__ for module in modules}))


def _follows(child: Any, policy: Policy) -> bool:
    """Returns whether a built module obeys `policy`, its own dtype arguments aside, or carries one
    of its own, or was built inside ``use_policy(None)``.
    """
    source = getattr(child, "_policy_source", NO_SOURCE)
    if getattr(child, "dtype_policy", None) is None:
        return source.kind == "scope"
    return source.own or _captured_from(child, policy)


def _captured_from(module: Any, policy: Policy) -> bool:
    """Returns whether a module captured `policy`, its own dtype arguments aside."""
    captured = module.dtype_policy
    if captured is None:
        return False
    if getattr(module, "_explicit_dtype", None) is not None:
        policy = policy.replace(reduction_dtype=None)
        dtypes = {"compute_dtype": policy.compute_dtype, "output_dtype": policy.output_dtype}
        captured = captured.replace(reduction_dtype=None, **dtypes)
    if getattr(module, "_explicit_param_dtype", None) is not None:
        captured = captured.replace(param_dtype=policy.param_dtype)
    return captured == policy


def is_being_built(module: Any) -> bool:
    """Returns whether the construction of a module is under way."""
    return any(construction.module is module for construction in calls.constructions)


def warn_of_scope(module: Any, scope: Scope) -> None:
    """Warns where a built module is called in a scope whose policy it did not capture."""
    if scope.policy is None or scope.boundary_open or _captured_from(module, scope.policy):
        return
    if is_being_built(module):
        return  # its policy is captured then
    captured = "no policy" if module.dtype_policy is None else f"'{module.dtype_policy}'"
    warn_once(
        f"{type(module).__name__} was built under {captured}. The scope around this call, "
        f"'{scope.policy}', changes no nnx layer, because layers capture their policy when they "
        "are built: build the model in the scope, or call "
        "mpmodules.nnx.apply_policy(model, policy)."
    )


# --------------------------------------------------------------------------------------------------
# When a model is ported
# --------------------------------------------------------------------------------------------------


def carried(
    module: Any, path: tuple[str, ...], rules: PolicyRules, model: str
) -> tuple[Any, Source] | None:
    """Returns the policy of a module below the root, from its own `dtype_policy=` or else a rule,
    and its source.
    """
    source: Source = getattr(module, "_policy_source", NO_SOURCE)
    if path and source.own and source.kind == "argument":
        return module.dtype_policy, source
    rule = rules.rule_at(path, type(module), model=model)
    return None if rule is None else of_rule(rule)


def of_rule(rule: tuple[Pattern, Policy]) -> tuple[Policy, Source]:
    """Returns the policy of a rule, and its source."""
    return rule[1], Source("rule", pattern_text(rule[0]), own=True)


# --------------------------------------------------------------------------------------------------
# When a module is called
# --------------------------------------------------------------------------------------------------


def effective_policy(module: Any, scope: Scope) -> Effective:
    """Returns the policy that `module` obeys in a call under `scope`: the one captured, or that of
    an island.
    """
    captured = module.dtype_policy
    policy = scope.held(captured) if scope.in_full_precision else captured
    return Effective(policy, policy, module._policy_source)


def hold_policy(module: Any, policy: Policy | None, source: Source) -> None:
    """Stores the policy that a module obeys, which its users can't."""
    flax_nnx.Module.__setattr__(module, "dtype_policy", policy)
    module._policy_source = NO_SOURCE if policy is None else source


def viewed(module: T, **attributes: Any) -> T:
    """Makes a shallow copy with other static attributes.

    Variables are shared: the module sees the view's updates.
    """
    return as_instance_of(type(module), module, **attributes)


def as_instance_of(cls: type[T], module: Any, **attributes: Any) -> T:
    """Makes a shallow copy as an instance of another class; see `viewed`."""
    view = object.__new__(cls)
    view.__dict__.update(module.__dict__)
    view.__dict__.update(attributes)
    return view


def in_policy(module: Any, policy: Policy | None) -> Any:
    """Returns a view of a module of ours that computes as `policy` says: the one captured, or that
    of an island.
    """
    if policy == module.dtype_policy:
        return module
    if policy is None or getattr(module, "dtype", None) is None:
        return viewed(module, dtype_policy=policy)
    return viewed(module, dtype_policy=policy, dtype=policy.compute_dtype)


def in_complex(layer: Any, call: MethodCall) -> Any:
    """Returns a view of a layer in the dtype of its complex inputs, which no policy casts.

    Returns None where there are none, and where an explicit dtype argument holds.
    """
    dtype = call.complex_dtype
    if layer.dtype_policy is None or layer._explicit_dtype is not None or dtype is None:
        return None
    return viewed(layer, dtype=dtype)

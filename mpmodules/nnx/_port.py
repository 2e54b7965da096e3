"""Policies for built nnx models, ours or not: attributes are set, parameters cast, and Flax's classes made ours."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from flax import nnx as flax_nnx

from mpmodules.nnx._module import LAYER_OF, Module, obeys_policies
from policy.casting import cast_floating
from policy.policy import Policy, get_policy
from policy.precedence import with_explicit_dtypes
from policy.rules import PolicyRules
from policy.scope import RulesLike, current_scope, require_usable

M = TypeVar("M", bound=flax_nnx.Module)


@functools.cache
def adopting_class(cls: type, *, composites: bool) -> type | None:
    """The class of ours that an instance of Flax's class, or of a user's on top of it, is turned into; or None."""
    if issubclass(cls, Module) and hasattr(cls, "_policy_source"):
        return None
    for base in cls.__mro__:
        ours = LAYER_OF.get(base)
        if ours is not None:
            return ours if base is cls else _combined(cls, ours)
    return _combined(cls, Module) if composites and issubclass(cls, flax_nnx.Module) else None


def _combined(cls: type, ours: Any) -> type:
    return type(ours)(cls.__name__, (cls, ours), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _adopt(module: Any, policy: Policy | None, source: str | None, *, keep_explicit: bool, composites: bool) -> None:
    """Makes one built module obey `policy`: its class, its dtype attributes and its own parameters."""
    ours = adopting_class(type(module), composites=composites)
    if ours is not None:
        object.__setattr__(module, "__class__", ours)
        _replace_attention(module)
    if not obeys_policies(module):
        return
    if policy is not None and hasattr(module, "dtype") and hasattr(module, "param_dtype"):
        explicit = module.dtype if keep_explicit and _is_explicit(module) else None
        effective = with_explicit_dtypes(
            policy, own=source is not None, dtype=explicit, what=type(module).__name__, where=type(module).__name__
        )
        policy = effective.policy or policy
        module.dtype = policy.compute_dtype
        module.param_dtype = policy.param_dtype
        for variable in vars(module).values():
            if isinstance(variable, flax_nnx.Param):
                variable.set_value(cast_floating(variable.get_value(), policy.param_dtype))
    module.dtype_policy = policy
    module._policy_source = source


def _is_explicit(module: Any) -> bool:
    """Whether a layer of Flax's was given a dtype (Embed fills in its table's where it was given none)."""
    embedding = getattr(module, "embedding", None)
    return module.dtype is not None and (embedding is None or module.dtype != embedding.dtype)


def _replace_attention(module: Any) -> None:
    if getattr(module, "attention_fn", None) is flax_nnx.dot_product_attention:
        from mpmodules.nnx._attention import dot_product_attention  # imported late: that file adopts with this one

        module.attention_fn = dot_product_attention


def adopt_children(module: flax_nnx.Module, policy: Policy | None) -> None:
    """Makes the Flax layers that a layer of ours has just built obey its policy, and the class rules in force."""
    rules = current_scope().rules
    for path, child in flax_nnx.iter_modules(module):
        if path and not obeys_policies(child):
            own = rules.match(None, type(child)) if rules else None
            source = None if own is None else "rule"
            _adopt(child, own if own is not None else policy, source, keep_explicit=False, composites=False)


def apply_policy(model: M, policy: Policy | str, rules: RulesLike | None = None, *, keep_explicit: bool = False) -> M:
    """Puts a built nnx model under a policy and rules, in place, and returns it.

    Every layer obeys the policy, or the first rule that matches its path or class, or a rule that holds above it; a
    submodule that was built with its own `dtype_policy=` keeps that. Floating parameters are cast to param_dtype;
    statistics and caches are not. Modules of Flax's own classes, and of classes derived from them, become boundaries
    and layers of ours: their class is replaced by one of the same name that derives from theirs.

    Args:
      model: an nnx module, Flax's own or ours.
      policy: a Policy or its text form.
      rules: `PolicyRules` or what they are made from. A module's path is the names of the attributes and the indices
        that lead to it, joined by ``/``.
      keep_explicit: whether a dtype that a Flax layer was built with holds against the policy. A param_dtype can't be
        told from the default and never does.

    Raises:
      TypeError: `model` is no nnx module.
      ValueError: a rule matches nothing (the paths are listed), or the policy or rules are malformed. The model is then
        as it was.
    """
    if not isinstance(model, flax_nnx.Module):
        raise TypeError(f"apply_policy takes an nnx module here, but got {model!r} of type {type(model).__name__}.")
    policy = require_usable(get_policy(policy))
    rules = PolicyRules() if rules is None else rules if isinstance(rules, PolicyRules) else PolicyRules(rules)
    for _, rule_policy in rules:
        require_usable(rule_policy)
    modules = {tuple(map(str, path)): module for path, module in flax_nnx.iter_modules(model)}
    rules.check({"/".join(path): type(module) for path, module in modules.items()})
    holding: dict[tuple[str, ...], Policy] = {}
    for path in sorted(modules, key=len):
        module = modules[path]
        above = next((holding[path[:n]] for n in range(len(path) - 1, -1, -1) if path[:n] in holding), policy)
        source = getattr(module, "_policy_source", None) if path else None
        if source == "argument":
            own = module.dtype_policy
        else:
            own = rules.match("/".join(path), type(module))
            source = None if own is None else "rule"
        if not path and own is None:
            source = "argument"
        holding[path] = own if own is not None else above
        _adopt(module, holding[path], source, keep_explicit=keep_explicit, composites=True)
    return model

"""Policies for built nnx models, ours or not: attributes are set, parameters cast, and Flax's classes made ours."""

from __future__ import annotations

import functools
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx as flax_nnx

from mpmodules.nnx._module import LAYER_OF, Module, obeys_policies
from policy.casting import cast_floating
from policy.policy import Policy, get_policy
from policy.precedence import Effective, with_explicit_dtypes
from policy.rules import Pattern, PolicyRules, name_of
from policy.scope import RulesLike, current_scope, require_usable
from policy.sources import NO_SOURCE, Source

M = TypeVar("M", bound=flax_nnx.Module)


@functools.cache
def adopting_class(cls: type, *, composites: bool) -> type | None:
    """Returns our class for instances of a Flax class, or of a user's derived from it; None of other classes."""
    if issubclass(cls, Module) and hasattr(cls, "_policy_source"):
        return None
    for base in cls.__mro__:
        ours = LAYER_OF.get(base)
        if ours is not None:
            return ours if base is cls else _combined(cls, ours)
    return _combined(cls, Module) if composites and issubclass(cls, flax_nnx.Module) else None


@functools.cache
def _combined(cls: type, ours: type) -> type:
    """Makes a class with the name of `cls` that derives from it and from ours."""
    meta, own = type(ours), type(cls)
    if not issubclass(meta, own):
        meta = own if issubclass(own, meta) else type(own.__name__, (own, meta), {})
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}

    def __reduce__(self: Any) -> Any:
        return _unpickled, (cls, ours), self.__getstate__()  # the class can't be found by its name: that is cls's

    return meta(cls.__name__, (cls, ours), {**names, "__reduce__": __reduce__})


def _unpickled(cls: type, ours: type) -> Any:
    return object.__new__(_combined(cls, ours))


def _effective(module: Any, policy: Policy | None, source: Source, *, keep_explicit: bool, where: str) -> Effective:
    """Returns the policy that a module is to obey, with its own dtype where that is kept."""
    if policy is None or not _has_dtypes(module):
        return Effective(policy, policy, source)
    return with_explicit_dtypes(
        policy,
        source=source,
        dtype=_explicit_dtype(module) if keep_explicit else None,
        what=type(module).__name__,
        where=where,
    )


def _adopt(module: Any, policy: Policy | None, source: Source, *, composites: bool) -> None:
    """Makes one built module obey `policy`: its class, its dtype attributes and its own variables."""
    ours = adopting_class(type(module), composites=composites)
    if ours is not None:
        explicit = _explicit_dtype(module)
        object.__setattr__(module, "__class__", ours)
        if explicit is not None:
            module._explicit_dtype = explicit
        _replace_attention(module)
    if not obeys_policies(module):
        return
    if policy is not None:
        if _has_dtypes(module) and not any(_is_complex(dtype) for dtype in (module.dtype, module.param_dtype)):
            module.dtype = policy.compute_dtype
            module.param_dtype = policy.param_dtype
        for _, variable in _children(module):
            if isinstance(variable, flax_nnx.Param):
                variable.set_value(cast_floating(variable.get_value(), policy.param_dtype))
            elif isinstance(variable, flax_nnx.Cache):  # keys and values are written into it as they are computed
                variable.set_value(cast_floating(variable.get_value(), policy.compute_dtype))
    if policy is not None or module.dtype_policy is not None:
        module.dtype_policy = policy
        module._policy_source = NO_SOURCE if policy is None else source


def _has_dtypes(module: Any) -> bool:
    return hasattr(module, "dtype") and hasattr(module, "param_dtype")


def _is_complex(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


def _explicit_dtype(module: Any) -> Any:
    """Returns the dtype that a layer was given, or None; Flax's Embed fills in its table's where it was given none."""
    if obeys_policies(module):
        return module._explicit_dtype
    dtype, embedding = getattr(module, "dtype", None), getattr(module, "embedding", None)
    return None if embedding is not None and dtype == embedding.dtype else dtype


def _replace_attention(module: Any) -> None:
    if getattr(module, "attention_fn", None) is flax_nnx.dot_product_attention:
        from mpmodules.nnx._attention import dot_product_attention  # imported late: that file adopts with this one

        module.attention_fn = dot_product_attention


def adopt_children(module: Any, policy: Policy | None) -> None:
    """Makes the Flax layers that a layer of ours has just built obey its policy, and the class rules in force."""
    rules = current_scope().rules
    for path, child in flax_nnx.iter_modules(module):
        if path and not obeys_policies(child):
            rule = rules.rule_for(None, type(child)) if rules else None
            inherited = policy, module._policy_source.for_those_inside(type(module).__name__)
            _adopt(child, *(inherited if rule is None else _of_rule(rule)), composites=False)
            cast(Any, child)._explicit_dtype = module._explicit_dtype  # the child was given what the policy says


def _children(node: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Yields the modules and variables that a module holds, itself or in lists and dicts, and the keys to each."""

    entered: list[Any] = []

    def is_child(x: Any) -> bool:
        entered.append(x)
        return len(entered) > 1 and isinstance(x, flax_nnx.Pytree | flax_nnx.Variable)  # the first one is node itself

    leaves = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_child)
    if [path for path, _ in leaves] == [()]:  # made with pytree=False: JAX can't look inside
        return [((str(key),), child) for key, child in flax_nnx.iter_children(node)]
    names = [(tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf) for path, leaf in leaves]
    return [(path, leaf) for path, leaf in names if is_child(leaf)]


def _paths(module: flax_nnx.Module) -> dict[tuple[str, ...], flax_nnx.Module]:
    """Returns every path to every module, shared ones included, from the root down."""
    found: dict[tuple[str, ...], flax_nnx.Module] = {}

    def visit(node: Any, path: tuple[str, ...], above: frozenset[int]) -> None:
        if isinstance(node, flax_nnx.Module):
            found[path] = node
        for keys, child in _children(node):
            if not isinstance(child, flax_nnx.Variable) and id(child) not in above:  # a cycle ends where it closes
                visit(child, (*path, *keys), above | {id(child)})

    visit(module, (), frozenset({id(module)}))
    return {path: found[path] for path in sorted(found, key=len)}


def apply_policy(model: M, policy: Policy | str, rules: RulesLike | None = None, *, keep_explicit: bool = False) -> M:
    """Puts a built nnx model under a policy and rules, in place, and returns it.

    Every layer obeys the policy, or the first rule that matches its path or class, or a rule that holds above it; a
    submodule that was built with its own `dtype_policy=` keeps that. A module that is shared obeys the first rule that
    matches one of its paths. Floating parameters are cast to param_dtype and decoding caches to compute_dtype,
    statistics are not. Modules of Flax's own classes, and of classes derived from them, become boundaries
    and layers of ours: their class is replaced by one of the same name that derives from theirs.

    Args:
      model: an nnx module, Flax's own or ours.
      policy: a Policy or its text form.
      rules: `PolicyRules` or an argument for them. A module's path is the names of the attributes and the indices
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
    paths = _paths(model)
    rules.check({"/".join(path): type(module) for path, module in paths.items()})
    holding: dict[tuple[str, ...], tuple[Policy, Source]] = {}  # what the modules below each inherit
    plan: dict[int, tuple[Any, Effective]] = {}
    for path, module in paths.items():
        where = "/".join(path) or type(module).__name__
        held, source = _carried(module, path, rules) or (
            next(holding[path[:n]] for n in range(len(path) - 1, -1, -1) if path[:n] in holding)
            if path
            else (policy, Source("argument", "apply_policy", own=True))
        )
        holding[path] = held, source.for_those_inside(where)
        planned = plan.get(id(module))
        if planned is None or (source.own and source.kind == "rule" and not planned[1].own):
            plan[id(module)] = module, _effective(module, held, source, keep_explicit=keep_explicit, where=where)
    for module, effective in plan.values():
        _adopt(module, effective.policy, effective.source, composites=True)
    return model


def _carried(module: Any, path: tuple[str, ...], rules: PolicyRules) -> tuple[Any, Source] | None:
    """Returns the policy of a module below the root, from its own `dtype_policy=` or else a rule, and its source."""
    source: Source = getattr(module, "_policy_source", NO_SOURCE)
    if path and source.own and source.kind == "argument":
        return module.dtype_policy, source
    rule = rules.rule_for("/".join(path), type(module))
    return None if rule is None else _of_rule(rule)


def _of_rule(rule: tuple[Pattern, Policy]) -> tuple[Policy, Source]:
    return rule[1], Source("rule", name_of(rule[0]), own=True)

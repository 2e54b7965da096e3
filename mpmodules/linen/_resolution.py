"""The policy that a linen module obeys, and the view of it that Flax's code sees during a call."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import is_ours, remedy_for, warn_of_unknown_names
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.tracing.names import model_name
from policy.core.arrays import is_floating
from policy.core.messages import warn_once
from policy.core.policy import Policy, get_policy
from policy.core.precedence import (
    Effective,
    note_obeyed,
    warn_of_autocast,
    with_explicit_dtypes,
)
from policy.core.rules import PolicyRules, pattern_text
from policy.core.scope import NO_SOURCE, Scope, Source, is_float32, require_usable
from policy.programs.paths import joined
from policy.programs.thread import thread


def effective_policy(module: Any, scope: Scope) -> Effective:
    """Returns the policy that `module` would obey in a call under `scope`."""
    path = _path_of(module)
    base, source = _carried(module, path, scope) or _inherited(module, path, scope)
    base = scope.held(base) if scope.in_full_precision else base
    takes_dtypes = base is not None and getattr(type(module), "_dtype_fields", False)
    dtype, param_dtype = declared_dtypes(module).values() if takes_dtypes else (None, None)
    if dtype is None and param_dtype is None:
        return Effective(base, base, NO_SOURCE if base is None else source)
    return with_explicit_dtypes(
        base,
        source=source,
        dtype=dtype,
        param_dtype=param_dtype,
        what=type(module).__name__,
        where=where(module),
    )


def _carried(
    module: Any, path: tuple[str, ...] | None, scope: Scope
) -> tuple[Policy, Source] | None:
    """Returns the policy that a module carries itself, by an argument or a rule, and its source."""
    # Not `getattr`: a module of Flax's without the field runs its setup for it.
    own, ported = vars(module).get("dtype_policy"), getattr(type(module), "_ported_policy", None)
    if own is not None and ported is None:
        return require_usable(get_policy(own)), Source("argument", "dtype_policy", own=True)
    if scope.rules and path is not None:
        rule = scope.rules.rule_at(path, type(module), model=model_of(module))
        # One for the whole model, too, whose policy is what `apply_policy` was given.
        if rule is not None:
            return rule[1], Source("rule", pattern_text(rule[0]), own=True)
    return None if own is None else (get_policy(own), Source("argument", "apply_policy", own=True))


def _inherited(
    module: Any, path: tuple[str, ...] | None, scope: Scope
) -> tuple[Policy | None, Source]:
    """Returns the caller's policy.

    Where no module of ours is calling, the policy that its ancestors would obey.
    """
    in_force = scope.policy, scope.source
    if not path or (not scope.rules and calls.paths):
        return in_force
    ancestor = module.parent
    for length in range(len(path) - 1, -1, -1):
        above = path[:length]
        if above in calls.paths:
            return in_force
        ancestor = (
            ancestor if isinstance(ancestor, flax_nn.Module) and ancestor.path == above else None
        )
        given = {} if calls.paths or ancestor is None else vars(ancestor)
        policy = given.get("dtype_policy")
        if policy is not None:
            return require_usable(policy), Source("enclosing module", where(ancestor))
        cls = None if ancestor is None else type(ancestor)
        rule = scope.rules.rule_at(above, cls, model=model_of(module)) if scope.rules else None
        if rule is not None:
            return rule[1], Source("rule", pattern_text(rule[0]))
        ancestor = None if ancestor is None else ancestor.parent
    return in_force


def _path_of(module: flax_nn.Module) -> tuple[str, ...] | None:
    """Returns the module's path from the root, or None for an unbound module."""
    return None if module.scope is None else module.path


def model_of(module: flax_nn.Module) -> str:
    """Returns the name of the model that a module is part of: its class's, or the one it was given.

    The copies of modules that Flax's transforms call know of nothing above: they are the root
    call's.
    """
    while isinstance(module.parent, flax_nn.Module):
        module = module.parent
    root = calls.root if _path_of(module) else module
    return "" if root is None else model_name(root)


def where(module: Any) -> str:
    """Returns a module's path for messages; a root's is its class's name."""
    return "/".join(_path_of(module) or ()) or type(module).__name__


def declared_dtypes(module: Any) -> Mapping[str, Any]:
    """Returns the dtype arguments that the user gave a layer, also of a view with others."""
    declared = module.__dict__.get("_declared_fields", module.__dict__)
    return {name: declared.get(name) for name in ("dtype", "param_dtype")}


def declared_field(module: Any, name: str) -> Any:
    """Returns the value that the user gave for a field, also of a view with another."""
    return module.__dict__.get("_declared_fields", module.__dict__).get(name)


def dtype_fields(module: Any, policy: Policy | None) -> dict[str, Any]:
    """Returns the `dtype` and `param_dtype` for Flax's code: the policy's, else those declared."""
    dtype, param_dtype = declared_dtypes(module).values()
    if policy is not None:
        is_complex = param_dtype is not None and jnp.issubdtype(param_dtype, jnp.complexfloating)
        param_dtype = param_dtype if is_complex else policy.param_dtype
        dtype = policy.compute_dtype
    return {"dtype": dtype, "param_dtype": jnp.float32 if param_dtype is None else param_dtype}


def plain_fields(module: Any, effective: Effective) -> dict[str, Any]:
    """Returns `dtype_fields` with an explicit complex dtype, which no policy can hold, put back."""
    fields = dtype_fields(module, effective.policy)
    return fields if effective.dtype is None else fields | {"dtype": effective.dtype}


@contextlib.contextmanager
def viewed(module: Any, fields: Mapping[str, Any], cls: type | None = None) -> Iterator[Any]:
    """Yields a view of a module: an instance with other `fields` that shares its scope and state.

    What setup and calls leave behind on the view is the module's afterwards, whose own fields stay
    as they are.

    Args:
      module: the module.
      fields: the dataclass fields, and other attributes, in which the view differs.
      cls: the class of the view, of which `fields` are as declared; None for the module's own.
    """
    view: Any = object.__new__(cls or type(module))
    namespace, given = vars(view), vars(module)
    namespace.update(given, **fields)
    if cls is None:
        namespace.setdefault("_declared_fields", given)
    before = dict(namespace)
    try:
        yield view
    finally:
        declared = type(view).__dataclass_fields__
        for name, value in namespace.items():
            is_changed = name not in before or value is not before[name]
            if is_changed and not (name in declared and declared[name].init):
                object.__setattr__(module, name, value)
        for child in module._state.children.values():
            if isinstance(child, flax_nn.Module) and child.parent is view:
                object.__setattr__(child, "parent", module)


def check_rules(root: Any, rules: PolicyRules) -> None:
    """Checks the rules in force against the modules called and those that hold variables.

    Class rules are checked only where every module that holds variables was called: a call of one
    method of many, or of a cached inner jit, says nothing about the classes of the rest.
    """
    if not rules.strict or calls.seen is None:
        return
    seen: dict[str, set[type]] = {}
    for path, classes in calls.seen.items():
        seen.setdefault(joined(path), set()).update(classes)
    stored: set[str] = set()
    for collection in root.variables.values():
        for path in flatten_dict(collection):
            stored |= {joined(map(str, path[:n])) for n in range(len(path))}
    of_classes = ((path, cls) for path, classes in seen.items() for cls in classes)
    wholes = {path for path, cls in of_classes if getattr(cls, "_is_whole", False)}
    inside = tuple(f"{path}/" if path else "" for path in wholes)

    def can_obey(path: str) -> bool:
        return path in wholes or not path.startswith(inside)

    called = {path: classes for path, classes in seen.items() if can_obey(path)}
    stored = set(filter(can_obey, stored))
    paths: dict[str, Any] = dict.fromkeys(stored) | called
    model = model_name(root)
    rules = rules.of_model(model)  # others may be meant for another model in the block
    rules.check(paths if stored <= set(called) else list(paths), model=model)


# The policies that models were initialized under, by class and the paths and shapes of params; None
# where models were initialized without one, too.
_initialized: dict[type, dict[Hashable, Policy | None]] = {}


def note_policy(model: Any, policy: Policy | None) -> None:
    """Notes the policy that a model was initialized under, where the model carries none."""
    if _follows_scope(model):
        known, key = _initialized.setdefault(type(model), {}), _params_of(model)
        is_plain = policy is None or is_float32(policy) or known.get(key, policy) is None
        known[key] = None if is_plain else policy


def warn_of_outermost(module: Any, policy: Policy | None, scope: Scope) -> None:
    """Warns of an outermost module of ours that obeys `policy` in code that does not, or obeys none
    and was initialized under one.
    """
    if thread.autocast is not None:
        warn_of_autocast(module, policy)
    if scope.traces_own_code or scope.keeps_own_code or calls.adopters:
        return
    cls, parent = type(module), module.parent
    if scope.policy is not None:
        is_mixed = isinstance(parent, flax_nn.Module) and not is_float32(scope.policy)
        if is_mixed and (remedy := remedy_for(type(parent), "linen")):
            warn_once(f"{remedy} Layers of mpmodules in it, such as {cls.__name__}, do.")
    elif not module.path and scope.source.kind != "scope" and thread.autocast is None:
        known = _initialized.get(cls, {})
        is_call = any(known.values()) and _follows_scope(module) and not module.is_initializing()
        if is_call and (before := known.get(_params_of(module))):
            warn_once(
                f"{cls.__name__} was initialized under '{before}', but is applied with no policy "
                "in force, so its layers compute as Flax's do. Call apply in the same use_policy "
                "block, or give the model a dtype_policy. If no policy is intended, call it inside "
                "use_policy(None)."
            )


def _follows_scope(model: Any) -> bool:
    return is_ours(type(model)) and vars(model).get("dtype_policy") is None


def _params_of(model: Any) -> Hashable:
    params = jax.tree_util.tree_leaves_with_path(model.scope.variables().get("params", {}))
    return tuple((jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in params)


# --------------------------------------------------------------------------------------------------
# Calls under way
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def under_way(call: MethodCall, effective: Effective, scope: Scope) -> Iterator[None]:
    """Notes a call for a block. After a root's call, rejects rules that matched nothing in it, and
    warns of names of parameters that no module in it has.
    """
    module, path = call.module, call.module.path
    if thread.asked is not None:
        note_obeyed(model_of(module), joined(path), effective.policy)
    if calls.recorded is not None and not call.is_lifted:
        calls.recorded.note(module, effective)
    if not calls.paths:
        warn_of_outermost(module, effective.policy, scope)
    is_root = not path and calls.seen is None
    before = calls.innermost, calls.paths, calls.seen, calls.root
    calls.innermost, calls.paths = module, [*calls.paths, path]
    if is_root:
        calls.seen, calls.root = {}, module
    try:
        if calls.seen is not None:
            calls.seen.setdefault(path, set()).add(type(module))
        yield
        if is_root and scope.rules:
            check_rules(module, scope.rules)
        if is_root and module.is_initializing():
            _check_names(module)
            if calls.recorded is None:  # a summary's init makes no parameters
                note_policy(module, scope.policy)
    finally:
        calls.innermost, calls.paths, calls.seen, calls.root = before


def _check_names(root: Any) -> None:
    """Warns of names in a class's `keep_params` that none of its modules, just initialized, has a
    parameter of.
    """
    held: dict[type, set[str]] = {}
    for path, found in (calls.seen or {}).items():
        params = root.scope.variables().get("params", {})
        for name in path:
            params = params.get(name, {})
        for cls in found:
            if getattr(cls, "keep_params", ()):
                held.setdefault(cls, set()).update(_floating(params))
    for cls, names in held.items():
        warn_of_unknown_names(cls, names)


def own_params(module: Any) -> dict[str, Any]:
    """Returns the floating parameters that a bound module holds itself, as stored.

    Those of modules in it are none.
    """
    return _floating(module.scope.variables().get("params", {}))


def _floating(params: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in params.items()
        if not isinstance(value, Mapping) and any(map(is_floating, jax.tree.leaves(value)))
    }

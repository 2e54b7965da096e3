"""linen's `Module`: carries a dtype policy, and its public methods are boundaries."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import flax.linen as flax_nn
import jax.numpy as jnp
from flax.linen.kw_only_dataclasses import KW_ONLY
from flax.linen.module import module_field

from mpmodules import _carries as carries
from policy import boundary
from policy.policy import Policy, get_policy
from policy.precedence import Effective, with_explicit_dtypes
from policy.scope import Scope, current_scope, enter

# Public methods of a module that are never a boundary: their dtypes are the carry's and the cache's own.
NOT_BOUNDARIES = frozenset({"setup", "initialize_carry", "init_cache"})
_FLAX_METHODS = frozenset(dir(flax_nn.Module)) - {"__call__"}

DtypePolicy = Policy | str | None


if TYPE_CHECKING:
    _MetaOfProtocol = abc.ABCMeta
else:  # an ABCMeta: a module can have abstract classes and protocols among its bases, as Flax's can
    _MetaOfProtocol = type(Protocol)


class _ModuleMeta(_MetaOfProtocol):
    """A class of ours stands for Flax's class of that name in ``isinstance``, so that such checks survive a port."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> Any:
        cls: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        if not any(isinstance(base, abc.ABCMeta) and not isinstance(base, _ModuleMeta) for base in cls.__mro__):
            cls.__abstractmethods__ = frozenset()  # no base asked for the check, which Flax's modules do not make
        return cls

    def __instancecheck__(cls, instance: Any) -> bool:
        upstream = cls.__dict__.get("_upstream_class")
        return type.__instancecheck__(cls, instance) if upstream is None else isinstance(instance, upstream)

    def __subclasscheck__(cls, subclass: type) -> bool:
        upstream = cls.__dict__.get("_upstream_class")
        return type.__subclasscheck__(cls, subclass) if upstream is None else issubclass(subclass, upstream)


# Our layer for each of Flax's; filled as the layers are defined.
LAYER_OF: dict[type, type] = {}


class Module(flax_nn.Module, metaclass=_ModuleMeta):
    """`flax.linen.Module` with a dtype policy.

    A module's call is a *boundary* when it obeys another policy than the one in force, or when none is open yet: its
    floating inputs are cast to compute_dtype and its floating outputs to output_dtype. Everything inside hands on
    compute_dtype. That holds for every public method that is called from outside.

    Attributes:
      dtype_policy: a `Policy` or its text form; None obeys a rule, the caller, or the scope.
      keep_inputs: names of arguments that a boundary leaves as they come. A class attribute:
        ``keep_inputs = ("positions",)``.
    """

    # Marked as Flax marks `parent` and `name`: it follows a subclass's own fields, and no position reaches it.
    if TYPE_CHECKING:  # type checkers know a keyword-only field of a Flax module by Flax's own specifier
        dtype_policy: DtypePolicy = module_field(kw_only=True, default=None)
    else:
        dtype_policy: DtypePolicy = dataclasses.field(default=None, kw_only=True, metadata={KW_ONLY: True})

    keep_inputs: ClassVar[tuple[str, ...]] = ()
    _upstream_class: ClassVar[type] = flax_nn.Module  # what the class stands for in isinstance and in class rules
    _is_layer: ClassVar[bool] = False  # a bare layer is a boundary only by a policy of its own
    _is_whole: ClassVar[bool] = False  # what is inside it holds parameters and computes nothing: no rule is for it

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.__module__.startswith("mpmodules.linen."):
            _keep_from_flax(cls)
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("mpmodules.linen."):
            for base in cls.__bases__:
                if base.__name__ == cls.__name__ and base.__module__.startswith("flax."):
                    cls._upstream_class = base
                    LAYER_OF[base] = cls
        _install_boundaries(cls)

    def __post_init__(self) -> None:
        policy = self.dtype_policy
        if policy is not None and not isinstance(policy, Policy):
            try:
                policy = get_policy(policy)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{type(self).__name__}(dtype_policy={policy!r}): {error}") from None
            object.__setattr__(self, "dtype_policy", policy)
        super().__post_init__()


Module.__annotations__["dtype_policy"] = DtypePolicy  # Flax copies it into subclasses, where the name means nothing


def _keep_from_flax(cls: type) -> None:
    """Keeps our private methods out of Flax's method machinery: interceptors, name stacks, tables of calls."""
    for name, attribute in vars(cls).items():
        if inspect.isfunction(attribute) and name.startswith("_") and not name.startswith("__"):
            attribute.nowrap = True  # type: ignore[attr-defined]


def obeys_policies(module: Any) -> bool:
    """Whether `module` is one of ours, rather than a Flax Module that merely passes ``isinstance(_, Module)``."""
    return hasattr(type(module), "_is_layer")


# ---------------------------------------------------------------------------------------------------------------------
# Which policy a module obeys
# ---------------------------------------------------------------------------------------------------------------------


class _Calls(threading.local):
    """The module calls under way in this thread, and what a root call has seen so far."""

    def __init__(self) -> None:
        self.paths: list[tuple[str, ...]] = []
        self.crossed: dict[str, Policy] = {}  # the boundaries below the outermost call, by path
        self.seen: dict[str, set[type]] | None = None
        self.innermost: flax_nn.Module | None = None


_calls = _Calls()


def is_innermost(module: flax_nn.Module) -> bool:
    """Whether the innermost call under way is of this very instance."""
    return _calls.innermost is module


def path_of(module: flax_nn.Module) -> tuple[str, ...] | None:
    """The module's path from the root, or None for an unbound module."""
    return None if module.scope is None else module.path


def effective_policy(module: Any, scope: Scope) -> Effective:
    """What `module` obeys, were one of its methods called now under `scope`."""
    path = path_of(module)
    own = getattr(module, "dtype_policy", None)
    if own is None and scope.rules and path is not None:
        own = scope.rules.match("/".join(path), type(module))
    base = own if own is not None else _inherited(module, path, scope)
    if not getattr(type(module), "_dtype_fields", False):
        return Effective(base, base, own is not None)
    declared = declared_dtypes(module)
    return with_explicit_dtypes(
        base,
        own=own is not None,
        dtype=declared.get("dtype"),
        param_dtype=declared.get("param_dtype"),
        what=type(module).__name__,
        where="/".join(path or ()) or type(module).__name__,
    )


def _inherited(module: Any, path: tuple[str, ...] | None, scope: Scope) -> Policy | None:
    """The caller's policy; above a module that nobody of ours is calling, what its ancestors would obey."""
    if not path or (not scope.rules and _calls.paths):
        return scope.policy
    ancestor = module.parent
    for length in range(len(path) - 1, -1, -1):
        above = path[:length]
        if above in _calls.paths:
            return scope.policy
        ancestor = ancestor if isinstance(ancestor, flax_nn.Module) and ancestor.path == above else None
        policy = getattr(ancestor, "dtype_policy", None) if not _calls.paths else None
        if policy is None and scope.rules:
            policy = scope.rules.match("/".join(above), None if ancestor is None else type(ancestor))
        if policy is not None:
            return policy
        ancestor = None if ancestor is None else ancestor.parent
    return scope.policy


def declared_dtypes(module: Any) -> Mapping[str, Any]:
    """The dtype arguments that the user gave a layer, whatever is put in their fields for the length of a call."""
    declared = module.__dict__.get("_declared_fields")
    if declared is None:
        declared = {name: module.__dict__.get(name) for name in ("dtype", "param_dtype")}
    return declared


def dtype_fields(module: Any, policy: Policy | None) -> dict[str, Any]:
    """The `dtype` and `param_dtype` that a layer of Flax's is to see: the policy's, else what was declared."""
    declared = declared_dtypes(module)
    param_dtype = declared.get("param_dtype")
    if policy is None:
        return {"dtype": declared.get("dtype"), "param_dtype": jnp.float32 if param_dtype is None else param_dtype}
    if param_dtype is not None and jnp.issubdtype(param_dtype, jnp.complexfloating):
        return {"dtype": policy.compute_dtype, "param_dtype": param_dtype}
    return {"dtype": policy.compute_dtype, "param_dtype": policy.param_dtype}


def plain_fields(module: Any, effective: Effective) -> dict[str, Any]:
    """`dtype_fields` with an explicit complex dtype, which no policy can hold, put back."""
    fields = dtype_fields(module, effective.policy)
    return fields if effective.dtype is None else fields | {"dtype": effective.dtype}


@contextlib.contextmanager
def fields_set(module: Any, fields: Mapping[str, Any]) -> Iterator[None]:
    """Puts other values in a layer's dataclass fields for the length of a block.

    What the user declared stays to be read in `_declared_fields`; a block inside a block restores the outer's values.
    """
    namespace = module.__dict__
    outermost = "_declared_fields" not in namespace
    before = {name: namespace[name] for name in fields if name in namespace}
    if outermost:
        names = {field.name for field in dataclasses.fields(module)} - {"parent", "name"}
        namespace["_declared_fields"] = {name: namespace[name] for name in names if name in namespace}
    namespace.update(fields)
    try:
        yield
    finally:
        for name in fields:
            if name in before:
                namespace[name] = before[name]
            else:
                namespace.pop(name, None)
        if outermost:
            namespace.pop("_declared_fields", None)


# ---------------------------------------------------------------------------------------------------------------------
# The boundary around methods
# ---------------------------------------------------------------------------------------------------------------------


def _install_boundaries(cls: Any) -> None:
    """Puts the boundary around each public method that `cls` adds, and around its setup where it is a layer's.

    Flax's machinery is outside of the boundary: what it hands to interceptors, captures and tabulates is what the
    caller gave and gets. A class made by nn.scan, nn.remat, nn.jit, ... copies the attributes of the method that it
    transforms, our mark included: a mark that points to another function tells such a method, and gives it a boundary
    outside of the transform.
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    names = {name for base in cls.__mro__ if base is not object for name in vars(base)}
    for name in names:
        is_setup = name == "setup"
        private = name.startswith("_") and name != "__call__"
        if name in fields or private or (not is_setup and (name in _FLAX_METHODS or name in NOT_BOUNDARIES)):
            continue
        method = inspect.getattr_static(cls, name)
        if not inspect.isfunction(method) or hasattr(method, "nowrap"):
            continue
        if method is inspect.getattr_static(flax_nn.Module, name, None):
            continue  # a wrapped copy here would come before the layer's own in the order of inheritance
        mark = method.__dict__.get("_policy_boundary")
        if mark is method:
            continue
        setattr(cls, name, _setup_with_policy(method) if is_setup else _bounded(method, lifted=mark is not None))


def _bounded(method: Callable[..., Any], *, lifted: bool) -> Callable[..., Any]:
    """A method with its boundary: inside of Flax's wrapper, unless it is a transformed one."""
    wrapped = getattr(method, "__wrapped__", None)
    transformed = lifted or wrapped is None or hasattr(wrapped, "method_handler_wrapped")
    if transformed or not hasattr(method, "method_handler_wrapped"):
        return _with_boundary(method, lifted=lifted)
    bounded = flax_nn.module.wrap_method_once(_with_boundary(wrapped, lifted=False))
    bounded._policy_boundary = bounded  # type: ignore[attr-defined]
    return bounded


def is_upstream(method: Callable[..., Any]) -> bool:
    """Whether a layer's method is Flax's own (or ours), rather than a user's on top of it."""
    return method.__module__.split(".")[0] in ("flax", "mpmodules")


def _with_boundary(method: Callable[..., Any], *, lifted: bool) -> Callable[..., Any]:
    own_body = not lifted and is_upstream(method)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nn.Module) or self.scope is None:
            return method(self, *args, **kwargs)  # Flax says what is wrong with a call on an unbound module
        return run_method(self, method, args, kwargs, lifted=lifted, own_body=own_body)

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


def _setup_with_policy(setup: Callable[..., Any]) -> Callable[..., Any]:
    """Parameters made in `setup` need their dtype before any method runs, through whatever entry setup is reached."""

    @functools.wraps(setup)
    def call(self: Any) -> Any:
        return run_setup(self, lambda: setup(self))

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


def run_setup(module: Any, setup: Callable[[], Any]) -> Any:
    """Runs a module's setup under its policy, and a layer's with its fields as the policy wants them."""
    scope = current_scope()
    effective = effective_policy(module, scope)
    if not getattr(type(module), "_is_layer", False):
        with enter(_scope_inside(scope, effective, boundary.module_crosses(scope, effective.base))):
            return setup()
    with fields_set(module, module._policy_fields(effective.policy, None, "setup")):
        return setup()


def _scope_inside(scope: Scope, effective: Effective, crosses: bool) -> Scope:
    """The scope that holds for what a module's methods run."""
    if effective.policy is None:
        return scope
    return boundary.inside(scope, effective.policy) if crosses else dataclasses.replace(scope, policy=effective.policy)


def run_method(
    module: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    lifted: bool = False,
    own_body: bool = True,
) -> Any:
    """Calls ``method(module, *args, **kwargs)`` under the policy that `module` obeys.

    Args:
      lifted: `method` is a transformed one, that calls another boundary of the same module inside of the transform:
        only the casts and the scope are ours.
      own_body: `method` is the layer's own. Around a user's method on top of a layer only the fields are set: its
        inputs are the user's business, and the layer's own method is a call inside.
    """
    scope = current_scope()
    effective = effective_policy(module, scope)  # before the call is noted: who is calling decides
    with _call_under_way(module, scope):
        is_layer = getattr(type(module), "_is_layer", False)
        if is_layer:
            crosses = boundary.layer_crosses(scope, effective.policy, effective.own)
        else:
            crosses = boundary.module_crosses(scope, effective.base)
        if crosses and not (is_layer and type(module)._takes_inputs_as_they_come):
            args, kwargs = _cast_inputs(module, effective.policy, method, args, kwargs)
        inner = _scope_inside(scope, effective, crosses)
        with enter(inner), _scan_carries_explained(module, crosses, effective.policy):
            if not getattr(type(module), "_dtype_fields", False) or lifted:
                outputs = method(module, *args, **kwargs)
            elif own_body:
                outputs = module._call_layer(effective, crosses and is_layer, method, args, kwargs)
            else:
                with fields_set(module, plain_fields(module, effective)):
                    outputs = method(module, *args, **kwargs)
        if effective.policy is not None and _is_step(module, method):
            outputs = carries.hand_on_outputs(outputs, carries.given_carry(args, kwargs))
        if not crosses or effective.policy is None:
            return outputs
        has_carry = _is_step(module, method) or (_is_loop(module, method) and carries.returns_carry(module, kwargs))
        return carries.cast_outputs(effective.policy, outputs, has_carry=has_carry)


def _cast_inputs(
    module: Any, policy: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def signature() -> inspect.Signature:
        full = inspect.signature(method)
        return full.replace(parameters=list(full.parameters.values())[1:])  # without self

    return carries.cast_inputs(
        policy,
        args,
        kwargs,
        is_step=_is_step(module, method),
        is_loop=_is_loop(module, method),
        keep=getattr(type(module), "keep_inputs", ()),
        signature=signature,
    )


def _is_step(module: Any, method: Callable[..., Any]) -> bool:
    """Whether a call is a step of a recurrent cell, from carry and input to carry and output."""
    return isinstance(module, flax_nn.RNNCellBase) and method.__name__ == "__call__"


def _is_loop(module: Any, method: Callable[..., Any]) -> bool:
    """Whether a call runs a recurrent cell over a sequence, and may take and return a carry."""
    return isinstance(module, flax_nn.RNN | flax_nn.Bidirectional) and method.__name__ == "__call__"


@contextlib.contextmanager
def _scan_carries_explained(module: Any, crosses: bool, policy: Policy | None) -> Iterator[None]:
    """Notes a boundary, and adds those inside of it to JAX's error for a scan whose carry changes its dtype."""
    path = "/".join(module.path)
    if crosses and policy is not None:
        _calls.crossed[path] = policy
    lifting = "lift its class (nn.scan(Block)) instead of a function, "
    with carries.scan_explained(_calls.crossed, path, lifting=lifting):
        yield


@contextlib.contextmanager
def _call_under_way(module: Any, scope: Scope) -> Iterator[None]:
    """Notes the call, and after a root's call refuses rules that matched nothing in it."""
    path = module.path
    is_root = not path and _calls.seen is None
    if is_root:
        _calls.seen = {}
    outer, _calls.innermost = _calls.innermost, module
    _calls.paths.append(path)
    try:
        if _calls.seen is not None:
            note_seen(path, type(module))
        yield
        if is_root and scope.rules:
            _check_rules(module, scope)
    finally:
        _calls.paths.pop()
        _calls.innermost = outer
        if not _calls.paths:
            _calls.crossed.clear()
        if is_root:
            _calls.seen = None


def note_seen(path: tuple[str, ...], cls: type) -> None:
    """Notes that a module was called, for the check of rules at the end of the root's call."""
    if _calls.seen is not None:
        _calls.seen.setdefault("/".join(path), set()).add(cls)


def _check_rules(root: Any, scope: Scope) -> None:
    """Checks the rules in force against the modules called and those that hold variables.

    Class rules are checked only where every module that holds variables was called: a call of one method of many, or
    of a cached inner jit, says nothing about the classes of the rest.
    """
    if scope.rules is None or not scope.rules.strict or _calls.seen is None:
        return
    stored: set[str] = set()
    for collection in root.variables.values():
        _collect_paths(collection, (), stored)
    wholes = [path for path, classes in _calls.seen.items() if any(getattr(cls, "_is_whole", False) for cls in classes)]
    inside = tuple(f"{path}/" if path else "" for path in wholes)

    def can_obey(path: str) -> bool:
        return path in wholes or not path.startswith(inside)

    called = {path: classes for path, classes in _calls.seen.items() if can_obey(path)}
    stored = set(filter(can_obey, stored))
    paths: dict[str, Any] = dict.fromkeys(stored) | called
    scope.rules.check(paths if stored <= set(called) else list(paths))


def _collect_paths(tree: Any, path: tuple[str, ...], into: set[str]) -> None:
    """Adds the path of each mapping below `tree` that holds something, prefixes included."""
    if isinstance(tree, Mapping):
        into.add("/".join(path))
        for name, child in tree.items():
            _collect_paths(child, (*path, str(name)), into)

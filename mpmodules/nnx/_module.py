"""nnx's `Module`: captures a dtype policy when it is built, and its public methods are boundaries."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
from flax import nnx as flax_nnx

from mpmodules import _carries as carries
from mpmodules._own_code import run_inside, run_layer
from mpmodules._references import is_reference
from mpmodules.nnx._own_code import call_port, own_code_of
from policy import boundary
from policy.policy import Policy, get_policy
from policy.precedence import warn_once
from policy.rules import name_of
from policy.scope import Scope, current_scope, enter, require_usable
from policy.sources import NO_SOURCE, Source, source_in_force

# Public methods of a module that are never a boundary: their dtypes are the carry's and the cache's own.
NOT_BOUNDARIES = frozenset({"initialize_carry", "init_cache", "set_view", "train", "eval"})
_FLAX_METHODS = frozenset(dir(flax_nnx.Module)) - {"__call__"}

# Our layer for each of Flax's; filled as the layers are defined.
LAYER_OF: dict[type, type] = {}

# The attribute that marks a ported module of a class that is not ours (`mpmodules.nnx._entries.Port`).
PORT = "_policy_port"


@dataclasses.dataclass
class _Frame:
    """One construction: the source of its policy, whether it is captured yet, and the module."""

    source: Source
    captured: bool = False
    module: Any = None


class _Building(threading.local):
    """The modules under construction in this thread, innermost last."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_building = _Building()


class ModuleMeta(type(flax_nnx.Module)):
    """Builds a module under its policy, and stands for Flax's class of that name in ``isinstance``."""

    _upstream_class: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        own, kwargs = _own_policy(cls, args, kwargs)
        scope = current_scope()
        source = source_in_force() if own is None else Source("argument", "dtype_policy", own=True)
        if scope.rules:
            if scope.rules.has_paths:
                raise ValueError(
                    f"Building {cls.__name__} under use_policy(rules=...): path rules can't hold here, since no path "
                    "exists while an nnx model is being built. Build the model first and call "
                    "mpmodules.nnx.apply_policy(model, policy, rules); class rules work in a scope."
                )
            if own is None:
                rule = scope.rules.rule_for(None, cls)
                if rule is not None:
                    own, source = rule[1], Source("rule", name_of(rule[0]), own=True)
        policy = own if own is not None else scope.policy
        if policy is not None:
            require_usable(policy)
        frame = _Frame(source)
        _building.frames.append(frame)
        try:
            inner = scope if policy is None else dataclasses.replace(scope, policy=policy)
            with enter(inner, source.for_those_inside(cls.__name__)):
                module = super().__call__(*args, **kwargs)
        finally:
            _building.frames.pop()
        if not frame.captured:
            module._capture(policy, source)
        if policy is not None and source.own and source.kind == "argument":
            _refuse_children_from_outside(module, policy, (args, kwargs))
        return module

    def _pytree_meta_construct(cls, self: Any, *args: Any, **kwargs: Any) -> None:
        if _building.frames:
            _building.frames[-1].module = self
        super()._pytree_meta_construct(self, *args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        if any(p.name == "dtype_policy" for p in parameters):
            return inspect.Signature(parameters)
        added = inspect.Parameter(
            "dtype_policy", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Policy | str | None"
        )
        last = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
        return inspect.Signature([*parameters[:last], added, *parameters[last:]])

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            cls.__subclasscheck__(type(instance))
            if "_upstream_class" in cls.__dict__
            else super().__instancecheck__(instance)
        )

    def __subclasscheck__(cls, subclass: type) -> bool:
        if "_upstream_class" in cls.__dict__:  # asked of the MRO: Flax's own check asks all its subclasses, us included
            return cls.__dict__["_upstream_class"] in subclass.__mro__
        return super().__subclasscheck__(subclass)


def _own_policy(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Policy | None, dict[str, Any]]:
    """Returns the policy given as `dtype_policy=`, and the keyword arguments that go on to ``__init__``.

    An ``__init__`` that declares a `dtype_policy` of its own gets it too, and may be given it by position.
    """
    signature = inspect.signature(cls.__init__)
    if "dtype_policy" in signature.parameters:
        given = signature.bind_partial(None, *args, **kwargs).arguments.get("dtype_policy")
    else:
        kwargs = dict(kwargs)
        given = kwargs.pop("dtype_policy", None)
    if given is None:
        return None, kwargs
    try:
        return get_policy(given), kwargs
    except (TypeError, ValueError) as error:
        raise type(error)(f"{cls.__name__}(dtype_policy={given!r}): {error}") from None


class Module(flax_nnx.Module, metaclass=ModuleMeta):
    """`flax.nnx.Module` with a dtype policy.

    Every subclass takes ``dtype_policy=`` when it is built, a `Policy` or its text form, without saying so in its
    ``__init__``. The policy is captured then: the argument, else a class rule in force, else the policy of the module
    or `use_policy` block that it is built in. It is a static attribute, part of the graph definition and never of the
    state. A scope around a call of a built model changes no layer.

    A module's call is a *boundary* when its policy differs from the one in force, or when none is open yet: its
    floating inputs are cast to compute_dtype and its floating outputs to output_dtype. Every layer inside returns
    compute_dtype. That holds for every public method that is called from outside.

    Attributes:
      dtype_policy: the `Policy` captured, or None.
      keep_inputs: names of arguments that a boundary leaves uncast. A class attribute:
        ``keep_inputs = ("positions",)``.
    """

    dtype_policy = None
    keep_inputs: ClassVar[tuple[str, ...]] = ()
    _upstream_class: ClassVar[type] = flax_nnx.Module  # what the class stands for in isinstance and in class rules

    _policy_source = NO_SOURCE  # where the policy came from
    _explicit_dtype = None  # the dtype and param_dtype arguments of a layer, where they were given
    _explicit_param_dtype = None
    _is_layer = False  # a bare layer is a boundary only by a policy of its own

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("mpmodules.nnx."):
            for base in cls.__bases__:
                if base.__name__ == cls.__name__ and base.__module__.startswith("flax."):
                    cls._upstream_class = base
                    LAYER_OF[base] = cls
                    if hasattr(cls, "_construct"):
                        # Not `cls.__init__ =`: to a type checker that would be an __init__ of Module's own.
                        type.__setattr__(cls, "__init__", _with_policy_dtypes(base.__init__))
        install_boundaries(cls)

    def _capture(self, policy: Policy | None, source: Source) -> None:
        """Captures the policy, as static attributes."""
        if policy is not None or self.dtype_policy is not None:  # an __init__ may have stored its own argument there
            self.dtype_policy = policy
            self._policy_source = NO_SOURCE if policy is None else source


def _with_policy_dtypes(upstream_init: Callable[..., None]) -> Callable[..., None]:
    """Wraps Flax's constructor: the layer's `_construct` runs it, also for a subclass's ``super().__init__``."""

    @functools.wraps(upstream_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        frame = _building.frames[-1] if _building.frames else _Frame(source_in_force())
        self._construct(current_scope().policy, frame.source, upstream_init, args, kwargs)
        frame.captured = True

    return __init__


def is_ours(cls: type) -> bool:
    """Returns whether a class is one of ours, rather than one of Flax's that only passes ``issubclass(_, Module)``."""
    return hasattr(cls, "_policy_source")


def obeys_policies(module: Any) -> bool:
    """Returns whether `module` carries a policy, or could: it is one of ours, or `apply_policy` ported it."""
    return is_ours(type(module)) or PORT in getattr(module, "__dict__", ())


def as_ours(module: Any) -> Any:
    """Returns a view of our class on a ported module of Flax's: both have the same attributes. Others are returned."""
    port = None if is_ours(type(module)) else vars(module).get(PORT)
    return module if port is None else port.view(module)


def _refuse_children_from_outside(module: Any, policy: Policy, arguments: Any) -> None:
    """Refuses a policy given to a container whose children were built before it, which it can't reach."""
    given = [x for x in jax.tree.leaves(arguments, is_leaf=is_reference) if isinstance(x, flax_nnx.Module)]
    strangers = sorted(
        {
            type(child).__name__
            for outside in given
            for _, child in flax_nnx.iter_modules(outside)
            if (hasattr(child, "param_dtype") or obeys_policies(child)) and not _follows(child, policy)
        }
    )
    if strangers:
        raise ValueError(
            f"{type(module).__name__}(dtype_policy='{policy}'): {', '.join(strangers)} had been built before, under "
            "another policy or none, and a parameter's dtype can't follow. Build them inside, or in a use_policy "
            "block, or call mpmodules.nnx.apply_policy(model, policy) on the whole."
        )


def _follows(child: Any, policy: Policy) -> bool:
    """Returns whether a built module obeys `policy`, its own dtype arguments aside, or carries one of its own."""
    captured = getattr(child, "dtype_policy", None)
    if captured is None or child._policy_source.own:
        return captured is not None
    return _captured_from(child, policy)


def _captured_from(module: Any, policy: Policy) -> bool:
    """Returns whether a module captured `policy`, its own dtype arguments aside."""
    captured = module.dtype_policy
    if captured is None:
        return False
    same: dict[str, Any] = {}
    if getattr(module, "_explicit_dtype", None) is not None:
        same |= {"compute_dtype": policy.compute_dtype, "output_dtype": policy.output_dtype, "reduction_dtype": None}
    if getattr(module, "_explicit_param_dtype", None) is not None:
        same["param_dtype"] = policy.param_dtype
    return captured.replace(**same) == policy.replace(**{name: value for name, value in same.items() if value is None})


# ---------------------------------------------------------------------------------------------------------------------
# The boundary around methods
# ---------------------------------------------------------------------------------------------------------------------


class _Calls(threading.local):
    """The module calls under way in this thread: how many, the innermost module, the boundaries below the outermost."""

    def __init__(self) -> None:
        self.depth = 0
        self.module: Any = None
        self.crossed: dict[str, Policy] = {}


_calls = _Calls()


def install_boundaries(cls: Any) -> None:
    """Puts the boundary around each public method that `cls` adds, transformed ones (nnx.jit, nnx.remat) included."""
    for name in {name for base in cls.__mro__ if base is not object for name in vars(base)}:
        if not is_boundary_name(name):
            continue
        method = inspect.getattr_static(cls, name)
        if not is_method(method) or method.__dict__.get("_policy_boundary") is method:
            continue
        setattr(cls, name, _with_boundary(method, name))


def is_boundary_name(name: str) -> bool:
    """Returns whether a method of that name is public, and no method of every module."""
    return (name == "__call__" or not name.startswith("_")) and name not in _FLAX_METHODS and name not in NOT_BOUNDARIES


def is_method(attribute: Any) -> bool:
    """Returns whether an attribute of a class is a method of instances, transformed ones included."""
    if inspect.isfunction(attribute):
        return True
    if isinstance(attribute, staticmethod | classmethod | property | type | functools.partial):
        return False
    # A transformed method, such as nnx.jit makes: callable, binds like a function, and wraps one.
    return callable(attribute) and hasattr(attribute, "__get__") and hasattr(attribute, "__wrapped__")


def _with_boundary(method: Any, name: str) -> Callable[..., Any]:
    is_function = inspect.isfunction(method)
    is_upstream = is_function and method.__module__.split(".")[0] in ("flax", "mpmodules")

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, flax_nnx.Module):
            return method(self, *args, **kwargs)
        body = method if is_function else lambda self, *args, **kwargs: method.__get__(self)(*args, **kwargs)
        return run_method(self, body, args, kwargs, name=name, is_upstream=is_upstream, signature_of=method)

    call._policy_boundary = call  # type: ignore[attr-defined]
    return call


def run_method(
    module: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    is_upstream: bool,
    signature_of: Any,
) -> Any:
    """Calls ``method(module, *args, **kwargs)`` under the policy that `module` carries.

    Every call of a public method of a module that obeys policies comes through here, ours or ported.

    Args:
      module: the module, of its own class.
      method: the method without a boundary; Flax's own and ours are called with a module of our class.
      name: the name that the method has in its class.
      is_upstream: whether the method is Flax's own, or ours in its place.
      signature_of: the function whose signature names the arguments, `self` first.
    """
    scope, note = current_scope(), own_code_of(module)
    plainly = functools.partial(
        _run_method, module, method, name=name, is_upstream=is_upstream, signature_of=signature_of
    )
    if scope.hands_on_float32:
        if note is None:
            return _run_layer_for_autocast(module, plainly, args, kwargs, name=name, signature_of=signature_of)
        own = as_ours(module) if is_upstream else module
        return run_inside(lambda: method(own, *args, **kwargs), scope, module.dtype_policy)
    if note is None or _calls.depth:
        return plainly(args, kwargs)
    return call_port(module, note, name, lambda: plainly(args, kwargs), args, kwargs, _call_under_way)


@contextlib.contextmanager
def _call_under_way() -> Iterator[None]:
    _calls.depth += 1
    try:
        yield
    finally:
        _calls.depth -= 1


def _run_layer_for_autocast(
    module: Any,
    plainly: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    signature_of: Any,
) -> Any:
    """Calls a module that obeys policies inside of a port whose own code autocast runs."""
    is_step, is_loop = _is_step(module, name), _is_loop(module, name)
    has_carry = is_step or (is_loop and carries.returns_carry(module, kwargs))

    def call() -> Any:
        if module.dtype_policy is None:
            return plainly(args, kwargs)
        return plainly(*_cast_inputs(module, module.dtype_policy, args, kwargs, name, signature_of))

    return run_layer(call, current_scope(), carries.given_carry(args, kwargs) if has_carry else None)


def _cast_inputs(
    module: Any, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, signature_of: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return carries.cast_inputs(
        policy,
        args,
        kwargs,
        is_step=_is_step(module, name),
        is_loop=_is_loop(module, name),
        keep=getattr(type(module), "keep_inputs", ()),
        signature=lambda: _without_self(signature_of),
    )


def _run_method(
    module: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str,
    is_upstream: bool,
    signature_of: Any,
) -> Any:
    scope = current_scope()
    policy, cls = module.dtype_policy, type(module)
    kind: Any = cls if is_ours(cls) else vars(module)[PORT].kind
    if _calls.depth == 0:
        _warn_of_scope(module, scope)
    if kind._is_layer:
        crosses = boundary.layer_crosses(scope, policy, module._policy_source.own)
    else:
        crosses = boundary.module_crosses(scope, policy)
    is_step, is_loop = _is_step(module, name), _is_loop(module, name)
    if crosses and not (kind._is_layer and kind._takes_inputs_as_they_come):
        args, kwargs = _cast_inputs(module, policy, args, kwargs, name, signature_of)
    explained = contextlib.nullcontext()
    if crosses and policy is not None:
        if _calls.depth:
            _calls.crossed[cls.__name__] = policy
        else:
            explained = carries.scan_explained(_calls.crossed)
    caller, _calls.module = _calls.module, module
    _calls.depth += 1
    try:
        inner = boundary.inside(scope, policy) if crosses else scope
        with explained, enter(inner, module._policy_source.for_those_inside(cls.__name__) if crosses else None):
            if is_upstream and kind._is_layer:
                outputs = as_ours(module)._call_layer(crosses, method, name, args, kwargs)
            else:
                outputs = method(as_ours(module) if is_upstream else module, *args, **kwargs)
    finally:
        _calls.module = caller
        _calls.depth -= 1
        if not _calls.depth:
            _calls.crossed.clear()
    if is_step and policy is not None:
        outputs = carries.hand_on_outputs(outputs, carries.given_carry(args, kwargs))
    has_carry = is_step or (is_loop and carries.returns_carry(module, kwargs))
    if crosses and policy is not None:
        outputs = carries.cast_outputs(policy, outputs, has_carry=has_carry)
    if caller is None or caller is module or is_upstream or scope.policy is None or not _casts_outputs(module):
        return outputs
    handed_on = scope.policy.replace(output_dtype=scope.policy.compute_dtype)
    return carries.cast_outputs(handed_on, outputs, has_carry=has_carry)


def _casts_outputs(module: Any) -> bool:
    """Returns whether a module was ported with `cast_submodules`."""
    port = vars(module).get(PORT)
    return port is not None and port.casts_outputs


def _is_step(module: Any, name: str) -> bool:
    """Returns whether a call is a step of a recurrent cell, from carry and input to carry and output."""
    return name == "__call__" and isinstance(module, flax_nnx.RNNCellBase)


def _is_loop(module: Any, name: str) -> bool:
    """Returns whether a call runs a recurrent cell over a sequence, and may take and return a carry."""
    return name == "__call__" and isinstance(module, flax_nnx.RNN | flax_nnx.Bidirectional)


def _without_self(method: Any) -> inspect.Signature:
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _warn_of_scope(module: Any, scope: Scope) -> None:
    if any(frame.module is module for frame in _building.frames):  # its policy is captured when it is built
        return
    if scope.policy is not None and not scope.boundary_open and not _captured_from(module, scope.policy):
        captured = "no policy" if module.dtype_policy is None else f"'{module.dtype_policy}'"
        warn_once(
            f"{type(module).__name__} was built under {captured}, and the scope around this call, '{scope.policy}', "
            "changes no nnx layer: build the model in the scope, or call mpmodules.nnx.apply_policy(model, policy)."
        )

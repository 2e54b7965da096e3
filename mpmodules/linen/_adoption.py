"""Flax's layers called as ours: the interceptor that does it, and where it is in force."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import flax.linen as flax_nn

from mpmodules._defined_in import is_upstream
from mpmodules.functional import is_half
from mpmodules.linen._boundary import NOT_BOUNDARIES, run_method, run_setup
from mpmodules.linen._calls import is_innermost
from mpmodules.linen._foreign import foreign_module_set
from mpmodules.linen._instance_methods import InstanceMethod
from mpmodules.linen._registry import LAYER_OF, obeys_policies
from policy.policy import Policy
from policy.scope import current_scope


@functools.cache
def adopting_class(cls: type) -> type | None:
    """Returns our class for instances of a Flax layer `cls`, or of a subclass of one.

    Returns None of other classes.
    """
    for base in cls.__mro__:
        ours = LAYER_OF.get(base)
        if ours is not None and hasattr(ours, "_call_layer"):
            return ours if base is cls else _combined(cls, ours)
    return None


def _combined(cls: Any, ours: type) -> type:
    """Makes our class for instances of `cls`, a user's subclass of a Flax layer.

    Looked up on it, methods are those of `cls`; instances run them inside of our boundary.
    """
    combined: Any = type(
        cls.__name__, (cls, ours), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )
    for name in dir(cls):
        shown, run = inspect.getattr_static(cls, name), inspect.getattr_static(combined, name)
        special = name.startswith("__") and name != "__call__"
        if (
            run is not shown
            and not special
            and inspect.isfunction(run)
            and inspect.isfunction(shown)
        ):
            setattr(combined, name, InstanceMethod(shown, run))
    constructor = cls.__init__

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, dtype_policy: Any = None, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        object.__setattr__(self, "dtype_policy", dtype_policy)

    combined.__init__ = __init__
    return combined


@contextlib.contextmanager
def seen_as(module: Any, cls: type, keep: Collection[str]) -> Iterator[Any]:
    """Yields an instance of `cls`, our class for a bound Flax layer, that shares the layer's scope
    and state.

    The policy decides each of its dtypes that is not in `keep`. What setup and calls leave behind
    on the instance is the layer's afterwards; its fields stay as they are.
    """
    seen: Any = object.__new__(cls)
    namespace = vars(seen)
    namespace.update(vars(module))
    for name in {"dtype", "param_dtype"}.intersection(namespace) - set(keep):
        namespace[name] = None
    if namespace.get("use_fast_variance") is True:
        namespace["use_fast_variance"] = None  # nor can this one
    # A model that is a layer itself carries its policy, so that its call is a boundary.
    namespace["dtype_policy"] = getattr(type(module), "_ported_policy", None)
    with contextlib.ExitStack() as parts:
        for name in getattr(cls, "_adopts_fields", ()):  # asked something before they are called
            part = namespace.get(name)
            ours = None if obeys_policies(part) else adopting_class(type(part))
            if ours is not None:
                namespace[name] = parts.enter_context(seen_as(part, ours, keep))
        before = dict(namespace)
        try:
            yield seen
        finally:
            _hand_back(seen, module, before)


def _hand_back(seen: Any, module: Any, before: Mapping[str, Any]) -> None:
    """Gives a layer the attributes and the children that came to the instance that stood for it."""
    fields = {field.name for field in dataclasses.fields(seen) if field.init}
    for name, value in vars(seen).items():
        if name not in fields and (name not in before or value is not before[name]):
            object.__setattr__(module, name, value)
    for child in module._state.children.values():
        if isinstance(child, flax_nn.Module) and child.parent is seen:
            object.__setattr__(child, "parent", module)


class Adopter:
    """A method interceptor that makes Flax's layers, and on demand all of Flax's modules, obey
    policies.

    Of those in force, the innermost acts.

    Args:
      keep: which of `dtype` and `param_dtype` were given to the layers by hand, and hold.
      composites: whether modules that are no layers are boundaries too, and their parameters follow
        the policy.
      dtype_fields: whether the dtype fields of modules that are no layers hold the policy's dtypes
        in their calls.
      cast_submodules: whether such a submodule's outputs are cast to its caller's compute_dtype.
    """

    def __init__(
        self,
        *,
        keep: Collection[str],
        composites: bool,
        dtype_fields: bool = False,
        cast_submodules: bool = False,
    ):
        self.keep = keep
        self.composites = composites
        self.is_of_a_port = (
            composites  # whether the scope that it is in force with tells its options
        )
        self.dtype_fields = dtype_fields
        self.cast_submodules = cast_submodules

    def __call__(
        self,
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Any,
    ) -> Any:
        module, name = context.module, context.method_name
        if _in_force.adopters[-1] is not self:
            return next_fun(*args, **kwargs)
        is_known = obeys_policies(module)
        ours = None if is_known else adopting_class(type(module))
        if ours is not None:
            with seen_as(module, ours, self.keep) as seen:
                return _run_layer(
                    seen, self._method(next_fun, seen, context), args, kwargs, context
                )
        if not is_known and (not self.composites or module.scope is None):
            return next_fun(*args, **kwargs)
        run = next_fun
        if not is_known and self._sets(module):
            run = self._set(module, next_fun)
        if not is_known and name == "setup":
            return run_setup(module, run)
        # A method of ours comes with its boundary around it.
        bounded = is_known and "_policy_boundary" in vars(context.orig_method.func)
        if _is_internal(name) or bounded or (is_known and is_innermost(module)):
            return next_fun(*args, **kwargs)
        method = _method_of(run, module, context)
        hands_on = not is_known and self.cast_submodules and bool(module.path)
        return run_method(
            module,
            method,
            args,
            kwargs,
            own_body=is_upstream(context.orig_method.func),
            cast_result=hands_on and not is_innermost(module),
        )

    def _method(self, next_fun: Callable[..., Any], seen: Any, context: Any) -> Callable[..., Any]:
        """Returns the method that was called, as one of the instance that stands for a layer."""
        run = functools.partial(context.orig_method.func, seen)
        if next_fun is context.orig_method:
            return _method_of(next_fun, seen, context)
        for interceptor in flax_nn.module._global_interceptor_stack:
            if interceptor is self:
                break
            run = functools.partial(_intercepted, interceptor, run, context)
        return _method_of(run, seen, context)

    def _sets(self, module: Any) -> bool:
        """Returns whether there may be something to set in a module that is no layer."""
        return self.dtype_fields or module.is_mutable_collection("params")

    def _set(self, module: Any, next_fun: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with foreign_module_set(module, dtype_fields=self.dtype_fields):
                return next_fun(*args, **kwargs)

        return call


def _is_internal(name: str) -> bool:
    """Returns whether no method of that name is a boundary."""
    return name in NOT_BOUNDARIES or (name.startswith("_") and name != "__call__")


def _run_layer(
    seen: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Any,
) -> Any:
    if context.method_name == "setup":
        return run_setup(seen, lambda: method(seen))
    if _is_internal(context.method_name):
        return method(seen, *args, **kwargs)
    own_body = is_upstream(context.orig_method.func)
    return run_method(seen, method, args, kwargs, own_body=own_body)


def _intercepted(
    interceptor: Any, run: Callable[..., Any], context: Any, *args: Any, **kwargs: Any
) -> Any:
    return interceptor(run, args, kwargs, context)


def _method_of(run: Callable[..., Any], module: Any, context: Any) -> Callable[..., Any]:
    """Returns the method that was called: its own function, or for `module` with `run` in its place
    where there is something around it.
    """
    bare = context.orig_method.func
    if run is context.orig_method:
        return bare

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        if instance is not module:  # a copy inside a transform: an RNN reads wider parameters so
            return bare(instance, *args, **kwargs)
        return run(*args, **kwargs)

    # No more of it: what interceptors are around is not Flax's own.
    method.__name__ = context.method_name
    method.__wrapped__ = bare  # type: ignore[attr-defined]
    return method


def layers_inside(
    policy: Policy | None, declared: Mapping[str, Any]
) -> contextlib.AbstractContextManager[Any]:
    """Makes the Flax layers that Flax's code creates inside of a layer of ours obey policies and
    rules too.

    Args:
      policy: the policy of the layer of ours. Where it is None, rules may still reach the layers
        inside, and where its dtype arguments are half, their sums are ours.
      declared: the dtype arguments that the layer of ours was given; with no policy, its layers
        inherit them.
    """
    names = ("dtype", "param_dtype")
    given = [] if policy is not None else [name for name in names if declared.get(name) is not None]
    if (
        policy is None
        and not current_scope().rules
        and not any(is_half(declared[name]) for name in given)
    ):
        return contextlib.nullcontext()
    if _in_force.adopters:  # it reaches them
        return contextlib.nullcontext()
    return adopting(Adopter(keep=given, composites=False))


class _InForce(threading.local):
    """The adopters in force in this thread, the innermost last."""

    def __init__(self) -> None:
        self.adopters: list[Adopter] = []


_in_force = _InForce()


@contextlib.contextmanager
def adopting(adopter: Adopter) -> Iterator[None]:
    """Puts an adopter in force for a block."""
    _in_force.adopters.append(adopter)
    try:
        with flax_nn.intercept_methods(adopter):
            yield
    finally:
        _in_force.adopters.pop()

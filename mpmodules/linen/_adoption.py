"""Flax's layers called as ours: the interceptor that does it, and where it is in force."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import flax.linen as flax_nn

from mpmodules.calls.defined_in import is_upstream
from mpmodules.calls.instance_methods import InstanceMethod
from mpmodules.calls.layer_classes import LAYER_OF, is_ours, layer_class
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.linen._call import NOT_BOUNDARIES, is_innermost, run_method, run_setup
from mpmodules.linen._instances import stand_in
from mpmodules.linen._own_parameters import own_params
from policy.core.casting import cast_floating
from policy.core.scope import current_scope


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
    """Yields an instance of `cls`, our class for a bound Flax layer, that stands in for the layer.

    The policy decides each of its dtypes that is not in `keep`.
    """
    given = vars(module)
    fields: dict[str, Any] = dict.fromkeys({"dtype", "param_dtype"}.intersection(given) - set(keep))
    if given.get("use_fast_variance") is True:
        fields["use_fast_variance"] = None  # nor can this one
    # A model that is a layer itself carries its policy, so that its call is a boundary.
    fields["dtype_policy"] = getattr(type(module), "_ported_policy", None)
    with contextlib.ExitStack() as parts:
        for name in getattr(cls, "_adopts_fields", ()):  # asked something before they are called
            part = given.get(name)
            ours = None if is_ours(type(part)) else adopting_class(type(part))
            if ours is not None:
                fields[name] = parts.enter_context(seen_as(part, ours, keep))
        yield parts.enter_context(stand_in(module, cls, fields))


class Adopter:
    """A method interceptor that makes Flax's layers, and on demand all of Flax's modules, obey
    policies.

    Of those in force, the innermost acts.

    Args:
      keep: which of `dtype` and `param_dtype` were given to the layers by hand, and hold.
      is_of_a_port: whether modules that are no layers are boundaries too, and their parameters
        follow the policy. Otherwise layers alone are adopted.
    """

    def __init__(self, keep: Collection[str], *, is_of_a_port: bool = False):
        self.keep, self.is_of_a_port = keep, is_of_a_port

    def __call__(
        self,
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Any,
    ) -> Any:
        module, method = context.module, context.orig_method.func
        if calls.adopters[-1] is not self:
            return next_fun(*args, **kwargs)
        is_known = is_ours(type(module))
        ours = None if is_known else adopting_class(type(module))
        if ours is not None and not _is_of_class(method, type(module), context.method_name):
            return next_fun(*args, **kwargs)  # Flax's own, around calls of the layer
        if ours is not None:
            with seen_as(module, ours, self.keep) as seen:
                method = self._method(next_fun, seen, context)
                return _run(seen, method, args, kwargs, context)
        if is_known:
            # A method of ours comes with its boundary around it.
            if "_policy_boundary" in vars(method) or is_innermost(module):
                return next_fun(*args, **kwargs)
            return _run(module, self._method(next_fun, module, context), args, kwargs, context)
        if not self.is_of_a_port or module.scope is None:
            return next_fun(*args, **kwargs)
        return _run(module, self._foreign_method(next_fun, context), args, kwargs, context)

    def _method(
        self, next_fun: Callable[..., Any], instance: Any, context: Any
    ) -> Callable[..., Any]:
        """Returns the method that was called, as one of `instance`, the module or its stand-in."""
        method = _code_of(context.orig_method.func, instance)
        if next_fun is context.orig_method:
            return method
        run = functools.partial(method, instance)
        for interceptor in flax_nn.module._global_interceptor_stack:
            if interceptor is self:
                break
            run = functools.partial(_intercepted, interceptor, run, context)
        return _method_of(run, instance, method, context)

    def _foreign_method(self, next_fun: Callable[..., Any], context: Any) -> Callable[..., Any]:
        """Returns the method of a module that is no layer, which stores what it makes in
        param_dtype.
        """
        module = context.module
        method = self._method(next_fun, module, context)
        if not module.is_mutable_collection("params"):
            return method

        def run(*args: Any, **kwargs: Any) -> Any:
            with _params_stored(module):
                return method(module, *args, **kwargs)

        return _method_of(run, module, context.orig_method.func, context)


def _code_of(method: Callable[..., Any], instance: Any) -> Callable[..., Any]:
    """Returns our layer's code for a method of Flax's; any other method as it is."""
    ours = layer_class(type(instance)) if is_ours(type(instance)) else None
    if ours is None:
        return method
    flaxs, own = (
        inspect.unwrap(inspect.getattr_static(cls, method.__name__, method))
        for cls in (ours._upstream_class, ours)
    )
    return own if method is flaxs else method


def _is_of_class(method: Callable[..., Any], cls: type, name: str) -> bool:
    """Returns whether a function is a class's method, or a user's, rather than one that Flax makes
    to lift a function of modules, as `flax.linen.custom_vjp` does.
    """
    if not is_upstream(method):
        return True
    return inspect.unwrap(inspect.getattr_static(cls, name, None)) is inspect.unwrap(method)  # type: ignore[arg-type]


def _run(
    module: Any,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Any,
) -> Any:
    """Calls ``method(module, *args, **kwargs)`` under the policy that `module` obeys."""
    name = context.method_name
    if name == "setup":
        return run_setup(module, lambda: method(module))
    if not _is_boundary(name):
        return method(module, *args, **kwargs)
    return run_method(module, method, args, kwargs, own_body=is_upstream(context.orig_method.func))


def _is_boundary(name: str) -> bool:
    return name == "__call__" or not (name in NOT_BOUNDARIES or name.startswith("_"))


def _intercepted(
    interceptor: Any, run: Callable[..., Any], context: Any, *args: Any, **kwargs: Any
) -> Any:
    return interceptor(run, args, kwargs, context)


def _method_of(
    run: Callable[..., Any], module: Any, bare: Callable[..., Any], context: Any
) -> Callable[..., Any]:
    """Returns the method `bare` that was called, with `run` in its place for `module`."""

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        if instance is not module:  # a copy inside a transform: an RNN reads wider parameters so
            return bare(instance, *args, **kwargs)
        return run(*args, **kwargs)

    # No more of it: what interceptors are around is not Flax's own.
    method.__name__ = context.method_name
    method.__wrapped__ = bare  # type: ignore[attr-defined]
    return method


@contextlib.contextmanager
def _params_stored(module: Any) -> Iterator[None]:
    """Stores the parameters that a module of a user's makes in a block in param_dtype."""
    policy, before = current_scope().policy, {*own_params(module)}
    yield
    for name, value in own_params(module).items():
        if policy is not None and name not in before:
            module.put_variable("params", name, cast_floating(value, policy.param_dtype))


# --------------------------------------------------------------------------------------------------
# Where an adopter is in force
# --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def adopting(adopter: Adopter) -> Iterator[None]:
    """Puts an adopter in force for a block."""
    calls.adopters.append(adopter)
    try:
        with flax_nn.intercept_methods(adopter):
            yield
    finally:
        calls.adopters.pop()

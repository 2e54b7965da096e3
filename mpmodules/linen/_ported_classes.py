"""Ported classes: subclasses of a model's class whose calls enter the scope of the port."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn

from mpmodules.calls.instance_methods import InstanceMethod
from mpmodules.calls.port_options import PortOptions
from mpmodules.linen._adoption import Adopter, adopting, adopting_class
from mpmodules.linen._boundary import NOT_BOUNDARIES, run_method
from mpmodules.linen._calls import calls
from mpmodules.linen._instances import fields_of, state_of
from mpmodules.linen._own_code import call as call_own_code
from mpmodules.linen._own_code import is_layers, policy_of_outermost, wrapped_once
from mpmodules.linen._registry import is_ours, layer_class
from mpmodules.linen._summary import tabulate_method
from policy.core.islands import as_in_force
from policy.core.provenance import Source
from policy.core.scope import Scope, current_scope, enter

# --------------------------------------------------------------------------------------------------
# The instance
# --------------------------------------------------------------------------------------------------


def rebuild(base: type, options: PortOptions, fields: dict[str, Any], state: dict[str, Any]) -> Any:
    ported = _ported_class(base, options)(**fields, parent=None)
    vars(ported).update(state)
    return ported


# --------------------------------------------------------------------------------------------------
# The class
# --------------------------------------------------------------------------------------------------


class _Entered(threading.local):
    """The ports whose calls are under way in this thread."""

    def __init__(self) -> None:
        self.ports: list[_Port] = []


_entered = _Entered()

# Methods that run as Flax runs them: their dtypes are the carry's and the cache's own.
_NOT_ENTERED = NOT_BOUNDARIES - {"setup"}


class _Port:
    """The scope, the adopter and the options with which the calls of one ported class run."""

    def __init__(self, base: Any, options: PortOptions):
        self.base = base
        layer = base if is_ours(base) else adopting_class(base)
        self.is_flaxs_layer = not is_ours(base) and layer_class(base) is not None
        is_layer = getattr(layer, "_is_layer", False)
        if layer is not base and _is_transformed(inspect.getattr_static(base, "__call__")):
            is_layer = False
        self.options = options
        policy = (
            None if is_layer else options.policy
        )  # a layer is a boundary only by a policy of its own
        self.scope = Scope(policy, options.rules, options=options.beside_policy)
        self.adopter = Adopter(
            keep=["dtype"]
            if options.keep_explicit
            else [],  # an explicit param_dtype can't be told from the default
            composites=True,
            dtype_fields=options.dtype_fields,
            cast_submodules=options.cast_submodules,
        )

    @property
    def under_way(self) -> bool:
        """Returns whether a method of the model was entered in this thread: one that it calls is
        not entered again.
        """
        return self in _entered.ports

    def outermost(
        self, module: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls ``method(module, *args, **kwargs)``, the outermost method of a bound model, under
        scope and adopter.
        """
        return self._run(functools.partial(method, module), module, method, args, kwargs)

    def entering(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a method that does not run through Flax's `_call_wrapped_method`, entered all the
        same.
        """

        @functools.wraps(method)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module.scope is None or self.under_way:
                return method(module, *args, **kwargs)

            def plainly(*args: Any, **kwargs: Any) -> Any:
                if is_ours(self.base):
                    return method(module, *args, **kwargs)
                # No interceptor sees it: the boundary is outside of it, as it is around a method of
                # ours already.
                return run_method(module, method, args, kwargs, lifted=True)

            return self._run(plainly, module, method, args, kwargs)

        return call

    def _run(
        self,
        plainly: Callable[..., Any],
        module: Any,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        around = current_scope()
        scope = dataclasses.replace(
            self.scope,
            policy=as_in_force(self.scope.policy, around),
            traces_own_code=around.traces_own_code,  # by a model around this one
            keeps_own_code=around.keeps_own_code or self.options.own_code == "keep",
            in_full_precision=around.in_full_precision,
        )
        _entered.ports.append(self)
        try:
            with enter(scope, Source("argument", "apply_policy")), adopting(self.adopter):
                policy = policy_of_outermost(module, method)
                if policy is None or (self.is_flaxs_layer and is_layers(module, method)):
                    return plainly(*args, **kwargs)
                return call_own_code(module, method, args, kwargs, policy, plainly=plainly)
        finally:
            _entered.ports.pop()


def _is_transformed(method: Callable[..., Any]) -> bool:
    """Returns whether a method is transformed, as in nn.scan(Block): it wraps one that Flax
    wrapped.
    """
    return getattr(getattr(method, "__wrapped__", None), "method_handler_wrapped", False)


@functools.cache
def _ported_class(base: Any, options: PortOptions) -> Any:
    """Makes the subclass of `base` whose calls enter the scope and the adopter, and which is `base`
    in all else.
    """
    port = _Port(base, options)
    call_wrapped_method = (
        base._call_wrapped_method
    )  # Flax's, through which every method runs that it wrapped

    @flax_nn.nowrap
    def _call_wrapped_method(
        self: Any, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.scope is None or port.under_way or getattr(fun, "__name__", "") in _NOT_ENTERED:
            return call_wrapped_method(self, fun, args, kwargs)
        return port.outermost(self, wrapped_once(fun), args, kwargs)

    @flax_nn.nowrap
    def _validate_setup(self: Any) -> None:
        if calls.validates:
            base._validate_setup(self)

    @flax_nn.nowrap
    def __reduce__(self: Any) -> Any:
        return rebuild, (base, options, fields_of(self), state_of(self))

    others = {
        name: InstanceMethod(method, port.entering(method))
        for name, method in _not_wrapped(base).items()
    }
    taking_methods = {
        name: InstanceMethod(getattr(base, name), _taking_methods(getattr(base, name), others))
        for name in ("apply", "init_with_output")
    }
    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce__": __reduce__,
        "_call_wrapped_method": _call_wrapped_method,
        "_validate_setup": _validate_setup,
        "_ported_from": base,
        "_ported_policy": options.policy,
        "tabulate": InstanceMethod(base.tabulate, tabulate_method),
        **others,
        **taking_methods,
    }
    ported: Any = type(base)(base.__name__, (base,), namespace)
    for name in ("__init__", "__eq__", "__hash__"):
        # Flax's dataclass transform made new ones; those of `base` may do more.
        if name in vars(ported):
            delattr(ported, name)
    return ported


def _not_wrapped(base: Any) -> dict[str, Callable[..., Any]]:
    """Returns the public methods that Flax does not wrap, or wraps inside of a transform only.

    Those are the methods that nn.scan, nn.remat, ... transformed, those of bases that are no
    modules, and those with a compact name scope.
    """
    fields = {field.name for field in dataclasses.fields(base)}
    names = {name for cls in base.__mro__ if cls is not object for name in vars(cls)}
    names -= NOT_BOUNDARIES | fields | (set(dir(flax_nn.Module)) - {"__call__"})
    methods = {
        name: inspect.getattr_static(base, name)
        for name in names
        if name == "__call__" or name[0] != "_"
    }
    return {
        name: method
        for name, method in methods.items()
        if inspect.isfunction(method)
        and (hasattr(method, "compact_name_scope") or not hasattr(method, "nowrap"))
        and (_is_transformed(method) or not hasattr(method, "method_handler_wrapped"))
    }


def _taking_methods(entry: Callable[..., Any], others: dict[str, Any]) -> Callable[..., Any]:
    """Wraps `apply` and its like, so that any ``method=`` enters the port.

    One of `others` that is given as the base class's function is looked up by name. A function of a
    module that is no method of it, as encoder-decoder models have for each half, runs as one.
    """
    named = {method.__get__(None): name for name, method in others.items()}

    @functools.wraps(entry)
    def call(self: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        function = getattr(method, "__func__", method)
        if callable(function):
            by_name = named.get(function) if inspect.isfunction(function) else None
            is_free = not (
                hasattr(function, "method_handler_wrapped") or hasattr(function, "nowrap")
            )
            method = by_name or (flax_nn.module.wrap_method_once(function) if is_free else method)
        return entry(self, *args, method=method, **kwargs)

    return call

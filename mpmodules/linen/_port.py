"""Policies for linen models that know nothing of us: subclasses whose calls adopt Flax's layers."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import flax.linen as flax_nn

from mpmodules.calls.instance_methods import InstanceMethod
from mpmodules.calls.layer_classes import is_ours, layer_class
from mpmodules.calls.port_options import OwnCode, PortOptions, not_a_model, port_options
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.linen._adoption import Adopter, adopting, adopting_class
from mpmodules.linen._call import NOT_BOUNDARIES, is_layers, outermost, run_method
from mpmodules.linen._instances import fields_of, state_of
from mpmodules.linen._own_code import call_traced, wrapped_once
from mpmodules.linen._summary import tabulate_method
from policy.core.policy import Policy
from policy.core.scope import RulesLike, Scope, Source, current_scope, enter

M = TypeVar("M", bound=flax_nn.Module)


def apply_policy(
    model: M,
    policy: Policy | str,
    rules: RulesLike | None = None,
    *,
    keep_explicit: bool = False,
    own_code: OwnCode = None,
) -> M:
    """Returns the same linen model under a policy and rules, without an edit.

    Every Flax layer in the model, at any depth, obeys the policy: in compact and setup style,
    shared, scanned, rematerialised, vmapped and jitted, and inside Flax's own composites.
    Parameters that other modules create themselves come in param_dtype. Functions (pooling,
    softmax) and the model's own code run under autocast's rules.

    Args:
      model: an unbound linen module, Flax's own or ours. A `dtype_policy` that it carries itself is
        replaced.
      policy: a Policy or its text form.
      rules: `PolicyRules` or an argument for them; paths are those of the model's variables.
      keep_explicit: whether an explicit `dtype` of a Flax layer holds against the policy. An
        explicit `param_dtype` can't be told from the default and never does.
      own_code: the treatment of code that no layer runs. "autocast": it is traced in float32 and
        runs by the rules of `policy.autocast`, under the policies that hold at each module; layers
        run as layers. "keep": it runs in the dtypes that it meets, and nothing is traced. None: as
        "autocast", or as "keep" beside `keep_explicit`.

    Returns:
      An instance of a subclass of the model's class with the same name, constructor, fields, state,
      variables and methods; equal for equal arguments, and picklable. A submodule taken out of a
      bound model and called by itself is not covered.

    Raises:
      TypeError: `model` is no linen module.
      ValueError: `model` is bound, the policy or rules are malformed, `own_code` is none of the
        above, or options contradict each other.

    Example:
      >>> model = linen.apply_policy(flax.linen.Dense(3), "params=bfloat16,compute=bfloat16")
      >>> y, variables = model.init_with_output(key, jnp.ones((2, 4)))
      >>> variables["params"]["kernel"].dtype
      dtype(bfloat16)
    """
    if not isinstance(model, flax_nn.Module):
        raise not_a_model(model, "a linen module", other="mpmodules.nnx")
    if model.scope is not None:
        raise ValueError(
            "apply_policy takes an unbound model; apply the policy before bind, init or apply."
        )
    options = port_options(
        policy,
        rules,
        keep_explicit=keep_explicit,
        own_code=own_code,
    )
    base = getattr(type(model), "_ported_from", type(model))
    fields, state = fields_of(model), state_of(model)
    if "dtype_policy" in fields:
        fields["dtype_policy"] = options.policy
    return rebuild(base, options, fields, state)


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
        # A layer is a boundary only by a policy of its own.
        policy = None if is_layer else options.policy
        self.scope = Scope(policy, options.rules, options=options.beside_policy)
        # An explicit param_dtype can't be told from the default.
        self.adopter = Adopter(["dtype"] if options.keep_explicit else [], is_of_a_port=True)

    @property
    def under_way(self) -> bool:
        """Returns whether a method of the model was entered in this thread: one that it calls is
        not entered again.
        """
        return self.adopter in calls.adopters

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

            return self.run(plainly, module, method, args, kwargs)

        return call

    def run(
        self,
        plainly: Callable[..., Any],
        module: Any,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls the outermost method of a bound model under scope and adopter; `plainly` calls it
        without a trace.
        """
        around = current_scope()
        scope = dataclasses.replace(
            self.scope,
            policy=around.held(self.scope.policy),
            traces_own_code=around.traces_own_code,  # by a model around this one
            keeps_own_code=around.keeps_own_code or self.options.own_code == "keep",
            in_full_precision=around.in_full_precision,
        )
        with enter(scope, Source("argument", "apply_policy")), adopting(self.adopter):
            effective = outermost(module, method)
            if effective is None or (self.is_flaxs_layer and is_layers(module, method)):
                return plainly(*args, **kwargs)
            return call_traced(module, method, args, kwargs, effective, plainly=plainly)


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
    # Flax's, through which every method runs that it wrapped.
    call_wrapped_method = base._call_wrapped_method

    @flax_nn.nowrap
    def _call_wrapped_method(
        self: Any, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.scope is None or port.under_way or getattr(fun, "__name__", "") in _NOT_ENTERED:
            return call_wrapped_method(self, fun, args, kwargs)
        method = wrapped_once(fun)
        return port.run(functools.partial(method, self), self, method, args, kwargs)

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

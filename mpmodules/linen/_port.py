"""Policies for linen models that know nothing of us: subclasses whose calls run Flax's layers as
ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import flax.linen as flax_nn

from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import (
    LAYER_OF,
    GivenDtypes,
    InstanceMethod,
    OwnCode,
    PortOptions,
    is_flax,
    is_ours,
    is_upstream,
    layer_class,
    not_a_model,
    port_options,
    warn_where_dropped,
)
from mpmodules.calls.own_code import FLAX_STATE
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.linen._call import (
    NOT_ENTERED,
    is_boundary_name,
    is_innermost,
    methods_of,
    run_method,
    run_outermost,
    run_setup,
    wrapped_once,
)
from mpmodules.linen._resolution import declared_dtypes, own_params, viewed
from mpmodules.linen._summary import tabulate_method
from policy.core.arrays import cast_floating
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
    shared, scanned, rematerialized, vmapped and jitted, and inside Flax's own composites.
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
    options = port_options(policy, rules, keep_explicit=keep_explicit, own_code=own_code)
    base = getattr(type(model), "_ported_from", type(model))
    fields, state = fields_of(model), state_of(model)
    if "dtype_policy" in fields:
        fields["dtype_policy"] = options.policy
    warn_where_dropped()
    return rebuild(base, options, fields, state)


def rebuild(base: type, options: PortOptions, fields: dict[str, Any], state: dict[str, Any]) -> Any:
    ported = _ported_class(base, options)(**fields, parent=None)
    vars(ported).update(state)
    return ported


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
        # They change a trace, so JAX's caches know them by the scope.
        others = options.keep_explicit, options.own_code
        self.scope = Scope(policy, options.rules, options=others)
        # An explicit param_dtype can't be told from the default.
        given = GivenDtypes(base, options.policy, is_kept=options.keep_explicit)
        self.adopter = Adopter(["dtype"] if options.keep_explicit else [], given)

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
                return run_method(MethodCall(module, method, args, kwargs, is_lifted=True))

            return self.run(MethodCall(module, method, args, kwargs), plainly)

        return call

    def run(self, call: MethodCall, plainly: Callable[..., Any]) -> Any:
        """Runs the outermost call of a bound model under scope and adopter; `plainly` calls the
        method without a trace.
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
            if self.is_flaxs_layer and call.runs_library:
                return plainly(*call.args, **call.kwargs)
            return run_outermost(call, plainly)


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
        if self.scope is None or port.under_way or getattr(fun, "__name__", "") in NOT_ENTERED:
            return call_wrapped_method(self, fun, args, kwargs)
        method = wrapped_once(fun)
        return port.run(MethodCall(self, method, args, kwargs), functools.partial(method, self))

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
    return {
        name: method
        for name, method in methods_of(base).items()
        if is_boundary_name(name)
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


# --------------------------------------------------------------------------------------------------
# Flax's layers called as ours
# --------------------------------------------------------------------------------------------------


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
        are_functions = inspect.isfunction(run) and inspect.isfunction(shown)
        if are_functions and run is not shown and not special:
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
        yield parts.enter_context(viewed(module, fields, cls))


class Adopter:
    """A method interceptor that makes Flax's layers, and on demand all of Flax's modules, obey
    policies.

    Of those in force, the innermost acts.

    Args:
      keep: which of `dtype` and `param_dtype` were given to the layers by hand, and hold.
      given: the dtypes that the layers of a port were given, which it notes. In a port, modules
        that are no layers are boundaries too, and their parameters follow the policy. Otherwise
        layers alone are adopted.
    """

    def __init__(self, keep: Collection[str], given: GivenDtypes | None = None):
        self.keep, self.given, self.is_of_a_port = keep, given, given is not None

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
            if self.given is not None and not is_flax(type(module.parent)):
                self.given.note(module, getattr(module, "dtype", None))
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
        method = self._method(next_fun, module, context)
        if module.is_mutable_collection("params"):
            method = _storing(method)
        return _run(module, method, args, kwargs, context)

    def _method(
        self, next_fun: Callable[..., Any], instance: Any, context: Any
    ) -> Callable[..., Any]:
        """Returns the method that was called, as one of `instance`, the module or its stand-in."""
        method = _code_of(context.orig_method.func, instance)
        if next_fun is context.orig_method:
            return method
        others = itertools.takewhile(
            lambda each: each is not self, flax_nn.module._global_interceptor_stack
        )
        return _method_of(list(others), instance, method, context)


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
        return run_setup(module, method)
    if not is_boundary_name(name):
        return method(module, *args, **kwargs)
    is_upstreams = is_upstream(context.orig_method.func)
    return run_method(MethodCall(module, method, args, kwargs, is_upstream=is_upstreams))


def _intercepted(
    interceptor: Any, run: Callable[..., Any], context: Any, *args: Any, **kwargs: Any
) -> Any:
    return interceptor(run, args, kwargs, context)


def _method_of(
    interceptors: Iterable[Any], module: Any, bare: Callable[..., Any], context: Any
) -> Callable[..., Any]:
    """Returns the method `bare` that was called, within interceptors for `module` and its views."""

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(bare, instance)
        # A copy inside a transform is none: an RNN reads wider parameters so.
        if instance._state is module._state:
            for interceptor in interceptors:
                run = functools.partial(_intercepted, interceptor, run, context)
        return run(*args, **kwargs)

    # No more of it: what interceptors are around is not Flax's own.
    method.__name__ = context.method_name
    method.__wrapped__ = bare  # type: ignore[attr-defined]
    return method


def _storing(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of a module that is no layer, which stores the parameters that it makes in
    param_dtype.
    """

    @functools.wraps(method)
    def storing(module: Any, *args: Any, **kwargs: Any) -> Any:
        policy, before = current_scope().policy, {*own_params(module)}
        outputs = method(module, *args, **kwargs)
        for name, value in own_params(module).items():
            if policy is not None and name not in before:
                module.put_variable("params", name, cast_floating(value, policy.param_dtype))
        return outputs

    return storing


@contextlib.contextmanager
def adopting(adopter: Adopter) -> Iterator[None]:
    """Puts an adopter in force for a block."""
    with calls.noting(adopters=[*calls.adopters, adopter]), flax_nn.intercept_methods(adopter):
        yield


def adopting_inside(layer: Any, call: MethodCall) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the layers that Flax's code makes in a call of `layer` obey
    policies; where no policy holds, they have the dtypes that `layer` was given.
    """
    if calls.adopters:  # that of a port reaches the layers inside
        return contextlib.nullcontext()
    given = declared_dtypes(layer) if call.policy is None else {}
    return adopting(Adopter([name for name in given if given[name] is not None]))


# --------------------------------------------------------------------------------------------------
# Instances
# --------------------------------------------------------------------------------------------------


def fields_of(model: flax_nn.Module) -> dict[str, Any]:
    return {
        f.name: getattr(model, f.name)
        for f in dataclasses.fields(model)
        if f.init and f.name != "parent"
    }


def state_of(model: flax_nn.Module) -> dict[str, Any]:
    """Returns the attributes of the instance beside its fields, such as a config."""
    fields = {f.name for f in dataclasses.fields(model) if f.init}
    return {name: value for name, value in vars(model).items() if name not in fields | FLAX_STATE}

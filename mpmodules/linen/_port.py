"""Policies for linen models that know nothing of us: an interceptor adopts Flax's layers as they are called."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import flax.linen as flax_nn

from mpmodules._own_code import OwnCode, resolved
from mpmodules.functional import is_half
from mpmodules.linen._boundary import NOT_BOUNDARIES, is_upstream, run_method, run_setup
from mpmodules.linen._calls import is_innermost
from mpmodules.linen._module import LAYER_OF, obeys_policies
from mpmodules.linen._own_code import call_port
from mpmodules.linen._summary import tabulate_method
from policy.policy import Policy, get_policy
from policy.rules import PolicyRules
from policy.scope import RulesLike, Scope, current_scope, enter, require_usable
from policy.sources import Source

M = TypeVar("M", bound=flax_nn.Module)


@functools.cache
def adopting_class(cls: type) -> type | None:
    """Returns our class for instances of a Flax layer `cls`, or of a subclass of one; None of other classes."""
    for base in cls.__mro__:
        ours = LAYER_OF.get(base)
        if ours is not None and hasattr(ours, "_call_layer"):
            if base is cls:
                return ours
            return type(cls.__name__, (cls, ours), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    return None


def _adopt(module: Any, cls: type, keep: Collection[str]) -> None:
    """Turns an instance of Flax's layer into ours; the policy decides each dtype that is not in `keep`."""
    namespace = module.__dict__
    for name in {"dtype", "param_dtype"}.intersection(namespace) - set(keep):
        namespace[name] = None
    if namespace.get("use_fast_variance") is True:
        namespace["use_fast_variance"] = None  # nor can this one
    # A model that is a layer itself carries its policy, so that its call is a boundary.
    namespace["dtype_policy"] = getattr(type(module), "_ported_policy", None)
    object.__setattr__(module, "__class__", cls)
    for name in getattr(cls, "_adopts_fields", ()):  # what a layer asks something of before it calls it
        part = namespace.get(name)
        ours = None if obeys_policies(part) else adopting_class(type(part))
        if ours is not None:
            _adopt(part, ours, keep)


class _Adopter:
    """A method interceptor that makes Flax's layers, and on demand all of Flax's modules, obey policies.

    Args:
      keep: which of `dtype` and `param_dtype` were given to the layers by hand, and hold.
      composites: whether modules that are no layers are boundaries too.
    """

    def __init__(self, *, keep: Collection[str], composites: bool):
        self.keep = keep
        self.composites = composites

    def __call__(
        self, next_fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
    ) -> Any:
        module, name = context.module, context.method_name
        known = obeys_policies(module)
        ours = None if known else adopting_class(type(module))
        if ours is not None:
            _adopt(module, ours, self.keep)
            if name == "setup":
                return run_setup(module, lambda: next_fun(*args, **kwargs))
        elif not known and not self.composites:
            return next_fun(*args, **kwargs)
        if name in NOT_BOUNDARIES or (name.startswith("_") and name != "__call__"):
            return next_fun(*args, **kwargs)
        # A method of ours comes with its boundary around it; one that was looked up before the instance was adopted
        # (self.embed.attend(self.embed(x)) does that) comes without.
        if known and ("_policy_boundary" in vars(context.orig_method.func) or is_innermost(module)):
            return next_fun(*args, **kwargs)

        method = context.orig_method.func if next_fun is context.orig_method else _through(next_fun, context)
        own_body = is_upstream(context.orig_method.func)
        return run_method(module, method, args, kwargs, own_body=own_body)


def _through(next_fun: Callable[..., Any], context: Any) -> Callable[..., Any]:
    """Returns the method that was called, with the interceptors inside of ours around it."""
    bare = context.orig_method.func

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        if instance is not context.module:  # a copy of it inside a transform, where an RNN reads wider parameters
            return bare(instance, *args, **kwargs)
        return next_fun(*args, **kwargs)

    method.__name__ = context.method_name  # no more of it: what interceptors are around is not Flax's own
    method.__wrapped__ = bare  # type: ignore[attr-defined]
    return method


def layers_inside(policy: Policy | None, declared: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Makes the Flax layers that Flax's code creates inside of a layer of ours obey policies and rules too.

    Args:
      policy: the policy of the layer of ours. Where it is None, rules may still reach the layers inside, and where its
        dtype arguments are half, their sums are ours.
      declared: the dtype arguments that the layer of ours was given; with no policy, its layers inherit them.
    """
    names = ("dtype", "param_dtype")
    given = [] if policy is not None else [name for name in names if declared.get(name) is not None]
    if policy is None and not current_scope().rules and not any(is_half(declared[name]) for name in given):
        return contextlib.nullcontext()
    if _entered.adopters:  # one in force is called first, and leaves nothing to a second
        return contextlib.nullcontext()
    return _adopting(_Adopter(keep=given, composites=False))


class _Entered(threading.local):
    """The ported models' classes whose calls are under way in this thread, and how many adopters are in force."""

    def __init__(self) -> None:
        self.classes: list[type] = []
        self.adopters = 0


_entered = _Entered()


@contextlib.contextmanager
def _adopting(adopter: _Adopter) -> Iterator[None]:
    _entered.adopters += 1
    try:
        with flax_nn.intercept_methods(adopter):
            yield
    finally:
        _entered.adopters -= 1


def apply_policy(model: M, policy: Policy | str, rules: RulesLike | None = None, *, keep_explicit: bool = False, own_code: OwnCode = None) -> M:
    """Returns the same linen model under a policy and rules, without an edit.

    Every Flax layer in the model, at whatever depth, obeys the policy: in compact and setup style, shared, scanned,
    rematerialised, vmapped and jitted, and inside Flax's own composites. Functions (pooling, softmax) are out of reach.

    Args:
      model: an unbound linen module, Flax's own or ours. A `dtype_policy` that it carries itself is replaced.
      policy: a Policy or its text form.
      rules: `PolicyRules` or an argument for them; paths are those of the model's variables.
      keep_explicit: whether an explicit `dtype` of a Flax layer holds against the policy. An explicit `param_dtype`
        can't be told from the default and never does.

    Returns:
      An instance of a subclass of the model's class with the same name, fields, variables and methods; equal for equal
      arguments, and picklable. A submodule taken out of a bound model and called by itself is not covered.

    Raises:
      TypeError: `model` is no linen module.
      ValueError: `model` is bound, or the policy or rules are malformed.
    """
    if not isinstance(model, flax_nn.Module):
        raise TypeError(f"apply_policy takes a linen module here, but got {model!r} of type {type(model).__name__}.")
    if model.scope is not None:
        raise ValueError("apply_policy takes an unbound model; apply the policy before bind, init or apply.")
    policy = require_usable(get_policy(policy))
    rules = None if rules is None else PolicyRules(rules) if not isinstance(rules, PolicyRules) else rules
    for _, rule_policy in rules or ():
        require_usable(rule_policy)
    own_code = resolved(own_code, policy, rules, keep_explicit=keep_explicit, dtype_fields=False)
    base = getattr(type(model), "_ported_from", type(model))
    fields = _fields_of(model)
    if "dtype_policy" in fields:
        fields["dtype_policy"] = policy
    return _instance(_ported_class(base, policy, rules, keep_explicit, own_code), fields)


def _fields_of(model: flax_nn.Module) -> dict[str, Any]:
    return {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.init and f.name != "parent"}


def _instance(cls: Any, fields: dict[str, Any]) -> Any:
    return cls(**fields, parent=None)


def _rebuild(
    base: type, policy: Policy, rules: PolicyRules | None, keep_explicit: bool, own_code: OwnCode, fields: dict
) -> Any:
    return _instance(_ported_class(base, policy, rules, keep_explicit, own_code), fields)


def _inside_of(scope: Scope) -> Scope:
    """Returns a port's scope inside of the one in force, whose modules may hand on float32."""
    return dataclasses.replace(scope, hands_on_float32=current_scope().hands_on_float32)


def _called(module: Any, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return method(module, *args, **kwargs)


def _is_lifted(cls: type, method: Callable[..., Any]) -> bool:
    """Returns whether a Flax class's method is transformed, as in nn.scan(Block): it wraps one that Flax wrapped."""
    wrapped = getattr(method, "__wrapped__", None)
    return not hasattr(cls, "_is_layer") and getattr(wrapped, "method_handler_wrapped", False)


@functools.cache
def _ported_class(
    base: Any, policy: Policy, rules: PolicyRules | None, keep_explicit: bool, own_code: OwnCode
) -> Any:
    """Makes the subclass of `base` whose public methods enter the scope and the adopter."""
    # An explicit param_dtype can't be told from Flax's default.
    interceptor = _Adopter(keep=["dtype"] if keep_explicit else [], composites=True)
    layer = base if hasattr(base, "_is_layer") else adopting_class(base)
    is_layer = getattr(layer, "_is_layer", False) and not _is_lifted(base, inspect.getattr_static(base, "__call__"))
    autocasts = own_code != "keep" and not hasattr(layer, "_is_layer")
    scope = Scope(None if is_layer else policy, rules)  # a layer is a boundary only by a policy of its own
    flax_methods = frozenset(dir(flax_nn.Module)) - {"__call__"}
    fields = {field.name for field in dataclasses.fields(base)}

    def entering(method: Callable[..., Any]) -> Callable[..., Any]:
        lifted = _is_lifted(base, method)

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            cls = type(self)
            if cls in _entered.classes:  # a method of the same model called by another
                return method(self, *args, **kwargs)
            _entered.classes.append(cls)
            try:
                with enter(_inside_of(scope), Source("argument", "apply_policy")), _adopting(interceptor):
                    # No interceptor sees a lifted method: the boundary is outside of it.
                    plainly = functools.partial(run_method, lifted=True) if lifted else _called
                    if self.scope is None or not autocasts or current_scope().hands_on_float32:
                        return (_called if self.scope is None else plainly)(self, method, args, kwargs)
                    forced = own_code == "autocast"
                    return call_port(self, method, args, kwargs, policy, plainly=plainly, forced=forced)
            finally:
                _entered.classes.pop()

        call._policy_boundary = call  # type: ignore[attr-defined]
        return call

    def taking_names(entry: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `apply` and its like: a method given as the base class's function is looked up by name in our class."""

        @functools.wraps(entry)
        def call(self: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
            function = getattr(method, "__func__", method)
            name = getattr(function, "__name__", "")
            if name in namespace and inspect.getattr_static(base, name, None) is function:
                method = name
            return entry(self, *args, method=method, **kwargs)

        return flax_nn.nowrap(call)

    @flax_nn.nowrap
    def __reduce__(self: Any) -> Any:
        return _rebuild, (base, policy, rules, keep_explicit, own_code, _fields_of(self))

    names = {name for cls in base.__mro__ if cls is not object for name in vars(cls)} - flax_methods - fields
    namespace: dict[str, Any] = {
        name: entering(method)
        for name in names
        if (name == "__call__" or not name.startswith("_"))
        and name not in NOT_BOUNDARIES
        and inspect.isfunction(method := inspect.getattr_static(base, name))
        and not hasattr(method, "nowrap")
    }
    namespace |= {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce__": __reduce__,
        "_ported_from": base,
        "_ported_policy": policy,
        "apply": taking_names(base.apply),
        "tabulate": tabulate_method,
        "init_with_output": taking_names(base.init_with_output),
    }
    return type(base)(base.__name__, (base,), namespace)

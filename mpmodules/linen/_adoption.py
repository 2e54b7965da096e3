"""Flax's layers made ours as they are called: the interceptor that does it, and where it is in
force.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import flax.linen as flax_nn

from mpmodules._defined_in import is_upstream
from mpmodules._instance_methods import InstanceMethod
from mpmodules.functional import is_half
from mpmodules.linen._boundary import NOT_BOUNDARIES, run_method, run_setup
from mpmodules.linen._calls import is_innermost
from mpmodules.linen._foreign import foreign_module_set
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


def _adopt(module: Any, cls: type, keep: Collection[str]) -> None:
    """Turns an instance of Flax's layer into ours.

    The policy decides each dtype that is not in `keep`.
    """
    namespace = module.__dict__
    for name in {"dtype", "param_dtype"}.intersection(namespace) - set(keep):
        namespace[name] = None
    if namespace.get("use_fast_variance") is True:
        namespace["use_fast_variance"] = None  # nor can this one
    # A model that is a layer itself carries its policy, so that its call is a boundary.
    namespace["dtype_policy"] = getattr(type(module), "_ported_policy", None)
    object.__setattr__(module, "__class__", cls)
    for name in getattr(
        cls, "_adopts_fields", ()
    ):  # what a layer asks something of before it calls it
        part = namespace.get(name)
        ours = None if obeys_policies(part) else adopting_class(type(part))
        if ours is not None:
            _adopt(part, ours, keep)


class Adopter:
    """A method interceptor that makes Flax's layers, and on demand all of Flax's modules, obey
    policies.

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
        known = obeys_policies(module)
        ours = None if known else adopting_class(type(module))
        foreign = ours is None and not known
        if ours is not None:
            _adopt(module, ours, self.keep)
            if name == "setup":
                return run_setup(module, lambda: next_fun(*args, **kwargs))
        elif foreign and (not self.composites or module.scope is None):
            return next_fun(*args, **kwargs)
        if foreign and name == "setup" and self._sets(module):
            return run_setup(module, lambda: self._set(module, next_fun)(*args, **kwargs))
        if name in NOT_BOUNDARIES or (name.startswith("_") and name != "__call__"):
            return next_fun(*args, **kwargs)
        # A method of ours comes with its boundary around it; one that was looked up before the
        # instance was adopted (self.embed.attend(self.embed(x)) does that) comes without.
        if known and ("_policy_boundary" in vars(context.orig_method.func) or is_innermost(module)):
            return next_fun(*args, **kwargs)

        if foreign and self._sets(module):
            next_fun = self._set(module, next_fun)
        method = (
            context.orig_method.func
            if next_fun is context.orig_method
            else _through(next_fun, context)
        )
        hands_on = (
            foreign and self.cast_submodules and bool(module.path) and not is_innermost(module)
        )
        own_body = is_upstream(context.orig_method.func)
        return run_method(module, method, args, kwargs, own_body=own_body, cast_result=hands_on)

    def _sets(self, module: Any) -> bool:
        """Returns whether there may be something to set in a module that is no layer."""
        return self.dtype_fields or module.is_mutable_collection("params")

    def _set(self, module: Any, next_fun: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with foreign_module_set(module, dtype_fields=self.dtype_fields):
                return next_fun(*args, **kwargs)

        return call


def _through(next_fun: Callable[..., Any], context: Any) -> Callable[..., Any]:
    """Returns the method that was called, with the interceptors inside of ours around it."""
    bare = context.orig_method.func

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            instance is not context.module
        ):  # a copy of it inside a transform, where an RNN reads wider parameters
            return bare(instance, *args, **kwargs)
        return next_fun(*args, **kwargs)

    method.__name__ = (
        context.method_name
    )  # no more of it: what interceptors are around is not Flax's own
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
    if _in_force.adopters:  # one in force is called first, and leaves nothing to a second
        return contextlib.nullcontext()
    return adopting(Adopter(keep=given, composites=False))


class _InForce(threading.local):
    """The number of adopters in force in this thread."""

    adopters = 0


_in_force = _InForce()


@contextlib.contextmanager
def adopting(adopter: Adopter) -> Iterator[None]:
    """Puts an adopter in force for a block."""
    _in_force.adopters += 1
    try:
        with flax_nn.intercept_methods(adopter):
            yield
    finally:
        _in_force.adopters -= 1

"""nnx's `Module`: captures a dtype policy when built, and its public methods are boundaries."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

from flax import nnx as flax_nnx
from flax.nnx.module import ModuleMeta as FlaxModuleMeta

from mpmodules.calls import classes
from mpmodules.calls.boundary import PLAIN, Crossing
from mpmodules.calls.under_way import nnx_calls as calls
from mpmodules.layers.docstrings import extend_docstring
from mpmodules.nnx._call import install_boundaries, store_in_param_dtype
from mpmodules.nnx._resolution import (
    hold_policy,
    is_being_built,
    own_policy,
    policy_to_capture,
    reject_children_from_outside,
    warn_of_builder,
    warn_of_parts,
    warn_of_strangers,
)
from policy.core.policy import Policy
from policy.core.scope import NO_SOURCE, Source, current_scope, enter

T = TypeVar("T")

# What a layer's docstring says of the argument.
_DTYPE_POLICY = (
    "a `Policy` or its text form, captured when the layer is built; None takes that of a class "
    "rule, of the module being built around the layer, or of the scope. Where the layer has dtype "
    "and param_dtype, one that is not given is the policy's."
)


class _Signature(inspect.Signature):
    """A signature that binds arguments as that of Flax's classes does, ``(*args, **kwargs)``.

    Flax's transformations apply the defaults of the function that they map. They would map
    ``nnx.vmap(Block)(rngs)`` over positional ones, and reject keywords such as `dtype_policy`.
    """

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        return _BoundArguments(self, super().bind(*args, **kwargs).arguments)


class _BoundArguments(inspect.BoundArguments):
    def apply_defaults(self) -> None:
        pass


@dataclasses.dataclass
class _Construction:
    """One construction: the source of its policy, whether it is captured yet, and the module."""

    source: Source
    captured: bool = False
    module: Any = None


class ModuleMeta(classes.StandsForFlax, FlaxModuleMeta):
    """Builds modules under their policies."""

    # An `__init__` need not declare `dtype_policy`. A checker that reads metaclasses leaves
    # `__init__` alone only where this returns something else than the class: hence the union, in
    # which the class and its attributes stay known.
    @overload
    def __call__(
        cls: type[T], *args: Any, dtype_policy: Policy | str | None, **kwargs: Any
    ) -> T | Any: ...
    @overload
    def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T: ...
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        classes.require_attributes(cls)
        own, kwargs = own_policy(cls, args, kwargs)
        scope = current_scope()
        policy, source = policy_to_capture(cls, own, scope)
        if own is None and scope.policy is not None and not calls.constructions:
            warn_of_builder(cls, scope.policy, sys._getframe(1))
        inner = scope if policy is None else dataclasses.replace(scope, policy=policy)
        inside, construction = source.for_those_inside(cls.__name__), _Construction(source)
        under_way = calls.noting(constructions=[*calls.constructions, construction])
        try:
            with under_way, enter(inner, inside):
                module = super().__call__(*args, **kwargs)
        except TypeError as error:
            classes.explain(error, cls, args, kwargs)
            raise
        if not construction.captured:
            classes.reject_policy_set_by_hand(module, policy)
            module._capture(policy, source)
        store_in_param_dtype(module, policy, (args, kwargs))
        if policy is not None and source.own and source.kind == "argument":
            reject_children_from_outside(module, policy, (args, kwargs))
        if policy is None and scope.source.kind == "scope":
            module._policy_source = scope.source  # none, on purpose
        elif policy is None:
            warn_of_parts(module, (args, kwargs))
        return module

    def _pytree_meta_construct(cls, self: Any, *args: Any, **kwargs: Any) -> None:
        if calls.constructions:
            calls.constructions[-1].module = self
        super()._pytree_meta_construct(self, *args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        if any(p.name == "dtype_policy" for p in parameters):
            return _Signature(parameters)
        added = inspect.Parameter(
            "dtype_policy",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation="Policy | str | None",
        )
        last = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
        return _Signature([*parameters[:last], added, *parameters[last:]])


class Module(flax_nnx.Module, metaclass=ModuleMeta):
    """`flax.nnx.Module` with a dtype policy.

    Every subclass takes ``dtype_policy=`` when it is built, a `Policy` or its text form, without
    saying so in its ``__init__``. The policy is captured then: the argument, else a class rule in
    force, else the policy of the module or `use_policy` block that it is built in. It is a static
    attribute, part of the graph definition and never of the state. A scope around a call of a built
    model changes no layer.

    A module's call is a *boundary* when its policy differs from the one in force, or when none is
    open yet: its floating inputs are cast to compute_dtype and its floating outputs to
    output_dtype. Every layer inside returns compute_dtype. That holds for every public method that
    is called from outside.

    Attributes:
      dtype_policy: the `Policy` captured, or None.
      keep_inputs: names of arguments that a boundary leaves uncast. A class attribute:
        ``keep_inputs = ("positions",)``. A name that no public method takes is rejected when the
        module is built.
      keep_outputs: outputs, by index or key, that have the dtypes of an argument, such as a carry.
        A class attribute: ``keep_outputs = {0: "carry"}``.
      own_code: "keep" runs the methods of a class in the dtypes that they meet, without a trace:
        inputs in compute_dtype, parameters as stored. A class attribute.
      keep_params: names of attributes whose parameters no policy touches: they are stored and read
        as they are made. A class attribute: ``keep_params = ("scale",)``.

    A user's own methods are written as for float32, and see float32. Under a half-precision policy
    the outermost call is traced, and autocast's rules decide what runs in which dtype. Parameters
    are stored in param_dtype, and their gradients are summed in float32 over all uses.
    ``nnx.Param(x, compute_dtype=jnp.float32)`` is read in another dtype.

    Example:
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.dense = nnx.Linear(4, 3, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.dense(x)
      >>> net = Net(nnx.Rngs(0), dtype_policy="mixed_bfloat16")
      >>> net(jnp.ones((2, 4))).dtype, net.dense.kernel[...].dtype, net.dense.dtype
      (dtype('float32'), dtype('float32'), dtype(bfloat16))
    """

    if TYPE_CHECKING:
        dtype_policy: Policy | None
    else:
        dtype_policy = None
    keep_inputs: ClassVar[tuple[str, ...]] = ()
    keep_outputs: ClassVar[Mapping[int | str, str]] = {}
    keep_params: ClassVar[tuple[str, ...]] = ()
    own_code: ClassVar[Literal["keep"] | None] = None
    # What the class stands for in isinstance and in class rules.
    _upstream_class: ClassVar[type] = flax_nnx.Module

    _policy_source = NO_SOURCE  # where the policy came from
    _explicit_dtype = None  # the dtype and param_dtype arguments of a layer, where they were given
    _explicit_param_dtype = None
    _crossing: ClassVar[Crossing] = PLAIN
    _ported_code = None  # `own_code` of a port that the module is part of
    _is_layer = False  # a bare layer is a boundary only by a policy of its own

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        classes.reject_policy_in_body(cls)
        if classes.module_of(cls).startswith("mpmodules.nnx."):
            upstream = classes.register_layer(cls)
            if upstream is not None:
                extend_docstring(cls, upstream, _DTYPE_POLICY)
                if hasattr(cls, "_construct"):
                    # Not `cls.__init__ =`: to a type checker that would be an __init__ of Module's
                    # own.
                    type.__setattr__(cls, "__init__", _with_policy_dtypes(upstream.__init__))
        install_boundaries(cls)
        classes.require_keep_params(cls)

    def _capture(self, policy: Policy | None, source: Source) -> None:
        """Captures the policy, as static attributes."""
        # An __init__ may have stored its own argument there.
        if policy is not None or self.dtype_policy is not None:
            hold_policy(self, policy, source)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "dtype_policy" and ("_policy_source" in vars(self) or not calls.constructions):
            raise classes.policy_set_by_hand(self, value)
        if self.dtype_policy is not None and not is_being_built(self):
            warn_of_strangers(self, value, current_scope())
        super().__setattr__(name, value)


def _with_policy_dtypes(upstream_init: Callable[..., None]) -> Callable[..., None]:
    """Wraps Flax's constructor: the layer's `_construct` runs it, also for a subclass's
    ``super().__init__``.
    """

    @functools.wraps(upstream_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        scope, under_way = current_scope(), calls.constructions
        construction = under_way[-1] if under_way else _Construction(scope.source)
        self._construct(scope.policy, construction.source, upstream_init, args, kwargs)
        construction.captured = True

    return __init__

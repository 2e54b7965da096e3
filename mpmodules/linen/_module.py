"""linen's `Module`: carries a dtype policy, and its public methods are boundaries."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import flax.linen as flax_nn
from flax.linen.kw_only_dataclasses import KW_ONLY
from flax.linen.module import module_field
from jax.typing import DTypeLike

from mpmodules.calls import classes
from mpmodules.calls.boundary import PLAIN, Crossing, MethodCall
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.layers.docstrings import extend_docstring
from mpmodules.linen._call import (
    install_boundaries,
    run_outermost,
    wrapped_once,
)
from mpmodules.linen._call import param as own_param
from mpmodules.linen._summary import tabulate_method
from policy.core.policy import Policy

DtypePolicy = Policy | str | None
T = TypeVar("T")


if TYPE_CHECKING:
    _MetaOfProtocol = abc.ABCMeta
else:  # an ABCMeta: a module can have abstract classes and protocols among its bases, as Flax's can
    _MetaOfProtocol = type(Protocol)


class _ModuleMeta(classes.StandsForFlax, _MetaOfProtocol):
    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> Any:
        cls: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        if not any(
            isinstance(base, abc.ABCMeta) and not isinstance(base, _ModuleMeta)
            for base in cls.__mro__
        ):
            # No base asked for the check, which Flax's modules do not make.
            cls.__abstractmethods__ = frozenset()
        return cls


# What a layer's docstring says of the argument.
_DTYPE_POLICY = (
    "a `Policy` or its text form; None obeys a rule, the module around the layer, or the scope. "
    "Where the layer has dtype and param_dtype, one that is not given is the policy's."
)


class Module(flax_nn.Module, metaclass=_ModuleMeta):
    """`flax.linen.Module` with a dtype policy.

    A module's call is a *boundary* when it obeys another policy than the one in force, or when none
    is open yet: its floating inputs are cast to compute_dtype and its floating outputs to
    output_dtype. Every layer inside returns compute_dtype. That holds for every public method that
    is called from outside.

    Attributes:
      dtype_policy: a `Policy` or its text form; None obeys a rule, the caller, or the scope.
      keep_inputs: names of arguments that a boundary leaves uncast. A class attribute:
        ``keep_inputs = ("positions",)``. A name that no public method takes is rejected when the
        module is made.
      keep_outputs: outputs, by index or key, that have the dtypes of an argument, such as a carry.
        A class attribute: ``keep_outputs = {0: "carry"}``.
      own_code: "keep" runs the methods of a class in the dtypes that they meet, without a trace:
        inputs in compute_dtype, parameters as stored. A class attribute.
      keep_params: names of parameters that no policy touches: ``self.param`` stores and returns
        them as their initializers make them. A class attribute: ``keep_params = ("scale",)``.

    A user's own methods are written as for float32, and see float32. Under a half-precision policy
    the outermost call is traced, and autocast's rules decide what runs in which dtype. Parameters
    are stored in param_dtype, and their gradients are summed in float32 over all uses.
    ``self.param(..., compute_dtype=jnp.float32)`` reads one in another dtype.

    Example:
      >>> class Net(linen.Module):
      ...     @flax.linen.compact
      ...     def __call__(self, x):
      ...         return linen.Dense(3)(x)
      >>> y, variables = Net(dtype_policy="mixed_bfloat16").init_with_output(key, jnp.ones((2, 4)))
      >>> y.dtype, variables["params"]["Dense_0"]["kernel"].dtype
      (dtype('float32'), dtype('float32'))
    """

    # Marked as Flax marks `parent` and `name`: it follows a subclass's own fields, and no position
    # reaches it.
    # Type checkers know a keyword-only field of a Flax module by Flax's own specifier.
    if TYPE_CHECKING:
        dtype_policy: DtypePolicy = module_field(kw_only=True, default=None)
    else:
        dtype_policy: DtypePolicy = dataclasses.field(
            default=None, kw_only=True, metadata={KW_ONLY: True}
        )

    keep_inputs: ClassVar[tuple[str, ...]] = ()
    keep_outputs: ClassVar[Mapping[int | str, str]] = {}
    keep_params: ClassVar[tuple[str, ...]] = ()
    own_code: ClassVar[Literal["keep"] | None] = None
    # What the class stands for in isinstance and in class rules.
    _upstream_class: ClassVar[type] = flax_nn.Module
    _crossing: ClassVar[Crossing] = PLAIN
    _is_layer: ClassVar[bool] = False  # a bare layer is a boundary only by a policy of its own
    _is_whole: ClassVar[bool] = (
        False  # what is inside it holds parameters and computes nothing: no rule is for it
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        classes.reject_policy_in_body(cls)
        is_library = classes.module_of(cls).startswith("mpmodules.linen.")
        if is_library:
            _keep_from_flax(cls)
        super().__init_subclass__(**kwargs)
        # Not `cls.__init__ =`: to a type checker that would be an __init__ of Module's own.
        type.__setattr__(cls, "__init__", _with_explained_errors(cls.__init__))
        if is_library:
            upstream = classes.register_layer(cls)
            if upstream is not None:
                extend_docstring(cls, upstream, _DTYPE_POLICY)
        install_boundaries(cls)
        classes.require_keep_params(cls)

    def __post_init__(self) -> None:
        cls, given, policy = type(self), vars(self), self.dtype_policy
        classes.require_attributes(cls)
        if hasattr(cls, "_dtype_fields") and (given.get("dtype") or given.get("param_dtype")):
            classes.require_dtypes(cls.__name__, given)
        if policy is not None and not isinstance(policy, Policy):
            object.__setattr__(self, "dtype_policy", classes.policy_given(cls, policy))
        super().__post_init__()

    if TYPE_CHECKING:  # as Flax's, with `compute_dtype`

        def param(  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]
            self,
            name: str,
            init_fn: Callable[..., T],
            *init_args: Any,
            unbox: bool = True,
            compute_dtype: DTypeLike | None = None,
            **init_kwargs: Any,
        ) -> T: ...

    else:  # type checkers see Flax's, which takes the same but for `policy_columns`
        tabulate, param = flax_nn.nowrap(tabulate_method), flax_nn.nowrap(own_param)

        @flax_nn.nowrap
        def _validate_setup(self) -> None:
            # A lifted call of ours validates no more than a plain one.
            if calls.validates:
                super()._validate_setup()

        @flax_nn.nowrap
        def _call_wrapped_method(
            self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            flaxs = super()._call_wrapped_method
            call = MethodCall(self, wrapped_once(fun), args, kwargs)
            return run_outermost(call, lambda *args, **kwargs: flaxs(fun, args, kwargs))


Module.__annotations__["dtype_policy"] = (
    DtypePolicy  # Flax copies it into subclasses, where the name means nothing
)


def _with_explained_errors(init: Callable[..., None]) -> Callable[..., None]:
    """Returns a constructor whose errors on unknown arguments say how a policy is given."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            classes.explain(error, type(self), args, kwargs)
            raise

    return __init__


def _keep_from_flax(cls: type) -> None:
    """Keeps our private methods out of Flax's method machinery: interceptors, name stacks, tables
    of calls.
    """
    for name, attribute in vars(cls).items():
        if inspect.isfunction(attribute) and name.startswith("_") and not name.startswith("__"):
            attribute.nowrap = True  # type: ignore[attr-defined]

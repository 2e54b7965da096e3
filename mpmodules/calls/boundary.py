"""Calls of modules and the casts at their boundaries, alike in both apis."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mpmodules.calls.classes import (
    CALLERS,
    LAYER_OF,
    calls_users,
    derives_from,
    is_library,
    is_ours,
    is_reference,
)
from mpmodules.functions.functional import complex_input, is_wider
from policy.core.arrays import cast_array, cast_floating, is_floating
from policy.core.dtypes import HIGHEST, ScaledMatmul
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.scope import NO_SOURCE, Scope, Source, computes_in_half, enter, multiplying
from policy.programs.marks import BOUNDARY, computes_in
from policy.programs.thread import thread

# --------------------------------------------------------------------------------------------------
# Casts
# --------------------------------------------------------------------------------------------------


class Crossing(NamedTuple):
    """The casts of a kind of modules' calls: floating inputs and outputs are cast, carries not.

    Attributes:
      keeps: the names of arguments that are left uncast.
      is_step: whether it is a cell's step, from carry and input to carry and output: the carry
        returned is as wide as the one given.
      is_loop: whether it is a loop over a cell, which may return a carry.
    """

    keeps: tuple[str, ...] = ()
    is_step: bool = False
    is_loop: bool = False

    def returns_carry(self, module: Any, kwargs: dict[str, Any]) -> bool:
        """Returns whether a call with these arguments returns a carry, as the first of a pair."""
        if not self.is_loop:
            return self.is_step
        asked = kwargs.get("return_carry")
        return bool(module.return_carry if asked is None else asked)


PLAIN = Crossing()
STEP = Crossing(keeps=("carry",), is_step=True)
LOOP = Crossing(keeps=("initial_carry",), is_loop=True)


@functools.cache
def crossing_of(cls: type, method: str) -> Crossing:
    """Returns the casts of a call of a method of a class.

    Only ``__call__`` takes and returns a carry.
    """
    if method != "__call__":
        return PLAIN
    ours: list[Any] = [LAYER_OF[base] for base in cls.__mro__ if base in LAYER_OF]
    return next((each._crossing for each in ours if each._crossing is not PLAIN), PLAIN)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """The numerics that a policy asks of a layer in one call.

    Attributes:
      result_dtype: the dtype of the result; None of a call without a policy, which is Flax's own.
      reduction_dtype: the dtype in which the gradients of biases and of embeddings are summed.
      matmul: the 8-bit matmuls; None multiplies in the operands' dtype.
    """

    result_dtype: np.dtype | None = None
    reduction_dtype: DTypeLike = jnp.float32
    matmul: ScaledMatmul | None = None


class MethodCall(NamedTuple):
    """A call of a method of a module.

    Attributes:
      module: the module.
      method: the method without a boundary, whose first argument is the module.
      args, kwargs: the other arguments.
      is_upstream: whether it is Flax's own, or ours in its place. The inputs of a user's method on
        top of a layer are the user's business; the layer's own method is a call inside of it.
      is_lifted: whether it is a transformed method of linen, which calls another boundary of the
        same module inside of the transform: only the casts and the scope are applied here.
      effective: the policy that a layer obeys.
      crosses: whether the call of a layer is a boundary.
    """

    module: Any
    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_upstream: bool = True
    is_lifted: bool = False
    effective: Effective = Effective(None, None, NO_SOURCE)
    crosses: bool = False

    def run(self, module: Any) -> Any:
        """Calls the method of the module, or of one that stands in for it."""
        return self.method(module, *self.args, **self.kwargs)

    @property
    def name(self) -> str:
        """The name of the method; "" of a `functools.partial`."""
        return getattr(self.method, "__name__", "")

    @property
    def runs_library(self) -> bool:
        """True if the method is Flax's or ours, of a module that runs no code of a user's."""
        is_caller = derives_from(type(self.module), *CALLERS)
        return is_library(self.method) and not (is_caller and calls_users(self.module))

    @property
    def is_of_layer(self) -> bool:
        """True if the method is that of a layer which obeys policies itself."""
        return self.runs_library and is_ours(type(self.module))

    @property
    def policy(self) -> Policy | None:
        """The policy that the layer obeys, or None."""
        return self.effective.policy

    @property
    def returned_dtype(self) -> Any:
        """The dtype of the result: output_dtype where the call is a boundary, else compute_dtype;
        None without a policy.
        """
        policy = self.effective.policy
        if policy is None:
            return None
        return policy.output_dtype if self.crosses else policy.compute_dtype

    @property
    def numerics(self) -> Numerics:
        """The numerics of the layer."""
        policy = self.effective.policy
        if policy is None:
            return Numerics()
        return Numerics(self.returned_dtype, policy.reduction_dtype, policy.matmul)

    @property
    def complex_dtype(self) -> np.dtype | None:
        """The widest complex dtype among the arguments, or None."""
        return complex_input((*self.args, *self.kwargs.values()))

    def first(self, name: str = "inputs") -> Any:
        """Returns the first argument, whose name is `name`."""
        return self.args[0] if self.args else self.kwargs[name]

    def with_first(self, value: Any, name: str = "inputs") -> MethodCall:
        """Returns the call with another first argument."""
        if self.args:
            return self._replace(args=(value, *self.args[1:]))
        return self._replace(kwargs=self.kwargs | {name: value})

    @property
    def crossing(self) -> Crossing:
        """The casts of the call."""
        return crossing_of(type(self.module), self.name)

    def carry(self) -> tuple[bool, Any]:
        """Returns whether the call returns a carry, and then the one that it is given, or None."""
        has_carry = self.crossing.returns_carry(self.module, self.kwargs)
        return has_carry, given_carry(self.args, self.kwargs) if has_carry else None

    def with_inputs_cast(self, policy: Policy) -> MethodCall:
        """Returns the call with the floating arrays among its arguments in compute_dtype.

        References are passed on by identity, because a copy would lose their holder. With a policy
        whose `cast_inputs` is False, nothing is cast.
        """
        if not policy.cast_inputs:
            return self
        crossing, args = self.crossing, self.args
        names = (*getattr(type(self.module), "keep_inputs", ()), *crossing.keeps)
        kept = {0} if crossing.is_step else set[int]()  # a carry, whatever its name
        if names and len(args) > len(kept):
            kept |= _kept_positions(self.method, len(args), names)

        def cast(tree: Any) -> Any:
            return cast_floating(tree, policy.compute_dtype, is_leaf=is_reference)

        with jax.named_scope(BOUNDARY):
            args = tuple(arg if i in kept else cast(arg) for i, arg in enumerate(args))
            kwargs = {name: x if name in names else cast(x) for name, x in self.kwargs.items()}
        return self._replace(args=args, kwargs=kwargs)


@dataclasses.dataclass(frozen=True)
class Api:
    """The hooks of `run_method`: what only one API knows of its modules.

    Attributes:
      captures: whether a module carries the policy that it was built under, so that the scope
        around its own call changes nothing in a bare layer.
      effective: returns the policy that a module obeys in a call in a scope.
      where: returns a module's name for messages.
      calls: the calls under way.
      under_way: notes a call for a block.
      run_layer: runs a method without its boundary; Flax's own sees a module that computes as the
        policy says.
      run_own_code: runs a user's method inside of a trace, under the policy given.
      run_in_trace: `mpmodules.calls.own_code.run_in_trace`.
    """

    captures: bool
    effective: Callable[[Any, Scope], Effective]
    where: Callable[[Any], str]
    calls: Any
    under_way: Callable[[MethodCall, Effective, Scope], contextlib.AbstractContextManager[None]]
    run_layer: Callable[[MethodCall], Any]
    run_own_code: Callable[[MethodCall, Effective], Any]
    run_in_trace: Callable[[Api, MethodCall, Effective, Source, Scope], Any]


def keeps(module: Any) -> bool:
    """Returns whether a module's own code runs in the dtypes that it meets."""
    is_kept = vars(module).get("_ported_code") == "keep"
    return is_kept or getattr(type(module), "own_code", None) == "keep"


def outermost(api: Api, call: MethodCall, scope: Scope) -> Effective | None:
    """Returns the policy of a call whose own code is to be traced; None of other calls."""
    if scope.traces_own_code or scope.keeps_own_code or call.is_of_layer or keeps(call.module):
        return None
    effective = api.effective(call.module, scope)
    rules = None if api.captures else scope.rules
    return effective if computes_in_half(effective.policy, rules) else None


def run_method(api: Api, call: MethodCall, scope: Scope) -> Any:
    """Calls a method in a scope, under the policy that its module obeys, with its boundary."""
    module, crossing = call.module, call.crossing
    is_layer = getattr(type(module), "_is_layer", False)
    effective = api.effective(module, scope)  # before the call is noted: who is calling decides
    policy, source = effective.policy, effective.source
    inner = source  # of the modules inside
    if source.own or source.dtypes or source.kind == "argument":
        inner = source.for_those_inside(api.where(module))
    with api.under_way(call, effective, scope):
        if scope.traces_own_code:
            return api.run_in_trace(api, call, effective, inner, scope)
        entered = scope.entered(policy, effective.base, source, is_layer=is_layer)
        around: Policy | None = scope.policy
        inside: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if entered is not None or not api.captures:
            inside = enter(scope.within(policy, crosses=entered is not None), inner)
        if api.captures and not scope.boundary_open:
            around = None
        precise = multiplying(policy, around)
        held = contextlib.nullcontext() if thread.autocast is None else _kept_in_float32(effective)
        takes_any = getattr(type(module), "_takes_inputs_as_they_come", False)
        given = call if entered is None or takes_any else call.with_inputs_cast(entered)
        given = given._replace(effective=effective, crosses=entered is not None and is_layer)
        try:
            with inside, precise, held:
                outputs = api.run_layer(given)
        except TypeError as error:
            explain_scan(error)
            raise
        if policy is not None and crossing.is_step:
            outputs = with_given_dtypes(outputs, given_carry(given.args, given.kwargs))
        if entered is None:
            return outputs
        has_carry = crossing.returns_carry(module, call.kwargs)
        outputs, kept = with_kept_outputs(call, outputs)
        return cast_outputs(scope.returned(entered), outputs, has_carry=has_carry, kept=kept)


def _kept_in_float32(effective: Effective) -> contextlib.AbstractContextManager[Any]:
    """Keeps the code of a module whose own policy is float32 in float32 under an autocast."""
    policy, around = effective.policy, thread.autocast
    if policy is None or not effective.source.own or not computes_in_half(around):
        return contextlib.nullcontext()
    if computes_in_half(policy):
        return contextlib.nullcontext()
    return computes_in(policy.compute_dtype, None, HIGHEST)


def given_carry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the carry that a cell is called with: its first argument, or `carry=`."""
    return args[0] if args else kwargs.get("carry")


def _kept_positions(method: Callable[..., Any], count: int, keep: Collection[str]) -> set[int]:
    """Returns the positions, among the first `count`, of the parameters named in `keep`."""
    kept: set[int] = set()
    for position, parameter in enumerate([*inspect.signature(method).parameters.values()][1:]):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return kept | (set(range(position, count)) if parameter.name in keep else set())
        if parameter.name in keep:
            kept.add(position)
    return kept


def cast_outputs(
    policy: Policy, outputs: Any, *, has_carry: bool = False, kept: Sequence[Any] = ()
) -> Any:
    """Casts floating outputs to output_dtype, but not the carry where there is one: the first of a
    pair. References, and the arrays in `kept`, are returned by identity.
    """
    if has_carry and is_pair(outputs):
        return outputs[0], cast_outputs(policy, outputs[1], kept=kept)

    def cast(tree: Any) -> Any:
        return cast_floating(tree, policy.output_dtype, is_leaf=is_reference)

    with jax.named_scope(BOUNDARY):
        if not kept:
            return cast(outputs)
        among = set(map(id, kept))
        return jax.tree.map(
            lambda x: x if id(x) in among else cast(x), outputs, is_leaf=is_reference
        )


def with_kept_outputs(call: MethodCall, outputs: Any) -> tuple[Any, list[Any]]:
    """Returns the outputs of a call, those in `keep_outputs` in the dtypes of their arguments, and
    the arrays of these.

    Raises:
      TypeError: such an output and its argument differ in structure.
    """
    keep, kept = getattr(type(call.module), "keep_outputs", {}), []
    if not keep or not isinstance(outputs, Mapping | tuple | list):
        return outputs, kept
    bound = inspect.signature(call.method).bind(call.module, *call.args, **call.kwargs)
    items = dict(outputs) if isinstance(outputs, Mapping) else dict(enumerate(outputs))
    for place, name in keep.items():
        if place in items and name in bound.arguments:
            given, new = bound.arguments[name], items[place]
            if jax.tree.structure(given) != jax.tree.structure(new):
                raise TypeError(
                    f"{type(call.module).__name__}.keep_outputs says that output {place!r} has the "
                    f"dtypes of {name!r}, but their structures differ."
                )
            items[place] = jax.tree.map(as_given, new, given)
            kept += jax.tree.leaves(items[place])
    made: Any = type(outputs)
    if isinstance(outputs, Mapping):
        return made(items), kept
    return getattr(outputs, "_make", made)(items.values()), kept


def as_given(new: Any, given: Any) -> Any:
    """Returns an array in the dtype of another, where both are floating."""
    return cast_array(new, given.dtype) if is_floating(new) and is_floating(given) else new


def is_pair(outputs: Any) -> bool:
    """Returns whether a call returned two values, as cells return a carry and an output."""
    return isinstance(outputs, tuple) and len(outputs) == 2


# --------------------------------------------------------------------------------------------------
# Carries
# --------------------------------------------------------------------------------------------------


def with_given_dtypes(outputs: Any, given: Any) -> Any:
    """Casts the carry in a cell's outputs to the dtypes of the one given, wherever these are wider.

    Thus a float32 carry keeps its type through a loop of half-precision steps. A carry is never
    rounded to a narrower dtype of the first one.
    """
    if not is_pair(outputs):
        return outputs
    return map_carry(_as_wide, outputs[0], given), outputs[1]


def map_carry(function: Callable[[Any, Any], Any], new: Any, given: Any) -> Any:
    """Maps the leaves of a new carry and of the one given; one of another structure stays."""
    if jax.tree.structure(new) != jax.tree.structure(given):
        return new
    return jax.tree.map(function, new, given)


def _as_wide(new: Any, given: Any) -> Any:
    if not (is_floating(new) and is_floating(given) and is_wider(given.dtype, new.dtype)):
        return new
    return cast_array(new, given.dtype)


def step_in(dtype: DTypeLike | None, cell: Any, call: MethodCall) -> Any:
    """Runs one step of a Flax cell with carry and output in `dtype`.

    Args:
      dtype: the cell's computation dtype. None (infer it), or one that is not floating, leaves the
        step as it is.
      cell: the cell.
      call: of its ``__call__``, from carry and input to carry and output; other methods run as they
        are.

    Returns:
      The new carry, in `dtype` or in the wider dtype that the given one had, and the output in
      `dtype`.
    """
    is_step = call.method.__name__ == "__call__"
    if not is_step or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return call.run(cell)
    given = call.first("carry")
    outputs = call.with_first(cast_floating(given, dtype), "carry").run(cell)
    return with_given_dtypes(cast_floating(outputs, dtype), given)


def indexing_lengths(seq_lengths: jax.Array | None) -> jax.Array | None:
    """Casts a loop's lengths to JAX's default integer dtype, that of the indices which Flax adds
    them to.

    In x64 mode strict promotion rejects int64 indices with int32 lengths.
    """
    if seq_lengths is None or not jnp.issubdtype(jnp.result_type(seq_lengths), jnp.integer):
        return seq_lengths
    return jnp.asarray(seq_lengths, jax.dtypes.canonicalize_dtype(int))


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------


_ADVICE = (
    "If a module inside has a policy of its own, it casts its outputs, and may so change a carry's "
    "dtype. For float32 inside one layer only, use the policy 'f32_inside', which returns the "
    "dtype that the surrounding code computes in. If such a module is the body of a scan, give it "
    "its caller's policy, lift its class (nn.scan(Block) in linen) instead of a function, or cast "
    "the carry to its output_dtype before the scan."
)


def explain_scan(error: TypeError) -> None:
    """Adds to the error of a module's call the way out, once, if it is JAX's for such a scan."""
    told = _ADVICE in getattr(error, "__notes__", ())
    if "scan body" in str(error) and "dtypes do not match" in str(error) and not told:
        error.add_note(_ADVICE)

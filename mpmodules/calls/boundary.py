"""Calls of modules and the casts at their boundaries, alike in both wings."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection
from typing import Any, ClassVar, NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import Scope
from jax.typing import DTypeLike

from mpmodules.functions.functional import complex_input, is_wider
from policy.core.casting import cast_array, cast_floating, is_floating
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.programs.marks import BOUNDARY

# --------------------------------------------------------------------------------------------------
# References
# --------------------------------------------------------------------------------------------------


def is_reference(x: Any) -> bool:
    """Returns whether `x` is, or is tied to, state that a copy would lose.

    nnx Modules, Rngs and Variables are pytrees: a tree map over them gives the same dropout mask at
    every call and loses the updates of batch statistics. linen Modules, Scopes and Variables are
    references as well.
    """
    return isinstance(
        x,
        nnx.Pytree
        | nnx.Variable
        | nnx.State
        | nnx.GraphDef
        | linen.Module
        | linen.Variable
        | Scope
        | jax.Ref,
    )


# --------------------------------------------------------------------------------------------------
# Calls under way
# --------------------------------------------------------------------------------------------------


class _Calls(threading.local):
    """The calls of one wing under way in this thread.

    Attributes:
      recorded: what a summary records of calls, or None where none is being made.
    """

    def __init__(self) -> None:
        self.recorded: Any = None


class _LinenCalls(_Calls):
    """Those of linen modules.

    Attributes:
      innermost: the module of the innermost call.
      paths: those of the modules, the innermost last.
      root: the module of the root call.
      seen: the classes of the modules that the root call has seen so far, by path; None where no
        root call is under way.
      validates: whether Flax may run a setup to check it.
      adopters: those of `mpmodules.linen._port` in force, the innermost last.
      half_states: half-precision variables by the identities of the float32 ones that stand for
        them (`mpmodules.tracing.linen_pure_calls`).
      made: the half-precision variables that the calls made.
      traced: the name of the model or module whose call is the outermost of a trace for a report;
        "" where none is.
      traced_model: the same, where it is a whole model and no module of one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.innermost: Any = None
        self.paths: list[tuple[str, ...]] = []
        self.root: Any = None
        self.seen: dict[tuple[str, ...], set[type]] | None = None
        self.validates = True
        self.adopters: list[Any] = []
        self.half_states: dict[int, tuple[Any, Any]] = {}
        self.made: list[Any] = []
        self.traced = self.traced_model = ""


class _NnxCalls(_Calls):
    """Those of nnx modules, and the constructions of modules.

    Attributes:
      depth: the number of calls.
      inside: the number of calls in the innermost one so far.
      constructions: the constructions, the innermost last.
      path: that of the named module whose call is the innermost in a trace for a report.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = self.inside = 0
        self.constructions: list[Any] = []
        self.path: tuple[str, ...] = ()


linen_calls = _LinenCalls()
nnx_calls = _NnxCalls()


# --------------------------------------------------------------------------------------------------
# Casts
# --------------------------------------------------------------------------------------------------


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Crossing:
    """The casts of a kind of modules' calls: every floating input and output is cast.

    Recurrent modules have others, which leave their carries uncast (`mpmodules.calls.boundary`).
    """

    leading: ClassVar[int] = 0  # how many of the leading arguments are left uncast
    keeps: ClassVar[tuple[str, ...]] = ()  # the names of arguments that are left uncast

    def cast_inputs(
        self,
        policy: Policy,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        keep: Collection[str] = (),
        method: Callable[..., Any],
    ) -> Arguments:
        """Casts the floating arrays among a call's arguments to compute_dtype.

        References are passed on by identity, because a copy would lose their holder.

        Args:
          policy: the policy entered. If its `cast_inputs` is False, nothing is cast.
          args, kwargs: the call's arguments, without `self`.
          keep: the names of arguments to leave uncast, beside those of a carry.
          method: the method, which tells the names of positional arguments; `self` is the first.
        """
        if not policy.cast_inputs:
            return args, kwargs
        names, kept = (*keep, *self.keeps), set(range(self.leading))
        if names and len(args) > self.leading:
            kept |= _kept_positions(method, len(args), names)
        with jax.named_scope(BOUNDARY):

            def cast(tree: Any) -> Any:
                return cast_floating(tree, policy.compute_dtype, is_leaf=is_reference)

            new_args = tuple(arg if i in kept else cast(arg) for i, arg in enumerate(args))
            return new_args, {
                name: value if name in names else cast(value) for name, value in kwargs.items()
            }

    def returns_carry(self, module: Any, kwargs: dict[str, Any]) -> bool:
        """Returns whether a call with these arguments returns a carry, as the first of a pair."""
        return False

    def carry_of(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Returns whether a call returns a carry, and then the one that it is given, or None."""
        has_carry = self.returns_carry(module, kwargs)
        return has_carry, given_carry(args, kwargs) if has_carry else None

    def keep_carry(self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns a call's outputs with its carry in dtypes at least as wide as those of the one
        given.
        """
        return outputs


PLAIN = Crossing()


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


def cast_outputs(policy: Policy, outputs: Any, *, has_carry: bool = False) -> Any:
    """Casts floating outputs to output_dtype, but not the carry where there is one: the first of a
    pair. References are returned by identity.
    """
    if has_carry and is_pair(outputs):
        return outputs[0], cast_outputs(policy, outputs[1])
    with jax.named_scope(BOUNDARY):
        return cast_floating(outputs, policy.output_dtype, is_leaf=is_reference)


def is_pair(outputs: Any) -> bool:
    """Returns whether a call returned two values, as cells return a carry and an output."""
    return isinstance(outputs, tuple) and len(outputs) == 2


class LayerCall(NamedTuple):
    """A call of a layer's method, without its boundary.

    Attributes:
      effective: the policy that the layer obeys.
      crosses: whether the call is a boundary.
      method: the method, whose first argument is the layer.
      args, kwargs: the other arguments.
    """

    effective: Effective
    crosses: bool
    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

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
    def complex_dtype(self) -> np.dtype | None:
        """The widest complex dtype among the arguments, or None."""
        return complex_input((*self.args, *self.kwargs.values()))

    def run(self, layer: Any) -> Any:
        """Calls the method of a layer, or of a view of it."""
        return self.method(layer, *self.args, **self.kwargs)

    def first(self, name: str = "inputs") -> Any:
        """Returns the first argument, whose name is `name`."""
        return self.args[0] if self.args else self.kwargs[name]

    def with_first(self, value: Any, name: str = "inputs") -> LayerCall:
        """Returns the call with another first argument."""
        if self.args:
            return self._replace(args=(value, *self.args[1:]))
        return self._replace(kwargs=self.kwargs | {name: value})


# --------------------------------------------------------------------------------------------------
# Carries
# --------------------------------------------------------------------------------------------------


class StepCrossing(Crossing):
    """The casts of a cell's step, from carry and input to carry and output: the carry is left
    uncast.
    """

    leading: ClassVar[int] = 1
    keeps: ClassVar[tuple[str, ...]] = ("carry",)

    def returns_carry(self, module: Any, kwargs: dict[str, Any]) -> bool:
        return True

    def keep_carry(self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_given_dtypes(outputs, given_carry(args, kwargs))


class LoopCrossing(Crossing):
    """The casts of a loop over a cell: its `initial_carry` is left uncast, and the carry that it
    may return.
    """

    keeps: ClassVar[tuple[str, ...]] = ("initial_carry",)

    def returns_carry(self, module: Any, kwargs: dict[str, Any]) -> bool:
        asked = kwargs.get("return_carry")
        return bool(module.return_carry if asked is None else asked)


def with_given_dtypes(outputs: Any, given: Any) -> Any:
    """Casts the carry in a cell's outputs to the dtypes of the one given, wherever these are wider.

    Thus a float32 carry keeps its type through a loop of half-precision steps. A carry is never
    rounded to a narrower dtype of the first one.
    """
    if not is_pair(outputs) or jax.tree.structure(outputs[0]) != jax.tree.structure(given):
        return outputs
    return jax.tree.map(_as_wide, outputs[0], given), outputs[1]


def _as_wide(new: Any, given: Any) -> Any:
    if not (is_floating(new) and is_floating(given) and is_wider(given.dtype, new.dtype)):
        return new
    return cast_array(new, given.dtype)


def step_in(dtype: DTypeLike | None, cell: Any, call: LayerCall) -> Any:
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

    In x64 mode strict promotion refuses int64 indices with int32 lengths.
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

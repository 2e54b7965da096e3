"""Two programs beside each other: the values that leave their modules, paired and measured."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import require_function
from policy.core.policy import Policy
from policy.inspect.compare.recorder import Log, Measurement, Recording
from policy.inspect.compare.statistics import is_discrete, is_float, measured
from policy.inspect.traced.call import Call, Program, checked_policy, short_text
from policy.inspect.traced.placed import ModulePass
from policy.inspect.traced.upcast import dtype_of
from policy.programs.jaxprs import opened
from policy.programs.tracing.trace import function_name


class Pair(NamedTuple):
    """A value of each program, and how an axis of its scans becomes one of its own, if it does."""

    ours: Measurement
    theirs: Measurement
    moves: tuple[Move | None, Move | None] = (None, None)


class Move(NamedTuple):
    """The axis of a scan becomes axis `place` of a value, instead of one of size 1 or between two.

    A sampler that scans tokens so returns (T, B, 1, ...), where a trainer has (B, T, ...).
    """

    axis: int
    place: int
    replaces: bool

    def __call__(self, array: Any, scans: int) -> Any:
        """Returns an array, whose first axes are those of scans, with the axis moved."""
        array = array.squeeze(scans + self.place) if self.replaces else array
        axes = list(range(array.ndim))
        axes.insert(scans - 1 + self.place, axes.pop(self.axis))
        return array.transpose(axes)


class Beside(NamedTuple):
    """Values of one program compared with those of another.

    Attributes:
      log: the places of the first, and its values that have a partner.
      numbers: of each such value against its partner, by its key; see `statistics.measured`.
      alone: the modules of each program that no value of a pair leaves.
    """

    log: Log
    numbers: dict[int, Any]
    alone: tuple[list[ModulePass], list[ModulePass]]


def beside_itself(ours: Recording, theirs: Recording) -> Beside:
    """Pairs the values of a program with those of its run in float32, and measures each pair.

    Values in branches are left out where float32 takes other branches, and integers that only pass
    through where they are equal.
    """
    found, notes, others = beside_each_other(ours, theirs), ours.notes, theirs.notes
    keys = {key for one in ours.values for key in one.branches}
    same = {key for key in keys if np.array_equal(notes[key], others[key])}
    kept = [
        one
        for one in found.log.measurements
        if same.issuperset(one.branches)
        and (
            one.output is not None
            or not is_discrete(one.dtype)
            or found.numbers[one.key][..., 0].any()
        )
    ]
    return found._replace(log=dataclasses.replace(found.log, measurements=kept))


def beside_each_other(ours: Recording, theirs: Recording) -> Beside:
    """Pairs the values of two programs by module, and measures each pair on the first's devices."""
    pairs = list(_pairs(ours, theirs))
    numbers = jax.device_get([_of_pair(pair, ours, theirs) for pair in pairs])
    kept = {pair.ours.key: _common(pair, ours, theirs) for pair in pairs}
    measurements = [kept[one.key] for one in ours.log.measurements if one.key in kept]
    shown = {name for one in kept.values() for name in ours.left(one)}
    alone = [[p for p in each.places if each.name_of(p) not in shown] for each in (ours, theirs)]
    return Beside(
        dataclasses.replace(ours.log, measurements=measurements),
        dict(zip(kept, numbers, strict=True)),
        (alone[0], alone[1]),
    )


def _common(pair: Pair, ours: Recording, theirs: Recording) -> Measurement:
    """Returns the first value of a pair, which leaves the modules that both leave."""
    names = theirs.left(pair.theirs)
    left, returned = (
        {place: None for place in places if ours.name_of(place) in names}
        for places in (pair.ours.left, pair.ours.returned)
    )
    return dataclasses.replace(pair.ours, left=left, returned=returned)


def _of_pair(pair: Pair, ours: Recording, theirs: Recording) -> Any:
    value, other = ours.array(pair.ours), theirs.array(pair.theirs)
    scans = ours.scans(pair.ours), theirs.scans(pair.theirs)
    if other.sharding.device_set != value.sharding.device_set:
        other = jax.device_get(other)
    return _measured(value, other, pair.moves, scans)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _measured(
    value: Any, other: Any, moves: tuple[Move | None, Move | None], scans: tuple[int, int]
) -> Any:
    sides = zip((value, other), moves, scans, strict=True)
    arrays = [array if move is None else move(array, count) for array, move, count in sides]
    measure: Callable[..., Any] = measured
    for _ in range(min(scans)):
        measure = jax.vmap(measure)
    return measure(*arrays)


# --------------------------------------------------------------------------------------------------
# Partners
# --------------------------------------------------------------------------------------------------


def _pairs(ours: Recording, theirs: Recording) -> Iterator[Pair]:
    """Yields the outputs; then the values of one module, in order, whose shapes agree.

    First those that a module computes, then the others that leave it.
    """
    for output, one in ours.outputs.items():
        yield Pair(one, theirs.outputs[output])
    mine, others = (
        {one.key: one for one in each.values if one.output is None} for each in (ours, theirs)
    )
    for names_of in (lambda each, one: (each.name_of(one.made),), Recording.left):
        partners = collections.defaultdict[ModulePass, list[Measurement]](list)
        for other in others.values():
            for name in names_of(theirs, other):
                partners[name].append(other)
        for one in list(mine.values()):
            found = (
                Pair(one, other, moves)
                for name in names_of(ours, one)
                for other in partners[name]
                if other.key in others and (moves := _moves(one, other, ours, theirs))
            )
            if pair := next(found, None):
                del mine[one.key], others[pair.theirs.key]
                yield pair


def _moves(
    one: Measurement, other: Measurement, ours: Recording, theirs: Recording
) -> tuple[Move | None, Move | None] | None:
    """Returns the moves that give two values one shape, or None if they can't be compared."""
    if one.dtype != other.dtype and not (is_float(one.dtype) and is_float(other.dtype)):
        return None
    shape, wanted = ours.array(one).shape, theirs.array(other).shape
    scans = ours.scans(one), theirs.scans(other)
    if scans[0] == scans[1]:
        return (None, None) if shape == wanted else None
    if scans[0] == scans[1] + 1 and (move := _move(shape, scans[0], wanted)):
        return move, None
    if scans[1] == scans[0] + 1 and (move := _move(wanted, scans[1], shape)):
        return None, move
    return None


def _move(shape: Sequence[int], scans: int, wanted: Sequence[int]) -> Move | None:
    """Returns the one move that makes a shape another; None for none, and for several."""
    found = [
        Move(axis, place, replaces)
        for axis in range(scans)
        for place in range(len(shape) - scans + 1)
        for replaces in (False, True)
        if not replaces or shape[scans + place : scans + place + 1] == (1,)
    ]
    array = np.broadcast_to(0.0, shape)
    right = [move for move in found if move(array, scans).shape == wanted]
    is_one = len(right) == 1 or (right and all(shape[move.axis] == 1 for move in right))
    return right[0] if is_one else None


# --------------------------------------------------------------------------------------------------
# The call that is the reference
# --------------------------------------------------------------------------------------------------


def other_program(
    beside: Any,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy | None,
    params: ParamsArgument,
    scale: float | None,
) -> tuple[Program, str]:
    """Returns the program that `compare` is given as `beside`, and its name.

    The other arguments are those of `compare`.

    Raises:
      TypeError: it is neither a policy nor a function; or as `Call.measured` raises.
      ValueError: it is a function, and there is a policy; or no policy has such a text.
    """
    if isinstance(beside, (str, Policy)):
        under = checked_policy(beside)
        assert under is not None
        call = Call.measured("compare", fn, args, kwargs, params, scale)
        return call.under(under), short_text(under)
    if not isinstance(beside, tuple) or not beside or callable(beside):
        beside = (beside, *args)
    second, *given = beside
    require_function(second, "compare's beside=", takes="a policy, a function or (function, *args)")
    if policy is not None:
        raise ValueError(
            f"policy={short_text(policy)!r} and the function {function_name(second)} in beside=: "
            "is the policy for both or for the first? Leave policy= out: open "
            "policy.use_policy(...) around compare for both, or wrap one, as in "
            "policy.autocast(function, ...)."
        )
    call = Call.measured("compare", second, tuple(given), kwargs, params, scale)
    return call.under(None), function_name(second)


def require_alike(ours: Program, theirs: Program, names: tuple[str, str]) -> None:
    """Raises unless two programs have the same outputs, and the same gradients.

    Raises:
      ValueError: an output or gradient is in one alone, or has another shape.
    """
    shapes = [_shapes(program) for program in (ours, theirs)]
    for name in dict.fromkeys((*shapes[0], *shapes[1])):
        found = [one.get(name, "none") for one in shapes]
        if found[0] != found[1]:
            raise ValueError(
                f"compare needs the same results of both functions, but {name} is {found[0]} of "
                f"{names[0]} and {found[1]} of {names[1]}. Return one tree from both, its leaves "
                "of one shape: such as the log-probs of the same tokens."
            )


def _shapes(program: Program) -> dict[str, str]:
    """Returns the shape of each output and gradient, after its dtype if that is no float."""
    names = [f"output {name or '(result)'}" for name in program.outputs]
    names += [f"gradient {name}" for name in program.gradients]
    atoms = opened(program.jaxpr)[0].outvars
    dtypes = ["" if is_float(dtype_of(atom)) else str(dtype_of(atom)) for atom in atoms]
    shapes = [dtype + str(list(atom.aval.shape)) for dtype, atom in zip(dtypes, atoms, strict=True)]
    return dict(zip(names, shapes, strict=True))

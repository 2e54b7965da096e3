"""Finds the gradients and updates of params in the program of a step."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.inspect.monitor.tensor_statistics import bits_of
from policy.inspect.traced.matmul_operands import CastPlace, place_of_site
from policy.programs.primitives import ADDITIONS, BITWISE, DRAWS, REASSEMBLES
from policy.programs.reading.graph import Graph, Node, Value, is_cotangent, is_joint, readers_past


class ArrayRead(NamedTuple):
    """A gradient or an update where an equation reads it.

    Attributes:
      kind: which of them.
      leaf: the place of the param among the arrays of the step.
      operand: the operand of the equation.
      kept: the dtype that keeps the param's value: float32 where `mixed_precision` stores an array
        with it, else its own; None where roundings are by chance.
    """

    kind: Literal["gradient", "update"]
    leaf: int
    operand: int
    kept: np.dtype | None


class Param(NamedTuple):
    """A param of a step.

    Attributes:
      leaf: its place among the arrays of the step.
      output: the place of its new value among the outputs.
      stored: the place of the array that `mixed_precision` stores with it, or None.
    """

    leaf: int
    output: int
    stored: int | None


class Reads(NamedTuple):
    """The equations at which an optimizer works on params.

    Attributes:
      arrays: gradients and updates, by the equation that reads them.
      leaves: the param that an equation works on, by its place among the arrays of the step.
    """

    arrays: dict[CastPlace, list[ArrayRead]]
    leaves: dict[CastPlace, int]


def reads_of(graph: Graph, params: Iterable[Param]) -> Reads:
    """Returns the gradients and updates of params, and the equations of their optimizer."""
    loops = {id(n.site.equation) for n in graph.nodes if n.name in ("carry", "row", "rows")}
    backward = {id(eqn) for n in graph.nodes if is_cotangent(n) for eqn in _around(n)} & loops
    found = Reads({}, {})
    for param in params:
        additions, after = additions_to(graph, param)
        gradients, between = _gradients(additions, backward)
        own = graph.arguments[param.leaf].aval.dtype if param.stored is None else np.float32
        by_chance = any(node.name in DRAWS or node.name == "iota" for node in after)
        kept = None if by_chance else np.dtype(own)
        reads = [(node, ArrayRead("update", param.leaf, i, kept)) for node, i in additions]
        reads += [(node, ArrayRead("gradient", param.leaf, i, kept)) for node, i in gradients]
        for node, read in reads:
            at = found.arrays.setdefault(place_of_site(node.site), [])
            if read not in at:
                at.append(read)
        for node in (*between, *after, *(node for node, _ in additions)):
            found.leaves.setdefault(place_of_site(node.site), param.leaf)
    return found


def is_trained(graph: Graph, param: Param) -> bool:
    """Returns whether a differentiated function reads an argument, and the step adds to it.

    Moments of an optimizer and moving averages of params are not differentiated.
    """
    readers = readers_past(
        [graph.arguments[param.leaf]], lambda node: is_joint(node) or node.name in REASSEMBLES
    )
    names = (str(eqn.source_info.name_stack) for node in readers for eqn in _around(node, True))
    return any("jvp(" in name for name in names) and bool(additions_to(graph, param)[0])


def additions_to(graph: Graph, param: Param) -> tuple[list[tuple[Node, int]], list[Node]]:
    """Returns the equations that add an update to a param, with its place among the operands.

    And the nodes after them. Conditionals hold one for each branch.
    """
    new = graph.outputs[param.output]
    held = [graph.arguments[i] for i in (param.leaf, param.stored) if i is not None]
    waiting, met, found, after = collections.deque([new]), {id(new)}, [], []
    while waiting:
        value = waiting.popleft()
        node = value.maker
        if node is None:
            continue
        is_sum = node.name in ADDITIONS and value.is_float and len(node.inputs) == 2
        sides = [i for i, one in enumerate(node.inputs) if is_sum and _holds(one, held)]
        if is_sum and len(sides) == 1 and not (node.name == "sub" and sides[0] == 1):
            found.append((node, 1 - sides[0]))
            continue
        after.append(node)
        for one in _alike(node, value):
            if id(one) not in met:
                met.add(id(one))
                waiting.append(one)
    return found, after


def _alike(node: Node, value: Value) -> Iterator[Value]:
    """Yields the operands of a node that have the shape of its result, but for rows of a scan, and
    parts of arrays in a `shard_map`.
    """
    for one in node.inputs:
        is_part = one.maker is None and len(one.shape) == len(value.shape)
        if one.shape == value.shape or is_part or node.name in ("row", "rows"):
            yield one


def _holds(value: Value, held: Sequence[Value]) -> bool:
    """Returns whether a value is a param, upcast, or joined with what is stored with it."""
    met, waiting = {id(value)}, [value]
    while waiting:
        one = waiting.pop()
        if any(one is each for each in held):
            return True
        node = one.maker
        is_exact = node is not None and (
            is_joint(node)
            or node.name in REASSEMBLES
            or (not one.is_float and node.name in ADDITIONS | BITWISE)
        )
        if node is None or not is_exact or is_cotangent(node):
            continue
        for each in _alike(node, one):
            if id(each) not in met:
                met.add(id(each))
                waiting.append(each)
    return False


def _gradients(
    starts: Sequence[tuple[Node, int]], backward: Collection[int]
) -> tuple[list[tuple[Node, int]], list[Node]]:
    """Returns where the optimizer reads a gradient, and the nodes after it.

    A gradient is made in the backward pass, or by a loop with one.
    """
    waiting, met, found = collections.deque(starts), {}, []
    while waiting:
        node, operand = waiting.popleft()
        value = node.inputs[operand]
        maker = value.maker
        if maker is None or value.shape != node.outputs[0].shape:
            continue
        inner = set(map(id, _around(maker))) - set(map(id, _around(node)))
        if (is_cotangent(maker) or inner & set(backward)) and not is_joint(node):
            found.append((node, operand))
        elif id(maker) not in met and not is_cotangent(maker):
            met[id(maker)] = maker
            waiting += [(maker, i) for i in range(len(maker.inputs))]
    return found, list(met.values())


def _around(node: Node, itself: bool = False) -> Iterator[Any]:
    """Yields the equations around a node, and its own if it is a joint or `itself`."""
    site = node.site if itself or is_joint(node) else node.site.around
    while site is not None:
        yield site.equation
        site = site.around


def is_lost(read: ArrayRead, before: Any, after: Any, update: Any) -> Any:
    """Returns where an update is finite and not 0, and what is stored of the param doesn't change.

    Args:
      read: the update.
      before, after: the float32 value of the param, or of its dtype if that is wider.
      update: what was added.
    """
    kept = read.kept
    if kept is None:
        return jnp.zeros(update.shape, bool)
    sides = [x.astype(kept) if x.dtype.itemsize > kept.itemsize else x for x in (before, after)]
    is_some = (bits_of(update)[0] > 0) & jnp.isfinite(update)
    return is_some & (_bits(sides[0]) == _bits(sides[1]))


def _bits(array: Any) -> Any:
    """Returns an array as integers, as subnormal numbers may be equal to 0."""
    is_integer = jnp.issubdtype(array.dtype, jnp.integer)
    unsigned = f"uint{8 * array.dtype.itemsize}"
    return array if is_integer else lax.bitcast_convert_type(array, unsigned)

"""Operands of matmuls: parameters, other arguments and cotangents, also as codes of 8 bits."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple

from policy.inspect.traced.authors import OUR_FOLDER, author_of
from policy.inspect.traced.module_paths import module_path
from policy.programs import primitives
from policy.programs.dtypes import is_eight_bits, is_inexact_name
from policy.programs.jaxprs import equations_within, opened
from policy.programs.paths import Path
from policy.programs.reading.graph import Graph, Node, Value, is_cotangent, is_joint, readers_past
from policy.programs.reading.walk import Site

PARAMETER, OTHER, COTANGENT = 1, 2, 4  # as bits
AS_IT_IS = primitives.MOVES_DATA | primitives.CASTS
"""Hand on the numbers of their operand, in another shape or dtype."""


def dependences(graph: Graph, params: Collection[int]) -> dict[int, int]:
    """Returns, by a value's id, bits that tell whether it depends on parameters, on others, and on
    what the backward pass computes.
    """
    found: dict[int, int] = {
        id(value): PARAMETER if i in params else OTHER for i, value in enumerate(graph.arguments)
    }
    for _ in range(2):  # carries depend on what their bodies return
        for node in graph.traced:
            on = COTANGENT if is_cotangent(node) and node.name not in AS_IT_IS else 0
            for value in node.inputs:
                on |= found.setdefault(id(value), 0)
            found.update((id(out), on) for out in node.outputs)
    return found


# Return a gradient as it is, scaled, or added to one.
_KEEPS = AS_IT_IS | primitives.PRODUCTS | primitives.ADDITIONS


class WeightMatmul(NamedTuple):
    """A matmul of which one operand is made of parameters, or whose result is their gradient.

    Attributes:
      node: the matmul.
      weight: the operand that is made of parameters: 0 is the left one; None for their gradient.
    """

    node: Node
    weight: int | None


def weight_matmuls(graph: Graph, params: Collection[int]) -> Iterator[WeightMatmul]:
    """Yields the dots with parameters, forward and backward.

    Args:
      graph: the program.
      params: the places of the parameters among its arguments.
    """
    made_of = dependences(graph, params)
    for node in graph.nodes:
        if node.kind != "dot" or len(node.inputs) < 2:
            continue
        weights = [i for i in (0, 1) if made_of[id(node.inputs[i])] == PARAMETER]
        if len(weights) == 1:
            yield WeightMatmul(node, weights[0])
        elif not weights and is_cotangent(node) and _is_gradient(node):
            yield WeightMatmul(node, None)


def are_codes(node: Node) -> bool:
    """Returns whether a matmul multiplies int8 codes of floating numbers, one operand at least."""
    return any(value.dtype == "int8" and _was_floating(value) for value in node.inputs[:2])


def _was_floating(value: Value) -> bool:
    waiting, seen = [value], {id(value)}
    while waiting:
        maker = waiting.pop().maker
        is_cast = maker is not None and maker.name == "convert_element_type"
        if maker is None or not (is_cast or is_joint(maker) or maker.name in primitives.MOVES_DATA):
            continue
        if is_cast and is_inexact_name(maker.inputs[0].dtype):
            return True
        fresh = [one for one in maker.inputs if id(one) not in seen]
        seen.update(map(id, fresh))
        waiting.extend(fresh)
    return False


def _is_gradient(node: Node) -> bool:
    """Returns whether a result is returned as it is, but for casts, scales and sums of such."""
    passes = lambda one: is_joint(one) or one.name in _KEEPS  # noqa: E731
    kept = filter(passes, readers_past(node.outputs, passes))
    return any(value.is_output for one in (node, *kept) for value in one.outputs)


# The `id`s of the equations that a program stands in, outermost first.
EnclosingEquations = tuple[int, ...]
CastPlace = tuple[EnclosingEquations, int]
CodedSide = Literal["input", "weight", "cotangent"]

_OURS = (
    os.path.join(OUR_FOLDER, "eight_bits", ""),
    os.path.join(OUR_FOLDER, "core", "quantization.py"),
)
"""The folder and the file that equations of operations in 8 bits come from."""

LIMITS_CODES = primitives.ROUNDINGS | primitives.MINMAX
"""Limit and round numbers before they are cast to 8 bits."""
_RESCALES = AS_IT_IS | {"mul"}
_PRODUCTS = primitives.DOTS | primitives.CONVOLUTIONS
_BETWEEN = primitives.MINMAX | primitives.MOVES_DATA | {"select_n"}


class QuantizedOperand(NamedTuple):
    """A cast that makes the codes of an operand.

    Attributes:
      operand: the side that it is of the matmuls: of activations, of parameters, or a cotangent.
      paths: the modules whose matmuls read the codes, of the same pass if there are any.
    """

    operand: CodedSide
    paths: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class Codes:
    """Casts to 8 bits, by the equations around them and their `id`.

    Attributes:
      operands: the casts whose codes are multiplied.
      roundings: the equations that round and limit numbers to codes in this library's matmuls,
        which leave them as they are in float32.
      inner: the equations of this library's matmuls whose results are codes or scales.
    """

    operands: dict[CastPlace, QuantizedOperand] = dataclasses.field(default_factory=dict)
    roundings: frozenset[CastPlace] = frozenset()
    inner: frozenset[CastPlace] = frozenset()


NO_CODES = Codes()


def codes_of(jaxpr: Any, params: Collection[int] = ()) -> Codes:
    """Returns the casts to 8 bits in a closed jaxpr.

    Args:
      params: the places of the parameters among its arguments.
    """
    every = (v for each in equations_within(opened(jaxpr)[0], once=True) for v in each.outvars)
    if not any(is_eight_bits(getattr(variable.aval, "dtype", None)) for variable in every):
        return NO_CODES
    graph = Graph(jaxpr)
    made_of = dependences(graph, params)
    operands: dict[CastPlace, QuantizedOperand] = {}
    roundings: set[CastPlace] = set()
    for node in graph.nodes:
        if node.name != "convert_element_type" or not is_eight_bits(node.out.dtype):
            continue
        source = node.inputs[0].dtype
        if not is_inexact_name(source) or is_eight_bits(source):
            continue
        on = made_of[id(node.inputs[0])]
        kind: CodedSide = "weight" if on == PARAMETER else "input"
        kind = "cotangent" if on & COTANGENT else kind
        if paths := _multiplied_at(node, kind == "cotangent"):
            operands[place_of_site(node.site)] = QuantizedOperand(kind, paths)
        if _is_of_ours(node.site):
            roundings.update(_roundings_behind(node.inputs[0]))
            if node.out.dtype == "int8":
                roundings.add(place_of_site(node.site))
    return Codes(operands, frozenset(roundings), frozenset(_inner(graph)))


def _multiplied_at(cast: Node, is_backward: bool) -> tuple[Path, ...]:
    """Returns the modules whose matmuls read the codes of a cast, as they are or widened."""
    passes = lambda node: is_joint(node) or node.name in _RESCALES  # noqa: E731
    read = [node for node in readers_past([cast.out], passes) if node.name in _PRODUCTS]
    sites = [node.site for node in read if not _is_scale(cast.out, node)]
    of_pass = [site for site in sites if site.is_backward == is_backward] or sites
    return tuple(dict.fromkeys(module_path(site.path, site.is_backward) for site in of_pass))


def _is_scale(value: Value, dot: Node) -> bool:
    """Returns whether a value is a scale of a matmul: it has fewer elements than both operands."""
    sizes = [math.prod(one.shape) for one in dot.inputs[:2]]
    return dot.name in primitives.SCALED_DOTS and math.prod(value.shape) < min(sizes)


def place_of_site(site: Site) -> CastPlace:
    if site.around is None:
        return (), id(site.equation)
    above, equation = place_of_site(site.around)
    return (*above, equation), id(site.equation)


def _is_of_ours(site: Site | None) -> bool:
    while site is not None:
        file = author_of(site.equation)[0]
        if file:
            return file.startswith(_OURS)
        site = site.around
    return False


def _roundings_behind(value: Value) -> Iterator[CastPlace]:
    steps = False  # of a float's codes: the rounding is between a division and a multiplication
    while value.maker is not None:
        maker = value.maker
        first, name = maker.inputs[0], maker.name
        rounded = [
            one for one in maker.inputs if one.maker and one.maker.name in primitives.ROUNDINGS
        ]
        if name == "mul" and rounded:
            value, steps = rounded[0], True
            continue
        if name == "div" and steps:
            value = first
            continue
        limits = name in primitives.MINMAX and first.shape == value.shape
        if name in primitives.ROUNDINGS or limits:
            yield place_of_site(maker.site)
        elif name not in _BETWEEN:
            return
        whole = [one for one in maker.inputs if one.shape == value.shape and not one.is_literal]
        if len(whole) != 1:
            return
        (value,) = whole


def _inner(graph: Graph) -> Iterator[CastPlace]:
    """Yields the equations of operations in 8 bits but for products and what scales those."""
    products: set[int] = set()
    for node in graph.nodes:
        if not _is_of_ours(node.site):
            continue
        scales = node.name in _RESCALES and any(id(value) in products for value in node.inputs)
        if scales or node.name in _PRODUCTS:
            products.update(map(id, node.outputs))
        else:
            yield place_of_site(node.site)

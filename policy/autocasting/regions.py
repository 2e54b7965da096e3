"""The equations of a program that run in float32 for what they are part of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from policy.autocasting.complements import complements
from policy.autocasting.normalizations import MOMENT_ROOTS, Found, normalizations
from policy.programs import primitives
from policy.programs.jaxprs import OpenJaxpr, equations_within
from policy.programs.reading.graph import Graph, Node, is_joint


@dataclasses.dataclass(frozen=True)
class Regions:
    """The equations of one program that belong to normalizations, or to a bounded activation and
    what its distance from the bound is read by.

    Equal and hashed by content, so that programs with the same regions can share their rewriting.

    Attributes:
      measures: the identities of equations of statistics, of those that read an activation, and of
        those that hold nothing but regions: they run in float32.
      applies: the identities of the activations, and of equations whose results are as large as
        the data of a normalization. They run in float32 and return half precision.
      programs: the regions of nested programs, by the identities of the equation and the program.
      is_whole: whether every equation of the program belongs to a region.
    """

    measures: frozenset[int] = frozenset()
    applies: frozenset[int] = frozenset()
    programs: Mapping[tuple[int, int], Regions] = dataclasses.field(default_factory=dict)
    is_whole: bool = False

    def __hash__(self) -> int:
        return hash((self.measures, self.applies, self.is_whole, frozenset(self.programs.items())))


NOWHERE = Regions()
_SOUGHT = MOMENT_ROOTS | primitives.BOUNDED


def regions_of(jaxpr: OpenJaxpr, is_param: Sequence[bool], *, returns: bool) -> Regions:
    """Returns the normalizations of a program, and the complements of its bounded activations.

    Args:
      jaxpr: an open jaxpr.
      is_param: whether each of its arguments is a parameter.
      returns: whether its caller reads its outputs unrounded.
    """
    if not any(each.primitive.name in _SOUGHT for each in equations_within(jaxpr, once=True)):
        return NOWHERE
    graph = Graph(jaxpr, primitives.REWRITTEN_INSIDE)
    names = {node.name for node in graph.nodes}
    found = Found(set(), set())
    if not names.isdisjoint(MOMENT_ROOTS):
        found = normalizations(graph, is_param)
    if not names.isdisjoint(primitives.BOUNDED):
        measures, applies = complements(graph, returns=returns)
        found.measures.update(measures - found.applies)
        found.applies.update(applies - found.measures)
    return _divided(graph, found) if found.measures or found.applies else NOWHERE


def _divided(graph: Graph, found: Found) -> Regions:
    """Returns the regions of a program, and of every run of the programs inside it.

    A run goes by the position that its equations have around them, None at the top.
    """
    nodes: dict[int, list[Node]] = {}
    inside: dict[int, dict[int, Any]] = {}
    for node in graph.nodes:
        at = node.site.around
        nodes.setdefault(id(at), []).append(node)
        while at is not None:
            inside.setdefault(id(at.around), {})[id(at)] = at
            at = at.around

    def regions_of(at: Any) -> Regions:
        programs = {
            (id(inner.equation), id(inner.program)): regions_of(inner)
            for inner in inside.get(id(at), {}).values()
        }
        kept = {key: regions for key, regions in programs.items() if regions != NOWHERE}
        own = [node for node in nodes.get(id(at), ()) if not is_joint(node)]
        in_part = {equation for (equation, _), regions in programs.items() if not regions.is_whole}
        whole = {equation for equation, _ in programs} - in_part
        measures = whole.union(id(n.site.equation) for n in own if n in found.measures)
        applies = frozenset(id(n.site.equation) for n in own if n in found.applies)
        covered = {node for node in own if node in found.measures or node in found.applies}
        floats = (node for node in own if any(value.is_float for value in node.outputs))
        is_whole = bool(covered or kept) and not in_part and covered.issuperset(floats)
        return Regions(frozenset(measures), applies, kept, is_whole)

    return regions_of(None)

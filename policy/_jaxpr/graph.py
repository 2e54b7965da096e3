"""A program as one graph of values: what each is made of and who reads it, across the programs inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from policy._jaxpr.operations import name_of
from policy._jaxpr.subprograms import opened, scan_arity
from policy._jaxpr.walk import Body, Site, bodies_of, entered, site_of

Branch = tuple[tuple[int, int], ...]  # the conditionals around a node, and which branch of each


class Value:
    """A number or array of the program.

    Attributes:
      aval: its abstract value.
      dtype: the name of its dtype; "" for what has none.
      maker: the node that makes it; None for arguments and constants.
      readers: the nodes that read it, one for each time.
      array: what it is, for literals and for constants of the program.
      is_output: whether the program returns it.
    """

    __slots__ = ("array", "aval", "dtype", "is_output", "maker", "readers")

    def __init__(self, aval: Any, maker: Node | None = None, array: Any = None):
        self.aval, self.maker, self.array, self.is_output = aval, maker, array, False
        self.dtype = name_of(getattr(aval, "dtype", None))
        self.readers: list[Node] = []

    @property
    def shape(self) -> tuple[Any, ...]:
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def is_literal(self) -> bool:
        return self.array is not None and not self.shape


class Node:
    """An equation that holds no program, or one of four joints of the programs that others hold.

    The joints: "carry" makes what a loop hands on (of its first value, and of what the body returns), "row" one row of
    what a scan runs over, "rows" those that it returns, "branch" what one or the other branch of a conditional returns.

    Attributes:
      site: the equation, and where it stands; of a joint, the loop or conditional.
      name: the primitive's, or the joint's.
      inputs, outputs: what it reads and makes.
      branch: the branches of conditionals that it stands in.
    """

    __slots__ = ("branch", "inputs", "is_live", "name", "outputs", "site")

    def __init__(self, site: Site, name: str, inputs: Sequence[Value], branch: Branch):
        self.site, self.name, self.inputs, self.branch = site, name, list(inputs), branch
        self.outputs: list[Value] = []
        self.is_live = False
        for value in inputs:
            value.readers.append(self)

    @property
    def params(self) -> dict[str, Any]:
        return self.site.equation.params

    @property
    def out(self) -> Value:
        return self.outputs[0]

    def makes(self, avals: Sequence[Any]) -> list[Value]:
        self.outputs = [Value(aval, self) for aval in avals]
        return self.outputs


class Graph:
    """The whole of a program, in the order in which it runs.

    Attributes:
      nodes: everything that what it returns depends on, and what has effects.
      traced: these, and what no result depends on, which is not run.
      arguments, outputs: of the program.
    """

    def __init__(self, jaxpr: Any):
        self.nodes: list[Node] = []
        self._effects: list[Node] = []
        body, consts = opened(jaxpr)
        known = [Value(v.aval, array=const) for v, const in zip(body.constvars, consts, strict=True)]
        self.arguments = [Value(v.aval) for v in body.invars]
        self.outputs = self._run(body, (*known, *self.arguments), None, ())
        for value in self.outputs:
            value.is_output = True
        self._drop_dead_code()

    def _run(self, body: Any, args: Sequence[Value], around: Site | None, branch: Branch) -> list[Value]:
        values: dict[Any, Value] = dict(zip((*body.constvars, *body.invars), args, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, jex_core.Literal):
                return Value(atom.aval, array=np.asarray(atom.val) if hasattr(atom.aval, "dtype") else None)
            return values[atom]

        for equation in body.eqns:
            site = site_of(equation, around)
            outputs = self._equation(site, [read(atom) for atom in equation.invars], branch)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in body.outvars]

    def _equation(self, site: Site, inputs: list[Value], branch: Branch) -> list[Value]:
        bodies = list(bodies_of(site.equation))
        if not bodies:
            return self._node(site, site.name, inputs, branch).makes([v.aval for v in site.equation.outvars])
        if site.name == "scan":
            return self._scan(site, bodies[0], inputs, branch)
        if site.name == "while":
            return self._while(site, bodies, inputs, branch)
        if site.name == "cond":
            return self._cond(site, bodies, inputs, branch)
        if len(bodies) == 1 and _fits(bodies[0], site.equation):
            return self._call(site, bodies[0], inputs, branch)
        return self._unknown(site, bodies, inputs, branch)

    def _node(self, site: Site, name: str, inputs: Sequence[Value], branch: Branch) -> Node:
        node = Node(site, name, inputs, branch)
        self.nodes.append(node)
        if site.equation.effects and name not in _JOINTS:
            self._effects.append(node)
        return node

    def _call(self, site: Site, body: Body, inputs: Sequence[Value], branch: Branch) -> list[Value]:
        program, consts = opened(body.jaxpr)
        known = [Value(v.aval, array=const) for v, const in zip(program.constvars, consts, strict=False)]
        return self._run(program, (*known, *inputs), entered(site, body), branch)

    def _scan(self, site: Site, body: Body, inputs: list[Value], branch: Branch) -> list[Value]:
        consts, carried = scan_arity(site.equation)
        program, _ = opened(body.jaxpr)
        firsts, rows = inputs[consts : consts + carried], inputs[consts + carried :]
        variables = program.invars
        carries = [
            self._node(site, "carry", [first], branch).makes([variable.aval])[0]
            for first, variable in zip(firsts, variables[consts : consts + carried], strict=True)
        ]
        slices = [
            self._node(site, "row", [row], branch).makes([variable.aval])[0]
            for row, variable in zip(rows, variables[consts + carried :], strict=True)
        ]
        results = self._call(site, body, [*inputs[:consts], *carries, *slices], branch)
        _close(carries, results[:carried])
        stacked = [
            self._node(site, "rows", [result], branch).makes([variable.aval])[0]
            for result, variable in zip(results[carried:], site.equation.outvars[carried:], strict=True)
        ]
        return [*results[:carried], *stacked]

    def _while(self, site: Site, bodies: list[Body], inputs: list[Value], branch: Branch) -> list[Value]:
        of_cond, of_body = site.equation.params["cond_nconsts"], site.equation.params["body_nconsts"]
        programs = {body.parameter: body for body in bodies}
        firsts = inputs[of_cond + of_body :]
        carries = [self._node(site, "carry", [first], branch).makes([first.aval])[0] for first in firsts]
        goes_on = self._call(site, programs["cond_jaxpr"], [*inputs[:of_cond], *carries], branch)
        # how often the loop runs decides what each of its results is
        self._effects.append(self._node(site, "carry", goes_on, branch))
        results = self._call(site, programs["body_jaxpr"], [*inputs[of_cond : of_cond + of_body], *carries], branch)
        _close(carries, results)
        return results

    def _cond(self, site: Site, bodies: list[Body], inputs: list[Value], branch: Branch) -> list[Value]:
        each = [self._call(site, body, inputs[1:], (*branch, (id(site.equation), i))) for i, body in enumerate(bodies)]
        return [
            self._node(site, "branch", [inputs[0], *choices], branch).makes([variable.aval])[0]
            for variable, *choices in zip(site.equation.outvars, *each, strict=True)
        ]

    def _unknown(self, site: Site, bodies: list[Body], inputs: list[Value], branch: Branch) -> list[Value]:
        """An equation that hands its programs their operands in a way of its own: they are read each by itself."""
        for body in bodies:
            program, _ = opened(body.jaxpr)
            for value in self._call(site, body, [Value(v.aval) for v in program.invars], branch):
                if value.maker is not None:
                    self._effects.append(value.maker)
        return self._node(site, site.name, inputs, branch).makes([v.aval for v in site.equation.outvars])

    def _drop_dead_code(self) -> None:
        """Leaves out what no result depends on: XLA does not run it, and JAX's derivatives leave much of it."""
        waiting = [*self._effects, *(value.maker for value in self.outputs if value.maker is not None)]
        while waiting:
            node = waiting.pop()
            if not node.is_live:
                node.is_live = True
                waiting.extend(value.maker for value in node.inputs if value.maker is not None)
        self.traced = self.nodes
        self.nodes = [node for node in self.traced if node.is_live]
        for value in self.values():
            value.readers = [node for node in value.readers if node.is_live]

    def values(self) -> Iterator[Value]:
        """Every value that is read or returned, once."""
        seen: set[int] = set()
        for value in (*self.arguments, *(value for node in self.nodes for value in (*node.inputs, *node.outputs))):
            if id(value) not in seen:
                seen.add(id(value))
                yield value


_JOINTS = frozenset(("carry", "row", "rows", "branch"))


def is_joint(node: Node) -> bool:
    return node.name in _JOINTS


def _fits(body: Body, equation: Any) -> bool:
    """Whether a program takes the operands of the equation that holds it, one for one, and returns its results."""
    program, _ = opened(body.jaxpr)
    return len(program.invars) == len(equation.invars) and len(program.outvars) == len(equation.outvars)


def _close(carries: Sequence[Value], results: Sequence[Value]) -> None:
    """Lets each carry be made of what the body returns for it, too."""
    for carry, result in zip(carries, results, strict=True):
        assert carry.maker is not None
        carry.maker.inputs.append(result)
        result.readers.append(carry.maker)

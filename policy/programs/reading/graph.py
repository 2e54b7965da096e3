"""A program as one graph of values with makers and readers, across the programs inside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex_core
import numpy as np

from policy.programs.dtypes import dtype_name, is_floating_dtype
from policy.programs.jaxprs import Subprogram, opened, subprograms
from policy.programs.primitives import kind_of
from policy.programs.reading.walk import Site, entered, site_of

# The conditionals around a node, and which branch of each.
BranchesTaken = tuple[tuple[int, int], ...]


class Value:
    """A number or array of the program.

    Attributes:
      aval: its abstract value.
      dtype: the name of its dtype; "" of a token.
      maker: the node that makes it; None for arguments and constants.
      readers: the nodes that read it, one for each time.
      array: its numbers, for literals and for constants of the program.
      number: the literal that it is, or None.
      is_float: whether its dtype is floating.
      is_output: whether the program returns it.
      yields, given: facts for `policy.autocasting.normalizations`, which notes them.
    """

    __slots__ = (
        *("array", "aval", "dtype", "given", "is_float", "is_output", "maker", "number"),
        *("readers", "shape", "yields"),
    )

    def __init__(self, aval: Any, maker: Node | None = None, array: Any = None, number: Any = None):
        self.aval, self.maker, self.array, self.number = aval, maker, array, number
        self.is_output = self.yields = self.given = False
        dtype = getattr(aval, "dtype", None)
        self.dtype = dtype_name(dtype)
        self.is_float = dtype is not None and is_floating_dtype(dtype)
        self.shape: tuple[Any, ...] = tuple(getattr(aval, "shape", ()))
        self.readers: list[Node] = []

    @property
    def is_literal(self) -> bool:
        return self.array is not None and not self.shape


class Node:
    """An equation that holds no program, or one of the joints of the programs that others hold.

    The joints: "carry" makes the carry of a loop (of its first value and the one that the body
    returns), "row" one row of an array that is scanned over, "rows" the stacked rows that a scan
    returns, "branch" the result of one or the other branch of a conditional, which its first
    operand chooses. For rewriters, "shard" is a device's part of an array, and "shards" is the
    array of all parts.

    Attributes:
      site: the equation and its position; of a joint, the loop or conditional.
      path: the module path, as in rules.
      name: the primitive's, or the joint's.
      kind: of the primitive, one of `OPERATION_KINDS`; "other" of a joint.
      inputs, outputs: the values that it reads and makes.
      branch: the branches of conditionals that it stands in.
    """

    __slots__ = ("branch", "inputs", "is_live", "kind", "name", "outputs", "path", "site")

    def __init__(self, site: Site, name: str, inputs: Sequence[Value], branch: BranchesTaken):
        self.site, self.name, self.inputs, self.branch = site, name, list(inputs), branch
        self.path, self.kind = site.path, kind_of(name)
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

    def makes(self, variables: Iterable[Any]) -> list[Value]:
        self.outputs = [Value(variable.aval, self) for variable in variables]
        return self.outputs


class Graph:
    """The nodes of a program, in the order in which they run.

    Args:
      jaxpr: the program. An open one may lack its constants.
      inside: the primitives whose programs a rewriter enters; None stands for all.
      platform: of `jax.lax.platform_dependent` only the branch for it is read; None reads all.

    Attributes:
      nodes: those that have effects, or that a result depends on.
      traced: the same, and those that no result depends on, which XLA does not run.
      arguments, outputs: of the program.
    """

    def __init__(
        self, jaxpr: Any, inside: Collection[str] | None = None, platform: str | None = None
    ):
        self._platform = platform
        self.nodes: list[Node] = []
        self._effects: list[Node] = []
        self._inside = inside
        self._branch: BranchesTaken = ()
        body, consts = opened(jaxpr)
        self.arguments = [Value(v.aval) for v in body.invars]
        self.outputs = self._run(body, consts, self.arguments, None)
        for value in self.outputs:
            value.is_output = True
        self._drop_dead_code()

    def _run(
        self, body: Any, consts: Sequence[Any], args: Sequence[Value], around: Site | None
    ) -> list[Value]:
        values: dict[Any, Value] = dict(zip(body.invars, args, strict=True))
        consts = consts or [None] * len(body.constvars)
        for variable, const in zip(body.constvars, consts, strict=True):
            values[variable] = Value(variable.aval, array=const)

        def read(atoms: Iterable[Any]) -> list[Value]:
            return [
                _literal(atom) if isinstance(atom, jex_core.Literal) else values[atom]
                for atom in atoms
            ]

        for equation in body.eqns:
            outputs = self._equation(site_of(equation, around), read(equation.invars))
            values.update(zip(equation.outvars, outputs, strict=True))
        return read(body.outvars)

    def _equation(self, site: Site, inputs: list[Value]) -> list[Value]:
        name = site.equation.primitive.name
        is_entered = self._inside is None or name in self._inside
        inner = [one for one in subprograms(site.equation) if one.is_run] if is_entered else []
        match inner[0].role if inner else None:
            case None:
                return self._node(site, name, inputs).makes(site.equation.outvars)
            case "loop" | "cond":
                return self._loop(site, inner, inputs)
            case "branch":
                return self._branches(site, inner, inputs)
            case "other":
                return self._unknown(site, inner, inputs)
            case "shard" if self._inside is not None:
                arguments = self._joints(site, "shard", inputs, inner[0].body.invars)
                results = self._call(site, inner[0], arguments)
                return self._joints(site, "shards", results, site.equation.outvars)
        return self._call(site, inner[0], inputs)

    def _node(self, site: Site, name: str, inputs: Sequence[Value]) -> Node:
        node = Node(site, name, inputs, self._branch)
        self.nodes.append(node)
        if site.equation.effects and name not in _JOINTS:
            self._effects.append(node)
        return node

    def _call(self, site: Site, one: Subprogram, arguments: Sequence[Value]) -> list[Value]:
        return self._run(one.body, one.consts, arguments, entered(site, one))

    def _loop(self, site: Site, inner: list[Subprogram], inputs: list[Value]) -> list[Value]:
        loop = next(one for one in inner if one.role == "loop")
        arguments, variables = loop.given(inputs), loop.body.invars
        carries = self._joints(site, "carry", arguments[loop.carry], variables[loop.carry])
        rows = self._joints(site, "row", arguments[loop.rows], variables[loop.rows])
        for cond in (one for one in inner if one.role == "cond"):
            goes_on = self._call(site, cond, [*cond.given(inputs)[cond.fixed], *carries])
            # how often the loop runs decides its results
            self._effects.append(self._node(site, "carry", goes_on))
        results = self._call(site, loop, [*arguments[loop.fixed], *carries, *rows])
        carried, stacked = results[: loop.carried], results[loop.carried :]
        for carry, result in zip(carries, carried, strict=True):  # it is made of this result, too
            assert carry.maker is not None
            carry.maker.inputs.append(result)
            result.readers.append(carry.maker)
        variables = site.equation.outvars[loop.carried :]
        return [*carried, *self._joints(site, "rows", stacked, variables)]

    def _joints(
        self, site: Site, name: str, values: Sequence[Value], variables: Sequence[Any]
    ) -> list[Value]:
        pairs = zip(values, variables, strict=True)
        return [self._node(site, name, [v]).makes([x])[0] for v, x in pairs]

    def _branches(self, site: Site, inner: list[Subprogram], inputs: list[Value]) -> list[Value]:
        if (chosen := self._branch_of_platform(inputs[0])) is not None:
            return self._call(site, inner[chosen], inner[chosen].given(inputs))
        around, each = self._branch, []
        for i, one in enumerate(inner):
            self._branch = (*around, (id(site.equation), i))
            each.append(self._call(site, one, one.given(inputs)))
        self._branch = around
        return [
            self._node(site, "branch", [inputs[0], *choices]).makes([variable])[0]
            for variable, *choices in zip(site.equation.outvars, *each, strict=True)
        ]

    def _branch_of_platform(self, index: Value) -> int | None:
        if self._platform is None or index.maker is None or index.maker.name != "platform_index":
            return None
        named = index.maker.params["platforms"]
        taken = (i for i, names in enumerate(named) if names is None or self._platform in names)
        return next(taken, None)

    def _unknown(self, site: Site, inner: list[Subprogram], inputs: list[Value]) -> list[Value]:
        """Reads programs whose operands only their primitive knows, each by itself."""
        for one in inner:
            arguments = [Value(variable.aval) for variable in one.body.invars]
            results = self._call(site, one, arguments)
            self._effects += [value.maker for value in results if value.maker is not None]
        return self._node(site, site.name, inputs).makes(site.equation.outvars)

    def _drop_dead_code(self) -> None:
        """Leaves out nodes that no result depends on: JAX's derivatives leave many of them."""
        makers = (value.maker for value in self.outputs)
        waiting = [*self._effects, *(maker for maker in makers if maker is not None)]
        while waiting:
            node = waiting.pop()
            if not node.is_live:
                node.is_live = True
                waiting += [v.maker for v in node.inputs if v.maker is not None]
        self.traced = self.nodes
        self.nodes = [node for node in self.traced if node.is_live]
        dead = (node for node in self.traced if not node.is_live)
        for value in {id(value): value for node in dead for value in node.inputs}.values():
            value.readers = [node for node in value.readers if node.is_live]


def _literal(atom: jex_core.Literal) -> Value:
    array = np.asarray(atom.val) if hasattr(atom.aval, "dtype") else None
    return Value(atom.aval, array=array, number=atom.val)


_JOINTS = frozenset(("carry", "row", "rows", "branch", "shard", "shards"))


def is_cotangent(node: Node) -> bool:
    """Returns whether a node is in the backward pass and is not rematerialized there."""
    return node.site.is_backward and not node.site.is_recomputed


def is_joint(node: Node) -> bool:
    return node.name in _JOINTS


def readers_past(values: Sequence[Value], passes: Callable[[Node], bool]) -> Iterator[Node]:
    """Yields the readers of some values, and those of the results of readers that `passes`."""
    waiting, seen = list(values), set(map(id, values))
    while waiting:
        for node in waiting.pop().readers:
            yield node
            fresh = [out for out in node.outputs if id(out) not in seen] if passes(node) else []
            seen.update(map(id, fresh))
            waiting.extend(fresh)

"""Pairs a program in half precision with the float32 trace of the same code, value by value."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.programs.codes import is_eight_bit_matmul
from policy.programs.flattened import FlatOperation, Flattened, Known, Operand, Token, flattened
from policy.programs.paths import Path
from policy.programs.placed_interpreter import EnclosingEquations
from policy.programs.primitives import MATMULS
from policy.programs.subprograms import opened, subprograms
from policy.programs.walk import written_at

# Parameters that say which dtypes an operation computes in.
_OF_DTYPES = frozenset(
    (
        *(
            "precision",
            "preferred_element_type",
            "new_dtype",
            "dtype",
            "name",
            "weak_type",
            "sharding",
            "out_sharding",
        ),
        *("accuracy", "index_dtype", "exponent_bits", "mantissa_bits", "is_async"),
    )
)
At = tuple[EnclosingEquations, int]


@dataclasses.dataclass
class Reference:
    """The float32 trace of a function, beside a program of it in half precision.

    Attributes:
      made: the operation of each equation of the program, by its position.
      inputs: the arguments of its bodies.
      same: the float32 counterpart of each of its values.
      joined: those of `same` that float32 computes in another way.
      given: operands that float32 reads instead of the program's own: constants before rounding,
        for most.
      outputs: the same of the program's results.
      consts: the constants of the float32 trace, and of the programs inside of it by their `id`.
      touched: the equations, by `id`, where float32's value is not the widened equation's.
      unpaired: the paths whose values have no counterpart.
    """

    made: dict[At, FlatOperation]
    inputs: dict[At, list[Any]]
    same: dict[Token, Any] = dataclasses.field(default_factory=dict)
    joined: set[Token] = dataclasses.field(default_factory=set)
    given: dict[At, dict[int, Operand]] = dataclasses.field(default_factory=dict)
    outputs: dict[int, Operand] = dataclasses.field(default_factory=dict)
    consts: tuple[list[Any], dict[int, Any]] = dataclasses.field(default_factory=lambda: ([], {}))
    touched: set[int] = dataclasses.field(default_factory=set)
    unpaired: dict[Path, None] = dataclasses.field(default_factory=dict)

    def resolved(self, root: Any) -> Any:
        """Returns the counterpart of a value in the float32 trace; None where it is not known."""
        if isinstance(root, tuple) and root[0] in ("stacked", "element"):
            inner = self.resolved(root[1])
            return None if inner is None else (root[0], inner, *root[2:])
        if isinstance(root, Known):
            return None
        return root if root[0] == "argument" else self.same.get(root)


def reference_of(half: Any, wide: Any, unmet: Collection[At] = ()) -> Reference:
    """Pairs two jaxprs of one function: the program that rounds, and the one traced in float32.

    Their operations are aligned by name, module and shape, in program order. The alignment is then
    followed by values: two operations are one if they read values that are one. One of the programs
    may compute a part in another way, as a normalisation that is exact for half inputs. The values
    that leave such a part are joined by the operation that reads both, or by the module that they
    leave. Casts are no operations, and a recomputation counts as the operation that it repeats.

    Args:
      half, wide: the jaxprs.
      unmet: the equations of `half` whose results need no counterpart.
    """
    return _Pairs(half, wide, unmet).found()


class _Pairs:
    def __init__(self, half: Any, wide: Any, unmet: Collection[At] = ()):
        self.unmet = unmet
        self.ours, self.theirs = flattened(half), flattened(wide)
        self.consts = opened(half)[1], opened(wide)[1]
        self.inner = self.ours.consts | self.theirs.consts
        self.reference = Reference(
            self.ours.made, self.ours.inputs, consts=(self.consts[1], self.inner)
        )
        self.partner: dict[int, FlatOperation] = {}  # of an operation of ours, by its id
        self.taken: set[Token] = set()  # values of theirs that are one of ours

    def found(self) -> Reference:
        waiting = self.accepted(_aligned(self.ours, self.theirs))
        self.leaving()
        self.accepted(waiting)
        self.bodies()
        for i, (ours, theirs) in enumerate(
            zip(self.ours.outputs, self.theirs.outputs, strict=True)
        ):
            if self.status(ours, theirs) != "same" and not self.joins(ours, theirs):
                self.reference.outputs[i] = theirs
        for path in self.unresolved():
            self.reference.unpaired[path] = None
        self.reference.touched |= {
            id_
            for (_, id_), made in self.ours.made.items()
            if made.at in self.reference.given or self.is_joined(made)
        }
        return self.reference

    def is_joined(self, operation: FlatOperation) -> bool:
        results = range(len(operation.equation.outvars))
        return any(("result", operation, i) in self.reference.joined for i in results)

    def accepted(
        self, pairs: list[tuple[FlatOperation, FlatOperation]]
    ) -> list[tuple[FlatOperation, FlatOperation]]:
        """Makes one of the operations that are; returns the others."""
        return [pair for pair in pairs if not self.accept(*pair)]

    def accept(self, one: FlatOperation, other: FlatOperation) -> bool:
        if is_eight_bit_matmul(one.equation) and not is_eight_bit_matmul(other.equation):
            return False  # its product is in units of the scales
        around = None if one.around is None else self.partner.get(id(one.around))
        order = _order(one, other)
        if around is not other.around or order is None or not _same_params(one, other):
            return False
        read = [other.operands[j] for j in order] if one.carried else other.operands
        found = [self.status(ours, theirs) for ours, theirs in zip(one.operands, read, strict=True)]
        if any(status in ("unknown", "different") for status in found) and not self.is_one(
            one, found, other
        ):
            return False
        for k, (status, ours, theirs) in enumerate(zip(found, one.operands, read, strict=True)):
            if status == "given" or (status != "same" and not self.joins(ours, theirs)):
                self.reference.given.setdefault(one.at, {})[_place(one, k)] = theirs
        self.partner[id(one)] = other
        for i, j in enumerate(order):
            self.make_one(("result", one, i), ("result", other, j))
            if one.carried:
                self.make_one(("carry", one, i), ("carry", other, j))
        return True

    def is_one(self, one: FlatOperation, found: Sequence[str], other: FlatOperation) -> bool:
        """Returns whether two operations are the same code on values not known to be one."""
        if (
            one.name in MATMULS
            or one.bodies
            or written_at(one.equation) == written_at(other.equation)
        ):
            return True
        unknown = [
            operand
            for operand, status in zip(one.operands, found, strict=True)
            if status == "unknown"
        ]
        paths = [_path(operand.root) for operand in unknown]
        return all(path is not None and path != one.path for path in paths) and len(unknown) > 0

    def make_one(self, ours: Token, theirs: Any) -> None:
        self.reference.same[ours] = theirs
        self.taken.add(theirs)

    def status(self, ours: Operand, theirs: Operand) -> str:
        """Returns how two values compare.

        It is "given" where they are constants, and float32's is another number.
        """
        one, other = ours.root, theirs.root
        if isinstance(one, Known) or isinstance(other, Known):
            return (
                _constants(one, other)
                if isinstance(one, Known) and isinstance(other, Known)
                else "different"
            )
        if one[0] == other[0] and one[0] in ("const", "inner") and one not in self.reference.same:
            return self.arrays(one, other)
        found = self.reference.resolved(one)
        return "unknown" if found is None else "same" if found == other else "different"

    def arrays(self, one: Token, other: Token) -> str:
        """Of arrays that are closed over."""
        is_top = one[0] == "const"
        a = self.consts[0][one[1]] if is_top else self.inner[one[1]]
        b = self.consts[1][other[1]] if is_top else self.inner[other[1]]
        if a.shape != b.shape:
            return "different"
        status = "same" if a is b else _numbers(a, b)
        if status == "same":
            self.make_one(one, other)
        return status

    def joins(self, ours: Operand, theirs: Operand) -> bool:
        """Records that float32 computes a value as another, if it can be."""
        one, other = ours.root, theirs.root
        if (
            isinstance(one, Known)
            or isinstance(other, Known)
            or self.reference.resolved(one) is not None
        ):
            return False
        while one[0] == other[0] == "stacked" and one[2:] == other[2:]:
            one, other = one[1], other[1]
        if isinstance(one, Known) or isinstance(other, Known) or one[0] != "result":
            return False
        if _size(one) is None or _size(one) != _size(other):
            return False
        around = None if one[1].around is None else self.partner.get(id(one[1].around))
        if other[0] == "result" and other[1].around is not around:
            return False
        self.make_one(one, other)
        self.reference.joined.add(one)
        return True

    def bodies(self) -> None:
        """Pairs the carries of loops and the results of branches."""
        for one in self.ours.operations:
            other = self.partner.get(id(one))
            if other is None:
                continue
            order = _order(one, other)
            for body, counterpart in zip(one.bodies, other.bodies, strict=False):
                for ours, theirs in zip(body, _ordered(counterpart, order), strict=False):
                    if self.status(ours, theirs) != "same" and not self.joins(ours, theirs):
                        self.reference.unpaired[one.path] = None

    def leaving(self) -> None:
        """Joins values that a module hands to another, where float32 has as many of each shape."""
        theirs: dict[Token, list[Token]] = {}
        for ways, root in _leaving(self.theirs):
            if root not in self.taken:
                theirs.setdefault(ways, []).append(root)
        ours: dict[Token, list[Token]] = {}
        for ways, root in _leaving(self.ours):
            if self.reference.resolved(root) is None:
                ours.setdefault(ways, []).append(root)
        for ways, roots in ours.items():
            others = theirs.get(ways, [])
            if list(map(_size, roots)) == list(map(_size, others)):
                for one, other in zip(roots, others, strict=True):
                    self.joins(Operand(one), Operand(other))

    def unresolved(self) -> Iterator[Path]:
        for (path, *_), root in _leaving(self.ours):
            if self.reference.resolved(root) is None and not self.is_unmet(root):
                yield path

    def is_unmet(self, root: Token) -> bool:
        """Returns whether a value needs no counterpart."""
        return root[0] == "result" and root[1].at in self.unmet


def _aligned(ours: Flattened, theirs: Flattened) -> list[tuple[FlatOperation, FlatOperation]]:
    kinds = [[operation.kind for operation in side.operations] for side in (ours, theirs)]
    blocks = difflib.SequenceMatcher(None, *kinds, autojunk=False).get_matching_blocks()
    return [
        (ours.operations[i + n], theirs.operations[k + n])
        for i, k, size in blocks
        for n in range(size)
    ]


def _leaving(side: Flattened) -> Iterator[tuple[Token, Token]]:
    """Yields the values that are read in another module than the one that computed them.

    Each comes with the paths of both modules and the direction. A residual of the forward pass
    leaves no module, and neither does a recomputed value.
    """
    seen: set[Token] = set()
    for operation in side.operations:
        for operand in (*operation.operands, *(o for body in operation.bodies for o in body)):
            root = operand.root
            while isinstance(root, tuple) and root[0] == "stacked":
                root = root[1]
            if not isinstance(root, tuple) or root[0] != "result" or root in seen:
                continue
            maker = root[1]
            if maker.is_again or operation.is_again:
                continue
            if maker.path != operation.path and maker.is_backward == operation.is_backward:
                seen.add(root)
                yield (maker.path, operation.path, maker.is_backward), root


def _order(one: FlatOperation, other: FlatOperation) -> list[int] | None:
    """Returns the order of one operation's results in the other's; None where there are others.

    Carries may stand in another order in a backward pass: they are told apart by the module that
    adds to them.
    """
    if not one.carried and not other.carried:
        same = len(one.operands) == len(other.operands) and len(one.equation.outvars) == len(
            other.equation.outvars
        )
        return list(range(len(one.equation.outvars))) if same else None
    ours, theirs = (_carries(side) for side in (one, other))
    if ours == theirs:
        return list(range(one.carried))
    if sorted(map(repr, ours)) != sorted(map(repr, theirs)):
        return None
    places: dict[Token, list[int]] = {}
    for j, kind in enumerate(theirs):
        places.setdefault(kind, []).append(j)
    return [places[kind].pop(0) for kind in ours]


def _carries(operation: FlatOperation) -> list[Token]:
    shapes = [
        getattr(v.aval, "shape", None) for v in operation.equation.outvars[: operation.carried]
    ]
    return [
        (shape, _path(operand.root))
        for shape, operand in zip(shapes, operation.bodies[0], strict=True)
    ]


def _ordered(body: list[Operand], order: list[int] | None) -> list[Operand]:
    return [body[j] for j in order] if order is not None and len(order) == len(body) else body


def _path(root: Any) -> Path | None:
    return root[1].path if isinstance(root, tuple) and root[0] == "result" else None


def _size(root: Token) -> int | None:
    if root[0] in ("result", "carry"):
        shape = getattr(root[1].equation.outvars[root[2]].aval, "shape", None)
        return None if shape is None else math.prod(shape)
    return None


def _place(operation: FlatOperation, k: int) -> int:
    """Returns the place of an operand among those of the equation."""
    loops = [one for one in subprograms(operation.equation) if one.role == "loop"]
    return loops[0].operands_carried[k] if loops else k


def _same_params(one: FlatOperation, other: FlatOperation) -> bool:
    a, b = one.equation.params, other.equation.params
    return bool(one.bodies) or all(_same_param(a.get(n), b.get(n)) for n in {*a, *b} - _OF_DTYPES)


def _same_param(a: Any, b: Any) -> bool:
    return not (_is_plain(a) and _is_plain(b)) or a == b


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, str))


def _constants(one: Known, other: Known) -> str:
    if one.value.shape != other.value.shape:
        return "different"
    return _numbers(one.value, other.value)


def _numbers(a: Any, b: Any) -> str:
    if all(jnp.issubdtype(x.dtype, jnp.floating) for x in (a, b)):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        return "same" if np.array_equal(a, b, equal_nan=True) else "given"
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in (a, b)):
        return "same"
    return "same" if np.array_equal(np.asarray(a), np.asarray(b)) else "different"

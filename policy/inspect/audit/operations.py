"""The operations of an audit, their totals, and both by module."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from policy.inspect.audit.findings import Finding
from policy.inspect.audit.flow import bits, is_eight_bits, is_sixteen_bits, is_wide
from policy.inspect.traced.authors import source_of_site
from policy.inspect.traced.equation_facts import (
    accumulation_of,
    bytes_of,
    float32_precision_of,
    flops_of,
    operands_of,
    result_of,
)
from policy.programs.paths import parts_of, spelled
from policy.programs.primitives import ATTENTIONS, kind_of
from policy.programs.reading.graph import Graph, is_joint

_WIDTHS = {"8 bits": is_eight_bits, "half": is_sixteen_bits, "float32": is_wide}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One primitive at one place, in one set of dtypes; equal ones are one row.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> x = jnp.ones((2, 2), jnp.bfloat16)
    >>> [operation] = policy.audit(jnp.matmul, x, x).operations
    >>> operation.primitive, operation.operands, operation.flops
    ('dot_general', ('bfloat16', 'bfloat16'), 16)

    Attributes:
      path: the module path, its names joined by "/", as in rules; the model itself is ``Net:``, ""
        is outside of any module.
      kind: "dot", "convolution", "reduction", "scatter-add", "transcendental", "collective",
        "cast", "opaque", or "other".
      primitive: its name in JAX.
      operands: dtypes of the array operands.
      accumulation: the declared dtype of sums: `preferred_element_type` or the dot algorithm, and
        the operand dtype of a reduction; "backend" if a half-precision matmul declares none; "" if
        nothing is summed.
      result: the dtype of the first result; "" if there is none.
      source: the line of the user's code, as "model.py:12 (Net.__call__)"; the module's path and
        class, as "encoder/out (Dense)", if no user code called it; "" if JAX knows neither.
      is_backward: whether it belongs to a backward pass.
      count: the number of runs, with scan lengths multiplied.
      flops: floating-point operations of all these runs.
      bytes: of the operands and results of all these runs.
      precision: of a matmul of float32 operands: "default", "high", "highest" or the name of an
        algorithm; "highest, default" where its operands differ; "" of any other operation.
    """

    path: str
    kind: str
    primitive: str
    operands: tuple[str, ...]
    accumulation: str
    result: str
    source: str
    is_backward: bool
    count: int
    flops: int
    bytes: int
    precision: str = ""


def operations_of(graph: Graph) -> tuple[Operation, ...]:
    """Returns the operations of a program; equal ones at one place and line are one row."""
    totals: dict[tuple[Any, ...], list[int]] = {}
    for node in graph.nodes:
        if is_joint(node):
            continue
        equation, site = node.site.equation, node.site
        kind = kind_of(site.name)
        dtypes = operands_of(equation), accumulation_of(equation), result_of(equation)
        source = "" if kind == "other" else source_of_site(site)
        place = source, site.is_backward, float32_precision_of(equation)
        key = (spelled(site.path), kind, site.name, *dtypes, *place)
        total = totals.setdefault(key, [0, 0, 0])
        times = site.count * site.devices
        total[0] += site.count
        total[1] += flops_of(equation) * times
        total[2] += bytes_of(equation) * times
    return tuple(Operation(*key[:-1], *total, precision=key[-1]) for key, total in totals.items())


def attention_programs(audit: AuditFigures) -> dict[str, list[str]]:
    """Returns the paths of the modules that attend, by program."""
    found: dict[str, list[str]] = {}
    for path, program in audit.attention.items():
        found.setdefault(program, []).append(path or "outside of modules")
    return found


@dataclasses.dataclass(frozen=True)
class AuditFigures:
    """Operations and findings, and their totals: an audit, or a part of one.

    Attributes:
      operations, findings, name, policy, attention: those of `policy.inspect.Audit`.
    """

    operations: tuple[Operation, ...]
    findings: tuple[Finding, ...] = ()
    name: str = ""
    policy: str = ""
    attention: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def flops_by_dtype(self) -> dict[str, int]:
        """FLOPs by the widest dtype of each operation's operands, the largest first."""
        return _totals((widest_dtype(op.operands), op.flops) for op in self.operations)

    @functools.cached_property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes read and written by the dtype of the operations' results; the largest first."""
        return _totals((op.result, op.bytes) for op in self.operations)

    @functools.cached_property
    def matmul_flops_by_dtype(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by the widest dtype of their operands."""
        matmuls = filter(is_matmul_operation, self.operations)
        return _totals((widest_dtype(op.operands), op.flops) for op in matmuls)

    @functools.cached_property
    def f32_matmul_share(self) -> float:
        """The share of matmul and convolution FLOPs in float32 or wider; 0.0 if there are none."""
        flops = self.matmul_flops_by_dtype
        wide = sum(amount for dtype, amount in flops.items() if is_wide(dtype))
        return wide / sum(flops.values()) if wide else 0.0

    @functools.cached_property
    def matmul_shares(self) -> dict[str, float]:
        """The shares of matmul and convolution FLOPs in "8 bits" or 4, "half" and "float32" or
        wider.

        Those that are zero are left out; so are matmuls of other integers.
        """
        widths = dict.fromkeys(_WIDTHS, 0)
        for dtype, amount in self.matmul_flops_by_dtype.items():
            for width, holds in _WIDTHS.items():
                widths[width] += amount * holds(dtype)
        total = sum(widths.values())
        return {width: amount / total for width, amount in widths.items() if amount}

    @functools.cached_property
    def eight_bit_matmul_share(self) -> float:
        """The share of matmul and convolution FLOPs in 8 bits or 4; 0.0 if there are none."""
        return self.matmul_shares.get("8 bits", 0.0)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The module paths of all operations, in program order."""
        return tuple(dict.fromkeys(op.path for op in self.operations))


def operation_name(operation: Operation) -> str:
    """Returns the primitive of an operation, and the precision where it is not the default."""
    if operation.precision in ("", "default"):
        return operation.primitive
    return f"{operation.primitive}, {operation.precision}"


def is_matmul_operation(operation: Operation) -> bool:
    """Returns whether an operation is a matmul, a convolution, or attention in one kernel."""
    return operation.kind in ("dot", "convolution") or operation.primitive in ATTENTIONS


def widest_dtype(dtypes: tuple[str, ...]) -> str:
    """Returns the widest of some dtypes; "" of none."""
    return max(dtypes, key=bits, default="")


def _totals(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Returns the sums of amounts by dtype, the largest first, without zeros."""
    totals: Counter[str] = Counter()
    for dtype, amount in amounts:
        totals[dtype or "none"] += amount
    return {dtype: amount for dtype, amount in totals.most_common() if amount}


# --------------------------------------------------------------------------------------------------
# By module
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ModuleNode:
    """A module, or the root above all modules.

    Attributes:
      operations: the operations in the module itself.
      children: the modules directly below, by name, in program order.
    """

    operations: list[Operation] = dataclasses.field(default_factory=list)
    children: dict[str, ModuleNode] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def figures(self) -> AuditFigures:
        """The totals of the operations in the module and below."""
        below = (child.figures.operations for child in self.children.values())
        return AuditFigures((*self.operations, *itertools.chain.from_iterable(below)))

    @property
    def flops(self) -> int:
        """FLOPs in the module and below."""
        return sum(self.figures.flops_by_dtype.values())

    @property
    def matmul_shares(self) -> str:
        """The shares of its matmul FLOPs by width, "8 bits 67%, half 33%"; "" without 8 bits."""
        shares = self.figures.matmul_shares
        if "8 bits" not in shares:
            return ""
        return ", ".join(f"{width} {share:.0%}" for width, share in shares.items())


def tree_of(operations: Iterable[Operation]) -> ModuleNode:
    """Returns the tree of all paths of operations.

    Operations of a model's own code come before those of its modules.
    """
    root = ModuleNode()
    for operation in sorted(operations, key=lambda one: not one.path.endswith(":")):
        module = root
        for name in parts_of(operation.path):
            module = module.children.setdefault(name, ModuleNode())
        module.operations.append(operation)
    return root

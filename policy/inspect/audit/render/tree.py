"""The modules of an audit as a tree, with the operations in and below each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from policy.inspect.audit.report import Audit, Finding, Operation, by_width
from policy.programs.paths import parts_of


@dataclasses.dataclass
class ModuleNode:
    """A module, or the root above all modules.

    Attributes:
      path: its path, its names joined by "/".
      name: the last of these names.
      id: the HTML id of its place on a page.
      operations: the operations in the module itself.
      children: the modules directly below, by name, in program order.
      flops, bytes: by dtype, in the module and below.
      matmuls: FLOPs of matmuls by dtype, in the module and below.
      findings: the number of findings in the module and below.
    """

    path: str
    name: str
    id: str = ""
    operations: list[Operation] = dataclasses.field(default_factory=list)
    children: dict[str, ModuleNode] = dataclasses.field(default_factory=dict)
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)
    matmuls: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: int = 0

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of its FLOPs, or of its bytes if it has none; the largest first."""
        amounts = self.flops if any(self.flops.values()) else self.bytes
        return [dtype for dtype, amount in amounts.most_common() if amount]

    @property
    def dtype(self) -> str:
        """The dtype with the largest share; "" if nothing runs."""
        return next(iter(self.dtypes), "")

    @property
    def matmul_shares(self) -> str:
        """The shares of its matmul FLOPs by width, "8 bits 67%, half 33%"; "" without 8 bits."""
        widths = by_width(self.matmuls)
        if "8 bits" not in widths:
            return ""
        total = sum(widths.values())
        return ", ".join(f"{width} {flops / total:.0%}" for width, flops in widths.items())

    def at(self, path: str) -> ModuleNode:
        """Returns the node at a path below, creating it if needed."""
        node = self
        for name in parts_of(path):
            between = "" if node.path.endswith(":") or not node.path else "/"
            above = f"{node.path}{between}{name}"
            node = node.children.setdefault(name, ModuleNode(above, name))
        return node

    def walk(self) -> Iterator[ModuleNode]:
        """Yields this node and all below it, each before its children."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def ids(self) -> dict[str, str]:
        """Returns the HTML ids by path."""
        return {node.path: node.id for node in self.walk()}


def tree_of(operations: Iterable[Operation], findings: Iterable[Finding] = ()) -> ModuleNode:
    """Returns the tree of all paths of operations and findings."""
    root = ModuleNode("", "")
    for operation in _models_first(operations):
        root.at(operation.path).operations.append(operation)
    for finding in findings:
        root.at(finding.path).findings += 1
    for i, node in enumerate(root.walk()):
        node.id = f"m{i}"
    _add_up(root)
    return root


def _models_first(operations: Iterable[Operation]) -> list[Operation]:
    """Returns operations with those of a model's own code before those of its modules."""
    return sorted(operations, key=lambda operation: not operation.path.endswith(":"))


def _add_up(node: ModuleNode) -> None:
    own = Audit(tuple(node.operations), ())
    node.flops, node.bytes = Counter(own.flops_by_dtype), Counter(own.bytes_by_dtype)
    node.matmuls = Counter(own.matmul_flops_by_dtype)
    for child in node.children.values():
        _add_up(child)
        node.flops += child.flops
        node.bytes += child.bytes
        node.matmuls += child.matmuls
        node.findings += child.findings

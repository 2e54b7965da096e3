"""The modules of an audit as a tree, with the operations in and below each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from policy.inspect.audit.operations import AuditFigures, Finding, Operation
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
      findings: the number of findings in the module and below.
    """

    path: str
    name: str
    id: str = ""
    operations: list[Operation] = dataclasses.field(default_factory=list)
    children: dict[str, ModuleNode] = dataclasses.field(default_factory=dict)
    findings: int = 0

    @functools.cached_property
    def figures(self) -> AuditFigures:
        """The totals of the operations in the module and below."""
        return AuditFigures(tuple(op for node in self.walk() for op in node.operations))

    @property
    def flops(self) -> int:
        """FLOPs in the module and below."""
        return sum(self.figures.flops_by_dtype.values())

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of its FLOPs, or of its bytes if it has none; the largest first."""
        return list(self.figures.flops_by_dtype or self.figures.bytes_by_dtype)

    @property
    def matmul_shares(self) -> str:
        """The shares of its matmul FLOPs by width, "8 bits 67%, half 33%"; "" without 8 bits."""
        shares = self.figures.matmul_shares
        if "8 bits" not in shares:
            return ""
        return ", ".join(f"{width} {share:.0%}" for width, share in shares.items())

    def at(self, path: str) -> Iterator[ModuleNode]:
        """Yields this node and those on the way to a path below, creating them if needed."""
        node = self
        yield node
        for name in parts_of(path):
            between = "" if node.path.endswith(":") or not node.path else "/"
            above = f"{node.path}{between}{name}"
            node = node.children.setdefault(name, ModuleNode(above, name))
            yield node

    def walk(self) -> Iterator[ModuleNode]:
        """Yields this node and all below it, each before its children."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def ids(self) -> dict[str, str]:
        """Returns the HTML ids by path."""
        return {node.path: node.id for node in self.walk()}


def tree_of(operations: Iterable[Operation], findings: Iterable[Finding] = ()) -> ModuleNode:
    """Returns the tree of all paths of operations and findings.

    Operations of a model's own code come before those of its modules.
    """
    root = ModuleNode("", "")
    for operation in sorted(operations, key=lambda one: not one.path.endswith(":")):
        *_, node = root.at(operation.path)
        node.operations.append(operation)
    for finding in findings:
        for node in root.at(finding.path):
            node.findings += 1
    for i, node in enumerate(root.walk()):
        node.id = f"m{i}"
    return root

"""The modules of an audit as a tree, with what runs in and below each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from policy._jaxpr.paths import parts_of
from policy.audit.report import Audit

if TYPE_CHECKING:
    from policy.audit.report import Operation


@dataclasses.dataclass
class Node:
    """A module, or the place above all of them.

    Attributes:
      path: its path, its names joined by "/".
      name: the last of these.
      id: the HTML id of its place on a page.
      operations: what runs in it itself.
      children: the modules directly below, by name, in the order of the program.
      flops, bytes: by dtype, in it and below.
      findings: how many findings are about it and what is below.
    """

    path: str
    name: str
    id: str = ""
    operations: list[Operation] = dataclasses.field(default_factory=list)
    children: dict[str, Node] = dataclasses.field(default_factory=dict)
    flops: Counter[str] = dataclasses.field(default_factory=Counter)
    bytes: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: int = 0

    @property
    def dtypes(self) -> list[str]:
        """The dtypes that do its FLOPs, or where there are none, that its bytes are in; the most first."""
        amounts = self.flops if any(self.flops.values()) else self.bytes
        return [dtype for dtype, amount in amounts.most_common() if amount]

    @property
    def dtype(self) -> str:
        """The dtype that does most of it; "" where nothing runs."""
        return next(iter(self.dtypes), "")

    def at(self, path: str) -> Node:
        """The node at a path below, made where there is none."""
        node = self
        for name in parts_of(path):
            between = "" if node.path.endswith(":") or not node.path else "/"
            above = f"{node.path}{between}{name}"
            node = node.children.setdefault(name, Node(above, name))
        return node

    def walk(self) -> Iterator[Node]:
        """This node and all below it, each before its children."""
        yield self
        for child in self.children.values():
            yield from child.walk()

    def ids(self) -> dict[str, str]:
        """The HTML ids by path."""
        return {node.path: node.id for node in self.walk()}


def tree_of(audit: Audit) -> Node:
    """The tree of all paths that operations and findings have."""
    root = Node("", "")
    for operation in models_first(audit.operations):
        root.at(operation.path).operations.append(operation)
    for finding in audit.findings:
        root.at(finding.path).findings += 1
    for i, node in enumerate(root.walk()):
        node.id = f"m{i}"
    _add_up(root)
    return root


def models_first(operations: Iterable[Operation]) -> list[Operation]:
    """Returns operations with those of a model's own code before those of its modules."""
    return sorted(operations, key=lambda operation: not operation.path.endswith(":"))


def _add_up(node: Node) -> None:
    own = Audit(tuple(node.operations), ())
    node.flops, node.bytes = Counter(own.flops_by_dtype), Counter(own.bytes_by_dtype)
    for child in node.children.values():
        _add_up(child)
        node.flops += child.flops
        node.bytes += child.bytes
        node.findings += child.findings

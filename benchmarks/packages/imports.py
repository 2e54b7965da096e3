"""Imports packages with their imports of Flax replaced by ours, as a user would replace them in the
source.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

APIS = ("linen", "nnx")
_OURS = "mpmodules"


def install(packages: Collection[str]) -> set[str]:
    """Lets the modules of `packages`, and those below them, import `mpmodules.linen` for
    `flax.linen`, and so for nnx.

    Args:
      packages: names of packages and modules that are not imported yet.

    Returns:
      The names of the modules in which something was replaced: a set that grows as they are
      imported.

    Raises:
      ValueError: one of them is imported already.
    """
    imported = sorted(set(packages).intersection(sys.modules))
    if imported:
        raise ValueError(
            f"{', '.join(imported)} can't be imported with our modules: imported already, with "
            "Flax's."
        )
    finder = _Finder(packages)
    sys.meta_path.insert(0, finder)
    return finder.replaced


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of some packages, to be compiled from a rewritten source."""

    def __init__(self, packages: Collection[str]):
        self.packages = frozenset(packages)
        self.replaced: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        parts = fullname.split(".")
        if self.packages.isdisjoint(".".join(parts[: i + 1]) for i in range(len(parts))):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self.replaced)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, replaced: set[str]):
        super().__init__(name, path)
        self.replaced = replaced

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)  # never from a cache: that is of the source as it was
        source = ast.parse(self.get_data(path), path)
        before = ast.dump(source)
        tree = swapped(source)
        if ast.dump(tree) != before:
            self.replaced.add(fullname)
        return compile(tree, path, "exec", dont_inherit=True)


def swapped(tree: ast.Module) -> ast.Module:
    """Returns a module's source tree with `flax.linen` and `flax.nnx` replaced by ours, where ours
    have the name.
    """
    swap = _Swap()
    tree = swap.visit(tree)
    if swap.uses_attributes:
        imported = ast.Import([ast.alias(f"{_OURS}.{api}") for api in APIS])
        tree.body.insert(_after_future(tree.body), imported)
    return ast.fix_missing_locations(tree)


def _after_future(body: Sequence[ast.stmt]) -> int:
    """Returns the place in a module behind its docstring and its imports from `__future__`."""
    is_head = [
        (isinstance(node, ast.ImportFrom) and node.module == "__future__") or _is_docstring(node)
        for node in body
    ]
    return is_head.index(False) if False in is_head else len(body)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Swap(ast.NodeTransformer):
    """Replaces imports and attributes.

    Attributes:
      uses_attributes: whether the source names an API as an attribute of `flax`.
    """

    def __init__(self) -> None:
        self.uses_attributes = False

    def visit_Import(self, node: ast.Import) -> Any:
        named = {f"flax.{api}": f"{_OURS}.{api}" for api in APIS}
        return ast.Import(
            [ast.alias(named.get(a.name, a.name), a.asname) if a.asname else a for a in node.names]
        )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        api = next((w for w in APIS if f"{node.module}.".startswith(f"flax.{w}.")), None)
        if node.level or (node.module != "flax" and api is None):
            return node
        ours = _OURS if api is None else f"{_OURS}.{api}"
        taken = [a for a in node.names if (a.name in APIS if api is None else _has(ours, a.name))]
        kept = [a for a in node.names if a not in taken]
        parts = (
            ast.ImportFrom(module, names, 0)
            for module, names in ((ours, taken), (node.module, kept))
            if names
        )
        return [ast.copy_location(part, node) for part in parts]

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name) and node.value.id == "flax" and node.attr in APIS:
            self.uses_attributes = True
            return ast.copy_location(
                ast.Attribute(ast.Name(_OURS, ast.Load()), node.attr, node.ctx), node
            )
        return node


def _has(module: str, name: str) -> bool:
    return name == "*" or hasattr(importlib.import_module(module), name)

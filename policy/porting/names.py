"""Meanings of the names of one file: imports, aliases, `functools.partial`, transforms."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from policy.porting.source import PythonFile

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_CAUGHT = ast.ExceptHandler | ast.MatchAs | ast.MatchStar
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_SCOPES = _FUNCTIONS | ast.ClassDef | ast.Module
PARTIALS = ("functools.partial", "jax.tree_util.Partial")
_TRANSFORMS = ("remat", "checkpoint", "vmap", "scan", "jit", "add_metadata_axis", "map_variables")
# A binding is what defines the name: an imported module or object by its dotted name, an
# expression, a parameter, a class of the file, or None for all else.
Binding = str | ast.expr | ast.arg | ast.ClassDef | None
_DTYPES = ("dtype", "param_dtype")


class Names:
    """The bindings of a file's names, by scope.

    Args:
      source: the file.
      moved: the dotted name of an imported name after the port, by its alias.
    """

    def __init__(self, source: PythonFile, moved: Mapping[ast.alias, str]):
        self.source, self.moved = source, moved
        self.bound: dict[tuple[ast.AST, str], list[Binding]] = defaultdict(list)
        self.stars: list[str] = []
        for node in source.nodes:
            for name, binding in self._bindings(node):
                self.bound[self._scope(node), name].append(binding)

    def _bindings(self, node: ast.AST) -> Iterator[tuple[str, Binding]]:
        if isinstance(node, ast.alias):
            yield from self._imported(node)
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, _DEFINITIONS | _CAUGHT) and node.name:
            yield node.name, node if isinstance(node, ast.ClassDef) else None
        elif isinstance(node, ast.Global | ast.Nonlocal):
            for name in node.names:  # bound in two scopes: known in neither
                self.bound[self.source.tree, name].append(None)
                yield name, None
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, _value(self.source.parents[node], node)

    def _imported(self, alias: ast.alias) -> Iterator[tuple[str, Binding]]:
        statement = self.source.parents[alias]
        whole = self.moved.get(alias, alias.name)
        if isinstance(statement, ast.ImportFrom):
            whole = self.moved.get(alias, f"{'.' * statement.level}{statement.module}.{alias.name}")
            if alias.name == "*":
                self.stars.append(whole.removesuffix(".*"))
                return
        elif not alias.asname:
            whole = alias.name.partition(".")[0]
        yield alias.asname or whole.rpartition(".")[2], whole

    def _scope(self, node: ast.AST) -> ast.AST:
        """Returns the scope in which a node binds its name."""
        inner, is_named = node, isinstance(node, ast.Name)
        for scope in self.source.ancestors(node):
            if is_named and isinstance(scope, ast.comprehension) and inner is scope.target:
                return self.source.parents[scope]
            if isinstance(scope, _SCOPES):
                return scope
            inner = scope
        raise AssertionError("every node is in a module")

    def bindings(self, name: ast.Name) -> tuple[list[Binding], ast.AST | None]:
        """Returns the bindings of a name that is read, and the scope; [] and None for none."""
        in_function = False
        for scope in self.source.ancestors(name):
            is_hidden = in_function and isinstance(scope, ast.ClassDef)
            if not is_hidden and (found := self.bound.get((scope, name.id))):
                return found, scope
            in_function |= isinstance(scope, _FUNCTIONS)
        return [], None

    def dotted(self, node: ast.AST | None, seen: frozenset[str] = frozenset()) -> str | None:
        """Returns the dotted name that an expression stands for, or None.

        A partial and a transform of a class stand for the class, and so does a choice of classes
        for one of them. A class of the file that derives from one class stands for it: as
        `flax.linen.Dense:Own` if its code names a dtype, or makes its fields.
        """
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value, seen)
            return base and f"{base}.{node.attr}"
        if isinstance(node, ast.IfExp):
            both = self.dotted(node.body, seen), self.dotted(node.orelse, seen)
            return both[0] if None not in both else None
        if isinstance(node, ast.ClassDef) and len(node.bases) == 1:
            base = self.dotted(node.bases[0], seen)
            return base and (f"{base}:{node.name}" if _has_dtypes(node) else base)
        if isinstance(node, ast.Call):
            maker = self.dotted(node.func, seen) or ""
            if node.args and (maker in PARTIALS or is_transform(maker)):
                return self.dotted(node.args[0], seen)
        if not isinstance(node, ast.Name) or node.id in seen:
            return None
        found, _ = self.bindings(node)
        if not found and len(self.stars) == 1:
            return f"{self.stars[0]}.{node.id}"
        seen |= {node.id}
        names = {b if isinstance(b, str) else self.dotted(b, seen) for b in found}
        return names.pop() if len(names) == 1 else None


def is_transform(name: str) -> bool:
    """Returns whether a function is a transform of Flax's that returns a class like the given."""
    package, _, last = name.rpartition(".")
    return package.startswith(("flax.", "mpmodules.")) and last in _TRANSFORMS


def _value(parent: ast.AST, target: ast.Name) -> ast.expr | None:
    """Returns the expression that a statement gives a name, or None where it is a part of one."""
    is_assigned = isinstance(parent, ast.Assign) and target in parent.targets
    if is_assigned or isinstance(parent, ast.AnnAssign | ast.NamedExpr):
        return parent.value  # type: ignore[union-attr]
    return None


def _has_dtypes(node: ast.ClassDef) -> bool:
    """Returns whether the code of a class names a dtype, or makes an instance in its own way."""
    inside = [each for statement in node.body for each in ast.walk(statement)]
    texts = {getattr(each, name, "") for each in inside for name in ("id", "attr", "arg", "name")}
    return not texts.isdisjoint({*_DTYPES, "__init__", "__post_init__", "__getattr__"})

"""Slots of expressions: the fields, parameters and variables that a dtype is read from."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from policy.porting import dtypes
from policy.porting.definitions import Project, all_parameters, is_self, last_name
from policy.porting.dtypes import DATA, EXTERNAL, Slot
from policy.porting.edits import elements
from policy.porting.sources import ParsedFile, nodes_of


class SlotReader:
    """Reads the slots of expressions.

    Args:
      project: the given files.
      pattern: of the names of fields, parameters and variables to follow.
    """

    def __init__(self, project: Project, pattern: re.Pattern[str]):
        self.project, self._pattern = project, pattern
        self.is_scale = pattern is dtypes.SCALE_NAME

    def follows(self, name: str) -> bool:
        return bool(self._pattern.search(name))

    def constants(self, source: ParsedFile, node: cst.CSTNode) -> set[str]:
        """Returns the names of constant dtypes in an expression."""
        texts = (n.raw_value for n in nodes_of(node) if isinstance(n, cst.SimpleString))
        named = (source.imported(n) for n in nodes_of(node) if isinstance(n, cst.Attribute))
        found = [dtypes.constant(name) for name in (*texts, *named) if name]
        return {name for name in found if name}

    def slots(
        self, source: ParsedFile, node: cst.CSTNode, depth: int = 6
    ) -> frozenset[Slot] | None:
        """Returns the slots that an expression reads if its value is a dtype, or None.

        Of a constant there are none.
        """
        if depth == 0:
            return None
        parts: tuple[cst.CSTNode, ...] = ()
        if isinstance(node, cst.Name):
            return self.of_name(source, node, depth)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(source, node)
        if isinstance(node, cst.SimpleString) and not self.is_scale:
            return frozenset() if node.raw_value in dtypes.FLOATS else None
        if isinstance(node, cst.IfExp):
            parts = node.body, node.orelse
        elif isinstance(node, cst.BooleanOperation):
            parts = node.left, node.right
        elif isinstance(node, cst.Subscript):
            inner = index_of(node)
            if isinstance(inner, cst.SimpleString):
                return frozenset([EXTERNAL]) if self.follows(str(inner.raw_value)) else None
            return None if inner is None else self.slots(source, inner, depth - 1)
        elif isinstance(node, cst.Call):
            return self._of_call(source, node, depth)
        found = [self.slots_or_none(source, part, depth - 1) for part in parts]
        if not found or any(slots is None for slots in found):
            return None
        return frozenset().union(*(slots for slots in found if slots is not None))

    def slots_or_none(
        self, source: ParsedFile, node: cst.CSTNode, depth: int = 6
    ) -> frozenset[Slot] | None:
        is_none = isinstance(node, cst.Name) and node.value == "None"
        return frozenset() if is_none else self.slots(source, node, depth)

    def of_name(self, source: ParsedFile, node: cst.Name, depth: int) -> frozenset[Slot] | None:
        found: set[Slot] = set()
        assignments = [a for a in source.assignments(node) if not self._is_scaled(source, a.node)]
        parameters = [a for a in assignments if isinstance(a.node, cst.Param)]
        for assignment in assignments:
            one = assignment.node
            if isinstance(one, cst.Param):
                slot = self.of_parameter(source, assignment.scope.node, node.value)
                if slot is None:
                    return None
                found.add(slot)
            elif isinstance(one, cst.Name) and not parameters:
                inner = self._of_value(source, one, depth)
                if inner == {DATA}:
                    found.add(DATA)
                elif inner is None or not (self.follows(node.value) or inner):
                    return None
                else:
                    found.add(self.local(source, one))
            elif not isinstance(one, cst.Name):
                known = isinstance(one, cst.ImportFrom) and self.follows(node.value)
                return frozenset([EXTERNAL]) if known else None
        return frozenset(found) or None

    def _is_scaled(self, source: ParsedFile, node: cst.CSTNode) -> bool:
        """Returns whether a name is bound under a test of the dynamic scale."""
        tests = [a.test for a in source.ancestors(node) if self.is_scale and isinstance(a, cst.If)]
        names = [last_name(n) for test in tests for n in nodes_of(test)]
        return any(self.follows(name) for name in names)

    def _of_value(self, source: ParsedFile, target: cst.Name, depth: int) -> frozenset[Slot] | None:
        """Returns the slots that a variable is assigned, None if they are not only dtypes."""
        value = value_of(source, target)
        return None if value is None else self.slots_or_none(source, value, depth - 1)

    def local(self, source: ParsedFile, target: cst.Name) -> Slot:
        """Returns the slot of an assigned variable: of the parameter, if it is one."""
        name = target.value
        scope = source.assignments(target)[0].scope if source.assignments(target) else None
        owner = getattr(scope, "node", None)
        parameters = all_parameters(owner) if isinstance(owner, cst.FunctionDef) else []
        slot = None
        if owner is not None and name in [param.name.value for param in parameters]:
            slot = self.of_parameter(source, owner, name)
        return slot or ("local", str(id(scope)), name)

    def of_parameter(self, source: ParsedFile, function: cst.CSTNode, name: str) -> Slot | None:
        if not isinstance(function, cst.FunctionDef) or not self.follows(name):
            return None
        if function.name.value == "__init__" and (owner := source.class_of(function)):
            return self.field(owner, name)
        return ("argument", function.name.value, name)

    def field(self, class_name: str, name: str) -> Slot:
        return ("field", self.project.owner(class_name, name) or class_name, name)

    def _of_attribute(self, source: ParsedFile, node: cst.Attribute) -> frozenset[Slot] | None:
        name, base = node.attr.value, node.value
        imported = source.imported(node)
        if imported:
            is_constant = dtypes.constant(imported) is not None
            return frozenset() if is_constant and not self.is_scale else None
        if not self.follows(name):
            return None
        if is_self(base):
            owner = self.project.owner(source.class_of(node) or "", name)
            return frozenset([("field", owner, name)]) if owner else None
        is_config = bool(dtypes.CONFIGS.search(last_name(base)))
        classes = self.project.classes_of(source, base)
        owners = {o for c in classes if (o := self.project.owner(c, name))}
        if not owners and name == "dtype" and not is_config:
            return frozenset([DATA])
        if not owners:
            is_model = last_name(base).lower().endswith(("model", "module"))
            named = [d for o in self.project.owners(name) for d in self.project.classes(o)]
            same = [d for d in named if self.project.is_flax_class(d) == is_model]
            owners = {self.field(definition.name, name)[1] for definition in same}
        return frozenset(("field", owner, name) for owner in owners) or frozenset([EXTERNAL])

    def _of_call(self, source: ParsedFile, node: cst.Call, depth: int) -> frozenset[Slot] | None:
        name = last_name(node.func)
        if self.is_scale:
            return frozenset() if name == "DynamicScale" else None
        values = [arg.value for arg in node.args]
        if name in ("dtype", "canonicalize_dtype", "result_type", "promote_types") and values:
            found = [self.slots_or_none(source, value, depth - 1) for value in values]
            if any(slots is None for slots in found):
                return frozenset([DATA]) if source.imported(node.func) else None
            return frozenset().union(*(slots for slots in found if slots is not None))
        if name == "field":
            given = [arg for arg in node.args if arg.keyword is not None]
            defaults = [arg.value for arg in given if arg.keyword.value == "default"]  # type: ignore
            return self.slots_or_none(source, defaults[0], depth - 1) if defaults else None
        if name == "next" and values and isinstance(values[0], cst.GeneratorExp):
            return self.slots(source, values[0].elt, depth - 1)
        if name == "getattr" and len(values) > 1 and source.imported(values[0]):
            return self.slots_or_none(source, values[1], depth - 1)
        if name == "get" and values and isinstance(values[0], cst.SimpleString):
            return frozenset([EXTERNAL]) if self.follows(str(values[0].raw_value)) else None
        if any(self.slots(source, value, depth - 1) for value in values):
            return None
        is_known = self.follows(name) and name != "promote_dtype"
        return frozenset() if is_known and not isinstance(node.func, cst.Call) else None


def pairs(
    statement: cst.Assign | cst.AnnAssign,
) -> Iterator[tuple[cst.BaseExpression, cst.BaseExpression | None, tuple[cst.CSTNode, ...]]]:
    """Yields targets, their values, and the nodes to remove with them in place of the statement."""
    if isinstance(statement, cst.AnnAssign):
        yield statement.target, statement.value, ()
        return
    for part in statement.targets:
        target, both = part.target, elements(part.target, statement.value)
        if both is None:
            yield target, statement.value, (part,) if len(statement.targets) > 1 else ()
        for one, value in both or ():
            yield one.value, value.value, (one, value)


def index_of(node: cst.Subscript) -> cst.BaseExpression | None:
    """Returns the index of ``x[index]``, or None of a slice."""
    index = node.slice[0].slice
    return index.value if isinstance(index, cst.Index) else None


def value_of(source: ParsedFile, target: cst.Name) -> cst.BaseExpression | None:
    """Returns the value that an assignment gives to a variable, or None."""
    statement = source.enclosing(target, cst.Assign, cst.AnnAssign, cst.SimpleStatementLine)
    if not isinstance(statement, (cst.Assign, cst.AnnAssign)):
        return None
    return next((value for one, value, _ in pairs(statement) if one is target), None)

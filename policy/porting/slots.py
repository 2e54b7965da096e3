"""Slots of expressions: the fields, parameters and variables that a dtype is read from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import libcst as cst

from policy.porting import dtypes
from policy.porting.definitions import Project
from policy.porting.dtypes import DATA, EXTERNAL, Slot
from policy.porting.sources import ParsedFile
from policy.porting.syntax import index_of, is_self, keyword_of, last_name, nodes_of

Slots = frozenset[Slot] | None  # of an expression; None if its value is no dtype


class SlotReader(Project):
    """Reads the slots of expressions.

    Args:
      sources: the given files.
      pattern: of the names of fields, parameters and variables to follow.
    """

    def __init__(self, sources: Sequence[ParsedFile], pattern: str):
        super().__init__(sources)
        self._pattern, self.is_scale = pattern, pattern == dtypes.SCALE_NAME

    def follows(self, name: str) -> bool:
        return bool(re.search(self._pattern, name))

    def constants(self, node: cst.CSTNode) -> set[str]:
        """Returns the names of constant dtypes in an expression."""
        nodes = list(nodes_of(node))
        names = [str(n.raw_value) for n in nodes if isinstance(n, cst.SimpleString)]
        names += [self.imported(n) for n in nodes if isinstance(n, cst.Attribute)]
        return {found for name in names if name and (found := dtypes.constant(name))}

    def slots(self, node: cst.CSTNode, depth: int = 6) -> Slots:
        """Returns the slots that an expression reads if its value is a dtype, or None.

        Of a constant, and of None, there are none.
        """
        if depth == 0:
            return None
        if isinstance(node, cst.Name):
            return frozenset() if node.value == "None" else self.of_name(node, depth)
        if isinstance(node, cst.Attribute):
            return self._of_attribute(node)
        if isinstance(node, cst.Call):
            return self._of_call(node, depth)
        if isinstance(node, cst.SimpleString) and not self.is_scale:
            return frozenset() if node.raw_value in dtypes.FLOATS else None
        if isinstance(node, cst.IfExp):
            return self._of_parts((node.body, node.orelse), depth)
        if isinstance(node, cst.BooleanOperation):
            return self._of_parts((node.left, node.right), depth)
        inner = index_of(node) if isinstance(node, cst.Subscript) else None
        if isinstance(inner, cst.SimpleString):
            return self._of_key(inner)
        if inner is None or last_name(inner) == "None":  # an axis
            return None
        return self.slots(inner, depth - 1)

    def _of_parts(self, parts: Iterable[cst.CSTNode], depth: int) -> Slots:
        """Returns the slots of all parts, or None if one is no dtype."""
        found = [self.slots(part, depth - 1) for part in parts]
        known = [slots for slots in found if slots is not None]
        return frozenset[Slot]().union(*known) if len(known) == len(found) else None

    def _of_key(self, key: cst.SimpleString) -> Slots:
        return frozenset([EXTERNAL]) if self.follows(str(key.raw_value)) else None

    def of_name(self, node: cst.Name, depth: int) -> Slots:
        found: set[Slot] = set()
        assignments = [a for a in self.assignments(node) if not self._is_scaled(a.node)]
        is_parameter = any(isinstance(a.node, cst.Param) for a in assignments)
        for assignment in assignments:
            one = assignment.node
            if isinstance(one, cst.Param):
                slot = self.of_parameter(assignment.scope.node, node.value)
                if slot is None:
                    return None
                found.add(slot)
            elif not isinstance(one, cst.Name):
                known = isinstance(one, cst.ImportFrom) and self.follows(node.value)
                return frozenset([EXTERNAL]) if known else None
            elif not is_parameter:
                value = self.value_of(one)
                inner = None if value is None else self.slots(value, depth - 1)
                if inner is None or not (self.follows(node.value) or inner):
                    return None
                found.add(DATA if inner == {DATA} else self.local(one))
        return frozenset(found) or None

    def _is_scaled(self, node: cst.CSTNode) -> bool:
        """Returns whether a name is bound under a test of the dynamic scale."""
        tests = [a.test for a in self.ancestors(node) if self.is_scale and isinstance(a, cst.If)]
        return any(self.follows(last_name(n)) for test in tests for n in nodes_of(test))

    def local(self, target: cst.Name) -> Slot:
        """Returns the slot of an assigned variable: of the parameter, if it is one."""
        bound, name = self.assignments(target), target.value
        scope = bound[0].scope if bound else None
        is_parameter = any(isinstance(one.node, cst.Param) for one in bound)
        slot = self.of_parameter(getattr(scope, "node", None), name) if is_parameter else None
        return slot or ("local", str(id(scope)), name)

    def of_parameter(self, function: object, name: str) -> Slot | None:
        if not isinstance(function, cst.FunctionDef) or not self.follows(name):
            return None
        if function.name.value == "__init__" and (owner := self.class_of(function)):
            return self.field(owner, name)
        return ("argument", function.name.value, name)

    def field(self, class_name: str, name: str) -> Slot:
        return ("field", self.owner(class_name, name) or class_name, name)

    def _of_attribute(self, node: cst.Attribute) -> Slots:
        name, base, imported = node.attr.value, node.value, self.imported(node)
        if imported:
            is_constant = dtypes.constant(imported) is not None
            return frozenset() if is_constant and not self.is_scale else None
        if not self.follows(name):
            return None
        owners = [o for c in self.classes_of(base) if (o := self.owner(c, name))]
        if owners or is_self(base):
            return frozenset(("field", owner, name) for owner in owners) or None
        if name == "dtype" and not dtypes.CONFIGS.search(last_name(base)):
            return frozenset([DATA])
        is_model = dtypes.is_model(last_name(base))
        named = [d for owner in self.owners(name) for d in self.classes(owner)]
        same = [d for d in named if self.is_flax_class(d) == is_model]
        return frozenset(self.field(d.name, name) for d in same) or frozenset([EXTERNAL])

    def _of_call(self, node: cst.Call, depth: int) -> Slots:
        name = last_name(node.func)
        if self.is_scale:
            return frozenset() if name == "DynamicScale" else None
        values = [arg.value for arg in node.args]
        if name in ("dtype", "canonicalize_dtype", "result_type", "promote_types") and values:
            found = self._of_parts(values, depth)
            return frozenset([DATA]) if found is None and self.imported(node.func) else found
        if name == "field":
            defaults = [arg.value for arg in node.args if keyword_of(arg) == "default"]
            return self.slots(defaults[0], depth - 1) if defaults else None
        if name == "next" and values and isinstance(values[0], cst.GeneratorExp):
            return self.slots(values[0].elt, depth - 1)
        if name == "getattr" and len(values) > 1 and self.imported(values[0]):
            return self.slots(values[1], depth - 1)
        if name == "get" and values and isinstance(values[0], cst.SimpleString):
            return self._of_key(values[0])
        if isinstance(node.func, cst.Call) or not self.follows(name) or name == "promote_dtype":
            return None
        return None if any(self.slots(value, depth - 1) for value in values) else frozenset()

"""Operands of casts: whether an expression is known to be an array of floats."""

from __future__ import annotations

import libcst as cst

from policy.porting import dtypes
from policy.porting.definitions import Project, assigned, is_self, last_name
from policy.porting.sources import ParsedFile


def is_float_array(project: Project, source: ParsedFile, node: cst.CSTNode, depth: int = 8) -> bool:
    """Returns whether an expression is a floating-point array of JAX for any input of a model."""
    if depth == 0:
        return False

    def inner(one: cst.CSTNode) -> bool:
        return is_float_array(project, source, one, depth - 1)

    if isinstance(node, cst.BinaryOperation):
        return inner(node.left) or inner(node.right)
    if isinstance(node, (cst.UnaryOperation, cst.Subscript)):
        return inner(node.expression if isinstance(node, cst.UnaryOperation) else node.value)
    if isinstance(node, cst.IfExp):
        return inner(node.body) and inner(node.orelse)
    if isinstance(node, cst.Attribute):
        if is_self(node.value):
            return _made_by(source, node) in ("Param", "param")
        return dtypes.keeps_floats(node.attr.value) and inner(node.value)
    if isinstance(node, cst.Call):
        return _is_float_call(project, source, node, depth)
    if isinstance(node, cst.Name):
        return _is_float_name(project, source, node, depth)
    return False


def is_variable(source: ParsedFile, node: cst.CSTNode) -> bool:
    """Returns whether an expression is an `nnx.Param`, an attribute of `self`."""
    return isinstance(node, cst.Attribute) and _made_by(source, node) == "Param"


def _made_by(source: ParsedFile, node: cst.Attribute) -> str:
    """Returns the name of the function that an attribute of `self` is made by, or ``""``."""
    for statement in _statements(source.enclosing(node, cst.ClassDef)):
        for target in assigned(statement):
            if last_name(target) == node.attr.value and isinstance(target, cst.Attribute):
                value = getattr(statement, "value", None)
                return last_name(value.func) if isinstance(value, cst.Call) else ""
    return ""


def _statements(owner: cst.ClassDef | None) -> list[cst.CSTNode]:
    found: list[cst.CSTNode] = []
    stack: list[cst.CSTNode] = [owner] if owner is not None else []
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children if not isinstance(node, cst.BaseExpression) else []
    return found


def _is_float_call(project: Project, source: ParsedFile, node: cst.Call, depth: int) -> bool:
    def inner(one: cst.CSTNode) -> bool:
        return is_float_array(project, source, one, depth - 1)

    name, values = last_name(node.func), [arg.value for arg in node.args]
    imported = source.imported(node.func)
    if imported.startswith(("jax.", "flax.", "mpmodules.")):
        creator = dtypes.CREATORS.get(name)
        if creator and len(values) <= creator and all(arg.keyword is None for arg in node.args):
            return True
        if dtypes.makes_floats(name):
            return True
        first = values[0] if values else None
        if isinstance(first, (cst.List, cst.Tuple)):
            return any(inner(element.value) for element in first.elements)
        if name == "where":
            return any(inner(value) for value in values[1:])
        return first is not None and dtypes.keeps_floats(name) and inner(first)
    if isinstance(node.func, cst.Attribute):
        base = node.func.value
        if is_self(base) and name == "param":
            return True
        if name in ("astype", "mean", "std", "var") and not values:
            return inner(base)
        if dtypes.keeps_floats(name) and inner(base):
            return True
    if isinstance(node.func, cst.Call):
        name = last_name(node.func.func)
        return bool(project.targets(source, node.func.func)) and "mask" not in name
    return not imported and not project.definitions.get(name) and project.is_module(name)


def _is_float_name(project: Project, source: ParsedFile, node: cst.Name, depth: int) -> bool:
    """Looks at the assignments before a use, back to one that is always executed."""
    line = source.order(node)
    assignments = source.assignments(node)
    blocks = {id(a) for a in source.ancestors(node) if isinstance(a, cst.BaseSuite | cst.Module)}
    before = [a.node for a in assignments if isinstance(a.node, cst.Name)]
    before = [n for n in before if source.order(n) < line]
    for target in sorted(before, key=source.order, reverse=True):
        statement = source.enclosing(target, cst.Assign, cst.AnnAssign, cst.AugAssign)
        if isinstance(statement, cst.AugAssign):
            continue
        value = getattr(statement, "value", None)
        if value is None or not is_float_array(project, source, value, depth - 1):
            return False
        suite = source.enclosing(target, cst.BaseSuite, cst.Module)
        if id(suite) in blocks:
            return True
    parameters = [a.node for a in assignments if isinstance(a.node, cst.Param)]
    return bool(parameters) and bool(dtypes.FLOAT_PARAMETERS.fullmatch(node.value))


def float32_of(source: ParsedFile) -> cst.BaseExpression | None:
    """Returns ``jnp.float32`` by the name that a file imports `jax.numpy` by, or None."""
    for statement in source.module.body:
        if not isinstance(statement, cst.SimpleStatementLine):
            continue
        for one in statement.body:
            if isinstance(one, (cst.Import, cst.ImportFrom)) and not isinstance(
                one.names, cst.ImportStar
            ):
                for alias in one.names:
                    known = alias.evaluated_alias or alias.evaluated_name
                    if isinstance(one, cst.Import):
                        is_numpy = alias.evaluated_name == "jax.numpy"
                    else:
                        module = source.module.code_for_node(one.module) if one.module else ""
                        is_numpy = (module, alias.evaluated_name) == ("jax", "numpy")
                    if is_numpy:
                        return cst.parse_expression(f"{known}.float32")
    return None

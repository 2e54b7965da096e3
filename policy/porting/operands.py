"""Operands of casts: whether an expression is known to be an array of floats."""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst

from policy.porting import dtypes
from policy.porting.definitions import Project, assigned, is_self, last_name
from policy.porting.slots import value_of
from policy.porting.sources import ParsedFile, nodes_of

_NO_FLOATS = re.compile(
    "cache|image|pixel|token|mask|index|indices|ids|label|position|segment|bool", re.IGNORECASE
)
# functions whose operands a policy takes in float32, and what may stand between
_REDUCTIONS = ("mean", "var", "std", "softmax", "log_softmax", "logsumexp")
_BETWEEN = ("square", "power")
_PRODUCTS = ("einsum", "dot", "matmul", "tensordot", "multiply")


def is_float_array(project: Project, source: ParsedFile, node: cst.CSTNode, depth: int = 8) -> bool:
    """Returns whether an expression is a floating-point array of JAX for any input of a model."""
    if depth == 0:
        return False

    def inner(one: cst.CSTNode) -> bool:
        return is_float_array(project, source, one, depth - 1)

    if isinstance(node, cst.BinaryOperation):
        sides = [node.left, node.right]
        made = [source.imported(side.func) for side in sides if isinstance(side, cst.Call)]
        is_quotient = isinstance(node.operator, cst.Divide) and is_of_model(project, source, node)
        return (is_quotient and any(m.startswith("jax.") for m in made)) or any(map(inner, sides))
    if isinstance(node, (cst.UnaryOperation, cst.Subscript)):
        return inner(node.expression if isinstance(node, cst.UnaryOperation) else node.value)
    if isinstance(node, cst.IfExp):
        return inner(node.body) and inner(node.orelse)
    if isinstance(node, cst.Attribute):
        if is_self(node.value):
            return _made_by(source, node) in ("Param", "param", "param_with_axes")
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
            value = getattr(statement, "value", None)
            is_same = isinstance(target, cst.Attribute) and target.attr.value == node.attr.value
            if value is not None and is_same and last_name(value) != "None":
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
    if name == "param_with_axes":
        return True
    if imported.startswith(("jax.", "flax.", "mpmodules.")):
        creator = dtypes.CREATORS.get(name)
        if creator and len(values) <= creator and all(arg.keyword is None for arg in node.args):
            return True
        if dtypes.makes_floats(name):
            return True
        if name == "full" and all(arg.keyword is None for arg in node.args):
            return len(values) == 2 and _is_float_number(source, values[1])
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
        if name in ("mean", "std", "var") and not values:
            return inner(base)
        if name == "astype" and dtypes.constant(source.imported(values[0])) in dtypes.FLOATS:
            return True
        if dtypes.keeps_floats(name) and inner(base):
            return True
    if isinstance(node.func, cst.Call):
        name = last_name(node.func.func)
        return bool(project.targets(source, node.func.func)) and "mask" not in name
    if given := [] if imported else project.definitions.get(name, []):
        returned = [(d.source, value) for d in given for value in d.returned()]
        return bool(returned) and all(
            is_float_array(project, where, value, depth - 1) for where, value in returned
        )
    return not imported and (project.is_module(name) or _is_module_field(project, source, node))


def _is_float_number(source: ParsedFile, node: cst.CSTNode) -> bool:
    """Returns whether an expression is a literal, or of ``jnp.finfo``, or a variable of these."""
    if isinstance(node, cst.UnaryOperation):
        return _is_float_number(source, node.expression)
    if isinstance(node, cst.Name):
        values = [value_of(source, a.node) for a in source.assignments(node)]
        known = [v for v in values if v is not None and not isinstance(v, cst.Name)]
        return bool(values) and known == values and all(_is_float_number(source, v) for v in known)
    call = node.value if isinstance(node, cst.Attribute) else None
    is_limit = isinstance(call, cst.Call) and last_name(call.func) == "finfo"
    return isinstance(node, cst.Float) or is_limit


def _is_module_field(project: Project, source: ParsedFile, node: cst.Call) -> bool:
    """Returns whether a call is of a field of `self` that is annotated as a module."""
    if not isinstance(node.func, cst.Attribute) or not is_self(node.func.value):
        return False
    found = project.annotations(source, node.func)
    return bool(found) and all(last_name(one).endswith("Module") for one in found)


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
        value = value_of(source, target) or getattr(statement, "value", None)
        if value is None or not is_float_array(project, source, value, depth - 1):
            return False
        suite = source.enclosing(target, cst.BaseSuite, cst.Module)
        if id(suite) in blocks:
            return True
    if not any(isinstance(a.node, cst.Param) for a in assignments):
        return bool(before)
    is_annotated = any(_is_float_annotation(one) for one in project.annotations(source, node))
    return is_annotated or bool(dtypes.FLOAT_PARAMETERS.fullmatch(node.value))


def _is_float_annotation(node: cst.BaseExpression) -> bool:
    """Returns whether an annotation of jaxtyping's names floats and nothing else."""
    kinds = {n.value for n in nodes_of(node) if isinstance(n, cst.Name)}
    return "Float" in kinds and not kinds & {"Int", "UInt", "Integer", "Bool", "Num", "Shaped"}


# --------------------------------------------------------------------------------------------------
# Code of models
# --------------------------------------------------------------------------------------------------


def is_of_model(project: Project, source: ParsedFile, node: cst.CSTNode) -> bool:
    """Returns whether code is a module's, or that of a function that modules call."""
    if any(map(project.is_flax_class, project.classes(source.class_of(node) or ""))):
        return True
    function = source.enclosing(node, cst.FunctionDef)
    return function is not None and function.name.value in project.called_by_modules


def may_be_integer(project: Project, source: ParsedFile, node: cst.CSTNode) -> bool:
    """Returns whether an expression, or the values of a variable, are named like integers."""
    if isinstance(node, cst.Name) and dtypes.FLOAT_PARAMETERS.fullmatch(node.value):
        return False
    bound = source.assignments(node) if isinstance(node, cst.Name) else []
    values = [value_of(source, a.node) for a in bound if isinstance(a.node, cst.Name)]
    for one in [value for value in values if value is not None] or [node]:
        array = one
        if isinstance(one, cst.Attribute) and one.attr.value == "dtype":
            array = one.value
        if _NO_FLOATS.search(source.code(one)) and not is_float_array(project, source, array):
            return True
    return False


def is_reduced(source: ParsedFile, node: cst.CSTNode) -> bool:
    """Returns whether a value is used by means, variances and softmaxes alone."""

    def inner(one: cst.CSTNode) -> bool:
        return is_reduced(source, one)

    parent = source.parent(node)
    if isinstance(parent, cst.Arg):
        call = source.parent(parent)
        name = last_name(call.func) if isinstance(call, cst.Call) else ""
        return name in _REDUCTIONS or (name in _BETWEEN and inner(call))
    if isinstance(parent, cst.BinaryOperation) and isinstance(parent.operator, cst.Power):
        return inner(parent)
    if isinstance(parent, cst.Attribute) and isinstance(source.parent(parent), cst.Call):
        return parent.attr.value in ("mean", "var", "std")
    return _all_uses(source, node, inner)


def is_promoted(project: Project, source: ParsedFile, node: cst.CSTNode) -> bool:
    """Returns whether a value is used by products with floats alone, which promote integers."""
    parent, others = source.parent(node), []
    if isinstance(parent, cst.Arg) and isinstance(call := source.parent(parent), cst.Call):
        if last_name(call.func) in _PRODUCTS:
            others = [arg.value for arg in call.args if arg is not parent]
    elif isinstance(parent, cst.BinaryOperation):
        others = [parent.left if parent.right is node else parent.right]
    if others:
        return any(is_float_array(project, source, other) for other in others)
    return _all_uses(source, node, lambda use: is_promoted(project, source, use))


def _all_uses(source: ParsedFile, node: cst.CSTNode, holds: Callable[[cst.CSTNode], bool]) -> bool:
    """Returns whether a value is assigned to a variable all of whose uses hold a condition."""
    parent = source.parent(node)
    if not isinstance(parent, cst.Assign) or not isinstance(parent.targets[0].target, cst.Name):
        return False
    uses = source.reads(parent.targets[0].target)
    return bool(uses) and all(map(holds, uses))


def float32_of(source: ParsedFile) -> cst.BaseExpression | None:
    """Returns ``jnp.float32`` by the name that a file imports `jax.numpy` by, or None."""
    for line in source.module.body:
        for one in getattr(line, "body", ()):
            if not isinstance(one, (cst.Import, cst.ImportFrom)):
                continue
            is_from = isinstance(one, cst.ImportFrom) and one.module is not None
            module = f"{source.code(one.module)}." if is_from else ""  # type: ignore[arg-type]
            names = () if isinstance(one.names, cst.ImportStar) else one.names
            for alias in names:
                if module + alias.evaluated_name == "jax.numpy":
                    known = alias.evaluated_alias or alias.evaluated_name
                    return cst.parse_expression(f"{known}.float32")
    return None

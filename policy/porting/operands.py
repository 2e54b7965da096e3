"""Operands of casts: whether an expression is known to be an array of floats."""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst

from policy.porting import dtypes
from policy.porting.definitions import Project
from policy.porting.syntax import is_self, last_name, nodes_of, own_attributes

Test = Callable[[cst.CSTNode], bool]
_NO_FLOATS = "(?i)cache|image|pixel|token|mask|index|indices|ids|label|position|segment|bool"
# functions whose operands a policy takes in float32, and what may stand between
_REDUCTIONS = ("mean", "var", "std", "softmax", "log_softmax", "logsumexp")
_BETWEEN = ("square", "power")
_PRODUCTS = ("einsum", "dot", "matmul", "tensordot", "multiply")


def is_float_array(project: Project, node: cst.CSTNode, depth: int = 8) -> bool:
    """Returns whether an expression is a floating-point array of JAX for any input of a model."""
    if depth == 0:
        return False

    def inner(one: cst.CSTNode) -> bool:
        return is_float_array(project, one, depth - 1)

    if isinstance(node, cst.BinaryOperation):
        sides = [node.left, node.right]
        made = [project.imported(side.func) for side in sides if isinstance(side, cst.Call)]
        is_quotient = isinstance(node.operator, cst.Divide) and is_of_model(project, node)
        return (is_quotient and any(m.startswith("jax.") for m in made)) or any(map(inner, sides))
    if isinstance(node, (cst.UnaryOperation, cst.Subscript)):
        return inner(node.expression if isinstance(node, cst.UnaryOperation) else node.value)
    if isinstance(node, cst.IfExp):
        return inner(node.body) and inner(node.orelse)
    if isinstance(node, cst.Attribute):
        if is_self(node.value):
            return _made_by(project, node) in ("Param", "param", "param_with_axes")
        return bool(re.fullmatch(dtypes.KEEPS_FLOATS, node.attr.value)) and inner(node.value)
    if isinstance(node, cst.Call):
        return _is_float_call(project, node, inner)
    return isinstance(node, cst.Name) and _is_float_name(project, node, inner)


def is_variable(project: Project, node: cst.CSTNode) -> bool:
    """Returns whether an expression is an `nnx.Param`, an attribute of `self`."""
    return isinstance(node, cst.Attribute) and _made_by(project, node) == "Param"


def _made_by(project: Project, node: cst.Attribute) -> str:
    """Returns the name of the function that an attribute of `self` is made by, or ``""``."""
    owner = project.enclosing(node, cst.ClassDef)
    own = own_attributes(owner) if owner is not None else []
    given = [statement.value for name, statement in own if name == node.attr.value]
    values = [value for value in given if value is not None and last_name(value) != "None"]
    return last_name(values[-1].func) if values and isinstance(values[-1], cst.Call) else ""


def _is_float_call(project: Project, node: cst.Call, is_float: Test) -> bool:
    name, values = last_name(node.func), [arg.value for arg in node.args]
    imported, by_position = project.imported(node.func), not any(arg.keyword for arg in node.args)
    keeps = re.fullmatch(dtypes.KEEPS_FLOATS, name) is not None
    if name == "param_with_axes":
        return True
    if imported.startswith(("jax.", "flax.", "mpmodules.")):
        first = values[0] if values else None
        is_default = by_position and len(values) <= dtypes.CREATORS.get(name, -1)
        if is_default or re.fullmatch(dtypes.MAKES_FLOATS, name):
            return True
        if name == "full" and by_position:
            return len(values) == 2 and _is_float_number(project, values[1])
        if isinstance(first, (cst.List, cst.Tuple)):
            return any(is_float(element.value) for element in first.elements)
        if name == "where":
            return any(map(is_float, values[1:]))
        return first is not None and keeps and is_float(first)
    if isinstance(node.func, cst.Attribute):
        base = node.func.value
        if name in ("mean", "std", "var") and not values:
            return is_float(base)
        given = dtypes.constant(project.imported(values[0])) if name == "astype" else None
        if given in dtypes.FLOATS or (name == "param" and is_self(base)):
            return True
        if keeps and is_float(base):
            return True
    if isinstance(node.func, cst.Call):
        maker = node.func.func
        return bool(project.targets(maker)) and "mask" not in last_name(maker)
    if imported:
        return False
    if project.definitions.get(name):
        returned = [value for one in project.definitions[name] for value in one.returned()]
        return bool(returned) and all(map(is_float, returned))
    return project.is_module(name) or _is_module_field(project, node.func)


def _is_float_number(project: Project, node: cst.CSTNode) -> bool:
    """Returns whether an expression is a literal, or of ``jnp.finfo``, or a variable of these."""
    if isinstance(node, cst.UnaryOperation):
        return _is_float_number(project, node.expression)
    if isinstance(node, cst.Name):
        values = [project.value_of(a.node) for a in project.assignments(node)]
        known = [v for v in values if v is not None and not isinstance(v, cst.Name)]
        return bool(values) and known == values and all(_is_float_number(project, v) for v in known)
    call = node.value if isinstance(node, cst.Attribute) else None
    is_limit = isinstance(call, cst.Call) and last_name(call.func) == "finfo"
    return isinstance(node, cst.Float) or is_limit


def _is_module_field(project: Project, node: cst.BaseExpression) -> bool:
    """Returns whether an expression is a field of `self` that is annotated as a module."""
    if not isinstance(node, cst.Attribute) or not is_self(node.value):
        return False
    found = project.annotations(node)
    return bool(found) and all(last_name(one).endswith("Module") for one in found)


def _is_float_name(project: Project, node: cst.Name, is_float: Test) -> bool:
    """Looks at the assignments before a use, back to one that is always executed."""
    bound = [a.node for a in project.assignments(node)]
    line, above = project.line(node), set(project.ancestors(node))
    before = [n for n in bound if isinstance(n, cst.Name) and project.line(n) < line]
    for target in sorted(before, key=project.line, reverse=True):
        statement = project.enclosing(target, cst.Assign, cst.AnnAssign, cst.AugAssign)
        if isinstance(statement, cst.AugAssign):
            continue
        value = project.value_of(target) or getattr(statement, "value", None)
        if value is None or not is_float(value):
            return False
        if project.enclosing(target, cst.BaseSuite, cst.Module) in above:
            return True
    if not any(isinstance(one, cst.Param) for one in bound):
        return bool(before)
    is_annotated = any(map(_is_float_annotation, project.annotations(node)))
    return is_annotated or bool(dtypes.FLOAT_PARAMETERS.fullmatch(node.value))


def _is_float_annotation(node: cst.BaseExpression) -> bool:
    """Returns whether an annotation of jaxtyping's names floats and nothing else."""
    kinds = {n.value for n in nodes_of(node) if isinstance(n, cst.Name)}
    return "Float" in kinds and not kinds & {"Int", "UInt", "Integer", "Bool", "Num", "Shaped"}


# --------------------------------------------------------------------------------------------------
# Code of models
# --------------------------------------------------------------------------------------------------


def is_of_model(project: Project, node: cst.CSTNode) -> bool:
    """Returns whether code is a module's, or that of a function that modules call."""
    if any(map(project.is_flax_class, project.own_classes(node))):
        return True
    return project.around(node, cst.FunctionDef) in project.called_by_modules


def may_be_integer(project: Project, node: cst.CSTNode) -> bool:
    """Returns whether an expression, or the values of a variable, are named like integers."""
    values = []
    if isinstance(node, cst.Name):
        if dtypes.FLOAT_PARAMETERS.fullmatch(node.value):
            return False
        values = [project.value_of(a.node) for a in project.assignments(node)]
    for one in [value for value in values if value is not None] or [node]:
        array = one
        if isinstance(one, cst.Attribute) and one.attr.value == "dtype":
            array = one.value
        if re.search(_NO_FLOATS, project.code(one)) and not is_float_array(project, array):
            return True
    return False


def is_reduced(project: Project, node: cst.CSTNode) -> bool:
    """Returns whether a value is used by means, variances and softmaxes alone."""

    def inner(one: cst.CSTNode) -> bool:
        return is_reduced(project, one)

    parent = project.parent(node)
    above = project.parent(parent)
    if isinstance(parent, cst.Arg):
        name = last_name(above.func) if isinstance(above, cst.Call) else ""
        return name in _REDUCTIONS or (name in _BETWEEN and inner(above))
    if isinstance(parent, cst.BinaryOperation) and isinstance(parent.operator, cst.Power):
        return inner(parent)
    if isinstance(parent, cst.Attribute) and isinstance(above, cst.Call):
        return parent.attr.value in ("mean", "var", "std")
    return _all_uses(project, node, inner)


def is_promoted(project: Project, node: cst.CSTNode) -> bool:
    """Returns whether a value is used by products with floats alone, which promote integers."""
    parent, others = project.parent(node), []
    call = project.parent(parent)
    if isinstance(parent, cst.Arg) and isinstance(call, cst.Call):
        if last_name(call.func) in _PRODUCTS:
            others = [arg.value for arg in call.args if arg is not parent]
    elif isinstance(parent, cst.BinaryOperation):
        others = [parent.left if parent.right is node else parent.right]
    if others:
        return any(is_float_array(project, other) for other in others)
    return _all_uses(project, node, lambda use: is_promoted(project, use))


def _all_uses(project: Project, node: cst.CSTNode, holds: Test) -> bool:
    """Returns whether a value is assigned to a variable all of whose uses hold a condition."""
    parent = project.parent(node)
    if not isinstance(parent, cst.Assign) or not isinstance(parent.targets[0].target, cst.Name):
        return False
    uses = project.reads(parent.targets[0].target)
    return bool(uses) and all(map(holds, uses))

"""Parts of nodes: names, targets and values of assignments, parameters, texts."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst


def nodes_of(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields a node and all nodes below it."""
    stack = [node]
    while stack:
        yield (one := stack.pop())
        stack += reversed(one.children)


def last_name(node: cst.CSTNode) -> str:
    while isinstance(node, cst.Subscript):
        node = node.value
    node = node.attr if isinstance(node, cst.Attribute) else node
    return node.value if isinstance(node, cst.Name) else ""


def is_self(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "self"


def index_of(node: cst.Subscript) -> cst.BaseExpression | None:
    """Returns the index of ``x[index]``, or None of a slice."""
    index = node.slice[0].slice
    return index.value if isinstance(index, cst.Index) else None


def text_of(statement: cst.CSTNode | None) -> cst.SimpleString | None:
    """Returns the text of a statement that is nothing else, as a docstring, or None."""
    inner = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
    value = inner.value if isinstance(inner, cst.Expr) else None
    return value if isinstance(value, cst.SimpleString) else None


# --------------------------------------------------------------------------------------------------
# Assignments
# --------------------------------------------------------------------------------------------------


def assigned(statement: cst.CSTNode) -> list[cst.BaseExpression]:
    """Returns the targets of an assignment; none of other statements."""
    if isinstance(statement, cst.Assign):
        return [target.target for target in statement.targets]
    return [statement.target] if isinstance(statement, cst.AnnAssign) else []


Pairs = list[tuple[cst.BaseElement, cst.BaseElement]]
Binding = tuple[cst.BaseExpression, cst.BaseExpression, tuple[cst.CSTNode, ...]]


def elements(target: cst.BaseExpression, value: cst.BaseExpression) -> Pairs:
    """Returns the pairs of ``a, b = c, d``; none of another assignment."""
    sides = [side.elements for side in (target, value) if isinstance(side, cst.Tuple)]
    is_paired = len(sides) == 2 and len(sides[0]) == len(sides[1])
    return list(zip(*sides, strict=True)) if is_paired else []


def pairs(statement: cst.CSTNode | None) -> Iterator[Binding]:
    """Yields targets, their values, and the nodes to remove with them in place of the statement."""
    if isinstance(statement, cst.AnnAssign) and statement.value is not None:
        yield statement.target, statement.value, ()
    elif isinstance(statement, cst.Assign):
        for part in statement.targets:
            both = elements(part.target, statement.value)
            if not both:
                alone = len(statement.targets) == 1
                yield part.target, statement.value, () if alone else (part,)
            yield from ((one.value, value.value, (one, value)) for one, value in both)


# --------------------------------------------------------------------------------------------------
# Functions and classes
# --------------------------------------------------------------------------------------------------


def all_parameters(node: cst.FunctionDef | cst.Lambda) -> list[cst.Param]:
    given = node.params
    return [*given.posonly_params, *given.params, *given.kwonly_params]


def keyword_of(arg: cst.Arg) -> str | None:
    return arg.keyword.value if arg.keyword is not None else None


def init_of(node: cst.FunctionDef | cst.ClassDef) -> cst.FunctionDef | None:
    """Returns a function itself, or the `__init__` of a class, or None."""
    found = [one for one in node.body.body if isinstance(one, cst.FunctionDef)]
    inits = [one for one in found if one.name.value == "__init__"]
    return node if isinstance(node, cst.FunctionDef) else inits[-1] if inits else None


def is_decorated(node: cst.CSTNode | None, name: str) -> bool:
    return any(last_name(d.decorator) == name for d in getattr(node, "decorators", ()))


def own_attributes(node: cst.ClassDef) -> list[tuple[str, cst.Assign | cst.AnnAssign]]:
    """Returns the attributes that methods assign to `self`, with their statements."""
    statements = [n for n in nodes_of(node) if isinstance(n, (cst.Assign, cst.AnnAssign))]
    targets = [(target, one) for one in statements for target in assigned(one)]
    attributes = [(t, one) for t, one in targets if isinstance(t, cst.Attribute)]
    return [(target.attr.value, one) for target, one in attributes if is_self(target.value)]


def fields(node: cst.ClassDef) -> list[tuple[str, cst.SimpleStatementLine]]:
    """Returns the annotated names of a class's body, with their lines."""
    lines = [line for line in node.body.body if isinstance(line, cst.SimpleStatementLine)]
    marked = [(one.body[0].target, one) for one in lines if isinstance(one.body[0], cst.AnnAssign)]
    return [(target.value, line) for target, line in marked if isinstance(target, cst.Name)]


def declared(node: cst.FunctionDef | cst.ClassDef) -> list[tuple[str, cst.CSTNode]]:
    """Returns the parameters of a function or of `__init__`, and fields, with their nodes."""
    init, own = init_of(node), fields(node) if isinstance(node, cst.ClassDef) else []
    params = all_parameters(init) if init is not None else []
    return [*own, *((param.name.value, param) for param in params)]

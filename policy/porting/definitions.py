"""Classes and functions of the given files, and which of them an expression may call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import libcst as cst

from policy.porting import dtypes
from policy.porting.sources import ParsedFile, nodes_of


@dataclasses.dataclass(eq=False)
class Definition:
    """A class or a function.

    Attributes:
      parameters: the node of each, by name: of a function, of `__init__`, or fields of a dataclass.
      positional: names in order, without `self`.
      bases: expressions of a class's bases.
    """

    name: str
    node: cst.FunctionDef | cst.ClassDef
    source: ParsedFile
    parameters: dict[str, cst.CSTNode]
    positional: list[str]
    bases: list[cst.BaseExpression]
    is_method: bool = False

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, cst.ClassDef)

    def returned(self) -> list[cst.BaseExpression]:
        """Returns the values that a function returns; none of a class."""
        found = [] if self.is_class else list(nodes_of(self.node))
        return [n.value for n in found if isinstance(n, cst.Return) and n.value is not None]


@dataclasses.dataclass(frozen=True)
class Callee:
    """A callable that an expression may be.

    Attributes:
      kind: "flax", "array" (a function of JAX or NumPy), "given", "elsewhere", or "any" class.
      name: the last part of its name.
      bound: the number of positional arguments that are bound already.
    """

    kind: str
    name: str
    definition: Definition | None = None
    bound: int = 0


class Project:
    """The definitions of the given files, and the values of names, attributes and keywords."""

    def __init__(self, sources: Sequence[ParsedFile]):
        self.sources = sources
        self.definitions: dict[str, list[Definition]] = {}
        self._values: dict[str, list[tuple[ParsedFile, cst.BaseExpression]]] = {}
        self._fields: dict[str, set[str]] = {}
        for source in sources:
            for node in nodes_of(source.module):
                if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                    self._define(source, node)
                for name, value in _bindings(node):
                    self._values.setdefault(name, []).append((source, value))

    def _define(self, source: ParsedFile, node: cst.FunctionDef | cst.ClassDef) -> None:
        name = node.name.value
        if isinstance(node, cst.ClassDef):
            init = method(node, "__init__")
            fields = _parameters(init)[1:] if init else list(_fields(node))
            bases = [base.value for base in node.bases]
            known = {f for f, _ in fields} | {a for a, _ in own_attributes(node)}
            self._fields.setdefault(name, set()).update(known)
            names = _positional(init)[1:] if init else [field for field, _ in fields]
            made = Definition(name, node, source, dict(fields), names, bases)
        else:
            is_method = isinstance(source.parent(source.parent(node)), cst.ClassDef)
            static = any(
                getattr(d.decorator, "value", "") == "staticmethod" for d in node.decorators
            )
            skipped = int(is_method and not static)
            names = _positional(node)[skipped:]
            made = Definition(name, node, source, dict(_parameters(node)), names, [], is_method)
        self.definitions.setdefault(name, []).append(made)

    # ----------------------------------------------------------------------------------------------
    # Classes
    # ----------------------------------------------------------------------------------------------

    def classes(self, name: str) -> list[Definition]:
        return [d for d in self.definitions.get(name, ()) if d.is_class]

    def ancestry(self, definition: Definition) -> list[Definition]:
        """Returns a class and its bases in the given files, the derived ones first."""
        found = [definition]
        for one in found:  # which grows
            above = [base for name in one.bases for base in self.classes(last_name(name))]
            found += [base for base in dict.fromkeys(above) if base not in found]
        return found

    def owner(self, class_name: str, field: str) -> str | None:
        """Returns the topmost given class that has a field, parameter or attribute of this name."""
        owners = [
            ancestor.name
            for definition in self.classes(class_name)
            for ancestor in self.ancestry(definition)
            if field in self._fields[ancestor.name]
        ]
        return owners[-1] if owners else None

    def owners(self, field: str) -> set[str]:
        return {name for name, fields in self._fields.items() if field in fields}

    def is_flax_class(self, definition: Definition) -> bool:
        """Returns whether a class derives from one of Flax's."""
        return any(
            is_flax(one.source.imported(base))
            for one in self.ancestry(definition)
            for base in one.bases
        )

    def order(self, definition: Definition) -> list[str]:
        """Returns the names of a callable's positional arguments, a dataclass's bases first."""
        if not definition.is_class:
            return definition.positional
        for one in self.ancestry(definition):
            assert isinstance(one.node, cst.ClassDef)
            if method(one.node, "__init__"):
                return one.positional
        chain = reversed(self.ancestry(definition))
        return list(dict.fromkeys(name for one in chain for name in one.positional))

    def classes_of(self, source: ParsedFile, node: cst.BaseExpression, depth: int = 4) -> set[str]:
        """Returns the given classes that an expression's value may be an instance of."""
        if isinstance(node, cst.Name) and node.value in ("self", "cls"):
            return {source.class_of(node) or ""}
        name = last_name(node)
        found: set[str] = set()
        for annotation in self.annotations(source, node):
            found |= {n for n in _names_within(annotation) if self.classes(n)}
        if found or not depth:
            return found
        for where, value in self._values.get(name, ()):
            if isinstance(value, cst.Call):
                called = last_name(value.func)
                inner = value.func.value if isinstance(value.func, cst.Attribute) else None
                if self.classes(called):
                    found.add(called)
                elif called in ("replace", "create") and inner is not None:
                    found |= {n for n in _names_within(inner) if self.classes(n)}
            elif isinstance(value, cst.Attribute) and value is not node:
                found |= self.classes_of(where, value, depth - 1)
        return found

    def annotations(self, source: ParsedFile, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Returns the annotations of a parameter, or of an attribute that is a field."""
        found: list[cst.CSTNode] = []
        if isinstance(node, cst.Name):
            found = [a.node for a in source.assignments(node) if isinstance(a.node, cst.Param)]
        elif isinstance(node, cst.Attribute):
            name, given = node.attr.value, self.definitions.get(source.class_of(node) or "", ())
            found = [d.parameters[name] for d in given if name in d.parameters]
        inner = [n.body[0] if isinstance(n, cst.SimpleStatementLine) else n for n in found]
        marks = [getattr(one, "annotation", None) for one in inner]
        return [mark.annotation for mark in marks if mark is not None]

    @functools.cached_property
    def called_by_modules(self) -> set[str]:
        """The names of given functions that modules call, or functions that these call."""
        owners = [d for many in self.definitions.values() for d in many]
        stack = [d for d in owners if d.is_class and self.is_flax_class(d)]
        found: set[str] = set()
        while stack:
            calls = [n for n in nodes_of(stack.pop().node) if isinstance(n, cst.Call)]
            new = {last_name(call.func) for call in calls} & self.definitions.keys() - found
            found |= new
            stack += [d for name in new for d in self.definitions[name] if not d.is_class]
        return found

    def made_by(self, definition: Definition, name: str) -> str | None:
        """Returns the class that a class method makes with its ``**`` arguments, a name's owner."""
        node, own = definition.node, definition.source.class_of(definition.node)
        if not isinstance(node, cst.FunctionDef) or node.params.star_kwarg is None or own is None:
            return None
        read = any(isinstance(n, cst.SimpleString) and n.raw_value == name for n in nodes_of(node))
        return self.owner(own, name) if is_class_method(node) and not read else None

    # ----------------------------------------------------------------------------------------------
    # Callables
    # ----------------------------------------------------------------------------------------------

    def targets(
        self, source: ParsedFile, node: cst.BaseExpression, seen: frozenset[str] = frozenset()
    ) -> list[Callee]:
        """Returns the callables that an expression may be; none if nothing is known."""
        imported, name = source.imported(node), last_name(node)
        if isinstance(node, cst.Name) and name == "cls":
            own = source.class_of(node) or ""
            return [Callee("given", own, definition) for definition in self.classes(own)]
        if imported and not isinstance(node, cst.Call):
            return self._imported(imported)
        if name == "__init__":
            return self._of_bases(source, node)
        if isinstance(node, (cst.IfExp, cst.BooleanOperation)):
            is_if = isinstance(node, cst.IfExp)
            parts = (node.body, node.orelse) if is_if else (node.left, node.right)
            return [t for part in parts for t in self.targets(source, part, seen)]
        if isinstance(node, cst.Call):
            return self._of_call(source, node, seen)
        if not name or name in seen:
            return []
        found = self._given(source, node, name)
        for where, value in () if found else self._values.get(name, ()):
            found += self.targets(where, value, seen | {name})
        return list(dict.fromkeys(found))

    @functools.cached_property
    def values(self) -> set[str]:
        """The names of definitions that are used as values, so that unknown calls may call them."""
        return {
            name
            for source in self.sources
            for node in nodes_of(source.module)
            if isinstance(node, (cst.Name, cst.Attribute))
            and (name := last_name(node)) in self.definitions
            and self._is_lost(source, source.parent(node))
        }

    def _is_lost(self, source: ParsedFile, parent: cst.CSTNode) -> bool:
        """Returns whether a value goes where no name in the given files tells of it."""
        call = source.parent(parent)
        if isinstance(parent, cst.Arg) and isinstance(call, cst.Call):
            if dtypes.TRANSFORMS.fullmatch(last_name(call.func)):
                return False
            if parent.keyword is None:
                return True
            return any(t.kind != "given" for t in self.targets(source, call.func))
        return isinstance(parent, (cst.Return, cst.Element, cst.DictElement))

    @functools.cached_property
    def splatted(self) -> dict[str, tuple[ParsedFile, cst.CSTNode]]:
        """The names of callables that are called with ``**``, each with a call."""
        return {
            target.name: (source, node)
            for source in self.sources
            for node in nodes_of(source.module)
            if isinstance(node, cst.Call) and any(arg.star == "**" for arg in node.args)
            for target in self.targets(source, node.func)
        }

    @functools.cached_property
    def calls(self) -> dict[str, list[cst.Call]]:
        """The calls of the given files, by the last part of the name of what they call."""
        found: dict[str, list[cst.Call]] = {}
        for source in self.sources:
            for node in nodes_of(source.module):
                if isinstance(node, cst.Call):
                    found.setdefault(last_name(node.func), []).append(node)
        return found

    def forwarded(self, target: Callee) -> list[Callee]:
        """Returns a callable, and those that get its ``**`` arguments, if it reads none itself."""
        node = target.definition.node if target.definition is not None else None
        if not isinstance(node, cst.FunctionDef) or node.params.star_kwarg is None:
            return [target]
        source = target.definition.source  # type: ignore[union-attr]
        uses = [n for n in nodes_of(node.body) if isinstance(n, cst.Name)]
        uses = [n for n in uses if n.value == node.params.star_kwarg.name.value]
        if any(getattr(source.parent(n), "star", "") != "**" for n in uses):
            return [target]
        calls = [source.parent(source.parent(n)) for n in uses]
        found = [t for call in calls for t in self.targets(source, call.func)]
        return [target, *(dataclasses.replace(t, bound=-99) for t in found)]

    def is_initializer(self, source: ParsedFile, node: cst.BaseExpression) -> bool:
        """Returns whether an expression is an initializer of Flax's or JAX's, or makes one."""
        values = self._values.get(last_name(node), ())
        made = [(where, value.func) for where, value in values if isinstance(value, cst.Call)]
        return any("initializers" in one.imported(func) for one, func in ((source, node), *made))

    def is_module(self, name: str) -> bool:
        """Returns whether variables or attributes of this name are built as modules."""
        values = self._values.get(name, ())
        made = [(where, value.func) for where, value in values if isinstance(value, cst.Call)]
        calls = [(where, func) for where, func in made if last_name(func) != "field"]
        found = [target for where, func in calls for target in self.targets(where, func)]
        return bool(found) and all(
            t.kind == "flax" or (t.definition is not None and t.definition.is_class) for t in found
        )

    def _imported(self, imported: str) -> list[Callee]:
        name = imported.rpartition(".")[2]
        if is_flax(imported):
            return [Callee("flax", name)]
        if imported.split(".")[0] in ("jax", "numpy"):
            return [Callee("array", name)]
        found = [Callee("given", name, d) for d in self.definitions.get(name, ())]
        return found or [Callee("elsewhere", imported)]

    def _given(self, source: ParsedFile, node: cst.BaseExpression, name: str) -> list[Callee]:
        base = node.value if isinstance(node, cst.Attribute) else None
        if base is not None and name == "create" and self.classes(last_name(base)):
            return [Callee("given", last_name(base), d) for d in self.classes(last_name(base))]
        found = self.definitions.get(name, ())
        if isinstance(node, cst.Name):
            bound = [a.node for a in source.assignments(node)]
            found = [d for d in found if d.node in bound]
        else:
            found = [d for d in found if d.is_method or d.is_class]
        return [Callee("given", name, d) for d in found]

    def _of_bases(self, source: ParsedFile, node: cst.BaseExpression) -> list[Callee]:
        """Returns the classes that ``super().__init__`` may construct; others are not known."""
        is_super = isinstance(node, cst.Attribute) and isinstance(node.value, cst.Call)
        own = self.classes(source.class_of(node) or "") if is_super else []
        bases = [(d.source, base) for d in own for base in d.bases]
        return [callee for where, base in bases for callee in self.targets(where, base)]

    def _of_call(self, source: ParsedFile, node: cst.Call, seen: frozenset[str]) -> list[Callee]:
        name = last_name(node.func)
        values = [arg.value for arg in node.args if arg.keyword is None and not arg.star]
        if name == "partial" and values:
            made = self.targets(source, values[0], seen)
            bound = len(values) - 1
            return [dataclasses.replace(t, bound=t.bound + bound) for t in made]
        if dtypes.TRANSFORMS.fullmatch(name) and values:
            return self.targets(source, values[0], seen)
        if name == "getattr" and values:
            module = source.imported(values[0])
            return self._imported(module) if is_flax(module) else [Callee("any", source.code(node))]
        made = self.targets(source, node.func, seen) if name not in seen else []
        given = [t.definition for t in made if t.definition is not None]
        returned = [(d.source, value) for d in given for value in d.returned()]
        return [t for where, value in returned for t in self.targets(where, value, seen | {name})]

    def unpacked(self, name: str) -> list[Callee]:
        """Returns the callables that are called with ``**name``."""
        return [
            target
            for source in self.sources
            for node in nodes_of(source.module)
            if isinstance(node, cst.Call)
            and any(arg.star == "**" and last_name(arg.value) == name for arg in node.args)
            for target in self.targets(source, node.func)
        ]


# --------------------------------------------------------------------------------------------------
# Nodes
# --------------------------------------------------------------------------------------------------


def is_flax(imported: str) -> bool:
    return imported.startswith(("flax.linen", "flax.nnx", "mpmodules.linen", "mpmodules.nnx"))


def method(node: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    found = [n for n in node.body.body if isinstance(n, cst.FunctionDef) and n.name.value == name]
    return found[-1] if found else None


def own_attributes(node: cst.ClassDef) -> Iterator[tuple[str, cst.SimpleStatementLine]]:
    """Yields the attributes that methods assign to `self`, with their statements."""
    for line in nodes_of(node):
        if isinstance(line, cst.SimpleStatementLine):
            for statement in line.body:
                for target in assigned(statement):
                    if isinstance(target, cst.Attribute) and is_self(target.value):
                        yield target.attr.value, line


def assigned(statement: cst.CSTNode) -> list[cst.BaseExpression]:
    """Returns the targets of an assignment; none of other statements."""
    if isinstance(statement, cst.Assign):
        return [target.target for target in statement.targets]
    return [statement.target] if isinstance(statement, cst.AnnAssign) else []


def is_self(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "self"


def _fields(node: cst.ClassDef) -> Iterator[tuple[str, cst.SimpleStatementLine]]:
    for line in node.body.body:
        if isinstance(line, cst.SimpleStatementLine) and isinstance(line.body[0], cst.AnnAssign):
            target = line.body[0].target
            if isinstance(target, cst.Name):
                yield target.value, line


def is_class_method(node: cst.FunctionDef | None) -> bool:
    return node is not None and any(
        last_name(d.decorator) == "classmethod" for d in node.decorators
    )


def all_parameters(node: cst.FunctionDef | cst.Lambda) -> list[cst.Param]:
    given = node.params
    return [*given.posonly_params, *given.params, *given.kwonly_params]


def _parameters(node: cst.FunctionDef) -> list[tuple[str, cst.CSTNode]]:
    return [(param.name.value, param) for param in all_parameters(node)]


def _positional(node: cst.FunctionDef) -> list[str]:
    return [p.name.value for p in (*node.params.posonly_params, *node.params.params)]


def last_name(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Subscript):
        return last_name(node.value)
    if isinstance(node, cst.Attribute):
        return node.attr.value
    return node.value if isinstance(node, cst.Name) else ""


def _names_within(node: cst.CSTNode) -> set[str]:
    """Returns names in an annotation or expression, those in a quoted annotation too."""
    found = {n.value for n in nodes_of(node) if isinstance(n, cst.Name)}
    return found | {n.raw_value for n in nodes_of(node) if isinstance(n, cst.SimpleString)}


def _bindings(node: cst.CSTNode) -> Iterator[tuple[str, cst.BaseExpression]]:
    """Yields names and the values that they get by an assignment, a default or a keyword."""
    if isinstance(node, cst.Assign):
        for target in assigned(node):
            parts = (target, node.value)
            if all(isinstance(part, cst.Tuple) for part in parts):
                elements = zip(*(part.elements for part in parts), strict=False)  # type: ignore
                yield from ((last_name(a.value), b.value) for a, b in elements)
            else:
                yield last_name(target), node.value
    elif isinstance(node, cst.AnnAssign) and node.value is not None:
        yield last_name(node.target), node.value
    elif isinstance(node, cst.Param) and node.default is not None:
        yield node.name.value, node.default
    elif isinstance(node, cst.Arg) and node.keyword is not None:
        yield node.keyword.value, node.value

"""Classes and functions of the given files, and which of them an expression may call."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

import libcst as cst

from policy.porting import dtypes, syntax
from policy.porting.sources import Nodes, ParsedFile
from policy.porting.syntax import last_name, nodes_of


class Definition:
    """A class or a function.

    Attributes:
      init: the function itself, or the `__init__` of a class, or None.
      parameters: the node of each, by name: of a function, of `__init__`, or fields of a dataclass.
      positional: names in order, without `self`.
      bases: expressions of a class's bases.
      attributes: names of a class's parameters and of those that methods assign to `self`.
    """

    def __init__(self, node: cst.FunctionDef | cst.ClassDef, is_method: bool):
        self.node, self.name, self.is_method = node, node.name.value, is_method
        self.is_class, self.init = isinstance(node, cst.ClassDef), syntax.init_of(node)
        skipped = int(
            self.is_class or (is_method and not syntax.is_decorated(node, "staticmethod"))
        )
        params = syntax.all_parameters(self.init)[skipped:] if self.init is not None else []
        self.parameters: dict[str, cst.CSTNode] = {param.name.value: param for param in params}
        self.bases: list[cst.BaseExpression] = []
        self.attributes: set[str] = set()
        if isinstance(node, cst.ClassDef):
            self.bases = [base.value for base in node.bases]
            self.parameters |= {} if self.init else syntax.fields(node)
            self.attributes = {*self.parameters, *(name for name, _ in syntax.own_attributes(node))}
        named = self.init.params.kwonly_params if self.init is not None else ()
        self.positional = list(self.parameters)[: len(self.parameters) - len(named)]

    def returned(self) -> list[cst.BaseExpression]:
        """Returns the values that a function returns; none of a class."""
        found = [] if self.is_class else nodes_of(self.node)
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

    @property
    def is_class(self) -> bool:
        return self.definition is not None and self.definition.is_class


class Project(Nodes):
    """The definitions of the given files, and the values of names, attributes and keywords."""

    def __init__(self, sources: Sequence[ParsedFile]):
        super().__init__([source.metadata for source in sources])
        self.sources = sources
        self.nodes = [node for source in sources for node in nodes_of(source.module)]
        self.calls = [node for node in self.nodes if isinstance(node, cst.Call)]
        stars = [(node, arg) for node in self.calls for arg in node.args if arg.star == "**"]
        self._stars = [(node.func, last_name(arg.value)) for node, arg in stars]
        self.definitions: dict[str, list[Definition]] = {}
        self._values: dict[str, list[cst.BaseExpression]] = {}
        for node in self.nodes:
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                is_method = isinstance(self.parent(self.parent(node)), cst.ClassDef)
                made = Definition(node, is_method)
                self.definitions.setdefault(made.name, []).append(made)
            for name, value in _bindings(node):
                self._values.setdefault(name, []).append(value)

    def place(self, node: cst.CSTNode) -> str:
        """Returns the path and line of a node, as in ``models.py:3``."""
        module = [node, *self.ancestors(node)][-1]
        return next(one for one in self.sources if one.module is module).place(node)

    # ----------------------------------------------------------------------------------------------
    # Classes
    # ----------------------------------------------------------------------------------------------

    def classes(self, name: str) -> list[Definition]:
        return [d for d in self.definitions.get(name, ()) if d.is_class]

    def own_classes(self, node: cst.CSTNode) -> list[Definition]:
        """Returns the given classes that the class around a node may be."""
        return self.classes(self.class_of(node))

    def ancestry(self, definition: Definition) -> list[Definition]:
        """Returns a class and its bases in the given files, the derived ones first."""
        found = [definition]
        for one in found:  # which grows
            above = [base for name in one.bases for base in self.classes(last_name(name))]
            found += [base for base in dict.fromkeys(above) if base not in found]
        return found

    def owner(self, class_name: str, field: str) -> str | None:
        """Returns the topmost given class that has a field, parameter or attribute of this name."""
        chains = [one for made in self.classes(class_name) for one in self.ancestry(made)]
        owners = [one.name for one in chains if field in one.attributes]
        return owners[-1] if owners else None

    def owners(self, field: str) -> set[str]:
        named = self.definitions.items()
        return {name for name, many in named if any(field in one.attributes for one in many)}

    def is_flax_class(self, definition: Definition) -> bool:
        """Returns whether a class derives from one of Flax's."""
        chain = self.ancestry(definition)
        return any(is_flax(self.imported(base)) for one in chain for base in one.bases)

    def order(self, definition: Definition) -> list[str]:
        """Returns the names of a callable's positional arguments, a dataclass's bases first."""
        chain = self.ancestry(definition)
        for one in chain:
            if one.init is not None:
                return one.positional
        return list(dict.fromkeys(name for one in reversed(chain) for name in one.positional))

    def classes_of(self, node: cst.BaseExpression, depth: int = 4) -> set[str]:
        """Returns the given classes that an expression's value may be an instance of."""
        if isinstance(node, cst.Name) and node.value in ("self", "cls"):
            return {self.class_of(node)}
        found = {name for mark in self.annotations(node) for name in self._classes_within(mark)}
        if found or not depth:
            return found
        for value in self._values.get(last_name(node), ()):
            if isinstance(value, cst.Call):
                called = last_name(value.func)
                if self.classes(called):
                    found.add(called)
                elif called in ("replace", "create") and isinstance(value.func, cst.Attribute):
                    found |= self._classes_within(value.func.value)
            elif isinstance(value, cst.Attribute) and value is not node:
                found |= self.classes_of(value, depth - 1)
        return found

    def _classes_within(self, node: cst.CSTNode) -> set[str]:
        """Returns given classes of an annotation or expression, of a quoted annotation too."""
        names = {n.value for n in nodes_of(node) if isinstance(n, cst.Name)}
        names |= {str(n.raw_value) for n in nodes_of(node) if isinstance(n, cst.SimpleString)}
        return set(filter(self.classes, names))

    def annotations(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Returns the annotations of a parameter, or of an attribute that is a field."""
        found: list[cst.CSTNode] = []
        if isinstance(node, cst.Name):
            found = [a.node for a in self.assignments(node) if isinstance(a.node, cst.Param)]
        elif isinstance(node, cst.Attribute):
            given, name = self.definitions.get(self.class_of(node), ()), node.attr.value
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

    # ----------------------------------------------------------------------------------------------
    # Callables
    # ----------------------------------------------------------------------------------------------

    def targets(self, node: cst.BaseExpression, seen: frozenset[str] = frozenset()) -> list[Callee]:
        """Returns the callables that an expression may be; none if nothing is known."""
        imported, name = self.imported(node), last_name(node)
        parts: Sequence[cst.BaseExpression] = ()
        if isinstance(node, cst.Name) and name == "cls":
            return [Callee("given", one.name, one) for one in self.own_classes(node)]
        if imported and not isinstance(node, cst.Call):
            return self._imported(imported)
        if isinstance(node, cst.Call):
            return self._called(node, seen)
        if isinstance(node, cst.IfExp):
            parts = node.body, node.orelse
        elif isinstance(node, cst.BooleanOperation):
            parts = node.left, node.right
        elif name == "__init__":  # of super(): what others construct is not known
            is_super = isinstance(node, cst.Attribute) and isinstance(node.value, cst.Call)
            own = self.own_classes(node) if is_super else []
            return [callee for one in own for base in one.bases for callee in self.targets(base)]
        elif name and name not in seen:
            if found := self._given(node, name):
                return list(dict.fromkeys(found))
            parts, seen = self._values.get(name, ()), seen | {name}
        found = [target for part in parts for target in self.targets(part, seen)]
        return list(dict.fromkeys(found))

    def made_by_calls(self, name: str) -> list[cst.BaseExpression]:
        """Returns the functions whose calls variables or attributes of a name are bound to."""
        return [v.func for v in self._values.get(name, ()) if isinstance(v, cst.Call)]

    @functools.cached_property
    def values(self) -> set[str]:
        """The names of definitions that are used as values, so that unknown calls may call them."""
        named = [n for n in self.nodes if isinstance(n, (cst.Name, cst.Attribute))]
        own = [n for n in named if last_name(n) in self.definitions]
        return {last_name(node) for node in own if self._is_lost(self.parent(node))}

    def _is_lost(self, parent: cst.CSTNode) -> bool:
        """Returns whether a value goes where no name in the given files tells of it."""
        call = self.parent(parent)
        if not (isinstance(parent, cst.Arg) and isinstance(call, cst.Call)):
            return isinstance(parent, (cst.Return, cst.Element, cst.DictElement))
        if re.fullmatch(dtypes.TRANSFORMS, last_name(call.func)):
            return False
        return parent.keyword is None or any(t.kind != "given" for t in self.targets(call.func))

    @functools.cached_property
    def splatted(self) -> dict[str, cst.CSTNode]:
        """The names of callables that are called with ``**``, each with a call."""
        return {target.name: self.parent(f) for f, _ in self._stars for target in self.targets(f)}

    def unpacked(self, name: str) -> list[Callee]:
        """Returns the callables that are called with ``**name``."""
        return [t for func, star in self._stars if star == name for t in self.targets(func)]

    def forwarded(self, target: Callee) -> list[Callee]:
        """Returns a callable, and those that get its ``**`` arguments, if it reads none itself."""
        node = target.definition.node if target.definition is not None else None
        if not isinstance(node, cst.FunctionDef) or node.params.star_kwarg is None:
            return [target]
        name = node.params.star_kwarg.name.value
        uses = [n for n in nodes_of(node.body) if isinstance(n, cst.Name) and n.value == name]
        args = [self.parent(use) for use in uses]
        if any(getattr(arg, "star", "") != "**" for arg in args):
            return [target]
        found = [t for arg in args for t in self.targets(self.parent(arg).func)]
        return [target, *(dataclasses.replace(t, bound=-99) for t in found)]

    def is_initializer(self, node: cst.BaseExpression) -> bool:
        """Returns whether an expression is an initializer of Flax's or JAX's, or makes one."""
        node = node.func if isinstance(node, cst.Call) else node
        made = self.made_by_calls(last_name(node))
        return any("initializers" in self.imported(one) for one in (node, *made))

    def is_module(self, name: str) -> bool:
        """Returns whether variables or attributes of this name are built as modules."""
        made = [func for func in self.made_by_calls(name) if last_name(func) != "field"]
        found = [target for func in made for target in self.targets(func)]
        return bool(found) and all(t.kind == "flax" or t.is_class for t in found)

    def _imported(self, imported: str) -> list[Callee]:
        name = imported.rpartition(".")[2]
        if is_flax(imported):
            return [Callee("flax", name)]
        if imported.split(".")[0] in ("jax", "numpy"):
            return [Callee("array", name)]
        found = [Callee("given", name, d) for d in self.definitions.get(name, ())]
        return found or [Callee("elsewhere", imported)]

    def _given(self, node: cst.BaseExpression, name: str) -> list[Callee]:
        base = last_name(node.value) if isinstance(node, cst.Attribute) else ""
        if name == "create" and self.classes(base):
            return [Callee("given", base, d) for d in self.classes(base)]
        found = self.definitions.get(name, ())
        if isinstance(node, cst.Name):
            bound = [a.node for a in self.assignments(node)]
            found = [d for d in found if d.node in bound]
        else:
            found = [d for d in found if d.is_method or d.is_class]
        return [Callee("given", name, d) for d in found]

    def _called(self, node: cst.Call, seen: frozenset[str]) -> list[Callee]:
        name = last_name(node.func)
        values = [arg.value for arg in node.args if arg.keyword is None and not arg.star]
        if name == "getattr" and values:
            module = self.imported(values[0])
            return self._imported(module) if is_flax(module) else [Callee("any", self.code(node))]
        if re.fullmatch(dtypes.TRANSFORMS, name) and values:
            made = self.targets(values[0], seen)
            bound = len(values) - 1 if name == "partial" else 0
            return [dataclasses.replace(t, bound=t.bound + bound) for t in made]
        made = self.targets(node.func, seen) if name not in seen else []
        returned = [v for t in made if t.definition is not None for v in t.definition.returned()]
        return [t for value in returned for t in self.targets(value, seen | {name})]


def _bindings(node: cst.CSTNode) -> list[tuple[str, cst.BaseExpression]]:
    """Returns names and the values that they get by an assignment, a default or a keyword."""
    if isinstance(node, cst.Param) and node.default is not None:
        return [(node.name.value, node.default)]
    if isinstance(node, cst.Arg) and node.keyword is not None:
        return [(node.keyword.value, node.value)]
    return [(last_name(target), value) for target, value, _ in syntax.pairs(node)]


def is_flax(imported: str) -> bool:
    return imported.startswith(("flax.linen", "flax.nnx", "mpmodules.linen", "mpmodules.nnx"))

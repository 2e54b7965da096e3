"""Reads calls: where an argument that is a dtype goes, and its replacement."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import libcst as cst

from policy.porting import dtypes
from policy.porting.definitions import (
    Callee,
    all_parameters,
    assigned,
    is_class_method,
    last_name,
)
from policy.porting.dtypes import DATA, Slot
from policy.porting.edits import is_pure
from policy.porting.operands import (
    float32_of,
    is_float_array,
    is_of_model,
    is_promoted,
    is_reduced,
    is_variable,
    may_be_integer,
)
from policy.porting.sources import ParsedFile

if TYPE_CHECKING:
    from policy.porting.flow import DtypeFlow

_CAST_KEYWORDS = ("dtype", "new_dtype")
_INITIALIZER = re.compile(r"(\w*_)?init(ializer)?(_fn)?")
_CACHE = "a cache is float32 now: policy.compute_dtype() as its dtype halves it"
_IN_FLOAT32 = "a cast to float32 now: it may go if all that it takes are floats"
_TREE_MAPS = ("jax.tree.map", "jax.tree_map", "jax.tree_util.tree_map")


def read_call(flow: DtypeFlow, source: ParsedFile, node: cst.Call) -> None:
    """Reads a call: its casts and dtype arguments, and the expressions within."""
    if not _read_cast(flow, source, node):
        read = _Call(flow, source, node)
        for index, arg in enumerate(node.args):
            if not read.argument(index, arg):
                flow.visit(source, arg.value)
    flow.visit(source, node.func)


def read_dict(flow: DtypeFlow, source: ParsedFile, node: cst.Dict) -> bool:
    """Reads a dict that layers get by ``**``, whose dtypes are arguments; False for others."""
    names = [last_name(target) for target in assigned(source.parent(node))]
    targets = [target for name in names for target in flow.project.unpacked(name)]
    classes = [d for t in targets if (d := t.definition) is not None and d.is_class]
    if not targets or len(classes) + sum(t.kind == "flax" for t in targets) < len(targets):
        return False
    for element in node.elements:
        key = getattr(getattr(element, "key", None), "raw_value", "")
        if flow.follows(key) and flow.slots(source, element.value) is not None:
            given = [flow.field(definition.name, key) for definition in classes]
            flow.use(source, element.value, flows=given, edits=[(element, None)])
        else:
            flow.visit(source, element.value)
    return True


# --------------------------------------------------------------------------------------------------
# Casts
# --------------------------------------------------------------------------------------------------


def _read_cast(flow: DtypeFlow, source: ParsedFile, node: cst.Call) -> bool:
    """Reads ``x.astype(dtype)`` and ``jnp.asarray(x, dtype)``; False for other calls."""
    name, imported = last_name(node.func), source.imported(node.func)
    if isinstance(node.func, cst.Attribute) and not imported and name == "astype":
        operand, given, rest = node.func.value, node.args[:1], node.args[1:]
    elif imported.startswith(("jax.", "numpy.")) and name in dtypes.CAST_FUNCTIONS and node.args:
        operand, given, rest = node.args[0].value, node.args[1:2], ()
    else:
        return False
    if not given or rest or (given[0].keyword and given[0].keyword.value not in _CAST_KEYWORDS):
        return False
    dtype = given[0].value
    slots = flow.slots(source, dtype)
    if slots is None:
        return False
    flow.visit(source, operand)
    tree = _mapped(source, node, operand)
    if tree is not None and slots - {DATA} and is_float_array(flow.project, source, tree):
        node, operand = source.enclosing(node, cst.Call), tree
    is_float = not imported.startswith("numpy.") and is_float_array(flow.project, source, operand)
    is_array = name == "astype"  # others take sequences and numbers, too
    followed = bool(slots - {DATA})
    is_number = is_array and not isinstance(operand, cst.Comparison)
    promoted = is_number and is_promoted(flow.project, source, node)
    if followed and not is_float and not promoted:
        _put_float32(flow, source, dtype, note=_IN_FLOAT32)
    elif followed or (
        _is_needless(flow, source, node, dtype, operand, slots, is_float, is_array)
        and not _is_branch(source, node, operand)
    ):
        flow.use(source, dtype, edits=[_without_cast(source, node, operand)])
    else:
        _note_cast(flow, source, node, dtype, slots)
    return True


def _put_float32(
    flow: DtypeFlow, source: ParsedFile, dtype: cst.CSTNode, note: str | None = None
) -> None:
    """Puts float32 in the place of a dtype."""
    value = float32_of(source)
    if value is None:
        flow.use(source, dtype, reason="the file doesn't import jax.numpy")
    else:
        flow.use(source, dtype, edits=[(dtype, lambda _: value)], note=note)


def _mapped(source: ParsedFile, node: cst.Call, operand: cst.CSTNode) -> cst.BaseExpression | None:
    """Returns the tree of ``jax.tree.map(lambda x: x.astype(dtype), tree)``, or None."""
    function = source.parent(node)
    call = source.enclosing(node, cst.Call)
    if call is None or not isinstance(function, cst.Lambda) or not isinstance(operand, cst.Name):
        return None
    names = [param.name.value for param in all_parameters(function)]
    is_map = source.imported(call.func) in _TREE_MAPS and len(call.args) == 2
    return call.args[1].value if is_map and names == [operand.value] else None


def _is_needless(
    flow: DtypeFlow,
    source: ParsedFile,
    node: cst.Call,
    dtype: cst.CSTNode,
    operand: cst.CSTNode,
    slots: frozenset[Slot],
    is_float: bool,
    is_array: bool,
) -> bool:
    """Returns whether a cast in a model's code goes, which casts floats back to their input's
    dtype, or to float32 what a policy takes in float32 anyway.
    """
    if flow.is_scale or not is_of_model(flow.project, source, node):
        return False
    if slots:
        return is_float and not may_be_integer(flow.project, source, dtype)
    if flow.constants(source, dtype) != {"float32"}:
        return False
    owners = [source.class_of(node), getattr(source.enclosing(node, cst.FunctionDef), "name", None)]
    names = [getattr(owner, "value", owner) or "" for owner in owners]
    is_norm = any(name.lower().endswith("norm") for name in names)
    is_integer = may_be_integer(flow.project, source, operand)
    return (is_norm or (is_array and is_reduced(source, node))) and not is_integer


def _without_cast(
    source: ParsedFile, node: cst.Call, operand: cst.CSTNode
) -> tuple[cst.CSTNode, object]:
    """Returns the edit that puts an operand in the place of its cast."""
    statement = source.parent(node)
    if _assigns_itself(source, statement, operand):
        return source.parent(statement), None
    places = [i for i, arg in enumerate(node.args) if arg.value is operand]
    variable, parentheses = is_variable(source, operand), _needs_parentheses(source, node, operand)
    is_short = "\n" not in source.module.code_for_node(operand)

    def change(updated: cst.Call) -> cst.BaseExpression:
        inner: Any = updated.args[places[0]].value if places else updated.func.value  # type: ignore
        if variable:
            return cst.parse_expression("_[...]").with_changes(value=inner)
        if not parentheses and is_short:
            return inner.with_changes(lpar=[], rpar=[])
        if not parentheses or inner.lpar:
            return inner
        if not updated.lpar:
            return inner.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        return inner.with_changes(lpar=updated.lpar, rpar=updated.rpar)

    return node, change


def _needs_parentheses(source: ParsedFile, node: cst.Call, operand: cst.CSTNode) -> bool:
    """Returns whether an operand needs them in its cast's place: for its order or its lines."""
    parent = source.parent(node)
    bare: Any = operand.with_changes(lpar=[], rpar=[])
    is_simple = isinstance(operand, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
    is_alone = isinstance(parent, (cst.Assign, cst.AnnAssign, cst.Return, cst.Arg, cst.Element))
    if not (is_simple or is_alone):
        return True
    try:
        ast.parse(source.module.code_for_node(bare).strip(), mode="eval")
    except SyntaxError:  # it goes on in a second line
        return not isinstance(parent, (cst.Arg, cst.Element))
    return False


def _assigns_itself(source: ParsedFile, statement: cst.CSTNode, operand: cst.CSTNode) -> bool:
    """Returns whether ``x = x.astype(dtype)`` would become ``x = x``."""
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return False
    return source.code(statement.targets[0].target) == source.code(operand)


def _is_branch(source: ParsedFile, node: cst.Call, operand: cst.CSTNode) -> bool:
    """Returns whether ``x = x.astype(dtype)`` is all that a branch does."""
    statement = source.parent(node)
    block = source.enclosing(node, cst.BaseSuite)
    is_if = isinstance(source.parent(block), (cst.If, cst.Else))
    return is_if and len(block.body) == 1 and _assigns_itself(source, statement, operand)


def _note_cast(
    flow: DtypeFlow, source: ParsedFile, node: cst.Call, dtype: cst.CSTNode, slots: frozenset[Slot]
) -> None:
    """Notes a cast to a constant dtype; one to the dtype of data is float32 for the code."""
    chosen = flow.constants(source, dtype)
    if slots or flow.is_scale or not chosen & dtypes.FLOATS:
        return
    if chosen & dtypes.HALF_FLOATS:
        flow.note(source, node, "an explicit cast to a half dtype is obeyed: delete it")
    else:
        outer = source.enclosing(node, cst.Call)
        name = last_name(outer.func) if outer is not None else ""
        if "softmax" in name or "loss" in name or "entropy" in name:
            flow.note(source, node, f"{name} runs in float32 under a policy: its cast may go")
        else:
            in_model = is_of_model(flow.project, source, node)
            text = "a cast of floats to float32 has no effect in a module: it may go"
            obeyed = "a cast to float32 is obeyed; norms, softmaxes and losses don't need it"
            flow.note(source, node, text if in_model else obeyed)


# --------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------


def _in_float32(updated: cst.Arg) -> cst.Arg:
    value = cst.SimpleString('"float32"')
    return updated.with_changes(keyword=cst.Name("dtype_policy"), value=value)


class _Call:
    def __init__(self, flow: DtypeFlow, source: ParsedFile, node: cst.Call):
        self._flow, self._source, self._node = flow, source, node
        self._name = last_name(node.func)
        self._is_partial = self._name == "partial"

    @functools.cached_property
    def _targets(self) -> list[Callee]:
        project, func = self._flow.project, self._node.func
        if self._name == "dict":
            assignment = self._source.parent(self._node)
            names = [last_name(t.target) for t in getattr(assignment, "targets", ())]
            return [t for name in names for t in project.unpacked(name)]
        if self._is_partial:
            made = project.targets(self._source, self._node)
            return [Callee(t.kind, t.name, t.definition, 0) for t in made]
        if isinstance(func, cst.Call):
            made = project.targets(self._source, func)
            makers = [] if made else project.targets(self._source, func.func)
            is_init = self._is_initializer(func)
            return made or [t for t in makers if is_init or _INITIALIZER.fullmatch(t.name)]
        found = project.targets(self._source, func)
        return [t for target in found for t in project.forwarded(target)]

    def _is_initializer(self, func: cst.BaseExpression) -> bool:
        inner = func.func if isinstance(func, cst.Call) else func
        return self._flow.project.is_initializer(self._source, inner)

    def argument(self, index: int, arg: cst.Arg) -> bool:
        """Reads an argument; False if it is no dtype."""
        flow, source = self._flow, self._source
        keyword = arg.keyword.value if arg.keyword is not None else None
        if arg.star:
            self._star(arg, index)
            return False
        slots = flow.slots(source, arg.value)
        given = self._given(keyword, index)
        by_maker = is_class_method(source.enclosing(arg, cst.FunctionDef))
        flow.passed |= given if by_maker else given - (slots or frozenset())
        if given:
            if not is_pure(arg.value):
                text = f"`{source.code(arg.value)}` is passed to it"
                flow.keep(given, source, arg, text, chosen=True)
                return False
            if any(target.kind == "elsewhere" for target in self._targets):
                self._block(arg, None, given)
            else:
                self._pass(arg, given)
            return True
        is_named = keyword is not None and flow.follows(keyword)
        if slots is None and keyword and is_named:
            self._poison(arg, keyword)
        if slots is None or (not slots and not is_named):
            return False
        if flow.is_scale:
            self._block(arg, keyword)
            return True
        self._end(arg, keyword, index, slots)
        return True

    def _star(self, arg: cst.Arg, index: int) -> None:
        """Keeps the parameters that ``*args`` may hold."""
        orders = [d for t in self._targets if (d := t.definition) is not None and arg.star == "*"]
        for definition in () if self._is_empty(arg.value) else orders:
            left = set(self._flow.project.order(definition)[index:])
            left -= {other.keyword.value for other in self._node.args if other.keyword}
            names = [name for name in left if self._flow.follows(name)]
            kind = "field" if definition.is_class else "argument"
            slots = [(kind, definition.name, name) for name in names]
            text = f"`{self._source.code(arg)}` may hold it"
            self._flow.keep(slots, self._source, arg, text, chosen=True)

    def _is_empty(self, star: cst.BaseExpression) -> bool:
        """Returns whether ``*args`` are a function's own, and no call of it gives it any."""
        function = self._source.enclosing(self._node, cst.FunctionDef)
        own = function.params.star_arg if function is not None else None
        if function is None or not isinstance(own, cst.Param) or own.name.value != last_name(star):
            return False
        calls = self._flow.project.calls.get(function.name.value, [])
        given = [[a.star for a in call.args if not a.keyword and a.star != "**"] for call in calls]
        count = len(function.params.params)
        return bool(calls) and all(len(stars) <= count and "*" not in stars for stars in given)

    def _given(self, keyword: str | None, index: int) -> set[Slot]:
        """Returns the slots of the given definitions that an argument is passed to."""
        flow, found = self._flow, set()
        for target in self._targets:
            if target.kind == "any" and keyword and flow.follows(keyword):
                found |= {flow.field(owner, keyword) for owner in flow.project.owners(keyword)}
            if target.definition is None:
                continue
            order = flow.project.order(target.definition)
            position = index - int(self._is_partial) + target.bound
            name = keyword or (order[position] if 0 <= position < len(order) else None)
            if name is None or not flow.follows(name) or target.name in dtypes.CAST_FUNCTIONS:
                continue
            if target.definition.is_class:
                owner = flow.project.owner(target.name, name)
                found |= {("field", owner, name)} if owner else set()
            elif name in target.definition.parameters:
                found.add(("argument", target.name, name))
            elif keyword and (owner := flow.project.made_by(target.definition, keyword)):
                found.add(flow.field(owner, keyword))
        return found

    def _pass(self, arg: cst.Arg, given: Iterable[Slot]) -> None:
        flow, source = self._flow, self._source
        chosen = flow.constants(source, arg.value)
        in_module = source.enclosing(self._node, cst.ClassDef) is not None
        is_constant = chosen == {"float32"} and not flow.slots(source, arg.value)
        if is_constant and in_module:
            same = f'dtype_policy="float32" on {self._name} says the same'
            text = f"`{source.code(arg)}` is a choice: {same}"
            flow.keep(given, source, arg, text, chosen=True)
        flow.use(source, arg.value, flows=given, edits=[(arg, None)])

    def _end(self, arg: cst.Arg, keyword: str | None, index: int, slots: frozenset[Slot]) -> None:
        """Reads an argument of a function that is not given."""
        flow, source, name = self._flow, self._source, self._name
        kinds = {target.kind for target in self._targets}
        imported = source.imported(self._node.func)
        is_last = (
            index == len(self._node.args) - 1 or self._node.args[index + 1].keyword is not None
        )
        is_init = bool(_INITIALIZER.fullmatch(name)) or self._is_initializer(self._node.func)
        is_param = "param" in name and index >= 2
        is_derived = self._is_class() and all(
            self._flow.project.is_flax_class(t.definition)  # type: ignore[arg-type]
            for t in self._targets
        )
        is_layer = "flax" in kinds or is_init or is_param or is_derived
        if is_layer and (keyword is not None or is_init or is_param):
            if not slots:
                self._note_layer(arg)
            elif keyword == "dtype" and "flax" in kinds and "router" in self._assigned_name():
                text = "a router stays in float32 for its choice of experts"
                flow.use(source, arg.value, edits=[(arg, _in_float32)], note=text)
            elif keyword is not None or is_last:
                flow.use(source, arg.value, edits=[(arg, None)])
            elif slots - {DATA}:
                _put_float32(flow, source, arg.value)
        elif not slots - {DATA}:
            self._note_data(arg, slots)
            if keyword is not None and flow.follows(keyword):
                self._poison(arg, keyword)
        elif keyword in dtypes.RESULT_OPTIONS:
            flow.use(source, arg.value, edits=[(arg, None)])
        elif imported.startswith("jax.") or "array" in kinds or name in dtypes.CREATORS:
            self._array(arg, keyword, index, is_last, imported)
        else:
            self._block(arg, keyword)

    def _assigned_name(self) -> str:
        statement = self._source.parent(self._node)
        return last_name(assigned(statement)[0]) if isinstance(statement, cst.Assign) else ""

    def _is_class(self) -> bool:
        """Returns whether classes of the given files are called, and nothing else."""
        found = [t.definition for t in self._targets]
        return bool(found) and all(d is not None and d.is_class for d in found)

    def _array(
        self, arg: cst.Arg, keyword: str | None, index: int, is_last: bool, imported: str
    ) -> None:
        """Reads the dtype of a function of JAX: it goes, or float32 stands in its place."""
        flow, source, name = self._flow, self._source, self._name
        position = dtypes.CREATORS.get(name, dtypes.TYPED.get(name))
        if keyword != "dtype" and (keyword is not None or index != position):
            self._block(arg, keyword)
            return
        by_default = name in dtypes.CREATORS and not imported.startswith("numpy.")
        if not by_default or (keyword is None and not is_last):
            _put_float32(flow, source, arg.value)
            return
        function = source.enclosing(self._node, cst.FunctionDef, cst.ClassDef)
        where = source.code(source.enclosing(self._node, cst.SimpleStatementLine) or self._node)
        named = f"{where} {function.name.value if function else ''}".lower()
        is_cache = name in ("zeros", "empty") and "cache" in named
        flow.use(source, arg.value, edits=[(arg, None)], note=_CACHE if is_cache else None)

    def _block(self, arg: cst.Arg, keyword: str | None, given: Iterable[Slot] = ()) -> None:
        """Keeps a dtype that is passed to a function that is not given, and those `given` to."""
        flow, source = self._flow, self._source
        function = self._node.args[0].value if self._is_partial else self._node.func
        reason = f"it reaches `{source.code(function)}`, which is not in the given files"
        if self._targets and all(target.kind == "given" for target in self._targets):
            what = "a base of" if self._is_class() else "the `**` arguments of"
            reason = f"it reaches {what} `{source.code(function)}`"
        flow.use(source, arg.value, reason=reason)
        flow.keep(given, source, arg, reason, chosen=True)
        if keyword is not None:
            self._poison(arg, keyword)

    def _poison(self, arg: cst.Arg, keyword: str) -> None:
        """Keeps the fields that an argument of an unknown call may be passed to."""
        project = self._flow.project
        called = self._source.code(self._node.func)
        if all(t.kind == "given" for t in self._targets) and not self._is_class():
            unpacking = project.splatted.keys() if self._targets else set()
            values = project.owners(keyword) & (project.values | unpacking)
            owners = {self._flow.field(owner, keyword) for owner in values}
            self._flow.keep(owners, self._source, arg, f"`{called}` may pass it", chosen=True)

    def _note_layer(self, arg: cst.Arg) -> None:
        flow, source = self._flow, self._source
        chosen = flow.constants(source, arg.value)
        if chosen & dtypes.HALF_FLOATS:
            flow.note(source, arg, f"`{source.code(arg)}` is obeyed: delete it, a policy decides")
        elif "float32" in chosen and dtypes.NORMS.search(self._name):
            flow.note(source, arg, f"`{source.code(arg)}`: norms run in float32 under a policy")
        elif "float32" in chosen:
            text = f'`{source.code(arg)}` is obeyed; dtype_policy="float32" says the same'
            flow.note(source, arg, text)

    def _note_data(self, arg: cst.Arg, slots: frozenset[Slot]) -> None:
        flow, source = self._flow, self._source
        is_buffer = slots and self._name in ("zeros", "empty", "full")
        if is_buffer and not may_be_integer(flow.project, source, arg.value):
            text = "a buffer in the dtype of data is float32 to the code: policy.compute_dtype()"
            flow.note(source, arg, text)

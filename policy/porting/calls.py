"""Reads calls: where an argument that is a dtype goes, and its replacement."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import libcst as cst

from policy.porting import dtypes, operands
from policy.porting.definitions import Callee, Definition
from policy.porting.dtypes import DATA, Slot
from policy.porting.edits import Edit, is_pure
from policy.porting.syntax import assigned, is_decorated, keyword_of, last_name, nodes_of

if TYPE_CHECKING:
    from policy.porting.flow import DtypeFlow

_CAST_KEYWORDS = (None, "dtype", "new_dtype")
_INITIALIZER = re.compile(r"(\w*_)?init(ializer)?(_fn)?")
_CACHE = "a cache is float32 now: policy.compute_dtype() as its dtype halves it"
_BUFFER = "a buffer in the dtype of data is float32 to the code: policy.compute_dtype()"
_IN_FLOAT32 = "a cast to float32 now: it may go if all that it takes are floats"
_TREE_MAPS = ("jax.tree.map", "jax.tree_map", "jax.tree_util.tree_map")


def read_call(flow: DtypeFlow, node: cst.Call) -> None:
    """Reads a call: its casts and dtype arguments, and the expressions within."""
    if not _read_cast(flow, node):
        read = _Call(flow, node)
        for index, arg in enumerate(node.args):
            if not read.argument(index, arg):
                flow.visit(arg.value)
    flow.visit(node.func)


def read_dict(flow: DtypeFlow, node: cst.Dict) -> bool:
    """Reads a dict that layers get by ``**``, whose dtypes are arguments; False for others."""
    targets = _unpacking(flow, node)
    if not targets or any(t.kind != "flax" and not t.is_class for t in targets):
        return False
    for element in node.elements:
        key = getattr(getattr(element, "key", None), "raw_value", "")
        if flow.follows(key) and flow.slots(element.value) is not None:
            given = [flow.field(t.name, key) for t in targets if t.is_class]
            flow.use(element.value, flows=given, change=(element, None))
        else:
            flow.visit(element.value)
    return True


def _unpacking(flow: DtypeFlow, node: cst.CSTNode) -> list[Callee]:
    """Returns the callables that get a dict by ``**``, by the variable that it is assigned to."""
    return [t for one in assigned(flow.parent(node)) for t in flow.unpacked(last_name(one))]


# --------------------------------------------------------------------------------------------------
# Casts
# --------------------------------------------------------------------------------------------------


def _read_cast(flow: DtypeFlow, node: cst.Call) -> bool:
    """Reads ``x.astype(dtype)`` and ``jnp.asarray(x, dtype)``; False for other calls."""
    name, imported = last_name(node.func), flow.imported(node.func)
    if isinstance(node.func, cst.Attribute) and not imported and name == "astype":
        operand, given = node.func.value, node.args
    elif imported.startswith(("jax.", "numpy.")) and name in dtypes.CAST_FUNCTIONS and node.args:
        operand, given = node.args[0].value, node.args[1:2]
    else:
        return False
    if len(given) != 1 or keyword_of(given[0]) not in _CAST_KEYWORDS:
        return False
    dtype = given[0].value
    slots = flow.slots(dtype)
    if slots is None:
        return False
    flow.visit(operand)
    followed = slots - {DATA}
    tree = _mapped(flow, node, operand)
    if tree is not None and followed and operands.is_float_array(flow, tree):
        node, operand = flow.enclosing(node, cst.Call), tree
    is_float = not imported.startswith("numpy.") and operands.is_float_array(flow, operand)
    # other functions than astype take sequences and numbers, too
    is_number = name == "astype" and not isinstance(operand, cst.Comparison)
    if followed and not is_float and not (is_number and operands.is_promoted(flow, node)):
        _put_float32(flow, dtype, note=_IN_FLOAT32)
    elif followed or (
        _is_needless(flow, node, dtype, operand, is_float) and not _is_branch(flow, node, operand)
    ):
        flow.use(dtype, change=_without_cast(flow, node, operand))
    elif not slots and not flow.is_scale:
        _note_cast(flow, node, flow.constants(dtype))
    return True


def _is_needless(
    flow: DtypeFlow, node: cst.Call, dtype: cst.CSTNode, operand: cst.CSTNode, is_float: bool
) -> bool:
    """Returns whether a cast in a model's code goes, which casts floats back to their input's
    dtype, or to float32 what a policy takes in float32 anyway.
    """
    if flow.is_scale or not operands.is_of_model(flow, node):
        return False
    if flow.slots(dtype):
        return is_float and not operands.may_be_integer(flow, dtype)
    names = (flow.class_of(node), flow.around(node, cst.FunctionDef))
    is_norm = any(name.lower().endswith("norm") for name in names)
    is_wide = is_norm or (last_name(node.func) == "astype" and operands.is_reduced(flow, node))
    is_float32 = flow.constants(dtype) == {"float32"}
    return is_wide and is_float32 and not operands.may_be_integer(flow, operand)


def _put_float32(flow: DtypeFlow, dtype: cst.CSTNode, note: str = "") -> None:
    """Puts float32 in the place of a dtype, by the name that the file imports `jax.numpy` by."""
    module = flow.name_of("jax.numpy", dtype)
    if module is None:
        flow.use(dtype, change="the file doesn't import jax.numpy")
    else:
        value = cst.parse_expression(f"{module}.float32")
        flow.use(dtype, change=(dtype, lambda _: value), note=note)


def _mapped(flow: DtypeFlow, node: cst.Call, operand: cst.CSTNode) -> cst.BaseExpression | None:
    """Returns the tree of ``jax.tree.map(lambda x: x.astype(dtype), tree)``, or None."""
    function, call = flow.parent(node), flow.enclosing(node, cst.Call)
    if call is None or not isinstance(function, cst.Lambda) or not isinstance(operand, cst.Name):
        return None
    names = [param.name.value for param in function.params.params]
    is_map = flow.imported(call.func) in _TREE_MAPS and len(call.args) == 2
    return call.args[1].value if is_map and names == [operand.value] else None


def _without_cast(flow: DtypeFlow, node: cst.Call, operand: cst.CSTNode) -> Edit:
    """Returns the edit that puts an operand in the place of its cast."""
    statement = flow.parent(node)
    if _assigns_itself(flow, statement, operand):
        return flow.parent(statement), None
    places = [i for i, arg in enumerate(node.args) if arg.value is operand]
    parentheses = _needs_parentheses(flow, node, operand)
    is_short = "\n" not in flow.full_text(operand)

    def change(updated: cst.Call) -> cst.BaseExpression:
        inner: Any = updated.args[places[0]].value if places else updated.func.value  # type: ignore
        if operands.is_variable(flow, operand):
            return cst.parse_expression("_[...]").with_changes(value=inner)
        held = [n for p in (*updated.lpar, *updated.rpar) for n in nodes_of(p)]
        if any(isinstance(n, cst.Comment) for n in held):
            return inner.with_changes(lpar=updated.lpar, rpar=updated.rpar)
        if not parentheses:
            return inner.with_changes(lpar=[], rpar=[]) if is_short else inner
        if inner.lpar:
            return inner
        lpar, rpar = updated.lpar or [cst.LeftParen()], updated.rpar or [cst.RightParen()]
        return inner.with_changes(lpar=lpar, rpar=rpar)

    return node, change


def _needs_parentheses(flow: DtypeFlow, node: cst.Call, operand: cst.CSTNode) -> bool:
    """Returns whether an operand needs them in its cast's place: for its order or its lines."""
    parent = flow.parent(node)
    bare: Any = operand.with_changes(lpar=[], rpar=[])
    is_simple = isinstance(operand, (cst.Name, cst.Attribute, cst.Call, cst.Subscript))
    is_alone = isinstance(parent, (cst.Assign, cst.AnnAssign, cst.Return, cst.Arg, cst.Element))
    if not (is_simple or is_alone):
        return True
    try:
        ast.parse(flow.full_text(bare).strip(), mode="eval")
    except SyntaxError:  # it goes on in a second line
        return not isinstance(parent, (cst.Arg, cst.Element))
    return False


def _assigns_itself(flow: DtypeFlow, statement: cst.CSTNode, operand: cst.CSTNode) -> bool:
    """Returns whether ``x = x.astype(dtype)`` would become ``x = x``."""
    if not isinstance(statement, cst.Assign) or len(statement.targets) != 1:
        return False
    return flow.code(statement.targets[0].target) == flow.code(operand)


def _is_branch(flow: DtypeFlow, node: cst.Call, operand: cst.CSTNode) -> bool:
    """Returns whether ``x = x.astype(dtype)`` is all that a branch does."""
    block = flow.enclosing(node, cst.BaseSuite)
    is_if = isinstance(flow.parent(block), (cst.If, cst.Else))
    return is_if and len(block.body) == 1 and _assigns_itself(flow, flow.parent(node), operand)


def _note_cast(flow: DtypeFlow, node: cst.Call, chosen: set[str]) -> None:
    """Notes a cast to a constant dtype; one to the dtype of data is float32 for the code."""
    outer = flow.enclosing(node, cst.Call)
    name = last_name(outer.func) if outer is not None else ""
    if chosen & dtypes.HALF_FLOATS:
        flow.note(node, "an explicit cast to a half dtype is obeyed: delete it")
    elif "float32" not in chosen:
        return
    elif "softmax" in name or "loss" in name or "entropy" in name:
        flow.note(node, f"{name} runs in float32 under a policy: its cast may go")
    elif operands.is_of_model(flow, node):
        flow.note(
            node,
            "a cast of floats to float32 has no effect in a module, unless both operands of a "
            "matmul are cast, which runs in float32 then",
        )
    else:
        flow.note(node, "a cast to float32 is obeyed; norms, softmaxes and losses don't need it")


# --------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------


def _in_float32(updated: cst.Arg) -> cst.Arg:
    value = cst.SimpleString('"float32"')
    return updated.with_changes(keyword=cst.Name("dtype_policy"), value=value)


class _Call:
    def __init__(self, flow: DtypeFlow, node: cst.Call):
        self._flow, self._node, self._name = flow, node, last_name(node.func)
        self._is_partial = self._name == "partial"

    @functools.cached_property
    def _targets(self) -> list[Callee]:
        flow, func = self._flow, self._node.func
        if self._name == "dict":
            return _unpacking(flow, self._node)
        if self._is_partial:
            made = flow.targets(self._node)
            return [Callee(t.kind, t.name, t.definition, 0) for t in made]
        if isinstance(func, cst.Call):
            if made := flow.targets(func):
                return made
            is_init, makers = flow.is_initializer(func), flow.targets(func.func)
            return [t for t in makers if is_init or _INITIALIZER.fullmatch(t.name)]
        return [t for target in flow.targets(func) for t in flow.forwarded(target)]

    def argument(self, index: int, arg: cst.Arg) -> bool:
        """Reads an argument; False if it is no dtype."""
        flow, keyword = self._flow, keyword_of(arg)
        if arg.star:
            self._star(arg, index)
            return False
        slots = flow.slots(arg.value)
        given = self._given(keyword, index)
        by_maker = is_decorated(flow.enclosing(arg, cst.FunctionDef), "classmethod")
        flow.passed |= given if by_maker else given - (slots or frozenset())
        if given and not is_pure(arg.value):
            flow.keep(given, arg, f"`{flow.code(arg.value)}` is passed to it", chosen=True)
            return False
        if not given and slots is None:
            self._poison(arg)
        if not given and not slots and (slots is None or not flow.follows(keyword or "")):
            return False
        is_unknown = any(target.kind == "elsewhere" for target in self._targets)
        if is_unknown if given else flow.is_scale:
            self._block(arg, given)
        elif given:
            self._pass(arg, given)
        else:
            self._end(arg, index, slots or frozenset())
        return True

    def _star(self, arg: cst.Arg, index: int) -> None:
        """Keeps the parameters that ``*args`` may hold."""
        flow = self._flow
        if arg.star == "**" or self._is_empty(arg.value):
            return
        named = {keyword_of(other) for other in self._node.args}
        for definition in [t.definition for t in self._targets if t.definition is not None]:
            left = set(flow.order(definition)[index:]) - named
            kind = "field" if definition.is_class else "argument"
            slots = [(kind, definition.name, name) for name in left if flow.follows(name)]
            flow.keep(slots, arg, f"`{flow.code(arg)}` may hold it", chosen=True)

    def _is_empty(self, star: cst.BaseExpression) -> bool:
        """Returns whether ``*args`` are a function's own, and no call of it gives it any."""
        function = self._flow.enclosing(self._node, cst.FunctionDef)
        own = function.params.star_arg if function is not None else None
        if function is None or not isinstance(own, cst.Param) or own.name.value != last_name(star):
            return False
        calls = [c for c in self._flow.calls if last_name(c.func) == function.name.value]
        given = [[a.star for a in call.args if not a.keyword and a.star != "**"] for call in calls]
        count = len(function.params.params)
        return bool(calls) and all(len(stars) <= count and "*" not in stars for stars in given)

    def _given(self, keyword: str | None, index: int) -> set[Slot]:
        """Returns the slots of the given definitions that an argument is passed to."""
        flow, found = self._flow, set[Slot]()
        for target in self._targets:
            made = target.definition
            if target.kind == "any" and keyword and flow.follows(keyword):
                found |= {flow.field(owner, keyword) for owner in flow.owners(keyword)}
            order = flow.order(made) if made is not None else []
            position = index - int(self._is_partial) + target.bound
            name = keyword or (order[position] if 0 <= position < len(order) else "")
            if made is None or not flow.follows(name) or target.name in dtypes.CAST_FUNCTIONS:
                continue
            if not made.is_class and name in made.parameters:
                found.add(("argument", target.name, name))
                continue
            maker = target.name if made.is_class else _maker(flow, made, name)
            if owner := flow.owner(maker, name):
                found.add(("field", owner, name))
        return found

    def _pass(self, arg: cst.Arg, given: Iterable[Slot]) -> None:
        flow = self._flow
        is_constant = flow.constants(arg.value) == {"float32"} and not flow.slots(arg.value)
        if is_constant and flow.class_of(self._node):
            same = f'dtype_policy="float32" on {self._name} says the same'
            flow.keep(given, arg, f"`{flow.code(arg)}` is a choice: {same}", chosen=True)
        flow.use(arg.value, flows=given, change=(arg, None))

    def _end(self, arg: cst.Arg, index: int, slots: frozenset[Slot]) -> None:
        """Reads an argument of a function that is not given."""
        flow, name, keyword = self._flow, self._name, keyword_of(arg)
        kinds = {target.kind for target in self._targets}
        imported = flow.imported(self._node.func)
        is_last = all(other.keyword is not None for other in self._node.args[index + 1 :][:1])
        is_init = bool(_INITIALIZER.fullmatch(name)) or flow.is_initializer(self._node.func)
        by_position = is_init or ("param" in name and index >= 2)
        made = [t.definition for t in self._targets if t.definition is not None]
        is_derived = self._is_class() and all(map(flow.is_flax_class, made))
        is_layer = keyword is not None and ("flax" in kinds or is_derived)
        if by_position or is_layer:
            targets = assigned(flow.parent(self._node)) if "flax" in kinds else []
            if not slots:
                self._note_layer(arg)
            elif keyword == "dtype" and any("router" in last_name(one) for one in targets):
                text = "a router stays in float32 for its choice of experts"
                flow.use(arg.value, change=(arg, _in_float32), note=text)
            elif keyword is not None or is_last:
                flow.use(arg.value, change=(arg, None))
            elif slots - {DATA}:
                _put_float32(flow, arg.value)
        elif not slots - {DATA}:
            is_buffer = slots and name in ("zeros", "empty", "full")
            if is_buffer and not operands.may_be_integer(flow, arg.value):
                flow.note(arg, _BUFFER)
            self._poison(arg)
        elif keyword in dtypes.RESULT_OPTIONS:
            flow.use(arg.value, change=(arg, None))
        elif imported.startswith("jax.") or "array" in kinds or name in dtypes.CREATORS:
            self._array(arg, index, is_last, imported)
        else:
            self._block(arg)

    def _is_class(self) -> bool:
        """Returns whether classes of the given files are called, and nothing else."""
        return bool(self._targets) and all(target.is_class for target in self._targets)

    def _array(self, arg: cst.Arg, index: int, is_last: bool, imported: str) -> None:
        """Reads the dtype of a function of JAX: it goes, or float32 stands in its place."""
        flow, name, keyword = self._flow, self._name, keyword_of(arg)
        position = dtypes.CREATORS.get(name, dtypes.TYPED.get(name))
        by_default = name in dtypes.CREATORS and not imported.startswith("numpy.")
        if keyword != "dtype" and (keyword is not None or index != position):
            self._block(arg)
        elif not by_default or (keyword is None and not is_last):
            _put_float32(flow, arg.value)
        else:
            where = flow.code(flow.enclosing(self._node, cst.SimpleStatementLine) or self._node)
            named = f"{where} {flow.around(self._node, cst.FunctionDef, cst.ClassDef)}".lower()
            is_cache = name in ("zeros", "empty") and "cache" in named
            flow.use(arg.value, change=(arg, None), note=_CACHE if is_cache else "")

    def _block(self, arg: cst.Arg, given: Iterable[Slot] = ()) -> None:
        """Keeps a dtype that is passed to a function that is not given, and those `given` to."""
        flow = self._flow
        function = flow.code(self._node.args[0].value if self._is_partial else self._node.func)
        reason = f"it reaches `{function}`, which is not in the given files"
        if self._targets and all(target.kind == "given" for target in self._targets):
            what = "a base of" if self._is_class() else "the `**` arguments of"
            reason = f"it reaches {what} `{function}`"
        flow.use(arg.value, change=reason)
        flow.keep(given, arg, reason, chosen=True)
        if not given:
            self._poison(arg)

    def _poison(self, arg: cst.Arg) -> None:
        """Keeps the fields that an argument of an unknown call may be passed to."""
        flow, keyword = self._flow, keyword_of(arg)
        if keyword is None or not flow.follows(keyword):
            return
        if all(t.kind == "given" for t in self._targets) and not self._is_class():
            unpacking = flow.splatted.keys() if self._targets else set()
            values = flow.owners(keyword) & (flow.values | unpacking)
            owners = [flow.field(owner, keyword) for owner in values]
            text = f"`{flow.code(self._node.func)}` may pass it"
            flow.keep(owners, arg, text, chosen=True)

    def _note_layer(self, arg: cst.Arg) -> None:
        flow, code = self._flow, f"`{self._flow.code(arg)}`"
        chosen = flow.constants(arg.value)
        if chosen & dtypes.HALF_FLOATS:
            flow.note(arg, f"{code} is obeyed: delete it, a policy decides")
        elif "float32" in chosen and dtypes.NORMS.search(self._name):
            flow.note(arg, f"{code}: norms run in float32 under a policy")
        elif "float32" in chosen:
            flow.note(arg, f'{code} is obeyed; dtype_policy="float32" says the same')


def _maker(flow: DtypeFlow, definition: Definition, name: str) -> str:
    """Returns the class that a class method makes with its ``**`` arguments, or ``""``."""
    node = definition.node
    if not isinstance(node, cst.FunctionDef) or node.params.star_kwarg is None:
        return ""
    texts = [n.raw_value for n in nodes_of(node) if isinstance(n, cst.SimpleString)]
    is_maker = is_decorated(node, "classmethod") and name not in texts
    return flow.class_of(node) if is_maker else ""

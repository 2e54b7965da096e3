"""Dtype arguments of Flax's layers: those that go, those that stay, and why."""

from __future__ import annotations

import ast
import dataclasses
from collections import defaultdict

from policy.porting.dtypes import ARGUMENTS, constant, equal_rule, kind_of_dtype, last_name
from policy.porting.imports import LAYERS
from policy.porting.names import PARTIALS, Names
from policy.porting.source import PythonFile

LinesByReason = dict[str, set[int]]  # lines by their reason


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """A call that makes a layer, or a partial of its class."""

    node: ast.Call
    layer: str
    target: str  # the attribute or variable that holds the layer, or ""

    @property
    def name(self) -> str:
        """Its `name` argument, or the attribute or variable that holds it, or ""."""
        given = [k.value for k in self.node.keywords if k.arg == "name"]
        values = [each.value for each in given if isinstance(each, ast.Constant)]
        return str(values[0]) if values else self.target

    def arguments(self) -> list[ast.keyword]:
        """Returns the dtype arguments."""
        return [keyword for keyword in self.node.keywords if keyword.arg in ARGUMENTS]


def layer_calls(source: PythonFile, names: Names) -> list[LayerCall]:
    """Returns the calls in which the file shows a layer of Flax's, by imports and aliases."""
    found = []
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        made = node.args[0] if node.args and names.dotted(node.func) in PARTIALS else node.func
        package, _, layer = (names.dotted(made) or "").rpartition(".")
        is_flax = package.startswith(("flax.", "mpmodules.")) and layer.partition(":")[0] in LAYERS
        in_text = any(isinstance(each, ast.JoinedStr) for each in source.ancestors(node))
        if is_flax and not in_text:
            found.append(LayerCall(node, f"{package}.{layer}", _target(source, node)))
    return found


def arguments_that_go(
    source: PythonFile, names: Names, notes: LinesByReason
) -> dict[ast.Call, list[str]]:
    """Returns the dtype arguments that a policy replaces, by call: all of a class, or none.

    Args:
      notes: gets the arguments that stay.
    """
    by_owner: dict[ast.AST, list[LayerCall]] = defaultdict(list)
    for call in layer_calls(source, names):
        by_owner[_owner(source, call.node)].append(call)
    attributes = (node for node in source.nodes if isinstance(node, ast.Attribute))
    read = {last_name(node.value) for node in attributes if node.attr in ARGUMENTS}
    found: dict[ast.Call, list[str]] = {}
    for owner, calls in by_owner.items():
        reasons = [(call, why) for call in calls if (why := _reason_to_stay(names, call, read))]
        if reasons and any(call.arguments() for call in calls):
            where = getattr(owner, "name", "the file")
            call, why = reasons[0]
            note = f"the dtypes of {where} stay, as line {call.node.lineno} {why}"
            notes[note] |= {a.value.lineno for call in calls for a in call.arguments()}
            continue
        for call in calls:
            found[call.node] = []
            for argument in call.arguments():
                kind = kind_of_dtype(names, argument.value, str(argument.arg))
                if kind == "model":
                    found[call.node].append(str(argument.arg))
                elif kind == "own":
                    notes[_own_note(source, names, call, argument)].add(argument.value.lineno)
    return {node: arguments for node, arguments in found.items() if arguments}


def _reason_to_stay(names: Names, call: LayerCall, read: set[str]) -> str:
    """Returns why the dtypes of a layer can't be known from the file, or ""."""
    package, _, layer = call.layer.rpartition(".")
    if package not in ("mpmodules.linen", "mpmodules.nnx"):
        return f"calls Flax's own {layer}: import it by its name"
    if ":" in layer and call.arguments():
        return f"calls {layer.partition(':')[2]}, whose code reads a dtype"
    if call.target in read and call.arguments():
        return f"makes `{call.target}`, whose dtype is read"
    for keyword in call.node.keywords:
        if keyword.arg is None and not _is_without_dtypes(names, keyword.value):
            return "may pass a dtype by `**`"
    for argument in call.node.args[1:]:
        if constant(names, argument) or "dtype" in last_name(argument):
            return "passes a dtype by its position"
    for argument in call.arguments():
        if kind_of_dtype(names, argument.value, str(argument.arg)) == "unknown":
            return f"computes a dtype: `{names.source.code(argument)}`"
    return ""


def _is_without_dtypes(names: Names, node: ast.expr) -> bool:
    """Returns whether an expression is a dict that is written out in its scope, without dtypes."""
    if isinstance(node, ast.Name):
        bindings, _ = names.bindings(node)
        made = [each for each in bindings if isinstance(each, ast.Dict | ast.Call)]
        return len(made) == len(bindings) == 1 and _is_without_dtypes(names, made[0])
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        return not {None, *ARGUMENTS} & set(keys)
    if not isinstance(node, ast.Call) or last_name(node.func) != "dict" or node.args:
        return False
    return not {None, *ARGUMENTS} & {keyword.arg for keyword in node.keywords}


def _own_note(source: PythonFile, names: Names, call: LayerCall, argument: ast.keyword) -> str:
    dtype = constant(names, argument.value) if argument.arg == "dtype" else None
    said = equal_rule(call.name, dtype)
    layer = call.layer.rpartition(".")[2]
    same = f"; the rule {said} says the same" if said else ""
    return f"`{source.code(argument)}` of {call.name or layer} stays and is obeyed{same}"


def _owner(source: PythonFile, node: ast.AST) -> ast.AST:
    """Returns the class of a call, or the outermost function, or the module."""
    around = [n for n in source.ancestors(node) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    classes = [each for each in around if isinstance(each, ast.ClassDef)]
    return (classes or around[-1:] or [source.tree])[0]


def _target(source: PythonFile, node: ast.Call) -> str:
    parent = source.parents[node]
    if isinstance(parent, ast.Assign):
        return last_name(parent.targets[0]) if len(parent.targets) == 1 else ""
    return last_name(getattr(parent, "target", None))

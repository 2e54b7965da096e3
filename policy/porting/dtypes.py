"""Kinds of dtype arguments: the model's dtype, one of the layer's own, or unknown from the file."""

from __future__ import annotations

import ast
import re
from typing import Literal

from policy.porting.names import Names

# the model's dtype, one of the layer's own, None, or one that the file doesn't show
DtypeKind = Literal["model", "own", "none", "unknown"]
ARGUMENTS = ("dtype", "param_dtype")
_WORDS = "compute|computation|activations?|act|model|module|matmul|mm|half|float|fprop|train"
_MODEL = re.compile(rf"_*(({_WORDS})_)?dtypes?(_mm)?", re.IGNORECASE)
_PARAMS = re.compile(r"_*(params?|parameters?|weights?)_dtype", re.IGNORECASE)
_DTYPE = re.compile(r"(float|bfloat|u?int|complex)\d+|float_|bool_?|float8_\w+")
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_WRAPPERS = ("jax.numpy.dtype", "numpy.dtype", "jax.dtypes.canonicalize_dtype")


def last_name(node: ast.AST | None) -> str:
    """Returns the last name of `a.b.c` and of `c`, or ""."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_dtype_name(name: str) -> bool:
    """Returns whether a name is one of those that hold the dtype of a model or its parameters."""
    return bool(_MODEL.fullmatch(name) or _PARAMS.fullmatch(name))


def constant(names: Names, node: ast.AST) -> str | None:
    """Returns the name of a dtype that is written out, as ``float32``, or None."""
    if isinstance(node, ast.Constant):
        whole = node.value if isinstance(node.value, str) else ""
        return whole if _DTYPE.fullmatch(whole) else None
    whole = names.dotted(node) or ""
    package, _, last = whole.rpartition(".")
    is_known = package in ("jax.numpy", "numpy", "ml_dtypes") and _DTYPE.fullmatch(last)
    return last if is_known else None


def kind_of_dtype(names: Names, node: ast.expr, argument: str, depth: int = 0) -> DtypeKind:
    """Returns the kind of an expression that is the `dtype` or `param_dtype` of a layer.

    A name that nothing but the caller binds, or an attribute, is the model's dtype if it is called
    so, and one of its own if it is called after a layer, as `router_dtype`.
    """
    if isinstance(node, ast.Constant) and node.value is None:
        return "none"
    if constant(names, node) is not None:
        return "own"
    if isinstance(node, ast.Call) and names.dotted(node.func) in _WRAPPERS and len(node.args) == 1:
        return kind_of_dtype(names, node.args[0], argument, depth)
    if isinstance(node, ast.IfExp | ast.BoolOp):
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else node.values
        kinds = {kind_of_dtype(names, part, argument, depth) for part in parts} - {"none"}
        return "model" if kinds == {"model"} else "unknown"
    if isinstance(node, ast.Name):
        return _kind_of_name(names, node, argument, depth)
    return _kind_by_name(last_name(node), argument)


def _kind_of_name(names: Names, node: ast.Name, argument: str, depth: int) -> DtypeKind:
    bindings, scope = names.bindings(node)
    by_name = _kind_by_name(node.id, argument)
    kinds: set[DtypeKind] = set()
    for binding in bindings:
        if isinstance(binding, ast.expr) and depth < 4:
            inner = kind_of_dtype(names, binding, argument, depth + 1)
            # a switch for the whole file, as DTYPE = jnp.bfloat16
            is_switch = inner == "own" and isinstance(scope, ast.Module)
            kinds.add(by_name if is_switch else inner)
        else:
            kinds.add(by_name if isinstance(binding, str | ast.arg) else "unknown")
    return kinds.pop() if len(kinds) == 1 else "unknown"


def _kind_by_name(name: str, argument: str) -> DtypeKind:
    if _MODEL.fullmatch(name) or (argument == "param_dtype" and _PARAMS.fullmatch(name)):
        return "model"
    return "own" if "dtype" in name.lower() else "unknown"


def equal_rule(path: str, dtype: str | None) -> str:
    """Returns the rule that gives a layer a dtype, or "" where its path or dtype is not known."""
    short = _SHORT.get(dtype or "")
    return f'{{".*{path}": "c={short}"}}' if path and short else ""

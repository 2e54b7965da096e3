"""Writes `mpmodules/linen/__init__.pyi` and `mpmodules/nnx/__init__.pyi`, what type checkers read
of both APIs.

    python -m tests.checkers.make_stubs

Run it after a change of what an API exports, with the newest supported Flax. The stubs name what
the API itself re-exports of Flax's with a star import, of which a type checker would take Flax's
classes for ours. Constructors of the nnx layers are Flax's, with `dtype_policy` added; linen's
layers are dataclasses, whose fields say the same.
"""

import ast
import builtins
import functools
import importlib
import inspect
import pkgutil
import textwrap
import types
from pathlib import Path
from typing import Any

import flax.linen
import flax.nnx
import flax.typing

import mpmodules
from mpmodules import linen, nnx

APIS: dict[str, types.ModuleType] = {"linen": linen, "nnx": nnx}
FLAX: dict[str, types.ModuleType] = {"linen": flax.linen, "nnx": flax.nnx}

_HEADER = '''"""{summary}

Written by `python -m tests.checkers.make_stubs`, from the code of {package} and of Flax.
"""

'''

_NNX_IMPORTS = """\
import collections.abc as _abc
import typing as _typing

import flax.nnx as _nnx
import flax.nnx.filterlib as _filterlib
import flax.nnx.nn.recurrent as _recurrent
import flax.typing as _types
import jax as _jax

from policy.core.policy import Policy as _Policy
"""

# Overload resolution of a user's class skips `__init__`, which knows nothing of `dtype_policy`; a
# layer's knows it.
_LAYER_META = """
_T = _typing.TypeVar("_T")

class _LayerMeta(_ModuleMeta):
    def __call__(cls: type[_T], *args: _typing.Any, **kwargs: _typing.Any) \
-> _T: ...  # type: ignore[override]
"""

_POLICY_PARAMETER = "dtype_policy: _Policy | str | None = None"


def stub_of(api: str) -> str:
    package = APIS[api]
    summary = (package.__doc__ or "").partition("\n")[0]
    ours = exported_by_us(api)
    takes_flaxs = [name for name in ours if _takes_flaxs_arguments(getattr(package, name))]
    layers = takes_flaxs if api == "nnx" else []
    parts = [_HEADER.format(summary=summary, package=package.__name__)]
    if layers:
        parts.append(_NNX_IMPORTS)
    flaxs = exported_by_flax(api).items()
    parts += [f"from {module} import {name} as {name}\n" for name, module in flaxs]
    private = [name for name, (_, source) in ours.items() if name in layers or name != source]
    for name, (module, source) in ours.items():
        imported = f"{source} as {f'_{name}' if name in private else name}"
        line = f"from {module} import {imported}\n"
        parts.append(line if len(line) <= 101 else f"from {module} import (\n    {imported},\n)\n")
    if layers:
        module, meta = nnx.Module.__module__, type(nnx.Module).__name__
        parts += [f"from {module} import {meta} as _ModuleMeta\n", _LAYER_META]
        parts += [_layer(getattr(package, name)) for name in layers]
    # Other names are not re-exported.
    parts += [f"\n{name} = _{name}\n" for name in private if name not in layers]
    return "".join(parts)


def exported_by_us(api: str) -> dict[str, tuple[str, str]]:
    """Returns the names that replace Flax's, or are added: each one's module and name there."""
    source = Path(inspect.getfile(APIS[api])).read_text()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    found: dict[str, tuple[str, str]] = {}
    for node in imports:
        if node.module is not None and node.module.startswith(f"{mpmodules.__name__}."):
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
    public = (name for name in sorted(found) if not name.startswith("_"))
    return {name: found[name] for name in public if hasattr(APIS[api], name)}


def exported_by_flax(api: str) -> dict[str, str]:
    """Returns the names that an API takes from Flax as they are, with the module that a type
    checker finds each in.
    """
    package = FLAX[api]
    tree = ast.parse(Path(inspect.getfile(package)).read_text())
    # Our APIs import submodules on demand.
    submodules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = dict.fromkeys((*dir(package), *submodules), package.__name__)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):  # Flax makes it on demand, and tells type checkers of it
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            modules |= dict.fromkeys(names, package.__name__)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # Not re-exported, to a type checker.
            hidden = [alias.name for alias in node.names if alias.asname is None]
            module = f"{package.__name__}.{node.module}" if node.level else node.module
            modules |= dict.fromkeys(hidden, module)
    public = {name for name in modules if not name.startswith("_")} - {*exported_by_us(api)}
    return {name: modules[name] for name in sorted(public)}


def path_of(api: str) -> Path:
    return Path(inspect.getfile(APIS[api])).with_suffix(".pyi")


def _takes_flaxs_arguments(member: Any) -> bool:
    if not isinstance(member, type) or "_upstream_class" not in vars(member):
        return False
    return "__init__" in vars(vars(member)["_upstream_class"])


def _layer(cls: type) -> str:
    upstream = vars(cls)["_upstream_class"]
    init: Any = inspect.unwrap(vars(upstream)["__init__"])
    tree = ast.parse(textwrap.dedent(inspect.getsource(init))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError(f"{init} is no function in Flax's source.")
    head = f"class {cls.__name__}(_{cls.__name__}, metaclass=_LayerMeta):"
    parameters = _parameters(tree.args, init.__globals__)
    lines = "".join(f"        {parameter},\n" for parameter in parameters)
    return f"\n{head}\n    def __init__(\n{lines}    ) -> None: ...\n"


def _parameters(args: ast.arguments, names: dict[str, Any]) -> list[str]:
    """Returns the parameters of one of Flax's constructors as source text, with `dtype_policy`
    among them.
    """
    text = functools.partial(_parameter, names=names)
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    parameters = [*map(text, positional, defaults)]
    parameters.append("*" if args.vararg is None else f"*{text(args.vararg, None)}")
    parameters += map(text, args.kwonlyargs, args.kw_defaults)
    parameters.append(_POLICY_PARAMETER)
    if args.kwarg is not None:
        parameters.append(f"**{text(args.kwarg, None)}")
    return parameters


def _parameter(arg: ast.arg, default: ast.expr | None, names: dict[str, Any]) -> str:
    if arg.arg == "self":
        return "self"
    annotation = "_typing.Any"
    if arg.annotation is not None:
        annotation = ast.unparse(_Public(names).visit(arg.annotation))
    if default is None:
        return f"{arg.arg}: {annotation}"
    try:
        value = ast.literal_eval(default)
        given = f'"{value}"' if isinstance(value, str) else ast.unparse(default)
    except ValueError:
        given = "..."
    return f"{arg.arg}: {annotation} = {given}"


class _Public(ast.NodeTransformer):
    """Rewrites the names in an annotation of Flax's to those that the stub imports."""

    def __init__(self, names: dict[str, Any]):
        self.names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return _parsed(_public_name(eval(ast.unparse(node), self.names), node.attr))

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.names:
            return node  # a builtin
        return _parsed(_public_name(self.names[node.id], node.id))

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return self.visit(_parsed(node.value)) if isinstance(node.value, str) else node


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


# What annotations may name, by the name that the stub gives to the module.
_MODULES = {
    "_abc": "collections.abc",
    "_typing": "typing",
    "_types": "flax.typing",
    "_nnx": "flax.nnx",
    "_jax": "jax",
    "_filterlib": "flax.nnx.filterlib",
    "_recurrent": "flax.nnx.nn.recurrent",
}


def _public_name(member: Any, name: str) -> str:
    if isinstance(member, type) and getattr(builtins, member.__name__, None) is member:
        return member.__name__
    for prefix, module in _MODULES.items():
        if getattr(importlib.import_module(module), name, None) is member:
            return f"{prefix}.{name}"
    raise LookupError(
        f"{name} is in none of {', '.join(_MODULES.values())}: add the module that a stub can name."
    )


if __name__ == "__main__":
    for api in APIS:
        path_of(api).write_text(stub_of(api))

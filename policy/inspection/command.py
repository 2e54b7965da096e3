"""Audits from the shell.

    python -m policy audit train:loss_fn --arg "{'w': f32[784,10]}" --arg bf16[32,784] --backward
    python -m policy audit models/net.py:example --html net.html --fail-on-findings

What is audited is a function (or an nnx module) by name, called with what each --arg says. One that takes no arguments
may return what to audit: a function and the tuple of its arguments, and a dict of keyword arguments if there are any:

    def example():
        model = Net()
        x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
        return model.apply, (jax.eval_shape(model.init, jax.random.key(0), x), x)
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from policy.inspection.audit import audit
from policy.inspection.kinds import KINDS
from policy.inspection.report import Audit, named
from policy.inspection.text import show


class CommandError(Exception):
    """What was asked for can't be done; the message says why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status: 0, 1 for findings where those are a failure, 2 for an error."""
    options = _parser().parse_args(argv)
    try:
        return _audit(options)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m policy", description="Dtype policies for JAX.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "audit",
        help="which dtypes a function really runs in, before it runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="kinds of findings:\n" + "\n".join(f"  {kind:25}{what}" for kind, what in KINDS.items()),
    )
    command.add_argument("target", metavar="module:function", help="a module's name or a .py file, and a name in it")
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="ARG",
        help="an argument: a shape (bf16[8,128], i32[4], f32[]), 'key', a Python number or string, or a list, tuple "
        "or dict of these; once for each argument",
    )
    command.add_argument("--backward", action="store_true", help="audit the gradients as well")
    command.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
    command.add_argument("--json", metavar="FILE", help="write the report as JSON; - is the standard output")
    command.add_argument("--ignore", action="append", default=[], metavar="KIND", help="leave out findings of a kind")
    command.add_argument("--fail-on-findings", action="store_true", help="exit with 1 where there are findings")
    return parser


def _audit(options: argparse.Namespace) -> int:
    for kind in options.ignore:
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, KINDS, 1)
            raise CommandError(f"--ignore {kind!r} is no kind of finding.{_did_you_mean(near)} See --help for all.")
    fn, args, kwargs = _call(_target(options.target), [parse_argument(text) for text in options.arg], options.target)
    try:
        report = audit(fn, *args, backward=options.backward, **kwargs)
    except Exception as error:  # whatever the user's function raises
        traceback.print_exc()
        raise CommandError(f"{options.target} can't be traced: {type(error).__name__}, see above.") from None
    report = named(report, options.target, without=options.ignore)
    _write(report, options)
    return int(bool(options.fail_on_findings and report.findings))


def _write(report: Audit, options: argparse.Namespace) -> None:
    if options.json == "-":
        print(report.to_json())
    else:
        show(report)
    files = {options.html: report.to_html, options.json if options.json != "-" else None: report.to_json}
    for name, contents in files.items():
        if name is not None:
            try:
                Path(name).write_text(contents(), encoding="utf-8")
            except OSError as error:
                raise CommandError(f"{name} can't be written: {error.strerror}.") from None


# ---------------------------------------------------------------------------------------------------------------------
# What to audit
# ---------------------------------------------------------------------------------------------------------------------


def _target(text: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names.

    Raises:
      CommandError: it is neither, or there is no such module, or no such name in it.
    """
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise CommandError(f"{text!r} should be module:function or file.py:function, as in train:loss_fn.")
    value: Any = _module(module_name)
    for part in name.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [n for n in dir(value) if callable(getattr(value, n, None))], 1)
            raise CommandError(f"{module_name!r} has no {name!r}.{_did_you_mean(near)}")
        value = getattr(value, part)
    if not callable(value):
        raise CommandError(f"{text!r} is {value!r}, of type {type(value).__name__}: it can't be called.")
    return value


def _module(name: str) -> Any:
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise CommandError(f"there is no file {name!r} here.")
        sys.path.insert(0, str(path.resolve().parent))
        name = path.stem
    else:
        sys.path.insert(0, "")
    try:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"there is no module {error.name!r}, neither installed nor in this folder. Is it a file? "
            "Then give its path, as in models/net.py:loss_fn."
        ) from None
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever the user's module raises
        traceback.print_exc()
        raise CommandError(f"{name!r} can't be imported: {type(error).__name__}, see above.") from None
    finally:
        if "flax" in sys.modules and importlib.util.find_spec("mpmodules") is not None:
            importlib.import_module("mpmodules")  # hands in what names the modules of flax.nnx


def _call(fn: Callable[..., Any], args: list[Any], target: str) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """The function to audit, and what with: what was given, or what a function without arguments returns."""
    required = _required(fn)
    if args or required is None:
        return fn, args, {}
    if required:
        raise CommandError(
            f"{target!r} takes {', '.join(required)}: give each with --arg, as in --arg bf16[8,128]; or name a "
            "function without arguments that returns it and a tuple of its arguments."
        )
    try:
        made: Any = fn()
    except Exception as error:  # whatever the user's function raises
        traceback.print_exc()
        raise CommandError(f"{target}() failed: {type(error).__name__}, see above.") from None
    if not isinstance(made, tuple) or len(made) == 0 or not callable(made[0]):
        return fn, (), {}
    made_args: Any = made[1] if len(made) > 1 else ()
    made_kwargs: Any = made[2] if len(made) > 2 else {}
    if len(made) > 3 or not isinstance(made_args, (tuple, list)) or not isinstance(made_kwargs, dict):
        raise CommandError(
            f"{target}() should return (function, args) or (function, args, kwargs), args a tuple and kwargs a dict, "
            f"but returned {', '.join(type(part).__name__ for part in made)}."
        )
    return made[0], made_args, made_kwargs


def _required(fn: Callable[..., Any]) -> list[str] | None:
    """The names of the arguments that a call needs; None where a signature can't be had."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def _did_you_mean(near: Sequence[str]) -> str:
    return f" Did you mean {near[0]!r}?" if near else ""


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------

_SHORT = {"bf16": "bfloat16", "bool": "bool", "pred": "bool"}
_PREFIXES = {"f": "float", "i": "int", "s": "int", "u": "uint", "c": "complex"}
_SHAPE = re.compile(r"([A-Za-z]\w*)\s*\[([^\[\]'\"{}()]*)\](?!\s*:)")
_KEY = re.compile(r"\bkey\b(?!['\"])")


def parse_argument(text: str) -> Any:
    """An argument as the command line writes it: ``bf16[8,128]``, ``key``, ``3``, ``{'w': f32[8,8]}``.

    Raises:
      CommandError: it is none of these.
    """
    found: list[Any] = []

    def mark(value: Any) -> str:
        found.append(value)
        return f"{_MARK!r}, {len(found) - 1}"

    marked = _SHAPE.sub(lambda match: f"({mark(_array(match, text))})", text)
    if not _QUOTED_KEY.search(marked):
        marked = _KEY.sub(lambda _: f"({mark(jax.eval_shape(lambda: jax.random.key(0)))})", marked)
    try:
        value = ast.literal_eval(marked)
    except (ValueError, SyntaxError):
        raise CommandError(
            f"--arg {text!r} is no argument: give a shape such as bf16[8,128] or f32[], 'key', a Python number or "
            "string, or a list, tuple or dict of these."
        ) from None
    return _filled(value, found)


_MARK = "\0array"
_QUOTED_KEY = re.compile(r"['\"]key['\"]")


def _filled(value: Any, found: list[Any]) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] == _MARK:
        return found[value[1]]
    if isinstance(value, dict):
        return {name: _filled(part, found) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(part, found) for part in value)
    return value


def _array(match: re.Match[str], text: str) -> jax.ShapeDtypeStruct:
    name, dims = match[1], [dim.strip() for dim in match[2].split(",") if dim.strip()]
    if not all(dim.isdigit() for dim in dims):
        raise CommandError(
            f"--arg {text!r}: the dimensions in {match[0]!r} should be whole numbers, as in bf16[8,128]."
        )
    short = re.fullmatch(r"([fisuc])(\d+)", name)
    full = _PREFIXES[short[1]] + short[2] if short else _SHORT.get(name, name)
    try:
        dtype = jnp.dtype(full)
    except TypeError:
        raise CommandError(
            f"--arg {text!r}: {name!r} is no dtype. Known are bf16, f16, f32, f64, i8 to i64, u8 to u64, bool, c64, "
            "and the full names."
        ) from None
    return jax.ShapeDtypeStruct(tuple(map(int, dims)), dtype)

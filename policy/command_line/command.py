"""Audits from the shell.

    python -m policy audit train:loss_fn --arg "{'w': f32[784,10]}" --arg bf16[32,784] --backward
    python -m policy audit models/net.py:example --html net.html --fail-on-findings
    python -m policy audit models/net.py:example --policy mixed_bfloat16 --rule head=f32

The target is a function (or an nnx module) by name, called with one argument for each --arg. A
target that takes no arguments may return the call to audit: a function and the tuple of its
arguments, and a dict of keyword arguments if there are any:

    def example():
        model = Net()
        x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
        return model.apply, (jax.eval_shape(model.init, jax.random.key(0), x), x)
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from policy.audit.audit import audit
from policy.audit.finding_kinds import FINDING_KINDS
from policy.audit.render.text import show
from policy.audit.report import Audit, named
from policy.command_line.target import (
    CommandError,
    call_of,
    did_you_mean,
    running_users_code,
    target_of,
)
from policy.policy import Policy
from policy.rules import PolicyRules
from policy.traced.call import checked_policy


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
      The exit status: 0; 1 for findings with --fail-on-findings; 2 for an error.
    """
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
        epilog="kinds of findings:\n"
        + "\n".join(f"  {kind:25}{what}" for kind, what in FINDING_KINDS.items()),
    )
    command.add_argument(
        "target", metavar="module:function", help="a module's name or a .py file, and a name in it"
    )
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="ARG",
        help="an argument: a shape (bf16[8,128], i32[4], f32[]), 'key', a Python number or string, "
        "or a list, tuple or dict of these; once for each argument",
    )
    command.add_argument(
        "--policy", metavar="TEXT", help="audit it under a policy, as mixed_bfloat16"
    )
    command.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATH=TEXT",
        help="a policy by module path, beside --policy, as head=f32; once for each",
    )
    command.add_argument("--backward", action="store_true", help="audit the gradients as well")
    command.add_argument(
        "--params",
        action="append",
        default=[],
        metavar="ARGUMENT",
        help="an argument, by position or name, that --backward takes gradients by; once for each",
    )
    command.add_argument(
        "--html", metavar="FILE", help="write the report as one HTML page; - is the standard output"
    )
    command.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - is the standard output"
    )
    command.add_argument(
        "--ignore", action="append", default=[], metavar="KIND", help="leave out findings of a kind"
    )
    command.add_argument(
        "--fail-on-findings", action="store_true", help="exit with 1 where there are findings"
    )
    return parser


def _audit(options: argparse.Namespace) -> int:
    for kind in options.ignore:
        if kind not in FINDING_KINDS:
            near = difflib.get_close_matches(kind, FINDING_KINDS, 1)
            raise CommandError(
                f"--ignore {kind!r} is no kind of finding.{did_you_mean(near)} See --help for all."
            )
    if options.json == options.html == "-":
        raise CommandError(
            "--json - and --html - both take the standard output: give one of them a file."
        )
    fn, args, kwargs = call_of(
        target_of(options.target), [parse_argument(text) for text in options.arg], options.target
    )
    policy, rules = _policy(options)
    with running_users_code(f"{options.target} can't be traced"):
        report = audit(
            fn,
            *args,
            policy=policy,
            rules=rules,
            backward=options.backward,
            params=_params(options),
            **kwargs,
        )
    report = named(report, options.target, without=options.ignore)
    _write(report, options)
    return int(bool(options.fail_on_findings and report.findings))


def _params(options: argparse.Namespace) -> list[int | str] | None:
    if options.params and not options.backward:
        raise CommandError("--params says what gradients are taken by: give --backward with it.")
    return [int(name) if name.isdecimal() else name for name in options.params] or None


def _policy(options: argparse.Namespace) -> tuple[Policy | None, PolicyRules | None]:
    try:
        policy = checked_policy(options.policy)
    except (TypeError, ValueError) as error:
        raise CommandError(f"--policy {options.policy}: {error}") from None
    if options.rule and policy is None:
        raise CommandError("--rule says what differs from a policy: give --policy with it.")
    try:
        return policy, PolicyRules.from_texts(options.rule) if options.rule else None
    except (TypeError, ValueError) as error:
        raise CommandError(f"--rule: {error}") from None


def _write(report: Audit, options: argparse.Namespace) -> None:
    """Writes the requested files, and prints the report or a format for standard output."""
    printed = [
        contents
        for name, contents in ((options.json, report.to_json), (options.html, report.to_html))
        if name == "-"
    ]
    if printed:
        print(printed[0]())
    else:
        show(report)
    for name, contents in ((options.html, report.to_html), (options.json, report.to_json)):
        if name not in (None, "-"):
            try:
                Path(name).write_text(contents(), encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CommandError(
                    f"{name or repr(name)} can't be written: {getattr(error, 'strerror', error)}."
                ) from None


# --------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------

_SHORT = {"bf16": "bfloat16", "bool": "bool", "pred": "bool"}
_PREFIXES = {"f": "float", "i": "int", "s": "int", "u": "uint", "c": "complex"}
_SHAPE = re.compile(r"([A-Za-z]\w*)\s*\[([^\[\]'\"{}()]*)\](?!\s*:)")
_KEY = re.compile(r"\bkey\b(?!['\"])")


def parse_argument(text: str) -> Any:
    """Parses an --arg text: ``bf16[8,128]``, ``key``, ``3``, ``{'w': f32[8,8]}``.

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
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # every error of a malformed literal
        raise CommandError(
            f"--arg {_shortened(text)!r} is no argument: give a shape such as bf16[8,128] or "
            "f32[], 'key', a "
            "Python number or string, or a list, tuple or dict of these."
        ) from None
    return _filled(value, found)


_MARK = "\0array"
_LARGEST = 2**63 - 1  # dimension that JAX can count to
_QUOTED_KEY = re.compile(r"['\"]key['\"]")


def _filled(value: Any, found: list[Any]) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and value[0] == _MARK:
        return found[value[1]]
    if isinstance(value, dict):
        return {name: _filled(part, found) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(part, found) for part in value)
    return value


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _array(match: re.Match[str], text: str) -> jax.ShapeDtypeStruct:
    name, dims = match[1], [dim.strip() for dim in match[2].split(",") if dim.strip()]
    if not all(dim.isascii() and dim.isdigit() and int(dim) <= _LARGEST for dim in dims):
        raise CommandError(
            f"--arg {text!r}: the dimensions in {match[0]!r} should be whole numbers, as in "
            "bf16[8,128]."
        )
    short = re.fullmatch(r"([fisuc])(\d+)", name)
    full = _PREFIXES[short[1]] + short[2] if short else _SHORT.get(name, name)
    try:
        dtype = jnp.dtype(full)
        held = jax.eval_shape(lambda: jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype))).dtype
    except (TypeError, ValueError):
        raise CommandError(
            f"--arg {text!r}: {name!r} is no dtype. Known are bf16, f16, f32, f64, i8 to i64, u8 "
            "to u64, bool, c64, "
            "and the full names."
        ) from None
    if held != dtype:
        raise CommandError(
            f"--arg {text!r}: JAX has {held.name} in place of {dtype.name} here. Set "
            "JAX_ENABLE_X64=1, or ask for "
            f"{held.name}."
        )
    return jax.ShapeDtypeStruct(tuple(map(int, dims)), dtype)

"""The call that a command is about: options, and arguments written as text."""

from __future__ import annotations

import argparse
import ast
import re
from typing import Any

import jax
import jax.numpy as jnp

from policy.command_line.target import CommandError, naming
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.traced.call import checked_policy


def add_call(command: argparse.ArgumentParser, *, takes_policy: bool = True) -> None:
    """Adds the options that say which call a command is about.

    Args:
      command: the command's parser.
      takes_policy: whether the call is under one policy, --policy.
    """
    command.add_argument(
        "target",
        metavar="module:function",
        help="the name of a module or a .py file, and the name of a function in it",
    )
    command.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="ARG",
        help="an argument: a shape (bf16[8,128], i32[4], f32[]), 'key', a Python number or string, "
        "or a list, tuple or dict of these; repeat it for each argument",
    )
    if takes_policy:
        command.add_argument(
            "--policy", metavar="TEXT", help="the policy to run under, such as mixed_bfloat16"
        )
    command.add_argument("--backward", action="store_true", help="include the gradients")
    command.add_argument(
        "--params",
        action="append",
        default=[],
        metavar="ARGUMENT",
        help="an argument to differentiate with --backward, by position or name; repeatable",
    )


def params_of(options: argparse.Namespace) -> list[int | str] | None:
    """Returns the arguments that --params names.

    Raises:
      CommandError: it is given without --backward.
    """
    if options.params and not options.backward:
        raise CommandError("--params selects the arguments to differentiate: give --backward too.")
    return [int(name) if name.isdecimal() else name for name in options.params] or None


def policy_of(options: argparse.Namespace) -> Policy | None:
    """Returns the policy that --policy names.

    Raises:
      CommandError: it is malformed.
    """
    with naming(f"--policy {options.policy}"):
        return checked_policy(options.policy)


def rules_of(options: argparse.Namespace) -> PolicyRules | None:
    """Returns the rules that --rule gives.

    Raises:
      CommandError: one is malformed.
    """
    with naming("--rule"):
        return PolicyRules.from_texts(options.rule) if options.rule else None


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
            f"--arg {_shortened(text)!r} can't be read: give a shape such as bf16[8,128] or f32[], "
            "'key', a Python number or string, or a list, tuple or dict of these."
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
            f"--arg {text!r}: {name!r} is not a dtype. Known are bf16, f16, f32, f64, i8 to i64, "
            "u8 to u64, bool, c64, and the full names."
        ) from None
    if held != dtype:
        raise CommandError(
            f"--arg {text!r}: JAX uses {held.name} instead of {dtype.name} here. Set "
            f"JAX_ENABLE_X64=1, or ask for {held.name}."
        )
    return jax.ShapeDtypeStruct(tuple(map(int, dims)), dtype)

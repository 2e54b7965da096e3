"""The call that a command is about: options, and arguments written as text."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from policy.command_line.target import CommandError, prefixed_errors
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.traced.call import checked_policy

Option = dict[str, Any]  # keyword arguments of `add_argument`


def option(metavar: str, text: str, **more: Any) -> Option:
    """Returns an option that takes a value."""
    return {"metavar": metavar, "help": text, **more}


def repeatable(metavar: str, text: str) -> Option:
    """Returns an option that may be given several times."""
    return option(metavar, text, action="append", default=[])


def switch(text: str) -> Option:
    """Returns an option without a value."""
    return {"help": text, "action": "store_true"}


_CALL = {
    "--arg": repeatable(
        "ARG",
        "an argument: a shape (bf16[8,128], i32[4], f32[]), 'key', a Python number or string, or "
        "a list, tuple or dict of these; repeat it for each argument",
    ),
    "--backward": switch("include the gradients"),
    "--params": repeatable(
        "ARGUMENT", "an argument to differentiate with --backward, by position or name; repeatable"
    ),
}
POLICY = {"--policy": option("TEXT", "the policy to run under, such as mixed_bfloat16")}
RULES = {
    "--rule": repeatable(
        "PATH=TEXT",
        "the policy of a module path, beside the call's own, such as head=f32; repeatable",
    )
}
REPORTS = {
    f"--{name}": option("FILE", f"write the report as {kind}; - for standard output")
    for name, kind in (("html", "one HTML page"), ("json", "JSON"))
}


def add_command(
    commands: Any,
    name: str,
    text: str,
    description: str | None,
    options: dict[str, Option],
    run: Callable[[argparse.Namespace], int],
    epilog: str | None = None,
) -> None:
    """Adds a command about a call to a parser's commands.

    Args:
      commands: of the parser.
      name, text: the command, and a line about it.
      description, epilog: its help, before and after the options.
      options: by their flags, beside those of the call.
      run: runs it, and returns the exit status.
    """
    command = commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "target",
        metavar="module:function",
        help="the name of a module or a .py file, and the name of a function in it",
    )
    for flag, given in {**_CALL, **options}.items():
        command.add_argument(flag, **given)
    command.set_defaults(run=run)


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
    with prefixed_errors(f"--policy {options.policy}"):
        return checked_policy(options.policy)


def rules_of(options: argparse.Namespace) -> PolicyRules | None:
    """Returns the rules that --rule gives.

    Raises:
      CommandError: one is malformed.
    """
    with prefixed_errors("--rule"):
        return PolicyRules.from_texts(options.rule) if options.rule else None


# --------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------

_SHORT = {"bf16": "bfloat16", "bool": "bool", "pred": "bool"}
_PREFIXES = {"f": "float", "i": "int", "s": "int", "u": "uint", "c": "complex"}
_LARGEST = 2**63 - 1  # dimension that JAX can count to


def parse_argument(text: str) -> Any:
    """Parses an --arg text: ``bf16[8,128]``, ``key``, ``3``, ``{'w': f32[8,8]}``.

    Raises:
      CommandError: it is none of these.
    """
    try:
        of_scalars = re.sub(r"(\w)\s*\[\s*\]", r"\1[()]", text.strip())
        return _value(ast.parse(of_scalars, mode="eval").body)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        # every error of a malformed literal
        shown = text if len(text) <= 100 else f"{text[:97]}..."
        raise CommandError(
            f"--arg {shown!r} can't be read: give a shape such as bf16[8,128] or f32[], "
            "'key', a Python number or string, or a list, tuple or dict of these."
        ) from None


def _value(node: ast.expr | None) -> Any:
    match node:
        case ast.Subscript(value=ast.Name(id=dtype), slice=dimensions):
            sizes = ast.literal_eval(dimensions)
            return _array(dtype, sizes if isinstance(sizes, tuple) else (sizes,))
        case ast.Name(id="key"):
            return jax.eval_shape(lambda: jax.random.key(0))
        case ast.Dict(keys=keys, values=values):
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.List(elts=parts):
            return list(map(_value, parts))
        case ast.Tuple(elts=parts):
            return tuple(map(_value, parts))
        case ast.expr():
            return ast.literal_eval(node)
    raise ValueError("A mapping can't be unpacked.")


def _array(name: str, sizes: tuple[Any, ...]) -> jax.ShapeDtypeStruct:
    if not all(type(size) is int and 0 <= size <= _LARGEST for size in sizes):
        raise ValueError(f"Dimensions should be whole numbers, but got {sizes}.")
    short = re.fullmatch(r"([fisuc])(\d+)", name)
    full = _PREFIXES[short[1]] + short[2] if short else _SHORT.get(name, name)
    try:
        dtype = jnp.dtype(full)
        held = jax.eval_shape(lambda: jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype))).dtype
    except (TypeError, ValueError):
        raise CommandError(
            f"--arg: {name!r} is not a dtype. Known are bf16, f16, f32, f64, i8 to i64, u8 to u64, "
            "bool, c64, and the full names."
        ) from None
    if held != dtype:
        raise CommandError(
            f"--arg: JAX uses {held.name} instead of {dtype.name} here. Set JAX_ENABLE_X64=1, or "
            f"ask for {held.name}."
        )
    return jax.ShapeDtypeStruct(sizes, dtype)

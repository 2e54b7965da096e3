"""The rows of an estimate, written as text."""

from __future__ import annotations

import ast
import re
from typing import Any

from policy.command_line.target import CommandError, prefixed_errors
from policy.inspect.estimate.estimate import DEFAULT
from policy.inspect.traced.call import checked_policy

NamedRows = dict[str, tuple[str, dict[str, Any]]]  # a policy's text and options by name

_OPTION = re.compile(r"\s+(?=[A-Za-z_]\w*=)")
_FIELD = re.compile(r"(params|compute|output|reduction|matmul|inputs|[pcorm])=")


def rows_to_estimate(policies: str | None, rows: list[str]) -> NamedRows:
    """Returns rows by name, each a policy's text and its options, from --policies and --row.

    >>> rows_to_estimate("f32,p=f32,c=bf16", ["low=bf16 moments='int8' steps=2 mode=auto"])
    {'f32': ('f32', {}),
     'p=f32,c=bf16': ('p=f32,c=bf16', {}),
     'low': ('bf16', {'moments': 'int8', 'steps': 2, 'mode': 'auto'})}

    Raises:
      CommandError: a text is no policy or no row, or two rows have one name.
    """
    if policies is None:
        policies = "" if rows else ",".join(DEFAULT)
    texts = policies_in(policies)
    if not texts and not rows:
        raise CommandError(f"--policies {policies!r} names no policy: give f32,mixed_bfloat16.")
    found: NamedRows = {}
    for text in texts:
        _add(found, text, _checked(text, "--policies"), {})
    for text in rows:
        _add(found, *_row(text))
    return found


def policies_in(text: str) -> list[str]:
    """Splits policies at commas; the fields of one, ``p=f32,c=bf16``, stay together.

    A field that repeats begins the next policy.
    """
    found: list[str] = []
    fields: set[str] = set()
    for part in filter(None, map(str.strip, text.split(","))):
        field = _FIELD.match(part)
        name = field[1][0] if field else ""
        if field and fields and name not in fields:
            found[-1] += f",{part}"
            fields.add(name)
        else:
            found.append(part)
            fields = {name} if field else set()
    return found


def _row(text: str) -> tuple[str, str, dict[str, Any]]:
    """Returns the name, the policy's text and the options of a --row."""
    name, equals, rest = text.partition("=")
    policy, *options = _OPTION.split(f" {rest.strip()}".strip()) if rest.strip() else [""]
    if not equals or not name.strip() or not policy:
        raise CommandError(
            f"--row {text!r} should be NAME=POLICY and the example's options, as in "
            "\"low=bfloat16 moments='int8'\"."
        )
    found = dict(_option(option, text) for option in options)
    if len(found) != len(options):
        raise CommandError(f"--row {text!r} gives an option twice.")
    return name.strip(), _checked(policy.strip(), f"--row {text!r}"), found


def _option(text: str, row: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    value = value.strip()
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if re.fullmatch(r"[\w.:/+-]+", value):
            return name, value
        raise CommandError(
            f"--row {row!r}: the option {name}={value} should be a word or a Python literal, such "
            "as 3, None, 'int8' or (1, 2)."
        ) from None


def _checked(text: str, option: str) -> str:
    with prefixed_errors(option):
        checked_policy(text)
    return text


def _add(found: NamedRows, name: str, policy: str, options: dict[str, Any]) -> None:
    if name in found:
        raise CommandError(f"Two rows are named {name!r}: drop one, or name it by --row.")
    found[name] = policy, options

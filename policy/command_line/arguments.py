"""Values of options, written as text: arguments, meshes, shardings and rows of an estimate."""

from __future__ import annotations

import ast
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.command_line.target import CommandError, prefixed_errors
from policy.inspect.estimate.estimate import DEFAULT
from policy.inspect.traced.call import checked_policy

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


# --------------------------------------------------------------------------------------------------
# The mesh, the shardings and the donated arguments of an estimate
# --------------------------------------------------------------------------------------------------


def mesh_sizes(text: str | None) -> dict[str, int] | None:
    """Returns the axes of a mesh from ``data=16,model=16``.

    >>> mesh_sizes("data=16,model=16")
    {'data': 16, 'model': 16}

    Raises:
      CommandError: the text has another form.
    """
    if text is None:
        return None
    pairs = [part.strip().split("=", 1) for part in text.split(",")]
    for name, *size in pairs:
        if not name.isidentifier() or not re.fullmatch(r"[1-9]\d*", "".join(size), re.ASCII):
            raise CommandError(
                f"--mesh {text!r} should be axes and their sizes, as in data=16,model=16."
            )
    return {name: int(size) for name, size in pairs}


def shardings_of(texts: list[str]) -> dict[int, PartitionSpec] | None:
    """Returns the specs of arguments, by position, from texts such as ``2=data+fsdp,None``.

    >>> tuple(shardings_of(["2=data+fsdp,None"])[2])
    (('data', 'fsdp'), None)

    Raises:
      CommandError: a text has another form, or two are about one argument.
    """
    found: dict[int, PartitionSpec] = {}
    for text in texts:
        position, equals, axes = text.partition("=")
        if not equals or not re.fullmatch(r"\s*\d+\s*", position, re.ASCII):
            raise CommandError(
                f"--shard {text!r} should be an argument's position and axes of the mesh, as in "
                "0=data or 2=data,None."
            )
        if int(position) in found:
            raise CommandError(f"--shard is given twice for the argument {int(position)}.")
        parts = [tuple(axis.strip() for axis in part.split("+")) for part in axes.split(",")]
        entries = [None if part == ("None",) else part for part in parts]
        found[int(position)] = PartitionSpec(*entries)
    return found or None


def positions_of(text: str | None) -> tuple[int, ...] | None:
    """Returns positions of arguments from ``0,1``.

    >>> positions_of("0,1")
    (0, 1)

    Raises:
      CommandError: the text has another form.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text, re.ASCII):
        raise CommandError(f"--donate {text!r} should be positions of arguments, as in 0,1.")
    return tuple(int(part) for part in text.split(","))


# --------------------------------------------------------------------------------------------------
# The rows of an estimate
# --------------------------------------------------------------------------------------------------

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
    with prefixed_errors("--policies"):
        for text in texts:
            checked_policy(text)
    found: NamedRows = {}
    for name, policy, options in [*((text, text, {}) for text in texts), *map(_row, rows)]:
        if name in found:
            raise CommandError(f"Two rows are named {name!r}: drop one, or name it by --row.")
        found[name] = policy, options
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
    with prefixed_errors(f"--row {text!r}"):
        checked_policy(policy.strip())
    return name.strip(), policy.strip(), found


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

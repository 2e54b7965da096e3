"""Texts on a command line: the target, a function in a module or a file, and values of options."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import importlib
import importlib.util
import re
import reprlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from policy.inspect.estimate.estimate import DEFAULT
from policy.inspect.estimate.search import CHECKPOINT_POLICIES, remat_policy
from policy.inspect.estimate.steps import are_results, example_call, required_arguments
from policy.inspect.hlo.text import numpy_name
from policy.inspect.traced.call import checked_policy


class CommandError(Exception):
    """An error of a command; the message says why it can't be carried out."""


@contextlib.contextmanager
def prefixed_errors(what: str) -> Iterator[None]:
    """Turns an error about an option or a file into a `CommandError` that begins with its name."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise CommandError(f"{what}: {error}") from None


@contextlib.contextmanager
def running_users_code(failure: str) -> Iterator[None]:
    """Turns any exception of the user's code, `sys.exit` included, into a `CommandError`.

    Of an error of policy's own the message is enough; others are shown with their traceback. An
    interrupt is re-raised. What the code prints goes to the standard error: the standard output is
    the report's.

    Args:
      failure: the beginning of the message.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        raise CommandError(f"{failure}: it calls sys.exit({code}).") from None
    except (KeyboardInterrupt, CommandError):
        raise
    except BaseException as error:
        if isinstance(error, (TypeError, ValueError, RuntimeError)) and _is_of_policy(error):
            raise CommandError(str(error)) from None
        traceback.print_exc()
        raise CommandError(f"{failure}: {type(error).__name__}, see above.") from None


_POLICY = Path(__file__).resolve().parents[1]
_FUNCTOOLS = Path(functools.__file__).resolve()


def _is_of_policy(error: Exception) -> bool:
    """Returns whether an error was raised by policy itself, before it called anything else.

    Cached properties of policy's are called by `functools`.
    """
    files = {Path(f.filename).resolve() for f in traceback.extract_tb(error.__traceback__)}
    return all(file == _FUNCTOOLS or file.is_relative_to(_POLICY) for file in files)


def target_of(text: str) -> Any:
    """Returns the callable named by ``module:name`` or ``file.py:name``.

    Raises:
      CommandError: the text has neither form, there is no such module or name, or the object can't
        be called.
    """
    module_name, _, name = text.rpartition(":")
    is_file = module_name.endswith(".py")
    is_name = ":" not in module_name and not module_name.startswith(".")
    if not module_name or not name or not (is_file or is_name):
        raise CommandError(
            f"{text!r} should be module:function or file.py:function, as in train:loss_fn."
        )
    value: Any = _module_of(module_name)
    for part in name.split("."):
        with running_users_code(f"{text!r} can't be read"):
            found = hasattr(value, part)
            near = [] if found else [n for n in dir(value) if callable(getattr(value, n, None))]
        if not found:
            raise CommandError(f"{module_name!r} has no {name!r}.{did_you_mean(part, near)}")
        value = getattr(value, part)
    if not callable(value):
        shown = f"{reprlib.repr(value)}, of type {type(value).__name__}"
        raise CommandError(f"{text!r} is {shown}: it can't be called.")
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f" Did you mean {near[0]!r}?" if near else ""


# --------------------------------------------------------------------------------------------------
# Modules
# --------------------------------------------------------------------------------------------------


def _module_of(text: str) -> ModuleType:
    """Imports a module by its name, or by the path of its file."""
    path = Path(text) if text.endswith(".py") else None
    name = text if path is None else path.stem
    with running_users_code(f"{name!r} can't be imported"):
        module = _of_name(name) if path is None else _of_file(path)
        if "flax" in sys.modules and importlib.util.find_spec("mpmodules") is not None:
            importlib.import_module("mpmodules")  # registers names for the modules of flax.nnx
    return module


def _of_name(name: str) -> ModuleType:
    """Imports a module by its name, installed or in this folder."""
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # an enclosing package may be missing; its own failing imports are the user's business
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise CommandError(
            f"there is no module {error.name!r}, neither installed nor in this folder. Is it a "
            "file? Then give its path, as in models/net.py:loss_fn."
        ) from None


def _of_file(path: Path) -> ModuleType:
    """Imports a file, even if another module has the same name.

    Then it is run under a name that no import can have.
    """
    if not path.is_file():
        raise CommandError(f"there is no file {str(path)!r} here.")
    resolved = path.resolve()
    sys.path.insert(0, str(resolved.parent))
    importlib.invalidate_caches()
    found = sys.modules.get(path.stem) or (
        importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    )
    origin = getattr(found, "origin", None) or getattr(found, "__file__", None)
    if origin is not None and Path(origin).resolve() == resolved:
        return importlib.import_module(path.stem)
    name = f"audited file {resolved}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python has no loader for {resolved}.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


def call_of(
    fn: Callable[..., Any], args: list[Any], target: str
) -> tuple[Any, Sequence[Any], dict[str, Any]]:
    """Returns the function to audit and its arguments: given ones, or those that a target returns.

    A function without arguments that returns arrays is audited itself, unless it is called an
    example.
    """
    require_arguments(fn, args, target)
    if args or required_arguments(fn) is None:
        return fn, args, {}
    with running_users_code(f"{target}() failed"):
        made: Any = fn()
        if are_results(made) and "example" not in target.rpartition(":")[2].lower():
            return fn, (), {}
        return example_call(made, target)


def require_arguments(
    fn: Callable[..., Any], args: Sequence[Any], target: str, passed: Collection[str] = ()
) -> None:
    """Rejects a function that takes arguments if none are given.

    Args:
      passed: names of arguments that the command itself passes.

    Raises:
      CommandError: the message has their names.
    """
    required = [name for name in required_arguments(fn) or () if name not in passed]
    if required and not args:
        raise CommandError(
            f"{target!r} takes {', '.join(required)}: give each with --arg, as in --arg bf16[8,128]"
            "; or name a function without arguments that returns it and a tuple of its arguments."
        )


# --------------------------------------------------------------------------------------------------
# Arguments as texts
# --------------------------------------------------------------------------------------------------

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
    full = numpy_name(re.sub(r"^i(?=\d)", "s", name))  # HLO's name of int8 is s8
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


def batches_of(text: str | None) -> list[int] | None:
    """Returns numbers of examples from ``256,512``.

    >>> batches_of("256,512")
    [256, 512]

    Raises:
      CommandError: the text has another form.
    """
    if text is None:
        return None
    if not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", text, re.ASCII):
        raise CommandError(f"--batch {text!r} should be numbers of examples, as in 256,512.")
    return [int(part) for part in text.split(",")]


def remats_of(text: str | None) -> list[str] | None:
    """Returns names of checkpoint policies from ``full,names:a,b,none``, where a and b stay
    together.

    >>> remats_of("full,names:a,b,none")
    ['full', 'names:a,b', 'none']

    Raises:
      CommandError: there is no such policy.
    """
    if text is None:
        return None
    found: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        is_saved = found and found[-1].startswith("names:") and ":" not in part
        if is_saved and part not in CHECKPOINT_POLICIES:
            found[-1] += f",{part}"
        else:
            found.append(part)
    with prefixed_errors(f"--remat {text!r}"):
        for name in found or [text]:
            remat_policy(name)
    return found


def mesh_sizes(text: str) -> dict[str, int]:
    """Returns the axes of a mesh from ``data=16,model=16``.

    >>> mesh_sizes("data=16,model=16")
    {'data': 16, 'model': 16}

    Raises:
      CommandError: the text has another form.
    """
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

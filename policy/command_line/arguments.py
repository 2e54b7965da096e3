"""Texts on a command line: the target, a function in a module or a file, and values of options."""

from __future__ import annotations

import argparse
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

from policy.inspect.estimate.search import CHECKPOINT_POLICIES, remat_policy
from policy.inspect.estimate.steps import are_results, example_call, required_arguments
from policy.inspect.estimate.targets import Target
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


def read_by(parse: Callable[[str], Any], expected: str = "") -> Callable[[str], Any]:
    """Returns the `type` of an option: a function of its text that says how the text should be.

    Args:
      parse: returns the value of a text; it may raise what Python does for a malformed one.
      expected: the form of the text; "" if the message of `parse` says it.
    """

    def read(text: str) -> Any:
        try:
            return parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            shown = text if len(text) <= 100 else f"{text[:97]}..."
            message = f"{shown!r} should be {expected}." if expected else str(error)
            raise argparse.ArgumentTypeError(message) from None

    return read


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
    """Runs a file as a module, under a name that no import can have; its folder can be imported."""
    if not path.is_file():
        raise CommandError(f"there is no file {str(path)!r} here.")
    resolved = path.resolve()
    sys.path.insert(0, str(resolved.parent))
    name = f"audited file {resolved}"
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python has no loader for {resolved}.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
    """Returns the value of an --arg: ``bf16[8,128]``, ``key``, ``3``, ``{'w': f32[8,8]}``."""
    of_scalars = re.sub(r"(\w)\s*\[\s*\]", r"\1[()]", text.strip())
    return _value(ast.parse(of_scalars, mode="eval").body)


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
        raise argparse.ArgumentTypeError(
            f"{name!r} is not a dtype. Known are bf16, f16, f32, f64, i8 to i64, u8 to u64, "
            "bool, c64, and the full names."
        ) from None
    if held != dtype:
        raise argparse.ArgumentTypeError(
            f"JAX uses {held.name} instead of {dtype.name} here. Set JAX_ENABLE_X64=1, or "
            f"ask for {held.name}."
        )
    return jax.ShapeDtypeStruct(sizes, dtype)


# --------------------------------------------------------------------------------------------------
# The rows, the mesh, the shardings and the donated arguments of an estimate
# --------------------------------------------------------------------------------------------------

NamedRow = tuple[str, tuple[str, dict[str, Any]]]  # a name; a policy's text, the example's options

_OPTION = re.compile(r"\s+(?=[A-Za-z_]\w*=)")
_REMATS = re.compile(rf",(?=\s*(?:{'|'.join(CHECKPOINT_POLICIES)}|names:))")


def targets_in(text: str) -> list[Target]:
    """Returns the targets of ``v5e:4x4,h100``, each once."""
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError("It names no devices: give v5e:4x4, h100, cpu or here.")
    return list(map(Target, names))


def whole_numbers(text: str) -> list[int]:
    """Returns the numbers of ``256,512``."""
    return list(map(int, text.split(",")))


def remats_in(text: str) -> list[str]:
    """Returns the names of checkpoint policies in ``full,names:a,b,none``: a and b stay together.

    >>> remats_in("full,names:a,b,none")
    ['full', 'names:a,b', 'none']
    """
    found = list(map(str.strip, _REMATS.split(text)))
    for name in found:
        remat_policy(name)
    return found


def mesh_sizes(text: str) -> dict[str, int]:
    """Returns the axes of a mesh and their sizes from ``data=16,model=16``."""
    pairs = (part.split("=") for part in text.split(","))
    return {name.strip(): int(size) for name, size in pairs}


def sharding_in(text: str) -> tuple[int, PartitionSpec]:
    """Returns the position of an argument and its spec from ``2=data+fsdp,None``.

    >>> position, spec = sharding_in("2=data+fsdp,None")
    >>> position, tuple(spec)
    (2, (('data', 'fsdp'), None))
    """
    position, axes = text.split("=")
    parts = [tuple(map(str.strip, part.split("+"))) for part in axes.split(",")]
    return int(position), PartitionSpec(*(None if part == ("None",) else part for part in parts))


def policies_in(text: str) -> list[str]:
    """Splits policies at commas; the fields of one, ``p=f32,c=bf16``, stay together.

    A field that repeats begins the next policy.
    """
    found: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        field, equals, _ = part.partition("=")
        last = found[-1] if found else ""
        fields = [each.partition("=")[0][0] for each in last.split(",") if "=" in each]
        if equals and fields and field[0] not in fields:
            found[-1] += f",{part}"
        else:
            found.append(part)
    for policy in found:
        checked_policy(policy)
    return found


def row_in(text: str) -> NamedRow:
    """Returns the name of a --row, and its policy's text and options for the example.

    >>> row_in("low=bf16 moments='int8' steps=2 mode=auto")
    ('low', ('bf16', {'moments': 'int8', 'steps': 2, 'mode': 'auto'}))
    """
    name, rest = map(str.strip, text.split("=", 1))
    policy, *options = _OPTION.split(rest)
    checked_policy(policy.strip())
    pairs = [map(str.strip, option.split("=", 1)) for option in options]
    found = {option: _option(value) for option, value in pairs}
    if not name or len(found) != len(options):
        raise ValueError("It lacks a name, or gives an option twice.")
    return name, (policy.strip(), found)


def _option(text: str) -> Any:
    """Returns the value of an example's option: a Python literal, or a word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if re.fullmatch(r"[\w.:/+-]+", text):
            return text
        raise


def by_name(pairs: Iterable[tuple[Any, Any]], what: str) -> dict[Any, Any]:
    """Returns a dict of pairs, and rejects a key that is given twice.

    Raises:
      CommandError: the message says `what` has the key twice.
    """
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CommandError(f"{what} has {key!r} twice: drop one.")
        found[key] = value
    return found

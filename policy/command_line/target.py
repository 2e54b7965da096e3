"""Resolves the target of a command line: a function in a module or a file, and its arguments."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import reprlib
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from policy.inspect.estimate.steps import are_results, example_call, required_arguments


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
    """Refuses a function that takes arguments if none are given.

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

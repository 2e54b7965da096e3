"""Warnings, checks of arguments and texts of values, for messages."""

from __future__ import annotations

import dis
import functools
import re
import types
import warnings
from collections.abc import Iterable
from typing import Any

# --------------------------------------------------------------------------------------------------
# Warnings that part of a program doesn't obey the policy in force, each given once
# --------------------------------------------------------------------------------------------------


class DtypePolicyWarning(UserWarning):
    """Warns that part of a program doesn't obey the policy in force.

    >>> import warnings
    >>> import policy
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     y = policy.autocast(lambda x: 2 * x)(1.0)  # without any policy
    >>> caught[0].category is policy.DtypePolicyWarning
    True
    """


_warned: set[str] = set()
_filters_then: Any = None


def warn_once(message: str) -> None:
    """Emits a `DtypePolicyWarning`, once per message while the warning filters stay the same."""
    global _filters_then
    if warnings.filters is not _filters_then:  # a new catch_warnings block listens afresh
        _warned.clear()
        _filters_then = warnings.filters
    if message not in _warned:
        warnings.warn(message, DtypePolicyWarning, stacklevel=2)
        _warned.add(message)


def instruction_after(frame: types.FrameType) -> str:
    """Returns the instruction that takes the result of a frame's call, POP_TOP if it is dropped."""
    code = dis.get_instructions(frame.f_code)
    return next((each.opname for each in code if each.offset > frame.f_lasti), "")


_TRANSFORMS = frozenset(
    ("jit", "pjit", "pmap", "vmap", "grad", "value_and_grad", "checkpoint", "remat", "partial")
)


@functools.lru_cache(256)
def calls_transforms_alone(code: types.CodeType, start: int, end: int) -> bool:
    """Returns whether the code between two offsets calls a `jit`, and nothing but transforms."""
    said = [each for each in dis.get_instructions(code) if start < each.offset < end]
    calls = [each for each in said if re.fullmatch("CALL(_KW|_FUNCTION_EX)?", each.opname)]
    names = [each.argval for each in said if each.opname.startswith("LOAD_")]
    named = [name for name in names if isinstance(name, str) and name in _TRANSFORMS]
    return "jit" in named and len(calls) == len(named)


# --------------------------------------------------------------------------------------------------
# Checks of arguments that should be functions, and texts of values
# --------------------------------------------------------------------------------------------------


def require_function(fn: Any, what: str, *, takes: str = "a function") -> None:
    """Raises unless `fn` is a function of arrays.

    Rejects values, classes and unbound linen modules.

    Args:
      fn: a function, or a callable module.
      what: the name of the caller, for the message.
      takes: the description of the expected argument, for the message.

    Raises:
      TypeError: `fn` is not such a function.
    """
    if isinstance(fn, type):
        raise TypeError(
            f"{what} takes {takes}, but got the class {fn.__name__}: pass an instance, or a method "
            "of one."
        )
    if not callable(fn):
        end = ": pass its apply." if callable(getattr(fn, "apply", None)) else "."
        raise TypeError(
            f"{what} takes {takes}, but got {shown(fn)} of type {type(fn).__name__}{end}"
        )
    if _is_unbound_linen_module(fn):
        name = type(fn).__name__
        raise TypeError(
            f"{what} takes {takes}, but got the linen module {name}, which holds no variables: "
            "pass model.apply, and the variables as its first argument."
        )


def shown(value: Any) -> str:
    """Returns the text of a value for messages; a long text is shortened."""
    text = repr(value)
    return text if len(text) <= 200 and "\n" not in text else f"{text.splitlines()[0][:80]} ..."


def shortened(texts: list[str], limit: int = 8) -> str:
    """Returns the first `limit` texts of a list and the number of the others."""
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more


def dtype_and_shape(x: Any) -> str:
    """Returns the dtype and shape of an array for messages, or the type of another value."""
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__


def _is_unbound_linen_module(fn: Any) -> bool:
    of_linen = any((cls.__module__ or "").startswith("flax.linen.") for cls in type(fn).__mro__)
    return of_linen and hasattr(fn, "apply") and getattr(fn, "scope", None) is None


def ways_out_of(leaves: Iterable[Any]) -> str:
    """Returns the end of an error about leaves that can't be differentiated and updated."""
    if all(hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex)) for leaf in leaves):
        return ""
    return (
        " Of a module with functions or texts among its leaves, give the arrays: params, static = "
        "eqx.partition(model, eqx.is_inexact_array)."
    )


FROZEN = (
    "stored in 8 or 4 bits and frozen: divide the params with trainable, frozen = "
    "policy.quantized.split_frozen(params), and differentiate and update the trainable ones."
)
"""The end of an error about quantized parameters."""

"""Reports as text: colors, short names of dtypes, and numbers with units."""

from __future__ import annotations

import os
import textwrap
from typing import TextIO

OUTSIDE = "(outside of any module)"
_STYLES = {"bad": "31", "warn": "33", "good": "32", "dim": "2", "bold": "1"}
_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "float4_e2m1fn": "f4e2m1",
}
_DECIMAL = {"P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
_PARTS = {"s": 1.0, "ms": 1e3, "µs": 1e6, "ns": 1e9}
_BINARY = {"Ti": 2.0**40, "Gi": 2.0**30, "Mi": 2.0**20, "Ki": 2.0**10}


def shows_color(file: TextIO) -> bool:
    """Returns whether a file is a terminal that shows colors, and NO_COLOR is not set."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Paint:
    """Colors text by the name of a style, or leaves it as it is.

    >>> from policy.inspect.render.text import Paint
    >>> Paint(False)("bad", "no"), Paint(True)("bad", "no")
    ('no', '\\x1b[31mno\\x1b[0m')
    """

    def __init__(self, color: bool):
        self.color = color

    def __call__(self, style: str, words: str) -> str:
        return f"\x1b[{_STYLES[style]}m{words}\x1b[0m" if self.color and style and words else words


def printable(text: str) -> str:
    """Returns a text with its control characters escaped: a name can't move the cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wrapped(text: str, first: str = "", indent: int = 0, width: int = 100) -> list[str]:
    """Returns the lines of a text, the first one behind `first`, the others indented."""
    return textwrap.wrap(
        printable(text), width, initial_indent=first, subsequent_indent=" " * indent
    )


def short(dtype: str) -> str:
    """Returns a dtype's name in `Policy`'s short form: ``bf16``."""
    name, space, passes = dtype.partition(" ")
    return _SHORT.get(name, name.replace("uint", "u").replace("int", "i")) + space + passes


def amount(number: float, unit: str = "", *, binary: bool = False) -> str:
    """Returns three digits of a number, in the largest prefix that it reaches: ``1.3 GB``.

    >>> amount(1_300_000_000, "B"), amount(2048, "B", binary=True), amount(12)
    ('1.3 GB', '2 KiB', '12')

    Args:
      number: not negative.
      unit: follows the prefix.
      binary: counts in powers of 1024, as memory is sold, instead of 1000.
    """
    prefixes = _BINARY if binary else _DECIMAL
    reached = ((prefix, size) for prefix, size in prefixes.items() if number >= size)
    prefix, size = next(reached, ("", 1.0))
    digits = number / size
    text = f"{digits:.0f}" if digits >= 100 else f"{digits:.3g}"
    return f"{text} {prefix}{unit}".rstrip()


def bytes_text(number: float) -> str:
    """Returns a number of bytes in powers of 1024: ``3.1 GiB``."""
    return amount(number, "B", binary=True)


def duration(seconds: float) -> str:
    """Returns three digits of a time: ``1.25 ms``; from 1000 seconds on all of its seconds.

    >>> duration(0.00125), duration(2), duration(4321.4), duration(0)
    ('1.25 ms', '2 s', '4321 s', '0 s')
    """
    reached = (unit for unit, scale in _PARTS.items() if seconds * scale >= 1)
    unit = next(reached, "ns" if seconds else "s")
    scaled = seconds * _PARTS[unit]
    return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.3g} {unit}"

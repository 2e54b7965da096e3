"""Text for a terminal: colours, and short names of dtypes."""

from __future__ import annotations

import os
from typing import TextIO

_STYLES = {"bad": "31", "warn": "33", "good": "32", "dim": "2", "bold": "1"}
_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "bool": "bool",
}


def shows_colour(file: TextIO) -> bool:
    """Returns whether a file is a terminal that shows colours, and NO_COLOR is not set."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Paint:
    """Colours text by the name of a style, or leaves it as it is.

    >>> from policy.inspect.render.terminal import Paint
    >>> Paint(False)("bad", "no"), Paint(True)("bad", "no")
    ('no', '\\x1b[31mno\\x1b[0m')
    """

    def __init__(self, colour: bool):
        self.colour = colour

    def __call__(self, style: str, words: str) -> str:
        return f"\x1b[{_STYLES[style]}m{words}\x1b[0m" if self.colour and words else words


def short(dtype: str) -> str:
    """Returns a dtype's name in `Policy`'s short form: ``bf16``."""
    name, space, passes = dtype.partition(" ")
    return _SHORT.get(name, name.replace("uint", "u").replace("int", "i")) + space + passes

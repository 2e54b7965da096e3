"""Docstrings of layers: ours, with `dtype_policy` as an argument, then that of Flax's layer."""

from __future__ import annotations

import inspect
import textwrap


def extend_docstring(cls: type, upstream: type, dtype_policy: str) -> None:
    """Appends the docstring of Flax's class to that of ours.

    Without docstrings (``python -OO``) there is none.

    Args:
      dtype_policy: describes that argument.
    """
    if cls.__doc__ is not None and upstream.__doc__ is not None:
        text = textwrap.fill(
            f"dtype_policy: {dtype_policy}",
            80,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
        cls.__doc__ = (
            f"{inspect.cleandoc(cls.__doc__)}\n\nArgs:\n{text}\n\n"
            f"Flax's own description:\n\n{inspect.cleandoc(upstream.__doc__)}\n"
        )

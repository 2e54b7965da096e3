"""Docstrings of layers: ours, then that of Flax's layer with `dtype_policy` as an argument."""

from __future__ import annotations

import inspect
import re
import textwrap

_SECTION = re.compile(r"^(Args|Attributes):\n", re.MULTILINE)


def extend_docstring(cls: type, upstream: type, dtype_policy: str) -> None:
    """Appends the docstring of Flax's class to that of ours.

    Without docstrings (``python -OO``) there is none.

    Args:
      dtype_policy: describes that argument. It follows Flax's own descriptions, in their section.
    """
    if cls.__doc__ is not None and upstream.__doc__ is not None:
        theirs = _with_argument(inspect.cleandoc(upstream.__doc__), dtype_policy)
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__)}\n\nFlax's own description:\n\n{theirs}\n"


def _with_argument(docstring: str, description: str) -> str:
    section = _SECTION.search(docstring)
    if section is None:
        return f"{docstring}\n\nArgs:\n{_argument(description, '  ')}"
    head, body = docstring[: section.end()], docstring[section.end() :]
    after = re.search(r"^\S", body, re.MULTILINE)  # the next section
    rest = "" if after is None else f"\n\n{body[after.start() :]}"
    body = (body if after is None else body[: after.start()]).rstrip()
    indent = body[: len(body) - len(body.lstrip())]
    return f"{head}{body}\n{_argument(description, indent)}{rest}"


def _argument(description: str, indent: str) -> str:
    text = f"dtype_policy: {description}"
    return textwrap.fill(
        text, 80, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )

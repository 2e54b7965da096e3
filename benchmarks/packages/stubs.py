"""Stands in for modules that a package imports but its models don't use: simulators, datasets,
plots, torch.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]):
        self.names = frozenset(names)

    def has(self, fullname: str) -> bool:
        return any(f"{fullname}.".startswith(f"{name}.") for name in self.names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if self.has(fullname):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(
            name=spec.name, __spec__=spec, __path__=[], __name__=spec.name, __file__=None
        )

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: every attribute is there."""


@contextlib.contextmanager
def stubbed(*names: str) -> Iterator[None]:
    """Lets the modules of these names, and those below them, be imported in this block where they
    are not installed.
    """
    finder = _Finder([name for name in names if not _is_there(name)])
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in filter(finder.has, list(sys.modules)):
            del sys.modules[name]


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent isn't
        return False

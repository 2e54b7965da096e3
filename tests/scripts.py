"""Imports the scripts of docs/, which are no package."""

import functools
import importlib.util
import sys
from typing import Any

from tests.eight_devices import ROOT


@functools.cache
def docs_script(name: str) -> Any:
    """Returns the module of docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module

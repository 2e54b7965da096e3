"""Flax modules with explicit dtype policies, in `mpmodules.linen` and `mpmodules.nnx`.

The names of `policy` that a model's author needs are here, too.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

try:
    from policy import Policy as Policy
    from policy import PolicyRules as PolicyRules
    from policy import current_policy as current_policy
    from policy import full_precision as full_precision
    from policy import get_policy as get_policy
    from policy import set_policy as set_policy
    from policy import use_policy as use_policy
    from policy._version import __version__ as __version__
except ImportError as error:
    raise ImportError(
        "mpmodules needs its own package 'policy', but 'import policy' finds "
        f"{getattr(sys.modules.get('policy'), '__file__', None) or 'nothing'}. Rename that file, "
        "take its folder out of sys.path, or uninstall the distribution that it is part of; then "
        "reinstall ours: pip install --force-reinstall --no-deps mpmodules."
    ) from error

from mpmodules import registration as _registration

if TYPE_CHECKING:
    from mpmodules import linen as linen
    from mpmodules import nnx as nnx
    from policy import autocast as autocast

__all__ = [
    "Policy",
    "PolicyRules",
    "autocast",
    "current_policy",
    "full_precision",
    "get_policy",
    "linen",
    "nnx",
    "set_policy",
    "use_policy",
]

_registration.register()


def __getattr__(name: str) -> Any:
    if name in ("linen", "nnx"):
        return importlib.import_module(f"mpmodules.{name}")
    if name == "autocast":
        return importlib.import_module("policy").autocast
    raise AttributeError(f"module 'mpmodules' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)

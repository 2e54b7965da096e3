"""Flax's modules made known to `policy`, which imports no Flax, and our states to Flax."""

from __future__ import annotations

from flax import nnx as flax_nnx

from mpmodules.calls.references import is_reference
from mpmodules.serialization import register_states
from mpmodules.tracing.linen_names import noting_modules
from mpmodules.tracing.nnx_lowering import is_no_parameter, lowered
from policy.programs.frameworks import FRAMEWORKS


class _Flax:
    """Flax as a library of modules that hold state."""

    noting_modules = staticmethod(noting_modules)
    lowered = staticmethod(lowered)
    is_reference = staticmethod(is_reference)
    is_no_parameter = staticmethod(is_no_parameter)
    eval_shape = staticmethod(flax_nnx.eval_shape)


def register() -> None:
    """Makes Flax known to `policy`, and our states to Flax's serialization."""
    FRAMEWORKS.append(_Flax())
    register_states()

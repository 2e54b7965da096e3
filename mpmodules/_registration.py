"""Flax's modules made known to `policy`, which imports no Flax, and our states to Flax."""

from __future__ import annotations

from flax import nnx as flax_nnx

from mpmodules._linen_names import noting_modules
from mpmodules._nnx_lowering import is_no_parameter, lowered
from mpmodules._references import is_reference
from mpmodules._serialization import register_states
from policy._jaxpr.module_names import NOTING
from policy._jaxpr.trace import LOWERINGS
from policy.estimate.steps import EVAL_SHAPES
from policy.references import REFERENCES
from policy.traced.gradients import NO_PARAMETERS


def register() -> None:
    """Registers the names, references, calls and variables of Flax's modules, their shapes, and how
    states are saved.
    """
    NOTING.append(noting_modules)
    REFERENCES.append(is_reference)
    LOWERINGS.append(lowered)
    EVAL_SHAPES.append(flax_nnx.eval_shape)
    NO_PARAMETERS.append(is_no_parameter)
    register_states()

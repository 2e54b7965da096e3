"""Flax's modules made known to `policy`, which imports no Flax, and our states to Flax."""

from __future__ import annotations

from flax import nnx as flax_nnx

from mpmodules.calls.references import is_reference
from mpmodules.serialization import register_states
from mpmodules.tracing.linen_names import noting_modules
from mpmodules.tracing.nnx_lowering import is_no_parameter, lowered
from policy.core.references import REFERENCES
from policy.inspect.estimate.steps import EVAL_SHAPES
from policy.inspect.traced.gradients import NO_PARAMETERS
from policy.programs.module_names import NOTING
from policy.programs.trace import LOWERINGS


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

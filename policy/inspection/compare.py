"""compare: a function under a policy beside the same function in float32, module by module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.inspection.comparison import Comparison
from policy.inspection.paired import Log, Paired
from policy.inspection.program import Call, Program, checked_policy, program_of, short_text
from policy.inspection.rerun import Value
from policy.inspection.rows import comparison_of
from policy.policy import Policy
from policy.programs import opened

# What is written is what is run: XLA may leave roundings out otherwise.
EXACT: dict[str, str | bool] = {"xla_allow_excess_precision": False}


def compare(
    fn: Any,
    *args: Any,
    policy: Policy | str | None = None,
    gradients: bool = False,
    loss_scale: float = 1.0,
    **kwargs: Any,
) -> Comparison:
    """`fn(*args, **kwargs)` under `policy` beside the same call in float32: how far each module is off, and where."""
    policy = checked_policy(policy)
    call = Call.of("compare", fn, args, kwargs, _scale(gradients, loss_scale))
    program = program_of(call, policy)
    log = Log()
    compiled = jax.jit(paired(program, log)).lower(*program.arguments.arrays).compile(compiler_options=EXACT)
    numbers, undefined = jax.device_get(compiled(*program.arguments.arrays))
    name = getattr(fn, "__name__", type(fn).__name__)
    return comparison_of(program, log, numbers, undefined, name, "" if policy is None else short_text(policy))


def _scale(gradients: bool, loss_scale: float) -> float | None:
    if not isinstance(loss_scale, (int, float)) or not (0 < loss_scale < float("inf")):
        raise ValueError(f"loss_scale should be a positive number, but got {loss_scale!r}.")
    return float(loss_scale) if gradients else None


def paired(program: Program, log: Log) -> Any:
    """The function of the program's arrays that runs both, and returns what was measured, and which inputs hold NaN."""
    body, consts = opened(program.jaxpr)

    def run(*arrays: Any) -> tuple[dict[int, Any], list[Any]]:
        log.places.clear()
        log.measurements.clear()
        both = Paired(log)
        outputs = both.run(body, [Value([const]) for const in consts], [Value([array]) for array in arrays])
        both.returned(outputs, body.outvars)
        return both.notes, [_has_nan(array) for array in arrays]

    return run


def _has_nan(array: Any) -> Any:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.any(jnp.isnan(array)) if is_float else np.False_

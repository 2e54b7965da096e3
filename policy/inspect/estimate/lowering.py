"""Lowers a traced step for a target's devices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core

from policy.inspect.audit.states import states_of
from policy.inspect.estimate.steps import Step
from policy.inspect.estimate.targets import Target
from policy.programs.jaxprs import maker_of
from policy.programs.primitives import HOST, KERNELS
from policy.programs.reading.walk import walk


def lowered_step(
    step: Step, placed: Sequence[jax.ShapeDtypeStruct], target: Target, name: str
) -> tuple[Any, list[str]]:
    """Lowers a step, and returns remarks that JAX makes of it.

    Arrays that the step returns in the place of arguments, as params and state, keep the shardings
    of those.

    Args:
      step: the traced step.
      placed: the shapes and shardings of its arrays.
      target: the target to lower for.
      name: of the function.

    Raises:
      ValueError: the step can't be lowered for the target.
    """
    jaxpr = step.traced.jaxpr
    run = jex_core.jaxpr_as_fun(jaxpr)
    # JAX hands on an argument that is returned as it is; the program doesn't copy it.
    made = [i for i in range(len(jaxpr.out_avals)) if maker_of(jaxpr, i) is not None]

    def program(*arrays: Any) -> Any:
        outputs = run(*arrays)
        return [outputs[i] for i in made]

    program.__name__ = program.__qualname__ = name
    kept = {state.output: placed[state.argument].sharding for state in states_of(step.traced)}
    jitted = jax.jit(
        program,
        donate_argnums=step.donated,
        out_shardings=[kept.get(i) for i in made],
        keep_unused=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lowered = jitted.trace(*placed).lower(lowering_platforms=(target.platform,))
        except Exception as error:  # of any kernel's or callback's lowering
            raise ValueError(
                f"{name} can't be lowered for {target.name}: {_reason(error, jaxpr)}"
            ) from error
    return lowered, [_first_line(one.message) for one in caught if _is_of_donation(one.message)]


def host_callbacks(jaxpr: Any) -> list[str]:
    """Returns the names of a program's callbacks to the host."""
    return sorted({site.name for site in walk(jaxpr) if site.name in HOST})


def _reason(error: Exception, jaxpr: Any) -> str:
    said = f"{_first_line(error).rstrip('.')}."
    callbacks = host_callbacks(jaxpr)
    if callbacks:
        said += (
            f" It calls back to the host ({', '.join(callbacks)}), which JAX lowers for a GPU only "
            "on a machine with one: leave the callback out of the step."
        )
    kernels = sorted({site.name for site in walk(jaxpr) if site.name in KERNELS})
    if kernels:
        said += f" It runs kernels ({', '.join(kernels)}), which are written for one platform."
    if "incompatible devices" in said:
        said += " The step takes several devices: give mesh= or shardings= to spread its arrays."
    return said


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_of_donation(message: object) -> bool:
    return "donated buffers were not usable" in str(message)

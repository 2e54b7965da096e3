"""The precisions of the matmuls of a program."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from policy.programs.jaxprs import opened
from policy.programs.primitives import MATMULS
from policy.programs.reading.walk import walk


def precisions(fn: Callable[..., Any], *args: Any) -> set[tuple[str, str | None]]:
    """Returns (dtype of the first operand, precision) of each matmul and convolution."""
    body, _ = opened(jax.make_jaxpr(fn)(*args))
    return {
        (str(site.equation.invars[0].aval.dtype), _name(site.equation.params["precision"]))
        for site in walk(body)
        if site.name in MATMULS
    }


def _name(precision: Any) -> str | None:
    if precision is None:
        return None
    if isinstance(precision, tuple):
        left, right = precision
        assert left == right
        precision = left
    return precision.name.lower() if isinstance(precision, lax.Precision) else str(precision)

"""Measures a snippet's program and gradients beside `policy.autocast` and float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.own_code import models
from benchmarks.own_code.models import AUTOCAST, REFERENCE
from benchmarks.own_code.snippet import Snippet
from benchmarks.packages.measure import relative_error
from policy import autocast
from policy.programs.dtypes import HALVES, dtype_name_of
from policy.programs.primitives import CUMULATIVE, MATMULS, WINDOWED, kind_of
from policy.programs.reading.walk import walk

POLICIES = ("mixed_bfloat16", "mixed_float16")
SEEDS = range(16)
NOISE = 1e-6  # an error of float32 itself
_LOSS_SCALE = 2.0**7  # of losses that are means: float16's gradients do not underflow
# What is written is what is run: XLA may leave roundings out otherwise.
_EXACT: dict[str, Any] = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Figures:
    """A model under a policy.

    Attributes:
      float32_matmuls: matmuls and convolutions with a float32 operand, forward and backward.
      half_sums: sums of several terms in half precision, forward and backward.
      error: of the gradients beside float64: norm of the difference / norm, the median of draws.
      autocast_error: the same of the model's maths under `policy.autocast`.
    """

    float32_matmuls: int
    half_sums: int
    error: float = 0.0
    autocast_error: float = 0.0

    @property
    def ratio(self) -> float:
        """The error beside autocast's, 1 where both are float32's noise."""
        if max(self.error, self.autocast_error) < NOISE:
            return 1.0
        return self.error / self.autocast_error if self.autocast_error else math.inf


@contextlib.contextmanager
def as_people_run() -> Iterator[None]:
    """Sets JAX's default promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def step_of(snippet: Snippet, way: str, policy: str = "") -> Step:
    """Returns a function of what `models.draw` returns: the loss and the gradients of parameters.

    Args:
      snippet: the model's own code.
      way: one of `WAYS`, `AUTOCAST`, or `REFERENCE`, which runs in the dtype of its arguments.
      policy: its name.
    """
    by_hand = way in (AUTOCAST, REFERENCE)
    net = functools.partial(models.plain, snippet) if by_hand else None
    net = net or models.net_of(snippet, way, policy)

    def loss(params: Any, x: Any, targets: Any, wanted: Any) -> Any:
        out = net(params, x, *targets)
        if snippet.is_loss:
            return _LOSS_SCALE * out
        return jnp.sum(jnp.square(out - wanted)) / len(out)

    return jax.value_and_grad(autocast(loss, policy) if way == AUTOCAST else loss)


# --------------------------------------------------------------------------------------------------
# Counts
# --------------------------------------------------------------------------------------------------


def float32_matmuls(jaxpr: Any) -> int:
    """Counts matmuls and convolutions with a float32 operand; those without a contraction, such as
    outer products of positions and frequencies, are left out.
    """
    return sum(
        site.name in MATMULS
        and _contracts(site.equation)
        and "float32" in map(dtype_name_of, site.equation.invars)
        for site in walk(jaxpr)
    )


def half_sums(jaxpr: Any) -> int:
    """Counts sums of several terms in half precision; chains of additions are left out."""
    return sum(
        kind_of(site.name) in ("reduction", "scatter-add")
        and dtype_name_of(site.equation.outvars[0]) in HALVES
        and _terms(site.equation) > 1
        for site in walk(jaxpr)
    )


def _contracts(equation: Any) -> bool:
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name != "dot_general":
        return True
    (contracted, _), _ = numbers
    return bool(contracted)


def _terms(equation: Any) -> int:
    """Returns how many numbers an element of a sum may be made of."""
    name, params, shape = equation.primitive.name, equation.params, equation.invars[0].aval.shape
    if name in CUMULATIVE:
        return shape[params["axis"]]
    if name in WINDOWED:
        return math.prod(params["window_dimensions"])
    if kind_of(name) == "scatter-add":
        return 1 if params["unique_indices"] else 2
    return math.prod(shape[axis] for axis in params["axes"]) if "axes" in params else 2


def counts(snippet: Snippet, way: str, policy: str) -> Figures:
    """Counts in the program of the gradients, which is traced and not run."""
    with as_people_run():
        jaxpr = jax.make_jaxpr(step_of(snippet, way, policy))(*models.draw(snippet, 0))
    return Figures(float32_matmuls(jaxpr), half_sums(jaxpr))


# --------------------------------------------------------------------------------------------------
# Errors
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Truths:
    """Draws of a snippet's model, with their gradients.

    Attributes:
      drawn: what each step takes.
      gradients: of each draw, in float64.
      autocast_errors: errors of the model's maths under `policy.autocast`, by policy.
    """

    drawn: Sequence[Any]
    gradients: Sequence[Any]
    autocast_errors: dict[str, float]

    @classmethod
    def of(
        cls, snippet: Snippet, policies: Sequence[str] = POLICIES, seeds: Sequence[int] = SEEDS
    ) -> Truths:
        """Draws models and runs their maths in float64 and under autocast."""
        drawn = [models.draw(snippet, seed) for seed in seeds]
        with as_people_run(), jax.enable_x64(True):
            step = jax.jit(step_of(snippet, REFERENCE))
            gradients = [jax.device_get(step(*_in_float64(each))[1]) for each in drawn]
        with as_people_run():
            steps = {policy: step_of(snippet, AUTOCAST, policy) for policy in policies}
            errors = {policy: error(step, drawn, gradients) for policy, step in steps.items()}
        return cls(drawn, gradients, errors)


def _in_float64(drawn: Any) -> Any:
    return jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, drawn)


def error(step: Step, drawn: Sequence[Any], truths: Sequence[Any]) -> float:
    """Returns the median of the relative errors of a step's gradients."""
    compiled = jax.jit(step).lower(*drawn[0]).compile(compiler_options=_EXACT)
    found = [jax.device_get(compiled(*each)[1]) for each in drawn]
    return statistics.median(map(relative_error, found, truths))


def measured(snippet: Snippet, way: str, policy: str, truths: Truths) -> Figures:
    """Returns the figures of a snippet's model, run in one way."""
    figures = counts(snippet, way, policy)
    with as_people_run():
        found = error(step_of(snippet, way, policy), truths.drawn, truths.gradients)
    return dataclasses.replace(figures, error=found, autocast_error=truths.autocast_errors[policy])

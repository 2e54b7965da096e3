"""Measures the matmul FLOPs that a bfloat16 model leaves in float32, and its errors beside the
float32 model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.packages.cases import Case, Way
from policy.inspect.traced.equation_facts import flops_of
from policy.programs.dtypes import dtype_name_of
from policy.programs.primitives import kind_of
from policy.programs.reading.walk import walk

SEEDS = range(16)
_SPREAD = 0.05  # of what is added to parameters, so that none of them is zero
_WIDE, _COMPLEX = frozenset(("float32", "float64")), frozenset(("complex64", "complex128"))
# What is written is what is run: XLA may leave roundings out otherwise.
_EXACT: dict[str, Any] = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Figures:
    """One way to run a model, beside the model in float32.

    Attributes:
      share: of the FLOPs of matmuls and convolutions, forward and backward, those with a float32
        operand.
      outputs, gradients: norm of the difference / norm of float32's, of all outputs and of all
        parameters' gradients: the median of several draws, of which some may fall on two sides of a
        step that the model makes.
    """

    share: float
    outputs: float
    gradients: float


def float32_share(fn: Callable[..., Any], *args: Any) -> float:
    """Returns the share of a function's matmul FLOPs that have a float32 operand; loop bodies count
    every time.

    Matmuls of complex numbers, of which no half precision has any, are left out. It is 0 for a
    function without others.
    """
    total = wide = 0
    for site in walk(jax.make_jaxpr(fn)(*args)):
        operands = set(map(dtype_name_of, site.equation.invars))
        if kind_of(site.name) in ("dot", "convolution") and not operands & _COMPLEX:
            flops = flops_of(site.equation) * site.count * site.devices
            total += flops
            wide += flops * bool(operands & _WIDE)
    return wide / total if total else 0.0


def relative_error(found: Any, truth: Any) -> float:
    """Returns the norm of the difference of two trees over the norm of the second; infinite where
    that alone is 0.

    Args:
      found: a tree of arrays of any floating dtype.
      truth: a tree with leaves of the same shapes.

    Raises:
      ValueError: the leaves have not the same shapes.
    """
    difference = norm = 0.0
    for one, other in zip(_leaves(found), _leaves(truth), strict=True):
        if one.shape != other.shape:
            raise ValueError(
                f"The leaves should have one shape, but have {one.shape} and {other.shape}."
            )
        difference += float(np.square(one - other).sum())
        norm += float(np.square(other).sum())
    if norm:
        return math.sqrt(difference / norm)
    return math.inf if difference else 0.0


def _leaves(tree: Any) -> Iterator[np.ndarray]:
    for leaf in jax.tree.leaves(tree):
        wide = np.complex128 if jnp.issubdtype(leaf.dtype, jnp.complexfloating) else np.float64
        yield (
            np.abs(np.asarray(leaf)).astype(wide)
            if leaf.dtype == bool
            else np.asarray(leaf).astype(wide)
        )


@dataclasses.dataclass(frozen=True)
class Draw:
    """Parameters, other state, inputs and targets of a model, drawn from one seed."""

    params: Any
    rest: Any
    inputs: tuple[Any, ...]
    targets: list[Any]


def draws(case: Case, seeds: Sequence[int]) -> list[Draw]:
    """Draws what a model is run on: parameters around the initial ones, inputs and targets."""
    fn, initial = case.program("float32")
    params, rest = initial()
    found = []
    for seed in seeds:
        inputs = case.arguments(seed)
        generator = np.random.default_rng(seed)
        shapes = floats(jax.eval_shape(fn, params, rest, *inputs))
        targets = [jnp.asarray(generator.normal(size=shape.shape), jnp.float32) for shape in shapes]
        found.append(Draw(_spread(params, generator), rest, inputs, targets))
    return found


def floats(tree: Any) -> list[Any]:
    """Returns the floating leaves of what a model returned."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _spread(params: Any, generator: np.random.Generator) -> Any:
    def spread(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf + jnp.asarray(_SPREAD * generator.normal(size=leaf.shape), leaf.dtype)

    return jax.tree.map(spread, params)


def step_of(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of what was drawn that returns outputs and gradients: of the squared
    distance to targets.
    """

    def loss(params: Any, rest: Any, inputs: Any, targets: Any) -> Any:
        outputs = floats(fn(params, rest, *inputs))
        pairs = zip(outputs, targets, strict=True)
        return sum(jnp.mean(jnp.square(out.astype(jnp.float32) - to)) for out, to in pairs), outputs

    def step(params: Any, rest: Any, inputs: Any, targets: Any) -> Any:
        (_, outputs), gradients = jax.value_and_grad(loss, has_aux=True, allow_int=True)(
            params, rest, inputs, targets
        )
        return outputs, floats(gradients)

    return step


def results(case: Case, way: Way, drawn: Sequence[Draw]) -> tuple[list[Any], list[Any], float]:
    """Returns outputs and gradients of each draw, and the share of the FLOPs that are in float32.

    Raises:
      ValueError: the model has other parameters than in float32.
    """
    fn, initial = case.program(way)
    _require_alike(jax.eval_shape(lambda: initial()[0]), drawn[0].params)
    step = step_of(fn)
    arguments = [(each.params, each.rest, each.inputs, each.targets) for each in drawn]
    share = float32_share(step, *arguments[0])
    compiled = jax.jit(step).lower(*arguments[0]).compile(compiler_options=_EXACT)
    found = [jax.device_get(compiled(*each)) for each in arguments]
    return [outputs for outputs, _ in found], [gradients for _, gradients in found], share


def _require_alike(params: Any, reference: Any) -> None:
    shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (params, reference)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"It has {len(shapes[0])} parameters, {len(shapes[1])} in float32, or other ones."
        )


@dataclasses.dataclass(frozen=True)
class Measured:
    """A model's figures.

    Attributes:
      ways: of each way to run it in bfloat16; or the first line of its error.
      digests: of each parameter, output and gradient of the first draw in float32, by kind and
        place.
    """

    ways: dict[str, Figures | str]
    digests: dict[str, str]


def measure(case: Case, seeds: Sequence[int] = SEEDS, in_half: bool = True) -> Measured:
    """Runs a model in float32 and, with `in_half`, in each way in bfloat16; what fails is told by
    its error.
    """
    try:
        drawn = draws(case, seeds)
        outputs, gradients, _ = results(case, "float32", drawn)
    except Exception as error:
        return Measured({"float32": told(error)}, {})
    first = {
        "params": drawn[0].params,
        "rest": drawn[0].rest,
        "outputs": outputs[0],
        "gradients": gradients[0],
    }
    measured = Measured(
        {},
        {
            f"{kind}{i}": each
            for kind, tree in first.items()
            for i, each in enumerate(digests(tree))
        },
    )
    for way in case.ways() if in_half else ():
        try:
            found = results(case, way, drawn)
            errors = (
                map(relative_error, *pair) for pair in ((found[0], outputs), (found[1], gradients))
            )
            measured.ways[way] = Figures(found[2], *map(statistics.median, errors))
        except Exception as error:
            measured.ways[way] = told(error)
    return measured


def digests(tree: Any) -> Iterator[str]:
    """Yields dtype, shape and a hash of each leaf of a tree."""
    for leaf in jax.tree.leaves(tree):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        yield f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"


def told(error: BaseException) -> str:
    """Returns the class and the first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"

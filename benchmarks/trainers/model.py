"""A trainer's model: a small one to run, and layers at their real width to compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.packages.cases import POLICY, PORT, Case, Way
from benchmarks.packages.measure import floats
from mpmodules import use_policy


@dataclasses.dataclass(frozen=True)
class Model(Case):
    """A model of a trainer. `make`, `inputs` and `call` are those of `Case`.

    Attributes:
      large: the same model with one or two layers at their real width, and a real batch. Of nnx its
        `make` returns shapes: `nnx.eval_shape(lambda: ...)`.
      rules: of the port beside the policy, for layers that upstream's option leaves in float32.
      backward: whether the large one is compiled with its backward pass; a step of decoding isn't.
    """

    large: Case | None = None
    rules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    backward: bool = True


def program(case: Case, way: Way, rules: Mapping[str, str]) -> Any:
    """Returns `case.program`; a port is made and called under the policy instead of by
    `apply_policy`.
    """
    if way != PORT:
        return case.program(way)
    under_policy = use_policy(POLICY, rules)
    fn, initial = under_policy(case.program)("float32")
    return under_policy(fn), under_policy(initial)


@dataclasses.dataclass(frozen=True)
class Ported:
    """A case whose programs are those of `program`, for `benchmarks.packages.measure`."""

    case: Model

    def program(self, way: Way) -> Any:
        return program(self.case, way, self.case.rules)

    def arguments(self, seed: int) -> tuple[Any, ...]:
        return self.case.arguments(seed)


def large_step(model: Model, case: Case, way: Way) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the loss of a large model with its gradients, or the call alone, and the shapes of
    its arguments: parameters, state and inputs.
    """
    fn, initial = program(case, way, model.rules)
    try:
        made = jax.eval_shape(initial)
    except TypeError:  # of nnx: shapes already
        made = initial()
    inputs = jax.eval_shape(lambda: case.arguments(0))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*made, *inputs))

    def loss(params: Any, rest: Any, *inputs: Any) -> Any:
        outputs = floats(fn(params, rest, *inputs))
        return sum(jnp.mean(jnp.square(out.astype(jnp.float32))) for out in outputs)

    return (jax.value_and_grad(loss) if model.backward else fn), shapes

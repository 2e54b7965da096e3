"""A trainer's model: a small one to run, and layers at their real width to compile."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import policy
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


def draw_images(generator: np.random.Generator, batch: int, size: int) -> tuple[np.ndarray]:
    """Draws images, (batch, size, size, 3), in float32."""
    return (generator.normal(size=(batch, size, size, 3)).astype(np.float32),)


def draw_tokens(
    generator: np.random.Generator, batch: int, length: int, words: int
) -> tuple[np.ndarray]:
    """Draws tokens, (batch, length), that are no padding."""
    return (generator.integers(1, words, size=(batch, length), dtype=np.int32),)


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


# --------------------------------------------------------------------------------------------------
# Models of nnx without a dtype option, which compute in the dtype that their weights are stored in
# --------------------------------------------------------------------------------------------------


def stored_in(model: Any, dtype: Any) -> Any:
    """Casts the state of a model to `dtype`, as loaders of checkpoints do; None casts none."""
    if dtype is not None:
        model.stored_dtype = str(jnp.dtype(dtype))
        graph, state = nnx.split(model)  # buffers too, which are no variables
        model = nnx.merge(graph, policy.cast_floating(state, dtype))
    return model


def in_stored_dtype(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call of a model that has float32 parameters in the dtype of `stored_in`, inputs
    included.
    """

    @functools.wraps(call)
    def cast(model: Any, *inputs: Any) -> Any:
        dtype = getattr(model, "stored_dtype", None)
        if dtype is None:
            return call(model, *inputs)
        return call(stored_in(model, dtype), *policy.cast_floating(inputs, dtype))

    return cast

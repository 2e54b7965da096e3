"""Costs of a monitored train step on a TPU in the steps that are not due, beside the step alone.

    python -m benchmarks.accel.monitor          # the table: 4 minutes on two cores, nothing is run
    python -m benchmarks.accel.monitor --check  # exits with 1 where a ratio misses its bound

A decoder of one layer, AdamW through `mixed_precision`, params and state donated. Of the
conditional around the snapshot the branch is counted that skips it.

cycles     the compiler's estimate.
bytes      moved by kernels, by the shapes in the program's text.
temporary  the peak of temporary memory, which the branch that takes a snapshot shares: reported
           without a bound.

XLA fetches operands of the conditional to the chip's own memory beforehand. With 29 million params
(WIDTH 1024, VOCABULARY 8192, 8 x 512 tokens) that is 3.5% of the cycles and 23% of the bytes, with
`on_nonfinite=True` 4.2% and 35%: gradients are then held in memory while the snapshot is taken.
With 180 million (2048, 32000, 8 x 1024) the step takes 0.91 of the cycles with either, 1.7% and
1.9% more bytes, and 1.9 and 2.2 times the temporary memory.
Rows with `on_nonfinite=True` only report.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator

from benchmarks.accel.targets import Target  # first: it sets what JAX reads when it is imported

# isort: split
from typing import Any

import jax
import jax.numpy as jnp
import optax

import policy
from benchmarks.accel.program import placed
from benchmarks.table import Row, run
from mpmodules import linen as nn
from policy.inspect.estimate.targets import exchange_time, kernel_time
from policy.inspect.hlo.costs import costs_of

TARGET = "v5e:1x1"
POLICY = "mixed_bfloat16"
BOUND = 1.01
WIDTH, VOCABULARY, BATCH, LENGTH = 256, 1024, 8, 256


class Decoder(nn.Module):
    """Tokens in, logits out."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH)(tokens)
        h = nn.LayerNorm()(x)
        attention = nn.MultiHeadDotProductAttention(num_heads=4, name="attention")
        x = x + attention(h, h, mask=nn.make_causal_mask(tokens))
        h = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        x = x + nn.Dense(WIDTH, name="down")(h)
        return nn.Dense(VOCABULARY, name="logits")(nn.LayerNorm(name="norm")(x))


TX = policy.mixed_precision(optax.adamw(1e-3), POLICY)


def train_step(params: Any, opt_state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
    def loss_fn(params: Any) -> Any:
        logits: Any = Decoder().apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = policy.value_and_grad(loss_fn)(params)
    params, opt_state, _ = policy.apply_gradients(TX, params, opt_state, gradients)
    return params, opt_state, loss


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of a step that is not due; see the table."""

    cycles: float
    bytes: float
    temporary: float


def costs(target: Target, function: Any, arguments: Any, donated: tuple[int, ...]) -> Costs:
    """Compiles a step for the target, and counts what it costs."""
    traced = jax.jit(function, donate_argnums=donated).trace(*placed(target, arguments))
    compiled: Any = traced.lower(lowering_platforms=("tpu",)).compile()
    chip = target.chip
    found = costs_of(compiled.as_text(), kernel_time(chip), exchange_time(chip), cheapest=True)
    return Costs(found.time, found.bytes, compiled.memory_analysis().temp_size_in_bytes)


@policy.use_policy(POLICY)
def rows(small: bool = False) -> Iterator[Row]:
    """Yields a row of each quantity for both choices of `on_nonfinite`; one of them if `small`."""
    target, tokens = Target(TARGET), jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    params = jax.eval_shape(Decoder().init, jax.random.key(0), tokens)
    given = params, jax.eval_shape(TX.init, params), tokens, tokens
    alone = costs(target, train_step, given, (0, 1))
    number = jax.ShapeDtypeStruct((), jnp.int32)
    for on_nonfinite in (False,) if small else (False, True):
        step = policy.monitor(train_step, on_nonfinite=on_nonfinite)
        found = costs(target, step, (number, *given), (1, 2))
        bound = None if on_nonfinite else BOUND
        name = f"monitor, on_nonfinite={on_nonfinite}, {TARGET}"
        yield Row("cycles", name, found.cycles, alone.cycles, bound)
        yield Row("bytes", name, found.bytes, alone.bytes, bound)
        yield Row("temporary", name, found.temporary, alone.temporary)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "the step alone"))

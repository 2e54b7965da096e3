"""Costs of a monitored train step on a TPU in the steps that are not due, beside the step alone.

    python -m benchmarks.accel.monitor          # the table: half an hour, nothing is run
    python -m benchmarks.accel.monitor --check  # exits with 1 where a ratio misses its bound
    python -m benchmarks.accel.monitor --only 29M "two programs"  # rows with a text in their names

A decoder of one layer, AdamW through `mixed_precision`, params and state donated.

two programs  `monitor(..., jit=)`: the program of steps that are not due. With on_nonfinite=False
              it is the step's own (tests/policy/inspect/monitor/test_two_programs.py).
one program   `jax.jit(monitor(...))`: of the conditional around the snapshot the branch is counted
              that skips it.

cycles     the compiler's estimate.
bytes      moved by kernels, by the shapes in the program's text.
temporary  the peak of temporary memory, which the branch that takes a snapshot shares.

One program has bounds in the smallest step, without `on_nonfinite`: with it the params and state of
before the step are held until its end, which decides on the snapshot. Two programs with
`on_nonfinite` have none: the step's new state is read once more.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence

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
from policy.inspect.monitor.two_programs import kept_unless_finite

TARGET = "v5e:1x1"
POLICY = "mixed_bfloat16"
BOUND = 1.01


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a decoder and its batch of 8 texts."""

    width: int
    vocabulary: int
    length: int


SIZES = {  # by the number of params
    "1M": Size(256, 1024, 256),
    "29M": Size(1024, 8192, 512),
    "180M": Size(2048, 32000, 1024),
}


class Decoder(nn.Module):
    """Tokens in, logits out."""

    size: Size

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        width, vocabulary = self.size.width, self.size.vocabulary
        x = nn.Embed(vocabulary, width)(tokens)
        h = nn.LayerNorm()(x)
        attention = nn.MultiHeadDotProductAttention(num_heads=4, name="attention")
        x = x + attention(h, h, mask=nn.make_causal_mask(tokens))
        h = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm()(x)))
        x = x + nn.Dense(width, name="down")(h)
        return nn.Dense(vocabulary, name="logits")(nn.LayerNorm(name="norm")(x))


TX = policy.mixed_precision(optax.adamw(1e-3), POLICY)


def step_of(size: Size) -> tuple[Any, tuple[Any, ...]]:
    """Returns a train step, and the shapes of its arguments."""
    model, tokens = Decoder(size), jax.ShapeDtypeStruct((8, size.length), jnp.int32)

    def train_step(params: Any, opt_state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        def loss_fn(params: Any) -> Any:
            logits: Any = model.apply(params, tokens)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = policy.value_and_grad(loss_fn)(params)
        params, opt_state, _ = policy.apply_gradients(TX, params, opt_state, gradients)
        return params, opt_state, loss

    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return train_step, (params, jax.eval_shape(TX.init, params), tokens, tokens)


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


TWO, ONE = "two programs", "one program"
FORMS: dict[str, Callable[[Any], Any]] = {  # from a train step to its program, which takes a number
    f"{TWO}, on_nonfinite=True": lambda fn: lambda number, *args: kept_unless_finite(fn)(*args),
    f"{ONE}, on_nonfinite=False": lambda fn: policy.monitor(fn, on_nonfinite=False),
    f"{ONE}, on_nonfinite=True": policy.monitor,
}
BOUNDED = {("1M", f"{ONE}, on_nonfinite=False")}


@policy.use_policy(POLICY)
def rows(small: bool = False, only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields a row of each quantity by size and form; those of the smallest bounded if `small`.

    Args:
      only: texts, each of which is in the names of the rows.
    """
    target, number = Target(TARGET), jax.ShapeDtypeStruct((), jnp.int32)
    alone: dict[str, Costs] = {}
    for size, form in itertools.product(SIZES, FORMS):
        name, is_bounded = f"{size}, {form}", (size, form) in BOUNDED
        if (small and not (is_bounded and size == "1M")) or not all(text in name for text in only):
            continue
        train_step, given = step_of(SIZES[size])
        if size not in alone:
            alone[size] = costs(target, train_step, given, (0, 1))
        found = costs(target, FORMS[form](train_step), (number, *given), (1, 2))
        for quantity in ("cycles", "bytes", "temporary"):
            ours, own = (getattr(one, quantity) for one in (found, alone[size]))
            has_bound = is_bounded and quantity != "temporary"
            yield Row(quantity, name, ours, own, BOUND if has_bound else None, target=TARGET)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "the step alone"))

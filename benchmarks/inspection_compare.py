"""The cost of `policy.compare` beside the float32 function that it compares with.

    python -m benchmarks.inspection_compare           # the table: 2 minutes on two idle cores
    python -m benchmarks.inspection_compare --check   # exits with 1 where a figure misses its bound
    python -m benchmarks.inspection_compare --small   # shallower models: 1 minute
    python -m benchmarks.inspection_compare --json FILE

A transformer of ours that obeys the scope's policy, and one of Flax's under autocast.

flops    of the two compiled programs of a comparison with gradients, by XLA's cost analysis, and of
         the float32 value_and_grad.
memory   by XLA's memory analysis: what a program needs beside its arguments, temporaries and
         results. The values between modules are results of both programs of a comparison: they stay
         in memory while the other one runs.
time     of one run, the best of several, side by side. On CPU, half precision is float32 between
         casts.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import autocast_models as models
from benchmarks.table import Row, run
from mpmodules import linen as nn
from policy.core.policy import get_policy
from policy.inspect.compare.recorder import Log, recorded
from policy.inspect.traced.call import Call, program_of

POLICY = "mixed_bfloat16"
FLOPS, FORWARD, GRADIENTS, TIME = 4.0, 30.0, 6.0, 4.0
MIB = 2.0**20


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class Ours(nn.Module):
    """A transformer whose layers obey the policy in force."""

    layers: int
    width: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(64, self.width)(tokens)
        for i in range(self.layers):
            x = Block(name=f"layer_{i}")(x)
        return nn.Dense(64)(nn.LayerNorm()(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and how many tokens it reads."""

    name: str
    model: Any
    width: int
    batch: int = 8
    length: int = 64

    def forward(self, variables: Any, tokens: Any) -> Any:
        return self.model.apply(variables, tokens)

    def loss(self, variables: Any, tokens: Any) -> Any:
        return models.cross_entropy(self.forward(variables, tokens), tokens)

    def arguments(self) -> tuple[Any, Any]:
        """Numbers that cost no compilation: what is measured does not depend on them."""
        generator = np.random.default_rng(0)
        tokens = generator.integers(1, 16, (self.batch, self.length), dtype=np.int32)
        shapes = jax.eval_shape(self.model.init, jax.random.key(0), tokens)
        draw = lambda like: generator.normal(size=like.shape, scale=0.05).astype(like.dtype)  # noqa: E731
        return jax.tree.map(draw, shapes), tokens


def comparison(fn: Callable[..., Any], arguments: Any, backward: bool) -> tuple[list[Any], Any]:
    """The compiled programs of a comparison, and their arguments."""
    call = Call.measured("compare", fn, arguments, {}, None, 1.0 if backward else None)
    program = program_of(call, get_policy(POLICY))
    arrays = program.arguments.arrays
    runs = [recorded(Log(), program, dtypes) for dtypes in ("as written", "float32")]
    return [jax.jit(run).lower(*arrays).compile() for run in runs], arrays


def needed(programs: Sequence[Any]) -> float:
    """MiB beside the arguments, of programs that run one after the other."""
    memory = [compiled.memory_analysis() for compiled in programs]
    results = sum(one.output_size_in_bytes - one.alias_size_in_bytes for one in memory)
    return (max(one.temp_size_in_bytes for one in memory) + results) / MIB


def gigaflops(programs: Sequence[Any]) -> float:
    costs = [compiled.cost_analysis() for compiled in programs]
    if None in costs:
        raise RuntimeError("This backend analyzes no costs: run on CPU, with JAX_PLATFORMS=cpu.")
    return sum(one["flops"] for one in costs) / 1e9


def forward(case: Case) -> Row:
    """Memory of the forward pass."""
    arguments = case.arguments()
    float32 = needed([jax.jit(case.forward).lower(*arguments).compile()])
    ours = needed(comparison(case.forward, arguments, backward=False)[0])
    return Row("memory", f"{case.name}, forward", ours, float32, FORWARD)


def step(case: Case, times: int) -> Iterator[Row]:
    """FLOPs, memory and time with gradients."""
    arguments = case.arguments()
    float32 = [jax.jit(jax.value_and_grad(case.loss)).lower(*arguments).compile()]
    ours, arrays = comparison(case.loss, arguments, backward=True)
    yield Row("flops", case.name, gigaflops(ours), gigaflops(float32), FLOPS)
    yield Row("memory", f"{case.name}, with gradients", needed(ours), needed(float32), GRADIENTS)
    seconds = _seconds({"ours": (ours, arrays), "float32": (float32, arguments)}, times)
    yield Row("time", case.name, seconds["ours"], seconds["float32"], TIME)


def _seconds(programs: dict[str, tuple[Any, Any]], times: int) -> dict[str, float]:
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(times + 1):
        for name, (compiled, arguments) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready([one(*arguments) for one in compiled])
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def rows(small: bool = False) -> Iterator[Row]:
    """Every row, as it is measured. `small` leaves out layers."""
    layers = 2 if small else 6
    for case in (
        Case(f"ours, {layers} layers", Ours(layers, 128), 128),
        Case(
            f"Flax's under autocast, {layers} layers", models.Decoder(None, layers, width=128), 128
        ),
    ):
        yield forward(case)
        yield from step(case, times=5)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "float32"))

"""Measures each layer beside Flax's with dtype=bfloat16: those that run Flax's program, and those
that are repaired.

    python -m benchmarks.layers           # the table, both APIs: 1 minute; nothing is run
    python -m benchmarks.layers --check   # exits with 1 where a ratio misses its bound
    python -m benchmarks.layers --small   # as they are lowered, nothing is compiled: 15 seconds
    python -m benchmarks.layers --json FILE

value_and_grad of the mean square of the layer's result, by params and by a bfloat16 input, ours
under mixed_bfloat16 inside of a module that obeys it, so that no boundary casts. flops, bytes,
converts and saved are of the program as it is lowered, c-flops, c-bytes and temp of the compiled
one, as in `benchmarks.models`.

A layer that is not repaired has the same figures as Flax's. One that is repaired says in its row
what it does that Flax does not; its bound is what that was measured to cost.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp

from benchmarks.models import (
    APIS,
    BF16,
    F32,
    POLICY,
    REFERENCE,
    Program,
    compiled,
    lowered,
    saved_bytes,
)
from benchmarks.table import Row, run
from mpmodules import linen, nnx

SAME: dict[str, float] = dict.fromkeys(
    ("flops", "bytes", "converts", "saved", "c-flops", "c-bytes", "temp"), 1.0
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer in both APIs.

    Attributes:
      name: as it is printed.
      linen, nnx: makes the layer from an API and its options, a dtype or none among them.
      shape: of its input.
      repair: what ours does that Flax's does not.
      bounds: the largest ratios.
      integers: whether the input is integers, by which there is no derivative.
    """

    name: str
    linen: Callable[..., Any]
    nnx: Callable[..., Any]
    shape: tuple[int, ...]
    repair: str = ""
    bounds: dict[str, float] = dataclasses.field(default_factory=lambda: dict(SAME))
    integers: bool = False

    @property
    def x(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.int32 if self.integers else BF16)

    def program(self, api: str, *, ours: bool) -> Program:
        return (_linen if api == "linen" else _nnx)(self, ours)

    def differentiated(self, params: Any) -> tuple[Any, Any]:
        """The arguments that the derivative is taken by: the params, and the input unless it is
        integers.
        """
        return (params, None) if self.integers else (params, self.x)


def _objective(outputs: Any) -> jax.Array:
    return jnp.mean(jnp.square(jnp.asarray(outputs, F32)))


def _linen(case: Case, ours: bool) -> Program:
    api: Any = linen if ours else flax.linen
    make, options = case.linen, {} if ours else {"dtype": BF16}

    class Holder(api.Module):
        """Obeys the policy, so that the layer inside returns compute_dtype, as Flax's does."""

        @api.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return _objective(make(api, **options)(x))

    holder = Holder(dtype_policy=POLICY) if ours else Holder()
    state = dict(jax.eval_shape(holder.init, jax.random.key(0), case.x))
    params = state.pop("params", {})

    def loss(params: Any, state: Any, x: Any, _: Any) -> Any:
        given = x if case.integers else params[1]
        return holder.apply({"params": params[0], **state}, given, mutable=list(state))

    return Program(loss, (case.differentiated(params), state, case.x, None))


def _nnx(case: Case, ours: bool) -> Program:
    api: Any = nnx if ours else flax.nnx
    make, options = case.nnx, {} if ours else {"dtype": BF16}

    class Holder(api.Module):
        def __init__(self) -> None:
            self.layer = make(api, rngs=flax.nnx.Rngs(0), **options)

        def __call__(self, x: jax.Array) -> jax.Array:
            return _objective(self.layer(x))

    given: dict[str, Any] = {"dtype_policy": POLICY} if ours else {}
    holder = flax.nnx.eval_shape(lambda: Holder(**given))
    graph, params, state = flax.nnx.split(holder, flax.nnx.Param, ...)

    def loss(params: Any, state: Any, x: Any, _: Any) -> Any:
        module = flax.nnx.merge(graph, params[0], state, copy=True)
        return module(x if case.integers else params[1]), flax.nnx.state(
            module, flax.nnx.Not(flax.nnx.Param)
        )

    return Program(loss, (case.differentiated(params), state, case.x, None))


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------

BIAS = "its bias's gradient is summed in float32"
NORM = (
    "keeps its half input for backward, not float32, and computes again; sums gradients in float32"
)
EXACT = f"{NORM}; its variance from sums without rounding"
POOL = "sums windows in float32"
ATTENTION = "a float32 softmax, kept once; by hand in nnx it is in bfloat16"
CELLS = "gradients of its weights are summed over the steps in float32"
# Why ratios are above 1; each is as it was measured, rounded up, the larger one of jax 0.10.2's and
# jax 0.12's.
# - flops and converts: backward computes again what it does not keep, and widens half values to do
#   so. Normalizations cut each square into two halves and sum these apart; GroupNorm also joins the
#   sums of its parts.
# - bytes: as lowered they count each float32 value, which XLA then fuses away.
# - c-flops, c-bytes and temp: XLA for CPUs writes what a reduction reads, so the halves of the
#   squares and attention's float32 weights stand in memory. Compilers of accelerators fuse them:
#   see `benchmarks.accel.layers`.


def layer(
    name: str, shape: tuple[int, ...], linen: Any, nnx: Any, repair: str = "", **bounds: float
) -> Case:
    """A case with a bound of 1 on every quantity but those in `bounds`, where ``c_flops`` is
    "c-flops".
    """
    return Case(
        name,
        linen,
        nnx,
        shape,
        repair,
        SAME | {name.replace("_", "-"): at for name, at in bounds.items()},
    )


def _pool(api: Any, rngs: Any = None, dtype: Any = None) -> Callable[[jax.Array], jax.Array]:
    return lambda x: api.avg_pool(x, (2, 2), (2, 2))


def _max_pool(api: Any, rngs: Any = None, dtype: Any = None) -> Callable[[jax.Array], jax.Array]:
    return lambda x: api.max_pool(x, (2, 2), (2, 2))


def cases(
    rows: tuple[int, ...],
    image: tuple[int, ...],
    sequence: tuple[int, ...],
    groups: tuple[int, ...],
    steps: tuple[int, ...],
) -> list[Case]:
    """The layers, of these inputs: as many features are in as out.

    Args:
      rows: of Dense, LayerNorm, RMSNorm and BatchNorm.
      image: of Conv and pooling.
      sequence: of attention.
      groups: of GroupNorm.
      steps: of an RNN.
    """
    width, channels, last = rows[-1], image[-1], steps[-1]
    return [
        layer(
            "Dense without a bias",
            rows,
            lambda w, **o: w.Dense(width, use_bias=False, **o),
            lambda w, **o: w.Linear(width, width, use_bias=False, **o),
        ),
        layer(
            "Conv without a bias",
            image,
            lambda w, **o: w.Conv(channels, (3, 3), use_bias=False, **o),
            lambda w, **o: w.Conv(channels, channels, (3, 3), use_bias=False, **o),
        ),
        layer("max_pool", image, _max_pool, _max_pool),
        layer(
            "Dense",
            rows,
            lambda w, **o: w.Dense(width, **o),
            lambda w, **o: w.Linear(width, width, **o),
            BIAS,
            flops=1.01,
            bytes=1.09,
        ),
        layer(
            "Conv",
            image,
            lambda w, **o: w.Conv(channels, (3, 3), **o),
            lambda w, **o: w.Conv(channels, channels, (3, 3), **o),
            BIAS,
            flops=1.01,
            bytes=1.10,
            c_bytes=1.03,
        ),
        layer(
            "LayerNorm",
            rows,
            lambda w, **o: w.LayerNorm(**o),
            lambda w, **o: w.LayerNorm(width, **o),
            EXACT,
            flops=1.32,  # rounds its input once more, for backward to read the same numbers
            bytes=1.35,
            c_flops=1.24,
            c_bytes=1.11,
        ),
        layer(
            "RMSNorm",
            rows,
            lambda w, **o: w.RMSNorm(**o),
            lambda w, **o: w.RMSNorm(width, **o),
            NORM,
            flops=1.25,  # as LayerNorm
            bytes=1.25,
            converts=1.40,
            c_bytes=1.01,
        ),
        layer(
            "GroupNorm",
            groups,
            lambda w, **o: w.GroupNorm(8, **o),
            lambda w, **o: w.GroupNorm(groups[-1], 8, **o),
            EXACT,
            flops=1.41,
            bytes=1.55,
            c_flops=1.31,
            c_bytes=1.38,
            temp=1.25,
        ),
        layer(
            "BatchNorm",
            rows,
            lambda w, **o: w.BatchNorm(use_running_average=False, **o),
            lambda w, **o: w.BatchNorm(width, **o),
            EXACT,
            flops=1.26,
            bytes=1.39,
            c_flops=1.29,
            c_bytes=1.14,
        ),
        layer(
            "attention",
            sequence,
            lambda w, **o: w.MultiHeadDotProductAttention(
                4, use_bias=False, deterministic=True, **o
            ),
            lambda w, **o: w.MultiHeadAttention(4, sequence[-1], use_bias=False, decode=False, **o),
            ATTENTION,
            flops=1.01,
            bytes=1.6,
            converts=1.65,
            c_flops=1.01,
            c_bytes=1.01,
            temp=1.38,
        ),
        layer(
            "RNN of LSTM",
            steps,
            lambda w, **o: w.RNN(w.LSTMCell(last, **o)),
            lambda w, rngs, **o: w.RNN(w.LSTMCell(last, last, rngs=rngs, **o), rngs=rngs),
            CELLS,
            flops=1.01,
            c_flops=1.06,
        ),
        layer("avg_pool", image, _pool, _pool, POOL, flops=1.44, bytes=2.00, converts=3.00),
    ]


CASES = cases(
    rows=(512, 256),
    image=(4, 16, 16, 16),
    sequence=(4, 64, 256),
    groups=(32, 16, 256),
    steps=(4, 16, 64),
)


def rows(small: bool = False) -> Iterator[Row]:
    """Every row, as it is measured; all are counts."""
    for case in CASES:
        for api in APIS:
            programs = {
                name: case.program(api, ours=name == "ours") for name in ("ours", REFERENCE)
            }
            figures = {name: lowered(p) | {"saved": saved_bytes(p)} for name, p in programs.items()}
            if not small:
                figures = {name: figures[name] | compiled(programs[name]) for name in figures}
            for quantity, bound in case.bounds.items():
                if quantity in figures["ours"]:
                    ours, hand = (figures[name][quantity] for name in ("ours", REFERENCE))
                    yield Row(quantity, f"{case.name}, {api}", ours, hand, bound, note=case.repair)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, REFERENCE))

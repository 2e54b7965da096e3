"""Costs of an AdamW step on a TPU, beside plain optax, `optax.apply_if_finite`, jmp's pipeline and
mpx's.

    python -m benchmarks.accel.optimizer          # the table: a minute on two cores, nothing is run
    python -m benchmarks.accel.optimizer --check  # exits with 1 where a ratio misses its bound
    python -m benchmarks.accel.optimizer --small  # three rows
    python -m benchmarks.accel.optimizer --json FILE

Four leaves of 4096 x 1024, params and state donated, gradients scaled; the pipelines are
`benchmarks.optimizer`'s. Plain optax is float32 params, moments and updates of bfloat16 gradients,
without skipping.

cycles  the compiler's estimate; of a conditional the costlier branch.
bytes   its count of bytes accessed, on-chip memory too, an element. It only reports.
temp    the peak of temporary memory, in bytes an element too.
device  arguments in the device's memory: params, gradients and the state, in bytes an element.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.accel.targets import Target  # first: it sets what JAX reads when it is imported

# isort: split
import jax

from benchmarks.accel.program import Figures, measure, placed
from benchmarks.optimizer import (
    LEAVES,
    ON_HOST,
    PLAIN,
    SAME_AS_PEERS,
    SMALLEST,
    Pipeline,
    pipelines,
)
from benchmarks.table import Row, run
from policy.optim.host_memory import with_memory_kind

TARGET = "v5e:1x1"
SHAPE = (4096, 1024)
ELEMENTS = LEAVES * SHAPE[0] * SHAPE[1]

# The largest ratios of cycles to plain optax's.
BOUNDS = {
    "f32 / bf16, no skipping": 1.01,
    SAME_AS_PEERS: 1.25,
    "f32 / bf16, clipped": 1.37,
    "f32 / bf16, tx.update + apply_updates": 1.5,
    "full masters, bf16 / bf16": 1.35,
    "full masters, bf16 / bf16, no skipping": 1.11,
    "full masters, tx.update": 1.5,
    "remainder, bf16 / bf16": 1.1,  # a kernel for each param writes its halves and its moments
    SMALLEST: 3.2,
    "stochastic": 1.2,
    "int8 moments, f32 / bf16": 2.85,
}
# Bytes of temporary memory an element; scales of 8-bit moments are moved in layouts with padding.
LARGEST_TEMPORARY, LARGEST_OF_CODES = 0.25, 0.4
# The largest ratios of arguments to plain optax's.
ON_DEVICE = {SMALLEST: 0.58, ON_HOST: 0.29}
SMALL = (PLAIN, SAME_AS_PEERS, "remainder, bf16 / bf16")


def figures(pipeline: Pipeline, target: Target) -> Figures:
    """Measures one step. Raises ImportError where a peer is not installed."""
    init, step = pipeline.make()
    params = {f"layer_{i}": jax.ShapeDtypeStruct(SHAPE, pipeline.params) for i in range(LEAVES)}
    gradients = {name: jax.ShapeDtypeStruct(SHAPE, pipeline.gradients) for name in params}
    state = jax.eval_shape(init, params)
    params, state, gradients = placed(target, (params, state, gradients))
    if pipeline.name == ON_HOST:
        place = lambda x: with_memory_kind(x.sharding, "pinned_host", x)  # noqa: E731
        state = jax.tree.map(lambda x: x.update(sharding=place(x)), state)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    arguments = params, state, gradients
    return measure(target, step, arguments, donated=(0, 1), out_shardings=shardings)


def rows(small: bool = False) -> Iterator[Row]:
    """Yields every row, as it is measured, plain optax first."""
    target, plain = Target(TARGET), None
    for pipeline in pipelines():
        if small and pipeline.name not in SMALL:
            continue
        try:
            found = figures(pipeline, target)
        except ImportError as error:
            print(f"{pipeline.name}: not measured, {error}", file=sys.stderr)
            continue
        plain = found if plain is None else plain
        name, bound = f"{pipeline.name}, {TARGET}", BOUNDS.get(pipeline.name)
        yield Row("cycles", name, found.cycles, plain.cycles, bound)
        on_device = found.arguments / ELEMENTS, plain.arguments / ELEMENTS
        yield Row("device", name, *on_device, ON_DEVICE.get(pipeline.name))
        yield Row("bytes", name, found.bytes / ELEMENTS, plain.bytes / ELEMENTS)
        if bound is not None:
            note = "bytes an element, against its budget"
            has_codes = any(f"{bits} moments" in name for bits in (8, 4))
            largest = LARGEST_OF_CODES if has_codes else LARGEST_TEMPORARY
            yield Row("temp", name, found.temporary / ELEMENTS, largest, 1.0, note=note)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "optax"))

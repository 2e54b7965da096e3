"""Models under mixed_bfloat16 as TPUs and GPUs get them, beside the same by hand in Flax and under
autocast.

    python -m benchmarks.accel.models          # v5e, v6e and H100: 40 minutes on two idle cores
    python -m benchmarks.accel.models --check  # exits with 1 where a ratio misses its bound
    python -m benchmarks.accel.models --on v5e --only ResNet  # one chip's rows, and one model's
    python -m benchmarks.accel.models --small  # one small model in linen: half a minute

value_and_grad of the loss, compiled and not run, of the models of `benchmarks.models` in both
APIs. On a TPU the batch is sharded over a topology of 2x2 chips and everything else is on each; on
a GPU it is one device's.

cycles      the compiler's estimate of a chip's, exchanges left out; a GPU's compiler gives none.
seconds     of these cycles, and of the exchanges at the published bandwidth of the links.
bytes       moved to and from a chip's memory.
temporary   bytes of memory at their peak beside arguments and results.
kernels     that run.
exchange    bytes that collectives leave on a chip, with their operations and dtypes.
/autocast   cycles beside autocast of the model without a dtype, of the same API.
autocast,   cycles, or a GPU's bytes, of autocast and of float32 beside by hand.
float32
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import models
from benchmarks.accel.program import Figures, measure, placed
from benchmarks.accel.report import alike, amount, rows_of, unknown
from benchmarks.accel.targets import Target, chosen
from benchmarks.models import POLICY, REFERENCE, Case, Program
from benchmarks.table import Row, run
from policy.autocasting.transform import autocast

TARGETS = ("v5e:2x2", "v6e:2x2", "h100")
OTHERS = ("v5p:2x2x1", "tpu7x:2x2x1", "a100", "b200")
TPU: dict[str, float | None] = {"cycles": 1.00, "/autocast": 1.02, "bytes": 1.02, "temporary": 1.05}
GPU: dict[str, float | None] = {"bytes": 1.02, "temporary": 1.05}
# XLA for TPUs gives a table of pointers, of the 32 bytes that say where a kernel's results or an
# exchange's are, 16 KiB of memory, and `memory_analysis` counts those twice. Where the chip's own
# memory holds all arrays (the MLP on v6e), temporary memory is 14 of them: one more, of the
# exchange of the biases' float32 gradients, is no array.
TABLE_OF_POINTERS = 2 * 2**14
# Exact variances take three sums in a convolution's kernel, where Flax takes two. On v6e, where
# most activations of a ResNet stay in the chip's own memory, that is half a cycle to one for each
# 1024 numbers: 85 thousand of 14.9 million, and 24 in the kernels that join parts; backward takes
# 45 less than by hand.
# Of the nnx decoder's attention forward, whose softmax is float32 by hand as well, XLA makes two
# kernels a block for v6e, the second of which reads the float32 logits that the first has written,
# and one by hand: 2,090 thousand cycles beside 705. Backward takes 1.5 million less than by hand's,
# of 18.5 million in all.
DEARER: dict[tuple[str, str], dict[str, float | None]] = {
    ("ResNet, linen", "v6e"): {"cycles": 1.007},
    ("decoder, 2 layers, nnx", "v6e"): {"cycles": 1.008},
}


def _shape(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _case(name: str, model: str, x: Any, y: Any, **options: Any) -> Case:
    return Case(name, model, x, y, tuple(options.items()))


def cases(chips: int) -> list[Case]:
    """Returns every model, its batch for so many chips."""
    images = _shape(jnp.float32, 64 * chips, 224, 224, 3)
    classes = _shape(jnp.int32, 64 * chips)
    ahead, whole = _shape(jnp.int32, 8 * chips, 1024), _shape(jnp.int32, 16 * chips, 512)
    transformer = {"layers": 2, "width": 1024, "heads": 16, "vocabulary": 8192}
    return [
        _case("ResNet", "ResNet", images, classes, filters=64, stages=(1, 1, 1, 1)),
        _case("ViT-S, 2 layers", "VisionTransformer", images, classes, layers=2),
        _case("decoder, 2 layers", "Transformer", ahead, ahead, **transformer, length=1024),
        _case(
            "encoder, 2 layers",
            "Transformer",
            whole,
            whole,
            **transformer,
            length=512,
            causal=False,
        ),
        _case("MLP", "Mlp", _shape(jnp.float32, 2048 * chips, 1024), None),
    ]


def small_cases(chips: int) -> list[Case]:
    """Returns the models that compile in seconds, for so many chips."""
    return [
        _case(
            "small MLP", "Mlp", _shape(jnp.float32, 2048 * chips, 1024), None, width=1024, layers=3
        )
    ]


def programs(case: Case, api: str, small: bool) -> dict[str, Program]:
    """Returns a model's programs by name: ours, by hand, autocast and float32."""
    found = case.programs(api)
    transformed = functools.partial(autocast, policy=POLICY, params=0)
    found["autocast"] = models.dtype_free(case, transformed, api)
    if api == "linen" and not small:
        found["float32"] = models.dtype_free(case, api=api)
    return found


def arguments(target: Target, program: Program) -> tuple[Any, ...]:
    """Places a program's arguments on the target: input and labels sharded over its chips, the rest
    replicated.
    """
    if len(target.devices) == 1:
        return tuple(placed(target, argument) for argument in program.arguments)
    mesh = target.mesh()
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))

    def over(sharding: NamedSharding, tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    params, state, x, y = program.arguments
    return over(whole, params), over(whole, state), over(split, x), over(split, y)


def figures(target: Target, program: Program) -> Figures:
    return measure(target, program.step, arguments(target, program))


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of models' names.
    """
    targets = chosen(on, ("v5e:2x2", "h100") if small else TARGETS, OTHERS)
    for target in targets:
        chips = len(target.devices)
        for case in small_cases(chips) if small else cases(chips):
            if not only or any(part in case.name for part in only):
                for api in models.APIS[:1] if small else models.APIS:
                    yield from _model(target, case, api, small)


def _model(target: Target, case: Case, api: str, small: bool) -> Iterator[Row]:
    name = f"{case.name}, {api}"
    built = programs(case, api, small)
    ours, hand = (figures(target, built.pop(key)) for key in ("ours", REFERENCE))
    bounds = _bounds(target, hand) | DEARER.get((name, target.kind), {})
    yield from rows_of(name, target, ours, hand, bounds)
    beside = functools.partial(_beside, name, target, "cycles" if target.chip.clock else "bytes")
    for key, program in built.items():
        measured = figures(target, program)
        if key == "autocast":
            yield beside("/autocast", ours, measured, bounds.get("/autocast"))
        yield beside(key, measured, hand, None)


def _bounds(target: Target, hand: Figures) -> dict[str, float | None]:
    """Returns the bounds beside a program by hand; of temporary memory that is small, one that
    allows a table more.
    """
    if not target.chip.clock:
        return GPU
    with_a_table = 1 + TABLE_OF_POINTERS / hand.temporary if hand.temporary else 0.0
    return TPU | {"temporary": max(TPU["temporary"] or 0.0, with_a_table)}


def _beside(
    name: str,
    target: Target,
    quantity: str,
    called: str,
    ours: Figures,
    reference: Figures,
    bound: float | None,
) -> Row:
    first, second = (amount(target, figure, quantity) for figure in alike(ours, reference))
    left_out = unknown(quantity, ours, reference)
    return Row(called, name, first, second, bound, target=target.name, unknown=left_out)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, REFERENCE))

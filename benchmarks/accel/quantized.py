"""Frozen weights in 8 and 4 bits on a v5e: a decode step, and adapters of 8 billion parameters.

    python -m benchmarks.accel.quantized                  # v5e: 3 minutes on an idle core
    python -m benchmarks.accel.quantized --check          # exits with 1 where a bound is missed
    python -m benchmarks.accel.quantized --only adapters  # parts of rows' names
    python -m benchmarks.accel.quantized --small          # narrow layers: a minute

A decode step is four blocks of Llama 3's 8 billion parameters for one token of one text, without
its cache of keys and values; beside it, the same in bfloat16. XLA computes the one row of bfloat16
on the vector unit; the row "bfloat16, 8 texts" is its program where the matrix unit does.

The train step is the whole decoder (`benchmarks.accel.scale_model`), layers scanned and
rematerialized, one text of 2048 tokens: every kernel and the table of embeddings in nf4, adapters
of rank 16 in float32 beside every kernel, AdamW.

memory      bytes of a chip that arguments, temporaries and new results take, beside those that it
            has; the note has the seconds of a step by the compiler's cycles
stored      bytes of the program's frozen arguments, beside .53125 of a byte for each number
cycles      the compiler's estimate
bytes       moved to and from the chip's memory, by shapes; memory on the chip is free
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.accel.targets import Target, chosen  # first: it sets what JAX reads

# isort: split
import jax
import jax.numpy as jnp
import optax

import policy
from benchmarks.accel.program import Figures, measure, placed
from benchmarks.accel.report import rows_of
from benchmarks.accel.scale_model import Size, block_of, cross_entropy, decoder_of
from benchmarks.table import Row, run
from mpmodules import linen, use_policy
from policy.core.scope import traced_for
from policy.quantized import QuantizedArray, merge_frozen, quantize_params, split_frozen

RANK, LENGTH, BLOCKS = 16, 2048, 4
SMALL = Size(
    layers=2, width=1024, heads=8, key_heads=4, mlp_width=2048, vocabulary=4096, length=256
)
EIGHT, FOUR = {"cycles": 0.65, "bytes": 0.65}, {"cycles": 0.45, "bytes": 0.45}
FORMATS = {
    **dict.fromkeys(("int8", "int8:32", "float8"), EIGHT),
    **dict.fromkeys(("int4:32", "nf4"), FOUR),
}
BYTES = 0.5 + 2 / 64  # of a code in nf4 and its part of a scale
BFLOAT16 = "params=bfloat16,compute=bfloat16,output=bfloat16"


class Stack(linen.Module):
    """Blocks of the decoder, one after the other: (B, T, width) in and out."""

    size: Size

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        nn: Any = linen  # a module, which hashes
        for i in range(self.size.layers):
            x, _ = block_of(nn)(self.size, name=f"block_{i}")(x, None)
        return x


class Adapted(linen.Module):
    """A matmul layer with an adapter beside it."""

    features: Any
    axis: Any = -1
    use_bias: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(features: Any, axis: Any, name: str, **options: Any) -> Any:
            return linen.DenseGeneral(features, axis, use_bias=False, name=name, **options)

        y = layer(self.features, self.axis, "base")(x)
        down = layer(RANK, self.axis, "lora_a")(x)
        zeros = linen.initializers.zeros
        return y + layer(self.features, -1, "lora_b", kernel_init=zeros)(down)


class _WithAdapters:
    """The names of linen, with an adapter in every matmul layer."""

    Dense = DenseGeneral = Adapted

    def __getattr__(self, name: str) -> Any:
        return getattr(linen, name)


WITH_ADAPTERS = _WithAdapters()


def decode_step(target: Target, stored: str | None, size: Size, batch: int = 1) -> Figures:
    """Returns the figures of a decode step; `stored` is the format of the weights, None of
    bfloat16.
    """
    model, x = Stack(size), jax.ShapeDtypeStruct((batch, 1, size.width), jnp.bfloat16)
    with use_policy(BFLOAT16), traced_for(target.devices[0]):
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        if stored is not None:
            params = quantize_params(params, f"params={stored},compute=bfloat16")
        figures = measure(target, model.apply, placed(target, (params, x)))
    return dataclasses.replace(figures, bytes=figures.moved)


def adapters(target: Target, size: Size) -> tuple[Figures, float, int]:
    """Returns the figures of a train step of adapters, the bytes of the frozen arguments in nf4,
    and the numbers that they stand for.
    """
    held = "params=nf4,compute=bfloat16,output=bfloat16"
    model = decoder_of(WITH_ADAPTERS)(size)
    tx = policy.mixed_precision(optax.adamw(1e-4), held)
    tokens = jax.ShapeDtypeStruct((1, size.length), jnp.int32)

    def step(trained: Any, state: Any, frozen: Any, tokens: jax.Array) -> Any:
        def loss_fn(trained: Any) -> jax.Array:
            params = merge_frozen(trained, frozen)
            return cross_entropy(model.apply({"params": params}, tokens), tokens)

        loss, grads = policy.value_and_grad(loss_fn)(trained)
        trained, state, _ = policy.apply_gradients(tx, trained, state, grads)
        return trained, state, loss

    with traced_for(target.devices[0]):
        with use_policy("mixed_bfloat16"):
            made = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        params = quantize_params(made, held)
        trained, frozen = split_frozen(params, lambda path: "lora_" in path)
        arguments = trained, jax.eval_shape(tx.init, trained), frozen, tokens
        with use_policy(held):
            figures = measure(target, step, placed(target, arguments), donated=(0, 1))
    whole = jax.tree.leaves(frozen, is_leaf=lambda x: isinstance(x, QuantizedArray))
    codes = [x for x in whole if isinstance(x, QuantizedArray)]
    return figures, sum(x.nbytes for x in codes), sum(x.size for x in codes)


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of rows' names.
    """
    blocks, whole = Size(layers=BLOCKS, length=LENGTH), Size(length=LENGTH)
    if small:
        blocks = whole = SMALL
    for target in chosen(on, ("v5e:1x1",)):
        names = [f"decode step, {name}" for name in FORMATS]
        wanted = [name for name in names if not only or any(part in name for part in only)]
        if wanted:
            yield from decode_rows(target, wanted, blocks, small)
        if not only or any(part in "adapters" for part in only):
            yield from adapter_rows(target, whole)


def decode_rows(
    target: Target, names: Sequence[str], size: Size, small: bool = False
) -> Iterator[Row]:
    """Yields the rows of decode steps; small ones have no bounds."""
    reference = decode_step(target, None, size)
    eight = decode_step(target, None, size, batch=8)
    yield from rows_of("decode step, bfloat16, 8 texts", target, eight, reference)
    for name in names:
        stored = name.rpartition(", ")[2]
        ours = decode_step(target, stored, size)
        yield from rows_of(name, target, ours, reference, {} if small else FORMATS[stored])


def adapter_rows(target: Target, size: Size) -> Iterator[Row]:
    """Yields the rows of the train step of adapters."""
    figures, stored, numbers = adapters(target, size)
    seconds = figures.compute_seconds or 0.0
    note = f"{numbers / 1e9:.2f} billion numbers in nf4, {seconds:.2f} s a step"
    yield Row(
        "memory",
        "adapters",
        figures.memory,
        target.chip.memory,
        1.0,
        note=note,
        target=target.name,
    )
    wanted = numbers * BYTES
    yield Row("stored", "adapters", stored, wanted, 1.0, 1.0, target=target.name)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "reference"))

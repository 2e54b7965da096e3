"""What is measured on a device: optimizer steps, attention, models. Each function yields lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import gpu_models, optimizer
from benchmarks.gpu_models import Model, Setting
from benchmarks.gpu_timing import Stepper, Timing, interleaved, spread
from benchmarks.table import Row
from mpmodules import linen as our_linen


@dataclasses.dataclass(frozen=True)
class Line(Row):
    """A row of figures with a unit, of which more is better except of seconds and bytes.

    Attributes:
      spread: half of the range of the ratios of neighboring rounds; None where nothing was timed.
    """

    spread: float | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is, and how long it runs."""

    copied: int = 2**28  # float32 numbers: 1 GiB
    stepped: int = 2**28  # params of an optimizer step
    attention: tuple[int, int, int, int] = (8, 2048, 12, 64)  # batch, length, heads, width
    sample_seconds: float = 0.2
    rounds: int = 7

    @classmethod
    def of(cls, memory: float, *, tiny: bool) -> Sizes:
        """For a device of so many bytes; the smallest, for a CPU, where `tiny`."""
        if tiny:
            return cls(2**10, 2**10, (1, 16, 2, 8), 1e-3, 3)
        return cls() if memory > 20e9 else cls(copied=2**27, stepped=2**26)


def _timed(programs: dict[str, Callable[[int], float]], sizes: Sizes) -> dict[str, Timing]:
    return interleaved(programs, sample_seconds=sizes.sample_seconds, rounds=sizes.rounds)


def _random(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    block = np.random.default_rng(seed).standard_normal(2**20, np.float32)
    return jnp.asarray(np.resize(block, shape), dtype)


# --------------------------------------------------------------------------------------------------
# The optimizer's step
# --------------------------------------------------------------------------------------------------


def copier(sizes: Sizes) -> Stepper:
    """Adds one to float32 numbers in place: reads and writes each once."""
    return Stepper.of(lambda x: (x + 1, jnp.zeros(())), jnp.zeros(sizes.copied, jnp.float32))


def optimizer_stepper(row: optimizer.Pipeline, sizes: Sizes) -> tuple[Stepper, int]:
    """An AdamW step of four leaves, and the bytes that it must move: gradients read, the rest read
    and written.
    """
    init, step = row.make()
    shape = (sizes.stepped // optimizer.LEAVES,)
    params = {f"layer_{i}": _random(i, shape, row.params) for i in range(optimizer.LEAVES)}
    gradients = {
        name: _random(9, shape, row.gradients) * jnp.asarray(1e-2, row.gradients) for name in params
    }
    carry = params, jax.jit(init)(params)
    moved = 2 * _bytes(carry) + _bytes(gradients)

    def one(carry: Any, gradients: Any) -> tuple[Any, jax.Array]:
        params, state = carry
        return step(params, state, gradients), jnp.zeros(())

    return Stepper.of(one, carry, gradients), moved


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def optimizer_step(name: str, sizes: Sizes, beside: str | None = None) -> Iterator[Line]:
    """GB/s of a step of `benchmarks.optimizer`, beside a copy, and of the same bytes beside another
    row's step.

    As many bytes are counted as the step must move at least, so that a step that moves more is
    slower by this figure.
    """
    table = {row.name: row for row in optimizer.pipelines()}
    step, moved = optimizer_stepper(table[name], sizes)
    programs: dict[str, Callable[[int], float]] = {"ours": step, "copy": copier(sizes)}
    if beside:
        programs["beside"] = optimizer_stepper(table[beside], sizes)[0]
    found = _timed(programs, sizes)
    rates = {which: moved / timing.median / 1e9 for which, timing in found.items()}
    copied = 8 * sizes.copied / found["copy"].median / 1e9
    apart = spread(found["ours"], found["copy"])
    yield Line("GB/s", f"AdamW, {name}, beside a copy", rates["ours"], copied, spread=apart)
    if beside:
        apart = spread(found["ours"], found["beside"])
        peer = "jmp" if beside.startswith("jmp") else "optax"
        yield Line(
            "GB/s", f"AdamW, {name}, beside {peer}", rates["ours"], rates["beside"], spread=apart
        )


# --------------------------------------------------------------------------------------------------
# Attention
# --------------------------------------------------------------------------------------------------


def attention_stepper(nn: Any, setting: Setting, sizes: Sizes, **options: Any) -> Stepper:
    """Causal attention, forward and backward."""
    size, length, heads, width = sizes.attention
    q, k, v = (_random(seed, (size, length, heads, width), setting.dtype) for seed in range(3))
    mask = jnp.tril(jnp.ones((1, 1, length, length), bool))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = nn.dot_product_attention(q, k, v, mask=mask, deterministic=True, **options)
        return jnp.square(out.astype(jnp.float32)).mean()

    def step(carry: Any, k: jax.Array, v: jax.Array) -> tuple[Any, Any]:
        return carry, jax.grad(loss, (0, 1, 2))(carry, k, v)

    return Stepper.of(step, q, k, v)


def attention(setting: Setting, sizes: Sizes) -> Iterator[Line]:
    """Calls a second, forward and backward, beside Flax with a float32 softmax; and planned memory;
    and kernels.
    """
    ours = attention_stepper(our_linen, setting, sizes)
    hand = attention_stepper(flax.linen, setting, sizes, force_fp32_for_softmax=True)
    found = _timed({"ours": ours, "hand": hand}, sizes)
    name = f"attention, {sizes.attention[1]} tokens, {setting.name}, by hand"
    yield Line(
        "calls/s",
        name,
        1 / found["ours"].median,
        1 / found["hand"].median,
        spread=spread(found["ours"], found["hand"]),
        note=f"{ours.kernel}, {hand.kernel}",
    )
    yield Line("MiB", name, ours.planned_bytes / 2**20, hand.planned_bytes / 2**20)


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------


def model(model: Model, setting: Setting, sizes: Sizes) -> Iterator[Line]:
    """Tokens or images a second of a train step beside the hand-threaded one; memory; compile
    time.
    """
    ours = gpu_models.stepper(model, setting, gpu_models.ours)
    hand = gpu_models.stepper(model, setting, gpu_models.by_hand)
    found = _timed({"ours": ours, "hand": hand}, sizes)
    rates = {which: model.count / timing.median for which, timing in found.items()}
    kernels = f"attention: {ours.kernel}, {hand.kernel}" if model.name != "ResNet-50" else ""
    name = f"{model.name}, {setting.name}, by hand"
    yield Line(
        model.units,
        name,
        rates["ours"],
        rates["hand"],
        spread=spread(found["ours"], found["hand"]),
        note=kernels,
    )
    yield Line("MiB", name, ours.planned_bytes / 2**20, hand.planned_bytes / 2**20)
    yield Line("compile s", name, ours.compile_seconds, hand.compile_seconds)

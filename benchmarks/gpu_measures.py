"""What is measured on a device, each a small function that yields lines: matmuls, copies, steps,
attention, models.
"""

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
from benchmarks.gpu_peaks import Peak
from benchmarks.gpu_timing import Stepper, Timing, interleaved, spread
from benchmarks.table import Row
from mpmodules import linen as our_linen

UNKNOWN = float("nan")


@dataclasses.dataclass(frozen=True)
class Line(Row):
    """A row of figures with a unit, of which more is better except of seconds and bytes.

    Attributes:
      spread: half of the range of the ratios of neighboring rounds; None where nothing was timed.
      share: of the device's peak, by its data sheet: ours; None where that is unknown.
    """

    spread: float | None = None
    share: float | None = None

    def as_json(self) -> dict[str, object]:
        found = super().as_json()
        return {
            key: None if value != value else value for key, value in found.items()
        }  # JSON has no NaN


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is, and how long it runs."""

    matmul: int = 8192
    copied: int = 2**28  # float32 numbers: 1 GiB
    stepped: int = 2**28  # params of an optimizer step
    attention: tuple[int, int, int, int] = (8, 2048, 12, 64)  # batch, length, heads, width
    sample_seconds: float = 0.2
    rounds: int = 7

    @classmethod
    def of(cls, memory: float, *, tiny: bool) -> Sizes:
        """For a device of so many bytes; the smallest, for a CPU, where `tiny`."""
        if tiny:
            return cls(64, 2**10, 2**10, (1, 16, 2, 8), 1e-3, 3)
        return cls() if memory > 20e9 else cls(copied=2**27, stepped=2**26)


def _timed(programs: dict[str, Callable[[int], float]], sizes: Sizes) -> dict[str, Timing]:
    return interleaved(programs, sample_seconds=sizes.sample_seconds, rounds=sizes.rounds)


def _random(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    block = np.random.default_rng(seed).standard_normal(2**20, np.float32)
    return jnp.asarray(np.resize(block, shape), dtype)


# --------------------------------------------------------------------------------------------------
# The device
# --------------------------------------------------------------------------------------------------


def matmul(setting: Setting, sizes: Sizes, peak: Peak | None) -> Iterator[Line]:
    """TFLOP/s of one large square matmul of random numbers, beside the data sheet's."""
    n, dtype = sizes.matmul, setting.dtype or jnp.float32
    a, b = (_random(seed, (n, n), dtype) for seed in (0, 1))

    with jax.default_matmul_precision(setting.precision):
        program = Stepper.of(_product, a, b)
    seconds = _timed({"ours": program}, sizes)["ours"].median
    rate = 2 * n**3 / seconds / 1e12
    promised = peak.of(setting.name) if peak else None
    share = rate / promised if promised else None
    yield Line(
        "TFLOP/s",
        f"matmul {n}x{n}, {setting.name}, beside its peak",
        rate,
        promised or UNKNOWN,
        share=share,
    )


def _product(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return a, a @ b


def copier(sizes: Sizes) -> Stepper:
    """Adds one to float32 numbers in place: reads and writes each once."""
    return Stepper.of(lambda x: (x + 1, jnp.zeros(())), jnp.zeros(sizes.copied, jnp.float32))


def copy(sizes: Sizes, peak: Peak | None) -> Iterator[Line]:
    """GB/s of a copy, read and written, beside the data sheet's bandwidth."""
    rate = 8 * sizes.copied / _timed({"copy": copier(sizes)}, sizes)["copy"].median / 1e9
    promised = peak.bandwidth if peak else None
    share = rate / promised if promised else None
    yield Line(
        "GB/s", "copy of float32 numbers, beside its peak", rate, promised or UNKNOWN, share=share
    )


# --------------------------------------------------------------------------------------------------
# The optimizer's step
# --------------------------------------------------------------------------------------------------


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


def model(model: Model, setting: Setting, sizes: Sizes, peak: Peak | None) -> Iterator[Line]:
    """Tokens or images a second of a train step beside the hand-threaded one; memory, compile time,
    share of the peak.

    The share counts three times the FLOPs of a forward pass, as is usual (Chowdhery et al. 2022,
    appendix B).
    """
    ours = gpu_models.stepper(model, setting, gpu_models.ours)
    hand = gpu_models.stepper(model, setting, gpu_models.by_hand)
    found = _timed({"ours": ours, "hand": hand}, sizes)
    rates = {which: model.count / timing.median for which, timing in found.items()}
    promised = peak.of(setting.name) if peak else None
    flops = 3 * gpu_models.forward_flops(model) / found["ours"].median
    kernels = f"attention: {ours.kernel}, {hand.kernel}" if model.name != "ResNet-50" else ""
    name = f"{model.name}, {setting.name}, by hand"
    yield Line(
        model.units,
        name,
        rates["ours"],
        rates["hand"],
        spread=spread(found["ours"], found["hand"]),
        share=flops / promised / 1e12 if promised else None,
        note=kernels,
    )
    yield Line("MiB", name, ours.planned_bytes / 2**20, hand.planned_bytes / 2**20)
    yield Line("compile s", name, ours.compile_seconds, hand.compile_seconds)

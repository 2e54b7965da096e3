"""The language model of the examples, trained from the same seeds under each policy."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence

import jax

from benchmarks.eight_bits.control import without_scales
from benchmarks.eight_bits.report import Table
from policy import get_policy, use_policy

SEEDS = (0, 1, 2)
WITHIN = 0.02  # nats a character that 8 bits may differ by from bfloat16, of each seed
WORSE = 0.5  # nats a character that the control has to be worse by, of each seed


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
      name: as the table shows it.
      policy: its text.
      seeds: how many of `SEEDS` it trains from.
      is_control: trains without scales.
      quick: runs in the quick run too.
    """

    name: str
    policy: str
    seeds: int = len(SEEDS)
    is_control: bool = False
    quick: bool = True


REFERENCE = Variant("mixed_bfloat16", "mixed_bfloat16")
VARIANTS = (
    REFERENCE,
    Variant("mixed_float8", "mixed_float8", quick=False),
    Variant("mixed_int8", "mixed_int8"),
    Variant("mixed_float8 without scales", "mixed_float8", seeds=1, is_control=True, quick=False),
    Variant("mixed_int8 without scales", "mixed_int8", seeds=1, is_control=True),
)
HELD_OUT = 100_000  # characters
SIZES = {"steps": 200, "batch_size": 16}  # a quarter of the example's tokens
SMALL = {
    "width": 32,
    "layers": 1,
    "heads": 2,
    "mlp_width": 64,
    "length": 32,
    "batch_size": 32,
    "steps": 150,
    "learning_rate": 1e-2,
}


def held_out_losses(
    variant: Variant, seeds: Sequence[int], sizes: Mapping[str, float]
) -> list[float]:
    """Trains a model from each seed, and returns the losses of the held-out text, in nats a
    character. Seeds have the same parameters and batches under each policy.

    Args:
      variant: how to train.
      seeds: of the parameters and of the batches.
      sizes: fields of the example's `Config`; others are the example's own.
    """
    from examples import language_model as job

    text = job.Text.split(job.load_text())
    text = dataclasses.replace(text, held_out=text.held_out[:HELD_OUT])
    config = dataclasses.replace(job.Config(), vocab_size=text.vocab_size, **sizes)
    policy = get_policy(variant.policy)
    losses = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_policy(policy))
        if variant.is_control:
            stack.enter_context(without_scales())
        programs = job.programs(policy, config)
        for seed in seeds:
            of_seed = dataclasses.replace(config, seed=seed)
            losses.append(job.train(variant.name, programs, text, of_seed)[0].held_out)
    jax.clear_caches()
    return losses


def _beside_reference(losses: Mapping[Variant, Sequence[float]], variant: Variant) -> list[float]:
    """Returns a variant's losses less those of the reference, seed by seed."""
    return [ours - theirs for ours, theirs in zip(losses[variant], losses[REFERENCE], strict=False)]


def missed(losses: Mapping[Variant, Sequence[float]]) -> tuple[str, ...]:
    """Returns what should hold of each seed and does not, a line each."""
    found = []
    for variant in losses:
        for seed, off in enumerate(_beside_reference(losses, variant)):
            what = f"{variant.name}, seed {seed}: {off:+.4f} nats"
            if variant.is_control and not off > WORSE:
                found.append(f"{what}, not worse than mixed_bfloat16 by {WORSE}")
            if not variant.is_control and not abs(off) <= WITHIN:
                found.append(f"{what}, not within {WITHIN} of mixed_bfloat16")
    return tuple(found)


def tabulated(losses: Mapping[Variant, Sequence[float]]) -> Table:
    """Returns the table: a row for each variant, a column for each seed."""
    count, rows = len(losses[REFERENCE]), []
    for variant, own in losses.items():
        cells = [f"{loss:.4f}" for loss in own]
        off = max(_beside_reference(losses, variant), key=abs)
        worst = "" if variant == REFERENCE else f"{off:+.4f}"
        rows.append((variant.name, *cells, *[""] * (count - len(cells)), worst))
    seeds = tuple(f"seed {seed}" for seed in SEEDS[:count])
    header = ("held-out nats a character", *seeds, "largest difference")
    return Table(header, tuple(rows), missed(losses))


def table(quick: bool = False, sizes: Mapping[str, float] = SIZES) -> Table:
    """Trains under every policy; the quick run has a small model, one seed and fewer policies.

    Args:
      sizes: fields of the example's `Config` of a run that is not quick.
    """
    most, sizes = (1, SMALL) if quick else (len(SEEDS), sizes)
    losses = {}
    for variant in VARIANTS:
        if variant.quick or not quick:
            losses[variant] = held_out_losses(variant, SEEDS[: min(variant.seeds, most)], sizes)
            print(f"{variant.name}: {losses[variant]}", file=sys.stderr, flush=True)
    return tabulated(losses)

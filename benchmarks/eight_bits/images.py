"""The ResNets of the examples: their convolutions stay in bfloat16, and their head is in 8 bits."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import policy as mp
from benchmarks.eight_bits.report import Table

SEEDS = (0, 1, 2)
REFERENCE = "mixed_bfloat16"
POLICIES = (REFERENCE, "mixed_float8", "mixed_int8")
POINTS = 0.01  # by which the mean accuracy of 8 bits may be below bfloat16's


@dataclasses.dataclass(frozen=True)
class Run:
    """The accuracy on held-out images, and the loss at the end of training."""

    accuracy: float
    loss: float


def digits(policy: str, seed: int, wing: str = "linen", epochs: int | None = None) -> Run:
    """Trains the example's ResNet on handwritten digits."""
    from examples import train_digits as job

    config, data = job.Config(seed=seed), job.load()
    if epochs is not None:
        config = dataclasses.replace(config, epochs=epochs)
    train: Any = {"linen": job.train_linen, "nnx": job.train_nnx}[wing]
    with tqdm(desc=f"digits, {wing}, {policy}, seed {seed}", file=sys.stderr) as bar:
        result = train(mp.get_policy(policy), mp.PolicyRules([]), data, config, bar)
    return Run(result.accuracy, float(np.mean(result.losses[-10:])))


def fashion(policy: str, seed: int, folder: Path | None = None, epochs: int | None = None) -> Run:
    """Trains the example's ResNet on Fashion-MNIST, or on its stand-in where that is not there."""
    from examples import resnet_fashion_mnist as job

    data = job.load(folder)
    config = job.Config(epochs=epochs or data.epochs)
    with tqdm(desc=f"{data.name}, {policy}, seed {seed}", file=sys.stderr) as bar:
        result = job.train(policy, mp.PolicyRules([]), data, config, seed, bar)
    return Run(result.accuracy, result.final_loss)


def tabulated(runs: Mapping[str, Mapping[str, Sequence[Run]]]) -> Table:
    """Returns the table of runs by model and policy, one a seed."""
    rows, missed = [], []
    for model, of_model in runs.items():
        reference = float(np.mean([run.accuracy for run in of_model[REFERENCE]]))
        for policy, found in of_model.items():
            mean = float(np.mean([run.accuracy for run in found]))
            rows.append(
                (
                    model,
                    policy,
                    ", ".join(f"{run.accuracy:.2%}" for run in found),
                    f"{mean:.2%}",
                    f"{np.mean([run.loss for run in found]):.4f}",
                )
            )
            if mean < reference - POINTS:
                missed.append(
                    f"{model}, {policy}: {mean:.2%}, more than {POINTS:.0%} below {REFERENCE}"
                )
    header = ("ResNet", "policy", "held-out accuracy of each seed", "mean", "final loss")
    return Table(header, tuple(rows), tuple(missed))


def of_digits() -> Table:
    """Trains on the digits in both wings."""
    return tabulated(
        {
            f"digits, {wing}": {
                policy: [digits(policy, seed, wing) for seed in SEEDS] for policy in POLICIES
            }
            for wing in ("linen", "nnx")
        }
    )


def of_fashion(folder: Path | None = None) -> Table:
    """Trains on Fashion-MNIST."""
    runs = {
        policy: [fashion(policy, seed, folder) for seed in SEEDS] for policy in POLICIES
    }
    return tabulated({"Fashion-MNIST": runs})

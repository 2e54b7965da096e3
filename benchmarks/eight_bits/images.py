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
from mpmodules import linen, nnx

SEEDS = (0,)
EPOCHS = 2  # of Fashion-MNIST
REFERENCE = "mixed_bfloat16"
KEPT = "p=f32,c=bf16,o=bf16"  # of convolutions
POLICIES = (REFERENCE, "mixed_float8", "mixed_int8")
POINTS = 0.01  # by which the mean accuracy of 8 bits may be below bfloat16's


@dataclasses.dataclass(frozen=True)
class Run:
    """The accuracy on held-out images, and the loss at the end of training."""

    accuracy: float
    loss: float


def digits(policy: str, seed: int, api: str = "linen", epochs: int | None = None) -> Run:
    """Trains the example's ResNet on handwritten digits."""
    from examples import train_digits as job

    config, data = job.Config(seed=seed), job.load()
    if epochs is not None:
        config = dataclasses.replace(config, epochs=epochs)
    train: Any = {"linen": job.train_linen, "nnx": job.train_nnx}[api]
    with tqdm(desc=f"digits, {api}, {policy}, seed {seed}", file=sys.stderr) as bar:
        rules = mp.PolicyRules([({"linen": linen, "nnx": nnx}[api].Conv, KEPT)])
        result = train(mp.get_policy(policy), rules, data, config, bar)
    return Run(result.accuracy, float(np.mean(result.losses[-10:])))


def fashion(policy: str, seed: int, data: Any, epochs: int = EPOCHS) -> Run:
    """Trains the example's ResNet8 on the example's `Images`."""
    from examples import resnet_fashion_mnist as job

    config = job.Config(epochs=epochs)
    with tqdm(desc=f"{data.name}, {policy}, seed {seed}", file=sys.stderr) as bar:
        rules = mp.PolicyRules([(linen.Conv, KEPT)])
        result = job.train(policy, rules, data, config, seed, bar)
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
                    f"{mean:.2%}",
                    f"{np.mean([run.loss for run in found]):.4f}",
                )
            )
            if mean < reference - POINTS:
                missed.append(
                    f"{model}, {policy}: {mean:.2%}, more than {POINTS:.0%} below {REFERENCE}"
                )
    header = ("ResNet", "policy", "held-out accuracy", "final loss")
    return Table(header, tuple(rows), tuple(missed))


def of_digits() -> Table:
    """Trains on the digits in both apis."""
    runs = {
        f"digits, {api}": {
            policy: [digits(policy, seed, api) for seed in SEEDS] for policy in POLICIES
        }
        for api in ("linen", "nnx")
    }
    return tabulated(runs)


def of_fashion(folder: Path | None = None) -> Table:
    """Trains on Fashion-MNIST, fewer epochs than the example does.

    Args:
      folder: of its four files; None is the system package's, and other images where there is none.
    """
    from examples import resnet_fashion_mnist as job

    data = job.load(folder)
    runs = {policy: [fashion(policy, seed, data) for seed in SEEDS] for policy in POLICIES}
    return tabulated({data.name: runs})

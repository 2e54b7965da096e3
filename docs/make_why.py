"""Draws docs/pictures/why.svg: three defects of half precision upstream, beside this library.

    python docs/make_why.py

Each line is computed: the mean of n x n ones by an average pool, the gradient of an embedding's row
by the occurrences of its token, and the first step of Adam by the size of a float16 gradient. It
takes half a minute on a CPU, and needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import optax
from matplotlib.axes import Axes

from mpmodules import linen as nn
from policy import mixed_precision

PICTURE = Path(__file__).parent / "pictures" / "why.svg"
THEIRS, OURS = "#d1495b", "#00798c"


class Panel(NamedTuple):
    """One panel: the places on its axis, and the functions that measure each side there."""

    title: str
    axis: str
    places: Sequence[float]
    theirs: Callable[[float], float]
    ours: Callable[[float], float]
    name: str
    scale: str = "log"


def pooled(api: Any, size: float) -> float:
    """Returns the mean of `size` x `size` ones in bfloat16."""
    ones = jnp.ones((1, int(size), int(size), 1), jnp.bfloat16)
    return float(api.avg_pool(ones, (int(size), int(size))).squeeze())


def gradient_of_a_row(api: Any, count: float) -> float:
    """Returns the gradient of a weight whose token occurs `count` times; each use adds 1."""
    embed = api.Embed(2, 1, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    tokens = jnp.zeros(int(count), int)
    variables = embed.init(jax.random.key(0), tokens)
    grads = jax.grad(lambda v: embed.apply(v, tokens).astype(jnp.float32).sum())(variables)
    return float(grads["params"]["embedding"][0, 0])


def first_step(wraps: bool, size: float) -> float:
    """Returns the size of Adam's first step for a float16 gradient, in learning rates."""
    tx = optax.adam(1.0)
    tx = mixed_precision(tx, "mixed_float16", loss_scale=1.0) if wraps else tx
    params = {"w": jnp.zeros(1)}
    updates, _ = tx.update({"w": jnp.full(1, size, jnp.float16)}, tx.init(params), params)
    return float(jnp.abs(updates["w"][0]))


PANELS = (
    Panel(
        "average pool of n x n ones",
        "n",
        [2**k for k in range(2, 9)],
        lambda n: pooled(flax.linen, n),
        lambda n: pooled(nn, n),
        "Flax, bfloat16",
        scale="linear",
    ),
    Panel(
        "gradient of an embedding's row",
        "occurrences of its token",
        [2**k for k in range(4, 14)],
        lambda n: gradient_of_a_row(flax.linen, n),
        lambda n: gradient_of_a_row(nn, n),
        "Flax, bfloat16",
    ),
    Panel(
        "Adam's first step, in learning rates",
        "gradient",
        [2.0**-k for k in range(16)],
        lambda g: first_step(False, g),
        lambda g: first_step(True, g),
        "Optax, float16",
    ),
)


def draw(ax: Axes, panel: Panel) -> None:
    """Draws one panel."""
    theirs = [panel.theirs(place) for place in panel.places]
    ours = [panel.ours(place) for place in panel.places]
    print(panel.title, *zip(panel.places, theirs, ours, strict=True), sep="\n  ")
    ax.plot(panel.places, theirs, "o-", color=THEIRS, label=panel.name)
    ax.plot(panel.places, ours, "s-", color=OURS, label="mpmodules")
    ax.set_title(panel.title, fontsize=10)
    ax.set_xlabel(panel.axis)
    ax.set_xscale("log", base=2)
    ax.set_yscale(panel.scale)
    if panel.scale == "linear":
        ax.set_ylim(0, 1.1)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)


def main() -> None:
    mpl.rcParams |= {"svg.hashsalt": "why", "svg.fonttype": "path", "font.size": 9}
    figure, axes = plt.subplots(1, 3, figsize=(10.5, 3.1), layout="constrained")
    for ax, panel in zip(axes, PANELS, strict=True):
        draw(ax, panel)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()

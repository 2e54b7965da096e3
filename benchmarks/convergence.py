"""Where training ends when params are stored in bfloat16, in each way to keep their float32 value,
against float32.

    python -m benchmarks.convergence [--small] [--json FILE] [--markdown FILE]

**Noisy quadratic**: 4096 weights w are drawn to targets t of about 0.1 by gradients w - t + n, n
normal of deviation 0.01, with Adam at a learning rate of 1e-4 for 4000 steps. The figure is the
root mean square of w - t over the last tenth of the steps: of the weights as they are used, that is
rounded, and of the float32 weights behind them. Rounding exact weights to bfloat16 alone costs
1.7e-4.

**Digits**: the main job, `examples/train_digits.py`, with params and matmuls in bfloat16 (float32
in the first row): its ResNet, data, seed, learning rates and number of steps. The loss is the mean
of the last epoch's; accuracy is on the held-out fifth, where one image is 0.28%.

**What must hold**, or the command ends with status 1: `full`, `remainder` and `kahan` end within 5%
of float32 on the quadratic and within 1% of its accuracy on the digits, `stochastic` within a
factor of 3 and within 2%; `remainder` gives the numbers of `full`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import policy as mp

SEED = 0


@dataclasses.dataclass(frozen=True)
class Storage:
    """How params are stored: their dtype, and what is kept beside them. `within` bounds what may be
    lost.
    """

    name: str
    dtype: str
    master_weights: Any = "none"
    bytes_beside: int = 0
    within: tuple[float, float] | None = None

    @property
    def key(self) -> jax.Array | None:
        return jax.random.key(SEED) if self.master_weights == "stochastic" else None


REFERENCE = Storage("float32", "float32")
STORAGES = (
    REFERENCE,
    Storage("bfloat16, none", "bfloat16"),
    Storage("bfloat16, full", "bfloat16", "full", 4, (1.05, 0.01)),
    Storage("bfloat16, remainder", "bfloat16", "remainder", 2, (1.05, 0.01)),
    Storage("bfloat16, kahan", "bfloat16", "kahan", 2, (1.05, 0.01)),
    Storage("bfloat16, stochastic", "bfloat16", "stochastic", 0, (3.0, 0.02)),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One storage's figures."""

    storage: Storage
    used_error: float
    master_error: float
    loss: float
    accuracy: float


def quadratic(storage: Storage, weights: int = 4096, steps: int = 4000) -> tuple[float, float]:
    """Root mean square errors of the weights as used, and of their float32 values. All storages see
    the same noise.
    """
    rng = np.random.default_rng(SEED)
    target = jnp.asarray(rng.normal(size=weights) * 0.1, jnp.float32)
    start = target + jnp.asarray(rng.normal(size=weights) * 0.05, jnp.float32)
    tx = mp.mixed_precision(
        optax.adam(1e-4), storage.dtype, master_weights=storage.master_weights, key=storage.key
    )

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        noise = jax.random.normal(key, (weights,)) * np.float32(0.01)
        params, state, _ = mp.apply_gradients(
            tx, params, state, params.astype(jnp.float32) - target + noise
        )
        errors = [
            jnp.mean(jnp.square(w.astype(jnp.float32) - target))
            for w in (params, mp.master_params(params, state))
        ]
        return (params, state), errors

    _, errors = jax.lax.scan(
        step, mp.optim.init_from_master(tx, start), jax.random.split(jax.random.key(SEED), steps)
    )
    used, master = (
        float(np.sqrt(np.asarray(e, np.float64)[-(steps // 10) :].mean())) for e in errors
    )
    return used, master


class _NoBar:
    def update(self) -> None:
        pass


def digits(storage: Storage, small: bool = False) -> tuple[float, float]:
    """The main job's mean loss of the last epoch, and its accuracy."""
    from examples import train_digits as job

    data, config = job.load(), job.Config(seed=SEED, master_weights=storage.master_weights)
    if small:
        data = job.Digits(
            data.train_images[:64],
            data.train_labels[:64],
            data.test_images[:64],
            data.test_labels[:64],
        )
        config = dataclasses.replace(config, epochs=1, batch_size=32, filters=2)
    policy = mp.Policy(storage.dtype, storage.dtype, "float32")
    result = job.train_linen(policy, mp.PolicyRules([]), data, config, _NoBar())
    epoch = job.steps_of(data, config) // config.epochs
    return float(np.mean(result.losses[-epoch:])), result.accuracy


def measure(storage: Storage, small: bool = False) -> Row:
    """Runs both jobs; the small digits for the last storage only, as the others compile as long for
    no other code.
    """
    if not small:
        return Row(storage, *quadratic(storage), *digits(storage))
    ends = digits(storage, small) if storage == STORAGES[-1] else (0.0, 0.0)
    return Row(storage, *quadratic(storage, 256, 400), *ends)


def complaints(rows: list[Row]) -> list[str]:
    """What must hold and does not."""
    by_name = {row.storage.name: row for row in rows}
    reference, found = by_name[REFERENCE.name], []
    for row in rows:
        if row.storage.within is None:
            continue
        factor, points = row.storage.within
        if row.used_error > factor * reference.used_error:
            found.append(
                f"{row.storage.name}: {row.used_error:.3g} on the quadratic, above {factor:g} "
                "times float32."
            )
        if row.accuracy < reference.accuracy - points:
            found.append(
                f"{row.storage.name}: an accuracy of {row.accuracy:.2%}, more than {points:.0%} "
                "below float32."
            )
    full, remainder = by_name["bfloat16, full"], by_name["bfloat16, remainder"]
    if dataclasses.replace(full, storage=remainder.storage) != remainder:
        found.append("bfloat16, remainder: other figures than bfloat16, full.")
    return found


HEADER = (
    "params, kept beside them",
    "bytes an element",
    "quadratic: error of the weights used",
    "against float32",
    "error of the float32 weights",
    "digits: final loss",
    "held-out accuracy",
)


def table(rows: list[Row]) -> str:
    """The figures as a Markdown table."""
    reference = rows[0]
    cells = [
        (
            row.storage.name,
            str(jnp.dtype(row.storage.dtype).itemsize + row.storage.bytes_beside),
            f"{row.used_error:.2e}",
            f"{row.used_error / reference.used_error:.2f}",
            f"{row.master_error:.2e}",
            f"{row.loss:.4f}",
            f"{row.accuracy:.2%}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(HEADER, *cells, strict=True)]
    lines = [HEADER, tuple("-" * width for width in widths), *cells]
    pad = lambda line: " | ".join(  # noqa: E731
        cell.ljust(width) for cell, width in zip(line, widths, strict=True)
    )
    return "\n".join(f"| {pad(line)} |" for line in lines)


def markdown(rows: list[Row]) -> str:
    """docs/convergence.md."""
    title, _, rest = (__doc__ or "").partition("\n\n")
    command, _, notes = rest.partition("\n\n")
    versions = f"jax {jax.__version__}, optax {optax.__version__}, {jax.default_backend()}"
    return (
        f"# Convergence\n\n{title}\n\n```bash\n{command.strip()}\n```\n\n"
        f"{table(rows)}\n\nMeasured with {versions}.\n\n{notes}"
    )


def _figures(row: Row) -> dict[str, float]:
    return {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(Row)
        if field.name != "storage"
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 1 where something that must hold does not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="a few steps of each: that it runs, not where it ends"
    )
    parser.add_argument("--json", type=pathlib.Path, help="a file to write the figures to")
    parser.add_argument("--markdown", type=pathlib.Path, help="a file to write the table to")
    options = parser.parse_args(arguments)
    rows = []
    for storage in STORAGES:
        rows.append(measure(storage, options.small))
        print(f"{storage.name}: done", file=sys.stderr, flush=True)
    print(table(rows))
    if options.markdown is not None:
        options.markdown.write_text(markdown(rows))
    found = [] if options.small else complaints(rows)
    if options.json is not None:
        figures = [{"name": row.storage.name} | _figures(row) for row in rows]
        options.json.write_text(json.dumps({"rows": figures, "missed": found}, indent=1) + "\n")
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

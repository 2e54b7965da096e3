"""Measures where training ends when params are stored in bfloat16, in each way to keep their
float32 value, beside float32.

    python -m benchmarks.convergence             # prints the table; exits with 1 where a bound is
                                                 # missed
    python -m benchmarks.convergence --write     # stores the figures, and writes
                                                 # docs/convergence.md
    python -m benchmarks.convergence --stored --write    # measures nothing: the page of stored
                                                         # figures
    python -m benchmarks.convergence --small --json FILE --markdown FILE

The texts of the page, which say what is measured, are in benchmarks/notes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import policy as mp
from benchmarks.accuracy.report import environment
from benchmarks.command import page_parser
from benchmarks.markdown import measured_on, note, wrapped
from benchmarks.markdown import table as markdown_table

SEED, SEEDS = 0, 3  # the first, and how many of the quadratic
ROOT = pathlib.Path(__file__).parents[1]
NOTES, RESULTS = ROOT / "benchmarks" / "notes", ROOT / "benchmarks" / "results" / "convergence.json"
PAGE = ROOT / "docs" / "convergence.md"


@dataclasses.dataclass(frozen=True)
class Storage:
    """A way to store params: their dtype, and the copy kept beside them. `within` bounds the error
    on the quadratic, as a factor, and the loss of accuracy on the digits.
    """

    name: str
    dtype: str
    master_weights: Any = "none"
    bytes_beside: int = 0
    within: tuple[float, float] | None = None

    def wrap(self, tx: optax.GradientTransformation, seed: int = SEED) -> mp.optim.MixedPrecision:
        """Wraps a transform, with its params stored in this way."""
        is_random = self.master_weights == "stochastic"
        return mp.mixed_precision(
            tx,
            self.dtype,
            master_weights=self.master_weights,
            key=jax.random.key(seed) if is_random else None,
        )

    @property
    def bytes(self) -> float:
        """Bytes of a param and of both moments."""
        return jnp.dtype(self.dtype).itemsize + self.bytes_beside + 8


REFERENCE = Storage("float32", "float32")
STORAGES = (
    REFERENCE,
    Storage("bfloat16, none", "bfloat16"),
    Storage("bfloat16, full", "bfloat16", "full", 4, (1.05, 0.01)),
    Storage("bfloat16, remainder", "bfloat16", "remainder", 2, (1.05, 0.01)),
    Storage("bfloat16, stochastic", "bfloat16", "stochastic", 0, (3.0, 0.02)),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One storage's figures; the quadratic's are means over the seeds, and standard deviations."""

    storage: Storage
    used_error: float
    master_error: float
    loss: float
    accuracy: float
    error_deviation: float = 0.0


def quadratic(
    storage: Storage, weights: int = 4096, steps: int = 4000, seed: int = SEED
) -> tuple[float, float]:
    """Root mean square errors of the weights as used, and of their float32 values. All storages see
    the same noise.
    """
    rng = np.random.default_rng(seed)
    target = jnp.asarray(rng.normal(size=weights) * 0.1, jnp.float32)
    start = target + jnp.asarray(rng.normal(size=weights) * 0.05, jnp.float32)
    tx = storage.wrap(optax.adam(1e-4), seed)

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
        step, mp.init_from_master(tx, start), jax.random.split(jax.random.key(seed), steps)
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
    """Runs the jobs; the small digits for the last storage only, as the others take as long to
    compile the same code.
    """
    if not small:
        errors = np.asarray([quadratic(storage, seed=seed) for seed in range(SEEDS)])
        used, master = (float(mean) for mean in errors.mean(0))
        return Row(storage, used, master, *digits(storage), float(errors[:, 0].std(ddof=1)))
    ends = digits(storage, small) if storage == STORAGES[-1] else (0.0, 0.0)
    return Row(storage, *quadratic(storage, 256, 400), *ends)


def complaints(rows: list[Row]) -> list[str]:
    """Returns the bounds that are missed."""
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
    *("params, masters", "bytes with both moments"),
    *("quadratic: error", "digits: accuracy"),
)


def table(rows: list[Row]) -> str:
    """Returns the figures as a Markdown table."""
    reference = rows[0]
    cells = [
        (
            row.storage.name,
            f"{row.storage.bytes:.4g}",
            f"{row.used_error:.2e} ± {row.error_deviation:.0e} "
            f"({row.used_error / reference.used_error:.2f})",
            f"{row.accuracy:.2%}" if row.accuracy else "",
        )
        for row in rows
    ]
    return markdown_table(HEADER, cells)


def record(rows: list[Row], missed: Sequence[str]) -> dict[str, Any]:
    """Returns the figures with the environment that they are of."""
    figures = [{"name": row.storage.name} | _figures(row) for row in rows]
    return {"environment": environment(), "rows": figures, "missed": list(missed)}


def _figures(row: Row) -> dict[str, float]:
    return {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(Row)
        if field.name != "storage"
    }


def stored() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """Returns the rows of a record."""
    storages = {storage.name: storage for storage in STORAGES}
    return [
        Row(storages[row["name"]], **{name: row[name] for name in row if name != "name"})
        for row in record["rows"]
    ]


def page(record: Mapping[str, Any]) -> str:
    """Returns docs/convergence.md for these figures."""
    parts = [
        note(NOTES, "convergence"),
        table(rows_of(record)),
        measured_on(record["environment"]),
        note(NOTES, "convergence_storage"),
        note(NOTES, "convergence_examples"),
    ]
    return wrapped("\n\n".join(parts)) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; 1 where a bound is missed, 2 for --small --write."""
    options = _parser().parse_args(arguments)
    if options.small and options.write:
        print("--small measures a few steps, which no page is made of.")
        return 2
    figures = stored() if options.stored else _measured(options.small)
    print(table(rows_of(figures)), *figures["missed"], sep="\n")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.write and not options.stored:
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    for file in (options.markdown, PAGE if options.write else None):
        if file is not None:
            file.write_text(page(figures), encoding="utf-8")
    return int(bool(figures["missed"]))


def _measured(small: bool) -> dict[str, Any]:
    rows = []
    for storage in STORAGES:
        rows.append(measure(storage, small))
        print(f"{storage.name}: done", file=sys.stderr, flush=True)
    return record(rows, [] if small else complaints(rows))


def _parser() -> argparse.ArgumentParser:
    made = page_parser("benchmarks.convergence", __doc__, "convergence.md")
    made.add_argument(
        "--small", action="store_true", help="a few steps of each, to try the programs"
    )
    return made


if __name__ == "__main__":
    sys.exit(main())

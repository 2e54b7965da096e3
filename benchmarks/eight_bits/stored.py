"""SmolLM2-135M with parameters stored in 8 and 4 bits: bytes, and the loss of a text."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import policy as mp
from benchmarks.eight_bits import published
from benchmarks.eight_bits.report import Table
from mpmodules import nnx


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      name: of the row.
      policy: its text form.
      is_as_stored: whether the model keeps the file's blocks, or starts from them widened.
      rules: texts of rules.
    """

    name: str
    policy: str
    is_as_stored: bool = False
    rules: tuple[str, ...] = ()


def _text(params: str) -> str:
    return f"params={params},compute=bfloat16,output=float32"


def _with_table_in_8_bits(params: str) -> Row:
    return Row(f"`{params}`, the table in `int8`", _text(params), rules=(f"embed={_text('int8')}",))


ROWS = (
    Row("float32", "float32"),
    Row("as published, computed in float32", "float32", is_as_stored=True),
    Row("mixed_bfloat16", "mixed_bfloat16"),
    Row("as published", "mixed_bfloat16", is_as_stored=True),
    *(
        Row(f"`params={params}`", _text(params))
        for params in ("bfloat16", "int8", "float8", "uint4:32", "int4:32", "nf4")
    ),
    *map(_with_table_in_8_bits, ("uint4:32", "int4:32", "nf4")),
)


@nnx.jit
def _losses(model: Any, tokens: jax.Array) -> jax.Array:
    """The loss (B,) of each window of (B, T) tokens but the first ones, in nats a token."""
    given = tokens[:, :-1]
    logits = model(given, jnp.broadcast_to(jnp.arange(given.shape[1]), given.shape))
    wide, labels = logits.astype(jnp.float32), tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(wide, labels).mean(-1)


def measured(row: Row) -> tuple[np.ndarray, int]:
    """Returns a row's losses by window of the text, and the bytes of its parameters."""
    from examples import smollm2_generate as job

    reader = job.gguf.GGUFReader(job.find_weights())
    config = job.config_of(reader)
    weights = (job.stored_of if row.is_as_stored else job.weights_of)(reader, config)
    rules = mp.PolicyRules.from_texts(row.rules)
    model = job.build(config, weights, mp.get_policy(row.policy), rules)
    text = published._smollm2_text(job.tokenizer_of(reader))
    losses = np.concatenate([_losses(model, jnp.asarray(part)) for part in text])
    print(f"{row.name}: {losses.mean():.4f}", file=sys.stderr, flush=True)
    return losses, job.nbytes(nnx.state(model))


def smollm2() -> Table:
    """Takes the loss of a text with the parameters of each row."""
    found = {row.name: measured(row) for row in ROWS}
    losses = {name: own for name, (own, _) in found.items()}
    return table(losses, {name: size for name, (_, size) in found.items()})


def table(losses: dict[str, np.ndarray], sizes: dict[str, int]) -> Table:
    """Returns the table of losses by window, each beside the first row's, and of bytes."""
    base, rows = next(iter(losses.values())), []
    for name, own in losses.items():
        apart = own - base
        noise = apart.std(ddof=1) / np.sqrt(len(apart))
        beside = f"{apart.mean():+.4f} ± {noise:.4f}" if apart.any() else ""
        rows.append((name, f"{sizes[name] / 1e6:.1f}", f"{own.mean():.4f}", beside))
    return Table(("SmolLM2-135M", "params, MB", "loss", "compared with float32"), tuple(rows))

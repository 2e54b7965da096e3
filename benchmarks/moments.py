"""Where training ends with moments in 16 and 8 bits, against float32.

    python -m benchmarks.moments          # the table: 4 minutes on two idle cores
    python -m benchmarks.moments --check  # exits with 1 where a bound is missed
    python -m benchmarks.moments --small  # a few steps of each: that it runs, not where it ends
    python -m benchmarks.moments --json FILE

nats      the held-out loss of a character model (the language model of the examples: two layers of
          width 128, 300 steps of 16 stretches of 64 characters, AdamW with b2 = 0.999). Held
          against float32.
error     a noisy quadratic: 64 x 128 weights are drawn to targets of about 0.1 by gradients
          c (w - t + n), n normal of deviation 0.01, the log of c normal of deviation 2, so that
          gradients in a block differ by orders of magnitude. Adam doesn't see c. 2000 steps at
          1e-3, b2 = 0.999; the root mean square of w - t over the last tenth.

The controls store moments in 8 bits in other ways: `one linear scale` is 127 (255) equal steps for
each tensor, rounded to nearest; `rounded to nearest` is the codes of int8 without a key, which the
noise of a model's gradients shifts on, and small steady gradients don't.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import policy as mp
from benchmarks.table import Row, run
from policy import init_from_master
from policy.optim.blockwise import POSITIVE, SIGNED, Format, decode, encode

SEED = 0
Rounding = Callable[[jax.Array, Format], jax.Array]


def linear(x: jax.Array, form: Format) -> jax.Array:
    """Rounds to equal steps between 0 and the largest magnitude of the tensor."""
    steps = np.float32(127 if form.is_signed else 255)
    scale = jnp.maximum(jnp.max(jnp.abs(x)), np.float32(1e-30)) / steps
    return jnp.round(x / scale) * scale


def nearest(x: jax.Array, form: Format) -> jax.Array:
    """Rounds to the codes of int8, to nearest."""
    return decode(encode(x, form)) if x.ndim > 1 else x


def with_rounded_moments(
    tx: optax.GradientTransformation, rounding: Rounding
) -> optax.GradientTransformation:
    """Rounds the moments in Adam's state after every step."""

    def rounded(state: Any) -> Any:
        if not isinstance(state, optax.ScaleByAdamState):
            return state
        return state._replace(
            mu=jax.tree.map(lambda x: rounding(x, SIGNED), state.mu),
            nu=jax.tree.map(lambda x: rounding(x, POSITIVE), state.nu),
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = tx.update(updates, state, params)
        is_adam = lambda node: isinstance(node, optax.ScaleByAdamState)  # noqa: E731
        return updates, jax.tree.map(rounded, state, is_leaf=is_adam)

    return optax.GradientTransformation(tx.init, update)


@dataclasses.dataclass(frozen=True)
class Storage:
    """A way to store both moments of Adam.

    Attributes:
      name: of the row.
      dtype: of both moments; None is float32.
      rounding: of a control, after every step.
      nats, error: the largest ratios to float32's figures; None only reports.
      nats_at_least, error_at_least: the smallest, for a control.
    """

    name: str
    dtype: str | None = None
    rounding: Rounding | None = None
    nats: float | None = None
    error: float | None = None
    nats_at_least: float = 0.0
    error_at_least: float = 0.0

    def wrap(self, tx: optax.GradientTransformation, policy: Any) -> mp.optim.MixedPrecision:
        """Wraps Adam, with its moments stored in this way."""
        if self.rounding is not None:
            tx = with_rounded_moments(tx, self.rounding)
        moments = None if self.dtype is None else {"mu": self.dtype, "nu": self.dtype}
        key = None if self.dtype is None else jax.random.key(SEED)
        return mp.mixed_precision(tx, policy, moment_dtype=moments, key=key)


STORAGES = (
    Storage("float32"),
    Storage("bfloat16", "bfloat16", nats=1.01, error=1.01),
    Storage("int8", "int8", nats=1.01, error=1.03),
    Storage("control: one linear scale", None, linear, math.inf, math.inf, 2.0, 10.0),
    Storage("control: rounded to nearest", None, nearest, error=math.inf, error_at_least=1.08),
)


def quadratic(storage: Storage, steps: int = 2000) -> float:
    """Returns the root mean square error of the weights."""
    rng = np.random.default_rng(SEED)
    draw = lambda scale: jnp.asarray(rng.normal(size=(64, 128)) * scale, jnp.float32)  # noqa: E731
    target, offset, factors = draw(0.1), draw(0.05), jnp.exp(draw(2.0))
    start = target + offset
    tx = storage.wrap(optax.adam(1e-3, b2=0.999), "float32")

    def step(carry: Any, key: jax.Array) -> Any:
        params, state = carry
        noise = jax.random.normal(key, target.shape) * np.float32(0.01)
        gradients = factors * (params - target + noise)
        params, state, _ = mp.apply_gradients(tx, params, state, gradients)
        return (params, state), jnp.mean(jnp.square(params - target))

    keys = jax.random.split(jax.random.key(SEED), steps)
    _, errors = jax.lax.scan(step, (start, tx.init(start)), keys)
    return float(np.sqrt(np.asarray(errors, np.float64)[-(steps // 10) :].mean()))


def language_model(
    wrap: Callable[[optax.GradientTransformation], mp.optim.MixedPrecision],
    steps: int = 300,
    seed: int = SEED,
) -> float:
    """Returns the held-out loss of the character model, in nats.

    Params are stored in the param_dtype of the transform that `wrap` makes, and widened for the
    model, which computes in float32.
    """
    from examples import language_model as job

    text = job.Text.split(job.load_text())
    config = job.Config(
        vocab_size=text.vocab_size, layers=2, length=64, batch_size=16, steps=steps, seed=seed
    )
    model = job.Decoder(config)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, max(steps // 10, 1), steps + 1)
    tx = wrap(optax.adamw(schedule, b2=0.999, weight_decay=0.01))

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        logits: Any = model.apply({"params": wide}, tokens)
        return job.cross_entropy(logits, tokens)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        gradients = jax.grad(loss_fn)(params, tokens)
        return mp.apply_gradients(tx, params, state, gradients)[:2]

    params = model.init(jax.random.key(seed), job.batch_of(text.train, config, 0))["params"]
    params, state = init_from_master(tx, params)
    for tokens in job.batches(text.train, config):
        params, state = step(params, state, tokens)
    held_out = text.held_out[: 200 * config.length * config.batch_size // 16]
    return job.held_out_loss(jax.jit(loss_fn), params, held_out, config)


def rows(small: bool = False) -> Iterator[Row]:
    """Yields every row, as it is measured, float32 first of each training."""
    jobs = {
        "nats": lambda storage: language_model(
            lambda tx: storage.wrap(tx, "float32"), 2 if small else 300
        ),
        "error": lambda storage: quadratic(storage, 20 if small else 2000),
    }
    for quantity, job in jobs.items():
        reference = None
        for storage in STORAGES:
            found = job(storage)
            reference = found if reference is None else reference
            bound = None if small else getattr(storage, quantity)
            at_least = 0.0 if small else getattr(storage, f"{quantity}_at_least")
            yield Row(quantity, storage.name, found, reference, bound, at_least)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "float32"))

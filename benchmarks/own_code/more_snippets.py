"""Ten more pieces of code, as people write them: for float32, without a dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.own_code.snippet import BATCH, IMAGE, STREAM, TIME, WIDTH, Param, Params, Snippet
from benchmarks.own_code.snippets import BIAS, HEADS, SCALE, SQUARE, heads

GROUPS, MIXTURES, STATES, VOCABULARY, LABELS = 4, 5, 4, 6, 3


def group_norm(p: Params, x: Any) -> Any:
    grouped = x.reshape(*x.shape[:-1], GROUPS, -1)
    mean = grouped.mean((1, 2, 4), keepdims=True)
    variance = grouped.var((1, 2, 4), keepdims=True)
    grouped = (grouped - mean) * jax.lax.rsqrt(variance + 1e-5)
    return grouped.reshape(x.shape) * p["scale"] + p["bias"]


def weight_standardization(p: Params, x: Any) -> Any:
    kernel = p["kernel"]
    mean = jnp.mean(kernel, axis=(0, 1, 2))
    deviation = jnp.std(kernel, axis=(0, 1, 2))
    kernel = (kernel - mean) / (deviation + 1e-5) / np.sqrt(kernel[..., 0].size)
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return jax.nn.silu(y + p["bias"])


def cosine_attention(p: Params, x: Any) -> Any:
    q, k, v = map(heads, jnp.split(x @ p["qkv"], 3, axis=-1))
    q = q / (jnp.linalg.norm(q, axis=-1, keepdims=True) + 1e-6)
    k = k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-6)
    scale = jnp.exp(jnp.minimum(p["scale"], np.log(100.0)))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale[:, None, None])
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)


def gumbel_softmax(p: Params, x: Any) -> Any:
    logits = x @ p["logits"]
    # In float32, so that the reference in float64 draws the same numbers.
    noise = jax.random.gumbel(jax.random.key(0), logits.shape, jnp.float32)
    return jax.nn.softmax((logits + noise) / 0.5) @ p["codes"]


def mixture_of_logistics(p: Params, x: Any, targets: Any) -> Any:
    logits, means, log_scales = jnp.split(x + p["bias"], 3, axis=-1)
    inverse = jnp.exp(-jnp.maximum(log_scales, -7.0))
    centered = targets[..., None] - means
    upper, lower = inverse * (centered + 1 / 16), inverse * (centered - 1 / 16)
    mass = jax.nn.sigmoid(upper) - jax.nn.sigmoid(lower)
    log_masses = jnp.log(jnp.maximum(mass, 1e-12))
    return -jax.nn.logsumexp(log_masses + jax.nn.log_softmax(logits), axis=-1).mean()


def dice_loss(p: Params, x: Any, masks: Any) -> Any:
    probabilities = jax.nn.softmax(x + p["bias"])
    shared = jnp.sum(probabilities * masks, axis=(1, 2))
    total = jnp.sum(probabilities, axis=(1, 2)) + jnp.sum(masks, axis=(1, 2))
    return 1 - jnp.mean((2 * shared + 1) / (total + 1))


def connectionist(p: Params, x: Any, labels: Any) -> Any:
    log_probabilities = jax.nn.log_softmax(x + p["bias"])
    batch, count = labels.shape
    extended = jnp.zeros((batch, 2 * count + 1), int).at[:, 1::2].set(labels)
    steps = jnp.take_along_axis(log_probabilities, extended[:, None, :], axis=-1)
    skips = (extended != 0) & (extended != jnp.roll(extended, 2, axis=1))
    states = jnp.arange(2 * count + 1)

    def step(alpha: Any, emitted: Any) -> Any:
        before = jnp.where(states < 1, -1e30, jnp.roll(alpha, 1, axis=1))
        skipped = jnp.where(skips & (states >= 2), jnp.roll(alpha, 2, axis=1), -1e30)
        return jnp.logaddexp(jnp.logaddexp(alpha, before), skipped) + emitted, None

    first = jnp.where(states < 2, steps[:, 0], -1e30)
    alpha, _ = jax.lax.scan(step, first, steps[:, 1:].swapaxes(0, 1))
    return -jnp.logaddexp(alpha[:, -1], alpha[:, -2]).mean()


def low_rank_adapter(p: Params, x: Any) -> Any:
    return x @ jax.lax.stop_gradient(p["kernel"]) + (x @ p["a"]) @ p["b"] * (8 / p["a"].shape[1])


def ode(p: Params, x: Any) -> Any:
    def field(h: Any) -> Any:
        return jnp.tanh(h @ p["up"] + p["bias"]) @ p["down"]

    def step(h: Any, dt: Any) -> Any:
        k1 = field(h)
        k2 = field(h + dt / 2 * k1)
        k3 = field(h + dt / 2 * k2)
        k4 = field(h + dt * k3)
        return h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return jax.lax.scan(step, x, jnp.full(4, 0.25))[0]


def state_space(p: Params, x: Any) -> Any:
    dt = jax.nn.softplus(x @ p["dt"] + p["dt_bias"])[..., None]
    b, c = jnp.split(x @ p["bc"], 2, axis=-1)
    decays = jnp.exp(-dt * jnp.exp(p["log_a"]))
    inputs = dt * b[:, :, None, :] * x[..., None]

    def combine(first: Any, second: Any) -> Any:
        return first[0] * second[0], second[0] * first[1] + second[1]

    _, states = jax.lax.associative_scan(combine, (decays, inputs), axis=1)
    return jnp.sum(states * c[:, :, None, :], axis=-1) + p["skip"] * x


def _in_range(generator: np.random.Generator) -> tuple[np.ndarray]:
    return (generator.uniform(-1, 1, (BATCH, TIME)).astype(np.float32),)


def _masks(generator: np.random.Generator) -> tuple[np.ndarray]:
    classes = generator.integers(0, VOCABULARY, IMAGE[:-1])
    return (np.eye(VOCABULARY, dtype=np.float32)[classes],)


def _labels(generator: np.random.Generator) -> tuple[np.ndarray]:
    return (generator.integers(1, VOCABULARY, (BATCH, LABELS)).astype(np.int32),)


MORE = (
    Snippet("GroupNorm", group_norm, {"scale": SCALE, "bias": BIAS}, IMAGE),
    Snippet(
        "weight standardization",
        weight_standardization,
        {"kernel": Param((3, 3, WIDTH, WIDTH)), "bias": BIAS},
        IMAGE,
    ),
    Snippet(
        "cosine attention",
        cosine_attention,
        {"qkv": Param((WIDTH, 3 * WIDTH)), "scale": Param((HEADS,), 2.0, 0.1)},
    ),
    Snippet(
        "Gumbel softmax",
        gumbel_softmax,
        {"logits": Param((WIDTH, 8)), "codes": Param((8, WIDTH), 0.0, 1.0)},
    ),
    Snippet(
        "mixture of logistics",
        mixture_of_logistics,
        {"bias": Param((3 * MIXTURES,), 0.0, 0.2)},
        targets=_in_range,
        outputs=3 * MIXTURES,
        is_loss=True,
    ),
    Snippet(
        "dice loss",
        dice_loss,
        {"bias": Param((VOCABULARY,), 0.0, 0.2)},
        IMAGE,
        _masks,
        VOCABULARY,
        is_loss=True,
    ),
    Snippet(
        "connectionist loss",
        connectionist,
        {"bias": Param((VOCABULARY,), 0.0, 0.2)},
        STREAM,
        _labels,
        VOCABULARY,
        is_loss=True,
    ),
    Snippet(
        "low-rank adapter",
        low_rank_adapter,
        {"kernel": SQUARE, "a": Param((WIDTH, 4)), "b": Param((4, WIDTH))},
    ),
    Snippet(
        "ODE steps",
        ode,
        {"up": Param((WIDTH, 32)), "bias": Param((32,), 0.0, 0.2), "down": Param((32, WIDTH))},
    ),
    Snippet(
        "state-space scan",
        state_space,
        {
            "dt": SQUARE,
            "dt_bias": BIAS,
            "bc": Param((WIDTH, 2 * STATES)),
            "log_a": Param((WIDTH, STATES), 0.0, 0.3),
            "skip": SCALE,
        },
    ),
)

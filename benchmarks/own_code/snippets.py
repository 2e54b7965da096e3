"""Thirteen pieces of code of usual models, as people write them: for float32, without a dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.own_code.snippet import IMAGE, ROWS, TIME, WIDTH, Param, Params, Snippet

HEADS = 2
SCALE, BIAS = Param((WIDTH,), 1.0, 0.2), Param((WIDTH,), 0.0, 0.2)
SQUARE = Param((WIDTH, WIDTH))


def rms_norm(p: Params, x: Any) -> Any:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * p["scale"]


def layer_norm(p: Params, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * p["scale"] + p["bias"]


def heads(x: Any) -> Any:
    """(batch, time, width) to (batch, time, heads, width of a head)."""
    return x.reshape(*x.shape[:-1], HEADS, -1)


def attention(p: Params, x: Any) -> Any:
    q, k, v = map(heads, jnp.split(x @ p["qkv"], 3, axis=-1))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, logits, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]


def rotary(p: Params, x: Any) -> Any:
    q, k = heads(x @ p["q"]), heads(x @ p["k"])
    half = q.shape[-1] // 2
    frequencies = 10000 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def rotate(x: Any) -> Any:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    logits = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), heads(x)).reshape(x.shape)


def alibi(p: Params, x: Any) -> Any:
    q, k = heads(x @ p["q"]), heads(x @ p["k"])
    slopes = 2.0 ** (-8 * jnp.arange(1, HEADS + 1) / HEADS)
    positions = jnp.arange(x.shape[1])
    distances = jnp.abs(positions[:, None] - positions[None, :])
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(logits - slopes[:, None, None] * distances)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, heads(x)).reshape(x.shape)


def squeeze_excite(p: Params, x: Any) -> Any:
    pooled = x.mean(axis=(1, 2))
    hidden = jax.nn.silu(pooled @ p["squeeze"] + p["squeeze_bias"])
    gates = jax.nn.sigmoid(hidden @ p["excite"] + p["excite_bias"])
    return x * gates[:, None, None, :]


def learned_positions(p: Params, x: Any) -> Any:
    return jax.nn.gelu(x + p["positions"][jnp.arange(x.shape[1])])


def numpy_scalars(p: Params, x: Any) -> Any:
    x = (x * np.float64(0.7) + np.float32(0.1)) @ p["kernel"] * np.sqrt(2.0)
    return x * jax.nn.sigmoid(np.float32(1.702) * x)


def softplus_gate(p: Params, x: Any) -> Any:
    rates = jax.nn.softplus(x @ p["gate"] + p["bias"])
    decay = jnp.exp(-0.2 * jnp.cumsum(rates, axis=1))
    return (x @ p["value"]) * decay


def fourier_mixing(p: Params, x: Any) -> Any:
    mixed = jnp.fft.fft2(x).real
    return x + mixed @ p["kernel"] / np.sqrt(x.shape[1] * x.shape[2])


def top_k_experts(p: Params, x: Any) -> Any:
    probabilities = jax.nn.softmax(x @ p["router"])
    gates, chosen = jax.lax.top_k(probabilities, 2)
    gates = gates / gates.sum(-1, keepdims=True)
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, p["up"]))
    outputs = jnp.einsum("btef,efd->bted", hidden, p["down"])
    outputs = jnp.take_along_axis(outputs, chosen[..., None], axis=2)
    return x + (outputs * gates[..., None]).sum(2)


def scanned_cell(p: Params, x: Any) -> Any:
    def step(h: Any, x_t: Any) -> Any:
        h = jnp.tanh(x_t @ p["input"] + h @ p["recurrent"] + p["bias"])
        return h, h

    _, hidden = jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return hidden.swapaxes(0, 1)


def contrastive(p: Params, x: Any) -> Any:
    a, b = jnp.split(x, 2)
    a, b = a @ p["left"], b @ p["right"]
    a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
    b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
    logits = a @ b.T * jnp.exp(p["temperature"])
    labels = jnp.arange(len(a))
    return -jnp.mean(jax.nn.log_softmax(logits)[labels, labels])


FIRST = (
    Snippet("RMSNorm", rms_norm, {"scale": SCALE}),
    Snippet("LayerNorm", layer_norm, {"scale": SCALE, "bias": BIAS}),
    Snippet("attention", attention, {"qkv": Param((WIDTH, 3 * WIDTH)), "out": SQUARE}),
    Snippet("rotary positions", rotary, {"q": SQUARE, "k": SQUARE}),
    Snippet("ALiBi", alibi, {"q": SQUARE, "k": SQUARE}),
    Snippet(
        "squeeze and excite",
        squeeze_excite,
        {
            "squeeze": Param((WIDTH, 8)),
            "squeeze_bias": Param((8,), 0.0, 0.2),
            "excite": Param((8, WIDTH)),
            "excite_bias": BIAS,
        },
        IMAGE,
    ),
    Snippet("learned positions", learned_positions, {"positions": Param((2 * TIME, WIDTH))}),
    Snippet("numpy scalars", numpy_scalars, {"kernel": SQUARE}),
    Snippet("softplus gate", softplus_gate, {"gate": SQUARE, "bias": BIAS, "value": SQUARE}),
    Snippet("Fourier mixing", fourier_mixing, {"kernel": SQUARE}),
    Snippet(
        "top-k experts",
        top_k_experts,
        {
            "router": Param((WIDTH, 4)),
            "up": Param((4, WIDTH, 32), 0.0, 0.25),
            "down": Param((4, 32, WIDTH), 0.0, 0.18),
        },
    ),
    Snippet("scanned cell", scanned_cell, {"input": SQUARE, "recurrent": SQUARE, "bias": BIAS}),
    Snippet(
        "contrastive head",
        contrastive,
        {"left": SQUARE, "right": SQUARE, "temperature": Param((), 2.0, 0.1)},
        ROWS,
        is_loss=True,
    ),
)

"""Activations that are broadcast: the sums of their cotangents are float32s, and nothing more is
saved for them.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import audit
from policy.autocasting import evaluator
from policy.autocasting.transform import autocast
from tests.programs import named, operations

BF16 = "mixed_bfloat16"
T, D = 2048, 4
RNG = np.random.default_rng(0)


def positive(*shape: int) -> Any:
    return jnp.asarray(RNG.uniform(0.5, 1.5, size=shape), jnp.float32)


P = {"gate": positive(D, D), "shift": positive(D, D), "w": positive(D, D)}
COND, X = positive(2, D), positive(2, T, D)


def film(p: Any, cond: Any, x: Any) -> Any:
    return (x @ p["w"]) * (1 + (cond @ p["gate"])[:, None]) + (cond @ p["shift"])[:, None]


def adaptive_norm(p: Any, cond: Any, x: Any) -> Any:
    h = nn.LayerNorm(use_scale=False, use_bias=False).apply({}, x @ p["w"])
    return h * (1 + (cond @ p["gate"])[:, None]) + (cond @ p["shift"])[:, None]


def squeeze_and_excite(p: Any, cond: Any, x: Any) -> Any:
    h = x @ p["w"]
    return h * jax.nn.sigmoid(jnp.mean(h, 1) @ p["gate"])[:, None] + 0 * cond[:, None]


def divided(p: Any, cond: Any, x: Any) -> Any:
    return (x @ p["w"]) / (1 + (cond @ p["gate"])[:, None])


def explicitly(p: Any, cond: Any, x: Any) -> Any:
    gate, shift = (
        jnp.broadcast_to((cond @ p[name])[:, None], x.shape) for name in ("gate", "shift")
    )
    return (x @ p["w"]) * gate + shift


def tiled(p: Any, cond: Any, x: Any) -> Any:
    return (x @ p["w"]) * jnp.tile((cond @ p["gate"])[:, None], (1, T, 1))


def position_biases(p: Any, cond: Any, x: Any) -> Any:
    buckets = jnp.minimum(jnp.abs(jnp.arange(8)[:, None] - jnp.arange(8)[None]), D - 1)
    bias = (p["gate"] @ p["shift"])[buckets].transpose(2, 0, 1)  # (heads, 8, 8), of an activation
    logits = (x @ p["w"]).reshape(-1, D, 8)[:, :, :, None] * cond[0, 0] + bias[None]
    return jax.nn.softmax(logits)


def largest(p: Any, cond: Any, x: Any) -> Any:
    return jnp.maximum(x @ p["w"], (cond @ p["gate"])[:, None])


MODELS = {
    fn.__name__: fn
    for fn in (
        film,
        adaptive_norm,
        squeeze_and_excite,
        divided,
        explicitly,
        tiled,
        position_biases,
        largest,
    )
}
EACH = pytest.mark.parametrize("name", MODELS)


def loss_of(name: str) -> Any:
    return lambda p, cond, x: jnp.sum(MODELS[name](p, cond, x)) / T


@EACH
def test_the_sums_of_the_backward_pass_are_float32s(name):
    for fn in (
        jax.grad(autocast(loss_of(name), BF16, params=0)),
        autocast(jax.grad(loss_of(name)), BF16, params=0),
    ):
        sums = [
            op
            for op in named(operations(fn, P, COND, X), "reduce_sum", "scatter-add")
            if op.terms != 1
        ]
        assert {dtype for op in sums for dtype in op.inputs if dtype not in ("int32", "")} == {
            "float32"
        }


@EACH
def test_an_audit_finds_no_sum_in_half(name):
    report = audit(autocast(loss_of(name), BF16, params=0), P, COND, X, backward=True)
    assert [
        finding for finding in report.findings if "reduc" in finding.kind or "sum" in finding.kind
    ] == []


def error(found: Any, truth: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    return max(
        float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
        for a, b in pairs
        if np.any(b)
    )


@pytest.mark.parametrize("name", ["film", "divided", "explicitly", "tiled"])
def test_gradients_are_near_those_of_float64(name):
    """Those of the matmul's own weight are left out: XLA:CPU adds up in half there."""
    with jax.enable_x64(True):
        double = [
            jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), tree)
            for tree in (P, COND, X)
        ]
        truth = jax.tree.map(np.asarray, jax.grad(loss_of(name), (0, 1))(*double))
    found = jax.grad(autocast(loss_of(name), BF16, params=0), (0, 1))(P, COND, X)
    assert error(
        {**found[0], "w": 0.0, "cond": found[1]}, {**truth[0], "w": 0.0, "cond": truth[1]}
    ) < (6.5e-3 if name == "divided" else 3e-3)


def saved_bytes(name: str) -> int:
    """Returns the bytes of the residuals that are no arguments."""
    cast = autocast(MODELS[name], BF16, params=0)
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(lambda *args: jnp.sum(cast(*args)), *args)[1])(
        P, COND, X
    ).jaxpr
    kept = {id(v): v.aval for v in jaxpr.outvars if not any(v is invar for invar in jaxpr.invars)}
    return sum(int(aval.size) * aval.dtype.itemsize for aval in kept.values())


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broadcasts half values as they are, so that their cotangents are summed in half."""
    for name in ("is_broadcast", "sums_cotangents"):
        monkeypatch.setattr(evaluator, name, lambda *_: False)


@EACH
def test_no_more_is_saved_than_where_the_sums_are_half(name, monkeypatch):
    found = saved_bytes(name)
    narrow(monkeypatch)
    assert 0 < found <= saved_bytes(name)


@EACH
def test_the_numbers_forward_stay_the_same(name, monkeypatch):
    found = autocast(MODELS[name], BF16, params=0)(
        P, COND, X[:, :16] if name not in ("tiled",) else X
    )
    narrow(monkeypatch)
    again = autocast(lambda *args: MODELS[name](*args), BF16, params=0)
    np.testing.assert_array_equal(found, again(P, COND, X[:, :16] if name not in ("tiled",) else X))


@pytest.mark.parametrize("name", ["film", "divided"])
def test_tangents_are_those_of_float32_and_a_map_changes_nothing(name):
    fn, wide = autocast(MODELS[name], BF16, params=0), MODELS[name]
    args = (P, COND, X[:, :16])
    tangents = jax.tree.map(jnp.ones_like, args)
    found, true = (jax.jvp(f, args, tangents)[1] for f in (fn, wide))
    assert error(found, np.asarray(true)) < 5e-2
    mapped = jax.vmap(fn, (None, 0, 0))(P, COND[:, None], X[:, None, :16])
    np.testing.assert_array_equal(mapped[:, 0], fn(*args))


def test_a_small_array_that_is_not_differentiated_has_no_tangent():
    fn = autocast(
        lambda p, x, c: (x @ p) * jax.lax.stop_gradient(c @ p)[:, None] / (c @ p)[:, None], BF16
    )
    for i in range(3):
        gradient = jax.grad(lambda *args: jnp.sum(fn(*args)), i)(P["w"], X[:, :16], COND)
        assert np.all(np.isfinite(gradient))

"""State in half precision that one call hands to the next."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import policy
from policy import audit
from policy.inspect.audit.finding_kinds import CARRY
from tests.policy.inspect.audit.faults import scoped
from tests.policy.inspect.audit.state_faults import (
    BF16,
    F16,
    F32,
    STATE_FAULTS,
    STATE_PLACES,
    W,
    X,
    gradients,
    shape,
    step_of,
)

PLANTED = [(fault, place) for fault in STATE_FAULTS for place in STATE_PLACES]


def sums_of(report: Any) -> dict[str, str]:
    """Returns the primitives of the findings about states, by the key paths in their messages."""
    found = [f for f in report.findings if f.kind == CARRY]
    return {f.message.partition(",")[0]: f.primitive for f in found}


@pytest.mark.parametrize(
    ("fault", "place"), PLANTED, ids=[f"{fault}, in {place}" for fault, place in PLANTED]
)
def test_what_a_call_adds_to_its_state_is_found(fault, place):
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it
        report = audit(
            STATE_PLACES[place](functools.wraps(fault.run)(scoped(fault.run))), *fault.args
        )
    assert sums_of(report) == fault.found, str(report)
    assert {f.path for f in report.findings if f.kind == CARRY} == {"inner"}


# --------------------------------------------------------------------------------------------------
# What is no sum in half
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", (None, "bfloat16"))
@pytest.mark.parametrize("mode", ("remainder", "kahan", "stochastic", "full", "auto"))
def test_parameters_and_moments_of_mixed_precision_are_no_finding(mode, moments):
    dtype = F16 if mode == "auto" else BF16
    options: Any = {"loss_scale": 1.0, "master_weights": mode, "moment_dtype": moments}
    options |= {"key": jax.random.key(0)} if mode == "stochastic" else {}
    tx = policy.mixed_precision(optax.adam(1e-3), jnp.dtype(dtype).name, **options)
    params = {"w": shape(4, 4, dtype=dtype)}
    state = jax.eval_shape(tx.init, params)

    def applied(params, state, x):
        grads = {"w": gradients(params, x)["w"]}
        params, state, _ = policy.apply_gradients(tx, params, state, grads)
        return params, state

    for step in (applied, step_of(tx)):
        with jax.numpy_dtype_promotion("standard"):  # Optax adds float32 updates to half params
            report = audit(step, params, state, shape(4, 4, dtype=dtype))
        assert not sums_of(report), str(report)


def residual(state: Any, x: Any) -> Any:
    return {**state, "x": state["x"] + jnp.tanh(state["x"] @ state["w"])}


def gated(state: Any, x: Any) -> Any:
    gate = jax.nn.sigmoid(x @ state["w"] + state["h"])
    return {**state, "h": (1 - gate) * jnp.tanh(x @ state["w"] + state["h"]) + gate * state["h"]}


def cached(state: Any, x: Any) -> Any:
    return {
        **state,
        "keys": jax.lax.dynamic_update_slice(state["keys"], x[:1] @ state["w"], (state["at"], 0)),
    }


def compensated(state: Any, x: Any) -> Any:
    term = x - state["lost"]
    total = state["total"] + term
    return {"total": total, "lost": (total - state["total"]) - term}


def normalised(state: Any, x: Any) -> Any:
    wide = state["x"].astype(F32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    return {"x": (normal * x.astype(F32) + x.astype(F32)).astype(BF16)}


CLEAN: dict[str, tuple[Any, ...]] = {
    "a residual block": (lambda x, w: x + jnp.tanh(x @ w), X, X),
    "a residual block of a mean": (
        lambda state: {**state, "x": state["x"] + (state["x"].mean(0, keepdims=True) @ state["w"])},
        {"x": X, **W},
    ),
    "a gated unit": (gated, {"h": X, **W}, X),
    "a cache of keys": (cached, {"keys": X, "at": shape(dtype=jnp.int32), **W}, X),
    "a compensated sum": (compensated, {"total": X, "lost": X}, X),
    "an average in float32": (
        lambda ema, p: jax.tree.map(lambda ema, p: ema * 0.99 + p.astype(F32) * 0.01, ema, p),
        {"w": shape(4, 4, dtype=F32)},
        W,
    ),
    "a largest number": (lambda state, x: {"most": jnp.maximum(state["most"], x)}, {"most": X}, X),
    "decay alone": (lambda state, x: {"w": state["w"] * 0.99}, W, X),
    "an image that is standardised": (
        lambda batch: {"x": batch["x"] - batch["x"].mean()},
        {"x": X},
    ),
    "an image with noise": (
        lambda batch, key: {"x": batch["x"] + jax.random.normal(key, (4, 4), BF16)},
        {"x": X},
        jax.eval_shape(lambda: jax.random.key(0)),
    ),
    "a normalisation": (normalised, {"x": X}, X),
    "gradients with weight decay": (
        lambda params, x: jax.tree.map(lambda g, p: g + 0.01 * p, gradients(params, x), params),
        W,
        X,
    ),
    "what is returned as it came": (lambda state, x: (state, x + 1), W, X),
    "indices into a tuple that is no state": (lambda pair, x: (pair[0] + x,), (X, X), X),
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_comes_back_without_a_sum_in_half_is_no_finding(name):
    fn, *args = CLEAN[name]
    assert not sums_of(audit(fn, *args)), str(audit(fn, *args))


def test_the_updates_of_an_optimizer_are_no_state_but_its_moments_are():
    tx = optax.chain(optax.add_decayed_weights(0.5), optax.trace(0.9), optax.scale(-0.1))
    found = sums_of(audit(tx.update, W, jax.eval_shape(tx.init, W), W))
    assert found == {"state[1].trace['w']": "add"}


def test_state_is_found_by_keywords_and_under_names_of_its_own():
    average = lambda ema, p: jax.tree.map(lambda ema, p: ema * 0.9 + p * 0.1, ema, p)  # noqa: E731
    assert sums_of(audit(lambda *, ema, p: average(ema, p), ema=W, p=W)) == {"ema['w']": "add"}
    assert sums_of(audit(lambda ema, p: ({"ema": average(ema, p)}, p["w"].max()), W, W)) == {
        "ema['w']": "add"
    }
    assert sums_of(audit(lambda p, ema: (p, average(ema, p)), W, W)) == {"ema['w']": "add"}
    assert not sums_of(audit(lambda ema, p: average(ema, p), X, X))  # bare arrays have no key path


def test_layers_in_a_list_are_one_state_with_what_a_step_returns_as_a_list():
    def step(layers, x):
        grads = jax.grad(
            lambda layers: sum(jnp.tanh(x @ w + b[None]).astype(F32).mean() for w, b in layers)
        )(layers)
        return [
            [p - 0.1 * g for p, g in zip(layer, grad, strict=True)]
            for layer, grad in zip(layers, grads, strict=True)
        ]

    layers = [(shape(4, 4), shape(4)), (shape(4, 4), shape(4))]
    (finding,) = [f for f in audit(step, layers, X).findings if f.kind == CARRY]
    assert finding.message.startswith(
        "layers[0][0], bfloat16[4,4] and 3 more: each call adds to it"
    )

"""Wrong input is refused where it is given, by name, value and way out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from policy import DtypePolicyWarning, full_precision, mixed_precision
from policy.autocasting.transform import autocast
from policy.programs.primitives import CATEGORY_OF
from tests.policy.autocasting.models import BF16, SQUARE, normal

W, X = SQUARE, normal(4, 8)


def layer(params: Any, x: Any) -> Any:
    with jax.named_scope("Net"), jax.named_scope("layer"):
        return jnp.tanh(x @ params)


def given(policy: Any = BF16, **options: Any) -> Any:
    return lambda: autocast(layer, policy, **options)


def called(**options: Any) -> Any:
    return lambda: autocast(layer, BF16, **options)(W, X)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no function": (lambda: autocast(3, BF16), TypeError, "autocast takes a function, but got 3"),
    "an island of none": (lambda: full_precision(3), TypeError, "full_precision takes a function"),  # type: ignore[arg-type]
    "a policy of integers": (given("int8"), ValueError, "int8"),
    "a primitive that is none": (
        given(allow=["tanh", "dot_generl"]),
        ValueError,
        r"allow names 'dot_generl'.*Nearest: dot_general",
    ),
    "a string of primitives": (given(deny="tanh"), TypeError, "deny should be a collection of"),
    "a primitive given twice": (given(allow=["tanh"], deny=["tanh"]), ValueError, "more than one"),
    "rules that match nothing": (
        called(rules={"layer": "f32", "leyer": "f32", "nothing/.*": "f32"}),
        ValueError,
        r"Rules 'leyer', 'nothing/\.\*' matched no module\. Modules seen: layer\.",
    ),
    "a preset": (given(preset="fast"), ValueError, "preset should be 'memory' or 'conservative'"),
    "a name of params": (called(params="weights"), ValueError, "the function takes params, x"),
    "a position of params": (called(params=(0, 2)), ValueError, "called with 2 positional"),
    "params of another kind": (given(params=3.5), TypeError, "params should be"),
    "a path that matches nothing": (called(normalises=("elsewhere",)), ValueError, "'elsewhere'"),
    "paths that are none": (given(normalises="layer"), TypeError, "a collection of module paths"),
    "a result that is no array": (
        lambda: autocast(lambda x: {"h": x, "name": "h"}, BF16)(X),
        TypeError,
        "not a valid JAX type",
    ),
    "a mistake in the function": (
        lambda: autocast(layer, BF16)(W[:3], X),
        TypeError,
        "dot_general",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_input_is_refused(name):
    call, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("params", [-2, "params", ["params"], (0,)])
def test_params_are_named_by_position_or_name(params):
    assert autocast(layer, BF16, params=params)(W, X).shape == (4, 8)
    assert autocast(layer, BF16, params="params")(params=W, x=X).shape == (4, 8)


def test_an_unknown_primitive_is_opaque_or_refused(monkeypatch):
    monkeypatch.delitem(CATEGORY_OF, "tanh")
    assert autocast(layer, BF16)(W, X).dtype == jnp.float32
    with pytest.raises(
        NotImplementedError, match=r"no category for the primitive 'tanh'.*opaque=, allow= or deny="
    ):
        autocast(layer, BF16, on_unknown="raise")(W, X)
    ruled = jax.custom_vjp(jnp.sin)
    ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.tanh(x),))
    inside = autocast(lambda w, x: ruled(x @ w).sum(), BF16, on_unknown="raise")
    assert inside(W, X).shape == ()
    with pytest.raises(NotImplementedError, match="no category for the primitive 'tanh'"):
        jax.grad(inside)(W, X)


@pytest.mark.parametrize(
    "tx", [optax.sgd(0.1, 0.9), mixed_precision(optax.sgd(0.1), "float32")], ids=["optax", "ours"]
)
def test_an_optimizer_inside_is_pointed_out(tx):
    def step(params, state, x):
        grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with pytest.warns(
        DtypePolicyWarning, match=r"takes an optimizer state \(\w+State.*to the loss function"
    ):
        autocast(step, BF16)(W, tx.init(W), X)

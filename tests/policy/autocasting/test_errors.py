"""Wrong input is refused where it is given, by name, value and way out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from policy import DtypePolicyWarning, full_precision, mixed_precision, use_policy
from policy.autocasting.transform import autocast
from policy.programs.primitives import CATEGORY_OF
from tests.policy.autocasting.models import SQUARE, normal

BF16 = "mixed_bfloat16"
W, X = SQUARE, normal(4, 8)


def layer(params: Any, x: Any) -> Any:
    with jax.named_scope("Net"), jax.named_scope("layer"):
        return jnp.tanh(x @ params)


@pytest.mark.parametrize("options", [{}, {"enabled": False}])
def test_what_is_no_function_is_refused(options):
    with pytest.raises(TypeError, match=r"autocast takes a function, but got 3 of type int\."):
        autocast(3, BF16, **options)
    with pytest.raises(
        TypeError, match=r"autocast takes a function, but got None of type NoneType\."
    ):
        autocast(BF16, **options)(None)
    with pytest.raises(
        TypeError, match=r"full_precision takes a function, but got 3 of type int\."
    ):
        full_precision(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["int8", "complex64", "p=f32,c=int32"])
def test_a_compute_dtype_that_is_not_floating_is_refused(dtype):
    with pytest.raises(ValueError, match=r"int8|complex64|int32"):
        autocast(layer, dtype)


def test_float64_is_refused_where_it_is_not_available():
    with pytest.raises(ValueError, match="float64"):
        autocast(layer, "float64")(W, X)


@pytest.mark.parametrize("what", ["allow", "deny", "opaque"])
def test_an_unknown_primitive_is_refused_with_the_nearest(what):
    def given(names: Any) -> Any:
        options: dict[str, Any] = {what: names}
        return autocast(layer, BF16, **options)

    with pytest.raises(ValueError, match=rf"{what} names 'dot_generl'.*Nearest: dot_general"):
        given(["tanh", "dot_generl"])
    with pytest.raises(ValueError, match=rf"{what} names 'qqqqqq'.*Nearest: none\."):
        given({"qqqqqq"})
    with pytest.raises(
        TypeError, match=rf"{what} should be a collection of primitive names, such as \('tanh',\)"
    ):
        given("tanh")
    with pytest.raises(TypeError, match=rf"{what} should hold names of primitives, but got 3"):
        given([3])


def test_a_rule_that_matches_nothing_is_refused_with_the_paths_there_are():
    fn = autocast(layer, BF16, rules={"layer": "f32", "leyer": "f32", "nothing/.*": "f32"})
    with pytest.raises(
        ValueError, match=r"Rules 'leyer', 'nothing/\.\*' matched no module\. Modules seen: layer\."
    ):
        fn(W, X)
    with pytest.raises(ValueError, match="no module"):
        jax.grad(lambda w: fn(w, X).sum())(W)


@pytest.mark.parametrize("rules", ["layer", 3, [("layer",)], [(3, "f32")]])
def test_rules_that_are_none_are_refused(rules):
    with pytest.raises(TypeError, match="rule"):
        autocast(layer, BF16, rules=rules)


def test_an_unknown_preset_or_way_with_unknown_primitives_is_refused():
    with pytest.raises(
        ValueError, match="preset should be 'memory' or 'conservative', but got 'fast'"
    ):
        autocast(layer, BF16, preset="fast")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="on_unknown should be 'opaque' or 'raise', but got 'warn'"
    ):
        autocast(layer, BF16, on_unknown="warn")  # type: ignore[arg-type]


def test_params_that_are_no_argument_are_refused():
    with pytest.raises(
        ValueError, match="params names the argument 'weights', but the function takes params, x"
    ):
        autocast(layer, BF16, params="weights")(W, X)
    with pytest.raises(
        ValueError, match="params names argument 2, but the function was called with 2 positional"
    ):
        autocast(layer, BF16, params=(0, 2))(W, X)


@pytest.mark.parametrize("params", [-2, "params", ["params"], (0,)])
def test_params_are_named_by_position_or_name(params):
    assert autocast(layer, BF16, params=params)(W, X).shape == (4, 8)
    assert autocast(layer, BF16, params="params")(params=W, x=X).shape == (4, 8)


@pytest.mark.parametrize("params", [3.5, [3.5], b"w", True])
def test_params_of_another_kind_are_refused(params):
    with pytest.raises(TypeError, match="params should be"):
        autocast(layer, BF16, params=params)


def test_an_unknown_primitive_is_opaque_or_refused(monkeypatch):
    monkeypatch.delitem(CATEGORY_OF, "tanh")
    assert autocast(layer, BF16)(W, X).dtype == jnp.float32
    strict = autocast(layer, BF16, on_unknown="raise")
    with pytest.raises(
        NotImplementedError, match=r"no category for the primitive 'tanh'.*opaque=, allow= or deny="
    ):
        strict(W, X)
    ruled = jax.custom_vjp(jnp.sin)
    ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.tanh(x),))
    inside = autocast(lambda w, x: ruled(x @ w).sum(), BF16, on_unknown="raise")
    assert inside(W, X).shape == ()
    with pytest.raises(NotImplementedError, match="no category for the primitive 'tanh'"):
        jax.grad(inside)(W, X)
    # What is given by name needs no category.
    monkeypatch.setitem(CATEGORY_OF, "tanh", "passthrough")
    named = autocast(layer, BF16, on_unknown="raise", opaque=["tanh"])
    monkeypatch.delitem(CATEGORY_OF, "tanh")
    assert named(W, X).shape == (4, 8)


def test_a_result_that_is_no_array_is_refused_by_name():
    with pytest.raises(TypeError, match="not a valid JAX type"):
        autocast(lambda x: {"h": x, "name": "h"}, BF16)(X)


def test_a_mistake_in_the_function_is_told_as_ever():
    with use_policy(BF16), pytest.raises(TypeError, match="missing 1 required positional argument"):
        autocast(layer)(W)
    with pytest.raises(TypeError, match="dot_general"):
        autocast(lambda w, x: x @ w, BF16)(W[:3], X)


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

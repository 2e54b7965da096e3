"""Caches and carries keep the dtypes in which they came: by what the code does, or keep_outputs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from mpmodules import nnx
from policy import audit

BF16, F32 = jnp.bfloat16, jnp.float32
MIXED = "mixed_bfloat16"
X, W, STATE = jnp.ones((2, 4)), jnp.ones((4, 4)), jnp.zeros((2, 4), BF16)


def model_of(call: Any, api: str, **attributes: Any) -> Any:
    """Returns a model of an API as a function of its inputs; `call` gets them with a weight."""

    def linen_call(self: Any, *args: Any) -> Any:
        return call(self.param("w", lambda _: W), *args)

    if api == "linen":
        cls: Any = type("Net", (nn.Module,), {"__call__": nn.compact(linen_call), **attributes})
        net = cls(dtype_policy=MIXED)
        return lambda *args: net.apply({"params": {"w": W}}, *args)

    def start(self: Any) -> None:
        self.w = nnx.Param(W)

    members = {"__init__": start, "__call__": lambda self, *args: call(self.w[...], *args)}
    made: Any = type("Net", (nnx.Module,), members | attributes)
    return made(dtype_policy=MIXED)


def written(w: Any, x: Any, cache: Any) -> Any:
    return x @ w, cache.at[0].set((x @ w)[0].astype(cache.dtype))


def looped(w: Any, x: Any, carry: Any) -> Any:
    carry, y = jax.lax.scan(lambda c, _: ((c + x @ w).astype(c.dtype), c), carry, None, length=2)
    return y, carry


def computed(w: Any, x: Any, carry: Any) -> Any:
    return x @ w, jnp.tanh(carry + x @ w)


APIS = pytest.mark.parametrize("api", ["linen", "nnx"])


@APIS
@pytest.mark.parametrize("state", [BF16, F32, jnp.float16])
@pytest.mark.parametrize("call", [written, looped])
def test_state_comes_back_in_the_dtype_in_which_it_came(api, call, state):
    model = model_of(call, api)
    for run in (model, jax.jit(model) if api == "linen" else nnx.jit(model), model):
        y, kept = run(X, STATE.astype(state))
        assert (y.dtype, kept.dtype) == (F32, state)


@APIS
def test_the_first_input_that_a_loop_carries_is_no_state(api):
    def layers(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=2)[0]

    assert model_of(layers, api)(X.astype(BF16)).dtype == F32
    assert model_of(lambda w, x: x, api)(X.astype(BF16)).dtype == F32


@APIS
def test_outputs_in_keep_outputs_have_the_dtypes_of_their_arguments(api):
    assert model_of(computed, api)(X, STATE)[1].dtype == F32

    class Linen(nn.Module):
        keep_outputs = {1: "carry"}  # noqa: RUF012

        @nn.compact
        def __call__(self, x: Any, carry: Any) -> Any:
            return computed(self.param("w", lambda _: W), x, carry["h"])[0], {"h": x + carry["h"]}

    class Nnx(nnx.Module):
        keep_outputs = {"carry": "carry"}  # noqa: RUF012

        def __call__(self, x: Any, carry: Any) -> Any:
            return {"y": x, "carry": {"h": x + carry["h"]}}

    carry = {"h": STATE}
    if api == "linen":
        net: Any = Linen(dtype_policy=MIXED)
        y, kept = net.apply({"params": {"w": W}}, X, carry=carry)
    else:
        found = Nnx(dtype_policy=MIXED)(X, carry)
        y, kept = found["y"], found["carry"]
    assert (y.dtype, kept["h"].dtype) == (F32, BF16)


@APIS
@pytest.mark.parametrize(
    ("keep", "error", "words"),
    [
        ("carry", TypeError, "keep_outputs = {1: 'cache'}"),
        ({1: 2}, TypeError, "keep_outputs = {1: 'cache'}"),
        ({1: "cary"}, ValueError, "keep_outputs names 'cary'"),
        ({0: "carry"}, TypeError, "structures differ"),
    ],
)
def test_keep_outputs_that_can_not_hold_is_rejected(api, keep, error, words):
    def call(self: Any, x: Any, carry: Any) -> Any:
        return x, carry

    base: Any = nn.Module if api == "linen" else nnx.Module
    cls: Any = type("Net", (base,), {"__call__": call, "keep_outputs": keep})
    with pytest.raises(error, match=words):
        net = cls(dtype_policy=MIXED)
        run = net if api == "nnx" else lambda *args: net.apply({}, *args)
        run(X, {"h": STATE})


@APIS
def test_a_method_of_one_output_has_none_to_keep(api):
    def call(self: Any, x: Any, carry: Any) -> Any:
        return x + carry["h"]

    base: Any = nn.Module if api == "linen" else nnx.Module
    net = type("Net", (base,), {"__call__": call, "keep_outputs": {1: "carry"}})(dtype_policy=MIXED)
    run = net if api == "nnx" else lambda *args: net.apply({}, *args)
    assert run(jnp.ones(()), {"h": jnp.ones((), BF16)}).dtype == F32


@APIS
def test_own_code_that_is_no_option_is_rejected(api):
    base: Any = nn.Module if api == "linen" else nnx.Module
    cls: Any = type("Net", (base,), {"__call__": lambda self, x: x, "own_code": "kep"})
    with pytest.raises(ValueError, match="own_code should be 'autocast', 'keep' or None"):
        cls(dtype_policy=MIXED)


@APIS
def test_an_unrounded_result_has_no_finding(api):
    def call(w: Any, x: Any) -> Any:
        return jnp.dot(jnp.tanh(x @ w), w, preferred_element_type=jnp.float32)

    model = model_of(call, api)
    assert model(X).dtype == F32
    assert not audit(model, X, backward=True).findings

"""The leaves that gradients are taken by: the same in audit, compare, suggest and the assertions,
and no statistics.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import mpmodules
from policy import audit, compare, suggest
from policy.inspect.traced.call import Call, traced_call
from policy.testing import assert_dots_in, assert_no_silent_promotion, assert_reductions_in

assert mpmodules  # names the modules of nnx
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
LAYERS = {"dense/kernel", "dense/bias", "norm/scale", "norm/bias"}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=True, name="norm")(nn.Dense(5, name="dense")(x))


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        self.dense = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(5, use_running_average=True, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.norm(self.dense(x))


def _square(y: Any) -> Any:
    return jnp.mean(jnp.square(y))


def _of_linen() -> tuple[Any, ...]:
    net = LinenNet()
    return lambda variables, x: _square(net.apply(variables, x)), net.init(jax.random.key(0), X), X


def _of_linen_apart() -> tuple[Any, ...]:
    fn, variables, x = _of_linen()
    apart = lambda params, stats, x: fn({"params": params, "batch_stats": stats}, x)  # noqa: E731
    return apart, variables["params"], variables["batch_stats"], x


def _of_nnx() -> tuple[Any, ...]:
    return lambda net, x: _square(net(x)), NnxNet(), X


def _of_nnx_state() -> tuple[Any, ...]:
    graph, state = nnx.split(NnxNet())
    return lambda state, x: _square(nnx.merge(graph, state, copy=True)(x)), state, X


def _of_nnx_apart() -> tuple[Any, ...]:
    graph, *states = nnx.split(NnxNet(), nnx.Param, ...)
    fn = lambda params, rest, x: _square(nnx.merge(graph, params, rest, copy=True)(x))  # noqa: E731
    return fn, *states, X


WAYS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "linen variables": _of_linen,
    "linen collections apart": _of_linen_apart,
    "nnx module": _of_nnx,
    "nnx state": _of_nnx_state,
    "nnx params and rest": _of_nnx_apart,
}


def _gradients_of_audit(fn: Any, args: Any, params: Any = None) -> list[tuple[int, ...]]:
    """Returns the shapes of the gradients in the program that an audit and the assertions read."""
    traced, _ = traced_call(fn, tuple(args), {}, True, params)
    gradients = traced.jaxpr.out_avals[len(jax.tree.leaves(traced.shape)) :]
    return sorted(aval.shape for aval in gradients)


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("way", WAYS)
def test_no_tool_takes_gradients_by_running_statistics(way):
    fn, *args = WAYS[way]()
    comparison = compare(fn, *args, policy="mixed_bfloat16", backward=True)
    paths = (row.path.removeprefix("params/") for row in comparison.parameters)
    assert {path.removesuffix("/value") for path in paths} == LAYERS
    call = Call.measured("suggest", fn, tuple(args), {}, None, 1.0)
    taken = sorted(call.arguments.arrays[i].shape for i in call.differentiated())
    assert taken == _gradients_of_audit(fn, args) == [(3, 5), (5,), (5,), (5,)]


@pytest.mark.slow
def test_params_names_the_arguments_that_gradients_are_taken_by():
    fn, args = (lambda w, b, x: _square(x @ w + b)), (jnp.ones((3, 5)), jnp.ones(5), X)
    with jax.numpy_rank_promotion("allow"):
        for params, shapes in (
            (0, [(3, 5)]),
            ("b", [(5,)]),
            (("w", 1), [(3, 5), (5,)]),
            (None, [(3, 5), (4, 3), (5,)]),
            (lambda leaf: leaf.shape == (3, 5), [(3, 5)]),
        ):
            report = compare(fn, *args, policy="mixed_bfloat16", backward=True, params=params)
            assert len(report.parameters) == len(shapes)
            assert _gradients_of_audit(fn, args, params) == shapes


def test_suggest_and_the_assertions_take_the_same_keywords():
    def loss(w: Any, v: Any, x: Any) -> Any:
        with jax.named_scope("first"):
            x = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return jnp.sum(x.astype(jnp.float32) @ v)

    args = (jnp.ones((3, 5)), jnp.ones((5, 2)), X)
    by_w = suggest(loss, *args, error=1e-6, backward=True, params="w")
    assert by_w.of == "gradients" and by_w.paths == ("first",)
    half = (jnp.ones((3, 3), jnp.bfloat16),) * 2
    mixed = lambda w, x: jax.lax.dot(x, w, preferred_element_type=jnp.float32)  # noqa: E731
    assert_dots_in(lambda w, x: x @ w, half, "bf16", backward=True, params="w")
    with pytest.raises(AssertionError, match="1 operation should multiply bfloat16"):
        assert_dots_in(mixed, half, "bf16", backward=True, params="x")
    with pytest.raises(AssertionError, match="2 operations should multiply bfloat16"):
        assert_dots_in(mixed, half, "bf16", backward=True, params=("w", "x"))
    assert_reductions_in(lambda w, x: jnp.sum(x * w), (X, X), "f32", backward=True, params=0)
    assert_no_silent_promotion(lambda w, x: x @ w, half, backward=True, params="w")


def test_params_that_say_nothing_are_rejected():
    with pytest.raises(ValueError, match=r"params=0 selects .* so it needs backward=True"):
        audit(jnp.sum, X, params=0)
    with pytest.raises(TypeError, match=r"but got a dict\. If the function has an argument"):
        audit(jnp.sum, X, params={"w": X}, backward=True)  # type: ignore[arg-type]


@pytest.mark.slow
def test_modules_hold_their_parameters_themselves():
    fn, net, x = _of_nnx()
    told = r"^params='net' names arguments, but here the parameters are held"
    for tool in (audit, compare):
        with pytest.raises(ValueError, match=told):
            tool(fn, net, x, backward=True, params="net")

"""State in half precision that modules of Flax's keep from call to call."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpmodules
from policy import audit
from policy.inspect.audit.finding_kinds import CARRY
from tests.policy.inspect.audit.state_faults import BF16, F32, X

assert mpmodules  # names the modules of nnx


class LinenInner(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        mean = self.variable("stats", "mean", lambda: jnp.zeros(4, BF16))
        found = x.mean(0)
        mean.value = mean.value * 0.9 + found * 0.1
        return x - found[None]


class LinenNet(nn.Module):
    wrap: Any = lambda cls: cls

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return self.wrap(LinenInner)(name="inner")(nn.Dense(4, dtype=BF16)(x))


LINEN: dict[str, Any] = {
    "apply": lambda model: lambda variables, x: model.apply(variables, x, mutable=["stats"]),
    "collections apart": lambda model: (
        lambda params, stats, x: model.apply(
            {"params": params, "stats": stats}, x, mutable=["stats"]
        )
    ),
    "the statistics beside a loss": lambda model: functools.partial(_loss_and_statistics, model),
    "all in one dictionary": lambda model: (
        lambda state, x: {
            "params": state["params"],
            "stats": model.apply(state, x, mutable=["stats"])[1]["stats"],
        }
    ),
}


def _loss_and_statistics(model: Any, params: Any, stats: Any, x: Any) -> Any:
    out, updated = model.apply({"params": params, "stats": stats}, x, mutable=["stats"])
    return out.astype(F32).sum(), updated["stats"]


@pytest.mark.parametrize("wrap", (lambda cls: cls, nn.remat, nn.jit), ids=("plain", "remat", "jit"))
@pytest.mark.parametrize("way", LINEN)
def test_running_statistics_of_linen_are_found(way, wrap):
    model = LinenNet(wrap)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    args = (
        (variables,)
        if way in ("apply", "all in one dictionary")
        else (variables["params"], variables["stats"])
    )
    report = audit(LINEN[way](model), *args, X, backward=way == "apply")
    assert {(f.kind, f.path, f.primitive) for f in report.findings if f.kind == CARRY} == {
        (CARRY, "inner", "add")
    }, str(report)


class NnxInner(nnx.Module):
    def __init__(self) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(4, BF16))

    def __call__(self, x: Any) -> Any:
        found = x.mean(0)
        self.mean[...] = self.mean[...] * 0.9 + found * 0.1
        return x - found[None]


class NnxNet(nnx.Module):
    def __init__(self) -> None:
        self.dense, self.inner = (
            nnx.Linear(4, 4, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0)),
            NnxInner(),
        )

    def __call__(self, x: Any) -> Any:
        return self.inner(self.dense(x))


def test_running_statistics_of_nnx_are_found():
    model = nnx.eval_shape(NnxNet)
    graph, state = nnx.split(model)

    def loss(model: Any, x: Any) -> Any:
        return model(x).astype(F32).sum()

    def of_state(state: Any, x: Any) -> Any:
        model = nnx.merge(graph, state)
        return loss(model, x), nnx.state(model, nnx.BatchStat)

    calls: list[tuple[Any, ...]] = [(model,), (nnx.jit(loss), model), (of_state, state)]
    for fn, *args in calls:
        report = audit(fn, *args, X, backward=fn is model)
        (found,) = [f for f in report.findings if f.kind == CARRY]
        assert (found.primitive, found.path) == ("add", "" if fn is of_state else "inner")
        assert "['inner']['mean']" in found.message


@pytest.mark.parametrize("jit", (lambda fn: fn, nnx.jit), ids=("plain", "jit"))
def test_a_step_of_nnx_optimizer_in_half_is_found_once_for_parameters_and_each_moment(jit):
    def step(model: Any, optimizer: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: jnp.tanh(model(x).astype(F32)).mean())(model)
        optimizer.update(model, grads)

    class Dense(nnx.Module):
        def __init__(self) -> None:
            self.dense = nnx.Linear(4, 4, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            return self.dense(x)

    model = nnx.eval_shape(Dense)
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(Dense(), optax.adam(1e-3), wrt=nnx.Param))
    with jax.numpy_dtype_promotion("standard"):
        report = audit(jit(step), model, optimizer, X)
    messages = [f.message for f in report.findings if f.kind == CARRY]
    assert len(messages) == 3 and all("and 1 more:" in message for message in messages), str(report)

"""State in half precision that one call hands to the next: how it is found, and whose it is."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpmodules
import policy
from policy import audit
from policy.inspect.audit.findings import CARRY
from tests.policy.inspect.audit.corpus.carries import PARAMS as W
from tests.policy.inspect.audit.corpus.carries import X, average, gradients, step_of
from tests.policy.inspect.audit.corpus.planting import BF16, F16, F32, shape

assert mpmodules  # names the modules of nnx


def carried(report: Any) -> list[Any]:
    return [finding for finding in report.findings if finding.kind == CARRY]


def sums_of(report: Any) -> dict[str, str]:
    return {f.message.partition(",")[0]: f.primitive for f in carried(report)}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("moments", (None, "bfloat16"))
@pytest.mark.parametrize("mode", ("remainder", "stochastic", "full", "auto"))
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
        assert not carried(report), str(report)


def test_the_updates_of_an_optimizer_are_no_state_but_its_moments_are():
    tx = optax.chain(optax.add_decayed_weights(0.5), optax.trace(0.9), optax.scale(-0.1))
    found = sums_of(audit(tx.update, W, jax.eval_shape(tx.init, W), W))
    assert found == {"state[1].trace['w']": "add"}


def test_state_is_found_by_keywords_and_under_names_of_its_own():
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (lambda *, ema, p: average(ema, p), (), {"ema": W, "p": W}),
        (lambda ema, p: ({"ema": average(ema, p)}, p["w"].max()), (W, W), {}),
        (lambda p, ema: (p, average(ema, p)), (W, W), {}),
    ]
    for fn, args, named in calls:
        assert sums_of(audit(fn, *args, **named)) == {"ema['w']": "add"}
    assert not carried(audit(average, X, X))  # bare arrays have no key path


def test_layers_in_a_list_are_one_state_with_what_a_step_returns_as_a_list():
    def step(layers, x):
        loss = lambda layers: sum(jnp.tanh(x @ w + b[None]).astype(F32).mean() for w, b in layers)  # noqa: E731
        lists = jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss)(layers))
        return [list(layer) for layer in lists]

    layers = [(shape(4, 4), shape(4)), (shape(4, 4), shape(4))]
    (finding,) = carried(audit(step, layers, X))
    told = "layers[0][0], bfloat16[4,4] and 3 more: each call adds to it"
    assert finding.message.startswith(told)


# --------------------------------------------------------------------------------------------------
# Flax's modules
# --------------------------------------------------------------------------------------------------


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


def _applied(model: Any, variables: Any, x: Any) -> Any:
    return model.apply(variables, x, mutable=["stats"])


def _beside_a_loss(model: Any, params: Any, stats: Any, x: Any) -> Any:
    out, updated = _applied(model, {"params": params, "stats": stats}, x)
    return out.astype(F32).sum(), updated["stats"]


def _in_one_dictionary(model: Any, state: Any, x: Any) -> Any:
    return {"params": state["params"], "stats": _applied(model, state, x)[1]["stats"]}


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("wrap", (lambda cls: cls, nn.remat, nn.jit), ids=("plain", "remat", "jit"))
@pytest.mark.parametrize("way", (_applied, _beside_a_loss, _in_one_dictionary))
def test_running_statistics_of_linen_are_found(way, wrap):
    model = LinenNet(wrap)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    is_apart = way is _beside_a_loss
    args = (variables["params"], variables["stats"]) if is_apart else (variables,)
    report = audit(functools.partial(way, model), *args, X, backward=way is _applied)
    assert {(f.path, f.primitive) for f in carried(report)} == {("inner", "add")}, str(report)


class NnxInner(nnx.Module):
    def __init__(self) -> None:
        self.mean = nnx.BatchStat(jnp.zeros(4, BF16))

    def __call__(self, x: Any) -> Any:
        found = x.mean(0)
        self.mean[...] = self.mean[...] * 0.9 + found * 0.1
        return x - found[None]


class NnxNet(nnx.Module):
    def __init__(self, inner: Any = NnxInner) -> None:
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(4, 4, dtype=BF16, param_dtype=BF16, rngs=rngs)
        self.inner = inner()

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
        (found,) = carried(audit(fn, *args, X, backward=fn is model))
        assert (found.primitive, found.path) == ("add", "" if fn is of_state else "inner")
        assert "['inner']['mean']" in found.message


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("jit", (lambda fn: fn, nnx.jit), ids=("plain", "jit"))
def test_a_step_of_nnx_optimizer_in_half_is_found_once_for_parameters_and_each_moment(jit):
    def step(model: Any, optimizer: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: jnp.tanh(model(x).astype(F32)).mean())(model)
        optimizer.update(model, grads)

    make = lambda: NnxNet(lambda: jnp.tanh)  # noqa: E731
    model = nnx.eval_shape(make)
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(make(), optax.adam(1e-3), wrt=nnx.Param))
    with jax.numpy_dtype_promotion("standard"):
        report = audit(jit(step), model, optimizer, X)
    messages = [finding.message for finding in carried(report)]
    assert len(messages) == 3 and all("and 1 more:" in message for message in messages), str(report)

"""NumPyro: networks in models, variational inference, and sampling, which stays as it is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.contrib.module import flax_module
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import log_density
from numpyro.optim import optax_to_numpyro

import policy
from mpmodules import linen, use_policy
from tests.frameworks.checks import assert_near, dtypes_of_matmuls

X = jax.random.normal(jax.random.key(0), (32, 4))
Y = jnp.sin(X[:, 0])


@pytest.fixture(autouse=True)
def promotion():
    """NUTS and its adaptation promote integers."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def net(weights: Any, x: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ weights["up"]) @ weights["down"])[:, 0]


def model_of(net: Callable[..., Any]) -> Callable[..., Any]:
    def model(x: jax.Array, y: jax.Array | None = None) -> None:
        normal = dist.Normal(0.0, 1.0)
        weights = {
            "up": numpyro.sample("up", normal.expand([4, 8]).to_event(2)),
            "down": numpyro.sample("down", normal.expand([8, 1]).to_event(2)),
        }
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.5))
        mean = net(weights, x)
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(mean, scale), obs=y)

    return model


HALF_NET = policy.autocast(net, "mixed_bfloat16")


def svi_of(model: Callable[..., Any], tx: Any) -> SVI:
    return SVI(model, AutoNormal(model), optax_to_numpyro(tx), Trace_ELBO())


@pytest.mark.slow
def test_variational_inference_learns_with_a_network_in_half():
    losses, tx = [], policy.mixed_precision(optax.adam(1e-2), "mixed_bfloat16")
    for network in (net, HALF_NET):
        svi = svi_of(model_of(network), tx)
        state = svi.init(jax.random.key(1), X, Y)
        dtypes = dtypes_of_matmuls(lambda state, svi=svi: svi.update(state, X, Y), state)
        assert dtypes == ({"float32"} if network is net else {"bfloat16"})
        found = svi.run(jax.random.key(1), 100, X, Y, progress_bar=False)
        assert {leaf.dtype for leaf in jax.tree.leaves(found.params)} == {jnp.dtype("float32")}
        losses.append(found.losses[-20:].mean())
    assert abs(losses[1] - losses[0]) < 0.01 * losses[0]
    assert losses[1] < 0.6 * found.losses[0]


@pytest.mark.slow
def test_a_whole_log_density_is_a_loss_for_autocast_and_a_loss_scale():
    model, tx = (
        model_of(net),
        policy.mixed_precision(optax.adam(3e-2), "mixed_float16", loss_scale="dynamic"),
    )
    params = {"up": jnp.ones((4, 8)) / 4, "down": jnp.ones((8, 1)) / 8, "scale": jnp.ones(())}
    params["up"] += 0.1 * jax.random.normal(jax.random.key(0), (4, 8))

    def loss_of(params: Any) -> Any:
        return -log_density(model, (X, Y), {}, params)[0] / len(X)

    half = policy.autocast(loss_of, "mixed_float16")
    assert dtypes_of_matmuls(jax.grad(half), params) == {"float16"}
    assert_near(jax.grad(half)(params), jax.grad(loss_of)(params), error=0.01)

    @jax.jit
    def step(params: Any, opt_state: Any) -> Any:
        scale = policy.loss_scale_of(opt_state)
        loss, grads = policy.value_and_grad(half, loss_scale=scale)(params)
        return *policy.apply_gradients(tx, params, opt_state, grads)[:2], loss

    opt_state, losses = tx.init(params), []
    for _ in range(30):
        params, opt_state, loss = step(params, opt_state)
        losses.append(loss)
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
def test_a_flax_network_in_a_model_follows_the_policy():
    def model(x: jax.Array, y: jax.Array) -> None:
        network = flax_module("net", linen.Dense(1), input_shape=(1, 4))
        numpyro.sample("y", dist.Normal(network(x)[:, 0], 1.0).to_event(1), obs=y)

    svi = SVI(model, lambda x, y: None, optax_to_numpyro(optax.adam(1e-2)), Trace_ELBO())
    for name, dtype in (("mixed_bfloat16", "bfloat16"), (None, "float32")):
        with use_policy(name):
            state = svi.init(jax.random.key(1), X, Y)
            assert dtypes_of_matmuls(lambda state: svi.update(state, X, Y), state) == {dtype}


def sampled(model: Callable[..., Any]) -> Any:
    mcmc = MCMC(NUTS(model), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(3), X, Y)
    return mcmc.get_samples()


@pytest.mark.slow
def test_sampling_obeys_no_scope_and_stays_float32():
    wanted = sampled(model_of(net))
    with use_policy("mixed_bfloat16"):
        found = sampled(model_of(net))
    assert_near(found, wanted, error=0.0)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}


def test_autocast_leaves_float64_as_it_is():
    with jax.enable_x64(True):
        weights = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 1))}
        assert dtypes_of_matmuls(HALF_NET, weights, X.astype(jnp.float64)) == {"float64"}


def test_autocast_runs_where_numpyro_keeps_no_list_of_handlers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("numpyro.primitives._PYRO_STACK")
    half = policy.autocast(lambda w, x: x @ w, "mixed_bfloat16")
    assert half(jnp.ones((4, 1)), X).dtype == jnp.float32


def test_a_model_with_sites_is_rejected_by_autocast():
    half = policy.autocast(model_of(net), "mixed_bfloat16")
    svi = svi_of(half, optax.adam(1e-2))
    for run in (lambda: svi.init(jax.random.key(0), X, Y), lambda: sampled(half)):
        with pytest.raises(TypeError, match=r"compiles model, .* 'up' in the first call alone"):
            run()
    assert numpyro.handlers.trace(numpyro.handlers.seed(model_of(net), 0)).get_trace(X)

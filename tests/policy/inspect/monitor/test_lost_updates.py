"""Updates that round away, beside the params before and after the step in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import policy
from tests.policy.inspect.monitor.test_monitor import rows_of

pytestmark = pytest.mark.filterwarnings("ignore:mixed_precision has no loss scale")
MODES = ("full", "remainder", "stochastic", "none", "auto")


@pytest.fixture(autouse=True)
def _promotion_of_optax():
    with jax.numpy_dtype_promotion("standard"):
        yield


def weights(dtype="bfloat16"):
    spread = jnp.exp(jnp.linspace(-8.0, 2.0, 64))
    return {"w": spread.astype(dtype).reshape(8, 8), "b": jnp.ones(8, dtype)}


def gradients_of(params, x):
    def loss_of(params):
        w, b = (params[name].astype(jnp.float32) for name in "wb")
        return jnp.sum((x @ w) ** 2) + jnp.sum(b[1:] ** 2)

    return jax.value_and_grad(loss_of)(params)


def lost_of(record):
    return {
        path: row["numbers"]["lost"]
        for (path, kind), row in rows_of(record).items()
        if kind == "update"
    }


def record_of(step, *args):
    result, snapshot = jax.jit(policy.monitor(step))(0, *args)
    return result, snapshot.record()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rate", [1e-3, 0.0])
def test_lost_updates_of_optax_are_those_that_change_no_param(dtype, rate):
    params, x, tx = weights(dtype), jnp.ones((4, 8)), optax.adam(rate)

    def step(params, state, x):
        loss, gradients = gradients_of(params, x)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss, updates

    (after, _, _, updates), record = record_of(step, params, tx.init(params), x)
    assert set(lost_of(record)) == {"w", "b"}
    for name, share in lost_of(record).items():
        is_lost = (np.asarray(updates[name]) != 0) & np.asarray(params[name] == after[name])
        assert share == np.mean(is_lost), name
    if dtype == "bfloat16" and rate:
        assert 0 < lost_of(record)["w"] < 1


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_is_stored_beside_params_loses_no_update(mode, dtype):
    if mode.startswith("remainder") and dtype == "float16":
        pytest.skip("remainders are of bfloat16")
    key = jax.random.key(0) if mode == "stochastic" else None
    tx = policy.mixed_precision(optax.adam(1e-4), dtype, master_weights=mode, key=key)
    params, x = weights(dtype), jnp.ones((4, 8))

    def step(params, state, x):
        loss, gradients = gradients_of(params, x)
        params, state, _ = policy.apply_gradients(tx, params, state, gradients)
        return params, state, loss

    _, record = record_of(step, params, tx.init(params), x)
    lost = lost_of(record)
    assert set(lost) == {"w", "b"}
    if mode == "none":
        assert lost["w"] > 0.2 and lost["b"] == 7 / 8  # the gradient of b[0] is 0
    else:
        assert lost == {"w": 0, "b": 0}


@pytest.mark.slow
def test_a_train_state_holds_params_beside_its_optimizer():
    params, x = weights(), jnp.ones((4, 8))
    state = TrainState.create(apply_fn=gradients_of, params=params, tx=optax.sgd(1e-4))

    def step(state, x):
        loss, gradients = state.apply_fn(state.params, x)
        return state.apply_gradients(grads=gradients), loss

    (after, _), record = record_of(step, state, x)
    lost = lost_of(record)
    assert set(lost) == {"params/w", "params/b"}
    _, gradients = gradients_of(params, x)
    for name, one in gradients.items():
        is_lost = np.asarray((one != 0) & (params[name] == after.params[name]))
        assert lost[f"params/{name}"] == np.mean(is_lost) > 0


@pytest.mark.slow
def test_a_skipped_step_has_no_updates():
    params, x = weights(), jnp.full((4, 8), jnp.inf)
    tx = policy.mixed_precision(optax.sgd(1e-4), "bfloat16", loss_scale="dynamic")

    def step(params, state, x):
        loss, gradients = gradients_of(params, x)
        params, state, _ = policy.apply_gradients(tx, params, state, gradients)
        return params, state, loss

    _, record = record_of(step, params, tx.init(params), x)
    assert record["skipped"] and record["loss_scale"] == 2.0**15
    assert lost_of(record) == {}
    assert record["first"]["entered"] == "x"


@pytest.mark.slow
def test_an_update_of_several_params_at_once_and_of_a_scan_over_steps():
    params, x = weights(), jnp.ones((4, 8))

    def step(params, x):
        _, gradients = gradients_of(params, x)
        return jax.tree.map(lambda p, g: p - jnp.bfloat16(1e-4) * g, params, gradients)

    @jax.jit
    def run(params):
        monitored = policy.monitor(step, every=1)
        return jax.lax.scan(lambda p, i: monitored(i, p, x), params, jnp.arange(3))[1]

    for record in run(params).records():
        _, gradients = gradients_of(params, x)
        after = step(params, x)
        for name, share in lost_of(record).items():
            is_lost = np.asarray((gradients[name] != 0) & (params[name] == after[name]))
            assert share == np.mean(is_lost)
        params = after

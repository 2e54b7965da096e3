"""`state_shardings`: leaves lie where their params lie, on an abstract mesh; and eight devices."""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from policy import state_shardings
from tests.eight_devices import run_tests_on_eight_devices
from tests.policy.optim.steps import wrapped

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EVERYWHERE = PartitionSpec()
SPECS = {
    "w": PartitionSpec("data", "model"),
    "b": PartitionSpec("model"),
    "in": {"w": PartitionSpec(None, "data")},
}
SHAPES = {"w": (8, 8), "b": (8,), "in": {"w": (4, 8)}}


def params_in(dtype):
    def one(spec, shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, spec))

    return jax.tree.map(one, SPECS, SHAPES, is_leaf=lambda x: isinstance(x, (tuple, PartitionSpec)))


def specs_of(tx, dtype=jnp.float32):
    return jax.tree.map(lambda sharding: sharding.spec, state_shardings(tx, params_in(dtype)))


@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        (jnp.float32, "auto"),
        (jnp.bfloat16, "full"),
        (jnp.bfloat16, "remainder"),
        (jnp.float16, "auto"),
    ],
)
def test_moments_and_masters_lie_with_their_params_and_scalars_everywhere(dtype, mode):
    tx = wrapped(optax.adamw(1e-3), mode=mode, loss_scale="dynamic")
    found = specs_of(tx, dtype)
    state = jax.eval_shape(tx.init, params_in(dtype))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert found.inner[0].mu == found.inner[0].nu == SPECS
    scalars = found.inner[0].count, found.skipped, found.loss_scale.loss_scale
    assert scalars == (EVERYWHERE,) * 3
    if dtype != jnp.float32:
        assert found.masters == SPECS


def test_it_serves_a_plain_optax_transform_and_those_that_wrap_others():
    labels = {"w": "a", "b": "b", "in": {"w": "a"}}
    inner = optax.partition({"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)}, labels)
    scaled = lambda learning_rate: optax.chain(inner, optax.scale(learning_rate))  # noqa: E731
    found = specs_of(optax.inject_hyperparams(scaled)(0.1))
    states = found.inner_state[0].inner_states
    adam = states["a"].inner_state[0].mu
    assert (adam["w"], adam["in"]["w"]) == (SPECS["w"], SPECS["in"]["w"])
    assert states["b"].inner_state[0].trace["b"] == SPECS["b"]
    assert found.hyperparams["learning_rate"] == EVERYWHERE


def test_a_history_keeps_its_first_axis_whole_and_factored_moments_are_replicated():
    found = specs_of(optax.scale_by_lbfgs(memory_size=3))
    assert found.diff_params_memory["w"] == PartitionSpec(None, "data", "model")
    found = specs_of(optax.scale_by_factored_rms(min_dim_size_to_factor=2))
    assert found.v_row["in"]["w"] == EVERYWHERE
    assert found.v["b"] == SPECS["b"]


@pytest.mark.slow
def test_params_that_are_one_array_on_one_device_put_all_of_it_there():
    tx, params = wrapped(None, "bfloat16"), jnp.ones((2, 3), jnp.bfloat16)
    shardings = state_shardings(tx, params)
    assert set(jax.tree.leaves(shardings)) == {params.sharding}
    assert jax.jit(tx.init, out_shardings=shardings)(params).masters.shape == (2, 3)
    assert jax.tree.leaves(state_shardings(optax.sgd(0.1), {})) == []


@pytest.mark.slow
def test_faults_norms_and_shardings_on_eight_devices():
    run_tests_on_eight_devices(Path(__file__).with_name("on_eight_devices.py"))

"""Equinox: modules with functions and texts among their leaves, filtered transformations, state."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy
from tests.frameworks.checks import assert_near, dtypes_of_matmuls

X, LABELS = jax.random.normal(jax.random.key(1), (8, 4)), jnp.arange(8) % 3


class Net(eqx.Module):
    """A model with leaves that are no arrays: `layers` holds a function, `name` is a text."""

    up: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    layers: list[Callable[..., Any]]
    head: eqx.nn.Linear
    name: str
    width: int = eqx.field(static=True)

    def __init__(self, key: jax.Array, width: int = 8):
        keys = jax.random.split(key, 3)
        self.up, self.norm = eqx.nn.Linear(4, width, key=keys[0]), eqx.nn.LayerNorm(width)
        mlp = eqx.nn.MLP(width, width, 16, 1, activation=jnp.tanh, key=keys[1])
        self.layers = [jnp.tanh, mlp]
        self.head, self.name, self.width = eqx.nn.Linear(width, 3, key=keys[2]), "net", width

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.up(x))
        for layer in self.layers:
            x = layer(x)
        with jax.named_scope("head"):
            return self.head(x)


NET = Net(jax.random.key(0))
PARAMS, STATIC = eqx.partition(NET, eqx.is_inexact_array)


def loss_fn(model: Net, x: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16"])
def test_autocast_multiplies_in_half_forward_and_backward_in_filtered_transformations(name: str):
    half = policy.autocast(loss_fn, name)
    step = eqx.filter_jit(eqx.filter_value_and_grad(half))
    dtypes = dtypes_of_matmuls(
        lambda params: jax.grad(lambda p: half(eqx.combine(p, STATIC), X, LABELS))(params), PARAMS
    )
    assert dtypes == {policy.get_policy(name).compute_dtype.name}
    found, wanted = step(NET, X, LABELS), eqx.filter_value_and_grad(loss_fn)(NET, X, LABELS)
    assert_near(found, wanted, error=0.02)
    assert_near(found, eqx.filter_value_and_grad(half)(NET, X, LABELS), error=1e-6)


def test_rules_and_reports_name_layers_and_scopes():
    half = policy.autocast(loss_fn, "mixed_bfloat16", rules={"head": "f32", "eqx.nn.MLP": "f32"})
    records = half.explain(NET, X, LABELS).records
    assert {each.path: each.dtypes for each in records if each.primitive == "dot_general"} == {
        "eqx.nn.Linear": ("bfloat16",),
        "eqx.nn.MLP/eqx.nn.Linear": ("float32",),
        "head/eqx.nn.Linear": ("float32",),
    }
    with pytest.raises(ValueError, match=r"Modules seen: .*head/eqx\.nn\.Linear"):
        policy.autocast(loss_fn, "mixed_bfloat16", rules={"up": "f32"})(NET, X, LABELS)


def test_audit_finds_a_running_sum_in_a_module_and_takes_a_step_that_returns_one():
    def average(average: Net, model: Net) -> Net:
        return jax.tree.map(
            lambda old, new: 0.9 * old + 0.1 * new.astype(old.dtype) if eqx.is_array(old) else old,
            average,
            model,
        )

    half = policy.cast_floating(NET, jnp.bfloat16)
    found = policy.autocast(average, "mixed_bfloat16")(half, NET)
    assert (found.name, found.layers[0]) == ("net", jnp.tanh)
    (finding,) = policy.audit(average, half, NET).findings
    assert finding.kind == "narrowed-carry"
    assert "average.up.weight" in finding.message


@pytest.mark.slow
def test_compare_names_the_parameters_of_a_module():
    found = policy.compare(loss_fn, NET, X, LABELS, policy="mixed_bfloat16", backward=True)
    paths = [row.path for row in found.parameters]
    assert len(paths) == len(jax.tree.leaves(PARAMS))
    assert {"up/weight", "layers/1/layers/0/bias"} <= set(paths)
    assert all(0 < row.error < 0.05 for row in found.parameters)


def steps(name: str) -> Any:
    """Returns a train step on params, as `eqx.partition` gives them, and one on the whole model."""
    half, tx = (
        policy.autocast(loss_fn, name),
        policy.mixed_precision(optax.adam(1e-2), name, loss_scale="dynamic"),
    )

    @jax.jit
    def on_params(params: Net, opt_state: Any, x: jax.Array) -> tuple[Net, Any]:
        def loss_of(params: Net) -> jax.Array:
            return half(eqx.combine(params, STATIC), x, LABELS)

        scale = policy.loss_scale_of(opt_state)
        _, grads = policy.value_and_grad(loss_of, loss_scale=scale)(params)
        return policy.apply_gradients(tx, params, opt_state, grads)[:2]

    @eqx.filter_jit
    def on_model(model: Net, opt_state: Any, x: jax.Array) -> tuple[Net, Any]:
        scale = policy.loss_scale_of(opt_state)
        grads = eqx.filter_grad(lambda model: scale.scale(half(model, x, LABELS)))(model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        params, opt_state, _ = policy.apply_gradients(tx, params, opt_state, scale.unscale(grads))
        return eqx.combine(params, static), opt_state

    return on_params, on_model, tx.init(PARAMS)


@pytest.mark.slow
def test_both_kinds_of_train_steps_learn_and_skip_an_overflow():
    on_params, on_model, opt_state = steps("mixed_float16")
    params, state, model, other = PARAMS, opt_state, NET, opt_state
    for _ in range(20):
        params, state = on_params(params, state, X)
        model, other = on_model(model, other, X)
    assert loss_fn(model, X, LABELS) < 0.7 * loss_fn(NET, X, LABELS)
    assert_near(params, eqx.filter(model, eqx.is_inexact_array), error=1e-5)
    skipped, state = on_params(params, state, X * 1e30)
    assert_near(skipped, params, error=0.0)
    assert policy.loss_scale_of(state).loss_scale == 2.0**14


def test_a_module_with_functions_is_rejected_where_its_arrays_are_wanted():
    tx = policy.mixed_precision(optax.sgd(1e-2), "mixed_bfloat16")
    for call in (lambda: tx.init(NET), lambda: policy.value_and_grad(loss_fn)(NET, X, LABELS)):
        with pytest.raises((TypeError, ValueError), match=r"layers.*eqx\.partition\(model"):
            call()
    with pytest.raises(TypeError) as error:
        policy.value_and_grad(lambda n: 1.0 * n)(jnp.int32(1))
    assert "partition" not in str(error.value)


@pytest.mark.slow
def test_a_filtered_step_is_watched_and_codes_stand_for_weights():
    _, on_model, opt_state = steps("mixed_float16")
    step = policy.monitor(on_model.__wrapped__, jit=eqx.filter_jit)
    (model, _), snapshot = step(0, NET, opt_state, X)
    assert model.name == "net"
    rows = {(row.kind, row.path) for row in snapshot.layout.rows}
    assert {("gradient", "up/weight"), ("activation", "head/eqx.nn.Linear")} <= rows

    wide = Net(jax.random.key(0), width=128)
    coded = policy.quantized.quantize_params(wide, "params=int8")
    assert coded.layers[1].layers[0].weight.codes.dtype == jnp.int8
    assert_near(jax.vmap(coded)(X), jax.vmap(wide)(X), error=0.02)


class WithState(eqx.Module):
    conv: eqx.nn.Conv1d
    norm: eqx.nn.BatchNorm
    drop: eqx.nn.Dropout

    def __init__(self, key: jax.Array):
        self.conv = eqx.nn.Conv1d(2, 4, 3, key=key)
        self.norm, self.drop = eqx.nn.BatchNorm(4, "batch", mode="batch"), eqx.nn.Dropout(0.2)

    def __call__(self, x: jax.Array, state: Any, key: jax.Array) -> tuple[jax.Array, Any]:
        x, state = self.norm(self.conv(x), state)
        return self.drop(x, key=key), state


@pytest.mark.slow
def test_batch_statistics_stay_in_float32_and_keys_draw_the_same_masks():
    model, state = eqx.nn.make_with_state(WithState)(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 2, 8))

    def call(model: WithState, state: Any, x: jax.Array, key: jax.Array) -> Any:
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        return batched(x, state, jax.random.split(key, 4))

    given = model, state, x, jax.random.key(2)
    half = policy.autocast(call, "mixed_bfloat16")
    out, new = eqx.filter_jit(half)(*given)
    wanted, wanted_new = call(*given)
    np.testing.assert_array_equal(out == 0, wanted == 0)
    assert_near(out, wanted, error=0.02)
    assert_near(new, wanted_new, error=0.02)
    (conv,) = (each for each in half.explain(*given).records if "conv_general" in each.primitive)
    assert conv.dtypes == ("bfloat16",)


def scanned(cell: eqx.nn.GRUCell, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(4), x)[0].sum()


def checkpointed(model: Net, x: jax.Array) -> jax.Array:
    return eqx.filter_checkpoint(lambda model, x: jax.vmap(model)(x).sum())(model, x)


def checked(model: Net, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(eqx.error_if(x, jnp.any(x > 1e9), "too large")).sum()


def attended(attention: eqx.nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    return attention(x, x, x).sum()


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize(
    "fn, model",
    [
        (scanned, eqx.nn.GRUCell(4, 4, key=jax.random.key(0))),
        (checkpointed, NET),
        (checked, NET),
        (attended, eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_autocast_sees_through_equinox_own_transformations(fn: Any, model: Any):
    params, static = eqx.partition(model, eqx.is_inexact_array)
    half = policy.autocast(lambda params, x: fn(eqx.combine(params, static), x), "mixed_bfloat16")
    assert dtypes_of_matmuls(jax.grad(half), params, X) == {"bfloat16"}
    assert_near(eqx.filter_grad(half)(params, X), eqx.filter_grad(fn)(model, X), error=0.05)

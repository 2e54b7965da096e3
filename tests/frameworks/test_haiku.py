"""Haiku: transformed functions with batch statistics and random keys."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest

import policy
from tests.frameworks.checks import assert_near, dtypes_of_matmuls

X = jax.random.normal(jax.random.key(0), (4, 6, 6, 2))
LABELS, KEY = jnp.arange(4) % 3, jax.random.key(2)


def forward(x: jax.Array, is_training: bool = True) -> jax.Array:
    x = hk.Conv2D(8, 3)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training))
    x = hk.dropout(hk.next_rng_key(), 0.1, x) if is_training else x
    x = hk.LayerNorm(-1, True, True)(hk.Flatten()(x))
    return hk.nets.MLP([16, 3])(x)


NET = hk.transform_with_state(forward)


@pytest.fixture(autouse=True)
def promotion():
    """Haiku's dropout and averages of batch statistics promote integers."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module", name="given")
def given_fixture() -> tuple[Any, ...]:
    with jax.numpy_dtype_promotion("standard"):
        return (*jax.jit(NET.init)(jax.random.key(1), X), KEY, X, LABELS)


def loss_fn(params: Any, state: Any, key: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
    logits, state = NET.apply(params, state, key, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


@pytest.mark.slow
def test_autocast_multiplies_in_half_and_leaves_statistics_and_masks_in_float32(given: Any):
    half = policy.autocast(loss_fn, "mixed_bfloat16")
    grad = jax.grad(half, has_aux=True)
    assert dtypes_of_matmuls(grad, *given) == {"bfloat16"}
    (loss, state), grads = jax.jit(jax.value_and_grad(half, has_aux=True))(*given)
    (wanted, wanted_state), wanted_grads = jax.value_and_grad(loss_fn, has_aux=True)(*given)
    assert_near((loss, state), (wanted, wanted_state), error=0.01)
    # a bias before a normalization has no gradient but rounding errors
    del grads["conv2_d"]["b"], wanted_grads["conv2_d"]["b"]
    assert_near(grads, wanted_grads, error=0.05)
    logits = policy.autocast(NET.apply, "mixed_bfloat16")(*given[:-1], is_training=False)[0]
    assert_near(logits, NET.apply(*given[:-1], is_training=False)[0], error=0.02)


def test_rules_take_the_paths_of_modules_in_programs(given: Any):
    def dtypes(rules: dict[str, str]) -> list[tuple[str, Any]]:
        half = policy.autocast(loss_fn, "mixed_bfloat16", rules=rules)
        records = half.explain(*given).records
        return [(each.path, *each.dtypes) for each in records if each.primitive == "dot_general"]

    assert dtypes({"mlp/linear_1": "f32"}) == [
        ("mlp/linear_0", "bfloat16"),
        ("mlp/linear_1", "float32"),
    ]
    assert {dtype for _, dtype in dtypes({"mlp": "f32"})} == {"float32"}
    with pytest.raises(ValueError, match=r"matched no module.*mlp/linear_0"):
        dtypes({"mlp/~/linear_1": "f32"})


def test_audit_finds_nothing_under_autocast_and_a_pool_without(given: Any):
    half = policy.autocast(loss_fn, "mixed_bfloat16")
    assert not policy.audit(half, *given, backward=True).findings
    window = (64, 64, 1)
    pooled = hk.transform(lambda x: hk.AvgPool(window, window, "VALID")(x))
    x = jax.ShapeDtypeStruct((1, 64, 64, 2), jnp.bfloat16)
    (finding,) = policy.audit(pooled.apply, {}, None, x).findings
    assert (finding.kind, finding.path) == ("low-precision-reduction", "avg_pool")


@pytest.mark.slow
def test_compare_names_modules_and_parameters(given: Any):
    found = policy.compare(loss_fn, *given, policy="mixed_bfloat16", backward=True)
    assert {"conv2_d", "batch_norm", "mlp/linear_0"} <= {row.path for row in found.activations}
    assert {row.path for row in found.parameters} == {
        f"{module}/{name}" for module, leaves in given[0].items() for name in leaves
    }


@pytest.mark.slow
def test_a_train_step_learns_and_skips_an_overflow(given: Any):
    params, state, key, x, labels = given
    half = policy.autocast(loss_fn, "mixed_float16")
    tx = policy.mixed_precision(optax.adam(1e-2), "mixed_float16", loss_scale="dynamic")

    @jax.jit
    def step(params: Any, state: Any, opt_state: Any, x: jax.Array) -> Any:
        scale = policy.loss_scale_of(opt_state)
        value_and_grad = policy.value_and_grad(half, has_aux=True, loss_scale=scale)
        (loss, new_state), grads = value_and_grad(params, state, key, x, labels)
        params, opt_state, finite = policy.apply_gradients(tx, params, opt_state, grads)
        return params, policy.select_tree(finite, new_state, state), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(20):
        params, state, opt_state, loss = step(params, state, opt_state, x)
        losses.append(loss)
    assert losses[-1] < 0.3 * losses[0]
    after, after_state, opt_state, _ = step(params, state, opt_state, x.at[0, 0, 0, 0].set(jnp.inf))
    assert_near((after, after_state), (params, state), error=0.0)
    assert policy.loss_scale_of(opt_state).loss_scale == 2.0**14


def test_a_transformed_function_is_rejected_with_the_way_out():
    for tool in (policy.autocast, policy.audit, policy.compare):
        with pytest.raises(TypeError, match="of type TransformedWithState: pass its apply"):
            tool(NET, "mixed_bfloat16")

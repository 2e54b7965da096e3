"""The same model text under `flax.linen` and under ours: what a changed import line changes, and
what it does not.
"""

from __future__ import annotations

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_nn
from policy import get_policy, use_policy
from tests.programs import MOVES, assert_same_operations, frozen_biases

POLICIES = ("mixed_bfloat16", "mixed_float16", "bfloat16", "p=f32,c=bf16,o=bf16", "float32")
HALF_BOUNDARY = ("bfloat16", "p=f32,c=bf16,o=bf16")


def plain_model(nn: Any, **dtypes: Any) -> Any:
    """Layers that need no numerical repair, compact style; `dtypes` are what a careful author
    threads by hand.
    """

    class Net(nn.Module):
        width: int = 4

        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.relu(nn.Conv(self.width, (3, 3), **dtypes)(x))
            x = nn.gelu(nn.Conv(self.width, (3, 3), strides=2, use_bias=False, **dtypes)(x))
            x = nn.tanh(x[:, :2, :2])
            x = x.reshape((x.shape[0], -1))
            x = nn.Dropout(0.5)(x, deterministic=not train)
            x = nn.silu(nn.Dense(8, **dtypes)(x))
            return nn.DenseGeneral((2, 3), **dtypes)(x)

    return Net()


def setup_model(nn: Any, **dtypes: Any) -> Any:
    class Block(nn.Module):
        width: int

        def setup(self):
            self.up = nn.Dense(2 * self.width, **dtypes)
            self.down = nn.Dense(self.width, **dtypes)

        def __call__(self, x):
            return x + self.down(nn.tanh(self.up(x)))

    class Net(nn.Module):
        def setup(self):
            self.blocks = [Block(4), Block(4)]
            self.head = nn.Sequential([nn.Dense(4, **dtypes), nn.relu, nn.Dense(3, **dtypes)])

        def __call__(self, x, train: bool):
            x = x.reshape((x.shape[0], -1, 4))
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Net()


def repaired_model(nn: Any, **dtypes: Any) -> Any:
    """Layers whose arithmetic we mend: their trees and values must stay upstream's."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool):
            x = nn.Conv(4, (3, 3), **dtypes)(x)
            x = nn.BatchNorm(use_running_average=not train, **dtypes)(x)
            x = nn.GroupNorm(2, **dtypes)(x)
            x = x.reshape((x.shape[0], -1, 4))
            tokens = jnp.arange(x.shape[1])[None] % 4
            x = nn.LayerNorm(**dtypes)(x) + nn.Embed(4, 4, **dtypes)(tokens)
            x = x + nn.MultiHeadDotProductAttention(2, **dtypes)(nn.RMSNorm(**dtypes)(x))
            x = x + nn.SelfAttention(2, **dtypes)(x) + nn.MultiHeadAttention(2, **dtypes)(x, x)
            return x.mean(1)

    return Net()


pytestmark = pytest.mark.filterwarnings(
    "ignore:SelfAttention will be deprecated:DeprecationWarning"
)

MODELS = {"plain": plain_model, "setup": setup_model, "repaired": repaired_model}
EXACT = ("plain", "setup")
NOT_COMPARED = (*MOVES, "convert_element_type")  # casts may stand before a reshape or after it


def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), jnp.float32)


def init(model: Any) -> Any:
    with jax.numpy_dtype_promotion(
        "standard"
    ):  # upstream's layers mix dtypes where param_dtype is half
        return model.init(jax.random.key(0), inputs(), train=False)


def hand_threaded(make: Any, policy: Any) -> Any:
    """Upstream's model with dtypes threaded by hand, and the boundary casts around it by hand."""
    model = make(flax_nn, dtype=policy.compute_dtype, param_dtype=policy.param_dtype)

    def apply(variables, x, key):
        out = model.apply(
            variables, x.astype(policy.compute_dtype), train=True, rngs={"dropout": key}
        )
        return out.astype(policy.output_dtype)

    return apply


def ported(make: Any, policy: Any) -> Any:
    model = make(our_nn)

    def apply(variables, x, key):
        with use_policy(policy):
            return model.apply(variables, x, train=True, rngs={"dropout": key})

    return apply


def assert_same_bits(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@pytest.mark.parametrize("name", EXACT)
def test_a_changed_import_keeps_the_initial_values(name):
    assert_same_bits(init(MODELS[name](our_nn)), init(MODELS[name](flax_nn)))


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_import_keeps_the_tree_its_shapes_and_dtypes(name):
    assert jax.eval_shape(lambda: init(MODELS[name](our_nn))) == jax.eval_shape(
        lambda: init(MODELS[name](flax_nn))
    )


@pytest.mark.parametrize("name", MODELS)
def test_under_a_policy_the_tree_is_upstreams_with_param_dtype_threaded_by_hand(name):
    policy = get_policy("p=f16,c=bf16,o=f32")
    with use_policy(policy):
        ours = jax.eval_shape(lambda: init(MODELS[name](our_nn)))
    theirs = jax.eval_shape(lambda: init(MODELS[name](flax_nn, param_dtype=policy.param_dtype)))
    assert ours == theirs


def test_under_a_policy_the_initial_values_are_upstreams_with_param_dtype_threaded_by_hand():
    with use_policy("p=f16,c=bf16,o=f32"):
        ours = init(setup_model(our_nn))
    assert_same_bits(ours, init(setup_model(flax_nn, param_dtype=jnp.float16)))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("policy", [p for p in POLICIES if "float16" not in p or "b" in p])
def test_the_forward_program_is_the_hand_threaded_one(name, policy):
    policy, make = get_policy(policy), MODELS[name]
    variables = jax.eval_shape(lambda: init(make(flax_nn, param_dtype=policy.param_dtype)))
    args = variables, inputs(), jax.random.key(1)
    assert_same_operations(
        ported(make, policy), hand_threaded(make, policy), *args, besides=NOT_COMPARED
    )


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("policy", [p for p in POLICIES if "float16" not in p or "b" in p])
def test_the_gradient_program_is_the_hand_threaded_one(name, policy):
    policy, make = get_policy(policy), MODELS[name]
    variables = jax.eval_shape(lambda: init(make(flax_nn, param_dtype=policy.param_dtype)))
    args = variables, inputs(), jax.random.key(1)

    def gradient_of(apply):
        def loss(variables, x, key):
            return jnp.square(apply(frozen_biases(variables), x, key).astype(jnp.float32)).sum()

        return jax.value_and_grad(loss)

    ours, by_hand = (gradient_of(make_(make, policy)) for make_ in (ported, hand_threaded))
    assert_same_operations(ours, by_hand, *args, besides=NOT_COMPARED)


@pytest.mark.parametrize("name", MODELS)
def test_without_a_policy_a_ported_model_lowers_to_upstreams_program(name):
    variables = jax.eval_shape(lambda: init(MODELS[name](flax_nn)))

    def program(nn):
        model = MODELS[name](nn)

        def loss(variables, x, key):
            out, updated = model.apply(
                variables, x, train=True, rngs={"dropout": key}, mutable=["batch_stats"]
            )
            return jnp.square(out).sum(), updated

        step = jax.value_and_grad(loss, has_aux=True)
        return jax.jit(step).lower(variables, inputs(), jax.random.key(1)).as_text()

    assert program(our_nn) == program(flax_nn)


def test_forward_values_and_gradients_are_upstreams_bit_for_bit():
    policy = get_policy("mixed_bfloat16")
    variables = init(plain_model(flax_nn))
    args = variables, inputs(), jax.random.key(1)
    results = []
    for apply in (ported(plain_model, policy), hand_threaded(plain_model, policy)):

        def loss(variables, x, key, apply=apply):
            out = apply(frozen_biases(variables), x, key)
            return jnp.square(out).sum(), out

        results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(*args))
    assert_same_bits(*results)
    assert results[0][0][1].dtype == jnp.float32


def test_a_checkpoint_of_upstreams_model_loads_in_ours_and_gives_nearly_the_same():
    theirs = repaired_model(flax_nn)
    variables = init(theirs)
    expected = jax.jit(lambda v, x: theirs.apply(v, x, train=False))(variables, inputs())
    with use_policy("mixed_bfloat16"):
        ours = jax.jit(lambda v, x: repaired_model(our_nn).apply(v, x, train=False))(
            variables, inputs()
        )
    assert ours.dtype == jnp.float32
    # 8 bits of mantissa through six layers: a few per cent of the largest output
    np.testing.assert_allclose(ours, expected, atol=0.05 * float(jnp.abs(expected).max()))

"""A changed import line: the program that a careful author threads by hand, and the same tree."""

# What Flax returns is typed as Flax's own class.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from policy import get_policy
from tests.mpmodules.wings import (
    BOTH,
    MIXED,
    Model,
    Text,
    assert_same_bits,
    batch_norm,
    dense,
    dropout,
    layer,
    layer_norm,
)
from tests.programs import MOVES, assert_same_operations

IMAGES = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), jnp.float32)
POLICIES = ("mixed_bfloat16", "bfloat16", "p=f32,c=bf16,o=bf16", "p=bf16,c=bf16,o=f32", "float32")
# Casts may stand before a move or after it, and nobody reads how often nnx drew random numbers.
NOT_COMPARED = (*MOVES, "convert_element_type", "scatter")


def conv(width: int, features: int, strides: int = 1, **dtypes: Any) -> Any:
    return layer(
        lambda nn: nn.Conv(features, (3, 3), strides=strides, **dtypes),
        lambda nnx, rngs: nnx.Conv(width, features, (3, 3), strides=strides, rngs=rngs, **dtypes),
    )


def plain(**dtypes: Any) -> Text:
    """Layers that need no numerical repair; `dtypes` are what an author threads by hand."""

    def features(self, x):
        x = jax.nn.relu(self.stem(x))
        x = x + self.drop(jax.nn.gelu(self.block(self.conv(x))))
        return jnp.tanh(x[:, :2, :2]).reshape(x.shape[0], -1)

    return Text(
        lambda self, x: self.head(jax.nn.silu(self.hidden(self.features(x)))),
        "Net",
        {"features": features},
        stem=conv(1, 4, 2, **dtypes),
        conv=conv(4, 4, **dtypes),
        block=Text(
            lambda self, x: x + self.down(self.up(x)),
            "Block",
            up=dense(4, 8, **dtypes),
            down=dense(8, 4, use_bias=False, **dtypes),
        ),
        drop=dropout(0.25),
        hidden=dense(16, 6, use_bias=False, **dtypes),
        head=layer(
            lambda nn: nn.DenseGeneral((2, 3), **dtypes),
            lambda nnx, rngs: nnx.LinearGeneral((6,), (2, 3), rngs=rngs, **dtypes),
        ),
    )


def repaired(**dtypes: Any) -> Text:
    """Layers whose arithmetic we mend: their trees and values must stay upstream's."""

    def call(self, x):
        x = self.group(self.batch(self.conv(x)))
        x = self.norm(x.reshape((x.shape[0], -1, 4)))
        x = x + self.embed(jnp.arange(x.shape[1])[None] % 4)
        return (x + self.attention(self.rms(x))).mean(1)

    return Text(
        call,
        "Net",
        conv=conv(1, 4, **dtypes),
        batch=batch_norm(4, **dtypes),
        group=layer(
            lambda nn: nn.GroupNorm(2, **dtypes),
            lambda nnx, rngs: nnx.GroupNorm(4, num_groups=2, rngs=rngs, **dtypes),
        ),
        norm=layer_norm(4, **dtypes),
        embed=layer(
            lambda nn: nn.Embed(4, 4, **dtypes),
            lambda nnx, rngs: nnx.Embed(4, 4, rngs=rngs, **dtypes),
        ),
        rms=layer(
            lambda nn: nn.RMSNorm(**dtypes), lambda nnx, rngs: nnx.RMSNorm(4, rngs=rngs, **dtypes)
        ),
        attention=layer(
            lambda nn: nn.MultiHeadDotProductAttention(2, **dtypes),
            lambda nnx, rngs: nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs, **dtypes),
        ),
    )


def by_hand(wing: Any, text: Callable[..., Text], policy: Any) -> Model:
    """Returns Flax's model with dtypes threaded by hand, and casts around it."""
    policy = get_policy(policy)
    dtypes = {"dtype": policy.compute_dtype, "param_dtype": policy.param_dtype}
    model = wing.theirs(text(**dtypes), IMAGES)
    inner = model.pure

    def pure(params: Any, x: jax.Array, **kwargs: Any) -> Any:
        return inner(params, x.astype(policy.compute_dtype), **kwargs).astype(policy.output_dtype)

    model.pure = pure
    return model


def gradient(model: Model) -> Any:
    """Returns the value and gradients of a loss, by parameters but biases, whose sum is ours."""

    def frozen(path: Any, leaf: Any) -> Any:
        is_bias = any(getattr(key, "key", None) == "bias" for key in path)
        return jax.lax.stop_gradient(leaf) if is_bias else leaf

    def loss(params: Any, x: jax.Array) -> jax.Array:
        params = jax.tree_util.tree_map_with_path(frozen, params)
        return jnp.square(model.pure(params, x).astype(jnp.float32)).sum()

    return jax.value_and_grad(loss)


@BOTH
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["scope", "argument"])
def test_with_a_policy_programs_are_those_threaded_by_hand(wing, policy, way):
    made = wing.scoped(plain(), policy, None, IMAGES) if way == "scope" else None
    ours, hand = made or wing.ours(plain(), policy, IMAGES), by_hand(wing, plain, policy)

    def features(model: Model) -> Any:
        return lambda params, x: model.pure(params, x, method="features")

    for of in (lambda model: model.pure, gradient, *([features] if policy == MIXED else [])):
        given, others = (ours.params, IMAGES), (hand.params, IMAGES)
        assert_same_operations(of(ours), of(hand), *given, others=others, besides=NOT_COMPARED)


@BOTH
def test_values_and_gradients_are_those_threaded_by_hand_bit_for_bit(wing):
    ours, threaded = wing.scoped(plain(), MIXED, None, IMAGES), by_hand(wing, plain, MIXED)
    results = [jax.jit(gradient(model))(model.params, IMAGES) for model in (ours, threaded)]
    assert_same_bits(*map(jax.tree.leaves, results))


@BOTH
def test_a_checkpoint_of_flaxs_model_loads_in_ours_and_gives_nearly_the_same(wing):
    theirs, ours = wing.theirs(repaired(), IMAGES), wing.scoped(repaired(), MIXED, None, IMAGES)
    ours.params = jax.tree.unflatten(
        jax.tree.structure(ours.params), jax.tree.leaves(theirs.params)
    )
    out, expected = (jax.jit(model.pure)(model.params, IMAGES) for model in (ours, theirs))
    assert out.dtype == jnp.float32
    # 8 bits of mantissa through six layers: a few per cent of the largest output
    np.testing.assert_allclose(out, expected, atol=0.05 * float(jnp.abs(expected).max()))
    if wing.name == "nnx":  # states go either way, statistics too
        theirs.instance(IMAGES)
        flax_nnx.update(ours.instance, flax_nnx.state(theirs.instance))
        assert jnp.array_equal(ours.instance.batch.mean[...], theirs.instance.batch.mean[...])
        flax_nnx.update(theirs.instance, flax_nnx.state(ours.instance))

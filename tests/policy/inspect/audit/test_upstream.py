"""Findings of an audit in Flax's own layers in bfloat16."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from policy import audit
from policy.inspect.audit.findings import FUNCTION, LEAK, MIXED, PROMOTION, REDUCTION
from tests.policy.inspect.audit.corpus.planting import BF16, F16, shape

Found = set[tuple[str, str, str, bool]]
X, TOKENS = shape(2, 5, 8), jnp.zeros((2, 3), jnp.int32)
DOT = "MultiHeadDotProductAttention:"


def found_in(make: Any, x: Any = X, backward: bool = False) -> Found:
    """Returns the kinds, paths and primitives of the findings in a model of either wing."""
    model = nnx.eval_shape(make) if not isinstance(make, nn.Module) else make
    with jax.numpy_dtype_promotion("standard"):
        if isinstance(model, nn.Module):
            variables = jax.eval_shape(model.init, jax.random.key(0), x)
            report = audit(model.apply, variables, x, backward=backward)
        else:
            report = audit(model, x, backward=backward)
    return {(f.kind, f.path, f.primitive, f.is_backward) for f in report.findings}


def normed():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs))


@pytest.mark.parametrize(
    ("make", "x", "primitive"),
    (
        (nn.Embed(9, 4, dtype=BF16), TOKENS, "scatter-add"),
        (lambda: nnx.Embed(9, 4, dtype=BF16, rngs=nnx.Rngs(0)), TOKENS, "scatter-add"),
        (nn.Dense(3, dtype=BF16), X, "reduce_sum"),
        (lambda: nnx.Linear(8, 3, dtype=BF16, rngs=nnx.Rngs(0)), X, "reduce_sum"),
    ),
)
def test_the_gradients_of_embeddings_and_biases_are_summed_in_half(make, x, primitive):
    found = found_in(make, x, backward=True)
    assert {(kind, *rest) for kind, _, *rest in found} == {(REDUCTION, primitive, True)}


@pytest.mark.parametrize(
    ("make", "found"),
    (
        (nn.Sequential([nn.LayerNorm(), nn.Dense(8)]), (LEAK, "layers_0", "dot_general", False)),
        (normed, (LEAK, "layers/0", "dot_general", False)),
        (
            lambda: nnx.BatchNorm(8, dtype=F16, use_running_average=True, rngs=nnx.Rngs(0)),
            (FUNCTION, "BatchNorm:", "rsqrt", False),
        ),
    ),
)
def test_norms_leak_float32_into_the_next_layer_or_evaluate_in_half_in_nnx(make, found):
    assert found in found_in(make)


def test_a_dense_layer_promotes_and_attention_is_half_or_leaves_a_mixed_matmul_if_forced():
    assert found_in(nn.Dense(3)) == {(PROMOTION, "Dense:", "dot_general", False)}
    attention = nn.MultiHeadDotProductAttention(2, dtype=BF16)
    assert found_in(attention) == {(FUNCTION, DOT, "exp", False)}
    forced = found_in(attention.clone(force_fp32_for_softmax=True))
    assert forced == {(MIXED, DOT, "dot_general", False), (LEAK, DOT, "dot_general", False)}


@pytest.mark.parametrize("layer", (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm))
def test_normalisations_of_linen_are_right_but_return_float32_where_no_dtype_is_given(layer):
    options: Any = {"use_running_average": True} if layer is nn.BatchNorm else {}
    assert found_in(layer(dtype=BF16, **options)) == set()
    promoted = found_in(layer(**options))
    assert {(kind, path) for kind, path, *_ in promoted} == {(PROMOTION, f"{layer.__name__}:")}

"""Findings of an audit in Flax's own layers in bfloat16, and in functions of JAX and Optax."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from policy import audit
from policy.inspect.audit.finding_kinds import FUNCTION, LEAK, MIXED, PROMOTION, REDUCTION

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EMBED = jnp.zeros((2, 3), jnp.int32)


def shape(*dims: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def of_linen(
    model: Any, *args: Any, backward: bool = False, **kwargs: Any
) -> set[tuple[str, str, str, bool]]:
    with jax.numpy_dtype_promotion("standard"):
        variables = jax.eval_shape(model.init, jax.random.key(0), *args)
        report = audit(
            lambda v, *args: model.apply(v, *args, **kwargs), variables, *args, backward=backward
        )
    return {(f.kind, f.path, f.primitive, f.is_backward) for f in report.findings}


def of_nnx(make: Any, *args: Any, backward: bool = False) -> set[tuple[str, str, str, bool]]:
    with jax.numpy_dtype_promotion("standard"):
        report = audit(nnx.eval_shape(make), *args, backward=backward)
    return {(f.kind, f.path, f.primitive, f.is_backward) for f in report.findings}


X = shape(2, 5, 8)
DOT = "MultiHeadDotProductAttention:"


IN_HALF = {
    "an embedding": (
        nn.Embed(9, 4, dtype=BF16),
        lambda: nnx.Embed(9, 4, dtype=BF16, rngs=nnx.Rngs(0)),
        EMBED,
        "scatter-add",
    ),
    "a bias": (
        nn.Dense(3, dtype=BF16),
        lambda: nnx.Linear(8, 3, dtype=BF16, rngs=nnx.Rngs(0)),
        X,
        "reduce_sum",
    ),
}


@pytest.mark.parametrize("name", IN_HALF)
def test_the_gradients_of_embeddings_and_biases_are_summed_in_half(name):
    model, make, x, primitive = IN_HALF[name]
    for found in (of_linen(model, x, backward=True), of_nnx(make, x, backward=True)):
        assert {(kind, *rest) for kind, _, *rest in found} == {(REDUCTION, primitive, True)}


def test_float32_that_a_norm_returns_leaks_into_the_next_layer():
    model = nn.Sequential([nn.LayerNorm(), nn.Dense(8)])
    make = lambda: nnx.Sequential(  # noqa: E731
        nnx.LayerNorm(8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    )
    for found, path in ((of_linen(model, X), "layers_0"), (of_nnx(make, X), "layers/0")):
        assert (LEAK, path, "dot_general", False) in found


def test_a_norm_of_nnx_evaluates_in_half_and_a_dense_layer_without_a_dtype_promotes():
    norm = lambda: nnx.BatchNorm(8, dtype=F16, use_running_average=True, rngs=nnx.Rngs(0))  # noqa: E731
    assert (FUNCTION, "BatchNorm:", "rsqrt", False) in of_nnx(norm, X)
    assert of_linen(nn.Dense(3), X) == {(PROMOTION, "Dense:", "dot_general", False)}


def test_the_softmax_of_attention_is_half_and_forcing_it_leaves_a_mixed_matmul():
    assert of_linen(nn.MultiHeadDotProductAttention(2, dtype=BF16), X) == {
        (FUNCTION, DOT, "exp", False)
    }
    forced = of_linen(
        nn.MultiHeadDotProductAttention(2, dtype=BF16, force_fp32_for_softmax=True), X
    )
    assert forced == {(MIXED, DOT, "dot_general", False), (LEAK, DOT, "dot_general", False)}


@pytest.mark.parametrize(
    "layer", (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm), ids=lambda layer: layer.__name__
)
def test_normalisations_of_linen_are_right_but_return_float32_where_no_dtype_is_given(layer):
    options: Any = {"use_running_average": True} if layer is nn.BatchNorm else {}
    assert of_linen(layer(dtype=BF16, **options), X) == set()
    promoted = of_linen(layer(**options), X)
    assert {(kind, path) for kind, path, *_ in promoted} == {(PROMOTION, f"{layer.__name__}:")}


IN_HALF_PRECISION: dict[str, Any] = {
    "exp": jax.nn.softmax,
    "exp log": jax.nn.log_softmax,
    "log exp": lambda x: jax.nn.logsumexp(x, -1),
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "square rsqrt": jax.nn.standardize,
    "log": lambda x: optax.softmax_cross_entropy(x, x),
    "integer_pow": lambda x: optax.l2_loss(x, x).mean(),
    "sqrt": lambda x: optax.tree.norm({"w": x}),
}


@pytest.mark.parametrize("primitives", IN_HALF_PRECISION)
def test_functions_of_jax_and_optax_compute_in_half(primitives):
    found = {f.primitive for f in audit(IN_HALF_PRECISION[primitives], shape(4, 8)).findings}
    assert set(primitives.split()) <= found


SOFTPLUS: dict[str, Any] = {
    "returned": lambda x, w: jax.nn.softplus(x @ w),
    "a loss": lambda x, w: jax.nn.log_sigmoid(x @ w).astype(F32).mean(),
    "a loss that is differentiated": lambda x, w: jax.grad(
        lambda w: jax.nn.softplus(x @ w).astype(F32).sum()
    )(w),
    "an exponential of it": lambda x, w: jnp.exp(-jax.nn.softplus(x @ w)) @ w,
    "not in its stable form": lambda x, w: jnp.log1p(jnp.exp(x @ w)) @ w,
}


@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize("name", SOFTPLUS)
def test_a_softplus_that_is_more_than_an_activation_is_found(name, dtype):
    x = shape(4, 4, dtype=dtype)
    found = audit(SOFTPLUS[name], x, x).findings
    kinds, primitives = {f.kind for f in found}, {f.primitive for f in found}
    assert kinds == {FUNCTION} and primitives <= {"exp", "log1p"}


RIGHT = (jnp.mean, jnp.sum, jnp.var, jnp.tanh, jax.nn.relu, jnp.max, jnp.argmax, jax.nn.elu)


@pytest.mark.parametrize("fn", RIGHT, ids=lambda fn: fn.__name__)
def test_what_is_right_upstream_is_no_finding(fn):
    assert not audit(fn, shape(4, 8)).findings

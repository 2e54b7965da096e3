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


def test_average_pools_sum_in_half():
    with jax.numpy_dtype_promotion("standard"):
        (found,) = audit(lambda x: nn.avg_pool(x, (2, 2)), shape(1, 4, 4, 2)).findings
    assert (found.kind, found.primitive, found.dtypes) == (
        REDUCTION,
        "reduce_window_sum",
        ("bfloat16",),
    )


def test_the_gradient_of_an_embedding_is_summed_in_half():
    assert of_linen(nn.Embed(9, 4, dtype=BF16), EMBED, backward=True) == {
        (REDUCTION, "Embed:", "scatter-add", True)
    }
    make = lambda: nnx.Embed(9, 4, dtype=BF16, rngs=nnx.Rngs(0))  # noqa: E731
    assert of_nnx(make, EMBED, backward=True) == {(REDUCTION, "Embed:", "scatter-add", True)}


def test_the_gradient_of_a_bias_is_summed_in_half():
    assert of_linen(nn.Dense(3, dtype=BF16), X, backward=True) == {
        (REDUCTION, "Dense:", "reduce_sum", True)
    }
    make = lambda: nnx.Linear(8, 3, dtype=BF16, rngs=nnx.Rngs(0))  # noqa: E731
    assert of_nnx(make, X, backward=True) == {(REDUCTION, "Linear:", "reduce_sum", True)}


def test_the_softmax_of_attention_is_half_and_forcing_it_leaves_a_mixed_matmul():
    assert of_linen(nn.MultiHeadDotProductAttention(2, dtype=BF16), X) == {
        (FUNCTION, DOT, "exp", False)
    }
    forced = of_linen(
        nn.MultiHeadDotProductAttention(2, dtype=BF16, force_fp32_for_softmax=True), X
    )
    assert forced == {(MIXED, DOT, "dot_general", False), (LEAK, DOT, "dot_general", False)}


@pytest.mark.parametrize(
    ("rate", "found"), ((0.0, set()), (0.5, {(FUNCTION, "MultiHeadAttention:", "exp", False)}))
)
def test_the_softmax_of_nnx_attention_depends_on_the_dropout_rate(rate, found):
    make = lambda: nnx.MultiHeadAttention(  # noqa: E731
        2, 8, dtype=BF16, dropout_rate=rate, deterministic=True, decode=False, rngs=nnx.Rngs(0)
    )
    assert of_nnx(make, X) == found


def test_batch_norm_of_nnx_evaluates_in_half():
    def make() -> Any:
        return nnx.BatchNorm(8, dtype=F16, use_running_average=True, rngs=nnx.Rngs(0))

    assert (FUNCTION, "BatchNorm:", "rsqrt", False) in of_nnx(make, X)


@pytest.mark.parametrize(
    "layer", (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm), ids=lambda layer: layer.__name__
)
def test_normalisations_of_linen_are_right_but_return_float32_where_no_dtype_is_given(layer):
    options: Any = {"use_running_average": True} if layer is nn.BatchNorm else {}
    assert of_linen(layer(dtype=BF16, **options), X) == set()
    promoted = of_linen(layer(**options), X)
    assert {(kind, path) for kind, path, *_ in promoted} == {(PROMOTION, f"{layer.__name__}:")}


def test_a_dense_layer_without_a_dtype_promotes_what_it_is_given():
    assert of_linen(nn.Dense(3), X) == {(PROMOTION, "Dense:", "dot_general", False)}


def test_recurrent_cells_return_float32():
    cell = nn.GRUCell(3, dtype=BF16)
    carry = jax.eval_shape(lambda: cell.initialize_carry(jax.random.key(0), (2, 8)))
    assert {kind for kind, *_ in of_linen(cell, carry, shape(2, 8))} == {PROMOTION}


@pytest.mark.parametrize(
    ("fn", "primitives"),
    (
        (jax.nn.softmax, {"exp"}),
        (jax.nn.log_softmax, {"exp", "log"}),
        (lambda x: jax.nn.logsumexp(x, -1), {"exp", "log"}),
        (lambda x: jnp.cumsum(x, -1), {"cumsum"}),
        (jax.nn.standardize, {"square", "rsqrt"}),
        (lambda x: optax.softmax_cross_entropy(x, x), {"exp", "log"}),
        (lambda x: optax.l2_loss(x, x).mean(), {"integer_pow"}),
        (lambda x: optax.tree.norm({"w": x}), {"sqrt"}),
    ),
    ids=(
        "softmax",
        "log_softmax",
        "logsumexp",
        "cumsum",
        "standardize",
        "cross entropy",
        "l2_loss",
        "norm of a tree",
    ),
)
def test_functions_of_jax_and_optax_compute_in_half(fn, primitives):
    found = {f.primitive for f in audit(fn, shape(4, 8)).findings}
    assert primitives <= found


@pytest.mark.parametrize("dtype", (BF16, F16), ids=str)
@pytest.mark.parametrize(
    "fn",
    (
        lambda x, w: jax.nn.softplus(x @ w),
        lambda x, w: jax.nn.log_sigmoid(x @ w).astype(F32).mean(),
        lambda x, w: jax.grad(lambda w: jax.nn.softplus(x @ w).astype(F32).sum())(w),
        lambda x, w: jnp.exp(-jax.nn.softplus(x @ w)) @ w,
        lambda x, w: jnp.log1p(jnp.exp(x @ w)) @ w,
    ),
    ids=(
        "returned",
        "a loss",
        "a loss that is differentiated",
        "an exponential of it",
        "not in its stable form",
    ),
)
def test_a_softplus_that_is_more_than_an_activation_is_found(fn, dtype):
    found = audit(fn, shape(4, 4, dtype=dtype), shape(4, 4, dtype=dtype)).findings
    assert {f.kind for f in found} == {FUNCTION} and {f.primitive for f in found} <= {
        "exp",
        "log1p",
    }


@pytest.mark.parametrize(
    "fn",
    (
        jnp.mean,
        jnp.sum,
        jnp.var,
        jax.nn.gelu,
        jax.nn.silu,
        jax.nn.mish,
        jnp.tanh,
        jax.nn.relu,
        jnp.max,
        jnp.argmax,
        jax.nn.elu,
    ),
    ids=lambda fn: fn.__name__,
)
def test_what_is_right_upstream_is_no_finding(fn):
    assert not audit(fn, shape(4, 8)).findings

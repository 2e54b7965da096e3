"""Exponentials, logarithms, roots and squares in half precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from policy.inspect.audit.finding_kinds import FUNCTION
from tests.policy.inspect.audit.corpus.planting import BF16, DOT, F16, F32, clean, faults, shape

X, H, SCALAR = shape(4, 4), shape(4, 4, dtype=F16), shape()

# --------------------------------------------------------------------------------------------------
# Exponentials and logarithms
# --------------------------------------------------------------------------------------------------

faults(FUNCTION, "exp")(
    {
        "a softmax in bfloat16": jax.nn.softmax,
        "a log_softmax": jax.nn.log_softmax,
        "a logsumexp": lambda x: jax.nn.logsumexp(x, -1),
        "attention without float32": lambda x: jax.nn.softmax(x @ x.T) @ x,
        "a silu by hand": lambda x: x / (1 + jnp.exp(-x)),
        "a kernel of distances": lambda x: jnp.exp(
            -jnp.square(x[:, None].astype(F32) - x.astype(F32)).sum(-1).astype(x.dtype)
        ),
        "a softmax of two logits by hand": lambda x: (
            jnp.exp(x[0]) / (jnp.exp(x[0]) + jnp.exp(x[1]))
        ),
        "a softmax of three columns by hand": lambda x: (
            jnp.exp(x[:, 0]) / sum(jnp.exp(x[:, i]) for i in range(3))
        ),
        "exponentials that are added and multiplied": lambda x: (jnp.exp(x[0]) + jnp.exp(x[1])) @ x,
        "values weighted by exponentials": lambda x: (
            (jnp.exp(x[0]) * x[1] + jnp.exp(x[2]) * x[3]) @ x
        ),
        "exponentials of a list": lambda x: jnp.log(sum(jnp.exp(x[i]) for i in range(3))),
        "a mixture of two": lambda x: jnp.log(0.3 * jnp.exp(-x[0]) + 0.7 * jnp.exp(-x[1])),
        "logaddexp": lambda x: jnp.logaddexp(x[0], x[1]),
        "a perplexity": lambda x: jnp.exp(x.mean()),
        "a ratio of probabilities": lambda x: (
            jnp.minimum(jnp.exp(x[0] - x[1]), 1.2).astype(F32).mean()
        ),
    }
)
faults(FUNCTION, "exp", X, X)(
    {
        "the divergence of two normal distributions": lambda mean, log_variance: (
            0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance).sum()
        ),
        "a poisson loss": lambda rate, x: (jnp.exp(rate) - x * rate).mean(),
        "an exponential of a softplus": lambda x, w: jnp.exp(-jax.nn.softplus(x @ w)) @ w,
    }
)
faults(FUNCTION, "log", X, X)(
    {
        "a cross entropy of probabilities": lambda p, y: (
            -(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)).astype(F32).mean()
        ),
        "an entropy": lambda p, _: -(p * jnp.log(p)).sum(-1),
        "a cross entropy of Optax's": optax.softmax_cross_entropy,
        "the logits of probabilities": lambda p, _: jnp.log(p / (1 - p)),
        "the likelihood of a squashed action": lambda x, _: (
            -jnp.log(1 - jnp.tanh(x) ** 2 + 1e-3).sum(-1)
        ),
    }
)
faults(FUNCTION, "lgamma")({"a gamma function": lambda x: lax.lgamma(x).astype(F32).sum()})
faults(FUNCTION, "exp", X, X)(
    {"a softplus that is not stable": lambda x, w: jnp.log1p(jnp.exp(x @ w)) @ w}
)
for _dtype in (BF16, F16):
    faults(FUNCTION, "log1p", *[shape(4, 4, dtype=_dtype)] * 2)(
        {
            f"a softplus that is returned in {jnp.dtype(_dtype)}": lambda x, w: jax.nn.softplus(
                x @ w
            ),
            f"a loss of log_sigmoid in {jnp.dtype(_dtype)}": lambda x, w: (
                jax.nn.log_sigmoid(x @ w).astype(F32).mean()
            ),
            f"a loss of softplus, differentiated in {jnp.dtype(_dtype)}": lambda x, w: jax.grad(
                lambda w: jax.nn.softplus(x @ w).astype(F32).sum()
            )(w),
        }
    )
faults(FUNCTION, "pow")(
    {
        "powers of a discount": lambda x: (x * 0.99 ** jnp.arange(4, dtype=x.dtype)).sum(),
        "the correction of a bias": lambda x: x / (1 - jnp.asarray(0.9, x.dtype) ** x[0, 0]),
        "an inverse root by a power": lambda x: x * x.var(-1, keepdims=True) ** -0.5,
    }
)
faults(FUNCTION, "cos")(
    {
        "rotary angles": lambda x: (
            x * jnp.cos(x[:, :1] * jnp.asarray([1.0, 0.1, 0.01, 0.001], BF16))
        ),
        "normal numbers by hand": lambda x: jnp.sqrt(-2 * jnp.log(x)) * jnp.cos(6.28 * x),
    }
)
faults(FUNCTION, "sin")({"fourier features": lambda x: jnp.sin(x * 1000) @ x, "sinc": jnp.sinc})

# --------------------------------------------------------------------------------------------------
# Roots and norms
# --------------------------------------------------------------------------------------------------


@faults(FUNCTION, "rsqrt", H)
def _a_normalisation_in_float16(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-3)


faults(FUNCTION, "rsqrt")({"standardize": jax.nn.standardize})
faults(FUNCTION, "div")(
    {
        "a division by a deviation": lambda x: x / x.std(-1, keepdims=True),
        "a division by a norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
        "a cosine": lambda x: (x[0] * x[1]).sum() / (jnp.linalg.norm(x[0]) * jnp.linalg.norm(x[1])),
    }
)
faults(FUNCTION, "sqrt")(
    {
        "the root of a mean of squares": lambda x: jnp.sqrt(jnp.mean(jnp.square(x))),
        "a norm of Optax's": lambda x: optax.tree.norm({"w": x}),
    }
)
faults(FUNCTION, "sqrt", H)(
    {
        "a norm by einsum": lambda x: jnp.sqrt(jnp.einsum("bd,bd->b", x, x)),
        "a deviation by an inner product of what is centred twice": lambda x: (
            x / jnp.sqrt(jnp.inner(x[0] - x[0].mean(), x[0] - x[0].mean()) / 4)
        ),
        "squares that a matmul sums": lambda x: x / jnp.sqrt((x * x) @ jnp.ones((4, 1), F16)),
    }
)
faults(FUNCTION, "div", H)(
    {
        "a division by a norm by einsum": lambda x: (
            x / jnp.sqrt(jnp.einsum("bd,bd->b", x, x) + 1e-3)[:, None]
        ),
        "a division by a squared norm by vdot": lambda x: x / jnp.vdot(x, x),
    }
)
faults(FUNCTION, "integer_pow", H)(
    {"the reciprocal of a squared norm": lambda x: x * jnp.reciprocal(jnp.vdot(x, x) + 1)}
)
faults(FUNCTION, "pow", H)(
    {"a power of a squared norm": lambda x: (x * jnp.power(jnp.vdot(x, x) + 1, -0.5)) @ x}
)
faults(FUNCTION, "log", H)(
    {"the logarithm of a squared norm": lambda x: (x * jnp.log(jnp.vdot(x, x) + 1)) @ x}
)
faults(FUNCTION, DOT, H)(
    {
        "a squared norm by vdot": lambda x: jnp.vdot(x, x),
        "a squared norm by einsum": lambda x: jnp.einsum("ij,ij->", x, x),
        "squared norms of rows": lambda x: jnp.einsum("bi,bi->b", x, x),
        "a squared distance by vdot": lambda x: jnp.vdot(x[0] - x[1], x[0] - x[1]),
        "a squared norm by dot": lambda x: jnp.dot(x.ravel(), x.ravel()),
        "a squared norm by vecdot": lambda x: jnp.vecdot(x, x),
    }
)

# --------------------------------------------------------------------------------------------------
# Squares
# --------------------------------------------------------------------------------------------------

faults(FUNCTION, "mul", H)(
    {
        "squares in float16 that are summed": lambda x: jnp.sqrt(jnp.sum((x * x).astype(F32))),
        "squares of three columns by hand": lambda x: (
            x[:, 0] * x[:, 0] + x[:, 1] * x[:, 1] + x[:, 2] * x[:, 2]
        ),
        "a product of equal differences": lambda x: jnp.mean((x[0] - x[1]) * (x[0] - x[1])),
    }
)
for _dtype in (BF16, F16):
    faults(FUNCTION, "integer_pow", shape(4, 4, dtype=_dtype))(
        {
            f"a squared error in {jnp.dtype(_dtype)}": lambda x: jnp.mean((x[0] - x[1]) ** 2),
            f"a distance by hand in {jnp.dtype(_dtype)}": lambda x: jnp.sqrt(
                (x[0] - x[2]) ** 2 + (x[1] - x[3]) ** 2
            ),
            f"squares times weights in {jnp.dtype(_dtype)}": lambda x: (
                2 * x[0] ** 2 + 3 * x[1] ** 2
            ),
            f"a penalty beside a loss in {jnp.dtype(_dtype)}": lambda x: jnp.mean(
                jnp.tanh(x) + 0.1 * x**2
            ),
            f"squared magnitudes in {jnp.dtype(_dtype)}": lambda x: (jnp.abs(x) ** 2).sum(),
        }
    )
faults(FUNCTION, "integer_pow")({"an error of Optax's": lambda x: optax.l2_loss(x, x + 1).mean()})
faults(FUNCTION, "mul")({"a variance by two means": lambda x: (x * x).mean(-1) - x.mean(-1) ** 2})

# --------------------------------------------------------------------------------------------------
# Clean
# --------------------------------------------------------------------------------------------------

W = shape(12, 4, 4, dtype=F32)


def product(w: Any, x: Any, i: int = 0) -> Any:
    return x @ w[i].astype(x.dtype)


def between_matmuls(activation: Any) -> Any:
    return lambda w, x: product(w, activation(product(w, x)), 1)


_ACTIVATIONS = "softplus log_sigmoid mish silu gelu selu celu hard_swish soft_sign"
for _x in (X, H):
    clean(W, _x)(
        {
            f"{name} in {_x.dtype}": between_matmuls(getattr(jax.nn, name))
            for name in _ACTIVATIONS.split()
        }
    )
clean()(
    {name: getattr(jnp, name) for name in ("mean", "sum", "var", "tanh")}
    | {name: getattr(jax.nn, name) for name in ("relu", "elu", "sigmoid")}
)
clean(W, X)(
    {
        "a softmax in float32": lambda w, x: product(
            w, jax.nn.softmax(product(w, x).astype(F32)).astype(x.dtype)
        ),
        "a flow": lambda w, x: product(w, x * jnp.exp(jnp.tanh(x)) + x),
        "squares between matmuls": lambda w, x: product(w, jax.nn.relu(product(w, x)) ** 2),
        "a residual of squares": lambda w, x: x + product(w, jax.nn.relu(product(w, x)) ** 2),
        "a gate of an exponential": lambda w, x: product(w, product(w, x) * jnp.exp(-jnp.abs(x))),
        "a polynomial": lambda w, x: product(w, product(w, x) * (1 + 0.5 * x + 0.1 * x**3)),
    }
)
clean(W, X, backward=False)(
    {
        "a scale that is learnt as a logarithm": lambda w, x: (
            product(w, x) * jnp.exp(w[0, 0, 0]).astype(x.dtype)
        ),
        "attention by one function": lambda w, x: jax.nn.dot_product_attention(
            *[product(w, x)[None, :, None]] * 3
        ),
        "a largest number in half": lambda w, x: product(w, x).max(-1),
    }
)


@clean(W, X)
def _softplus_before_a_normalisation(w, x):
    h = jax.nn.softplus(product(w, x)).astype(F32)
    normal = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
    return product(w, normal.astype(BF16))


@clean(W, X)
def _a_gated_linear_unit(w, x):
    gate, up = jnp.split(product(w, x), 2, -1)
    return (jax.nn.silu(gate) * up) @ w[1, :2].astype(BF16)


clean(W, H)(
    {
        "a gate of two halves of one array in float16": lambda w, x: jnp.sum(
            (product(w, x)[:, :2] * product(w, x)[:, 2:]).astype(F32)
        ),
        "attention logits in float16": lambda w, x: product(
            w, jax.nn.softmax((x @ product(w, x).T / 2).astype(F32)).astype(F16)
        ),
    }
)


@clean(W, H, backward=False)
def _a_norm_by_a_dot_with_a_float32_result(w, x):
    h = product(w, x)
    square = jnp.einsum("bd,bd->b", h, h, preferred_element_type=F32)
    return product(w, (h.astype(F32) * lax.rsqrt(square + 1e-3)[:, None]).astype(F16))


clean(shape(4, 8, dtype=F16))(
    {"products of arrays added": lambda x: x[:, 0] * x[:, 1] + x[:, 2] * x[:, 3]}
)
clean(shape(8, dtype=F16), shape(8, dtype=F16))({"an inner product of two arrays": jnp.vdot})


@clean(W, X)
def _rotary_embeddings(w, x):
    q = product(w, x)
    angles = jnp.arange(4, dtype=F32)[:, None] * jnp.asarray([1.0, 0.01], F32)
    cos, sin = jnp.cos(angles).astype(BF16), jnp.sin(angles).astype(BF16)
    first, second = jnp.split(q, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1) @ q.T


@clean(W, X)
def _rotary_embeddings_by_complex_numbers(w, x):
    q = product(w, x).astype(F32)
    turns = jnp.exp(lax.complex(jnp.zeros(4), jnp.arange(4.0)))
    turned = lax.complex(q[:, :2], q[:, 2:]) * turns[:, None]
    return product(w, jnp.concatenate([turned.real, turned.imag], -1).astype(BF16))

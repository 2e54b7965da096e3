"""Functions that know nothing of dtypes: what autocast is asked to transform."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.programs import named, operations

POLICIES = pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
BF16, HALVES, FULLS = "mixed_bfloat16", ("bfloat16", "bfloat16"), ("float32", "float32")
KEY = jax.random.key(0)


def normals(seed: int) -> Callable[..., jax.Array]:
    rng = np.random.default_rng(seed)
    return lambda *shape, scale=1.0: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)


normal = normals(0)
X, SEQUENCE, IMAGE = normal(6, 8), normal(2, 5, 8), normal(2, 6, 6, 3)
TOKENS = jnp.asarray([[1, 2, 3, 4, 0], [2, 2, 0, 1, 3]])
SQUARE = normal(8, 8, scale=8**-0.5)
STACK = normal(3, 8, 8, scale=8**-0.5)


@dataclasses.dataclass(frozen=True)
class Model:
    """A function of parameters and an input, and the fewest matmuls of its program."""

    fn: Callable[[Any, Any], Any]
    make_params: Callable[[], Any]
    x: Any
    matmuls: int = 1
    batched: bool = True

    @functools.cached_property
    def params(self) -> Any:
        return self.make_params()


MODELS: dict[str, Model] = {}


def model(x: Any = X, params: Any = None, **options: Any) -> Callable[[Any], Any]:
    """Registers a plain function; its params are a square matrix and a bias unless given."""
    given = {"w": SQUARE, "b": normal(8)} if params is None else params

    def register(fn: Any) -> Any:
        MODELS[fn.__name__] = Model(fn, lambda: given, x, **options)
        return fn

    return register


def flax_model(name: str, module: nn.Module, x: Any = X, *, matmuls: int = 1, **call: Any) -> None:
    def variables() -> Any:
        return module.init({"params": KEY, "dropout": KEY}, x, **call)

    def fn(variables: Any, x: Any) -> Any:
        return module.apply(variables, x, rngs={"dropout": KEY}, **call)

    MODELS[name] = Model(fn, variables, x, matmuls)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def dots(fn: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    return [op.inputs for op in named(operations(fn, *args), "dot_general")]


def reads(primitives: str, fn: Callable[..., Any], *args: Any) -> set[tuple[str, ...]]:
    return {op.inputs for op in named(operations(fn, *args), *primitives.split())}


def half_of(policy: str) -> str:
    return policy.removeprefix("mixed_")


def largest_error(found: Any, truth: Any) -> float:
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    return float(np.max(np.abs(found - truth)) / np.max(np.abs(truth)))


def error(found: Any, truth: Any) -> float:
    """The norm of the difference, beside that of the truth."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    return float(np.linalg.norm(found - truth) / max(np.linalg.norm(truth), 1e-3))


def dense(params: Any, x: Any) -> Any:
    return x @ params["w"] + params["b"].reshape((1,) * (x.ndim - 1) + (-1,))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.BatchNorm(use_running_average=True)(nn.Conv(8, (3, 3))(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(4)(nn.GroupNorm(2)(nn.ConvTranspose(8, (2, 2))(x)).mean((1, 2)))


class Attention(nn.Module):
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        mask = nn.make_causal_mask(x[..., 0])
        h = nn.MultiHeadDotProductAttention(
            2, dropout_rate=self.dropout, deterministic=not self.dropout
        )(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(8)(nn.silu(nn.RMSNorm()(x + h)))


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        table = nn.Embed(5, 8)
        return table.attend(nn.tanh(nn.Dense(8)(table(tokens))))


class Layers(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x: Any, _: Any) -> Any:
                return x + nn.tanh(nn.Dense(8)(nn.LayerNorm()(x))), None

        block = nn.remat(Block) if self.remat else Block
        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return nn.scan(block, **options)()(x, None)[0]


MLP = nn.Sequential([nn.Dense(16), nn.gelu, nn.Dense(16), nn.relu, nn.Dense(4)])
RECURRENT = nn.Sequential([nn.RNN(nn.OptimizedLSTMCell(8)), nn.Dense(4)])
flax_model("mlp", MLP, matmuls=3)
flax_model("conv and BatchNorm", Convolutions(), IMAGE, matmuls=3)
flax_model("attention", Attention(), SEQUENCE, matmuls=7)
flax_model("attention with dropout", Attention(0.5), SEQUENCE, matmuls=7)
flax_model("LSTM", RECURRENT, SEQUENCE, matmuls=3)
flax_model("tied weights", Tied(), TOKENS, matmuls=2)
flax_model("scanned layers", Layers(), SEQUENCE)
flax_model("scanned layers, checkpointed", Layers(remat=True), SEQUENCE)


@model(matmuls=1)
def switch(params, x):
    branches = [lambda x: x, lambda x: jnp.tanh(dense(params, x)), lambda x: x * 2.0]
    return lax.switch(jnp.argmax(x[0]) % 3, branches, dense(params, x))


@jax.custom_vjp
def _product(x, w):
    return x @ w


_product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, ct: (ct @ saved[1].T, saved[0].T @ ct))


@model(matmuls=2)
def custom_vjp(params, x):
    return _product(jnp.tanh(_product(x, params["w"])), params["w"])


@model(x=TOKENS, params={"table": normal(5, 8), "w": SQUARE})
def embedding(params, tokens):
    return params["table"][tokens] @ params["w"]


@model(params={"w": STACK, "gate": normal(8, 3)}, matmuls=2, batched=False)
def mixture_of_experts(params, x):
    expert = jnp.argmax(x @ params["gate"], -1)
    order = jnp.argsort(expert)
    sizes = jnp.bincount(expert, length=3).astype(jnp.int32)
    return lax.ragged_dot(x[order], params["w"], sizes)


@model(x=SEQUENCE, matmuls=2)
def masked_softmax(params, x):
    q = dense(params, x)
    logits = jnp.einsum("btd,bsd->bts", q, x) / jnp.sqrt(8.0)
    mask = jnp.tril(jnp.ones((5, 5), bool))
    weights = jax.nn.softmax(jnp.where(mask, logits, jnp.finfo(jnp.float32).min))
    return jnp.einsum("bts,bsd->btd", weights, q)


@model(x=SEQUENCE)
def rotary(params, x):
    angles = jnp.arange(5.0)[None, :, None] / 100.0 ** (jnp.arange(4.0)[None, None] / 4)
    first, second = jnp.split(dense(params, x), 2, -1)
    return jnp.concatenate(
        [first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles)], -1
    )


KERNELS = normal(3, 3, 3, 4), normal(3, 3, 4, 4, scale=0.2)


@model(x=(IMAGE, KERNELS[0]), params=KERNELS[1], matmuls=2, batched=False)
def raw_convolutions(params, x):
    image, kernel = x
    dims = ("NHWC", "HWIO", "NHWC")
    h = jax.nn.relu(lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=dims))
    return lax.conv_general_dilated(h, params, (2, 2), "SAME", dimension_numbers=dims)


@model(matmuls=2)
def inner_gradient(params, x):
    energy = lambda x: jnp.sum(jnp.tanh(dense(params, x)) ** 2)  # noqa: E731
    return x - 0.1 * jax.grad(energy)(x)

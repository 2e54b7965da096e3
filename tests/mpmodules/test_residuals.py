"""What backward keeps in memory: half precision wherever a model threaded by hand keeps half, and
less in norms.

The leaves of the function that `jax.vjp` returns are what is kept.
"""

from __future__ import annotations

import collections
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen as our_linen
from mpmodules import nnx as our_nnx
from policy import losses, reductions, use_policy

HALVES: dict[str, Any] = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
BATCH = 4  # leads the shape of every activation, and of no parameter
STATISTICS = BATCH * 10  # the size of the largest statistic, one number for each token or channel
TOKENS, IMAGES = jnp.zeros((BATCH, 5, 16)), jnp.zeros((BATCH, 6, 6, 3))


def kept(
    function: Any, *args: Any, with_arguments: bool = True
) -> collections.Counter[tuple[tuple[int, ...], str]]:
    """The activations that backward keeps, by shape and dtype; a buffer that is kept twice counts
    once. The function's own arguments, which its caller holds, can be left out.
    """
    shapes: dict[str, Any] = {}

    def leaves(*args: Any) -> Any:
        _, backward = jax.vjp(function, *args)
        flat = {id(leaf): leaf for leaf in jax.tree.leaves(backward)}
        for leaf in () if with_arguments else jax.tree.leaves(args):
            flat.pop(id(leaf), None)
        shapes["kept"] = [(leaf.shape, leaf.dtype.name) for leaf in flat.values()]
        return list(flat.values())

    jax.eval_shape(leaves, *args)
    return collections.Counter(
        (shape, dtype)
        for shape, dtype in shapes["kept"]
        if shape[:1] == (BATCH,) and np.prod(shape) > STATISTICS
    )


def size(residuals: collections.Counter[tuple[tuple[int, ...], str]]) -> int:
    """In bytes."""
    return sum(
        int(np.prod(shape)) * jnp.dtype(dtype).itemsize * n
        for (shape, dtype), n in residuals.items()
    )


def linen_transformer(nn: Any, **dtypes: Any) -> Any:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.LayerNorm(**dtypes)(x)
            x = x + nn.MultiHeadDotProductAttention(2, **dtypes)(h)
            h = nn.RMSNorm(**dtypes)(x)
            return x + nn.Dense(16, **dtypes)(nn.gelu(nn.Dense(32, **dtypes)(h)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(16, **dtypes)(x)
            for _ in range(2):
                x = Block()(x)
            return nn.Dense(10, **dtypes)(nn.LayerNorm(**dtypes)(x))

    return Model()


def linen_resnet(nn: Any, **dtypes: Any) -> Any:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.Conv(8, (3, 3), use_bias=False, **dtypes)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False, **dtypes)(x))
            x = nn.relu(nn.GroupNorm(2, **dtypes)(nn.Conv(8, (1, 1), **dtypes)(x)))
            x = nn.avg_pool(x, (2, 2), (2, 2))
            return nn.Dense(10, **dtypes)(x.reshape(x.shape[0], -1))

    return Model()


def nnx_transformer(nnx: Any, **dtypes: Any) -> Any:
    class Block(nnx.Module):
        def __init__(self, rngs):
            options = dtypes | {"rngs": rngs}
            self.norm_1, self.norm_2 = nnx.LayerNorm(16, **options), nnx.RMSNorm(16, **options)
            self.attention = nnx.MultiHeadAttention(2, 16, decode=False, **options)
            self.up, self.down = nnx.Linear(16, 32, **options), nnx.Linear(32, 16, **options)

        def __call__(self, x):
            x = x + self.attention(self.norm_1(x))
            return x + self.down(nnx.gelu(self.up(self.norm_2(x))))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = Block(rngs), Block(rngs)
            self.norm, self.head = (
                nnx.LayerNorm(16, **dtypes, rngs=rngs),
                nnx.Linear(16, 10, **dtypes, rngs=rngs),
            )

        def __call__(self, x):
            return self.head(self.norm(self.second(self.first(x))))

    return Model(flax_nnx.Rngs(0))


def nnx_resnet(nnx: Any, **dtypes: Any) -> Any:
    class Model(nnx.Module):
        def __init__(self, rngs):
            options = dtypes | {"rngs": rngs}
            self.conv_1, self.conv_2 = (
                nnx.Conv(3, 8, (3, 3), **options),
                nnx.Conv(8, 8, (3, 3), **options),
            )
            self.norm_1 = nnx.BatchNorm(8, use_running_average=True, **options)
            self.norm_2, self.head = nnx.GroupNorm(8, 2, **options), nnx.Linear(72, 10, **options)

        def __call__(self, x):
            x = nnx.relu(self.norm_1(self.conv_1(x)))
            x = nnx.avg_pool(nnx.relu(self.norm_2(self.conv_2(x))), (2, 2), (2, 2))
            return self.head(x.reshape(x.shape[0], -1))

    return Model(flax_nnx.Rngs(0))


CASES = {
    ("linen", "transformer"): (linen_transformer, TOKENS),
    ("linen", "resnet"): (linen_resnet, IMAGES),
    ("nnx", "transformer"): (nnx_transformer, TOKENS),
    ("nnx", "resnet"): (nnx_resnet, IMAGES),
}


def linen_kept(model: Any, x: jax.Array) -> collections.Counter[Any]:
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def run(params: Any, x: jax.Array) -> Any:
        return model.apply(variables | {"params": params}, x, mutable=["batch_stats"])[0]

    return kept(run, variables["params"], x, with_arguments=False)


def nnx_kept(model: Any, x: jax.Array) -> collections.Counter[Any]:
    graphdef, params, rest = flax_nnx.split(model, flax_nnx.Param, ...)

    def run(params: Any, x: jax.Array) -> Any:
        return flax_nnx.merge(graphdef, params, rest)(x)

    return kept(run, params, x, with_arguments=False)


def by_hand(
    make: Any, wing: Any, half: Any, measure: Any, x: jax.Array
) -> collections.Counter[Any]:
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes
        return measure(make(wing, dtype=half), x.astype(half))


WINGS: dict[str, Any] = {
    "linen": (our_linen, flax_linen, linen_kept),
    "nnx": (our_nnx, flax_nnx, nnx_kept),
}


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize(("wing", "name"), CASES)
def test_no_activation_is_kept_in_float32(wing, name, policy):
    make, x = CASES[wing, name]
    ours_in, flax, measure = WINGS[wing]
    with use_policy(policy):
        ours = measure(make(ours_in), x)
    # x**3 of gelu runs in float32 where float16 may overflow.
    wide = {"float32"} if policy == "mixed_float16" and "transformer" in name else set()
    assert ours and {dtype for _, dtype in ours} <= {jnp.dtype(HALVES[policy]).name, "bool"} | wide
    theirs = by_hand(make, flax, HALVES[policy], measure, x)
    assert any(dtype == "float32" for _, dtype in theirs)  # of Flax's norms: the count can see one
    assert wide or size(ours) < size(theirs)


FUNCTIONS: dict[str, Any] = {
    "softmax": reductions.softmax,
    "log_softmax": reductions.log_softmax,
    "logsumexp": lambda x: reductions.logsumexp(x, -1),
    "log_sigmoid": reductions.log_sigmoid,
    "softplus": reductions.softplus,
    "standardize": reductions.standardize,
    "mean": lambda x: reductions.mean(x, -1),
    "var": lambda x: reductions.var(x, -1),
    "cumsum": lambda x: reductions.cumsum(x, -1),
    "cumprod": lambda x: reductions.cumprod(x, -1),
    "global_norm": reductions.global_norm,
    "avg_pool": lambda x: our_linen.avg_pool(x, (2,)),
    "cross-entropy": lambda x: losses.softmax_cross_entropy_with_integer_labels(
        x, jnp.zeros(x.shape[:-1], int)
    ),
    "dense cross-entropy": lambda x: losses.softmax_cross_entropy(x, jnp.ones(x.shape, x.dtype)),
    "sigmoid cross-entropy": lambda x: losses.sigmoid_binary_cross_entropy(
        x, jnp.ones(x.shape, x.dtype)
    ),
    "squared error": lambda x: losses.squared_error(x),
}


@pytest.mark.parametrize("half", HALVES.values())
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_their_half_input_and_no_float32_copy(name, half):
    residuals = kept(FUNCTIONS[name], jnp.ones((BATCH, 5, 16), half))
    assert {dtype for _, dtype in residuals} <= {jnp.dtype(half).name, "bool", "int32"}
    assert sum(
        count for (_, dtype), count in residuals.items() if dtype == jnp.dtype(half).name
    ) <= 1 + ("dense" in name or "sigmoid" in name)


@pytest.mark.parametrize("wing", WINGS)
def test_all_layers_keep_one_mask(wing):
    nn, _, measure = WINGS[wing]

    class LinenModel(our_linen.Module):
        @our_linen.compact
        def __call__(self, x):
            mask = our_linen.make_causal_mask(x[..., 0])
            for _ in range(3):
                x = our_linen.MultiHeadDotProductAttention(2)(x, mask=mask)
            return x

    class NnxModel(our_nnx.Module):
        def __init__(self):
            self.layers = our_nnx.List(
                nn.MultiHeadAttention(2, 16, decode=False, rngs=flax_nnx.Rngs(0)) for _ in range(3)
            )

        def __call__(self, x):
            mask = our_nnx.make_causal_mask(x[..., 0])
            for layer in self.layers:
                x = layer(x, mask=mask)
            return x

    x = jnp.zeros((BATCH, 12, 16))
    with use_policy("mixed_bfloat16"):
        model: Any = LinenModel() if wing == "linen" else NnxModel()
        residuals = measure(model, x)
    assert sum(n for (shape, _), n in residuals.items() if shape == (BATCH, 1, 12, 12)) == 1

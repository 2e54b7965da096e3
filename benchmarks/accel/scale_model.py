"""A decoder of Llama 3's shape, layers scanned and rematerialized.

RMSNorm, rotary positions, eight key-value heads to 32 query heads, a gated MLP. The
layers come from `nn`: `mpmodules.linen`, or a namespace with its names.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from policy.losses import linear_softmax_cross_entropy


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the model. The defaults are those of Llama 3 with 8 billion parameters."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    key_heads: int = 8
    head_width: int = 128
    mlp_width: int = 14336
    vocabulary: int = 128256
    length: int = 4096


def rotary(x: jax.Array, base: float = 500000.0) -> jax.Array:
    """Rotates the halves of each head by its position, in float32. (B, T, N, H) in and out, in the
    dtype of `x`.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (
        jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequencies[None, None]
    )  # (T, 1, H / 2)
    sin, cos = jnp.sin(angles)[None], jnp.cos(angles)[None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(
        x.dtype
    )


def batch_spec() -> PartitionSpec | None:
    """Returns the spec of a batch over every axis of the mesh that XLA shards over; None without a
    mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == jax.sharding.AxisType.Auto)
    return None if mesh.empty else PartitionSpec(axes)


def split(x: jax.Array) -> jax.Array:
    """Constrains activations to be split by batch only. Without a mesh they stay as they are."""
    spec = batch_spec()
    return x if spec is None else lax.with_sharding_constraint(x, spec)


def param_spec(shape: Sequence[int], size: Size) -> PartitionSpec:
    """Splits a param over fsdp along the model's width, which every kernel and table has; norms'
    scales stay whole.
    """
    axis = len(shape) - 1 - tuple(reversed(shape)).index(size.width)
    is_scale = len(shape) - axis == 1 and shape[:-1] in ((), (size.layers,))
    return (
        PartitionSpec()
        if is_scale
        else PartitionSpec(*["fsdp" if i == axis else None for i in range(len(shape))])
    )


def cross_entropy(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Averages the cross entropy of all tokens but the first: (B, T, vocabulary), (B, T) -> ()."""
    labels, weights = targets(tokens)
    each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return jnp.mean(each * weights)


def cross_entropy_of_states(x: jax.Array, kernel: jax.Array, tokens: jax.Array) -> jax.Array:
    """Averages the same from (B, T, width) and the head's kernel, without logits in memory."""
    labels, weights = targets(tokens)
    total = linear_softmax_cross_entropy(x, kernel, labels, weights=weights, reduction="sum")
    return total / tokens.size


def targets(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the token after each, and 1 for each but the last; both are (B, T)."""
    weights = jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1
    weights = jnp.broadcast_to(weights.astype(jnp.float32)[None], tokens.shape)
    return jnp.roll(tokens, -1, axis=1), weights


def causal(nn: Any) -> Callable[..., jax.Array]:
    """Returns causal attention over grouped key heads: (B, T, N, H) and (B, T, K, H) twice -> (B,
    T, N, H).
    """

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(query[..., 0, 0])
        return nn.dot_product_attention(query, key, value, mask=mask, attention_axes=batch_spec())

    return attend


@functools.cache
def block_of(nn: Any) -> Any:
    """Returns the class of a block over `flax.linen` or `mpmodules.linen`, or a namespace that has
    the names of one.
    """
    attend = causal(nn)

    class Block(nn.Module):
        size: Size
        dtype: DTypeLike | None = None

        @nn.compact
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:  # (B, T, width)
            size = self.size
            threaded = {} if self.dtype is None else {"dtype": self.dtype}
            norm = functools.partial(nn.RMSNorm, epsilon=1e-5, **threaded)
            dense = functools.partial(nn.Dense, use_bias=False, **threaded)
            heads = functools.partial(nn.DenseGeneral, use_bias=False, **threaded)
            x = split(x)
            h = norm(name="attention_norm")(x)
            query = rotary(heads((size.heads, size.head_width), name="query")(h))
            key = rotary(heads((size.key_heads, size.head_width), name="key")(h))
            value = heads((size.key_heads, size.head_width), name="value")(h)
            h = attend(*(checkpoint_name(x, "projections") for x in (query, key, value)))
            x = split(x + heads(size.width, axis=(-2, -1), name="out")(h))
            h = norm(name="mlp_norm")(x)
            gate = checkpoint_name(dense(size.mlp_width, name="gate")(h), "gate")
            h = nn.silu(gate) * dense(size.mlp_width, name="up")(h)
            return split(x + dense(size.width, name="down")(h)), None

    return Block


@functools.cache
def decoder_of(nn: Any) -> Any:
    """Returns the decoder's class over what `block_of` takes."""
    Block = block_of(nn)

    class Decoder(nn.Module):
        """(B, T) tokens -> (B, T, vocabulary) logits. `remat` is the checkpoint policy of a layer;
        None saves its input alone.
        """

        size: Size
        dtype: DTypeLike | None = None
        remat: Callable[..., Any] | None = None

        @nn.compact
        def __call__(self, tokens: jax.Array, head: bool = True) -> jax.Array:
            size = self.size
            threaded = {} if self.dtype is None else {"dtype": self.dtype}
            x = nn.Embed(size.vocabulary, size.width, name="embed", **threaded)(tokens)
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False, policy=self.remat),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=size.layers,
            )
            x = layers(size, self.dtype, name="layers")(split(x), None)[0]
            x = split(nn.RMSNorm(epsilon=1e-5, name="norm", **threaded)(x))
            if not head:
                return x
            return split(nn.Dense(size.vocabulary, use_bias=False, name="head", **threaded)(x))

    return Decoder

"""The models of `benchmarks/linen_models.py` in nnx, written once over an API: Flax's with a dtype
by hand, or ours.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp


@functools.cache
def of(nnx: Any) -> SimpleNamespace:
    """The models' classes over `nnx`: `flax.nnx`, or `mpmodules.nnx`. Each takes ``dtype``, sizes
    and ``rngs``.
    """
    # A list of submodules is a pytree of its own in newer Flax, and plain in older.
    listed = getattr(nnx, "List", None) or list

    class Mlp(nnx.Module):
        def __init__(
            self,
            dtype: Any = None,
            layers: int = 4,
            width: int = 1024,
            use_bias: bool = True,
            *,
            rngs: Any,
        ):
            linear = functools.partial(nnx.Linear, dtype=dtype, use_bias=use_bias, rngs=rngs)
            self.layers = listed([linear(width, width) for _ in range(layers)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in list(self.layers)[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    class Bottleneck(nnx.Module):
        def __init__(self, width: int, filters: int, strides: int, dtype: Any, *, rngs: Any):
            conv = functools.partial(nnx.Conv, use_bias=False, dtype=dtype, rngs=rngs)
            norm = functools.partial(nnx.BatchNorm, momentum=0.9, dtype=dtype, rngs=rngs)
            sizes = (
                (width, filters, 1, 1),
                (filters, filters, 3, strides),
                (filters, 4 * filters, 1, 1),
            )
            self.convs = listed([conv(a, b, (k, k), (s, s)) for a, b, k, s in sizes])
            self.norms = listed([norm(b) for _, b, _, _ in sizes])
            moves = strides != 1 or width != 4 * filters
            self.conv_proj = conv(width, 4 * filters, (1, 1), (strides, strides)) if moves else None
            self.norm_proj = norm(4 * filters) if moves else None

        def __call__(self, x: jax.Array) -> jax.Array:
            y = x
            for i in range(3):
                y = self.norms[i](self.convs[i](y))
                y = nnx.relu(y) if i < 2 else y
            if self.conv_proj is not None and self.norm_proj is not None:
                x = self.norm_proj(self.conv_proj(x))
            return nnx.relu(x + y)

    class ResNet(nnx.Module):
        def __init__(
            self,
            dtype: Any = None,
            filters: int = 64,
            stages: tuple[int, ...] = (3, 4, 6, 3),
            classes: int = 1000,
            *,
            rngs: Any,
        ):
            self.conv_init = nnx.Conv(
                3, filters, (7, 7), 2, padding=3, use_bias=False, dtype=dtype, rngs=rngs
            )
            self.bn_init = nnx.BatchNorm(filters, momentum=0.9, dtype=dtype, rngs=rngs)
            blocks, width = [], filters
            for i, count in enumerate(stages):
                for j in range(count):
                    blocks.append(
                        Bottleneck(width, filters * 2**i, 2 if i and not j else 1, dtype, rngs=rngs)
                    )
                    width = 4 * filters * 2**i
            self.blocks = listed(blocks)
            self.logits = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.bn_init(self.conv_init(x)))
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for block in self.blocks:
                x = block(x)
            return self.logits(x.mean((1, 2)))

    class Block(nnx.Module):
        def __init__(self, width: int, heads: int, dtype: Any, *, rngs: Any):
            self.norm_1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(
                heads, width, dtype=dtype, decode=False, rngs=rngs
            )
            self.norm_2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

        def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
            x = x + self.attention(self.norm_1(x), mask=mask, deterministic=True)
            return x + self.down(nnx.gelu(self.up(self.norm_2(x))))

    class Transformer(nnx.Module):
        def __init__(
            self,
            dtype: Any = None,
            layers: int = 12,
            width: int = 512,
            heads: int = 8,
            vocabulary: int = 8192,
            causal: bool = True,
            length: int = 128,
            *,
            rngs: Any,
        ):
            self.causal = causal
            self.embed = nnx.Embed(vocabulary, width, dtype=dtype, rngs=rngs)
            self.positions = nnx.Embed(length, width, dtype=dtype, rngs=rngs)
            self.blocks = listed([Block(width, heads, dtype, rngs=rngs) for _ in range(layers)])
            self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.logits = nnx.Linear(width, vocabulary, dtype=dtype, rngs=rngs)

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
            mask = nnx.make_causal_mask(tokens) if self.causal else None
            for block in self.blocks:
                x = block(x, mask)
            return self.logits(self.norm(x))

    class VisionTransformer(nnx.Module):
        def __init__(
            self,
            dtype: Any = None,
            layers: int = 12,
            width: int = 384,
            heads: int = 6,
            patch: int = 16,
            classes: int = 1000,
            patches: int = 196,
            *,
            rngs: Any,
        ):
            size = (patch, patch)
            self.patches = nnx.Conv(3, width, size, size, padding="VALID", dtype=dtype, rngs=rngs)
            self.positions = nnx.Embed(patches, width, dtype=dtype, rngs=rngs)
            self.blocks = listed([Block(width, heads, dtype, rngs=rngs) for _ in range(layers)])
            self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
            self.logits = nnx.Linear(width, classes, dtype=dtype, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.patches(x)
            x = x.reshape(x.shape[0], -1, x.shape[-1])
            x = x + self.positions(jnp.arange(x.shape[1]))[None]
            for block in self.blocks:
                x = block(x)
            return self.logits(self.norm(x)[:, 0])

    return SimpleNamespace(
        Mlp=Mlp, ResNet=ResNet, Transformer=Transformer, VisionTransformer=VisionTransformer
    )

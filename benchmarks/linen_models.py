"""Models written once over an API: Flax's with its half dtype threaded by hand, or ours, which
needs none.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp


@functools.cache
def of(nn: Any, *, force: bool = True) -> SimpleNamespace:
    """The models' classes over `nn`: `flax.linen`, or `mpmodules.linen`.

    Args:
      force: whether attention by hand asks for a float32 softmax, as ours has.
    """

    class Mlp(nn.Module):
        """Dense layers with biases and relu."""

        dtype: Any = None
        layers: int = 4
        width: int = 1024
        use_bias: bool = True

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            dense = functools.partial(nn.Dense, self.width, self.use_bias, dtype=self.dtype)
            for _ in range(self.layers - 1):
                x = nn.relu(dense()(x))
            return dense()(x)

    class Bottleneck(nn.Module):
        """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside a shortcut."""

        filters: int
        strides: int
        dtype: Any = None

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
            norm = functools.partial(
                nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype
            )
            y = nn.relu(norm()(conv(self.filters, (1, 1))(x)))
            y = nn.relu(norm()(conv(self.filters, (3, 3), self.strides)(y)))
            y = norm(scale_init=nn.initializers.zeros_init())(conv(4 * self.filters, (1, 1))(y))
            if x.shape != y.shape:
                x = norm(name="norm_proj")(
                    conv(4 * self.filters, (1, 1), self.strides, name="conv_proj")(x)
                )
            return nn.relu(x + y)

    class ResNet(nn.Module):
        """Flax's ImageNet example: version 1.5, its strides in the 3x3 convolutions."""

        dtype: Any = None
        filters: int = 64
        stages: tuple[int, ...] = (3, 4, 6, 3)
        classes: int = 1000

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(
                self.filters,
                (7, 7),
                2,
                padding=3,
                use_bias=False,
                dtype=self.dtype,
                name="conv_init",
            )(x)
            x = nn.BatchNorm(
                use_running_average=False, momentum=0.9, dtype=self.dtype, name="bn_init"
            )(x)
            x = nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding="SAME")
            for i, blocks in enumerate(self.stages):
                for j in range(blocks):
                    x = Bottleneck(self.filters * 2**i, 2 if i and not j else 1, self.dtype)(x)
            return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))

    class Block(nn.Module):
        """Attention and a feed-forward layer, each after a LayerNorm."""

        heads: int
        dtype: Any = None

        @nn.compact
        def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
            width = x.shape[-1]
            softmax = {"force_fp32_for_softmax": True} if self.dtype is not None and force else {}
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(
                self.heads, dtype=self.dtype, deterministic=True, **softmax
            )(y, mask=mask)
            y = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
            return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(y))

    class Transformer(nn.Module):
        """Tokens in, logits out: a decoder with a causal mask, or an encoder without."""

        dtype: Any = None
        layers: int = 12
        width: int = 512
        heads: int = 8
        vocabulary: int = 8192
        causal: bool = True
        length: int = 128

        @nn.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
            positions = nn.Embed(self.length, self.width, dtype=self.dtype, name="positions")
            x = x + positions(jnp.arange(tokens.shape[1]))[None]
            mask = nn.make_causal_mask(tokens) if self.causal else None
            for i in range(self.layers):
                x = Block(self.heads, self.dtype, name=f"block_{i}")(x, mask)
            x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
            return nn.Dense(self.vocabulary, dtype=self.dtype, name="logits")(x)

    class VisionTransformer(nn.Module):
        """ViT: patches, blocks, the first patch's logits."""

        dtype: Any = None
        layers: int = 12
        width: int = 384
        heads: int = 6
        patch: int = 16
        classes: int = 1000
        patches: int = 196

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            size = (self.patch, self.patch)
            x = nn.Conv(self.width, size, size, padding="VALID", dtype=self.dtype, name="patches")(
                x
            )
            x = x.reshape(x.shape[0], -1, self.width)
            positions = nn.Embed(self.patches, self.width, dtype=self.dtype, name="positions")
            x = x + positions(jnp.arange(x.shape[1]))[None]
            for i in range(self.layers):
                x = Block(self.heads, self.dtype, name=f"block_{i}")(x)
            x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
            return nn.Dense(self.classes, dtype=self.dtype, name="logits")(x[:, 0])

    return SimpleNamespace(
        Mlp=Mlp,
        ResNet=ResNet,
        Block=Block,
        Transformer=Transformer,
        VisionTransformer=VisionTransformer,
    )

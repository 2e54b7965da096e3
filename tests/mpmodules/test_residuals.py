"""What backward keeps in memory: half precision wherever a model threaded by hand keeps half, and
less in norms.

The leaves of the function that `jax.vjp` returns are what is kept.
"""

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.mpmodules.apis import BOTH, MIXED, Part, Text, batch_norm, dense, layer, layer_norm

HALVES: dict[str, Any] = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
BATCH = 4  # leads the shape of every activation, and of no parameter
STATISTICS = BATCH * 10  # the size of the largest statistic, one number for each token or channel
TOKENS, IMAGES = jnp.zeros((BATCH, 5, 16)), jnp.zeros((BATCH, 6, 6, 3))
Kept = collections.Counter[tuple[tuple[int, ...], str]]


def kept(model: Any, x: jax.Array) -> Kept:
    """The activations that backward keeps, by shape and dtype; a buffer that is kept twice counts
    once. The model's parameters and input, which its caller holds, are left out.
    """
    shapes: list[Any] = []

    def leaves(*args: Any) -> Any:
        _, backward = jax.vjp(model.pure, *args)
        flat = {id(leaf): leaf for leaf in jax.tree.leaves(backward)}
        for leaf in jax.tree.leaves(args):
            flat.pop(id(leaf), None)
        shapes[:] = [(leaf.shape, leaf.dtype.name) for leaf in flat.values()]
        return list(flat.values())

    jax.eval_shape(leaves, model.params, x)
    large = [of for of in shapes if of[0][:1] == (BATCH,) and math.prod(of[0]) > STATISTICS]
    return collections.Counter(large)


def size(residuals: Kept) -> int:
    """In bytes."""
    each = [(math.prod(shape) * jnp.dtype(of).itemsize, n) for (shape, of), n in residuals.items()]
    return sum(bytes_of_one * n for bytes_of_one, n in each)


def attention(**dtypes: Any) -> Part:
    return layer(
        lambda nn: nn.MultiHeadDotProductAttention(2, **dtypes),
        lambda nnx, rngs: nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs, **dtypes),
    )


def transformer(**dtypes: Any) -> Text:
    def block_of(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x))))

    rms = layer(
        lambda nn: nn.RMSNorm(**dtypes), lambda nnx, rngs: nnx.RMSNorm(16, rngs=rngs, **dtypes)
    )
    block = Text(
        block_of,
        "Block",
        norm_1=layer_norm(16, **dtypes),
        attention=attention(**dtypes),
        norm_2=rms,
        up=dense(16, 32, **dtypes),
        down=dense(32, 16, **dtypes),
    )
    return Text(
        lambda self, x: self.head(self.norm(self.second(self.first(self.stem(x))))),
        stem=dense(16, 16, **dtypes),
        first=block,
        second=block,
        norm=layer_norm(16, **dtypes),
        head=dense(16, 10, **dtypes),
    )


def resnet(**dtypes: Any) -> Text:
    def call(self, x):
        x = jax.nn.relu(self.batch_2(self.conv_2(jax.nn.relu(self.batch_1(self.conv_1(x))))))
        x = jax.nn.relu(self.group(self.conv_3(x)))
        return self.head(x.reshape(x.shape[0], -1))

    def conv(width: int, kernel: int) -> Part:
        return layer(
            lambda nn: nn.Conv(8, (kernel, kernel), **dtypes),
            lambda nnx, rngs: nnx.Conv(width, 8, (kernel, kernel), rngs=rngs, **dtypes),
        )

    group = layer(
        lambda nn: nn.GroupNorm(2, **dtypes),
        lambda nnx, rngs: nnx.GroupNorm(8, 2, rngs=rngs, **dtypes),
    )
    norms = {f"batch_{i}": batch_norm(8, **dtypes) for i in (1, 2)}
    convs = {"conv_1": conv(3, 3), "conv_2": conv(8, 3), "conv_3": conv(8, 1)}
    parts: dict[str, Any] = {**norms, **convs}
    return Text(call, **parts, group=group, head=dense(288, 10, **dtypes))


@pytest.mark.cases(slow=1)
@BOTH
@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize(("make", "x"), [(transformer, TOKENS), (resnet, IMAGES)])
def test_no_activation_is_kept_in_float32(api, make, x, policy):
    ours = kept(api.scoped(make(), policy, None, x), x)
    # x**3 of gelu runs in float32 where float16 may overflow.
    wide = {"float32"} if policy == "mixed_float16" and make is transformer else set()
    assert ours and {dtype for _, dtype in ours} <= {jnp.dtype(HALVES[policy]).name, "bool"} | wide
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes
        theirs = kept(api.theirs(make(dtype=HALVES[policy]), x), x.astype(HALVES[policy]))
    assert any(dtype == "float32" for _, dtype in theirs)  # of Flax's norms: the count can see one
    assert wide or size(ours) < size(theirs)


@pytest.mark.slow
@BOTH
def test_all_layers_keep_one_mask(api):
    def call(self, x):
        mask = jnp.tril(jnp.ones((12, 12), bool))[None, None] & (x[:, None, None, :, 0] < 9)
        for name in "abc":
            x = getattr(self, name)(x, mask=mask)
        return x

    x = jnp.zeros((BATCH, 12, 16))
    model = api.scoped(Text(call, a=attention(), b=attention(), c=attention()), MIXED, None, x)
    assert sum(n for (shape, _), n in kept(model, x).items() if shape == (BATCH, 1, 12, 12)) == 1

"""Integers, choices and draws in half precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.policy.inspect.audit.corpus.planting import BF16, F32, KEY, plant, shape

MANY = 3000  # more than float16 tells apart
WIDE, LOGITS = shape(4, MANY), shape(4, 8, dtype=F32)


def positions(dtype: Any = BF16, many: int = MANY) -> Any:
    return jnp.arange(many).astype(dtype)


def distances() -> Any:
    return jnp.arange(MANY)[:, None] - jnp.arange(8)[None]


def _deep(x: Any) -> Any:
    for _ in range(40):
        x = jnp.tanh(x) + jnp.sin(x)
    return x


def uniform(x, *args):
    return jax.random.uniform(KEY, x.shape, x.dtype, *args)


plant(
    """
rounded-integer convert_element_type(x=WIDE) in bfloat16, float16
    positions: x * positions(x.dtype)
    a count: x[:, 0] / (x > 0).sum(-1).astype(x.dtype)
    timesteps drawn: x * jax.random.randint(KEY, (4, 1), 0, 4000).astype(x.dtype)
rounded-integer iota(x=WIDE) in bfloat16, float16
    an iota: x + jnp.arange(MANY, dtype=x.dtype)
    evenly spaced numbers: x * jnp.linspace(0, 1, MANY, dtype=x.dtype)
rounded-integer convert_element_type
    positions that were float32 before:
        (jnp.arange(MANY, dtype=F32) + 1).astype(x.dtype) * x[0, 0]
    positions behind an offset of a cache:
        x[0, 0] * (jnp.argmax(x[0]) + jnp.arange(MANY)).astype(x.dtype)
    distances: distances().astype(x.dtype) * x[0, 0]
    distances times a slope, as in ALiBi:
        x[0, 0] - (0.25 * distances().astype(F32)).astype(x.dtype)
    distances times slopes that are computed:
        x[0, 0] - (jnp.exp2(-jnp.arange(1, 9.0)) * distances()).astype(x.dtype)
    an index of two small ones:
        (jnp.arange(64)[:, None] * 64 + jnp.arange(64)).astype(x.dtype) * x[0, 0]
    coordinates of a grid: jnp.indices((512, 4)).astype(x.dtype) * x[0, 0]
    coordinates that are normalised: ((jnp.arange(1024) + 0.5) / 1024).astype(x.dtype) * x[0, 0]
    evenly spaced numbers that are cast: jnp.linspace(-1, 1, 1024).astype(x.dtype) * x[0, 0]
    a permutation: jax.random.permutation(KEY, 1000).astype(x.dtype) * x[0, 0]
    a choice of a thousand: x * jax.random.choice(KEY, 1000, (4, 4)).astype(x.dtype)
    a category of a thousand:
        jax.random.categorical(KEY, jnp.zeros((4, 4, 1000))).astype(x.dtype) * x
    the counter of a loop: lax.fori_loop(0, 1000, lambda i, h: jnp.tanh(h * i.astype(h.dtype)), x)
    the numbers of a loop's rows:
        lax.scan(lambda h, i: (jnp.tanh(h * i.astype(h.dtype)), None), x, jnp.arange(1000))[0]
    numbers that are captured: jnp.asarray(np.arange(1000)).astype(BF16) * x[0, 0]
    the running sum of ones: jnp.cumsum(jnp.ones(1000, I32)).astype(x.dtype) * x[0, 0]
    an index of a device:
        jax.vmap(lambda row: row * lax.axis_index("i").astype(row.dtype),
        axis_name="i")(jnp.tile(x, (250, 1)))
rounded-integer convert_element_type(x=WIDE)
    positions of a mask by its running sum: jnp.cumsum(x > 0, -1).astype(x.dtype)
    an index of a vocabulary: jnp.argmax(x, -1).astype(x.dtype)
    indices of the largest: lax.top_k(x, 2)[1].astype(x.dtype)
    ranks: jnp.argsort(jnp.argsort(x[0])).astype(x.dtype)
    places that are not zero: jnp.nonzero(x[0] > 0, size=1000)[0].astype(x.dtype)
    a count of what is not zero: x[:, 0] / jnp.count_nonzero(x, -1).astype(x.dtype)
    a quotient by a count that a norm uses:
        x / (x > 0).sum(-1, keepdims=True, dtype=F32).astype(x.dtype)
rounded-integer convert_element_type(mask=shape(4, MANY, dtype=I32))
    positions of a mask of integers: (jnp.cumsum(mask, -1) - 1).astype(BF16)
    a number of tokens that a mask has: mask.sum().astype(BF16)
    a histogram: jnp.bincount(mask[0], length=8).astype(BF16)
    lengths of segments: jax.ops.segment_sum(jnp.ones(MANY, I32), mask[0], 8).astype(BF16)
    a remainder: (mask % 1000).astype(BF16)
    integers within limits: jnp.clip(mask, 0, 1000).astype(BF16)
rounded-integer convert_element_type(x=WIDE, edges=shape(MANY))
    a place in a sorted array: jnp.searchsorted(edges, x[0]).astype(BF16)
clean(x=shape(4, 1), backward=False)
    positions in float32: (x.astype(F32) * positions(F32)).astype(BF16)
    few positions: x * positions(BF16, 256)
    a size that bfloat16 has not: x * 513
    positions modulo a small size: x * (jnp.arange(MANY) % 16).astype(BF16)
    positions in blocks: x * (jnp.arange(MANY) // 16).astype(BF16)
    positions that are clipped: x * jnp.clip(jnp.arange(MANY), 0, 128).astype(BF16)
    the first of many positions: x * jnp.arange(MANY)[:128].astype(BF16)
    multiples of a power of two: x * (jnp.arange(200) * 64).astype(BF16)
    angles in float32:
        x * jnp.cos(positions(F32)[:, None] * jnp.exp(-jnp.arange(4.0))).astype(BF16)[:, 0]
    the reciprocals of positions: x * (1 / (positions(F32) + 1)).astype(BF16)
    decays by distance: x * jnp.exp(-0.1 * positions(F32)).astype(BF16)
    buckets of distances: x * jnp.log2(1 + positions(F32)).astype(I32).astype(BF16)
    a few draws: x * jax.random.randint(KEY, (4, 1), 0, 200).astype(BF16)
    few turns of a loop: lax.fori_loop(0, 100, lambda i, h: jnp.tanh(h * i.astype(h.dtype)), x)
    an index into a table:
        jnp.take(jnp.ones((MANY, 4), BF16), jnp.arange(MANY)[:8], axis=0) * x[0]
clean(x=shape(4, 1, dtype=F16), backward=False)
    positions that float16 has: x * positions(F16, 2048)
clean(x=WIDE, backward=False)
    a mask as numbers: x * (x > 0).astype(BF16)
    a mask of a large number: jnp.where(x > 0, x, -1e9).astype(BF16)
    a causal mask: jnp.where(jnp.arange(MANY) <= 7, x, -jnp.inf)
    a mean by a count in float32: (x.astype(F32).sum(-1) / (x > 0).sum(-1)).astype(BF16)
    a count of few: x[:, 0] / (x[:, :128] > 0).sum(-1).astype(BF16)
clean(x=shape(4, MANY, dtype=F32), backward=False)
    activations times positions: (x * positions(F32)).astype(BF16)
    deep activations times positions: (_deep(x) * positions(F32)).astype(BF16)
clean(x=shape(4, MANY, dtype=jnp.uint8), backward=False)
    bytes of an image: x.astype(BF16) / 255
clean(x=shape(MANY, dtype=I32), backward=False)
    labels that are not known: x.astype(BF16)
    one hot of many classes: jax.nn.one_hot(x[:8], MANY, dtype=BF16)
rounded-choice argmax(x=LOGITS)
    the largest of rounded logits: jnp.argmax(x.astype(BF16), -1)
    the largest of rounded logits by a temperature: jnp.argmax(x.astype(BF16) / 0.7, -1)
    the largest of rounded logits behind a mask:
        jnp.argmax(jnp.where(x > 0, x.astype(BF16), -jnp.inf), -1)
    the largest of rounded probabilities: jnp.argmax(jax.nn.softmax(x).astype(BF16), -1)
    the largest of rounded logits with noise:
        jnp.argmax(jnp.tanh(x).astype(F16) + 0.1 * jax.random.normal(KEY, x.shape, F16), -1)
    a category of rounded logits: jax.random.categorical(KEY, jnp.tanh(x).astype(BF16))
    greedy decoding of rounded rows:
        lax.scan(lambda n, row: (n, jnp.argmax(row.astype(BF16))), 0, x)[1]
rounded-choice argmin(x=LOGITS, codes=LOGITS)
    the nearest code by rounded distances:
        jnp.argmin(jnp.square(x[:, None] - codes).sum(-1).astype(BF16), -1)
rounded-choice top_k(x=LOGITS)
    the best of rounded scores: lax.top_k(x.astype(F16), 2)[1]
    beams of rounded scores: lax.top_k(x.astype(BF16).reshape(-1), 2)[1]
    the smallest of rounded scores: lax.top_k(-x.astype(BF16), 2)[1]
rounded-choice top_k(x=shape(4, 8), w=shape(8, 6), bias=shape(6))
    experts by rounded gates:
        lax.top_k(jax.nn.softmax(jnp.dot(x, w, preferred_element_type=F32)).astype(x.dtype), 2)
    experts by rounded gates and a bias:
        lax.top_k(jax.nn.sigmoid(jnp.dot(x, w, preferred_element_type=F32)).astype(x.dtype) +
        bias, 2)[1]
rounded-choice sort(x=LOGITS)
    the order of rounded scores: jnp.argsort(x.astype(BF16))
    the falling order of rounded scores: jnp.argsort(-x.astype(BF16))
    rows by rounded keys: lax.sort_key_val(x[:, 0].astype(BF16), jnp.arange(4))[1]
rounded-choice approx_top_k(x=LOGITS)
    about the best of rounded scores: lax.approx_max_k(x.astype(BF16), 2)[1]
clean(x=LOGITS, backward=False)
    the largest of logits: jnp.argmax(x, -1)
    the largest before the cast: (x.astype(BF16), jnp.argmax(x, -1))
    the largest rounded number: x.astype(BF16).max(-1)
    a category of logits: jax.random.categorical(KEY, x)
    rounded numbers in order: jnp.sort(x.astype(BF16))
clean(x=shape(4, 8), backward=False)
    the largest of half logits: lax.top_k(x, 2)
    the largest of half sums: jnp.argmax(x.sum(0))
    half logits that were float32 between: jnp.argmax(x.astype(F32) * 2, -1)
clean(x=shape(4, 8), w=shape(8, 6, dtype=F32), b=shape(6, dtype=F32), backward=False)
    the largest of half logits with a stored bias:
        jnp.argmax(x @ w.astype(x.dtype) + b.astype(x.dtype), -1)
clean(x=shape(8, dtype=I32), backward=False)
    the largest of integers: jnp.argmax(x)
coarse-draw lt
    a rare event drawn in bfloat16: jnp.where(uniform(x) < 0.001, 0, x)
    bernoulli of a half probability:
        jnp.where(jax.random.bernoulli(KEY, jnp.asarray(0.002, x.dtype), x.shape), x, 0)
    bernoulli of an array of half probabilities:
        x * jax.random.bernoulli(KEY, jnp.full(x.shape, 0.001, x.dtype))
    bernoulli of stored half probabilities:
        x * jax.random.bernoulli(KEY, jnp.asarray(np.linspace(0.001, 0.002, 4), BF16), x.shape)
    a path that is dropped: x * (uniform(x[:, :1]) < 0.01)
    a random action: jnp.where(uniform(x[0, 0]) < 0.002, x, -x)
    a small probability that is computed: jnp.where(uniform(x) < jnp.asarray(0.1) * 0.01, 0, x)
    a rare event among a hundred: jnp.where(uniform(x, 0, 100) < 0.1, 0, x)
coarse-draw lt(x=F16)
    an almost sure event drawn in float16: jnp.where(uniform(x) < 0.9995, x, 0)
coarse-draw ge(x=F16)
    an almost sure event from below: jnp.where(uniform(x) >= 0.0001, x, 0)
coarse-draw gt
    a rare event on the right: x * (jnp.full_like(x, 0.003) > uniform(x))
coarse-draw floor
    a rare event by a floor: x * jnp.floor(uniform(x) + 0.002)
    an almost sure event by a floor: x * jnp.floor(0.997 + uniform(x[:, :1]))
low-precision-function log
    gumbel noise by hand: jnp.argmax(x - jnp.log(-jnp.log(uniform(x))), -1)
    a category of half logits: jax.random.categorical(KEY, x)
clean
    a rare event drawn in float32: jnp.where(jax.random.uniform(KEY, x.shape) < 0.001, 0, x)
    dropout by hand in half: jnp.where(uniform(x) < 0.9, x, 0)
    a coin: jnp.where(jax.random.bernoulli(KEY, shape=x.shape), x, 0)
    bernoulli of a float32 probability: x * jax.random.bernoulli(KEY, 0.001, x.shape)
    a comparison of activations: jnp.where(x < 0.001, 0, x)
    noise in half: x + 0.1 * jax.random.normal(KEY, x.shape, x.dtype)
    a path that is dropped by a floor: x * jnp.floor(0.875 + uniform(x[:, :1]))
clean(x=F32)
    a floor of a float32 draw: x * jnp.floor(0.999 + uniform(x))
"""
)

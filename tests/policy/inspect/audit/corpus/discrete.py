"""Constants, integers and choices that half precision does not hold, and code that writes
its matmuls in 8 bits by hand.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policy import full_precision
from tests.policy.inspect.audit.corpus.planting import BF16, E4M3, F32, I8, KEY, plant, shape

plant(
    """
constant-out-of-range convert_element_type
    the least number of float32 in bfloat16:
        jnp.where(x > 0, x.astype(F32), jnp.finfo(F32).min).astype(x.dtype)
constant-out-of-range broadcast_in_dim(x=F16)
    an array that vanishes: x * np.full(4, 1e-9, np.float32).astype(F16)
    an array that overflows: x + np.array([1e6, 1, 2, 3], np.float32).astype(F16)
    a mask that is an array: jnp.where(x > 0, x, jnp.full(x.shape, -1e9, x.dtype))
    a mask that is a cast number: jnp.where(x > 0, x, jnp.asarray(-1e9, x.dtype))
    the first of a running maximum:
        lax.scan(lambda m, row: (jnp.maximum(m, row), None), jnp.full(4, -1e9, x.dtype),
        x)[0]
constant-out-of-range mul(x=F16)
    a mask that is a factor: x + (x > 0).astype(x.dtype) * -1e9
    a loss scale: x * 2.0 ** 16
    a rate that vanishes: x * 1e-9
constant-out-of-range add(x=F16)
    an epsilon beside a divisor: x / (jnp.abs(x) + 1e-9)
    an epsilon in a logarithm: jnp.log(x + 1e-10)
constant-out-of-range max(x=F16)
    an epsilon that limits: x / jnp.maximum(jnp.abs(x), 1e-12)
constant-out-of-range div(x=F16)
    a divisor that overflows: x / 1e5
constant-out-of-range sub(x=F16)
    a number of padding: x - 1e6
constant-out-of-range broadcast_in_dim(x=F32)
    a constant array beyond float8_e4m3fn:
        x.astype(E4M3).astype(BF16) * jnp.full(x.shape, 1000.0, E4M3).astype(BF16)
    a number that is chosen beyond float8_e5m2:
        jnp.where(x > 0, x.astype(E5M2), jnp.asarray(1e6, E5M2))
constant-out-of-range mul(x=E4M3)
    a factor beyond float8_e4m3fn: x * 1000.0
    a factor that vanishes in float8_e4m3fn: x * 0.0001
constant-out-of-range convert_element_type(x=E4M3)
    limits that are integers beyond float8_e4m3fn: jnp.clip(x, -1000, 1000)
constant-out-of-range convert_element_type(x=F32)
    a mask of -inf in a dtype without infinity: jnp.where(x > 0, x, -jnp.inf).astype(E4M3)
clean(x=F16, backward=False)
    a loss scale in float32: x.astype(F32) * 2.0 ** 16
constant-out-of-range convert_element_type(x=F16)
    a mask that is a number: jnp.where(x > 0, x, -1e9)
    a mask that is an integer: jnp.where(x > 0, x, -(10**9))
    a mask that is a sum under jit: jax.jit(lambda x: jnp.where(x > 0, x, -1e9) + 1)(x)
    a mask that is a bias: x + jnp.where(x > 0, 0.0, -1e9).astype(x.dtype)
    a mask that is a product: x + ((1.0 - (x > 0).astype(F32)) * -1e9).astype(x.dtype)
    limits for NaN: jnp.nan_to_num(x, posinf=1e9)
clean
    a mask in bfloat16 that is a number: jnp.where(x > 0, x, -1e9)
    a mask in bfloat16 that is an integer: jnp.where(x > 0, x, -(10**9))
    a mask in bfloat16 that is a cast number: jnp.where(x > 0, x, jnp.asarray(-1e9, x.dtype))
    a mask in bfloat16 that is a sum under jit: jax.jit(lambda x: jnp.where(x > 0, x, -1e9) + 1)(x)
clean(x=F16)
    a mask of -inf in float16: jnp.where(x > 0, x, -jnp.inf)
    a mask of -60000.0 in float16: jnp.where(x > 0, x, -6e4)
    a mask of 0.0001 in float16: jnp.where(x > 0, x, 1e-4)
    a mask of -65504.0 in float16: jnp.where(x > 0, x, float(jnp.finfo(F16).min))
    an epsilon that float16 has: x / (jnp.abs(x) + 1e-4)
    a mask in float32: jnp.where(x > 0, x.astype(F32), -1e9)
    a zero: x + 0.0
    zeros: x + np.zeros(4, np.float16)
"""
)


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


def _wide(x: Any) -> Any:
    return x.astype(F32)


def _in_full_precision(x: Any, w: Any) -> Any:
    with full_precision():
        return _wide(x) @ w


def _routed(x: Any, scores: Any, kernels: Any) -> Any:
    _, experts = lax.top_k(scores, 2)
    order, sizes = jnp.argsort(experts.ravel()), jnp.bincount(experts.ravel(), length=3)
    return lax.ragged_dot(x[order // 2], kernels, sizes)


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
    coordinates that are normalized: ((jnp.arange(1024) + 0.5) / 1024).astype(x.dtype) * x[0, 0]
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
rounded-choice top_k(x=shape(4, 8), w=shape(8, 3), up=shape(3, 8, 5))
    experts by gates in float32 of half logits: _routed(x, jax.nn.softmax(_wide(x @ w)), up)
    experts by sigmoids and a bias: _routed(x, jax.nn.sigmoid(_wide(x @ w)) + jnp.arange(3.0), up)
    experts by logits that are rounded between:
        _routed(x, _wide(jnp.dot(_wide(x), _wide(w)).astype(BF16)), up)
rounded-choice argmax(x=shape(4, 8), w=shape(8, 3), up=shape(3, 8, 5))
    places in the buffers of experts:
        jnp.einsum("td,te,edf->tf", x, jax.nn.one_hot(jnp.argmax(_wide(x @ w), -1), 3, dtype=BF16),
        up)
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
    the best of half logits in float32: lax.top_k(jax.nn.softmax(_wide(x @ x.T)), 2)
clean(x=shape(4, 8), w=shape(8, 3, dtype=F32), up=shape(3, 8, 5), backward=False)
    experts by logits in float32:
        _routed(x, jax.nn.softmax(_in_full_precision(x, w)), up)
clean(x=shape(4, 8), w=shape(8, 6, dtype=F32), b=shape(6, dtype=F32), backward=False)
    the largest of half logits with a stored bias:
        jnp.argmax(x @ w.astype(x.dtype) + b.astype(x.dtype), -1)
clean(x=shape(8, dtype=I32), backward=False)
    the largest of integers: jnp.argmax(x)
low-precision-function log
    gumbel noise by hand: jnp.argmax(x - jnp.log(-jnp.log(uniform(x))), -1)
    a category of half logits: jax.random.categorical(KEY, x)
clean
    bernoulli of a float32 probability: x * jax.random.bernoulli(KEY, 0.001, x.shape)
    noise in half: x + 0.1 * jax.random.normal(KEY, x.shape, x.dtype)
    a permutation of rows: jax.random.permutation(KEY, x)
clean(backward=False)
    the largest of half numbers with noise: jnp.argmax(x + jax.random.normal(KEY, x.shape, x.dtype))
"""
)


def dot(x: Any, w: Any, result: Any) -> Any:
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=result)


def codes(x: Any, dtype: Any = E4M3) -> tuple[Any, Any]:
    """An array in 8 bits, by one scale that is computed from it."""
    limit = 127.0 if dtype == I8 else float(jnp.finfo(dtype).max)
    wide = x.astype(F32)
    scale = jnp.max(jnp.abs(wide)) / limit
    quotient = wide / scale
    return (jnp.round(quotient) if dtype == I8 else quotient).astype(dtype), scale


def _with_scales(dtype: Any, result: Any) -> Any:
    def fn(x: Any, w: Any) -> Any:
        (left, s), (right, t) = codes(x, dtype), codes(w, dtype)
        return dot(left, right, result).astype(F32) * s * t

    return fn


def _by_rows_of_another_device_too(x: Any) -> Any:
    scale = jnp.maximum(jnp.max(jnp.abs(x), -1, keepdims=True) / 448, 1e-12)
    return (x / jnp.where(scale > 0, scale, 1)).astype(E4M3)


def _by_blocks(x: Any) -> Any:
    blocks = x.reshape(2, 2, 4)
    largest = jnp.max(jnp.abs(blocks), (1, 2), keepdims=True)
    return jnp.round(blocks / largest * 127).astype(I8).reshape(4, 4)


def _there_and_back(x: Any) -> Any:
    narrow, scale = codes(x, E4M3)
    return jnp.tanh(narrow.astype(F32) * scale)


plant(
    """
unscaled-cast convert_element_type(x=F32)
    operands that are cast to float8 as they are: dot(x.astype(E4M3), x.astype(E4M3), F32)
    weights that are cast to int8 without a scale: dot(x.astype(I8), codes(x, I8)[0], I32)
    int8 codes that are returned: jnp.round(x * 10).astype(I8)
    limits beyond those of float8_e4m3fn: jnp.clip(x, -57344, 57344).astype(E4M3).astype(F32)
    a limit at one end only: jnp.minimum(x, 448).astype(E4M3).astype(F32)
    a clip before a product: (jnp.clip(x, -1, 1) * 1000).astype(E4M3).astype(F32)
    a scale that comes after the cast:
        x.astype(E4M3).astype(F32) / jnp.max(jnp.abs(x.astype(E4M3).astype(F32)))
unscaled-cast convert_element_type
    a cast to float8_e5m2: jnp.tanh(x) * (x * 2).astype(E5M2).astype(BF16)
    a cache of keys in float8: (x @ x).astype(E4M3)
unscaled-cast convert_element_type(x=F32, scale=F32)
    a scale that was stored, without a clip:
        (x / scale[0, 0]).astype(E4M3).astype(F32) * scale[0, 0]
    the scale of another array: (x / (jnp.max(jnp.abs(scale)) / 448)).astype(E4M3).astype(F32)
unscaled-cast convert_element_type(x=E4M3, backward=True)
    cotangents of a widening cast: jnp.tanh(x.astype(F32))
narrow-accumulator dot_general(x=I8, w=I8)
    an int8 dot that returns int8: x @ w
    an int8 dot that returns int16: dot(x, w, jnp.int16)
narrow-accumulator dot_general(x=F32)
    a float8 dot that returns float8: dot(codes(x)[0], codes(x + 1)[0], E4M3).astype(F32)
    a float8 dot that returns float16: dot(codes(x)[0], codes(x + 1, E5M2)[0], F16)
clean(x=F32, s=F32, backward=False)
    a dot of float8 by scales of its operands: _with_scales(E4M3, F32)(x, s)
    a dot of float8 that returns bfloat16: _with_scales(E4M3, BF16)(x, s)
    a dot of int8 by scales of its operands: _with_scales(I8, I32)(x, s)
    a stored scale and a clip: jnp.clip(x / s[0, 0], -448, 448).astype(E4M3)
    noise before the rounding:
        jnp.clip(jnp.floor(x / (jnp.max(jnp.abs(x)) / 127) + s), -127, 127).astype(I8)
clean(x=F32, backward=False)
    a scale by rows: _by_rows_of_another_device_too(x)
    blocks that have a scale each: _by_blocks(x)
    a round trip through 8 bits that is scaled: _there_and_back(x)
    a reciprocal that is multiplied:
        (x.astype(BF16) * (448 / jnp.max(jnp.abs(x))).astype(BF16)).astype(E4M3)
    a scale that a norm gives: (x / jnp.sqrt(jnp.sum(x * x))).astype(E5M2)
    a sign: jnp.sign(x).astype(I8)
    a multiple of a sigmoid: (jax.nn.sigmoid(x) * 100).astype(E4M3)
    a bounded function: jnp.tanh(x).astype(I8)
    probabilities in 8 bits: jax.nn.softmax(x).astype(E4M3)
    flags and small integers: ((x > 0).astype(I8), jnp.full((4,), 3.0).astype(I8))
    labels: jnp.argmax(x, -1).astype(I8)
    buckets that are only compared: jnp.where(jnp.floor(x).astype(I8) == 3, x, 0.0)
clean(x=BF16, w=I8, scale=F32, backward=False)
    weights that are stored in int8: x @ (w.astype(BF16) * scale[:1].astype(BF16))
clean(x=BF16, w=E4M3, backward=False)
    weights that are stored in float8 after a gate:
        x @ w.astype(BF16) * jax.nn.sigmoid(x) @ w.astype(BF16)
clean(x=I8, w=I8, backward=False)
    codes of both sides of which one goes through a function:
        jax.nn.silu(x.astype(BF16)) @ w.astype(BF16)
clean(i=I32, x=F32)
    a dot of integers beside one of float32: (i @ i, x @ x)
"""
)

"""Attention that a user's own code writes: which programs of it reach a fused kernel, with which
numbers, and what keeps the others from one.
"""

import functools
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mpmodules import linen, nnx
from mpmodules.functions import splash_attention
from mpmodules.functions.fused_attention import fused_kernel
from mpmodules.layers import attention_calls
from policy import audit, autocast, use_policy
from policy.autocasting import evaluator
from tests.mpmodules.functions.test_attention import kernel  # noqa: F401 (a fixture)
from tests.mpmodules.functions.test_splash_attention import (
    CALL,
    assert_close,
    compiled,
    exact,
    needs_one_device,
    qkv,
    topology,  # noqa: F401 (a fixture)
)

attend = jax.nn.dot_product_attention
T = 128
TRI = np.tri(T, dtype=bool)
IDS = jnp.asarray(np.sort(np.random.default_rng(4).integers(0, 3, (2, T)), axis=-1), jnp.int32)
SAME = np.asarray(IDS)[:, None, :, None] == np.asarray(IDS)[:, None, None, :]


class Linen(linen.Module):
    function: Any

    @linen.compact
    def __call__(self, *args):
        return self.function(*args)


class Nnx(nnx.Module):
    def __init__(self, function: Any):
        self.function = function

    def __call__(self, *args):
        return self.function(*args)


def of_linen(function: Any, policy: Any = "mixed_bfloat16") -> Any:
    """A function as the own code of a module."""
    return lambda *args: Linen(function, dtype_policy=policy).apply({}, *args)


def of_nnx(function: Any) -> Any:
    return lambda *args: Nnx(function, dtype_policy="mixed_bfloat16")(*args)


def of_autocast(function: Any) -> Any:
    """As a function of products, which are in compute_dtype."""
    identity = jnp.eye(16)

    def run(*args):
        return function(*(x @ identity for x in args[:3]), *args[3:])

    return autocast(run, "mixed_bfloat16", params=())


KINDS = {"linen": of_linen, "nnx": of_nnx, "autocast": of_autocast}


def by_hand(logits: Any, values: Any, mask: Any = None, cap: Any = None, low: float = -1e9) -> Any:
    """Attention of (B, T, N, H), of functions that multiply."""

    def run(q, k, v, ids):
        x = logits(q, k)
        x = x if cap is None else cap * jnp.tanh(x / cap)
        x = x if mask is None else jnp.where(mask(ids), x, low)
        return values(jax.nn.softmax(x, axis=-1), v)

    return run


def heads_first(q, k):
    return q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1) / jnp.sqrt(q.shape[-1])


def values_heads_first(weights, v):
    return (weights @ v.swapaxes(1, 2)).swapaxes(1, 2)


def queries_last(q, k):
    return jnp.einsum("bshd,bthd->hsbt", k, q * q.shape[-1] ** -0.25) * q.shape[-1] ** -0.25


def by_keys(q, k, v, ids):
    weights = jax.nn.softmax(jnp.where(TRI.T[None, :, None, :], queries_last(q, k), -1e30), axis=1)
    return jnp.einsum("bshd,hsbt->bthd", v, weights)


einsum = functools.partial(jnp.einsum, "bqhd,bkhd->bhqk")
einsum_values = functools.partial(jnp.einsum, "bhqk,bkhd->bqhd")
window = (abs(np.arange(T)[:, None] - np.arange(T)) <= 9) & (np.tri(T, dtype=bool))
# Functions of queries, keys, values and ids; shapes; the pairs that are kept, the scale of the
# logits times the root of the width, and their cap.
CASES: dict[str, tuple[Any, dict[str, Any], Any, float, float | None]] = {
    "full": (lambda q, k, v, _: attend(q, k, v), {}, None, 1, None),
    "causal, grouped": (
        lambda q, k, v, _: attend(q, k, v, is_causal=True),
        {"heads": 4},
        TRI,
        1,
        None,
    ),
    "a scale": (lambda q, k, v, _: attend(q, k, v, scale=0.5), {}, None, 2, None),
    "a window": (
        lambda q, k, v, _: attend(q, k, v, local_window_size=(9, 0)),
        {"heads": 4, "key_heads": 1},
        window,
        1,
        None,
    ),
    "lengths of keys": (
        lambda q, k, v, ids: attend(q, k, v, key_value_seq_lengths=jnp.sum(ids < 2, -1)),
        {},
        np.asarray(IDS < 2)[:, None, None],
        1,
        None,
    ),
    "packing, grouped": (
        lambda q, k, v, ids: attend(
            q, k, v, mask=linen.make_attention_mask(ids, ids, jnp.equal, dtype=bool), is_causal=True
        ),
        {"heads": 4},
        SAME & TRI,
        1,
        None,
    ),
    "one example": (
        lambda q, k, v, _: attend(q[0], k[0], v[0])[None],
        {"batch": (1,)},
        None,
        1,
        None,
    ),
    "vmap": (
        lambda q, k, v, _: jax.vmap(functools.partial(attend, is_causal=True))(q, k, v),
        {"heads": 4},
        TRI,
        1,
        None,
    ),
    "jit in checkpoint": (
        lambda q, k, v, _: jax.checkpoint(jax.jit(functools.partial(attend, is_causal=True)))(
            q, k, v
        ),
        {},
        TRI,
        1,
        None,
    ),
    "Flax's function": (
        lambda q, k, v, ids: flax.linen.dot_product_attention(
            q, k, v, mask=linen.make_attention_mask(ids, ids, jnp.equal)
        ),
        {},
        SAME,
        1,
        None,
    ),
    "matmuls, heads first": (by_hand(heads_first, values_heads_first), {}, None, 1, None),
    "keys before queries": (by_keys, {}, TRI, 1, None),
    "a soft cap and a mask": (
        by_hand(einsum, einsum_values, lambda _: TRI, 0.5),
        {},
        TRI,
        4,
        0.5,
    ),
    "keys that are left out": (
        by_hand(einsum, einsum_values, lambda ids: ~(ids > 0)[:, None, None, :], low=-np.inf),
        {},
        np.asarray(IDS == 0)[:, None, None],
        4,
        None,
    ),
}


@pytest.fixture
def interpreter(monkeypatch):
    """Pallas's interpreter in the place of a TPU."""
    insisting = lambda _, *args, **options: fused_kernel("splash", *args, **options)  # noqa: E731
    monkeypatch.setattr(splash_attention, "INTERPRET", True)
    monkeypatch.setattr(attention_calls, "fused_kernel", insisting)


def operands_of(**shapes: Any) -> Any:
    """Float32 operands with the numbers of bfloat16."""
    return tuple(x.astype(jnp.float32) for x in qkv(**shapes))


FEW = ("causal, grouped", "matmuls, heads first")  # the program of the others is that of linen


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind in KINDS for case in (CASES if kind == "linen" else FEW)],
)
def test_own_code_runs_the_kernel_and_is_exact_to_compute_dtype(interpreter, kind, case):
    function, shapes, allowed, factor, soft_cap = CASES[case]
    own = KINDS[kind](function)
    operands = operands_of(**shapes)
    cotangent = operands_of(**shapes)[0]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out, pullback = jax.vjp(lambda *operands: own(*operands, IDS), *operands)
        found = out, *pullback(cotangent)
        text = str(jax.make_jaxpr(own)(*operands, IDS))
    assert text.count("splash_attention[") == 1 and " exp " not in text
    scaled = operands[0] * factor, *operands[1:]
    wanted = list(exact(scaled, cotangent, allowed, soft_cap))
    wanted[1] = wanted[1] * factor
    for ours, true in zip(found, wanted, strict=True):
        assert ours.dtype == jnp.float32
        assert_close(ours.astype(jnp.bfloat16), true)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_scanned_and_rematerialised_run_it_and_agree_with_xla(
    interpreter, monkeypatch, kind
):
    def function(q, k, v):
        step = jax.checkpoint(lambda x, _: (x + attend(x, k, v, is_causal=True), None))
        return jax.lax.scan(step, q, None, 2)[0]

    operands = operands_of()
    loss = lambda *x: jnp.sum(jnp.square(KINDS[kind](function)(*x)))  # noqa: E731
    fused = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*operands)
    assert "splash_attention[" in str(jax.make_jaxpr(loss)(*operands))
    monkeypatch.setattr(evaluator, "grouped", lambda jaxpr, *_: (jaxpr, {}))
    formula = jax.jit(jax.value_and_grad(lambda *x: loss(*x), (0, 1, 2)))(*operands)
    for ours, plain in zip(jax.tree.leaves(fused), jax.tree.leaves(formula), strict=True):
        np.testing.assert_allclose(ours, plain, atol=0.02 * float(jnp.abs(plain).max()))


def weights_too(q, k, v):
    weights = jax.nn.softmax(einsum(q, k))
    return einsum_values(weights, v) + weights.sum()


def gradient_inside(q, k, v):
    return jax.grad(lambda q: attend(q, k, v).sum())(q)


def with_weights(change: Any) -> Any:
    return lambda q, k, v: einsum_values(change(jax.nn.softmax(einsum(q, k))), v)


def with_logits(change: Any) -> Any:
    return lambda q, k, v: einsum_values(jax.nn.softmax(change(einsum(q, k))), v)


KEEP = jnp.asarray(np.random.default_rng(5).random((2, 1, T, T)) > 0.1, jnp.float32)
UNREAD: dict[str, Any] = {
    "weights are returned, too": weights_too,
    "a residual": lambda q, k, v: attend(q, k, v, return_residual=True)[0],
    "dropout": with_weights(lambda weights: weights * KEEP),
    "a name of the weights": with_weights(lambda weights: checkpoint_name(weights, "w")),
    "rounded logits": with_logits(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)),
    "a mask of small numbers": with_logits(lambda x: jnp.where(TRI[None, None], x, -1.0)),
    "a cap of masked logits": with_logits(lambda x: jnp.tanh(jnp.where(TRI[None, None], x, -1e9))),
    "a softmax over queries": lambda q, k, v: einsum_values(jax.nn.softmax(einsum(q, k), 2), v),
    "a softmax over heads": lambda q, k, v: einsum_values(jax.nn.softmax(einsum(q, k), 1), v),
    "two biases": with_logits(lambda x: x + KEEP + KEEP),
    "a gradient inside": gradient_inside,
}
UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "lengths": (lambda q, k, v: attend(q[:, :100], k, v), "100 queries and 128 keys"),
    "a bias": (lambda q, k, v: attend(q, k, v, bias=KEEP), "a bias"),
    "a second product": (
        lambda q, k, v: einsum_values(jax.nn.softmax(einsum(q, k) + einsum(k, q)), v),
        "a bias",
    ),
    "an unknown mask": (
        lambda q, k, v: attend(q, k, v, mask=q[:, None, :, :1, 0] > k[:, None, None, :, 0, 0]),
        "a mask that is not known while tracing",
    ),
    "a precision": (
        lambda q, k, v: einsum_values(jax.nn.softmax(einsum(q, k, precision="highest")), v),
        "a precision",
    ),
}


@needs_one_device
@pytest.mark.parametrize("what", [*UNREAD, *UNSUPPORTED])
def test_other_programs_stay_as_they_are(monkeypatch, what):
    function = UNREAD.get(what) or UNSUPPORTED[what][0]
    operands = operands_of()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        report = audit(of_linen(function), *operands).attention
        program = jax.make_jaxpr(of_linen(function))(*operands)
        found = jax.jit(of_linen(function))(*operands)
        monkeypatch.setattr(evaluator, "grouped", lambda jaxpr, *_: (jaxpr, {}))
        plain = jax.make_jaxpr(lambda *x: of_linen(function)(*x))(*operands)
        wanted = jax.jit(lambda *x: of_linen(function)(*x))(*operands)
    assert "splash" not in str(program) and "platform_index" not in str(program)
    np.testing.assert_array_equal(found, wanted)
    if what in UNSUPPORTED:
        ((_, text),) = report.items()
        assert text.startswith(f"XLA: {UNSUPPORTED[what][1]}")
    else:
        assert report == {}
    if what in UNREAD or what == "lengths":
        assert str(program) == str(plain)


@needs_one_device
@pytest.mark.parametrize("kind", KINDS)
def test_on_other_platforms_the_numbers_are_those_of_before(monkeypatch, kind):
    function = lambda q, k, v: attend(q, k, v, is_causal=True)  # noqa: E731

    def results(*operands):
        own = KINDS[kind](function)
        loss = lambda *x: jnp.sum(jnp.square(own(*x)))  # noqa: E731
        gradient = jax.grad(loss, (0, 1, 2))
        return own(*operands), gradient(*operands), jax.jvp(gradient, operands, operands)[1]

    operands = operands_of()
    found = jax.jit(results)(*operands)
    assert "platform_index" in str(jax.make_jaxpr(KINDS[kind](function))(*operands))
    eager = KINDS[kind](function)(*operands)
    np.testing.assert_allclose(eager, found[0], atol=0.02)  # each operation rounds
    monkeypatch.setattr(evaluator, "grouped", lambda jaxpr, *_: (jaxpr, {}))
    wanted = jax.jit(lambda *x: results(*x))(*operands)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_on_gpus_a_bias_and_causality_reach_cudnn(kernel, kind):  # noqa: F811
    def function(q, k, v, bias):
        logits = einsum(q, k) / 4 + bias * 0.5
        return einsum_values(jax.nn.softmax(jnp.where(TRI[None, None, :6, :6], logits, -1e9)), v)

    operands = operands_of(queries=6, keys=6)
    bias = operands_of(queries=6, heads=1, width=6)[0].swapaxes(1, 2)
    found = KINDS[kind](function)(*operands, bias)
    call = kernel[-1]
    assert call["is_causal"] and call["mask"] is None
    assert (call["bias"].shape, call["bias"].dtype) == ((2, 1, 6, 6), jnp.bfloat16)
    q, k, v = operands
    np.testing.assert_allclose(found, function(q, k, v, bias), atol=0.02)


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        weights = self.param("weights", linen.initializers.normal(0.1), (16, 16))
        q, k, v = (x @ (weights * n) for n in (1.0, 2.0, 3.0))
        x = x + attend(q, k, v, mask=mask)
        return x * jax.nn.sigmoid(x)


class Decoder(linen.Module):
    block: Any = Block
    is_scanned: bool = False

    @linen.compact
    def __call__(self, x, ids):
        mask = linen.make_attention_mask(ids, ids, jnp.equal, dtype=bool)
        if self.is_scanned:
            step = lambda block, x, mask: (block(x, mask), None)  # noqa: E731
            options: dict[str, Any] = {"in_axes": linen.broadcast, "length": 3}
            options |= {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            scan = linen.scan(step, **options)
            return scan(self.block(name="block_0"), x, mask)[0]
        for i in range(3):
            x = self.block(name=f"block_{i}")(x, mask)
        return x


@needs_one_device
@pytest.mark.parametrize("is_scanned", [False, True])
@pytest.mark.parametrize("block", [Block, linen.remat(Block)])
def test_blocks_that_are_alike_read_a_mask_that_is_made_around_them(block, is_scanned):
    x, model = operands_of()[0], Decoder(block, is_scanned, dtype_policy="mixed_bfloat16")
    variables = jax.eval_shape(model.init, jax.random.key(0), x, IDS)
    loss = lambda variables, ids: jnp.sum(jnp.asarray(model.apply(variables, x, ids)))  # noqa: E731
    for function in (loss, jax.grad(loss)):
        report = audit(function, variables, IDS)
        assert {*report.attention.values()} == {"splash"}
        assert {f"block_{i}" for i in range(1 if is_scanned else 3)} <= {*report.attention}


@needs_one_device
def test_xla_is_chosen_by_this_librarys_functions_by_own_code_that_is_kept_and_in_float32():
    asks = lambda q, k, v: nnx.dot_product_attention(q, k, v, implementation="xla")  # noqa: E731
    plain = lambda q, k, v: attend(q, k, v)  # noqa: E731
    ours = lambda q, k, v: nnx.dot_product_attention(q, k, v)  # noqa: E731
    operands = operands_of()
    for kind in KINDS.values():
        (program,) = audit(kind(asks), *operands).attention.values()
        assert program == "XLA: implementation='xla'"
        assert [*audit(kind(ours), *operands).attention.values()] == ["splash"]
    assert audit(of_linen(plain, "float32"), *operands).attention == {}  # as it is written

    class Kept(Linen):
        own_code = "keep"

    kept = Kept(plain, dtype_policy="mixed_bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        report = audit(lambda *x: kept.apply({}, *x), *operands)
    assert report.attention == {}


def value_and_gradients(*operands):
    wide = [x.astype(jnp.float32) for x in operands]

    def loss(*operands):
        step = jax.checkpoint(lambda x, _: (attend(x, *operands[1:], is_causal=True), None))
        return jnp.sum(jnp.square(jax.lax.scan(step, operands[0], None, 2)[0]))

    own = of_linen(lambda *x: attend(*x, is_causal=True))
    once = jax.value_and_grad(lambda *x: jnp.sum(jnp.square(own(*x))), (0, 1, 2))
    return once(*wide), jax.grad(of_linen(loss))(*wide)


@needs_one_device
def test_programs_for_tpus_have_the_kernel_on_one_device_and_over_a_mesh(topology):  # noqa: F811
    one = jax.sharding.SingleDeviceSharding(topology.devices[0])
    mesh = topology.mesh({"data": 2, "model": 2})
    # forward and backward; and of the scanned layer also forward again
    assert compiled(value_and_gradients, one).count(CALL) == 5
    with jax.set_mesh(mesh), use_policy(None, attention_axes=P("data", None, "model")):
        sharding = jax.sharding.NamedSharding(mesh, P("data"))
        assert compiled(value_and_gradients, sharding).count(CALL) == 5

"""Attention in a user's own code.

Written by hand it stays as it is written, with 16-bit matmuls and a float32 softmax; this library's
functions run the fused kernels there.
"""

import functools
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mpmodules import linen, nnx
from mpmodules.functions import splash_attention
from mpmodules.functions.fused_attention import fused_kernel
from mpmodules.layers import attention_calls
from policy import audit, autocast, full_precision, use_policy
from policy.programs.reading.walk import walk
from tests.mpmodules.functions.test_splash_attention import (
    CALL,
    assert_close,
    compiled,
    exact,
    needs_one_device,
    qkv,
    topology,  # noqa: F401 (a fixture)
)

attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
T = 128
TRI = np.tri(T, dtype=bool)


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
        return function(*(x @ identity for x in args))

    return autocast(run, "mixed_bfloat16", params=())


KINDS = {"linen": of_linen, "nnx": of_nnx, "autocast": of_autocast}

einsum = functools.partial(jnp.einsum, "bqhd,bkhd->bhqk")
einsum_values = functools.partial(jnp.einsum, "bhqk,bkhd->bqhd")


def by_hand(q, k, v):
    logits = 0.5 * jnp.tanh(einsum(q, k) / 0.5)
    return einsum_values(jax.nn.softmax(jnp.where(TRI[None, None], logits, -1e9), axis=-1), v)


def heads_first(q, k, v):
    logits = q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1) / jnp.sqrt(q.shape[-1])
    return (jax.nn.softmax(logits, axis=-1) @ v.swapaxes(1, 2)).swapaxes(1, 2)


# Functions of queries, keys and values; the pairs that are kept, the scale of the logits times the
# root of the width, and their cap.
CASES: dict[str, tuple[Any, Any, float, float | None]] = {
    "jax.nn's function": (functools.partial(attend, is_causal=True), TRI, 1, None),
    "jax.nn's function, mapped": (
        jax.vmap(functools.partial(attend, is_causal=True)),
        TRI,
        1,
        None,
    ),
    "Flax's function": (flax.linen.dot_product_attention, None, 1, None),
    "matmuls": (heads_first, None, 1, None),
    "a soft cap and a mask": (by_hand, TRI, 4, 0.5),
}


def operands_of(**shapes: Any) -> Any:
    """Float32 operands with the numbers of bfloat16."""
    return tuple(x.astype(jnp.float32) for x in qkv(**shapes))


@pytest.mark.cases(fast=1, slow=5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_attention_by_hand_multiplies_in_16_bits_and_has_a_float32_softmax(kind, case):
    function, allowed, factor, soft_cap = CASES[case]
    operands = operands_of()
    cotangent = operands_of()[0]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        out, pullback = jax.vjp(KINDS[kind](function), *operands)
        found = out, *pullback(cotangent)
        program = jax.make_jaxpr(KINDS[kind](function))(*operands)
        report = audit(KINDS[kind](function), *operands).attention
    equations = [site.equation for site in walk(program)]
    dots = [e for e in equations if e.primitive.name == "dot_general"]
    exponentials = [e for e in equations if e.primitive.name == "exp"]
    assert {v.aval.dtype for e in dots for v in e.invars} == {jnp.dtype(jnp.bfloat16)}
    assert [e.outvars[0].aval.dtype for e in exponentials] == [jnp.float32]
    assert report == {}
    scaled = operands[0] * factor, *operands[1:]
    wanted = list(exact(scaled, cotangent, allowed, soft_cap))
    wanted[1] = wanted[1] * factor
    for ours, true in zip(found, wanted, strict=True):
        assert_close(ours.astype(jnp.bfloat16), true, ulps=3)  # each operation rounds


@pytest.fixture
def interpreter(monkeypatch):
    """Pallas's interpreter in the place of a TPU."""
    insisting = lambda _, *args, **options: fused_kernel("splash", *args, **options)  # noqa: E731
    monkeypatch.setattr(splash_attention, "INTERPRET", True)
    monkeypatch.setattr(attention_calls, "fused_kernel", insisting)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("kind", KINDS)
def test_this_librarys_function_runs_the_kernel_and_is_exact_to_compute_dtype(interpreter, kind):
    mask = linen.make_causal_mask(jnp.ones((1, T)))
    own = KINDS[kind](lambda q, k, v: linen.dot_product_attention(q, k, v, mask=mask))
    operands = operands_of()
    cotangent = operands_of()[0]
    out, pullback = jax.vjp(own, *operands)
    text = str(jax.make_jaxpr(own)(*operands))
    assert "splash_attention" in text and " exp " not in text
    wanted = exact(operands, cotangent, TRI)
    for ours, true in zip((out, *pullback(cotangent)), wanted, strict=True):
        assert ours.dtype == jnp.float32
        assert_close(ours.astype(jnp.bfloat16), true)


def ours(q: Any, k: Any, v: Any) -> Any:
    return nnx.dot_product_attention(q, k, v)


@needs_one_device
def test_xla_is_chosen_by_argument_and_in_float32():
    asks = lambda q, k, v: nnx.dot_product_attention(q, k, v, implementation="xla")  # noqa: E731
    operands = operands_of()
    for kind in KINDS.values():
        (program,) = audit(kind(asks), *operands).attention.values()
        assert program == "XLA: implementation='xla'"
        assert [*audit(kind(ours), *operands).attention.values()] == ["splash"]
    for in_float32 in (
        of_linen(ours, "float32"),
        of_autocast(full_precision(ours)),
        of_autocast(autocast(ours, enabled=False)),
        autocast(ours, "mixed_bfloat16", params=(), deny=("dot_general",)),
    ):
        assert {*audit(in_float32, *operands).attention.values()} == {"XLA: float32 queries"}


def value_and_gradients(*operands):
    wide = [x.astype(jnp.float32) for x in operands]
    causal = functools.partial(nnx.dot_product_attention, is_causal=True)

    def loss(*operands):
        step = jax.checkpoint(lambda x, _: (causal(x, *operands[1:]), None))
        return jnp.sum(jnp.square(jax.lax.scan(step, operands[0], None, 2)[0]))

    own = of_linen(causal)
    once = jax.value_and_grad(lambda *x: jnp.sum(jnp.square(own(*x))), (0, 1, 2))
    return once(*wide), jax.grad(of_linen(loss))(*wide)


@pytest.mark.slow
@needs_one_device
def test_programs_for_tpus_have_the_kernel_on_one_device_and_over_a_mesh(topology):  # noqa: F811
    one = jax.sharding.SingleDeviceSharding(topology.devices[0])
    mesh = topology.mesh({"data": 2, "model": 2})
    # forward and backward; and of the scanned layer also forward again
    assert compiled(value_and_gradients, one).count(CALL) == 5
    with jax.set_mesh(mesh), use_policy(None, attention_axes=P("data", None, "model")):
        sharding = jax.sharding.NamedSharding(mesh, P("data"))
        assert compiled(value_and_gradients, sharding).count(CALL) == 5

"""Masks that are read from the program that makes them."""

from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen
from mpmodules.functions.attention_masks import KnownMask, known_mask

T = 8
CAUSAL = np.tri(T, dtype=bool)
QUERY = jnp.zeros((2, T, 4, 16), jnp.bfloat16)
TOKENS = jnp.asarray([[1, 5, 0, 2, 2, 7, 0, 0], [1, 1, 1, 1, 3, 3, 0, 0]])
POSITION = np.arange(T)


def whole(known: KnownMask) -> Any:
    """The mask itself, (B, N or 1, T, S)."""
    mask: Any = jnp.ones((1, 1, 1, 1), bool)
    if known.static is not None:
        mask = mask & known.static[None]
    if known.ids:
        query, key = known.ids
        mask = mask & (query[:, None, :, None] == key[:, None, None, :])
    return jnp.broadcast_to(mask, (2, mask.shape[1], T, T))


def window(size: int) -> Any:
    ahead = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    return jnp.where(ahead < size, jnp.tril(jnp.ones((T, T), bool)), False)


# Of tokens (B, T): the mask, whether a part of it is static, and whether a part is of segments.
READ: dict[str, tuple[Any, bool, bool]] = {
    "Flax's causal mask": (flax.linen.make_causal_mask, True, False),
    "ours, of booleans": (lambda t: linen.make_causal_mask(t, dtype=bool), True, False),
    "of one row": (lambda t: linen.make_causal_mask(t[:1]), True, False),
    "iotas": (lambda t: flax.linen.make_attention_mask(POSITION, POSITION, jnp.less), True, False),
    "tril": (lambda t: jnp.tril(jnp.ones((T, T))), True, False),
    "a window": (lambda t: window(3), True, False),
    "blocks": (lambda t: jnp.arange(T)[:, None] // 3 == jnp.arange(T) // 3, True, False),
    "all": (lambda t: jnp.ones((2, 1, T, T)), False, False),
    "for each head": (lambda t: jnp.arange(4)[:, None, None] + CAUSAL > 1, True, False),
    "numpy": (lambda t: CAUSAL[None, None], True, False),
    "padding": (lambda t: flax.linen.make_attention_mask(t > 0, t > 0), False, True),
    "padding as numbers": (lambda t: flax.linen.make_attention_mask(t, t), False, True),
    "keys": (lambda t: (t > 0)[:, None, None, :], False, True),
    "queries": (lambda t: (t > 0)[:, None, :, None], False, True),
    "examples": (lambda t: (t[:, 0] > 0)[:, None, None, None], False, True),
    "lengths": (lambda t: (t[:, :1] > POSITION)[:, None, None, :], False, True),
    "packing": (lambda t: flax.linen.make_attention_mask(t, t, jnp.equal), False, True),
    "packing, twice": (
        lambda t: (
            flax.linen.make_attention_mask(t, t, jnp.equal).astype(bool)
            & (t[:, None, :, None] == t[:, None, None, :])
        ),
        False,
        True,
    ),
    "all of it": (
        lambda t: flax.linen.combine_masks(
            flax.linen.make_causal_mask(t),
            flax.linen.make_attention_mask(t > 0, t > 0),
            flax.linen.make_attention_mask(t, t, jnp.equal),
            dtype=bool,
        ),
        True,
        True,
    ),
    "axes that are split and merged": (
        lambda t: jnp.broadcast_to(
            flax.linen.make_attention_mask(t, t, jnp.equal)[:, :, None] * CAUSAL, (2, 2, 2, T, T)
        ).reshape(2, 4, T, T),
        True,
        True,
    ),
    "a jitted function": (lambda t: jax.jit(lambda: jnp.triu(jnp.ones((T, T))))(), True, False),
}
UNKNOWN: dict[str, Any] = {
    "positions": lambda t: t[:, None, :, None] >= t[:, None, None, :],
    "an argument": lambda t: jnp.broadcast_to(t[:, None, None], (2, 1, T, T)) > 0,
    "merged axes of ids": lambda t: (
        (t[:, None, :, None] == t[:, None, None, :]).reshape(2, 1, 1, T * T).reshape(2, 1, T, T)
    ),
    "two packings": lambda t: flax.linen.combine_masks(
        *[flax.linen.make_attention_mask(x, x, jnp.equal) for x in (t, t + 1)]
    ),
    "either of two": lambda t: (t > 0)[:, None, None, :] | CAUSAL,
    "ids of floats": lambda t: flax.linen.make_attention_mask(t / 2, t / 2, jnp.equal),
    "bits of integers": lambda t: (t[:, None, :, None] & t[:, None, None, :]) > 0,
    "numbers that are truncated": lambda t: flax.linen.make_attention_mask(t / 2, t / 2).astype(
        int
    ),
    "different examples": lambda t: np.stack([CAUSAL, ~CAUSAL])[:, None],
}


@pytest.fixture(autouse=True)
def mixing():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("kind", READ)
def test_a_mask_of_shapes_and_of_comparisons_is_read_while_tracing(kind):
    make, has_static, has_segments = READ[kind]

    @jax.jit
    def read(tokens):
        known = known_mask(make(tokens), QUERY, QUERY)
        assert known is not None
        assert (known.static is not None, bool(known.ids)) == (has_static, has_segments)
        return whole(known)

    wanted = np.asarray(make(TOKENS)).astype(bool)
    wanted = wanted.reshape((1,) * (4 - wanted.ndim) + wanted.shape)
    found = np.asarray(read(TOKENS))
    ours, true = np.broadcast_arrays(found, wanted)
    np.testing.assert_array_equal(ours, true)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_another_mask_is_not_known(kind):
    def read(tokens):
        assert known_mask(UNKNOWN[kind](tokens), QUERY, QUERY) is None
        return tokens

    jax.eval_shape(read, TOKENS)


def test_a_concrete_mask_is_read_where_it_is_the_same_for_the_batch():
    masks = (CAUSAL, jnp.tril(jnp.ones((2, 1, T, T))), linen.make_causal_mask(TOKENS))
    for mask in masks:
        known = known_mask(mask, QUERY, QUERY)
        assert known is not None
        np.testing.assert_array_equal(known.static, CAUSAL[None])
    assert known_mask(linen.make_attention_mask(TOKENS, TOKENS), QUERY, QUERY) is None


def test_ids_of_a_closure_are_read_under_scan_and_as_arguments_they_are_not():
    def closed(tokens):
        mask = flax.linen.make_attention_mask(tokens, tokens, jnp.equal)

        def body(carry, given):
            assert known_mask(mask, QUERY, QUERY) is not None
            assert known_mask(mask.astype(bool) & CAUSAL, QUERY, QUERY) is not None
            assert known_mask(given, QUERY, QUERY) is None
            return carry, None

        return jax.lax.scan(body, 0, jnp.stack([mask, mask]))[0]

    jax.eval_shape(closed, TOKENS)

"""The chunks of `linear_softmax_cross_entropy` in bfloat16, a slice of the classes at a time.

A chunk keeps the exponentials of its logits, in two bytes each, and no logits. Once the last slice
has given the sums, both gradients multiply the loss's derivatives by the logits ("slopes"), which
XLA computes from the exponentials inside the matmuls.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from policy.core.arrays import make_varying, varying_axes
from policy.functions.linear_cross_entropy_options import Options, counted

Chunks = Callable[..., tuple[Array, list[Array]]]

# Exponentials are relative to a reference that is guessed, and whose guess stands where the largest
# logit is at most this much above it. Otherwise a second pass is relative to the largest itself.
_WINDOW = 44.0
_UNIT = 2.0**63  # of codes: exponentials below 2**64 then have 7 bits of an exponent
_SLICE_BYTES = 48 << 20  # of a slice's logits, which XLA for TPU keeps in the chip's own memory
_TILE = 128  # classes of a tile of a TPU


def counts_in_slices(examples: int, classes: int, chunk_size: int) -> tuple[int, int, int]:
    """Returns the numbers of chunks, of examples in each, and of slices of the classes.

    Chunks may overlap.
    """
    size = -(-examples // max(1, -(-examples // chunk_size)))
    size = min(examples, -(-size // 8) * 8)  # tiles of a TPU have 8 rows
    chunks = max(1, -(-examples // max(1, size)))
    return chunks, size, max(1, -(-4 * size * classes // _SLICE_BYTES))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_slices(
    options: Options, whole: Chunks, x: Array, labels: Array, weight: Any, kernel: Array
) -> tuple[Array, list[Array]]:
    """Returns the losses of all examples, and the gradients of x and the kernel.

    Without weights there are no gradients.

    Args:
      whole: the same function of whole logits, whose derivatives are taken.
    """
    del whole
    (count, _), size, by_class = x.shape, options.size, kernel.astype(options.operands)
    first = count - (options.chunks - 1) * size  # the rows of chunk 0 that no other one has
    zeros = [jnp.zeros((), options.wide), jnp.zeros(count, options.wide)]
    if weight is not None:
        zeros += [jnp.zeros_like(x), jnp.zeros_like(kernel, dtype=options.wide)]
    axes = varying_axes(x)
    zeros = [
        make_varying(zero, axes - {*options.axis_names} if at == 1 else axes)  # all have the losses
        for at, zero in enumerate(zeros)
    ]

    def step(carry: list[Array], start: Array) -> tuple[list[Array], None]:
        part, label, scale = jax.tree.map(
            lambda a: lax.dynamic_slice_in_dim(a, start, size), (x, labels, weight)
        )
        if scale is not None:
            scale = jnp.where((start == 0) & (jnp.arange(size) >= first), 0, scale)
            part = jnp.where(scale[:, None] == 0, 0, part)  # it may hold anything
        part = lax.optimization_barrier(part.astype(options.operands))
        guess, loss, slope = _chunk(options, carry[0], part, label, scale, by_class)
        losses = lax.dynamic_update_slice_in_dim(carry[1], loss, start, 0)
        if slope is None:
            return [guess, losses], None
        dot = functools.partial(lax.dot_general, preferred_element_type=options.wide)
        of_x = dot(slope, by_class, (((1,), (options.axis,)), ((), ())))
        pair = (part, slope) if options.axis else (slope, part)
        of_kernel = dot(*pair, (((0,), (0,)), ((), ())))
        of_x = lax.dynamic_update_slice_in_dim(carry[2], of_x.astype(x.dtype), start, 0)
        return [guess, losses, of_x, carry[3] + of_kernel], None

    starts = jnp.maximum(0, first + size * jnp.arange(-1, options.chunks - 1))
    _, losses, *gradients = lax.scan(step, zeros, starts)[0]
    return losses, gradients


def _forward(options: Options, whole: Chunks, *operands: Any) -> tuple[Any, Any]:
    return in_slices(options, whole, *operands), operands


def _backward(options: Options, whole: Chunks, operands: Any, cotangents: Any) -> tuple[Any, ...]:
    x, labels, weight, kernel = operands
    options = dataclasses.replace(options, slices=0, parts=1)
    run = lambda x, weight, kernel: whole(options, x, labels, weight, kernel)  # noqa: E731
    of_x, of_weight, of_kernel = jax.vjp(run, x, weight, kernel)[1](cotangents)
    return of_x, None, of_weight, of_kernel


in_slices.defvjp(_forward, _backward)


def _chunk(
    options: Options, guess: Array, x: Array, labels: Array, weight: Any, kernel: Array
) -> tuple[Array, Array, Array | None]:
    """Returns the mean of a chunk's largest logits, its losses (examples,), and with weights its
    slopes (examples, classes).

    Args:
      guess: of the largest logit.
    """
    local, names, cap = kernel.shape[options.axis], options.axis_names, options.soft_cap
    labels = counted(labels, local * (lax.axis_size(names) if names else 1))[:, None]
    is_class = labels >= 0
    labels = labels - (lax.axis_index(names) * local if names else 0)
    guess, reference, others, target, stored = _sums(options, guess, x, labels, weight, kernel)
    shift = reference
    if names:
        shift = lax.pmax(reference, names)
        others, target = lax.psum((others * jnp.exp(reference - shift), target), names)
    # The label's probability less 1 is that of the others, without a difference.
    own = jnp.exp(target - shift)
    total = jnp.where(is_class, own + others, jnp.nan)
    normaliser = shift + jnp.log(total)
    loss = jnp.where(others < own, jnp.log1p(others / own), normaliser - target)
    loss = jnp.where(is_class, loss, jnp.nan)
    if options.z_loss:
        loss = loss + options.z_loss * jnp.square(normaliser)
    if weight is None:
        return guess, loss[:, 0], None
    weight, of_z = weight[:, None], 2 * options.z_loss * normaliser
    scale, of_label = (1 + of_z) * jnp.exp(reference - shift) / total, (own * of_z - others) / total
    if cap is not None:
        of_label = of_label * (1 - jnp.square(target / cap))
    scale, of_label = (jnp.where(weight == 0, 0, weight * a) for a in (scale, of_label))
    # One pass stores the exponentials; both matmuls read them.
    stored = lax.optimization_barrier(stored)
    slope = (_decoded(stored) * (_UNIT * scale)).astype(options.operands)
    chosen = lax.broadcasted_iota(jnp.int32, slope.shape, 1) == labels
    return guess, loss[:, 0], jnp.where(chosen, of_label.astype(options.operands), slope)


def _sums(
    options: Options, guess: Array, x: Array, labels: Array, weight: Any, kernel: Array
) -> tuple[Array, Array, Array, Array, Any]:
    """Returns the mean of the largest logits; of each example the reference of its exponentials,
    their sum without the label's, and the label's logit, all (examples, 1); and with weights the
    codes of the exponentials (examples, classes).

    With a soft cap, codes are those of its derivative times the exponentials.
    """
    (size, _), classes, cap = x.shape, kernel.shape[options.axis], options.soft_cap
    width = -(-classes // options.slices)
    width = min(classes, -(-width // _TILE) * _TILE)
    counts = jnp.ones((size, 1), bool) if weight is None else weight[:, None] != 0
    sum_of = functools.partial(jnp.sum, axis=1, keepdims=True)

    def add(carry: tuple[Any, ...], index: Array) -> tuple[tuple[Any, ...], None]:
        reference, others, target, largest, stored = carry
        start = jnp.minimum(index * width, classes - width)  # the last two may overlap
        part = lax.dynamic_slice_in_dim(kernel, start, width, options.axis)
        logits = lax.dot_general(
            x, part, (((1,), (1 - options.axis,)), ((), ())), preferred_element_type=options.wide
        )
        slope: Any = 1
        if cap is not None:
            tanh = jnp.tanh(logits / cap)
            logits, slope = cap * tanh, 1 - jnp.square(tanh)
        powers = jnp.exp(logits - reference)
        column = start + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        is_new, chosen = column >= index * width, column == labels
        others = others + sum_of(jnp.where(is_new & ~chosen, powers, 0))
        target = target + sum_of(jnp.where(is_new & chosen, logits, 0))
        largest = jnp.maximum(largest, jnp.max(logits, 1, keepdims=True))
        if stored is not None:
            stored = lax.dynamic_update_slice_in_dim(stored, _encoded(powers * slope), start, 1)
        return (reference, others, target, largest, stored), None

    def attempt(state: tuple[Any, ...]) -> tuple[Any, ...]:
        attempts, _, reference, *_, stored = state
        given = reference, zero, zero, jnp.full_like(zero, -jnp.inf), stored
        out = lax.scan(add, given, jnp.arange(-(-classes // width)))[0]
        _, others, target, largest, stored = out
        largest = jnp.where(jnp.isfinite(largest), largest, 0)
        is_out = counts & ((largest < reference) | (largest > reference + _WINDOW))
        again = jnp.any(is_out) & (attempts == 0)
        reference = jnp.where(again & is_out, largest, reference)
        mean = jnp.sum(jnp.where(counts, largest, 0)) / jnp.maximum(
            1, jnp.sum(counts, dtype=options.wide)
        )
        return jnp.where(again, 1, 2), mean, reference, others, target, stored

    axes = varying_axes(x)
    zero = make_varying(jnp.zeros((size, 1), options.wide), axes)
    codes = None if weight is None else lax.empty((size, classes), jnp.uint16)
    codes = None if codes is None else make_varying(codes, axes)
    first = make_varying(jnp.int32(0), axes), guess, zero + guess - _WINDOW / 2, zero, zero, codes
    return lax.while_loop(lambda state: state[0] < 2, attempt, first)[1:]


def _encoded(powers: Array) -> Array:
    """Returns codes of float32 numbers in [0, 2**64): 7 bits of the exponent, 9 after the point.

    Smaller ones than 2**-63 are 0.
    """
    bits = lax.bitcast_convert_type(powers / _UNIT, jnp.uint32)
    return ((bits + (1 << 13)) >> 14).astype(jnp.uint16)


def _decoded(codes: Array) -> Array:
    """Returns the numbers of codes, in float32, over `_UNIT`."""
    return lax.bitcast_convert_type(codes.astype(jnp.uint32) << 14, jnp.float32)

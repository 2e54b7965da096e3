"""A chunk's slopes in bfloat16, a slice of the classes at a time.

The chunk keeps the exponentials of its logits, in two bytes each, and no logits. Once the last
slice has given the sums, XLA computes the slopes from the exponentials inside the matmuls of both
gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from policy.core.arrays import make_varying, varying_axes
from policy.functions.linear_cross_entropy_options import Options, local_labels

Slopes = Callable[..., tuple[Array, Any, Any, list[Array]]]

# Exponentials are relative to the largest logit of one class in 64, the first ones, if the largest
# of all is at most this much above it. Otherwise a second pass is relative to the latter.
_WINDOW, _SAMPLE = 44.0, 64
_UNIT = 2.0**63  # of codes: exponentials below 2**64 then have 7 bits of an exponent
_SLICE_BYTES = 48 << 20  # of a slice's logits, which XLA for TPU keeps in the chip's own memory
_TILE = 128  # classes of a tile of a TPU


def slices_of(examples: int, classes: int) -> int:
    """Returns the number of slices of the classes, for a chunk's examples."""
    return max(1, -(-4 * examples * classes // _SLICE_BYTES))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_slices(
    options: Options, whole: Slopes, x: Array, labels: Array, weight: Any, kernel: Array
) -> tuple[Array, Any, Any, list[Array]]:
    """Returns a chunk's losses (examples,), with weights its slopes (examples, classes), None and
    [].

    Args:
      whole: the same function of whole logits, whose derivatives are taken.
    """
    del whole
    names, cap = options.axis_names, options.soft_cap
    labels, is_class = local_labels(options, labels[:, None], kernel.shape[options.axis])
    reference, others, target, stored = _sums(options, x, labels, weight, kernel)
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
        return loss[:, 0], None, None, []
    weight, of_z = weight[:, None], 2 * options.z_loss * normaliser
    scale, of_label = (1 + of_z) * jnp.exp(reference - shift) / total, (own * of_z - others) / total
    if cap is not None:
        of_label = of_label * (1 - jnp.square(target / cap))
    scale, of_label = (jnp.where(weight == 0, 0, weight * a) for a in (scale, of_label))
    # One pass stores the exponentials; both matmuls read them.
    stored = lax.optimization_barrier(stored)
    slope = (_decoded(stored) * (_UNIT * scale)).astype(options.operands)
    chosen = lax.broadcasted_iota(jnp.int32, slope.shape, 1) == labels
    return loss[:, 0], jnp.where(chosen, of_label.astype(options.operands), slope), None, []


def _forward(options: Options, whole: Slopes, *operands: Any) -> tuple[Any, Any]:
    return in_slices(options, whole, *operands), operands


def _backward(options: Options, whole: Slopes, operands: Any, cotangents: Any) -> tuple[Any, ...]:
    x, labels, weight, kernel = operands
    run = lambda x, weight, kernel: whole(x, labels, weight, kernel)  # noqa: E731
    of_x, of_weight, of_kernel = jax.vjp(run, x, weight, kernel)[1](cotangents)
    return of_x, None, of_weight, of_kernel


in_slices.defvjp(_forward, _backward)


def _sums(
    options: Options, x: Array, labels: Array, weight: Any, kernel: Array
) -> tuple[Array, Array, Array, Any]:
    """Returns of each example the reference of its exponentials, their sum without the label's, and
    the label's logit, all (examples, 1); and with weights the exponentials' codes, (examples,
    classes).

    With a soft cap, codes are those of its derivative times the exponentials.
    """
    (size, _), classes, cap = x.shape, kernel.shape[options.axis], options.soft_cap
    width = -(-classes // options.slices)
    width = min(classes, -(-width // _TILE) * _TILE)
    sum_of = functools.partial(jnp.sum, axis=1, keepdims=True)

    def multiply(start: Any, width: int) -> tuple[Array, Any]:
        part = lax.dynamic_slice_in_dim(kernel, start, width, options.axis)
        numbers = (((1,), (1 - options.axis,)), ((), ()))
        logits = lax.dot_general(x, part, numbers, preferred_element_type=options.wide)
        if cap is None:
            return logits, 1
        tanh = jnp.tanh(logits / cap)
        return cap * tanh, 1 - jnp.square(tanh)

    def largest_of(logits: Array) -> Array:
        largest = jnp.max(logits, 1, keepdims=True)
        return jnp.where(jnp.isfinite(largest), largest, 0)

    def add(carry: tuple[Any, ...], index: Array) -> tuple[tuple[Any, ...], None]:
        reference, others, target, largest, stored = carry
        start = jnp.minimum(index * width, classes - width)  # the last two may overlap
        logits, slope = multiply(start, width)
        powers = jnp.exp(logits - reference)
        column = start + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        is_new, chosen = column >= index * width, column == labels
        others = others + sum_of(jnp.where(is_new & ~chosen, powers, 0))
        target = target + sum_of(jnp.where(is_new & chosen, logits, 0))
        largest = jnp.maximum(largest, largest_of(logits))
        if stored is not None:
            stored = lax.dynamic_update_slice_in_dim(stored, _encoded(powers * slope), start, 1)
        return (reference, others, target, largest, stored), None

    def attempt(state: tuple[Any, ...]) -> tuple[Any, ...]:
        attempts, reference, *_, stored = state
        given = reference, zero, zero, reference, stored
        out = lax.scan(add, given, jnp.arange(-(-classes // width)))[0]
        _, others, target, largest, stored = out
        is_out = largest > reference + _WINDOW
        again = jnp.any(is_out) & (attempts == 0)
        reference = jnp.where(again & is_out, largest, reference)
        return jnp.where(again, 1, 2), reference, others, target, stored

    axes = varying_axes(x)
    zero = make_varying(jnp.zeros((size, 1), options.wide), axes)
    codes = None if weight is None else lax.empty((size, classes), jnp.uint16)
    codes = None if codes is None else make_varying(codes, axes)
    first = largest_of(multiply(0, -(-classes // _SAMPLE))[0])
    state = make_varying(jnp.int32(0), axes), first, zero, zero, codes
    return lax.while_loop(lambda state: state[0] < 2, attempt, state)[1:]


def _encoded(powers: Array) -> Array:
    """Returns codes of float32 numbers in [0, 2**64): 7 bits of the exponent, 9 after the point.

    Smaller ones than 2**-63 are 0.
    """
    bits = lax.bitcast_convert_type(powers / _UNIT, jnp.uint32)
    return ((bits + (1 << 13)) >> 14).astype(jnp.uint16)


def _decoded(codes: Array) -> Array:
    """Returns the numbers of codes, in float32, over `_UNIT`."""
    return lax.bitcast_convert_type(codes.astype(jnp.uint32) << 14, jnp.float32)

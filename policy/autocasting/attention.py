"""Attention of a user's own code, run by the fused kernels that layers run.

A group of equations is evaluated as a whole. Where no kernel takes its operands, they are evaluated
as without a group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import DotAlgorithmPreset

from policy.autocasting.settings import Place, Settings
from policy.autocasting.values import CastValue, Values, as_traced, cast
from policy.programs import marks
from policy.programs.dtypes import F32, is_half
from policy.programs.frameworks import FRAMEWORKS
from policy.programs.jaxprs import Equation, OpenJaxpr, held_program, opened
from policy.programs.reading.attention import Attention, attentions
from policy.programs.rewriting.groups import Group, with_groups

# The formats of operands, with float32 results: what the kernels compute.
_OF_KERNELS = (DotAlgorithmPreset.BF16_BF16_F32, DotAlgorithmPreset.F16_F16_F32)

UNDECIDED = f"XLA: {F32.name} queries"
"""What this library's functions say of their program where autocast traces them in float32."""


def grouped(
    jaxpr: OpenJaxpr, settings: Settings, place_of: Callable[[Equation], Place]
) -> tuple[Any, dict[int, str]]:
    """Returns a program with the attentions that a kernel may take as groups.

    Returns also what an audit has of the others, by the identities of their last equations.
    """
    programs: dict[int, str] = {}
    groups = {}
    for attention in attentions(jaxpr) if FRAMEWORKS else ():
        last = attention.equations[-1]
        dtype = _dtype_of(attention, settings, place_of)
        if dtype is not None:
            shapes = [
                jax.ShapeDtypeStruct(x.shape, dtype)
                for x in (attention.query, attention.key, attention.value)
            ]
            if obstacle := FRAMEWORKS[-1].attention_obstacle(*shapes):
                programs[id(last)] = f"XLA: {obstacle}"
            elif (group := Group.of(attention)).is_complete:
                groups[id(last)] = group
    if not groups:
        return jaxpr, programs
    return with_groups(jaxpr, groups), programs


def _dtype_of(
    attention: Attention, settings: Settings, place_of: Callable[[Equation], Place]
) -> np.dtype | None:
    """Returns the dtype of an attention's operands, or None for one that is evaluated as it is: of
    a layer, one that was asked to be XLA's, or with other rules for its operations.
    """
    last = attention.equations[-1]
    place, asked = place_of(last), marks.attention_of(last.source_info.name_stack)
    is_ruled = settings.category("dot_general") != "compute" or settings.category("exp") != "fp32"
    if is_ruled or place.is_layer or place.region or asked not in (None, UNDECIDED):
        return None
    dtypes = {x.variable.aval.dtype for x in (attention.query, attention.key, attention.value)}
    dtypes.add(attention.out.variable.aval.dtype)
    (dtype, *others) = dtypes
    if others or not (dtype == F32 or is_half(dtype)):
        return None
    return place.compute if dtype == F32 else dtype


def with_given_masks(equation: Equation) -> bool:
    """Returns whether the attentions of a jitted function have masks among its arguments: they are
    known where the function is inlined.
    """
    if not any(v.aval.dtype == bool for v in equation.invars if hasattr(v.aval, "dtype")):
        return False
    return any(one.is_given_masks for one in attentions(opened(held_program(equation))[0]))


def kernel_of(
    group: Group, values: Values, place: Place, settings: Settings, formula: Callable[[], Any]
) -> tuple[Callable[[], Any] | None, str]:
    """Chooses the kernel for an attention.

    Args:
      group: its equations.
      values: of `group.invars`.
      place: that of the last equation.
      settings: of the autocast.
      formula: evaluates the equations, and returns the array of the result; for programs that are
        lowered for another platform than the kernel's.

    Returns:
      A function that returns the array of the result, or None; and what an audit has of it.
    """
    attention, given = group.attention, dict(zip(group.invars, values, strict=True))
    traced, out = attention.out.variable.aval.dtype, attention.out
    dtype = place.compute if traced == F32 else traced
    query = attention.query.laid_out(_scaled(attention, given, dtype))
    key, value = (
        x.laid_out(given[x.variable].as_dtype(dtype)) for x in (attention.key, attention.value)
    )
    masks = [
        _of_pairs(attention, mask.array(lambda v: as_traced([v], [given[v]])[0]), mask.axes)
        for mask in attention.masks
    ]
    precision = None if attention.precision in _OF_KERNELS else attention.precision
    attend, program = FRAMEWORKS[-1].fused_attention(
        query,
        key,
        value,
        bias=_bias(attention, given, dtype),
        mask=functools.reduce(jnp.logical_and, masks) if masks else None,
        precision=place.precision if precision is None else precision,
        soft_cap=attention.soft_cap,
        reduction_dtype=settings.policy.reduction_dtype,
        formula=lambda *_: out.laid_out(cast(formula(), dtype)),
    )
    if attend is None:
        return None, program
    return lambda: out.restored(attend(query, key, value)), program


def _scaled(attention: Attention, given: dict[Any, CastValue], dtype: np.dtype) -> Any:
    """Returns the queries, to be multiplied by 1 / sqrt(width) in a kernel."""
    value = given[attention.query.variable]
    factor = attention.scale * math.sqrt(attention.query.shape[-1])
    if math.isclose(factor, 1, rel_tol=1e-6):  # a float32 number
        return value.as_dtype(dtype)
    return cast(value.as_dtype(F32) * np.float32(factor), dtype)


def _bias(attention: Attention, given: dict[Any, CastValue], dtype: np.dtype) -> Any:
    """Returns the bias, (batch..., heads, queries, keys); parameters and inputs of a module's call
    are cast to `dtype`.
    """
    if attention.bias is None:
        return None
    variable, axes = attention.bias
    value = given[variable]
    follows = value.yields or value.weak
    return _of_pairs(attention, value.as_dtype(dtype) if follows else value.array, axes)


def _of_pairs(attention: Attention, x: Any, axes: Sequence[int]) -> Any:
    """Returns a mask or bias as (batch..., all heads, queries, keys), some of them of size 1."""
    x, query = lax.transpose(x, axes), attention.query
    batch = len(attention.pairs) - 3
    heads = tuple(query.variable.aval.shape[axis] for axis in query.axes[batch + 1 : -1])
    rest = x.shape[:batch], x.shape[-2:]
    if any(size != 1 for size in x.shape[batch:-2]):
        x = jnp.broadcast_to(x, (*rest[0], *heads, *rest[1]))
    return lax.reshape(x, (*rest[0], math.prod(x.shape[batch:-2]), *rest[1]))

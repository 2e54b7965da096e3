"""The function in float32: its trace as if every half dtype were float32, and how it differs."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from policy.core.scope import use_policy
from policy.inspect.traced.authors import frames_of, written_at
from policy.inspect.traced.module_paths import module_path
from policy.inspect.traced.placed import Reference
from policy.inspect.traced.program_facts import constants_within
from policy.inspect.traced.upcast import dtype_of, dtypes_of, keeps, widen
from policy.programs.dtypes import F32, holds_half, is_half
from policy.programs.jaxprs import Equation, equations_within, opened
from policy.programs.paths import Path
from policy.programs.primitives import COMPARISONS, DRAWS, HOST, READS_BITS, REMATS
from policy.programs.reading.walk import Site, walk

_RANDOM = os.path.dirname(inspect.getfile(inspect.unwrap(jax.random.uniform)))

source_info_util.register_exclusion(__file__)  # equations get the caller's source line


def _by_outer(name: str) -> Callable[..., Any]:
    """Returns a method of a trace that calls that of the outer trace."""

    def method(self: _Float32Trace, *args: Any, **params: Any) -> Any:
        with jex_core.set_current_trace(self.outer):
            return getattr(self.outer, name)(*args, **params)

    return method


class _Float32Trace(jax.core.Trace):
    """Hands operations to the outer trace with float32 in place of the half dtypes they name."""

    def __init__(self, outer: Any):
        super().__init__()
        self.outer = outer

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        if primitive.name in REMATS and any(map(is_half, dtypes_of(params["jaxpr"]))):
            with jex_core.set_current_trace(self):
                program = jex_core.ClosedJaxpr(params["jaxpr"], ())
                return jex_core.jaxpr_as_fun(program)(*tracers)
        with jex_core.set_current_trace(self.outer):
            if primitive.name not in HOST and primitive.name not in READS_BITS:
                tracers = [_widened(tracer) for tracer in tracers]
                params = {name: _wide(value) for name, value in params.items()}
            return primitive.bind(*tracers, **params)

    stage_value = _by_outer("stage_value")
    process_call = _by_outer("process_call")
    process_custom_jvp_call = _by_outer("process_custom_jvp_call")
    process_custom_vjp_call = _by_outer("process_custom_vjp_call")
    process_shard_map = _by_outer("process_shard_map")


def _widened(operand: Any) -> Any:
    if isinstance(operand, (np.ndarray, np.generic)):
        return np.asarray(operand, F32) if is_half(operand.dtype) else operand
    return widen(operand)


def _wide(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype) or (
        isinstance(value, type) and issubclass(value, np.generic)
    )
    return F32 if is_dtype and is_half(value) else value


def in_float32(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is traced in float32 wherever its code names a half dtype.

    Casts to a half dtype give float32, and half constants are widened where they are read, so code
    that inspects `dtype` sees float32; no policy is in force. A function that JAX traces by itself
    (jit, the body of a scan) is traced for float32 operands, but has the half dtypes that its own
    code names.
    """

    @functools.wraps(fn, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with (
            jex_core.take_current_trace() as outer,
            jex_core.set_current_trace(_Float32Trace(outer)),
            use_policy(None),
            jax.numpy_dtype_promotion("standard"),
        ):
            return fn(*args, **kwargs)

    return run


def wide_arguments(arrays: Sequence[Any]) -> list[Any]:
    """Returns arguments to trace with: half-precision arrays become float32 shapes."""
    return [_shape(a) if is_half(getattr(a, "dtype", F32)) else a for a in arrays]


def _shape(array: Any) -> Any:
    sharding = getattr(jax.typeof(array), "sharding", None)
    return jax.ShapeDtypeStruct(array.shape, F32, sharding=sharding)


# --------------------------------------------------------------------------------------------------
# The differences of a program from that trace
# --------------------------------------------------------------------------------------------------


def reference_of(half: Any, wide: Any = None) -> Reference:
    """Returns the differences of a program from a float32 trace of the same function.

    The equations of both are aligned by name, module and shape, in program order. A constant of
    the float32 trace is that of the program if it rounds to it, or if both stand in the same line.

    Args:
      half, wide: the jaxprs. `wide` is None if the function has no float32 trace.
    """
    sites = list(walk(half))
    others = [] if wide is None else list(walk(wide))
    counterparts = _aligned(sites, others)
    made = {variable: site.equation for site in sites for variable in site.equation.outvars}
    known = constants_within(half)
    known_wide = {} if wide is None else constants_within(wide)
    constants: dict[int, dict[int, np.ndarray]] = {}
    unpaired: dict[Path, None] = {}
    for site in sites:
        if _is_of_a_draw(site.equation, made):
            continue
        other = counterparts.get(id(site.equation))
        for k, rounded in _half_constants(site.equation, known):
            found = None if other is None else _value(other.invars[k], known_wide)
            if found is not None and _is_one(rounded, found, site.equation, other):
                constants.setdefault(id(site.equation), {})[k] = np.asarray(found, F32)
            elif _has_many_digits(rounded):
                unpaired[module_path(site.path, site.is_backward)] = None
    return Reference(constants, _exact(sites, made), tuple(unpaired))


def _is_of_a_draw(equation: Equation, made: Mapping[Any, Equation]) -> bool:
    """Returns whether an equation draws, or compares a draw, which both programs do alike.

    The ends of a draw in half precision, and a probability, round to other numbers there: in one
    of a hundred elements float32 would draw something else.
    """
    if not any(isinstance(atom, jex_core.Literal) for atom in equation.invars):
        return False
    found = [equation]
    if equation.primitive.name in COMPARISONS:
        variables = [atom for atom in equation.invars if not isinstance(atom, jex_core.Literal)]
        found += [made[variable] for variable in variables if variable in made]
    return any(map(_is_random, found))


def _is_random(equation: Equation) -> bool:
    return any(file.startswith(_RANDOM) for file, _, _ in frames_of(equation))


def drawn_in_half(program: Any) -> list[str]:
    """Returns the names of the half dtypes in which a jaxpr draws random numbers."""
    found = set[str]()
    for equation in equations_within(opened(program)[0], once=True):
        name = equation.primitive.name
        if name in DRAWS or (name == "bitcast_convert_type" and _is_random(equation)):
            found.update(str(v.aval.dtype) for v in equation.outvars if holds_half(v.aval))
    return sorted(found)


def _aligned(half: Iterable[Site], wide: Iterable[Site]) -> dict[int, Equation]:
    """Returns the counterpart of each equation of a program, by its `id`."""
    ours, theirs = (
        [site for site in side if site.name != "convert_element_type"] for side in (half, wide)
    )
    kinds = [list(map(_kind, side)) for side in (ours, theirs)]
    found: dict[int, Equation] = {}
    for i, k, size in difflib.SequenceMatcher(None, *kinds, autojunk=False).get_matching_blocks():
        for one, other in zip(ours[i : i + size], theirs[k : k + size], strict=True):
            found[id(one.equation)] = other.equation
    return found


def _kind(site: Site) -> tuple[Any, ...]:
    """Returns a key that an equation shares with its counterpart in another trace."""
    shapes = tuple(getattr(v.aval, "shape", None) for v in site.equation.outvars)
    count = len(site.equation.invars)
    return site.name, site.path, site.is_backward, site.is_recomputed, count, shapes


def _value(atom: Any, known: Mapping[Any, Any]) -> Any:
    return np.asarray(atom.val) if isinstance(atom, jex_core.Literal) else known.get(atom)


def _half_constants(
    equation: Equation, known: Mapping[Any, Any]
) -> Iterator[tuple[int, np.ndarray]]:
    for k, atom in enumerate(equation.invars):
        value = _value(atom, known) if holds_half(atom.aval) else None
        if value is not None:
            yield k, np.asarray(value, dtype_of(atom))


def _is_one(rounded: np.ndarray, found: Any, equation: Equation, other: Any) -> bool:
    """Returns whether a constant of the float32 trace is one of the program before rounding."""
    if np.shape(found) != rounded.shape or is_half(found.dtype):
        return False
    with np.errstate(over="ignore"):
        again = np.asarray(found).astype(rounded.dtype)
    return np.array_equal(again, rounded, equal_nan=True) or (
        written_at(equation) == written_at(other)
    )


def _has_many_digits(rounded: np.ndarray) -> bool:
    """Returns whether numbers may have been rounded: short ones, as 2 and 0.5, are exact."""
    kept = jnp.finfo(rounded.dtype).nmant // 2
    mantissa = np.frexp(rounded.astype(np.float64))[0] * 2.0 ** (kept + 1)
    finite = mantissa[np.isfinite(mantissa)]
    return bool((finite != np.round(finite)).any())


def _exact(sites: Iterable[Site], made: Mapping[Any, Equation]) -> frozenset[int]:
    found = set[int]()
    for site in sites:
        if site.name != "reduce_precision":
            continue
        maker = made.get(site.equation.invars[0])
        if maker is None or maker.primitive.name != "convert_element_type":
            continue
        dtype = dtype_of(maker.invars[0])
        if is_half(dtype) and keeps(site.equation, dtype):
            found.add(id(site.equation))
    return frozenset(found)

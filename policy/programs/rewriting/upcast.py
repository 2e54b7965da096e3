"""Programs with every half float widened to float32: references for programs in half precision.

Their interpreter knows the module path and the pass of each equation.

Float32 matmuls can be emulated in the passes that a TPU or GPU takes for them. A TPU multiplies
bfloat16. At the default precision float32 operands are rounded to it, in one pass; "high" splits
each operand in two bfloat16 numbers and takes three passes, and "highest" takes six, which is
float32. An NVIDIA GPU rounds operands to TF32, of 11 bits, except at "highest".
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.programs.dtypes import F32, holds_half, is_half
from policy.programs.jaxprs import (
    Equation,
    OpenJaxpr,
    bind,
    is_jaxpr,
    opened,
    programs_of,
)
from policy.programs.marks import BOUNDARY, ISLAND
from policy.programs.paths import Path, path_of
from policy.programs.primitives import EXACT, HOST, MATMULS, READS_BITS, STATES_BITS
from policy.programs.rewriting.interpreter import (
    Interpreter,
    handler_of,
    manual_axes,
)

_HOST = jax.memory.Space.Host
_SCOPES = frozenset((BOUNDARY, ISLAND))  # of ours: no modules
# The `id`s of the equations that a program stands in, outermost first.
EnclosingEquations = tuple[int, ...]


class ModulePass(NamedTuple):
    """A module path and a pass; "again" is the recomputation of a checkpoint."""

    path: Path = ()
    direction: Literal["forward", "backward", "again"] = "forward"


class PlacedValue:
    """A value of the traced program at run time.

    Attributes:
      arrays: one array for each lane that computes its own; a lane without one reads the first.
      origin: the place that computed it, in a type that each interpreter chooses.
    """

    __slots__ = ("arrays", "origin")

    def __init__(self, arrays: Sequence[Any], origin: Any = None):
        self.arrays, self.origin = tuple(arrays), origin


@dataclasses.dataclass(frozen=True)
class Reference:
    """Changes, beside those of dtypes, that make a program the function in float32.

    Attributes:
      constants: the float32 values of constants that the program holds in half precision, by the
        `id` of an equation and the place of an operand.
      exact: the `id`s of equations that round widened half precision to as many bits, which they
        should not do in float32.
      unpaired: the paths with constants whose float32 values are not known.
    """

    constants: Mapping[int, Mapping[int, Any]] = dataclasses.field(default_factory=dict)
    exact: frozenset[int] = frozenset()
    unpaired: tuple[Path, ...] = ()


NO_REFERENCE = Reference()


class PlacedInterpreter(Interpreter[PlacedValue]):
    """An interpreter of arrays that knows the place of each equation.

    Attributes:
      place: the place of the equation whose body is being run.
      bodies: the programs of the enclosing equations, outermost first.
      axes: the mesh axes of the enclosing `shard_map`s.
      chain: the enclosing equations.
      reference: the differences of the program from the function in float32.
    """

    def __init__(self, reference: Reference = NO_REFERENCE) -> None:
        super().__init__()
        self.reference = reference
        self.place = ModulePass()
        self.axes: tuple[str, ...] = ()
        self.bodies: tuple[object, ...] = ()
        self.chain: EnclosingEquations = ()

    # Values ---------------------------------------------------------------------------------------

    def constant(self, array: Any) -> PlacedValue:
        return PlacedValue([array])

    def arrays(self, value: PlacedValue) -> Sequence[Any]:
        return value.arrays

    def filled(self, value: PlacedValue, arrays: Sequence[Any]) -> PlacedValue:
        return PlacedValue(arrays, value.origin)

    # Programs inside equations --------------------------------------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        return [PlacedValue([None]) for _ in equation.outvars]

    def entering(self, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        return [PlacedValue(value.arrays) for value in values]

    def place_of(self, equation: Equation) -> ModulePass:
        """Returns the position of an equation."""
        name_stack = str(equation.source_info.name_stack)
        is_again = "rematted_computation" in name_stack
        is_backward = "transpose(" in name_stack or self.place.direction == "backward"
        path = module_path(path_of(name_stack, self.place.path), is_backward)
        direction = "backward" if is_backward else self.place.direction
        return ModulePass(path, "again" if is_again else direction)

    def inside(self, equation: Equation) -> Self:
        inner = copy.copy(self)
        inner.place, inner.chain = self.place_of(equation), (*self.chain, id(equation))
        if equation.primitive.name == "shard_map":
            inner.axes = (*self.axes, *manual_axes(equation))
        return inner

    def tracing(self, program: Any) -> Self:
        inner = super().tracing(program)
        inner.bodies = (*self.bodies, program)
        return inner

    def standing_in(self, outer: PlacedInterpreter) -> Self:
        """Returns this interpreter, moved to the place of another."""
        self.place, self.axes, self.bodies = outer.place, outer.axes, outer.bodies
        self.chain, self.reference = outer.chain, outer.reference
        return self

    # The function in float32 ----------------------------------------------------------------------

    def step(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        if id(equation) in self.reference.exact:
            return values
        found = self.reference.constants.get(id(equation))
        if found is not None:
            values = self.with_constants(equation, values, found)
        if _HOST in equation.params.get("devices", ()):  # measured on the device
            there, places = cast("Any", equation), (jax.memory.Space.Device,) * len(values)
            equation = there.replace(params=equation.params | {"devices": places})
        return self.equation(equation, values)

    def with_constants(
        self, equation: Equation, values: Sequence[PlacedValue], found: Mapping[int, Any]
    ) -> list[PlacedValue]:
        """Returns the operands of an equation with constants that were not rounded."""
        exact = {k: PlacedValue([array], values[k].origin) for k, array in found.items()}
        return [exact.get(k, value) for k, value in enumerate(values)]


def module_path(path: Path, is_backward: bool) -> Path:
    """Returns a path without scopes that are not modules.

    The transposition of checkpoints and derivative rules repeats a part of the path of their
    equations: Net/Net for Net, layers/norm/layers/norm for layers/norm.
    """
    path = tuple(name for name in path if name not in _SCOPES)
    return _once(path) if is_backward else path


@functools.lru_cache(maxsize=4096)
def _once(path: Path) -> Path:
    for length in range(len(path) // 2, 0, -1):
        for start in range(len(path) - 2 * length + 1):
            middle, end = start + length, start + 2 * length
            is_numbers = all(map(str.isdigit, path[start:middle]))
            if path[start:middle] == path[middle:end] and not is_numbers:
                return _once((*path[:middle], *path[end:]))
    return path


def lost_prefixes(paths: Iterable[Path]) -> dict[Path, Path]:
    """Returns the full path of each path whose beginning was lost.

    JAX hoists loop-invariant equations out of a differentiated scan, and then names them by their
    path within the body: such a path is the end of exactly one other.
    """
    every = set(paths)
    ends: dict[Path, list[Path]] = {}
    for path in every:
        for start in range(1, len(path)):
            ends.setdefault(path[start:], []).append(path)
    return {end: found[0] for end, found in ends.items() if end in every and len(found) == 1}


# --------------------------------------------------------------------------------------------------
# The function in float32
# --------------------------------------------------------------------------------------------------


def wide_dtype(dtype: DTypeLike) -> Any:
    """Returns float32 for a half float; any other dtype as it is."""
    return F32 if is_half(dtype) else dtype


def dtype_of(atom: Any) -> Any:
    """Returns the dtype that a variable was traced with, or None."""
    return getattr(atom.aval, "dtype", None)


def widen(array: Any) -> Any:
    """Returns an array in float32 if it is half; any other as it is."""
    return lax.convert_element_type(array, F32) if holds_half(array) else array


def narrowed(array: Any, dtype: DTypeLike) -> Any:
    """Returns an array in the half dtype that its variable was traced with."""
    if dtype is None or not is_half(dtype) or array.dtype == dtype:
        return array
    return lax.convert_element_type(array, dtype)


class Upcast(PlacedInterpreter):
    """Runs a program with its half values in float32. Each value is one array.

    Args:
      kept: the equations, by those around them and their `id`, that round to int8 codes: their
        operand is handed on in float32.
    """

    def __init__(
        self,
        kept: Collection[tuple[tuple[int, ...], int]] = (),
        reference: Reference = NO_REFERENCE,
    ):
        super().__init__(reference)
        self.kept = kept

    def equation(self, equation: Equation, values: list[PlacedValue]) -> list[PlacedValue]:
        if self.kept and (self.chain, id(equation)) in self.kept:
            return [PlacedValue([widen(values[0].arrays[0])])]
        if (handler := handler_of(equation)) is not None:
            return handler(self, equation, values)
        if equation.primitive.name in HOST and not equation.outvars:
            return []
        return self.evaluated(equation, values)

    def evaluated(self, equation: Equation, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        """Returns the outputs of an equation without programs."""
        arrays = bound_wide(equation, [widen(value.arrays[0]) for value in values])
        return [PlacedValue([array]) for array in arrays]


def bound_wide(equation: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Returns the outputs of an equation on widened operands; as traced where it takes none."""
    name = equation.primitive.name
    has_half = any(holds_half(atom.aval) for atom in (*equation.invars, *equation.outvars))
    if name == "convert_element_type" and is_half(equation.params["new_dtype"]):
        array = arrays[0]
        return [lax.convert_element_type(array, F32) if array.dtype != F32 else array]
    if name == "reduce_precision" and has_half and keeps(equation, dtype_of(equation.invars[0])):
        return list(arrays)
    if has_half and (name in HOST or name in READS_BITS):
        return _as_traced(equation, arrays)
    params = {key: _wide_param(value) for key, value in equation.params.items()}
    if name in MATMULS and _are_wide_codes(equation, arrays):
        params["preferred_element_type"] = F32
        params["precision"] = _HIGHEST
        return bind(equation, [lax.convert_element_type(array, F32) for array in arrays], params)
    if name in MATMULS:
        params["precision"] = _highest(equation)
    try:
        outputs = bind(equation, arrays, params)
    except (TypeError, ValueError, NotImplementedError):  # it takes half precision alone
        return _as_traced(equation, arrays)
    expected = [wide_dtype(dtype) for dtype in map(dtype_of, equation.outvars)]
    if [getattr(output, "dtype", None) for output in outputs] != expected:
        return _as_traced(equation, arrays)
    return outputs


def _are_wide_codes(equation: Equation, arrays: Sequence[Any]) -> bool:
    """Returns whether a matmul of int8 codes is given operands that were not rounded to them."""
    pairs = zip(map(dtype_of, equation.invars), arrays, strict=True)
    return any(dtype == np.int8 and jnp.issubdtype(x.dtype, jnp.floating) for dtype, x in pairs)


def _as_traced(equation: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates an equation on operands rounded to the dtypes that it was traced with."""
    operands = [
        narrowed(array, dtype_of(atom)) for atom, array in zip(equation.invars, arrays, strict=True)
    ]
    return [widen(output) for output in bind(equation, operands)]


def keeps(equation: Equation, dtype: DTypeLike) -> bool:
    """Returns whether a `reduce_precision` rounds nothing of numbers of a dtype."""
    info, params = jnp.finfo(dtype), equation.params
    return params["exponent_bits"] >= info.nexp and params["mantissa_bits"] >= info.nmant


def _highest(equation: Equation) -> Any:
    """Returns the precision of full float32, as GPUs and TPUs multiply in fewer bits by default."""
    is_float = any(jnp.issubdtype(dtype, jnp.floating) for dtype in map(dtype_of, equation.invars))
    return _HIGHEST if is_float else equation.params.get("precision")


def _wide_param(value: Any) -> Any:
    """Returns a parameter with float32 for every half dtype in it, also in programs."""
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return wide_dtype(np.dtype(value))
    if is_jaxpr(value):
        return wide_program(value)
    if isinstance(value, tuple) and any(
        is_jaxpr(v) or isinstance(v, (tuple, np.dtype)) for v in value
    ):
        return getattr(value, "_make", type(value))([_wide_param(item) for item in value])
    return value


def wide_program(program: Any) -> Any:
    """Returns a jaxpr with every half float widened, open or closed as it was."""
    body, consts = opened(program)
    if not any(is_half(dtype) for dtype in dtypes_of(body)):
        return program
    inputs = [jax.ShapeDtypeStruct(v.aval.shape, wide_dtype(v.aval.dtype)) for v in body.invars]

    def run(*arrays: Any) -> list[Any]:
        known = [PlacedValue([widen(const)]) for const in consts]
        outputs = Upcast().run(body, known, [PlacedValue([array]) for array in arrays])
        return [widen(output.arrays[0]) for output in outputs]

    closed = jax.make_jaxpr(run)(*inputs)
    return closed if hasattr(program, "consts") else closed.jaxpr


def dtypes_of(jaxpr: OpenJaxpr) -> list[Any]:
    """Returns the dtypes in an open jaxpr and in the programs inside it."""
    variables = [*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars]
    inner: list[Any] = []
    for equation in jaxpr.eqns:
        variables += equation.outvars
        for program in programs_of(equation):
            inner += dtypes_of(program)
    return [dtype for dtype in map(dtype_of, variables) if dtype is not None] + inner


# --------------------------------------------------------------------------------------------------
# Differences from float32
# --------------------------------------------------------------------------------------------------


def rounds(equation: Equation) -> bool:
    """Returns whether an equation without programs gives another result in float32."""
    if not any(holds_half(atom.aval) for atom in (*equation.invars, *equation.outvars)):
        algorithm = str(equation.params.get("precision")).lower()
        return "f16" in algorithm or "float16" in algorithm  # multiplies float32 in half
    name = equation.primitive.name
    if name in HOST or name in EXACT:
        return False
    if name == "convert_element_type":
        return not _widens(dtype_of(equation.invars[0]), equation.params["new_dtype"])
    return name not in STATES_BITS


def _widens(source: Any, target: Any) -> bool:
    if source == np.bool_ or not jnp.issubdtype(target, jnp.floating):
        return True
    if not jnp.issubdtype(source, jnp.floating):
        return False
    narrow, wide = jnp.finfo(source), jnp.finfo(target)
    return bool(
        narrow.nmant <= wide.nmant and narrow.maxexp <= wide.maxexp and narrow.minexp >= wide.minexp
    )


# --------------------------------------------------------------------------------------------------
# Float32 matmuls in passes
# --------------------------------------------------------------------------------------------------


Device = Literal["tpu", "gpu"]
_HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
_PARTS = {lax.Precision.DEFAULT: 1, lax.Precision.HIGH: 2, lax.Precision.HIGHEST: 3}  # on a TPU
_MANTISSAS = {"tpu": 7, "gpu": 10}  # explicit bits of bfloat16 and of TF32


def require_device(device: str) -> None:
    """Raises ValueError for a device whose passes are not known."""
    if device not in _MANTISSAS:
        raise ValueError(f"The passes of 'tpu' and 'gpu' are known, but not those of {device!r}.")


def is_in_passes(equation: Equation) -> bool:
    """Returns whether an operand of a float32 matmul is below the highest precision."""
    if equation.primitive.name not in MATMULS:
        return False
    if any(getattr(v.aval, "dtype", None) != F32 for v in equation.invars[:2]):
        return False
    levels = _levels(equation)
    return all(level in _PARTS for level in levels) and levels != _HIGHEST


def _levels(equation: Equation) -> tuple[Any, Any]:
    """Returns the precision of each operand of a matmul."""
    precision = equation.params.get("precision")
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    lhs, rhs = (lax.Precision.DEFAULT if level is None else level for level in pair)
    return lhs, rhs


def in_passes(equation: Equation, arrays: Sequence[Any], device: Device) -> list[Any]:
    """Returns the result of such a matmul, as a device multiplies it.

    A TPU splits each operand by its own precision. On a GPU the higher one holds for both.
    """
    levels = _levels(equation)
    params = equation.params | {"precision": _HIGHEST}
    if device == "gpu":
        if lax.Precision.HIGHEST in levels:
            return bind(equation, arrays, params)
        levels = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
    pairs = zip(arrays[:2], levels, strict=True)
    lhs, rhs = (_parts(array, device, _PARTS[level]) for array, level in pairs)
    products = [
        bind(equation, [left, right, *arrays[2:]], params)[0]
        for i, left in enumerate(lhs)
        for right in rhs[: max(len(lhs), len(rhs)) - i]
    ]
    return [sum(products[1:], start=products[0])]


def _parts(array: Any, device: Device, count: int) -> list[Any]:
    """Returns operands of a device whose sum is an array, the largest first."""
    parts: list[Any] = []
    for _ in range(count):
        parts.append(lax.reduce_precision(array, 8, _MANTISSAS[device]))
        array = array - parts[-1]
    return parts

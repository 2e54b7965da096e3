"""A compiled program with flags that select float32 by path, measured by `suggest`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.patterns import reached_path
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.traced.call import Call, Program
from policy.inspect.traced.equation_facts import bytes_of, flops_of
from policy.inspect.traced.module_paths import lost_prefixes, module_path
from policy.inspect.traced.placed import NO_REFERENCE, ModulePass, PlacedValue, Reference
from policy.inspect.traced.upcast import Upcast, bound_wide, dtype_of, narrowed, widen
from policy.programs.dtypes import F32, holds_half, is_half
from policy.programs.jaxprs import Equation, bind, opened, subprograms
from policy.programs.paths import Path
from policy.programs.primitives import ACCUMULATES, CATEGORY_OF, EXACT, MATMULS
from policy.programs.reading.walk import walk


class Trial:
    """A program with flags, compiled once, that measures the error of sets of candidates.

    Attributes:
      call, policy, program: what is measured.
      ported: returns the program of the call with rules applied to its models, if they have
        captured their policy; None if rules reach the modules by other means, or not at all.
      paths: the candidates.
      costs: the cost of each candidate in float32.
      outside: whether any half-precision operation is out of the reach of rules.
      modules: the paths that rules can name; None for all.
      runs: the number of runs so far.
    """

    def __init__(
        self,
        call: Call,
        policy: Policy | None,
        program: Program,
        modules: set[str] | None,
        ported: Callable[[PolicyRules], Program] | None = None,
    ):
        self.call, self.policy, self.program, self.modules = call, policy, program, modules
        self.runs, self.ported = 0, ported
        shares, lost = _shares(program, modules)
        self.outside = () in shares
        self.paths = [path for path in shares if path]
        if not self.paths:
            raise ValueError(_no_paths(program, self.outside))
        self.costs = [shares[path] for path in self.paths]
        places = {path: i + 1 for i, path in enumerate(self.paths)}
        lost_ends = {end: places[path] for end, path in lost.items() if path in places}
        self.candidates = places | lost_ends
        self._wide = self.flags(range(len(self.paths)))
        self._wide.wide[0] = True
        self.compiled = program.compiled(self.emulated, self._wide)
        self.reference = self._outputs(self._wide)
        _require_finite(self.reference)

    def flags(self, wide: Iterable[int], promotes: bool = True) -> Flags:
        """Returns the flags of some candidates in float32."""
        chosen = np.zeros(len(self.paths) + 1, bool)
        chosen[[i + 1 for i in wide]] = True
        return Flags(chosen, np.array(promotes))

    def emulated(self, flags: Any, *arrays: Any) -> list[Any]:
        """Returns the measured arrays of the program with its flags; see `Emulated`."""
        body, consts = opened(self.program.jaxpr)
        emulated = Emulated(flags, self.candidates, self.program.reference)
        given = [[PlacedValue([widen(array)]) for array in each] for each in (consts, arrays)]
        outputs = emulated.run(body, *given)
        return compared_floats(self.program, [output.arrays[0] for output in outputs])

    def _outputs(self, flags: Flags) -> list[np.ndarray]:
        self.runs += 1
        return jax.device_get(self.compiled(flags, *self.program.arguments.arrays))

    def paths_of(self, wide: WideModules) -> frozenset[Path]:
        """Returns the paths of some candidates."""
        return frozenset(self.paths[i] for i in wide)

    def search(self, costs: Sequence[float]) -> Search:
        """Returns a search of the candidates."""
        search = Search(self.measure, self.measure_alone, costs)
        if not self.outside:
            search.known[search.every] = 0.0
        return search

    def measure(self, wide: Iterable[int], promotes: bool = True) -> float:
        """Returns the error with some candidates in float32."""
        return self.error(self._outputs(self.flags(wide, promotes)))

    def measure_alone(self, i: int) -> float:
        """Returns the error with one candidate in half precision, without promotion."""
        return self.measure(set(range(len(self.paths))) - {i}, promotes=False)

    def error(self, outputs: Sequence[Any]) -> float:
        """Returns the error of the worst output, or of all gradients together.

        Single gradients may be zero except for rounding.
        """
        sides = [list(map(_exact, side)) for side in (outputs, self.reference)]
        if self.program.gradients:
            sides = [[np.concatenate([np.ravel(array) for array in side])] for side in sides]
        return max(map(_relative, *sides))


def _exact(array: Any) -> np.ndarray:
    return np.asarray(array, np.complex128 if np.iscomplexobj(array) else np.float64)


def _relative(value: np.ndarray, reference: np.ndarray) -> float:
    if not np.isfinite(value).all():
        return math.inf
    difference, norm = float(np.linalg.norm(value - reference)), float(np.linalg.norm(reference))
    return 0.0 if difference == 0 else difference / norm if norm else math.inf


def compared_floats(program: Program, outputs: Sequence[Any]) -> list[Any]:
    """Returns the measured arrays in float32: gradients, or else the inexact outputs."""
    kept = outputs[len(program.outputs) :] if program.gradients else outputs
    return [widen(a) for a in kept if jnp.issubdtype(jnp.result_type(a), jnp.inexact)]


def _require_finite(reference: Sequence[np.ndarray]) -> None:
    if not reference:
        raise ValueError(
            "suggest measures the error of floating outputs, but the function returns none."
        )
    if not all(np.isfinite(output).all() for output in reference):
        raise ValueError(
            "The function returns infinities or NaN in float32 for these inputs, so there is no "
            "reference to measure errors against. Give inputs for which the function is finite; "
            "policy.compare shows where it stops being finite, and which inputs contain NaN."
        )


def _no_paths(program: Program, outside: bool) -> str:
    if not outside:
        return (
            "No part of this call runs in half precision, so there is nothing to keep in float32: "
            "give a policy, such as policy='mixed_bfloat16'."
        )
    if program.route == "scope":
        return (
            "No module of this call obeys the policy given: what runs in half precision has dtypes "
            "of its own, as an nnx model has that was built under a policy. Leave out policy= to "
            "measure it as it is, or give a model that was built without a policy."
        )
    return (
        "Rules select module paths, and no operation in half precision of this call has one: name "
        "parts of the function with jax.named_scope, or call a module."
    )


def _shares(
    program: Program, modules: set[str] | None
) -> tuple[dict[Path, float], dict[Path, Path]]:
    """Returns the cost of each candidate, in program order, and other names of candidates.

    A cost is the share of the half-precision FLOPs plus the share of the half-precision bytes.
    """
    sites = [(module_path(site.path, site.is_backward), site) for site in walk(program.jaxpr)]
    lost = lost_prefixes(path for path, _ in sites) if program.gradients else {}
    flops, moved = Counter[Path](), Counter[Path]()
    for path, site in sites:
        if _is_in_half(site.equation):
            path = reached_path(lost.get(path, path), modules)
            flops[path] += flops_of(site.equation) * site.count
            moved[path] += bytes_of(site.equation) * site.count
    all_flops, all_moved = max(flops.total(), 1), max(moved.total(), 1)
    return {path: flops[path] / all_flops + moved[path] / all_moved for path in moved}, lost


def _is_in_half(equation: Equation) -> bool:
    """Returns whether an equation without programs reads or returns half precision."""
    has_programs = any(one.is_run for one in subprograms(equation))
    atoms = (*equation.invars, *equation.outvars)
    return not has_programs and any(holds_half(atom.aval) for atom in atoms)


# --------------------------------------------------------------------------------------------------
# Emulation: half precision in float32, with rounding controlled by flags
# --------------------------------------------------------------------------------------------------


class Flags(NamedTuple):
    """The parts of a program that run in float32.

    Attributes:
      wide: which candidates run in float32. The first is for paths that no rule reaches.
      promotes: whether operations promote; otherwise half precision stays half when mixed with
        float32, as in modules that cast their inputs.
    """

    wide: Any
    promotes: Any


class Emulated(Upcast):
    """Runs a program in float32, with values rounded where its flags say so.

    A value is an array in float32. If it may be half precision in the program, a second array tells
    whether it is in float32.

    Attributes:
      flags: the parts in float32.
      candidates: the index of each path in the flags.
    """

    def __init__(
        self,
        flags: Flags,
        candidates: Mapping[Path, int],
        reference: Reference = NO_REFERENCE,
    ):
        super().__init__(reference=reference)
        self.flags, self.candidates = flags, candidates

    def evaluated(self, equation: Equation, values: Sequence[PlacedValue]) -> list[PlacedValue]:
        atoms = (*equation.invars, *equation.outvars)
        if not any(holds_half(atom.aval) for atom in atoms):
            return super().evaluated(equation, values)
        # Operands mixed with float32 are promoted, as in JAX. Matmuls and casts follow the rules.
        name, is_wide = equation.primitive.name, self._is_wide(equation, values)
        dtypes = [dtype_of(atom) for atom in equation.invars]
        arrays = [widen(value.arrays[0]) for value in values]
        if any(len(value.arrays) > 1 for value in values):
            own = self.flag(self.place_of(equation))
            stays = own if _decides(equation) else own | self.flags.promotes
            arrays = [rounded(a, d, stays) for a, d in zip(arrays, dtypes, strict=True)]
        outputs = bound_wide(equation, arrays)
        # Some backends sum these in half precision, unlike a float32 sum that is rounded.
        if name in ACCUMULATES:
            narrow = bind(equation, [narrowed(a, d) for a, d in zip(arrays, dtypes, strict=True)])
            both = zip(outputs, map(widen, narrow), strict=True)
            outputs = [jnp.where(is_wide, wide, narrow) for wide, narrow in both]
        elif name not in EXACT:
            made = zip(outputs, map(dtype_of, equation.outvars), strict=True)
            outputs = [rounded(output, dtype, is_wide) for output, dtype in made]
        return [
            PlacedValue([output, is_wide] if holds_half(variable.aval) else [output])
            for output, variable in zip(outputs, equation.outvars, strict=True)
        ]

    def with_constants(
        self, equation: Equation, values: Sequence[PlacedValue], found: Mapping[int, Any]
    ) -> list[PlacedValue]:
        """Returns the operands, with unrounded constants if the other operands are in float32."""
        is_wide, values = self._is_wide(equation, values), list(values)
        for k, array in found.items():
            own, *flag = values[k].arrays
            values[k] = PlacedValue([jnp.where(is_wide, array, widen(own)), *flag])
        return values

    def _is_wide(self, equation: Equation, values: Sequence[PlacedValue]) -> Any:
        """Returns whether an equation runs in float32, by its place and by its operands."""
        is_wide = self.flag(self.place_of(equation))
        if not _decides(equation):
            for flag in [value.arrays[1] for value in values if len(value.arrays) > 1]:
                is_wide = is_wide | (flag & self.flags.promotes)
        return is_wide

    def flag(self, place: ModulePass) -> Any:
        """Returns whether a place runs in float32."""
        return self.flags.wide[candidate_of(place.path, self.candidates)]

    # Loops and branches return the dtypes of their variables --------------------------------------

    def merge(
        self, equation: Equation, values: Sequence[PlacedValue], branches: Sequence[Any] = ()
    ) -> list[PlacedValue]:
        flag = self.flag(self.place_of(equation))
        return [PlacedValue([None], (dtype_of(variable), flag)) for variable in equation.outvars]

    def settled(self, value: PlacedValue, like: PlacedValue) -> PlacedValue:
        dtype, flag = like.origin
        array = widen(value.arrays[0])
        return PlacedValue([array if len(value.arrays) == 1 else rounded(array, dtype, flag)])


def rounded(array: Any, dtype: DTypeLike, unless: Any) -> Any:
    """Returns a float32 array rounded to a half dtype, unless a flag is set.

    Any other array or dtype is left unchanged.
    """
    if not is_half(dtype) or array.dtype != F32:
        return array
    half = lax.convert_element_type(array, dtype)
    return jnp.where(unless, array, lax.convert_element_type(half, array.dtype))


def _decides(equation: Equation) -> bool:
    """Returns whether the dtypes of an equation do not depend on those of its operands."""
    name = equation.primitive.name
    if name == "convert_element_type":
        return is_half(equation.params["new_dtype"])
    return name in MATMULS or CATEGORY_OF.get(name) in ("opaque", "explicit", None)


def candidate_of(path: Path, candidates: Mapping[Path, int]) -> int:
    """Returns the index in the flags of the innermost candidate above a path, or 0."""
    for length in range(len(path), 0, -1):
        if path[:length] in candidates:
            return candidates[path[:length]]
    return 0

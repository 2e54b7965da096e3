"""Runs a ported model's own code under autocast, around layers that obey policies themselves."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from policy._jaxpr.costs import flops_of
from policy._jaxpr.dtypes import F32, float_dtype
from policy._jaxpr.equations import repeated_programs
from policy._jaxpr.paths import Path
from policy._jaxpr.primitives import CONVOLUTIONS, MATMULS, NEEDS_FLOAT32
from policy._jaxpr.protocols import Equation
from policy._jaxpr.pure_calls import PureCall, UnreturnableError
from policy._jaxpr.subprograms import opened
from policy._jaxpr.trace import is_array
from policy._jaxpr.walk import Site, walk
from policy.autocast import marks
from policy.autocast.calls import HANDLERS
from policy.autocast.evaluator import Evaluator
from policy.autocast.settings import Places, Settings
from policy.autocast.values import CastValue, cast
from policy.policy import Policy


@dataclasses.dataclass(frozen=True)
class Ported:
    """A call of a ported model, traced in float32 except for its layers, which obey their policies.

    Attributes:
      call: the program, and its operands in the dtypes that they are stored in.
      is_param: which of them are parameters.
    """

    call: PureCall
    is_param: Sequence[bool]

    @property
    def jaxpr(self) -> Any:
        """The jaxpr of the call."""
        return self.call.jaxpr

    def own_matmuls(self) -> Counter[Path]:
        """Returns the FLOPs of matmuls and convolutions of the model's own code, by module path.

        Products without a contraction, such as those of positions and frequencies, and code to be
        run in float32 are left out.
        """
        found: Counter[Path] = Counter()
        for site in walk(self.jaxpr):
            if (
                site.name in MATMULS
                and _sums(site.equation)
                and _is_wide(site.equation)
                and _is_own(site)
            ):
                found[site.path] += _flops(site)
        return found

    def needs_float32(self) -> bool:
        """Returns whether the model's own code contains operations that half precision breaks.

        These are sums of rows and running totals, which JAX adds up in their input's dtype, and
        exponentials, logarithms and roots, such as those of softmaxes and norms. `jnp.sum` and
        similar functions add half precision in float32 anyway.
        """
        return any(
            site.name in NEEDS_FLOAT32
            and float_dtype(site.equation.outvars[0].aval) == F32
            and _is_own(site)
            for site in walk(self.jaxpr)
        )

    def matmuls(self) -> int:
        """Returns the FLOPs of all matmuls and convolutions."""
        return sum(_flops(site) for site in walk(self.jaxpr) if site.name in MATMULS)

    def run(self, policy: Policy) -> Any:
        """Runs the call, its own code under autocast."""
        body, consts = opened(self.jaxpr)
        settings = Settings(policy, narrows_scans=True)
        places = Places(settings, repeated_programs(body))
        arrays = self.call.arrays
        values = [
            CastValue(_narrow(a, v), p)
            for a, v, p in zip(arrays, body.invars, self.is_param, strict=True)
        ]
        outputs = Evaluator(settings, places, HANDLERS).run(
            body, [CastValue(const) for const in consts], values
        )
        dtypes = [float_dtype(atom.aval) for atom in body.outvars]
        results = [
            operand
            if operand is not None
            else output.array
            if dtype is None
            else cast(output.array, dtype)
            for output, operand, dtype in zip(outputs, self.call.operands(), dtypes, strict=True)
        ]
        return self.call.returned(results)


def traced(call: Callable[..., Any], params: Any, others: Any, inputs: Any) -> Ported:
    """Traces ``call(params, others, inputs)``; parameters and inputs are float32 to it."""
    counts = [sum(map(is_array, jax.tree.leaves(tree))) for tree in (params, others, inputs)]
    is_param = [kind == 0 for kind, count in enumerate(counts) for _ in range(count)]
    is_state = [kind == 1 for kind, count in enumerate(counts) for _ in range(count)]

    def in_float32(arrays: Sequence[Any]) -> list[Any]:
        return [
            array if stays or float_dtype(array) is None else cast(array, F32)
            for array, stays in zip(arrays, is_state, strict=True)
        ]

    try:
        return Ported(PureCall.of(call, params, others, inputs, traced_as=in_float32), is_param)
    except UnreturnableError as error:
        raise TypeError(
            f"A ported model whose own code runs under autocast returned a {error.name}, which "
            "holds arrays but is not a pytree: register the class with "
            "jax.tree_util.register_dataclass, or pass own_code='keep'."
        ) from None


def _flops(site: Site) -> int:
    """Returns the FLOPs of a product, at least 1, so that empty batches have shares too."""
    return max(site.count * flops_of(site.equation), 1)


def _narrow(array: Any, variable: Any) -> Any:
    """Returns a float64 operand as the float32 that it was traced as, others unchanged."""
    dtype = float_dtype(array)
    is_wide = (
        dtype is not None and dtype.itemsize > F32.itemsize and float_dtype(variable.aval) == F32
    )
    return cast(array, F32) if is_wide else array


def _is_own(site: Site) -> bool:
    """Returns whether an equation belongs to the model's own code and may run in half."""
    names = _marks(site)
    dtype = marks.marked_dtype(names)
    return marks.LAYER not in names and not site.in_island and dtype is not None and dtype != F32


def _is_wide(equation: Equation) -> bool:
    return all(float_dtype(atom.aval) == F32 for atom in equation.invars[:2])


def _sums(equation: Equation) -> bool:
    """Returns whether a matmul contracts anything."""
    numbers = equation.params.get("dimension_numbers")
    if equation.primitive.name in CONVOLUTIONS or numbers is None:
        return True
    (contracted, _), _ = getattr(numbers, "dot_dimension_numbers", numbers)
    return bool(contracted)


def _marks(site: Site | None) -> Path:
    """Returns the marks around an equation, the innermost last."""
    found: list[str] = []
    while site is not None:
        names = (
            str(site.equation.source_info.name_stack).replace("(", "/").replace(")", "/").split("/")
        )
        found = [*filter(marks.is_mark, names), *found]
        site = site.around
    return tuple(found)

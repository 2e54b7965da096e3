"""The costs of a step that is compiled for a target, as a row of an estimate."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from policy.inspect.audit.audit import operations_of
from policy.inspect.audit.operations import Operation, is_matmul_operation, widest_dtype
from policy.inspect.audit.report import Audit
from policy.inspect.estimate.candidates import Candidate
from policy.inspect.estimate.compilation import CompiledStep, compiled_step
from policy.inspect.estimate.lowering import host_callbacks, lowered_step
from policy.inspect.estimate.placement import Placement, placed_arrays, specs_of
from policy.inspect.estimate.roofline import compute_seconds, exchange_seconds, kernel_time
from policy.inspect.estimate.rows import Exchange, PolicyCost
from policy.inspect.estimate.steps import MadeCall, Step, name_of
from policy.inspect.hlo.costs import Costs, costs_of
from policy.inspect.hlo.module_paths import by_spelled_path
from policy.programs.paths import Path
from policy.programs.reading.graph import Graph

_SCRATCH = (
    "Temporaries include the largest copy that the processor's library kernels may make of their "
    "inputs, which XLA does not plan."
)


@dataclasses.dataclass(frozen=True)
class CompiledRow:
    """A step compiled for a target.

    Attributes:
      cost: its costs.
      by_path: the time of each module path, in cycles or in seconds; empty if the program doesn't
        fit.
      notes: remarks of JAX and of the compiler.
    """

    cost: PolicyCost
    by_path: Mapping[Path, float]
    notes: list[str]


def compiled_row(
    row: Candidate, call: MadeCall, step: Step, placement: Placement, shardings: Any
) -> CompiledRow:
    """Compiles a traced step for the target of its placement.

    Args:
      row: the row of an estimate.
      call: the call that was traced.
      step: its trace.
      placement: the devices.
      shardings: as for `policy.estimate`.

    Raises:
      TypeError, ValueError: as `policy.estimate` does.
    """
    target, arrays = placement.target, step.traced.arguments.arrays
    specs = specs_of(shardings, call.args, arrays, step.names, step.origins)
    placed = placed_arrays(placement, arrays, specs, step.names)
    with placement.scope():
        lowered, notes = lowered_step(step, placed, target, name_of(call.fn))
    program = compiled_step(lowered, target, step.names)
    # The text of a program that is too large is no final one: a TPU's has no cycles, and other
    # kernels than the compiler's.
    is_final = program.text and not program.is_exhausted
    costs = costs_of(program.text, kernel_time(target.chip)) if is_final else None
    shared = sum(_bytes_on_a_device(placed[i]) for i, _ in step.repeated)
    cost = _cost(row, step, program, placement, costs, program.arguments - shared)
    notes = [*notes, *([_SCRATCH] if program.scratch else [])]
    return CompiledRow(cost, {} if costs is None else costs.by_path, notes)


def _bytes_on_a_device(array: jax.ShapeDtypeStruct) -> int:
    sharding = array.sharding
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def _cost(
    row: Candidate,
    step: Step,
    program: CompiledStep,
    placement: Placement,
    costs: Costs | None,
    arguments: int,
) -> PolicyCost:
    chip = placement.target.chip
    written = Audit(operations_of(Graph(step.traced.jaxpr)), ())
    callbacks = [f"time on the host of {name}" for name in host_callbacks(step.traced.jaxpr)]
    cost = PolicyCost(
        name=row.name,
        policy=row.policy_text,
        route=step.route,
        memory=arguments + program.temporaries + program.outputs + program.code,
        capacity=placement.capacity,
        arguments=arguments,
        temporaries=program.temporaries,
        outputs=program.outputs,
        code=program.code,
        flops=written.flops_by_dtype,
        matmul_flops=_matmul_flops(written.operations, chip.platform),
        uncounted=tuple(callbacks),
        buffers=program.buffers,
        compile_seconds=program.seconds,
        is_exhausted=program.is_exhausted,
    )
    if costs is None:
        return cost
    return dataclasses.replace(
        cost,
        bytes=costs.bytes,
        cycles=costs.time if chip.clock else None,
        compute_seconds=compute_seconds(chip, costs),
        collectives=tuple(
            Exchange(*kind, size, exchange_seconds(chip, {kind: size}))
            for kind, size in costs.collectives.items()
        ),
        kernels=costs.kernels,
        uncounted=tuple(dict.fromkeys([*costs.uncounted, *callbacks])),
        cost_by_path=by_spelled_path(costs.by_path),
    )


def _matmul_flops(operations: Sequence[Operation], platform: str) -> dict[str, float]:
    """Returns FLOPs of matmuls by what a device multiplies, the largest first."""
    total: Counter[str] = Counter()
    for operation in operations:
        if is_matmul_operation(operation) and operation.flops:
            total[_multiplied(operation, platform)] += operation.flops
    return dict(total.most_common())


# Passes of bfloat16 on a TPU, for float32. A TPU splits operands by their own precisions.
_PASSES = {
    "high, default": " x2",
    "high": " x3",
    "highest, default": " x3",
    "highest, high": " x5",
    "highest": " x6",
}


def _multiplied(operation: Operation, platform: str) -> str:
    """Returns the dtype that a matmul multiplies; see `PolicyCost.matmul_flops`."""
    if not operation.precision or platform == "cpu":
        return widest_dtype(operation.operands)
    if platform == "cuda":
        # The higher precision holds for both operands.
        is_tf32 = operation.precision in ("default", "high", "high, default")
        return "tf32" if is_tf32 else "float32"
    return f"float32{_PASSES.get(operation.precision, '')}"

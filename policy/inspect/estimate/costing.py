"""The costs of a compiled program, as a row of an estimate."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from policy.inspect.audit.audit import operations_of
from policy.inspect.audit.operations import Operation, is_matmul_operation, widest_dtype
from policy.inspect.audit.report import Audit
from policy.inspect.estimate.candidates import Candidate
from policy.inspect.estimate.compilation import CompiledStep
from policy.inspect.estimate.lowering import host_callbacks
from policy.inspect.estimate.placement import Placement
from policy.inspect.estimate.roofline import compute_seconds, exchange_seconds, kernel_time
from policy.inspect.estimate.rows import Exchange, PolicyCost
from policy.inspect.estimate.steps import Step
from policy.inspect.hlo.costs import costs_of
from policy.inspect.hlo.module_paths import by_spelled_path
from policy.programs.graph import Graph


def cost_of(row: Candidate, step: Step, program: CompiledStep, placement: Placement) -> PolicyCost:
    """Returns the costs of a step's compiled program."""
    chip = placement.target.chip
    written = Audit(operations_of(Graph(step.traced.jaxpr)), ())
    callbacks = [f"time on the host of {name}" for name in host_callbacks(step.traced.jaxpr)]
    cost = PolicyCost(
        name=row.name,
        policy=row.policy_text,
        route=step.route,
        memory=program.arguments + program.temporaries + program.outputs + program.code,
        capacity=placement.capacity,
        arguments=program.arguments,
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
    if program.is_exhausted or not program.text:
        # The text of a program that is too large is no final one: a TPU's has no cycles, and other
        # kernels than the compiler's.
        return cost
    costs = costs_of(program.text, kernel_time(chip))
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

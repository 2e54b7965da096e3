"""The costs of a step that is lowered and compiled for a target, as a row of an estimate."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import re
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core

from policy.inspect.audit.flow import states_of
from policy.inspect.audit.operations import (
    Operation,
    is_matmul_operation,
    operations_of,
    widest_dtype,
)
from policy.inspect.audit.report import Audit
from policy.inspect.estimate.placement import Placement, placed_arrays
from policy.inspect.estimate.rows import Exchange, PolicyCost
from policy.inspect.estimate.steps import Candidate, MadeCall, Step
from policy.inspect.estimate.targets import (
    Target,
    compute_seconds,
    exchange_seconds,
    exchange_time,
    kernel_time,
    overlapped_seconds,
)
from policy.inspect.hlo.costs import Costs, costs_of
from policy.inspect.hlo.dump import compiled_with_dump, with_tables
from policy.inspect.hlo.memory import MemoryUse, library_scratch, memory_of
from policy.inspect.hlo.provenance import by_spelled_path
from policy.inspect.traced.equation_facts import flops_of
from policy.inspect.traced.program_facts import maker_of
from policy.programs.primitives import ATTENTIONS, HOST, KERNELS, kind_of
from policy.programs.reading.graph import Graph, is_joint
from policy.programs.reading.walk import walk
from policy.programs.tracing.trace import Traced, function_name

_SCRATCH = (
    "Temporaries include the largest copy that the processor's library kernels may make of their "
    "inputs, which XLA does not plan."
)
_WORKSPACE = "Attention runs in cuDNN's kernel, whose workspace is not known without its library."
# Without its autotuner, XLA for GPUs may fail on a matmul that it has chosen Triton for, and not
# cuBLAS.
_NO_TILES = "Couldn't find output tile sizes"
_PACKAGES = {"tpu": ("libtpu",), "cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin")}
# Passes of bfloat16 on a TPU, for float32. A TPU splits operands by their own precisions.
_PASSES = {"high, default": 2, "high": 3, "highest, default": 3, "highest, high": 5, "highest": 6}


@dataclasses.dataclass(frozen=True)
class CompiledRow:
    """A step compiled for a target.

    Attributes:
      cost: its costs.
      notes: remarks of JAX and of the compiler.
    """

    cost: PolicyCost
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
    placed = placed_arrays(placement, shardings, call.args, arrays, step.names, step.origins)
    on_host = _on_host(step.traced) if target.platform != "cpu" else set()
    for i in on_host:
        placed[i] = placed[i].update(sharding=placed[i].sharding.with_memory_kind("pinned_host"))
    with placement.scope():
        lowered, notes = lowered_step(step, placed, target, function_name(call.fn))
    program = compiled_step(lowered, target, step.names)
    # The text of a program that is too large is no final one: a TPU's has no cycles, and other
    # kernels than the compiler's.
    is_final = program.text and not program.is_exhausted
    shared, host = (sum(_bytes_of(placed[i]) for i in each) for each in (step.repeated, on_host))
    cost = _cost(row, step, program, placement, shared, host)
    notes = [*notes, *([_SCRATCH] if program.scratch else [])]
    if re.search(r"u8\[0\]\S*\) custom-call\(.*__cudnn\$fmha", program.text):
        notes.append(_WORKSPACE)
    if not is_final:
        return CompiledRow(cost, notes)
    costs = costs_of(program.text, kernel_time(target.chip), exchange_time(target.chip))
    return CompiledRow(_with_costs(cost, costs, target), notes)


def _on_host(traced: Traced) -> set[int]:
    """Returns the arrays that lie in the host's memory: those of that type, and those of a state
    that the step returns there.
    """
    before, after = (
        {i for i, aval in enumerate(avals) if aval.memory_space == jax.memory.Space.Host}
        for avals in (traced.jaxpr.in_avals, traced.jaxpr.out_avals)
    )
    return before | {state.argument for state in states_of(traced) if state.output in after}


def _bytes_of(array: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes of an array on one device."""
    sharding = array.sharding
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def _cost(
    row: Candidate, step: Step, program: CompiledStep, placement: Placement, shared: int, host: int
) -> PolicyCost:
    """Returns the memory and the FLOPs of a row; `shared` bytes of arguments are given twice, and
    `host` bytes lie in the host's memory.
    """
    graph = Graph(step.traced.jaxpr, platform=placement.target.platform)
    written = Audit(operations_of(graph), ())
    use = program.memory
    arguments, temporaries = use.arguments - shared, use.temporaries + program.scratch
    code = max(program.code, use.constants)
    return PolicyCost(
        name=row.name,
        policy=row.policy_text,
        route=step.route,
        memory=arguments + temporaries + use.outputs + code,
        capacity=placement.capacity,
        arguments=arguments,
        temporaries=temporaries,
        outputs=use.outputs,
        code=code,
        host=host,
        flops=written.flops_by_dtype,
        matmul_flops=matmul_flops(written.operations, placement.target.platform),
        model_flops=model_flops(graph),
        peak=placement.target.chip.peak("bfloat16"),
        devices=placement.devices,
        mesh=dict(placement.mesh.shape) if placement.is_spread else {},
        batch=row.batch,
        remat=row.remat,
        uncounted=tuple(f"time on the host of {name}" for name in _callbacks(step.traced.jaxpr)),
        buffers=use.buffers,
        compile_seconds=program.seconds,
        is_exhausted=program.is_exhausted,
    )


def _with_costs(cost: PolicyCost, costs: Costs, target: Target) -> PolicyCost:
    collectives = costs.collectives.items()
    return dataclasses.replace(
        cost,
        bytes=costs.bytes,
        cycles=costs.time if target.chip.clock else None,
        compute_seconds=compute_seconds(target.chip, costs),
        overlapped_seconds=overlapped_seconds(target.chip, costs),
        collectives=tuple(
            Exchange(*kind, size, exchange_seconds(target.chip, {kind: size}))
            for kind, size in collectives
        ),
        kernels=costs.kernels,
        uncounted=tuple(dict.fromkeys([*costs.uncounted, *cost.uncounted])),
        cost_by_path=by_spelled_path(costs.by_path),
    )


def matmul_flops(operations: Sequence[Operation], platform: str) -> dict[str, float]:
    """Returns FLOPs of matmuls by what a device multiplies, the largest first; see `PolicyCost`."""
    total: Counter[str] = Counter()
    for operation in operations:
        if not is_matmul_operation(operation) or not operation.flops:
            continue
        multiplied = widest_dtype(operation.operands)
        if operation.precision and platform == "cuda":
            # The higher precision holds for both operands.
            is_tf32 = operation.precision in ("default", "high", "high, default")
            multiplied = "tf32" if is_tf32 else "float32"
        elif operation.precision and platform != "cpu":
            passes = _PASSES.get(operation.precision)
            multiplied = f"float32 x{passes}" if passes else "float32"
        total[multiplied] += operation.flops
    return dict(total.most_common())


def model_flops(graph: Graph) -> float:
    """Returns FLOPs of matmuls, without those that a checkpoint repeats in the backward pass."""
    total = 0
    for site in (node.site for node in graph.nodes if not is_joint(node)):
        is_matmul = kind_of(site.name) in ("dot", "convolution") or site.name in ATTENTIONS
        if is_matmul and not site.is_recomputed:
            total += flops_of(site.equation) * site.count * site.devices
    return float(total)


# --------------------------------------------------------------------------------------------------
# Lowering
# --------------------------------------------------------------------------------------------------


def lowered_step(
    step: Step, placed: Sequence[jax.ShapeDtypeStruct], target: Target, name: str
) -> tuple[Any, list[str]]:
    """Lowers a step, and returns remarks that JAX makes of it.

    Arrays that the step returns in the place of arguments, as params and state, keep the shardings
    of those.

    Args:
      step: the traced step.
      placed: the shapes and shardings of its arrays.
      target: the target to lower for.
      name: of the function.

    Raises:
      ValueError: the step can't be lowered for the target.
    """
    jaxpr = step.traced.jaxpr
    run = jex_core.jaxpr_as_fun(jaxpr)
    # JAX hands on an argument that is returned as it is; the program doesn't copy it.
    made = [i for i in range(len(jaxpr.out_avals)) if maker_of(jaxpr, i) is not None]

    def program(*arrays: Any) -> Any:
        outputs = run(*arrays)
        return [outputs[i] for i in made]

    program.__name__ = program.__qualname__ = name
    kept = {state.output: placed[state.argument].sharding for state in states_of(step.traced)}
    jitted = jax.jit(
        program,
        donate_argnums=step.donated,
        out_shardings=[kept.get(i) for i in made],
        keep_unused=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lowered = jitted.trace(*placed).lower(lowering_platforms=(target.platform,))
        except Exception as error:  # of any kernel's or callback's lowering
            raise ValueError(
                f"{name} can't be lowered for {target.name}: {_reason(error, jaxpr)}"
            ) from error
    remarks = map(_first_line, (one.message for one in caught))
    return lowered, [one for one in remarks if "donated buffers were not usable" in one]


def _callbacks(jaxpr: Any) -> list[str]:
    """Returns the names of a program's callbacks to the host."""
    return sorted({site.name for site in walk(jaxpr) if site.name in HOST})


def _reason(error: Exception, jaxpr: Any) -> str:
    said = f"{_first_line(error).rstrip('.')}."
    callbacks = _callbacks(jaxpr)
    if callbacks:
        said += (
            f" It calls back to the host ({', '.join(callbacks)}), which JAX lowers for a GPU only "
            "on a machine with one: leave the callback out of the step."
        )
    kernels = sorted({site.name for site in walk(jaxpr) if site.name in KERNELS})
    if kernels:
        said += f" It runs kernels ({', '.join(kernels)}), which are written for one platform."
    if "incompatible devices" in said:
        said += " The step takes several devices: give mesh= or shardings= to spread its arrays."
    return said


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --------------------------------------------------------------------------------------------------
# Compilation
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A program as a compiler made it, of one device.

    Attributes:
      text: its HLO, also where the compiler ran out of memory.
      memory: that it takes, and the largest arrays in it.
      code: bytes of the program itself.
      is_exhausted: whether the compiler ran out of memory.
      seconds: CPU seconds of the compiler.
      scratch: bytes that a processor's library kernels may allocate.
    """

    text: str
    memory: MemoryUse
    code: int
    is_exhausted: bool
    seconds: float
    scratch: int = 0


def compiled_step(lowered: Any, target: Target, names: Sequence[str]) -> CompiledStep:
    """Compiles the result of ``jax.jit(...).lower(...)``.

    Args:
      lowered: the lowered program.
      target: the target that it was lowered for.
      names: the path of each array that the program takes.

    Raises:
      ValueError: the compiler rejects it, for another reason than memory.
    """
    start = time.process_time()
    try:
        try:
            compiled, dump = compiled_with_dump(lowered)
        except jax.errors.JaxRuntimeError as error:
            if _NO_TILES not in str(error):
                raise
            compiled, dump = compiled_with_dump(lowered, xla_gpu_enable_triton_gemm=False)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"{target.name}'s compiler rejects the program: {str(error).splitlines()[0]}"
        ) from error
    seconds = time.process_time() - start
    # libtpu's `memory_analysis` counts gaps between temporaries twice. It alone has the code, which
    # is not known of a program that is too large.
    memory = compiled and compiled.memory_analysis()
    code = memory.generated_code_size_in_bytes if memory else 0
    scratch = library_scratch(dump.program) if target.platform == "cpu" else 0
    # The compiler's cycles are in its own text alone, which a program that is too large lacks.
    text = dump.program if compiled is None else with_tables(compiled.as_text() or "", dump)
    return CompiledStep(text, memory_of(dump, names), code, compiled is None, seconds, scratch)


def compiler_of(target: Target) -> str:
    """Returns the name and version of a target's compiler, and JAX's."""
    found = []
    for name in ("jax", *_PACKAGES.get(target.platform, ("jaxlib",))):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)

"""Bytes that one AdamW step moves, an element of the params, beside plain optax, jmp's pipeline and
mpx's.

    python -m benchmarks.optimizer          # the table: 3 minutes on two idle cores
    python -m benchmarks.optimizer --check  # exits with 1 where a row is above its budget, or above
                                            # jmp's or mpx's
    python -m benchmarks.optimizer --small  # bytes alone: 10 s, nothing is run
    python -m benchmarks.optimizer --json FILE

bytes      XLA's own cost analysis of the compiled program, params and state donated, four leaves of
           1M elements, gradients scaled by a dynamic loss scale. The floor for float32 params and
           bfloat16 gradients is 26: read gradient 2, param 4, moments 8, and write the last two;
           XLA counts 36, as it reads the moments twice. Held against the row's budget, and against
           jmp's and mpx's pipelines where they have such a row.
temp       the peak of temporary memory, in bytes an element too.
ns         CPU nanoseconds an element of a step on those leaves, beside plain optax, A B A B, the
           median.
compiling  CPU seconds to trace and compile a step of 1, 50 and 500 small leaves, beside plain
           optax.

CPU times are this process's: they don't depend on what else the machine does, but for its caches.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.table import Row, run
from policy import apply_gradients, loss_scale_of, mixed_precision
from policy.grads import ScaledGradients

ELEMENTS, LEAVES = 2**20, 4
LARGEST_TEMPORARY = 4.0
PLAIN, SAME_AS_PEERS = "plain optax, f32 params, bf16 gradients", "f32 / bf16"
ON_HOST, SMALLEST = "remainder, state on the host", "remainder, int8 moments"
JMP, MPX = "jmp: unscale, select, f32 / bf16", "mpx: unscale, select, f32 / bf16"
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What updates params by gradients, from and to which dtypes. `budget` is in bytes an element;
    None has none.
    """

    name: str
    params: Any
    gradients: Any
    make: Callable[[], tuple[Callable[[Any], Any], Step]]
    budget: float | None = None


def ours(
    through_optax: bool = False, **options: Any
) -> Callable[[], tuple[Callable[[Any], Any], Step]]:
    def make() -> tuple[Callable[[Any], Any], Step]:
        scale = "dynamic" if options.get("skip_nonfinite", True) else 1024.0
        tx = mixed_precision(optax.adamw(1e-3), "float32", loss_scale=scale, **options)

        def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
            scaled = ScaledGradients(gradients, loss_scale_of(state).loss_scale)
            if not through_optax:
                return apply_gradients(tx, params, state, scaled)[:2]
            updates, state = tx.update(scaled, state, params)
            return optax.apply_updates(params, updates), state

        return tx.init, step

    return make


def plain() -> tuple[Callable[[Any], Any], Step]:
    """Optax as it comes: no unscaling, no flag, moments in the params' dtype."""
    tx = optax.adamw(1e-3)

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def clipped() -> tuple[Callable[[Any], Any], Step]:
    """Optax's own clip, of gradients cast to float32."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = tx.update(jax.tree.map(lambda g: g.astype(F32), gradients), state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def apply_if_finite(clip: float | None = None) -> tuple[Callable[[Any], Any], Step]:
    """Optax's own skipping, of gradients cast to float32, and its clip inside."""
    inner = (
        optax.adamw(1e-3)
        if clip is None
        else optax.chain(optax.clip_by_global_norm(clip), optax.adamw(1e-3))
    )
    tx = optax.apply_if_finite(inner, 5)

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        gradients = jax.tree.map(lambda g: g.astype(F32) / 1024, gradients)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def jmp_pipeline() -> tuple[Callable[[Any], Any], Step]:
    """jmp's README: unscale, all_finite, compute the step, select."""
    import jmp

    tx, loss_scale = optax.adamw(1e-3), jmp.StaticLossScale(jnp.asarray(1024.0))

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        gradients = loss_scale.unscale(jax.tree.map(lambda g: g.astype(F32), gradients))
        finite = jmp.all_finite(gradients)
        updates, new_state = tx.update(gradients, state, params)
        return jmp.select_tree(
            finite, (optax.apply_updates(params, updates), new_state), (params, state)
        )

    return tx.init, step


def mpx_pipeline() -> tuple[Callable[[Any], Any], Step]:
    """mpx's `filter_grad` after the gradient, and its `optimizer_update`: cast, all_finite,
    unscale, select.
    """
    import mpx  # pyright: ignore[reportMissingImports]

    tx = optax.adamw(1e-3)

    def init(params: Any) -> Any:
        return tx.init(params), mpx.DynamicLossScaling(jnp.float32(1024), jnp.float32(1))

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        gradients = mpx.cast_to_full_precision(gradients)
        finite = mpx.all_finite(gradients)
        scaling = state[1].adjust(finite)
        params, inner = mpx.optimizer_update(
            params, tx, state[0], scaling.unscale(gradients), finite
        )
        return params, (inner, scaling)

    return init, step


def pipelines() -> list[Pipeline]:
    """Every one, peers first."""
    key = jax.random.key(0)
    table = [
        Pipeline(PLAIN, F32, BF16, plain),
        Pipeline("optax.apply_if_finite, f32 / bf16", F32, BF16, apply_if_finite),
        Pipeline(JMP, F32, BF16, jmp_pipeline),
        Pipeline(MPX, F32, BF16, mpx_pipeline),
        Pipeline("f32 / bf16, no skipping", F32, BF16, ours(skip_nonfinite=False), 36),
        Pipeline(SAME_AS_PEERS, F32, BF16, ours(), 42),
        Pipeline("f32 / bf16, clipped", F32, BF16, ours(clip_global_norm=1.0), 52),
        Pipeline("f32 / bf16, tx.update + apply_updates", F32, BF16, ours(through_optax=True), 52),
        Pipeline("f32 / f16", F32, F16, ours(), 42),
        Pipeline("f32 / f32", F32, F32, ours(), 48),
        Pipeline("f32 / f32, no skipping", F32, F32, ours(skip_nonfinite=False), 42),
        Pipeline(
            "full masters, bf16 / bf16, no skipping",
            BF16,
            BF16,
            ours(skip_nonfinite=False, master_weights="full"),
            44,
        ),
        Pipeline("full masters, bf16 / bf16", BF16, BF16, ours(master_weights="full"), 48),
        Pipeline("full masters, f16 / f16", F16, F16, ours(master_weights="full"), 48),
        Pipeline(
            "full masters, clipped",
            BF16,
            BF16,
            ours(clip_global_norm=1.0, master_weights="full"),
            58,
        ),
        Pipeline("remainder, bf16 / bf16", BF16, BF16, ours(master_weights="remainder"), 52),
        Pipeline(
            "remainder, clipped",
            BF16,
            BF16,
            ours(clip_global_norm=1.0, master_weights="remainder"),
            64,
        ),
    ]
    unbudgeted: dict[str, dict[str, Any]] = {
        "remainder, no skipping": {"master_weights": "remainder", "skip_nonfinite": False},
        "remainder, tx.update": {"master_weights": "remainder", "through_optax": True},
        "full masters, tx.update": {"master_weights": "full", "through_optax": True},
        ON_HOST: {"master_weights": "remainder", "state_memory_kind": "pinned_host"},
        SMALLEST: {
            "master_weights": "remainder",
            "key": key,
            "moment_dtype": {"mu": "int8", "nu": "int8"},
        },
        "stochastic": {"master_weights": "stochastic", "key": key},
        "no masters": {"master_weights": "none"},
    }
    table += [Pipeline(name, BF16, BF16, ours(**options)) for name, options in unbudgeted.items()]
    return table + [
        Pipeline(f"{dtype} moments, f32 / bf16", F32, BF16, ours(moment_dtype=both, key=key))
        for dtype in ("bfloat16", "int8")
        for both in ({"mu": dtype, "nu": dtype},)
    ]


def measure(row: Pipeline, elements: int = ELEMENTS) -> tuple[float, float]:
    """Bytes accessed and bytes of temporary memory an element, of LEAVES leaves. Compiles; runs
    nothing.
    """
    init, step = row.make()
    params = {f"layer_{i}": jax.ShapeDtypeStruct((elements,), row.params) for i in range(LEAVES)}
    gradients = {name: jax.ShapeDtypeStruct((elements,), row.gradients) for name in params}
    state = jax.eval_shape(init, params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, gradients).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if cost is None or memory is None:
        raise RuntimeError("This backend analyzes no costs: run on CPU, with JAX_PLATFORMS=cpu.")
    # to two digits: the state's few scalars are no part of an element
    elements *= LEAVES
    return round(cost["bytes accessed"] / elements, 2), round(
        memory.temp_size_in_bytes / elements, 2
    )


def compile_seconds(make: Callable[[], tuple[Callable[[Any], Any], Step]], leaves: int) -> float:
    """CPU seconds to trace and compile a step of that many small leaves."""
    init, step = make()
    params = {f"layer_{i:03}": jax.ShapeDtypeStruct((64, 64), F32) for i in range(leaves)}
    gradients = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, BF16), params)
    state = jax.eval_shape(init, params)
    start = time.process_time()
    jax.jit(step).lower(params, state, gradients).compile()
    return time.process_time() - start


def nanoseconds(pipelines: Sequence[Pipeline], times: int, elements: int = ELEMENTS) -> list[float]:
    """CPU nanoseconds an element of a step of each, the medians of steps taken in turn."""
    steps, taken = [], [[] for _ in pipelines]
    for pipeline in pipelines:
        init, step = pipeline.make()
        params = {f"layer_{i}": jnp.full((elements,), 0.5, pipeline.params) for i in range(LEAVES)}
        gradients = jax.tree.map(
            lambda p, dtype=pipeline.gradients: jnp.full(p.shape, 0.25, dtype), params
        )
        steps.append((jax.jit(step), params, init(params), gradients))
    for _ in range(times + 1):
        for (step, *arguments), values in zip(steps, taken, strict=True):
            start = time.process_time()
            jax.block_until_ready(step(*arguments))
            values.append(time.process_time() - start)
    return [
        statistics.median(values[1:]) / (elements * LEAVES) * 1e9 for values in taken
    ]  # the first compiles


MAKES: dict[str, Callable[[], tuple[Callable[[Any], Any], Step]]] = {
    "clipped optax": clipped,
    "optax.apply_if_finite": apply_if_finite,
    "ours": ours(),
    "ours, clipped": ours(clip_global_norm=1.0),
}


def _measured(pipeline: Pipeline) -> tuple[float, float] | None:
    try:
        return measure(pipeline)
    except ImportError as error:
        print(f"{pipeline.name}: not measured, {error}", file=sys.stderr)
        return None


def _bytes() -> Iterator[Row]:
    figures = {p.name: (p, found) for p in pipelines() if (found := _measured(p)) is not None}
    plain_bytes = figures[PLAIN][1][0]
    for pipeline, (moved, temporary) in figures.values():
        is_budget = pipeline.budget is not None
        reference = pipeline.budget if pipeline.budget is not None else plain_bytes
        note = "against its budget" if is_budget else "against plain optax"
        yield Row("bytes", pipeline.name, moved, reference, 1.0 if is_budget else None, note=note)
        if is_budget:
            yield Row(
                "temp", pipeline.name, temporary, LARGEST_TEMPORARY, 1.0, note="against its budget"
            )
    for peer in (JMP, MPX):
        if peer in figures:
            bound = (figures[SAME_AS_PEERS][1][0], figures[peer][1][0], 1.0)
            yield Row("bytes", f"{SAME_AS_PEERS}, beside {peer.split(':')[0]}", *bound)


def rows(small: bool = False) -> Iterator[Row]:
    """Every row, as it is measured; the small ones are counts."""
    yield from _bytes()
    if small:
        return
    timed = [p for p in pipelines() if not p.name.startswith("mpx")]
    for pipeline, value in zip(timed, taken := nanoseconds(timed, times=15), strict=True):
        yield Row("ns", pipeline.name, value, taken[0])
    compile_seconds(plain, 2)  # what the first compilation of a process loads
    for leaves in (1, 50, 500):
        reference = compile_seconds(plain, leaves)
        for name, make in MAKES.items():
            bound = 3.0 if name.startswith("ours") and leaves > 1 else None
            yield Row(
                "compiling",
                f"{leaves} leaves, {name}",
                compile_seconds(make, leaves),
                reference,
                bound,
            )


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "reference"))

"""Bytes that one AdamW step moves, an element of the params, beside plain optax, jmp's pipeline and mpx's.

    python -m benchmarks.optimizer            # the table: 10 s on one core, nothing is run
    python -m benchmarks.optimizer --check    # exits with 1 where a row is above its budget
    python -m benchmarks.optimizer --compile  # seconds to compile a step of 50 to 500 leaves, beside plain optax

XLA's own cost analysis of the compiled program, params and state donated, four leaves of 1M elements, gradients scaled
by a dynamic loss scale. The floor for float32 params and bfloat16 gradients is 26: read gradient 2, param 4, moments 8,
and write the last two; XLA counts 36, as it reads the moments twice. `temp` is the peak of temporary memory, in bytes
an element too. Compile times are seconds of this process's CPU: they don't depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from policy import ScaledGradients, apply_gradients, loss_scale_of, mixed_precision

ELEMENTS, LEAVES = 2**20, 4
LARGEST_TEMPORARY = 4.0
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. `budget` is in bytes an element; None has none."""

    name: str
    params: Any
    gradients: Any
    make: Callable[[], tuple[Callable[[Any], Any], Step]]
    budget: float | None = None


def ours(through_optax: bool = False, **options: Any) -> Callable[[], tuple[Callable[[Any], Any], Step]]:
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
    inner = optax.adamw(1e-3) if clip is None else optax.chain(optax.clip_by_global_norm(clip), optax.adamw(1e-3))
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
        return jmp.select_tree(finite, (optax.apply_updates(params, updates), new_state), (params, state))

    return tx.init, step


def mpx_pipeline() -> tuple[Callable[[Any], Any], Step]:
    """mpx's `filter_grad` after the gradient, and its `optimizer_update`: cast, all_finite, unscale, select."""
    import mpx  # pyright: ignore[reportMissingImports]

    tx = optax.adamw(1e-3)

    def init(params: Any) -> Any:
        return tx.init(params), mpx.DynamicLossScaling(jnp.float32(1024), jnp.float32(1))

    def step(params: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        gradients = mpx.cast_to_full_precision(gradients)
        finite = mpx.all_finite(gradients)
        scaling = state[1].adjust(finite)
        params, inner = mpx.optimizer_update(params, tx, state[0], scaling.unscale(gradients), finite)
        return params, (inner, scaling)

    return init, step


def rows() -> list[Row]:
    """Every row, peers first."""
    key = jax.random.key(0)
    table = [
        Row("plain optax, f32 params, bf16 gradients", F32, BF16, plain),
        Row("optax.apply_if_finite, f32 / bf16", F32, BF16, apply_if_finite),
        Row("jmp: unscale, select, f32 / bf16", F32, BF16, jmp_pipeline),
        Row("mpx: unscale, select, f32 / bf16", F32, BF16, mpx_pipeline),
        Row("f32 / bf16, no skipping", F32, BF16, ours(skip_nonfinite=False), 36),
        Row("f32 / bf16", F32, BF16, ours(), 42),
        Row("f32 / bf16, clipped", F32, BF16, ours(clip_global_norm=1.0), 52),
        Row("f32 / bf16, tx.update + apply_updates", F32, BF16, ours(through_optax=True), 52),
        Row("f32 / f16", F32, F16, ours(), 42),
        Row("f32 / f32", F32, F32, ours(), 48),
        Row("f32 / f32, no skipping", F32, F32, ours(skip_nonfinite=False), 42),
        Row(
            "full masters, bf16 / bf16, no skipping", BF16, BF16, ours(skip_nonfinite=False, master_weights="full"), 44
        ),
        Row("full masters, bf16 / bf16", BF16, BF16, ours(master_weights="full"), 48),
        Row("full masters, f16 / f16", F16, F16, ours(master_weights="full"), 48),
        Row("full masters, clipped", BF16, BF16, ours(clip_global_norm=1.0, master_weights="full"), 58),
        Row("remainder, bf16 / bf16", BF16, BF16, ours(master_weights="remainder"), 52),
        Row("remainder, clipped", BF16, BF16, ours(clip_global_norm=1.0, master_weights="remainder"), 64),
    ]
    unbudgeted: dict[str, dict[str, Any]] = {
        "remainder, no skipping": {"master_weights": "remainder", "skip_nonfinite": False},
        "remainder, tx.update": {"master_weights": "remainder", "through_optax": True},
        "full masters, tx.update": {"master_weights": "full", "through_optax": True},
        "kahan": {"master_weights": "kahan"},
        "stochastic": {"master_weights": "stochastic", "key": key},
        "no masters": {"master_weights": "none"},
    }
    return table + [Row(name, BF16, BF16, ours(**options)) for name, options in unbudgeted.items()]


def measure(row: Row, elements: int = ELEMENTS) -> tuple[float, float]:
    """Bytes accessed and bytes of temporary memory an element, of LEAVES leaves. Compiles; runs nothing."""
    init, step = row.make()
    params = {f"layer_{i}": jax.ShapeDtypeStruct((elements,), row.params) for i in range(LEAVES)}
    gradients = {name: jax.ShapeDtypeStruct((elements,), row.gradients) for name in params}
    state = jax.eval_shape(init, params)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, gradients).compile()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if cost is None or memory is None:
        raise RuntimeError("This backend analyses no costs: run on CPU, with JAX_PLATFORMS=cpu.")
    # to two digits: the state's few scalars are no part of an element
    elements *= LEAVES
    return round(cost["bytes accessed"] / elements, 2), round(memory.temp_size_in_bytes / elements, 2)


def compile_seconds(make: Callable[[], tuple[Callable[[Any], Any], Step]], leaves: int) -> float:
    """CPU seconds to trace and compile a step of that many small leaves."""
    init, step = make()
    params = {f"layer_{i:03}": jax.ShapeDtypeStruct((64, 64), F32) for i in range(leaves)}
    gradients = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, BF16), params)
    state = jax.eval_shape(init, params)
    start = time.process_time()
    jax.jit(step).lower(params, state, gradients).compile()
    return time.process_time() - start


def print_table(check: bool) -> int:
    """Prints every row; returns how many are above their budget, where that is asked."""
    print(f"{'':42}{'bytes':>7}{'budget':>8}{'temp':>7}")
    above = 0
    for row in rows():
        try:
            moved, temporary = measure(row)
        except ImportError as error:
            print(f"{row.name:42}  not measured: {error}")
            continue
        too_much = row.budget is not None and (moved > row.budget or temporary > LARGEST_TEMPORARY)
        above += too_much
        budget = "" if row.budget is None else f"{row.budget:g}"
        print(f"{row.name:42}{moved:7.2f}{budget:>8}{temporary:7.2f}{'  above' if too_much else ''}", flush=True)
    return above if check else 0


def print_compile_times() -> None:
    """Linear in leaves. Above plain optax: each leaf has a kernel more for the flag, or for the clip's norm."""
    makes = {
        "plain": plain,
        "clip": clipped,
        "if finite": apply_if_finite,
        "clip, if finite": lambda: apply_if_finite(1.0),
        "ours": ours(),
        "ours, clipped": ours(clip_global_norm=1.0),
    }
    compile_seconds(plain, 2)  # what the first compilation of a process loads
    print(f"{'leaves':>6}" + "".join(f"{name:>17}" for name in makes) + "   CPU seconds, and times plain")
    for leaves in (50, 100, 200, 500):
        seconds = [compile_seconds(make, leaves) for make in makes.values()]
        cells = [f"{second:10.1f} ({second / seconds[0]:.1f})" for second in seconds]
        print(f"{leaves:6}" + "".join(f"{cell:>17}" for cell in cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a row is above its budget")
    parser.add_argument("--compile", action="store_true", help="compile times instead")
    options = parser.parse_args()
    if options.compile:
        print_compile_times()
        return 0
    return int(print_table(options.check) > 0)


if __name__ == "__main__":
    sys.exit(main())

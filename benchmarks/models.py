"""Costs of a policy, beside the same model of upstream Flax with its half dtype threaded through by
hand.

    python -m benchmarks.models  # the table: every model in both APIs; 8 minutes on two idle cores
    python -m benchmarks.models --check  # exits with 1 where a ratio misses its bound
    python -m benchmarks.models --small  # shallower and narrower models, nothing is compiled: 30
                                         # seconds

Each model is written once over an API (`benchmarks/linen_models.py`, `benchmarks/nnx_models.py`):
`ours` is it over `mpmodules` under mixed_bfloat16, with no dtype in it; `hand` is it over Flax with
dtype=bfloat16 everywhere, and `force_fp32_for_softmax` where linen has it. Both train with the same
loss, from the same shapes; the ratio is ours / hand. Shapes alone are traced and compiled, no
numbers are computed, but for `seconds`.

flops,     XLA's count of the program as it is lowered, before the backend rewrites it: on CPU
bytes      bfloat16 is emulated, and the compiled program says more of that than of the model.
           value_and_grad of the loss.
converts   `stablehlo.convert` operations in that program.
saved      bytes that `jax.vjp` keeps for the backward pass beside the function's inputs.
c-flops,   the same of the compiled program,
c-bytes,
temp       and its temporary memory; in the full table.
kernels    fusions, matmuls and the like in the compiled program's entry.
tracing    CPU seconds to trace value_and_grad with JAX's caches warm but for the model's: the best
           of several.
compiling  CPU seconds of XLA.
seconds    CPU seconds of a step of the small model, A B A B, the median, and the spread; in the
           full table.

Rows of *repaired* layers are apart: where Flax sums a bias's gradient, a softmax or a pooling
window in bfloat16, ours does it in float32, and the row says what that costs.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from benchmarks import linen_models, nnx_models, table
from benchmarks.table import Row
from mpmodules import linen, nnx, use_policy

BF16, F32 = jnp.bfloat16, jnp.float32
POLICY = "mixed_bfloat16"
APIS = ("linen", "nnx")
REFERENCE = "hand"
_FLAX: Any = flax.linen
Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss, ``loss(params, state, x, y) -> (loss, state)``, and shapes to call it with."""

    loss: Loss
    arguments: tuple[Any, ...]

    @property
    def step(self) -> Loss:
        return jax.value_and_grad(self.loss, has_aux=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what it is called with.

    Attributes:
      name: as it is printed.
      model: the class's name in `linen_models` and `nnx_models`.
      x, y: its input and labels, as shapes and dtypes; without labels the loss is the mean square.
      options: the model's sizes.
      repairs: what of it is repaired, so that its bounds are others.
    """

    name: str
    model: str
    x: jax.ShapeDtypeStruct
    y: jax.ShapeDtypeStruct | None
    options: tuple[tuple[str, Any], ...] = ()
    repairs: str = ""

    def programs(self, api: str) -> dict[str, Program]:
        build = _linen if api == "linen" else _nnx
        return {"ours": build(self, ours=True), "hand": build(self, ours=False)}


def loss_of(outputs: jax.Array, y: jax.Array | None) -> jax.Array:
    outputs = outputs.astype(F32)
    if y is None:
        return jnp.mean(jnp.square(outputs))
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def _linen(case: Case, ours: bool, dtype: Any = BF16) -> Program:
    api: Any = linen if ours else flax.linen
    model = getattr(linen_models.of(api), case.model)
    module = model(None if ours else dtype, **dict(case.options))

    def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
        outputs, state = module.apply({"params": params, **state}, x, mutable=list(state))
        return loss_of(outputs, y), state

    state = dict(jax.eval_shape(module.init, jax.random.key(0), case.x))
    params = state.pop("params")
    return Program(use_policy(POLICY)(loss) if ours else loss, (params, state, case.x, case.y))


def dtype_free(
    case: Case, transform: Callable[[Loss], Loss] = lambda loss: loss, api: str = "linen"
) -> Program:
    """The model over Flax with no dtype in it, in float32; its loss transformed."""
    program = (_linen if api == "linen" else _nnx)(case, ours=False, dtype=None)
    return dataclasses.replace(program, loss=transform(program.loss))


def by_hand(case: Case) -> Program:
    """The model over Flax's linen with dtype=bfloat16 written into every layer."""
    return _linen(case, ours=False)


def _nnx(case: Case, ours: bool, dtype: Any = BF16) -> Program:
    api: Any = nnx if ours else flax.nnx
    model = getattr(nnx_models.of(api), case.model)
    options = dict(case.options) | ({"dtype_policy": POLICY} if ours else {"dtype": dtype})
    built = flax.nnx.eval_shape(lambda: model(**options, rngs=flax.nnx.Rngs(0)))
    graph, params, state = flax.nnx.split(built, flax.nnx.Param, ...)

    def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
        module = flax.nnx.merge(graph, params, state, copy=True)
        outputs = module(x)
        return loss_of(outputs, y), flax.nnx.state(module, flax.nnx.Not(flax.nnx.Param))

    return Program(loss, (params, state, case.x, case.y))


# --------------------------------------------------------------------------------------------------
# What is measured
# --------------------------------------------------------------------------------------------------


def saved_bytes(program: Program) -> int:
    """Bytes of the arrays in the pullback by the params that are no inputs of the function."""

    def saved(params: Any, *others: Any) -> Any:
        return jax.vjp(lambda params: program.loss(params, *others), params, has_aux=True)[1]

    jaxpr: Any = jax.make_jaxpr(saved)(*program.arguments).jaxpr
    inputs = {id(variable) for variable in jaxpr.invars}
    kept = {
        id(atom): atom.aval
        for atom in jaxpr.outvars
        if not isinstance(atom, Literal) and id(atom) not in inputs
    }
    return sum(aval.size * aval.dtype.itemsize for aval in kept.values())


def lowered(program: Program) -> dict[str, float]:
    """FLOPs, bytes accessed and converts of value_and_grad as lowered; nothing is compiled."""
    low = jax.jit(program.step).lower(*program.arguments)
    costs = low.cost_analysis()
    if costs is None:
        raise RuntimeError("This backend analyzes no costs: run on CPU, with JAX_PLATFORMS=cpu.")
    converts = len(re.findall(r"stablehlo\.convert\b", low.as_text()))
    return {"flops": costs["flops"], "bytes": costs["bytes accessed"], "converts": converts}


def compiled(program: Program) -> dict[str, float]:
    """The same of the compiled program, its temporary memory, its kernels, and the CPU seconds that
    it took.
    """
    low = jax.jit(program.step).lower(*program.arguments)
    start = time.process_time()
    executable = low.compile()
    seconds = time.process_time() - start
    costs, memory = executable.cost_analysis(), executable.memory_analysis()
    if costs is None or memory is None:
        raise RuntimeError("This backend analyzes no costs: run on CPU, with JAX_PLATFORMS=cpu.")
    return {
        "c-flops": costs["flops"],
        "c-bytes": costs["bytes accessed"],
        "temp": memory.temp_size_in_bytes,
        "kernels": kernels(executable.as_text() or ""),
        "compiling": seconds,
    }


_KERNEL = re.compile(
    r"= \S+ (fusion|dot|convolution|custom-call|reduce|reduce-window|select-and-scatter|scatter"
    r"|sort)\("
)


def kernels(hlo: str) -> int:
    """Counts the kernels in a compiled program's entry: operations other than constants, views and
    tuples.
    """
    entry = hlo[hlo.index("\nENTRY ") :]
    return len(_KERNEL.findall(re.sub(r"\{[^{}]*\}", "", entry)))


def tracing(programs: Mapping[str, Callable[[], Program]], times: int) -> dict[str, float]:
    """CPU seconds to trace each, the best of several; a new function each time, JAX's own caches
    warm.
    """
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(times + 1):
        for name, build in programs.items():
            best[name] = min(best[name], traced_in(build()))
    return best


def traced_in(program: Program) -> float:
    """CPU seconds of one trace."""
    return cpu_seconds(lambda: jax.make_jaxpr(program.step)(*program.arguments))


def cpu_seconds(call: Callable[[], Any]) -> float:
    """CPU seconds of a call, without collecting garbage, as `timeit`: there is much after a trace,
    and any of the compared calls may meet it.
    """
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        call()
        return time.process_time() - start
    finally:
        gc.enable()


def seconds(programs: dict[str, Program], times: int) -> tuple[dict[str, float], float]:
    """CPU seconds of a step of each, the median, A B A B; and the larger interquartile range, in
    medians.
    """
    generator = np.random.default_rng(0)
    steps = {name: jax.jit(program.step) for name, program in programs.items()}
    numbers = {
        name: jax.tree.map(functools.partial(_numbers, generator), p.arguments)
        for name, p in programs.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(times + 1):
        for name, step in steps.items():
            start = time.process_time()
            jax.block_until_ready(step(*numbers[name]))
            taken[name].append(time.process_time() - start)
    medians = {
        name: statistics.median(values[1:]) for name, values in taken.items()
    }  # the first compiles
    quartiles = {name: statistics.quantiles(values[1:]) for name, values in taken.items()}
    return medians, max((q[2] - q[0]) / medians[name] for name, q in quartiles.items())


def step_time(name: str, programs: dict[str, Program], times: int = 21) -> Row:
    """CPU seconds of a compiled step, ours beside by hand: no longer than noise makes it."""
    taken, spread = seconds(programs, times)
    bound = round(1.05 + spread, 3)  # the spread of one and the same program, and 5%
    return Row(
        "seconds",
        name,
        taken["ours"],
        taken["hand"],
        bound,
        note=f"interquartile range {spread:.0%}",
    )


def _numbers(generator: np.random.Generator, like: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(like.dtype, jnp.floating):
        return jnp.asarray(0.1 * generator.normal(size=like.shape), like.dtype)
    return jnp.asarray(generator.integers(0, 8, like.shape), like.dtype)


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F32)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _case(name: str, model: str, x: Any, y: Any, repairs: str, options: dict[str, Any]) -> Case:
    return Case(name, model, x, y, tuple(options.items()), repairs)


BIASES = "bias gradients in float32"
NORMS = f"{BIASES}; what normalizations keep for backward is half, and computed again"
ATTENTION = f"{NORMS}; attention's too"


def cases(small: bool) -> list[Case]:
    """Every model; `small` ones have the same layers, fewer and narrower."""
    if small:
        mlp: dict[str, Any] = {"width": 256}
        resnet: dict[str, Any] = {"filters": 8, "stages": (1, 1), "classes": 16}
        vit = {"layers": 2, "width": 64, "heads": 4, "patch": 8, "patches": 16, "classes": 16}
        decoder = encoder = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 256, "length": 64}
        rows, image, tokens = _floats(512, 256), _floats(4, 32, 32, 3), _integers(4, 64)
    else:
        mlp, resnet, vit = {"width": 1024}, {"filters": 64}, {"layers": 12}
        decoder = {"layers": 12, "width": 512, "heads": 8, "vocabulary": 8192, "length": 256}
        encoder = {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 8192, "length": 256}
        rows, image, tokens = _floats(2048, 1024), _floats(8, 224, 224, 3), _integers(8, 256)
    classes = _integers(image.shape[0])
    transformer = functools.partial(
        _case, model="Transformer", x=tokens, y=tokens, repairs=ATTENTION
    )
    return [
        _case("MLP without biases", "Mlp", rows, None, "", mlp | {"use_bias": False}),
        _case("MLP", "Mlp", rows, None, BIASES, mlp),
        _case(
            "ResNet, 2 blocks" if small else "ResNet-50", "ResNet", image, classes, NORMS, resnet
        ),
        _case(
            "ViT, 2 layers" if small else "ViT-S",
            "VisionTransformer",
            image,
            classes,
            ATTENTION,
            vit,
        ),
        transformer(f"decoder, {decoder['layers']} layers", options=decoder),
        transformer(f"encoder, {encoder['layers']} layers", options=encoder | {"causal": False}),
    ]


# The largest ratios: of what is repaired apart. `docs/benchmarks.md` says where each of those comes
# from.
BOUNDS = {"flops": 1.0, "bytes": 1.0, "converts": 1.0, "saved": 1.0, "tracing": 1.10}
COMPILED = {"c-flops": 1.0, "c-bytes": 1.0, "temp": 1.0, "kernels": 1.0, "compiling": None}
# As written, before XLA fuses them: the exact sums of normalizations are elementwise FLOPs, and
# attention's derivative has casts of its own, and a normalization that saves its input alone widens
# it again backward. What they cost is in the tables of the accelerators.
REPAIRED = {"flops": 1.04, "bytes": None, "converts": 1.15, "saved": 1.0, "tracing": 1.10}
REPAIRED_COMPILED = {
    "c-flops": 1.01,
    "c-bytes": 1.10,
    "temp": 1.0,
    "kernels": None,
    "compiling": None,
}


def _rows(case: Case, api: str, figures: dict[str, dict[str, float]]) -> Iterator[Row]:
    bounds = REPAIRED | REPAIRED_COMPILED if case.repairs else BOUNDS | COMPILED
    for quantity in figures["ours"]:
        yield Row(
            quantity,
            f"{case.name}, {api}",
            figures["ours"][quantity],
            figures["hand"][quantity],
            bounds[quantity],
        )


def _rebuilt(case: Case, api: str, name: str) -> Program:
    return case.programs(api)[name]


def rows(small: bool = False) -> Iterator[Row]:
    """Every row, as it is measured; the small ones are counts, the same on every run."""
    for case, api in ((case, api) for case in cases(small) for api in APIS):
        programs = case.programs(api)
        counts = {
            name: lowered(program) | {"saved": saved_bytes(program)}
            for name, program in programs.items()
        }
        yield from _rows(case, api, counts)
        if not small:
            builds = {name: functools.partial(_rebuilt, case, api, name) for name in programs}
            traced = tracing(
                builds, times=12 if case.model == "Mlp" else 3
            )  # one takes 12 ms, the others half a second
            yield from _rows(
                case, api, {name: {"tracing": seconds} for name, seconds in traced.items()}
            )
            yield from _rows(
                case, api, {name: compiled(program) for name, program in programs.items()}
            )
    for case, api in () if small else ((case, api) for case in cases(small=True) for api in APIS):
        yield step_time(f"{case.name}, {api}", case.programs(api))


if __name__ == "__main__":
    sys.exit(table.run(__doc__, rows, REFERENCE))

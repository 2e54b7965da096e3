"""What autocast costs beside the same model with its half dtype threaded through by hand.

    python -m benchmarks.autocast           # the table: 3 minutes on two idle cores
    python -m benchmarks.autocast --check   # exits with 1 where a ratio misses its bound
    python -m benchmarks.autocast --small   # shallower models: 1 minute
    python -m benchmarks.autocast --counts  # nothing that is timed or run: the same on every run
    python -m benchmarks.autocast --json FILE

Every model is written once (`benchmarks/linen_models.py`, `benchmarks/autocast_models.py`). `ours`
is it without dtypes, under autocast; `hand` has dtype=bfloat16 and Flax's `force_fp32_for_softmax`;
both are measured in this run, and the ratio is ours / hand.

saved      bytes that `jax.vjp` keeps for the backward pass beside the function's inputs; nothing is
           compiled.
bytes,     what XLA's cost analysis counts in the compiled value_and_grad. On CPU, matmuls of
flops      bfloat16 are float32 matmuls between casts, and how these fuse is in the figures: a
           percent either way.
error      of gradients, relative to float32's: the geometric mean over leaves and over seeds. XLA
           is told to round where the program says so; by default it leaves out what roundings it
           likes.
casts      of one weight: as many as it has uses, each in the loop that uses it. A cast that is
           shared or hoisted sums gradients in bfloat16.
tracing    CPU seconds for `jax.make_jaxpr` of value_and_grad, caches warm, beside the same function
           in float32, under `jax.jit` as autocast is.
seconds    CPU seconds of a compiled step of the small models, A B A B, the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import autocast_models as models
from benchmarks import linen_models
from benchmarks.models import Program, by_hand, cases, dtype_free, step_time, traced_in
from benchmarks.models import compiled as models_compiled
from benchmarks.models import saved_bytes as models_saved
from benchmarks.models import tracing as models_tracing
from benchmarks.table import Row, run
from policy.autocasting.transform import autocast
from policy.programs.reading.walk import walk

BF16, F32 = jnp.bfloat16, jnp.float32
FLAX = linen_models.of(flax.linen)  # pyright: ignore[reportArgumentType]
POLICY = "mixed_bfloat16"
SAVED, COMPILED, ERROR, TRACING = (
    1.05,
    1.02,
    1.05,
    2.0,
)  # the error of either is known to a few percent
BIASES = (
    1.12  # what else an MLP moves, measured: the cotangent of each layer in float32 too, to sum it
)
Loss = Callable[[Any, Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and what it is called with.

    Attributes:
      name: as it is printed.
      make: the module for a dtype; None is for autocast.
      x: its input, as a shape and a dtype.
      y: labels of the cross entropy; None is for the mean square of the outputs.
    """

    name: str
    make: Callable[[Any], Any]
    x: jax.ShapeDtypeStruct
    y: jax.ShapeDtypeStruct | None = None

    def loss(self, dtype: Any) -> Loss:
        """``loss(params, state, x, y)`` -> the loss, and what the model did to its state."""
        module = self.make(dtype)

        def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
            rngs = {"dropout": jax.random.key(1)}
            outputs, updates = module.apply(
                {"params": params, **state}, x, rngs=rngs, mutable=list(state)
            )
            return models.squares(outputs) if y is None else models.cross_entropy(
                outputs, y
            ), updates

        return loss

    def programs(self) -> dict[str, Loss]:
        """The function in float32, by hand, and under autocast."""
        plain, hand = self.loss(None), self.loss(BF16)
        return {
            "plain": jax.jit(plain),
            "hand": jax.jit(hand),
            "ours": autocast(plain, POLICY, params=0),
        }

    def arguments(self, seed: int | None = None) -> tuple[Any, Any, Any, Any]:
        """Params, state, inputs and labels: shapes, or with a seed numbers."""
        init, keys = (
            self.make(None).init,
            {name: jax.random.key(seed or 0) for name in ("params", "dropout")},
        )
        if seed is None:
            variables, x, y = jax.eval_shape(init, keys, self.x), self.x, self.y
        else:
            generator = np.random.default_rng(seed)
            x, y = (
                None if like is None else _numbers(generator, like) for like in (self.x, self.y)
            )
            variables = jax.jit(init)(keys, x)
        state = dict(variables)
        return state.pop("params"), state, x, y


def _numbers(generator: np.random.Generator, like: jax.ShapeDtypeStruct) -> jax.Array:
    is_float = jnp.issubdtype(like.dtype, jnp.floating)
    numbers = (
        generator.normal(size=like.shape) if is_float else generator.integers(1, 16, like.shape)
    )
    return jnp.asarray(numbers, like.dtype)


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F32)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def mlp(rows: int = 2048, width: int = 1024) -> Case:
    return Case("MLP, 4 layers", lambda dtype: FLAX.Mlp(dtype, width=width), _floats(rows, width))


def resnet(stages: tuple[int, ...] = (3, 4, 6, 3), filters: int = 8, size: int = 64) -> Case:
    name = f"ResNet-{3 * sum(stages) + 2}"
    make = lambda dtype: FLAX.ResNet(dtype, filters, stages, classes=16)  # noqa: E731
    return Case(name, make, _floats(4, size, size, 3), _integers(4))


def decoder(layers: int = 12, batch: int = 4, length: int = 64, **options: Any) -> Case:
    name = f"decoder, {layers} layers" + "".join(
        f", {option.replace('_', ' ')}" for option in options if option != "width"
    )
    make = lambda dtype: models.Decoder(dtype, layers, **options)  # noqa: E731
    return Case(name, make, _integers(batch, length), _integers(batch, length))


def recurrent(steps: int = 512) -> Case:
    return Case(f"RNN, {steps} steps", lambda dtype: models.Recurrent(dtype), _floats(steps, 4, 32))


def reused(times: int = 8) -> Case:
    return Case(
        f"a Dense used {times} times", lambda dtype: models.Reused(dtype, times), _floats(4, 32)
    )


# --------------------------------------------------------------------------------------------------
# What is measured
# --------------------------------------------------------------------------------------------------


def saved(case: Case) -> Row:
    """Nothing is compiled or run."""
    programs, arguments = case.programs(), case.arguments()
    ours, hand = (models_saved(Program(programs[name], arguments)) for name in ("ours", "hand"))
    return Row("saved", case.name, ours, hand, SAVED)


def compiled(case: Case) -> Iterator[Row]:
    """Bytes accessed and FLOPs of the loss and its gradients."""
    programs, arguments = case.programs(), case.arguments()
    costs = {}
    for name in ("ours", "hand"):
        step = jax.jit(jax.value_and_grad(programs[name], has_aux=True))
        costs[name] = step.lower(*arguments).compile().cost_analysis()
        if costs[name] is None:
            raise RuntimeError(
                "This backend analyzes no costs: run on CPU, with JAX_PLATFORMS=cpu."
            )
    for quantity, key in (("bytes", "bytes accessed"), ("flops", "flops")):
        yield Row(quantity, case.name, costs["ours"][key], costs["hand"][key], COMPILED)


def errors(case: Case, seeds: int) -> Iterator[Row]:
    """Of the gradients, by kind of parameter: kernels, biases, scales, embeddings."""
    logs: dict[tuple[str, str], list[float]] = defaultdict(list)
    options = {"xla_allow_excess_precision": False}
    gradients = {
        name: jax.jit(jax.grad(fn, has_aux=True), compiler_options=options)
        for name, fn in case.programs().items()
    }
    for seed in range(seeds):
        arguments = case.arguments(seed)
        found = {
            name: jax.tree_util.tree_leaves_with_path(fn(*arguments)[0])
            for name, fn in gradients.items()
        }
        for name in ("ours", "hand"):
            for (path, gradient), (_, truth) in zip(found[name], found["plain"], strict=True):
                logs[path[-1].key, name].append(np.log(_relative(gradient, truth)))
    for kind in dict.fromkeys(kind for kind, _ in logs):
        ours, hand = (float(np.exp(np.mean(logs[kind, name]))) for name in ("ours", "hand"))
        yield Row("error", f"{case.name}: {kind}", ours, hand, ERROR)


def _relative(gradient: Any, truth: Any) -> float:
    gradient, truth = np.asarray(gradient, np.float64), np.asarray(truth, np.float64)
    return float(np.linalg.norm(gradient - truth) / np.linalg.norm(truth))


def _casts(jaxpr: Any, shape: tuple[int, ...], within: str) -> int:
    """How many casts of float32 arrays of that shape stand in a program, or in the body of one
    primitive in it.
    """
    casts = [
        s
        for s in walk(jaxpr)
        if s.name == "convert_element_type" and (not within or within in s.inside)
    ]
    operands = [site.equation.invars[0].aval for site in casts]
    return sum(operand.shape == shape and operand.dtype == F32 for operand in operands)


def casts(case: Case, shape: tuple[int, ...], within: str = "") -> Row:
    """Casts of weights, where each use needs its own; fewer are as wrong as more."""
    programs, arguments = case.programs(), case.arguments()
    jaxprs = {name: jax.make_jaxpr(programs[name])(*arguments).jaxpr for name in ("ours", "hand")}
    ours, hand = (_casts(jaxprs[name], shape, within) for name in ("ours", "hand"))
    return Row("casts", case.name, ours, hand, bound=1.0, at_least=1.0)


def tracing(case: Case, times: int) -> Row:
    """The best of several; a new function each time, so that only JAX's own caches are warm."""
    best = {"ours": float("inf"), "plain": float("inf")}
    for _ in range(times + 1):
        programs, arguments = case.programs(), case.arguments()
        for name in best:
            best[name] = min(best[name], traced_in(Program(programs[name], arguments)))
    return Row("tracing", f"{case.name}, beside float32", best["ours"], best["plain"], TRACING)


def models_without_dtypes(small: bool, counts: bool) -> Iterator[Row]:
    """The models of `benchmarks.models`, written over Flax without a dtype, beside themselves
    threaded by hand.
    """
    for case in cases(small):
        name = f"{case.name}, linen"
        ours, hand = (
            dtype_free(case, functools.partial(autocast, policy=POLICY, params=0)),
            by_hand(case),
        )
        yield Row("saved", name, models_saved(ours), models_saved(hand), SAVED)
        if not small:
            figures = [models_compiled(program) for program in (ours, hand)]
            bound, note = (
                (BIASES, "bias gradients in float32") if case.model == "Mlp" else (COMPILED, "")
            )
            (moved, moved_by_hand), (flops, flops_by_hand) = (
                [f[key] for f in figures] for key in ("c-bytes", "c-flops")
            )
            yield Row("bytes", name, moved, moved_by_hand, bound, note=note)
            yield Row("flops", name, flops, flops_by_hand, COMPILED)
        if not counts:
            builds = {
                "ours": functools.partial(
                    dtype_free, case, functools.partial(autocast, policy=POLICY, params=0)
                ),
                "plain": functools.partial(dtype_free, case, jax.jit),
            }
            best = models_tracing(builds, times=3)
            yield Row("tracing", f"{name}, beside float32", best["ours"], best["plain"], TRACING)
    for case in () if counts else cases(small=True):
        ours, hand = (
            dtype_free(case, functools.partial(autocast, policy=POLICY, params=0)),
            by_hand(case),
        )
        yield step_time(f"{case.name}, linen", {"ours": ours, "hand": hand})


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def rows(small: bool = False, *, counts: bool = False) -> Iterator[Row]:
    """Every row, as it is measured. `small` leaves out blocks and layers, `counts` what is timed or
    run.
    """
    blocks = (1, 1) if small else (3, 4, 6, 3)
    layers, seeds, times = (2, 4, 3) if small else (12, 16, 5)
    language = decoder(layers, dropout=0.1)  # Flax's lm1b example
    yield from models_without_dtypes(small, counts)
    half = decoder(layers, einsum_in_half=True)
    for case in (
        mlp(),
        resnet(blocks),
        decoder(layers),
        half,
        decoder(layers, gelu=True),
        language,
    ):
        yield saved(case)
    for case in () if counts else (mlp(), resnet(blocks), language):
        yield tracing(case, times)
    # Flax multiplies a float32 softmax with the values in float32: without dropout XLA:CPU moves 3%
    # less for that than for a matmul in half. So the decoder without dropout stands beside one
    # whose author casts there.
    for case in (resnet(blocks), language, half):
        yield from compiled(case)
    yield casts(mlp(), (1024, 1024))
    yield casts(reused(), (32, 32))
    yield casts(recurrent(), (32, 32), within="scan")
    for case in () if counts else (mlp(8192, 64), decoder(2, 8, tied=True, width=32), recurrent()):
        yield from errors(case, seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    counts = argparse.ArgumentParser(add_help=False)
    counts.add_argument(
        "--counts", action="store_true", help="leave out what is timed, and what is run"
    )
    options, rest = counts.parse_known_args(arguments)
    return run(__doc__, functools.partial(rows, counts=options.counts), "hand", rest)


if __name__ == "__main__":
    sys.exit(main())

"""Layers that are asked for float32 in a bfloat16 model: their precision, cycles and errors.

    python -m benchmarks.accel.precision          # v5e and H100: 4 minutes on two idle cores
    python -m benchmarks.accel.precision --write  # puts the table into docs/float32.md
    python -m benchmarks.accel.precision --check  # exits with 1 where a bound is missed

Each layer stands alone in `use_policy("mixed_bfloat16")`, with the policy float32 of its own. Of
value_and_grad of its mean square:

precision  of all its matmuls, in the jaxpr and in the programs compiled for a TPU v5e and an H100.
           Bound: highest.
cycles     of the v5e's compiler at the precisions default, high and highest, divided by those of
           the layer in bfloat16.
errors     root mean square of the output's difference from float64, divided by the root mean square
           of the output, with the passes of a TPU emulated. Bound at highest: 1e-6.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accel.emulated import emulated
from benchmarks.accel.program import measure, placed
from benchmarks.accel.targets import Target
from benchmarks.command import marked_parser, shown_table
from benchmarks.eight_bits.report import environment
from benchmarks.markdown import table as markdown_table
from mpmodules import linen as nn
from mpmodules import use_policy
from policy import audit
from policy.inspect.hlo.dump import without_cache

PAGE = Path(__file__).parents[2] / "docs" / "float32.md"
PRECISIONS = ("default", "high", "highest")
WIDTH = 512
TARGETS = ("v5e:1x1", "h100")


class Router(nn.Module):
    """The logits of a router, a user's own code."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        experts = self.param("experts", nn.initializers.lecun_normal(), (x.shape[-1], 64))
        return x @ experts


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer.

    Attributes:
      layer: makes it, given its policy.
      shape: of its float32 input.
    """

    name: str
    layer: Callable[..., flax_nn.Module]
    shape: tuple[int, ...] = (8, 128, WIDTH)


def _attention(**policy: Any) -> flax_nn.Module:
    return nn.MultiHeadDotProductAttention(8, **policy)


CASES = (
    Case("Dense", lambda **policy: nn.Dense(WIDTH, **policy)),
    Case("Conv", lambda **policy: nn.Conv(128, (3, 3), **policy), (8, 28, 28, 128)),
    Case("Einsum", lambda **policy: nn.Einsum((WIDTH, 8, 64), "btd,dnh->btnh", **policy)),
    Case("attention", _attention),
    Case("logits of a router", Router),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """The figures of a layer.

    Attributes:
      precisions: of its float32 matmuls in the jaxpr, on the v5e and on the H100.
      cycles: by precision, beside bfloat16.
      errors: by precision, and in bfloat16.
    """

    name: str
    precisions: tuple[str, ...]
    cycles: dict[str, float]
    errors: dict[str, float]

    def missed(self) -> Iterator[str]:
        if set(self.precisions) != {"highest"}:
            yield f"precision of {self.name}: {', '.join(self.precisions)}, bound highest"
        if self.errors["highest"] > 1e-6:
            yield f"error of {self.name}: {self.errors['highest']:.1e}, bound 1e-6"


def _policy(precision: str) -> dict[str, str]:
    """Returns the argument of a layer that multiplies at a precision; bfloat16's has none."""
    if precision == "bfloat16":
        return {}
    return {"dtype_policy": "float32" if precision == "highest" else f"c=f32,x={precision}"}


def _program(case: Case, precision: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the functions that initialize and apply a layer in a bfloat16 model."""
    model = case.layer(**_policy(precision))

    def init(key: jax.Array, x: jax.Array) -> Any:
        with use_policy("mixed_bfloat16"):
            return model.init(key, x)

    def apply(variables: Any, x: jax.Array) -> Any:
        with use_policy("mixed_bfloat16"):
            return model.apply(variables, x)

    return init, apply


def _step(apply: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(
        lambda variables, x: jnp.mean(jnp.square(apply(variables, x).astype(jnp.float32))),
        argnums=(0, 1),
    )


def row_of(case: Case) -> Row:
    """Compiles a layer's programs and measures its errors.

    JAX's cache is off: without the chip it reads no program of one.
    """
    with without_cache():
        return _row_of(case)


def _row_of(case: Case) -> Row:
    cycles, compiled = {}, []
    x = jax.ShapeDtypeStruct(case.shape, jnp.float32)
    targets = [Target(name) for name in TARGETS]
    for precision in ("bfloat16", *PRECISIONS):
        init, apply = _program(case, precision)
        shapes = jax.eval_shape(init, jax.random.key(0), x), x
        figures = measure(targets[0], _step(apply), placed(targets[0], shapes))
        cycles[precision] = figures.cycles
        if precision == "highest":
            compiled = [_of_compiled(each, _step(apply), placed(each, shapes)) for each in targets]
    init, apply = _program(case, "highest")
    shapes = jax.eval_shape(init, jax.random.key(0), x), x
    traced = {
        operation.precision
        for operation in audit(_step(apply), *shapes).operations
        if operation.kind in ("dot", "convolution")
    }
    return Row(
        case.name,
        (" and ".join(sorted(traced)), *compiled),
        {precision: cycles[precision] / cycles["bfloat16"] for precision in PRECISIONS},
        _errors(case),
    )


def _of_compiled(target: Target, step: Callable[..., Any], arguments: Sequence[Any]) -> str:
    """Returns the precisions of the matmuls of a compiled program."""
    lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=(target.chip.platform,))
    text: Any = lowered.compile().as_text()
    found = set()
    for line in text.splitlines():
        if re.search(r" (?:dot|convolution)\(|custom-call.*__(?:cublas|cudnn)", line):
            asked = re.search(r'operand_precision(?:=\{|":\[)"?(\w+)', line)
            found.add("default" if asked is None else asked[1].lower())
    return " and ".join(sorted(found))


def _errors(case: Case) -> dict[str, float]:
    """Returns the errors of a layer's output, on a TPU."""
    x = jax.random.normal(jax.random.key(0), (2, *case.shape[1:]))
    init, _ = _program(case, "highest")
    variables = jax.jit(init)(jax.random.key(1), x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), (variables, x))
        truth = np.asarray(jax.jit(case.layer(dtype_policy="float64").apply)(*wide))
    found = {}
    for precision in ("bfloat16", *PRECISIONS):
        apply = emulated(_program(case, precision)[1], "tpu")
        y = np.asarray(jax.jit(apply)(variables, x), np.float64)
        found[precision] = float(np.sqrt(np.mean((y - truth) ** 2) / np.mean(truth**2)))
    return found


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    head = ["layer", "cycles", "error: bfloat16", "default", "highest"]
    cells = [
        [
            row.name,
            f"{row.cycles['highest']:.2f}",
            *(f"{row.errors[each]:.1e}" for each in ("bfloat16", "default", "highest")),
        ]
        for row in rows
    ]
    return markdown_table(head, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 1 where a bound is missed under ``--check``, else 0."""
    parser = marked_parser(__doc__, PAGE)
    options = parser.parse_args(arguments)
    if options.write and options.only:
        parser.error("--write replaces the whole table: leave out --only")
    chosen = [
        case
        for case in CASES
        if not options.only or any(part.lower() in case.name.lower() for part in options.only)
    ]
    rows = [row_of(case) for case in chosen]
    missed = [line for row in rows for line in row.missed()]
    how = f"Compiled and emulated with {environment()}:"
    return shown_table(options, PAGE, "precision", how, table(rows), missed)


if __name__ == "__main__":
    sys.exit(main())

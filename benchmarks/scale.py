"""How traced programs and the time to trace them grow with layers. Straight lines are wanted.

    python -m benchmarks.scale  # the table: a few minutes of one core; nothing is compiled or run
    python -m benchmarks.scale --check  # exits with 1 where a line bends
    python -m benchmarks.scale --small  # few layers: half a minute
    python -m benchmarks.scale --json FILE

The decoder of `benchmarks.models`, narrow. Rows that say "beside" compare it with the same model
threaded by hand, at the most layers. All others compare what one more layer costs at the far end,
in the column `ours`, with what it costs at the near end: 1 is a straight line.

equations  of the traced value_and_grad, those in bodies included.
saved      bytes that `jax.vjp` keeps for the backward pass beside the function's inputs.
calls      of Python functions while it is traced, in thousands, as cProfile counts them: the time
           to trace, without its noise.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from benchmarks import models
from benchmarks.models import Case, Program
from benchmarks.ports import calls, ported
from benchmarks.table import Row, run
from mpmodules import PolicyRules, use_policy
from policy.autocasting.transform import autocast

LAYERS, FEW_LAYERS = (2, 6, 12, 24), (1, 2, 4)
EXACT = 1.01
# autocast rewrites equal layers once: from one layer to two, part of the second is shared.
SHARED = 1.06
# A small part of the calls is quadratic. A module looks at every rule before its own: with a rule a
# layer, a larger part.
CALLS, RULES, RULE_A_LAYER = 1.03, 1.07, "linen, a path rule a layer"
TOKENS = jax.ShapeDtypeStruct((4, 32), jnp.int32)
SIZES = {"width": 64, "heads": 4, "vocabulary": 256}


def decoder(layers: int) -> Case:
    """Returns the decoder of so many layers."""
    options = SIZES | {"layers": layers}
    return Case(f"decoder, {layers} layers", "Transformer", TOKENS, TOKENS, tuple(options.items()))


def with_a_rule_a_layer(layers: int) -> Program:
    """Returns our linen decoder with a path rule for each layer, of the policy itself."""
    program = decoder(layers).programs("linen")["ours"]
    rules = PolicyRules([(f"block_{i}", models.POLICY) for i in range(layers)])
    return dataclasses.replace(program, loss=use_policy(models.POLICY, rules)(program.loss))


def _threaded(api: str, which: str, layers: int) -> Program:
    return decoder(layers).programs(api)[which]


def _autocast(layers: int) -> Program:
    transform = functools.partial(autocast, policy=models.POLICY, params=0)
    return models.dtype_free(decoder(layers), transform)


# Each kind of program, of any number of layers; by hand first.
GROUPS: tuple[dict[str, Callable[[int], Program]], ...] = (
    {
        "linen by hand": functools.partial(_threaded, "linen", models.REFERENCE),
        "linen": functools.partial(_threaded, "linen", "ours"),
        RULE_A_LAYER: with_a_rule_a_layer,
        "apply_policy": lambda layers: ported(decoder(layers)),
        "autocast": _autocast,
    },
    {
        "nnx by hand": functools.partial(_threaded, "nnx", models.REFERENCE),
        "nnx": functools.partial(_threaded, "nnx", "ours"),
    },
)


def equations(jaxpr: Any) -> int:
    """Returns the number of equations of a jaxpr, with those of its bodies."""
    return sum(1 + sum(map(equations, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


def figures(build: Callable[[], Program]) -> dict[str, float]:
    """Returns what a program costs, by quantity."""
    program = build()
    traced = jax.make_jaxpr(program.step)(*program.arguments)
    return {
        "equations": equations(traced.jaxpr),
        "saved": models.saved_bytes(program),
        "calls": calls(build),
    }


def straight(
    quantity: str, name: str, layers: Sequence[int], costs: Sequence[float], bound: float | None
) -> Row:
    """Returns the row of what one more layer costs at the far end, and at the near end."""
    ends = list(itertools.pairwise(zip(layers, costs, strict=True)))
    near, far = (
        (after - before) / (more - fewer) for (fewer, before), (more, after) in (ends[0], ends[-1])
    )
    between = f"{layers[-2]}-{layers[-1]} / {layers[0]}-{layers[1]}"
    return Row(quantity, f"{name}, {between}", far, near, bound)


def bound_of(quantity: str, name: str, layers: Sequence[int]) -> float:
    """Returns how far a line may bend."""
    if quantity == "calls":
        return RULES if name == RULE_A_LAYER else CALLS
    return SHARED if name == "autocast" and layers[0] == 1 else EXACT


def rows(small: bool = False) -> Iterator[Row]:
    """Yields every row of a group of programs, as it is measured."""
    layers = FEW_LAYERS if small else LAYERS
    for group in GROUPS:
        found = {
            name: [figures(functools.partial(build, n)) for n in layers]
            for name, build in group.items()
        }
        by_hand, *names = group
        for quantity in found[by_hand][0]:
            lines = {name: [at[quantity] for at in each] for name, each in found.items()}
            for name in names:
                beside = f"{name} beside {by_hand}, {layers[-1]} layers"
                yield Row(quantity, beside, lines[name][-1], lines[by_hand][-1])
            for name, line in lines.items():
                bound = None if name == by_hand else bound_of(quantity, name, layers)
                yield straight(quantity, name, layers, line, bound)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "near, hand"))

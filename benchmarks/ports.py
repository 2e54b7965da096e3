"""Time to trace a Flax model that `apply_policy` put under a policy, beside its dtypes threaded by
hand.

    python -m benchmarks.ports           # the table: 3 minutes on two idle cores
    python -m benchmarks.ports --check   # exits with 1 where a ratio misses its bound
    python -m benchmarks.ports --small   # shallower and narrower models

The models are those of `benchmarks.models` over Flax's own linen, with no dtype in them: as `ours`
they are ported by `mpmodules.linen.apply_policy`, alone and with their loss under autocast; `hand`
has dtype=bfloat16 in every layer.

tracing    CPU seconds to trace value_and_grad with JAX's caches warm but for the model's: the best
           of several.
calls      of Python functions meanwhile, in thousands: nearly the same on every run, whatever else
           the machine does.
"""

from __future__ import annotations

import cProfile
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen
import jax

from benchmarks import linen_models
from benchmarks.models import POLICY, REFERENCE, Case, Program, by_hand, cases, loss_of, tracing
from benchmarks.table import Row, run
from mpmodules.linen import apply_policy
from policy.autocasting.transform import autocast

_FLAX: Any = flax.linen
# Of few layers; 12 equal ones take 0.94 of by hand's calls. Autocast traces the step twice, because
# its loss casts to float32, and looks for quotients and numbers that 16 bits round.
PORTED, AUTOCAST = 1.95, 4.4


def ported(case: Case) -> Program:
    """The model over Flax's linen with no dtype in it, under the policy by `apply_policy`."""
    plain = getattr(linen_models.of(_FLAX), case.model)(None, **dict(case.options))
    module = apply_policy(plain, POLICY)

    def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
        outputs, state = module.apply({"params": params, **state}, x, mutable=list(state))
        return loss_of(outputs, y), state

    return Program(loss, by_hand(case).arguments)


def ported_under_autocast(case: Case) -> Program:
    """The same with its loss under autocast, for what is written around the layers."""
    program = ported(case)
    return Program(autocast(program.loss, POLICY, params=0), program.arguments)


def calls(build: Callable[[], Program]) -> float:
    """Thousands of calls of Python functions that a trace takes, JAX's own caches warm."""
    jax.make_jaxpr(build().step)(*build().arguments)
    program, profile = build(), cProfile.Profile()
    profile.runcall(jax.make_jaxpr(program.step), *program.arguments)
    return sum(entry.callcount for entry in profile.getstats()) / 1e3  # pyright: ignore[reportAttributeAccessIssue]


def rows(small: bool = False) -> Iterator[Row]:
    """Two rows a model, the port alone and under autocast; `small` ones are counted, not timed."""
    for case in cases(small):
        builds = {
            "apply_policy": functools.partial(ported, case),
            "apply_policy under autocast": functools.partial(ported_under_autocast, case),
            REFERENCE: functools.partial(by_hand, case),
        }
        figures = {"calls": {name: calls(build) for name, build in builds.items()}}
        if not small:
            figures["tracing"] = tracing(builds, times=12 if case.model == "Mlp" else 5)
        for quantity, found in figures.items():
            for name, bound in zip(list(builds)[:2], (PORTED, AUTOCAST), strict=True):
                yield Row(quantity, f"{case.name}, {name}", found[name], found[REFERENCE], bound)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, REFERENCE))

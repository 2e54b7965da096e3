"""Costs of a call under rules, by a target's compiler."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import DtypePolicyWarning
from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.estimate.costing import CompiledRow, compiled_row
from policy.inspect.estimate.placement import Placement, placement_of
from policy.inspect.estimate.steps import Candidate, MadeCall, Step, traced_step
from policy.inspect.estimate.targets import Target
from policy.inspect.suggest.applied import Choices, first_that_runs
from policy.inspect.suggest.rounding_emulator import candidate_of
from policy.inspect.traced.call import short_text
from policy.inspect.traced.under_policy import Route
from policy.programs.paths import Path

# A module that costs less than this share of the program is taken to cost so much.
_LEAST_SHARE = 1e-4


@dataclasses.dataclass
class TargetCompiler:
    """Compiles a call for a target, once for each set of rules.

    Attributes:
      target: the devices.
      call: the function and its arguments.
      policy: the policy beside the rules.
      backward, params: as for `suggest`.
      mesh, shardings: as for `policy.estimate`.
    """

    target: Target
    call: MadeCall
    policy: Policy
    backward: bool
    params: ParamsArgument
    mesh: Mapping[str, int] | None
    shardings: Any

    @functools.cached_property
    def placement(self) -> Placement:
        """The placement of the call's arrays."""
        arguments = (self.call.args, self.call.kwargs)
        return placement_of(self.target, self.mesh, self.shardings, arguments)

    def compiled(self, choices: Choices, route: Route) -> tuple[PolicyRules, CompiledRow]:
        """Compiles the call under the first of some rules under which it can be traced.

        Args:
          choices: rules to try, in this order.
          route: how the policy is applied.

        Raises:
          TypeError, ValueError: as `policy.estimate` does.
        """
        row = Candidate(short_text(self.policy), self.policy, {})

        def step(rules: PolicyRules) -> Step:
            named = rules if rules else None
            return traced_step(self.call, row, named, None, self.backward, self.params, route)

        with self.placement.scope(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DtypePolicyWarning)  # suggest's own trace told them
            rules, traced = first_that_runs(choices, step)
        return rules, compiled_row(row, self.call, traced, self.placement, self.shardings)


def require_timed(target: Target) -> None:
    """Checks that the time of a target's programs is known.

    Raises:
      ValueError: neither its compiler's cycles nor published peaks are.
      RuntimeError: its compiler is not installed.
    """
    if not target.chip.bandwidth or not target.chip.peaks:
        raise ValueError(
            "suggest ranks modules by a compiler's cycles or by published peaks, and "
            f"on={target.name!r} has neither: give a TPU or GPU, such as 'v5e:1x1' or 'h100'. "
            "Without on=, cost is a count of FLOPs and bytes."
        )
    _ = target.devices


def module_costs(
    half: Mapping[Path, float],
    full: Mapping[Path, float],
    candidates: Mapping[Path, int],
    written: Sequence[float],
) -> list[float]:
    """Returns the cost of keeping each module in float32, as a share of the program without rules.

    It is the difference of its kernels' time between two programs. A kernel counts for one module,
    even if it fuses operations of several, so a difference may be negative; a module that gains by
    float32 takes the least cost. Exchanges are left out.

    Args:
      half: the times by path of the program without rules.
      full: those of the program with every module in float32.
      candidates: the number of each module's path, from 1.
      written: the costs of the modules by their written FLOPs and bytes; these share out the whole
        difference among modules that have no kernel to their name, and everything where one of the
        programs doesn't fit.
    """
    total = sum(half.values())
    costs = [cost / max(sum(written), 1e-12) for cost in written]
    if total and full:
        whole = max(sum(full.values()) / total - 1, 0.0)
        before, after = (_by_module(times, candidates) for times in (half, full))
        costs = [
            (after[i] - before[i]) / total if before[i] or after[i] else whole * share
            for i, share in enumerate(costs, 1)
        ]
    return [max(cost, _LEAST_SHARE) for cost in costs]


def _by_module(
    by_path: Mapping[Path, float], candidates: Mapping[Path, int]
) -> Mapping[int, float]:
    times = defaultdict[int, float](float)
    for path, time in by_path.items():
        times[candidate_of(path, candidates)] += time
    return times

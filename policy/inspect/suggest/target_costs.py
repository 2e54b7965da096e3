"""Costs of a call under rules, by a target's compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from policy.autocasting.parameters import ParamsArgument
from policy.core.policy import Policy
from policy.core.precedence import DtypePolicyWarning
from policy.core.rules import PolicyRules
from policy.inspect.estimate.candidates import Candidate
from policy.inspect.estimate.compilation import compiled_step
from policy.inspect.estimate.costing import cost_of
from policy.inspect.estimate.lowering import lowered_step
from policy.inspect.estimate.placement import Placement, placed_arrays, placement_of, specs_of
from policy.inspect.estimate.roofline import kernel_time
from policy.inspect.estimate.rows import PolicyCost
from policy.inspect.estimate.steps import MadeCall, Step, name_of, traced_step
from policy.inspect.estimate.targets import Target
from policy.inspect.hlo.costs import costs_of
from policy.inspect.suggest.applied import first_that_runs
from policy.inspect.suggest.rounding_emulator import candidate_of
from policy.inspect.traced.call import short_text
from policy.inspect.traced.under_policy import Route
from policy.programs.paths import Path

# A module that costs less than this share of the program is taken to cost so much.
_LEAST_SHARE = 1e-4


@dataclasses.dataclass(frozen=True)
class TargetProgram:
    """A program compiled for a target.

    Attributes:
      rules: those that it was traced under.
      cost: its costs.
      by_path: the time of each module path, in cycles or in seconds; empty if the program doesn't
        fit.
    """

    rules: PolicyRules
    cost: PolicyCost
    by_path: Mapping[Path, float]


@dataclasses.dataclass
class TargetCompiler:
    """Compiles a call for a target, once for each set of rules.

    Attributes:
      target: the devices.
      call: the function and its arguments.
      policy: the policy beside the rules.
      backward, params: as for `suggest`.
      mesh, shardings: as for `policy.estimate`.
      programs: the number of programs compiled so far.
    """

    target: Target
    call: MadeCall
    policy: Policy
    backward: bool
    params: ParamsArgument
    mesh: Mapping[str, int] | None
    shardings: Any
    programs: int = 0

    @functools.cached_property
    def placement(self) -> Placement:
        """The placement of the call's arrays."""
        arguments = (self.call.args, self.call.kwargs)
        return placement_of(self.target, self.mesh, self.shardings, arguments)

    def compiled(self, choices: Sequence[PolicyRules], route: Route) -> TargetProgram:
        """Compiles the call under the first of some rules under which it can be traced.

        Args:
          choices: rules to try, in this order.
          route: how the policy is applied.

        Raises:
          TypeError, ValueError: as `policy.estimate` does.
        """
        with self._on_mesh():
            rules, step = first_that_runs(choices, lambda rules: self._step(rules, route))
            arrays = step.traced.arguments.arrays
            specs = specs_of(self.shardings, self.call.args, arrays, step.names, step.origins)
            placed = placed_arrays(self.placement, arrays, specs, step.names)
            lowered, _ = lowered_step(step, placed, self.target, name_of(self.call.fn))
        program = compiled_step(lowered, self.target, step.names)
        self.programs += 1
        cost = cost_of(self._row, step, program, self.placement)
        if program.is_exhausted:
            return TargetProgram(rules, cost, {})
        by_path = costs_of(program.text, kernel_time(self.target.chip)).by_path
        return TargetProgram(rules, cost, by_path)

    @contextlib.contextmanager
    def _on_mesh(self) -> Iterator[None]:
        mesh = self.placement.mesh
        scope = jax.set_mesh(mesh) if self.placement.is_spread else contextlib.nullcontext()
        with scope, warnings.catch_warnings():
            warnings.simplefilter("ignore", DtypePolicyWarning)  # suggest's own trace told them
            yield

    @property
    def _row(self) -> Candidate:
        return Candidate(short_text(self.policy), self.policy, {})

    def _step(self, rules: PolicyRules, route: Route) -> Step:
        named = rules if rules else None
        return traced_step(self.call, self._row, named, None, self.backward, self.params, route)


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
    half: TargetProgram,
    full: TargetProgram,
    candidates: Mapping[Path, int],
    written: Sequence[float],
) -> list[float]:
    """Returns the cost of keeping each module in float32, as a share of the program without rules.

    It is the difference of its kernels' time between two programs. A kernel counts for one module,
    even if it fuses operations of several, so a difference may be negative; a module that gains by
    float32 takes the least cost. Exchanges are left out.

    Args:
      half: the program without rules.
      full: the program with every module in float32.
      candidates: the number of each module's path, from 1.
      written: the costs of the modules by their written FLOPs and bytes; these share out the whole
        difference among modules that have no kernel to their name, and everything where one of the
        programs doesn't fit.
    """
    before, after = (_by_module(p.by_path, candidates, len(written)) for p in (half, full))
    total = sum(half.by_path.values())
    shares = [cost / max(sum(written), 1e-12) for cost in written]
    if not total or not full.by_path:
        return [max(share, _LEAST_SHARE) for share in shares]
    whole = max(sum(full.by_path.values()) / total - 1, 0.0)
    found = [
        (late - early) / total if early or late else whole * share
        for early, late, share in zip(before, after, shares, strict=True)
    ]
    return [max(cost, _LEAST_SHARE) for cost in found]


def _by_module(
    by_path: Mapping[Path, float], candidates: Mapping[Path, int], count: int
) -> list[float]:
    times = [0.0] * (count + 1)
    for path, time in by_path.items():
        times[candidate_of(path, candidates)] += time
    return times[1:]

"""suggest: finds by measurement the cheapest rules under which a policy meets an error budget."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np

from policy._jaxpr.paths import naming, spelled
from policy._jaxpr.placed_interpreter import PlacedValue
from policy._jaxpr.subprograms import opened
from policy.compare.float32_values import first_array, lane_of
from policy.parameters import ParamsArgument
from policy.policy import Policy, get_policy
from policy.rules import PolicyRules
from policy.suggest.patterns import code_of, patterns_of
from policy.suggest.rounding_emulator import Ruled
from policy.suggest.search import FEW, Search, WideModules
from policy.suggest.trial import Trial, compiled, floats_of
from policy.traced.call import Call, Program, checked_policy, program_of, short_text

_MOST_CONFIRMATIONS = 6


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Measurements of one path.

    >>> from policy.suggest.suggest import Evidence
    >>> Evidence("head", alone=0.2, cost=0.1, keeps=True).path
    'head'

    Attributes:
      path: the module path, its names joined by "/".
      alone: the error with this path alone in half precision, and everything else in float32.
      cost: its share of the program's half-precision FLOPs plus its share of the bytes; at most 2.
      keeps: whether it is kept in float32.
    """

    path: str
    alone: float
    cost: float
    keeps: bool


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Rules that keep sensitive modules in float32; ``print(suggestion)`` shows code.

    >>> from policy import PolicyRules
    >>> from policy.suggest.suggest import Suggestion
    >>> rules = PolicyRules({"head": "float32"})
    >>> print(Suggestion(rules, "mixed_float16", 0.1, 0.01, 0.01, 1.0, ()).code())
    rules = PolicyRules([
        ("head", "float32"),
    ])

    Attributes:
      rules: to use with the policy; empty if the policy by itself meets the budget.
      policy: its text form, the short one if it has one; "" if the function is half precision as
        written.
      budget: the requested error.
      error: the measured error with the rules applied.
      emulated: the predicted error with the rules.
      without: the predicted error without rules.
      evidence: for each path, the most sensitive first.
      of: "outputs" or "gradients".
      route: the way the rules are applied: "scope" by layers that obey it, "autocast", or "as
        written".
      runs, compilations: the numbers of runs and compilations used.
    """

    rules: PolicyRules
    policy: str
    budget: float
    error: float
    emulated: float
    without: float
    evidence: tuple[Evidence, ...]
    of: str = "outputs"
    route: str = "autocast"
    runs: int = 0
    compilations: int = 0

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that are kept in float32, in the order of `evidence`."""
        return tuple(evidence.path for evidence in self.evidence if evidence.keeps)

    def code(self) -> str:
        """Returns the rules as Python code to paste."""
        return (
            "rules = "
            f"{code_of((str(pattern), short_text(policy)) for pattern, policy in self.rules)}"
        )

    def __str__(self) -> str:
        how = {
            "scope": f'with use_policy("{self.policy}", rules): ...',
            "autocast": f'autocast(fn, "{self.policy}", rules=rules)',
            "as written": "apply_policy(model, ..., rules), or the layers' own dtype arguments",
        }[self.route]
        lines = [
            f"# {self.of} within {self.budget:.3g} of float32: {self.error:.3g} with these rules, "
            f"{self.without:.3g} without",
            "from policy import PolicyRules",
            "",
            self.code(),
            f"# {how}",
            "",
            f"# {'path':<50} {'error, alone in half':>20} {'cost':>8}",
        ]
        lines += [
            f"# {e.path:<50} {e.alone:>20.3g} "
            f"{e.cost / 2:>8.2%}{'  kept in float32' if e.keeps else ''}"
            for e in self.evidence
        ]
        return "\n".join(lines)


def suggest(
    fn: Any,
    *args: Any,
    error: float,
    policy: Policy | str | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    **kwargs: Any,
) -> Suggestion:
    """Finds the cheapest rules that keep a call under `policy` within `error` of float32.

    One program, compiled once, computes the function in float32 and rounds each value as the policy
    would, except at the paths selected by its flags. It measures each path alone in half precision,
    then sets of paths: for up to eight paths, all sets that cost less than one that suffices;
    otherwise two runs for each path, and one more for each kept path, to drop superfluous ones.
    Then the rules are applied in a second program, whose outputs are measured. If it misses the
    budget, another set is confirmed, with one more compilation each time.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import policy
    >>> def fn(w, x):
    ...     with jax.named_scope("body"):
    ...         x = jnp.dot(x, w)  # 48000
    ...     with jax.named_scope("head"):
    ...         return jnp.dot(x, w)  # 7680000, beyond float16
    >>> w, x = jnp.full((16, 16), 10.0), jnp.full((1, 16), 300.0)
    >>> suggestion = policy.suggest(fn, w, x, error=0.1, policy="mixed_float16")
    >>> suggestion.paths
    ('head',)

    ``print(suggestion)`` shows code to paste and the evidence; `suggestion.rules` goes with the
    policy, as in ``use_policy("mixed_float16", suggestion.rules)``.

    Args:
      fn, *args, **kwargs: as for `compare`.
      error: the allowed error relative to float32: norm of the difference / norm, of the worst
        output; or of all gradients together.
      policy: the policy to run under. None: as it is written, with its own half dtypes.
      backward: whether the budget is for the gradients of the loss that the function returns, not
        for its outputs.
      params: the arguments that are parameters, for gradients and for `autocast`; see
        `policy.audit`.

    Returns:
      The rules and the measurements; see `Suggestion`. The rules are empty if the policy by itself
      meets the budget.

    Raises:
      TypeError: as `compare` does.
      ValueError: `error` is not positive; nothing runs in half precision, or nothing has a path
        that a rule could name; float32 itself is not finite; no rules meet the budget.
    """
    budget, policy = _checked(error), checked_policy(policy)
    call = Call.of("suggest", fn, args, kwargs, params, 1.0 if backward else None)
    modules: set[str] = set()
    program = program_of(call, policy, modules)
    trial = Trial(program, modules if program.route == "scope" else None)
    search = Search(trial.measure, trial.measure_alone, trial.costs, 2 * len(trial.paths) - 1)
    if not trial.outside:
        search.known[search.every] = 0.0
    with naming(trial.paths):
        return _confirmed(call, policy, program, trial, search, budget)


def _checked(error: Any) -> float:
    if not isinstance(error, (int, float)) or isinstance(error, bool) or not (0 < error < math.inf):
        raise ValueError(
            f"error should be a positive number, the relative error allowed, but got {error!r}."
        )
    return float(error)


def _confirmed(
    call: Call, policy: Policy | None, program: Program, trial: Trial, search: Search, budget: float
) -> Suggestion:
    """Returns the suggestion, once its rules have met the budget in a measured run.

    Sets that cost less and are predicted to miss the budget by little are tried first: some of them
    meet it. After a miss the next set is chosen, and after two misses for a budget reduced by the
    factor of the emulation's optimism. Each miss costs one more compilation; the last set tried has
    every path in float32.
    """
    nearly = search.nearly(search.least(budget), budget)
    goal, tried, found, hopeful = budget, set(), math.inf, 1.0
    for attempt in range(1, len(nearly) + _MOST_CONFIRMATIONS + 1):
        if attempt <= len(nearly):
            wide = nearly[attempt - 1]
        else:
            wide = search.least(goal) if attempt < len(nearly) + _MOST_CONFIRMATIONS else None
        wide = search.every if wide is None or wide in tried else wide
        tried.add(wide)
        rules, outputs = _applied(call, policy, program, trial, wide)
        found = trial.error(outputs)
        if found <= budget:
            return _suggestion(rules, policy, program, trial, search, wide, budget, found, attempt)
        if wide == search.every:
            break
        search.refused.add(wide)
        if attempt > len(nearly) + (2 if len(trial.paths) <= FEW else 0):
            emulated = search.known.get(wide, found)
            hopeful = max(hopeful, found / emulated if emulated else math.inf)
            goal = 0.999 * budget / hopeful
    raise ValueError(
        f"No rules meet an error of {budget:.3g}: with every path in float32 it is {found:.3g}"
        + (", of what stands outside of all paths" if trial.outside else "")
        + ". Ask for less, or see with policy.compare where it is made."
    )


def _applied(
    call: Call, policy: Policy | None, program: Program, trial: Trial, wide: WideModules
) -> tuple[PolicyRules, list[np.ndarray]]:
    """Returns rules for a set of candidates, and the function's outputs under them.

    If the code can't take float32 from a layer, as in a sum under strict promotion or the carry of
    a scan, the layers in float32 return half precision.
    """
    full = get_policy("float32")
    rules = _rules(program, trial, wide, policy, full)
    try:
        return rules, _real(call, policy, program, trial, wide, rules)
    except (TypeError, ValueError):
        if program.route != "scope" or policy is None:
            raise
    rules = _rules(program, trial, wide, policy, full.replace(output_dtype=policy.compute_dtype))
    return rules, _real(call, policy, program, trial, wide, rules)


def _rules(
    program: Program, trial: Trial, wide: WideModules, policy: Policy | None, full: Policy
) -> PolicyRules:
    kept = frozenset(trial.paths[i] for i in wide)
    named = patterns_of(kept, trial.paths)
    half = policy or get_policy("mixed_bfloat16")
    return PolicyRules([(pattern, full if is_wide else half) for pattern, is_wide in named])


def _real(
    call: Call,
    policy: Policy | None,
    program: Program,
    trial: Trial,
    wide: WideModules,
    rules: PolicyRules,
) -> list[np.ndarray]:
    """Returns the measured outputs of the program that the rules give."""
    if program.route == "as written":
        kept = frozenset(trial.paths[i] for i in wide)
        body, consts = opened(program.jaxpr)

        def run(*arrays: Any) -> list[PlacedValue]:
            ruled = Ruled(kept, trial.candidates)
            ruled.lane = lane_of(program.reference, first_array)
            return ruled.ended(
                ruled.run(body, list(map(_value, consts)), list(map(_value, arrays)))
            )

    else:
        ruled = jex_core.jaxpr_as_fun(
            call.traced(policy, rules if rules else None, program.route).jaxpr
        )
        run = lambda *arrays: [PlacedValue([output]) for output in ruled(*arrays)]  # noqa: E731
    ready = compiled(program, lambda *arrays: floats_of(program, run(*arrays)))
    return jax.device_get(ready(*program.arguments.arrays))


def _value(array: Any) -> PlacedValue:
    return PlacedValue([array])


def _suggestion(
    rules: PolicyRules,
    policy: Policy | None,
    program: Program,
    trial: Trial,
    search: Search,
    wide: WideModules,
    budget: float,
    found: float,
    confirmations: int,
) -> Suggestion:
    alone = search.alone or [math.nan] * len(trial.paths)
    evidence = [
        Evidence(spelled(path), alone[i], trial.costs[i], i in wide)
        for i, path in enumerate(trial.paths)
    ]
    return Suggestion(
        rules,
        "" if policy is None else short_text(policy),
        budget,
        found,
        search.known.get(wide, math.nan),
        search.known.get(frozenset(), math.nan),
        tuple(
            sorted(evidence, key=lambda e: (not e.keeps, -e.alone if e.alone == e.alone else 0.0))
        ),
        "gradients" if program.gradients else "outputs",
        program.route,
        trial.runs,
        1 + confirmations,
    )

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
from policy.matmul_dtypes import ScaledMatmul
from policy.parameters import ParamsArgument
from policy.policy import Policy, get_policy
from policy.rules import PolicyRules
from policy.suggest.eight_bits import (
    SMALLEST,
    EightBitSearch,
    LayerEvidence,
    full_policies,
    lines_of,
    rules_of,
    split_policy,
)
from policy.suggest.patterns import code_of, patterns_of
from policy.suggest.rounding_emulator import Ruled
from policy.suggest.scaled_dots import ScaledDots, scaled_dots
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
      alone: the error with this path alone in half precision, and everything else in float32; NaN
        if it was not measured, as where no rules are needed.
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
      matmul: the 8-bit matmuls that were asked for, as in ``m=``; "" for none. `policy` has ``m=``
        if any layer may run in them.
      smallest: the least contraction and number of outputs of a layer to run in 8 bits.
      layers: for each layer that ``m=`` is about, the largest cost first.
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
    matmul: str = ""
    smallest: int = SMALLEST
    layers: tuple[LayerEvidence, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that are kept in float32, in the order of `evidence`."""
        return tuple(evidence.path for evidence in self.evidence if evidence.keeps)

    @property
    def _besides(self) -> str:
        scales = any(layer.runs_in_8_bits for layer in self.layers)
        return f" them and m={self.matmul}" if scales else ""

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
            f"{self.without:.3g} without{self._besides}",
            "from policy import PolicyRules",
            "",
            self.code(),
            f"# {how}",
            "",
            f"# {'path':<50} {'error, alone in half':>20} {'cost':>8}",
        ]
        lines += [
            f"# {e.path:<50} {'-' if math.isnan(e.alone) else format(e.alone, '.3g'):>20} "
            f"{e.cost / 2:>8.2%}{'  kept in float32' if e.keeps else ''}"
            for e in self.evidence
        ]
        return "\n".join([*lines, *lines_of(self.layers, self.matmul, self.smallest)])


def suggest(
    fn: Any,
    *args: Any,
    error: float,
    policy: Policy | str | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    matmul: ScaledMatmul | str | None = None,
    smallest: int = SMALLEST,
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
      matmul: the 8-bit dtypes of matmuls of parameters, as in a policy's ``m=``: "f8", "i8". The
        suggested policy then has ``m=``, and rules keep those layers out whose error would exceed
        the budget, beside the paths that stay in float32. A policy with ``m=`` says the same. None:
        no matmuls in 8 bits.
      smallest: the least contraction and number of outputs of a layer that gains by 8 bits; smaller
        ones are kept out. The default is where the compilers of accelerators count fewer cycles, by
        the table in docs/eight_bits.md.

    Returns:
      The rules and the measurements; see `Suggestion`. The rules are empty if the policy by itself
      meets the budget.

    Raises:
      TypeError: as `compare` does.
      ValueError: `error` is not positive; nothing runs in half precision, or nothing has a path
        that a rule could name; float32 itself is not finite; no rules meet the budget. Of
        `matmul`: there is no policy of 16 bits, or no layer that it is about.
    """
    budget, smallest = _checked(error), _checked_size(smallest)
    policy, by = split_policy(checked_policy(policy), matmul)
    call = Call.of("suggest", fn, args, kwargs, params, 1.0 if backward else None)
    modules: set[str] = set()
    program = program_of(call, policy, modules)
    named = modules if program.route == "scope" else None
    scaled = None if by is None or policy is None else _scaled(call, policy, by, program, named)
    trial = Trial(program, named, scaled)
    search = Search(trial.measure, trial.measure_alone, trial.costs, 2 * len(trial.paths) - 1)
    if not trial.outside:
        search.known[search.every] = 0.0
    with naming(trial.paths):
        found = _confirmed(call, policy, program, trial, search, budget)
        if scaled is None or policy is None:
            return found
        wide = frozenset(i for i, path in enumerate(trial.paths) if spelled(path) in found.paths)
        layers = EightBitSearch(trial, wide, budget, smallest)
        return _in_8_bits(call, policy.replace(matmul=by), program, layers, found)


def _checked(error: Any) -> float:
    if not isinstance(error, (int, float)) or isinstance(error, bool) or not (0 < error < math.inf):
        raise ValueError(
            f"error should be a positive number, the relative error allowed, but got {error!r}."
        )
    return float(error)


def _checked_size(smallest: Any) -> int:
    if not isinstance(smallest, int) or isinstance(smallest, bool) or smallest < 1:
        raise ValueError(f"smallest should be a size, such as 2048, but got {smallest!r}.")
    return smallest


def _scaled(
    call: Call, policy: Policy, by: ScaledMatmul, program: Program, modules: set[str] | None
) -> ScaledDots:
    """Returns the matmuls of a program that run in 8 bits under a policy with ``m=``."""
    eight = call.traced(policy.replace(matmul=by), None, program.route).jaxpr
    found = scaled_dots(program.jaxpr, eight, call.differentiated(), by, modules)
    if not found.layers:
        raise ValueError(
            f"m={by.text} is about no matmul of this call: one of a parameter, at a module path. "
            "params= says which arguments are parameters."
        )
    return found


def _in_8_bits(
    call: Call, policy: Policy, program: Program, layers: EightBitSearch, found: Suggestion
) -> Suggestion:
    """Returns a suggestion for a policy with ``m=``, once its rules have met the budget.

    Where no layer may run in 8 bits it is the given one, with the reasons.

    Args:
      found: the suggestion for the policy without ``m=``.
    """
    measured: list[tuple[PolicyRules, float]] = []

    def met(chosen: frozenset[int]) -> bool:
        rules, outputs = _applied_in_8_bits(call, policy, program, layers, chosen)
        measured.append((rules, layers.trial.error(outputs)))
        return measured[-1][1] <= layers.budget

    chosen, is_met = layers.sets(met)
    by = "" if policy.matmul is None else policy.matmul.text
    found = dataclasses.replace(
        found,
        matmul=by,
        smallest=layers.smallest,
        layers=layers.evidence(chosen),
        runs=layers.trial.runs,
        compilations=found.compilations + len(measured),
    )
    if not is_met:
        return found
    rules, error = measured[-1]
    emulated = layers.trial.measure_in_8_bits(layers.wide, chosen)
    return dataclasses.replace(
        found, rules=rules, policy=short_text(policy), error=error, emulated=emulated
    )


def _applied_in_8_bits(
    call: Call,
    policy: Policy,
    program: Program,
    layers: EightBitSearch,
    chosen: frozenset[int],
) -> tuple[PolicyRules, list[np.ndarray]]:
    """Returns rules for a set of layers in 8 bits, and the function's outputs; as `_applied`."""
    states = layers.states(chosen)
    full, narrow = full_policies(policy)
    rules = rules_of(states, policy, full)
    try:
        return rules, _real(call, policy, program, layers.trial, layers.wide, rules)
    except (TypeError, ValueError):
        if program.route != "scope" or not layers.wide:
            raise
    rules = rules_of(states, policy, narrow)
    return rules, _real(call, policy, program, layers.trial, layers.wide, rules)


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

"""suggest: the cheapest rules under which a policy meets an error budget, found by measuring."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from policy.inspection.compare import EXACT
from policy.inspection.costs import bytes_of, flops_of
from policy.inspection.emulated import Emulated, Ruled
from policy.inspection.patterns import code_of, patterns_of
from policy.inspection.program import Call, Program, checked_policy, program_of, short_text
from policy.inspection.rerun import Value, lost_prefixes, module_path
from policy.inspection.search import Search, Wide
from policy.inspection.walk import bodies_of, walk
from policy.inspection.widened import dtype_of, is_half, widen
from policy.paths import Path
from policy.policy import Policy, get_policy
from policy.programs import opened
from policy.rules import PolicyRules

_MOST_CONFIRMATIONS = 4


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What was measured of one path.

    Attributes:
      path: the module path, its names joined by "/".
      alone: the error where this path alone is in half precision, and all else in float32.
      cost: its share of the FLOPs and of the bytes that half precision has in the program, both together; of 2.
      keeps: whether it is kept in float32.
    """

    path: str
    alone: float
    cost: float
    keeps: bool


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """Rules that keep what is sensitive in float32. ``print(suggestion)`` shows code.

    Attributes:
      rules: to go with the policy; empty where the policy by itself meets the budget.
      policy: its text form, the short one where it has one; "" where the function is in half as it is written.
      budget: the error that was asked for.
      error: what the rules give, applied for real.
      emulated: what was foreseen.
      without: the error without rules, as foreseen.
      evidence: of each path, the most sensitive first.
      of: "outputs" or "gradients".
      route: how the rules are applied: "scope" by layers that obey it, "autocast", or "as written".
      runs, compilations: how many it took.
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
        """The paths that are kept in float32, in the order of their evidence."""
        return tuple(evidence.path for evidence in self.evidence if evidence.keeps)

    def code(self) -> str:
        """The rules as Python to paste."""
        return f"rules = {code_of((str(pattern), short_text(policy)) for pattern, policy in self.rules)}"

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
            f"# {e.path:<50} {e.alone:>20.3g} {e.cost / 2:>8.2%}{'  kept in float32' if e.keeps else ''}"
            for e in self.evidence
        ]
        return "\n".join(lines)


def suggest(
    fn: Any,
    *args: Any,
    error: float,
    policy: Policy | str | None = None,
    of: Literal["outputs", "gradients"] = "outputs",
    **kwargs: Any,
) -> Suggestion:
    """The cheapest rules found that keep `fn(*args, **kwargs)` under `policy` within `error` of float32.

    One program computes the function in float32 and rounds each value as the policy would, except at the paths that
    its flags name: it is compiled once. It measures each path alone in half precision, then sets of paths, with at most
    two runs for each path. Then the rules are applied for real, in a second program, and what that returns is measured.
    Where it misses the budget, a set is chosen for a smaller one, and confirmed again: each time is one more
    compilation.

    ```python
    suggestion = suggest(model.apply, variables, batch, error=1e-2, policy="mixed_float16")
    print(suggestion)             # code to paste, and the evidence
    with use_policy("mixed_float16", suggestion.rules): ...
    ```

    Args:
      fn, *args, **kwargs: as for `compare`.
      error: how far the function may be off, relative to float32: norm of the difference / norm, of the output that is
        off the most; or of all gradients together.
      policy: what to run it under. None: as it is written, with its half dtypes in it.
      of: whether it is the outputs' error, or that of the gradients of the loss that the function returns.

    Returns:
      The rules, and what was measured; see `Suggestion`. They are empty where the policy by itself meets the budget.

    Raises:
      TypeError: as `compare` does.
      ValueError: `error` is not positive; nothing runs in half, or nothing stands at a path that a rule could name;
        float32 itself is not finite; no rules meet the budget.
    """
    budget, policy = _checked(error, of), checked_policy(policy)
    call = Call.of("suggest", fn, args, kwargs, 1.0 if of == "gradients" else None)
    modules: set[str] = set()
    program = program_of(call, policy, modules)
    trial = _Trial(program, modules if program.route == "scope" else None)
    search = Search(trial.measure, trial.measure_alone, trial.costs, 2 * len(trial.paths) - 1)
    if not trial.outside:
        search.known[search.every] = 0.0
    return _confirmed(call, policy, program, trial, search, budget)


def _checked(error: Any, of: Any) -> float:
    if not isinstance(error, (int, float)) or isinstance(error, bool) or not (0 < error < math.inf):
        raise ValueError(f"error should be a positive number, the relative error allowed, but got {error!r}.")
    if of not in ("outputs", "gradients"):
        raise ValueError(f"of should be 'outputs' or 'gradients', but got {of!r}.")
    return float(error)


class _Trial:
    """The program with flags, compiled once, and the error of each set of candidates.

    Attributes:
      paths: the candidates.
      costs: of each in float32.
      outside: whether something runs in half that no rule reaches.
      runs: how many were made.
    """

    def __init__(self, program: Program, modules: set[str] | None):
        self.program, self.runs = program, 0
        shares, lost = _shares(program, modules)
        self.outside = () in shares
        self.paths = [path for path in shares if path]
        if not self.paths:
            raise ValueError(_no_paths(program, self.outside))
        self.costs = [shares[path] for path in self.paths]
        self.candidates = {path: i + 1 for i, path in enumerate(self.paths)}
        self.candidates |= {end: self.candidates[path] for end, path in lost.items() if path in self.candidates}
        self.compiled = _compiled(program, self._run, self._flags(frozenset()))
        self.reference = self._outputs(np.ones(len(self.paths) + 2, bool))
        _require_finite(program, self.reference)

    def _run(self, flags: Any, *arrays: Any) -> list[Any]:
        body, consts = opened(self.program.jaxpr)
        emulated = Emulated(flags, self.candidates)
        given = [Value([widen(array)]) for array in arrays]
        return _floats(self.program, emulated.run(body, [Value([widen(const)]) for const in consts], given))

    def _outputs(self, flags: np.ndarray) -> list[np.ndarray]:
        self.runs += 1
        return jax.device_get(self.compiled(flags, *self.program.arguments.arrays))

    def _flags(self, wide: Wide, promotes: bool = True) -> np.ndarray:
        flags = np.zeros(len(self.paths) + 2, bool)
        flags[[i + 1 for i in wide]] = True
        flags[-1] = promotes
        return flags

    def measure(self, wide: Wide) -> float:
        """The error with these candidates in float32."""
        return self.error(self._outputs(self._flags(wide)))

    def measure_alone(self, i: int) -> float:
        """The error with one candidate in half, whatever it is mixed with."""
        return self.error(self._outputs(self._flags(frozenset(range(len(self.paths))) - {i}, promotes=False)))

    def error(self, outputs: Sequence[Any]) -> float:
        """Of the outputs: the worst. Of gradients: of all together, as some may be zero but for rounding."""
        sides = [[np.asarray(a, np.float64) for a in side] for side in (outputs, self.reference)]
        pairs = list(zip(*sides, strict=True))
        if self.program.gradients:
            return _relative(*(np.concatenate([np.ravel(a) for a in side]) for side in zip(*pairs, strict=True)))
        return max(_relative(value, reference) for value, reference in pairs)


def _relative(value: np.ndarray, reference: np.ndarray) -> float:
    if not np.isfinite(value).all():
        return math.inf
    difference, norm = float(np.linalg.norm(value - reference)), float(np.linalg.norm(reference))
    return 0.0 if difference == 0 else difference / norm if norm else math.inf


def _compiled(program: Program, run: Any, *before: Any) -> Any:
    return jax.jit(run).lower(*before, *program.arguments.arrays).compile(compiler_options=EXACT)


def _floats(program: Program, outputs: Sequence[Value]) -> list[Any]:
    """What is measured, in float32: the gradients, if there are some, or else the floats among the outputs."""
    kept = outputs[len(program.outputs) :] if program.gradients else outputs
    arrays = [output.arrays[0] for output in kept]
    return [widen(a) for a in arrays if jnp.issubdtype(jnp.result_type(a), jnp.floating)]


def _require_finite(program: Program, reference: Sequence[np.ndarray]) -> None:
    if not reference:
        raise ValueError("suggest measures the error of floating outputs, but the function returns none.")
    if all(np.isfinite(output).all() for output in reference):
        return
    inputs = zip(program.arguments.names(), program.arguments.arrays, strict=True)
    bad = [n for n, a in inputs if jnp.issubdtype(a.dtype, jnp.floating) and np.isnan(np.asarray(a)).any()]
    why = f"There is NaN in {', '.join(bad)}" if bad else "Its inputs hold no NaN"
    raise ValueError(
        f"float32 itself gives infinities or NaN for these inputs, and nothing can be measured against them. {why}: "
        "give inputs for which the function is finite; policy.compare shows where it stops being so."
    )


def _no_paths(program: Program, outside: bool) -> str:
    if not outside:
        return (
            "Nothing of this call runs in half precision, so there is nothing to keep in float32: give a policy, as "
            "policy='mixed_bfloat16'."
        )
    return (
        "Nothing of this call stands at a module path, and rules are about paths: name parts of the function with "
        "jax.named_scope, or call a module."
    )


def _shares(program: Program, modules: set[str] | None) -> tuple[dict[Path, float], dict[Path, Path]]:
    """The candidates in the order of the program, and their part in the FLOPs and the bytes of half precision; and what
    else they are called."""
    sites = [(module_path(site.path, site.is_backward), site) for site in walk(program.jaxpr)]
    lost = lost_prefixes(path for path, _ in sites) if program.gradients else {}
    flops: dict[Path, float] = {}
    moved: dict[Path, float] = {}
    for path, site in sites:
        if not _is_in_half(site.equation):
            continue
        path = _reached(lost.get(path, path), modules)
        flops[path] = flops.get(path, 0) + flops_of(site.equation) * site.count
        moved[path] = moved.get(path, 0) + bytes_of(site.equation) * site.count
    totals = [max(sum(amounts.values()), 1) for amounts in (flops, moved)]
    return {path: flops[path] / totals[0] + moved[path] / totals[1] for path in flops}, lost


def _is_in_half(equation: Any) -> bool:
    """Whether an equation that holds no program reads or returns half precision."""
    dtypes = [dtype_of(atom) for atom in (*equation.invars, *equation.outvars)]
    return not any(True for _ in bodies_of(equation)) and any(is_half(d) for d in dtypes if d is not None)


def _reached(path: Path, modules: set[str] | None) -> Path:
    """The innermost path that a rule can name: where layers obey them, those are modules, not scopes within."""
    while modules is not None and path and "/".join(path[1:]) not in modules:
        path = path[:-1]
    return path


# ---------------------------------------------------------------------------------------------------------------------
# For real
# ---------------------------------------------------------------------------------------------------------------------


def _confirmed(
    call: Call, policy: Policy | None, program: Program, trial: _Trial, search: Search, budget: float
) -> Suggestion:
    """The suggestion, once its rules have met the budget for real.

    Where they miss it, the set is chosen again for a budget that is smaller by as much as emulation was too hopeful;
    each such set is one more compilation, and the last is all that rules reach.
    """
    goal, tried, found = budget, set(), math.inf
    for attempt in range(1, _MOST_CONFIRMATIONS + 1):
        wide = search.least(goal) if attempt < _MOST_CONFIRMATIONS else None
        wide = search.every if wide is None or wide in tried else wide
        tried.add(wide)
        rules, outputs = _applied(call, policy, program, trial, wide)
        found = trial.error(outputs)
        if found <= budget:
            return _suggestion(rules, policy, program, trial, search, wide, budget, found, attempt)
        if wide == search.every:
            break
        goal *= 0.9 * budget / found
    raise ValueError(
        f"No rules meet an error of {budget:.3g}: with every path in float32 it is {found:.3g}"
        + (", of what stands outside of all paths" if trial.outside else "")
        + ". Ask for less, or see with policy.compare where it is made."
    )


def _applied(
    call: Call, policy: Policy | None, program: Program, trial: _Trial, wide: Wide
) -> tuple[PolicyRules, list[np.ndarray]]:
    """Rules for a set of candidates, and what the function returns under them.

    Where its code adds what a layer returns to something half, and promotion is strict, the layers in float32 hand on
    half.
    """
    full = get_policy("float32")
    rules = _rules(program, trial, wide, policy, full)
    try:
        return rules, _real(call, policy, program, trial, wide, rules)
    except TypeError:
        if program.route != "scope" or policy is None:
            raise
    rules = _rules(program, trial, wide, policy, full.replace(output_dtype=policy.compute_dtype))
    return rules, _real(call, policy, program, trial, wide, rules)


def _rules(program: Program, trial: _Trial, wide: Wide, policy: Policy | None, full: Policy) -> PolicyRules:
    kept = frozenset(trial.paths[i] for i in wide)
    named = patterns_of(kept, trial.paths, drop_root=program.route == "scope")
    half = policy or get_policy("mixed_bfloat16")
    return PolicyRules([(pattern, full if is_wide else half) for pattern, is_wide in named])


def _real(
    call: Call, policy: Policy | None, program: Program, trial: _Trial, wide: Wide, rules: PolicyRules
) -> list[np.ndarray]:
    """What is measured, of the program that the rules give."""
    if program.route == "as written":
        kept = frozenset(trial.paths[i] for i in wide)
        body, consts = opened(program.jaxpr)
        run = lambda *arrays: Ruled(kept, trial.candidates).run(  # noqa: E731
            body, [Value([const]) for const in consts], [Value([array]) for array in arrays]
        )
    else:
        ruled = jex_core.jaxpr_as_fun(call.traced(policy, rules if rules else None, program.route).jaxpr)
        run = lambda *arrays: [Value([output]) for output in ruled(*arrays)]  # noqa: E731
    compiled = _compiled(program, lambda *arrays: _floats(program, run(*arrays)))
    return jax.device_get(compiled(*program.arguments.arrays))


def _suggestion(
    rules: PolicyRules,
    policy: Policy | None,
    program: Program,
    trial: _Trial,
    search: Search,
    wide: Wide,
    budget: float,
    found: float,
    confirmations: int,
) -> Suggestion:
    alone = search.alone or [math.nan] * len(trial.paths)
    evidence = [Evidence("/".join(path), alone[i], trial.costs[i], i in wide) for i, path in enumerate(trial.paths)]
    return Suggestion(
        rules,
        "" if policy is None else short_text(policy),
        budget,
        found,
        search.known.get(wide, math.nan),
        search.known.get(frozenset(), math.nan),
        tuple(sorted(evidence, key=lambda e: (not e.keeps, -e.alone if e.alone == e.alone else 0.0))),
        "gradients" if program.gradients else "outputs",
        program.route,
        trial.runs,
        1 + confirmations,
    )

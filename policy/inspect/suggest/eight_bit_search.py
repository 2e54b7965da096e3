"""Searches for the layers whose matmuls run in 8 bits within an error budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from policy.core.policy import Policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.applied import Choices, PathState, applied, rules_of_states
from policy.inspect.suggest.eight_bits import LayerEvidence, Why
from policy.inspect.suggest.scaled_dots import ScaledDots
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.suggestion import Suggestion
from policy.inspect.suggest.trial import Trial
from policy.inspect.traced.call import short_text
from policy.programs.paths import Path, divided, spelled


class EightBitSearch:
    """Searches for the layers that run in 8 bits, beside the paths that are kept in float32.

    Args:
      trial: the compiled program.
      scaled: the matmuls that may run in 8 bits.
      policy: the policy with ``m=``.
      wide: the candidates of `trial` that are kept in float32.
      budget: the error allowed.
      smallest: the least contraction and number of outputs of a layer to run in 8 bits.
    """

    def __init__(
        self,
        trial: Trial,
        scaled: ScaledDots,
        policy: Policy,
        wide: WideModules,
        budget: float,
        smallest: int,
    ):
        self.trial, self.policy, self.wide = trial, policy, wide
        self.budget, self.smallest = budget, smallest
        self.convolutions = scaled.convolutions
        self.paths, self.layers = list(scaled.layers), list(scaled.layers.values())
        self.alone = [trial.measure_8_bits_alone(i) for i in range(len(self.layers))]
        self.costs = [one.flops / max(scaled.total, 1) for one in self.layers]
        self.kept: list[Why] = [self._why_kept(i) for i in range(len(self.layers))]
        self.free = [i for i, why in enumerate(self.kept) if not why]

    def _why_kept(self, i: int) -> Why:
        if self.paths[i] in self.trial.paths_of(self.wide):
            return "in float32"
        size = min(self.layers[i].contraction, self.layers[i].outputs)
        return "too small to gain" if size < self.smallest else ""

    def suggestion(self, found: Suggestion) -> Suggestion:
        """Returns a suggestion for the policy with ``m=``, once its rules have met the budget.

        Where no layer may run in 8 bits it is the given one, with the reasons.

        Args:
          found: the suggestion for the policy without ``m=``.
        """
        costs, alone = ([each[i] for i in self.free] for each in (self.costs, self.alone))
        search = Search(self._measure, alone.__getitem__, costs, alone)
        search.known[search.every] = 0.0  # confirmed without 8 bits
        tried: dict[WideModules, tuple[PolicyRules, float]] = {}

        def error(kept: WideModules) -> float:
            if kept == search.every:
                return 0.0
            tried[kept] = applied(
                self.trial, self.wide, self._rules(self._chosen(kept)), self.policy
            )
            return tried[kept][1]

        kept, _, _ = search.confirmed(self.budget, error)
        if kept in tried:
            rules, measured = tried[kept]
            text, emulated = short_text(self.policy), self._measure(kept)
            found = dataclasses.replace(
                found, rules=rules, policy=text, error=measured, emulated=emulated
            )
        return dataclasses.replace(
            found,
            matmul="" if self.policy.matmul is None else self.policy.matmul.text,
            smallest=self.smallest,
            layers=self._evidence(self._chosen(kept)),
            runs=self.trial.runs,
            compilations=found.compilations + len(tried),
        )

    def _chosen(self, kept: WideModules) -> frozenset[int]:
        return frozenset(layer for i, layer in enumerate(self.free) if i not in kept)

    def _measure(self, kept: WideModules) -> float:
        return self.trial.measure(self.wide, self._chosen(kept))

    def _rules(self, chosen: frozenset[int]) -> Choices:
        """Returns the rules to try for some layers in 8 bits. Convolutions are kept out."""
        wide = self.trial.paths_of(self.wide)
        kept = {path for i, path in enumerate(self.paths) if i not in chosen} | self.convolutions

        def state(path: Path) -> PathState:
            return "float32" if path in wide else "half" if path in kept else "8 bits"

        states: dict[Path, PathState] = {path: state(path) for path in self.trial.paths}
        half = out_of_8_bits(states, self.policy)
        return rules_of_states(self.trial, states, "8 bits", half, self.policy)

    def _evidence(self, chosen: frozenset[int]) -> tuple[LayerEvidence, ...]:
        """Returns the measurements of each layer, the largest cost first."""
        found: list[LayerEvidence] = []
        for i, (path, one) in enumerate(zip(self.paths, self.layers, strict=True)):
            why: Why = "" if i in chosen else self.kept[i] or "budget"
            sizes = one.contraction, one.outputs
            found.append(LayerEvidence(spelled(path), self.alone[i], self.costs[i], *sizes, why))
        return tuple(sorted(found, key=lambda one: -one.cost))


def out_of_8_bits(paths: Iterable[Path], policy: Policy) -> Callable[[str], Policy]:
    """Returns the policy of each pattern of paths that are kept out of 8 bits."""
    kept = policy.replace(matmul=None)
    inside = kept.replace(output_dtype=kept.compute_dtype)
    of_model = {spelled(path) for path in paths if (found := divided(path)) and not found[1]}
    return lambda pattern: kept if pattern in of_model else inside

"""The layers whose matmuls may run in 8 bits within an error budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from policy.core.matmul_dtypes import ScaledMatmul, scaled_matmul_of
from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules
from policy.inspect.suggest.patterns import patterns_of_states
from policy.inspect.suggest.search import Search, WideModules
from policy.inspect.suggest.trial import Trial
from policy.programs.paths import Path, divided, spelled

SMALLEST = 2048
"""The least contraction and number of outputs of a layer that gains by 8 bits: below it they take
more cycles on every chip of the table in docs/eight_bits.md (`benchmarks/accel/eight_bits.py`).
"""
_MOST_CONFIRMATIONS = 5
LayerState = Literal["8 bits", "half", "float32"]
Why = Literal["", "budget", "too small to gain", "in float32"]


@dataclasses.dataclass(frozen=True)
class LayerEvidence:
    """Measurements of one layer's matmuls in 8 bits.

    >>> from policy.inspect.suggest.eight_bits import LayerEvidence
    >>> LayerEvidence("head", 0.02, 0.1, 4096, 256, "too small to gain").runs_in_8_bits
    False

    Attributes:
      path: the module path, its names joined by "/".
      alone: the error with this layer alone in 8 bits, and everything else in float32.
      cost: the share of its matmuls in the FLOPs of all matmuls.
      contraction, outputs: the sizes of its largest matmul, of what is contracted and of what the
        parameters alone have.
      kept: the reason why it is kept out of 8 bits; "" if it is not.
    """

    path: str
    alone: float
    cost: float
    contraction: int
    outputs: int
    kept: Why

    @property
    def runs_in_8_bits(self) -> bool:
        """True if its matmuls run in 8 bits by the suggested rules."""
        return not self.kept

    def __str__(self) -> str:
        said = "8 bits" if self.runs_in_8_bits else f"kept: {self.kept}"
        size = f"{self.contraction}x{self.outputs}"
        return f"{self.path:<50} {self.alone:>20.3g} {self.cost:>8.2%} {size:>12}  {said}"


def split_policy(
    policy: Policy | None, matmul: ScaledMatmul | str | None
) -> tuple[Policy | None, ScaledMatmul | None]:
    """Returns the policy without ``m=``, and the matmuls in 8 bits that are asked for.

    Raises:
      TypeError: `matmul` is neither a ScaledMatmul nor a text.
      ValueError: an unknown text; it disagrees with the policy's ``m=``; there is no policy; or its
        compute_dtype is not half precision.
    """
    if not isinstance(matmul, (ScaledMatmul, str, type(None))):
        raise TypeError(
            f"matmul should be a ScaledMatmul or its text, such as 'f8', but got {matmul!r}."
        )
    given = scaled_matmul_of(matmul) if isinstance(matmul, str) else matmul
    if policy is None:
        if given is not None:
            raise ValueError(
                f"matmul={given.text!r} applies to layers that obey a policy, but policy= is "
                "missing: pass it too, such as policy='mixed_bfloat16'."
            )
        return None, None
    if policy.matmul is not None and given is not None and given != policy.matmul:
        raise ValueError(f"matmul={given.text!r} disagrees with the policy '{policy.short}'.")
    by = given or policy.matmul
    if by is not None and policy.compute_dtype.itemsize != 2:
        raise ValueError(
            f"suggest picks layers for m={by.text} among those in half precision, but the policy "
            f"'{policy.short}' computes in {policy.compute_dtype}: give a policy that computes in "
            "bfloat16 or float16."
        )
    return policy.replace(matmul=None), by


@dataclasses.dataclass
class EightBitSearch:
    """Searches for the layers that run in 8 bits, beside the paths that are kept in float32.

    Attributes:
      trial: the compiled program.
      wide: the candidates of `trial` that are kept in float32.
      budget: the error allowed.
      smallest: the least contraction and number of outputs of a layer to run in 8 bits.
    """

    trial: Trial
    wide: WideModules
    budget: float
    smallest: int

    def __post_init__(self) -> None:
        assert self.trial.scaled is not None
        self.layers = list(self.trial.scaled.layers.items())
        in_float32 = {self.trial.paths[i] for i in self.wide}
        self.small = {
            i
            for i, (_, one) in enumerate(self.layers)
            if min(one.contraction, one.outputs) < self.smallest
        }
        self.float32 = {i for i, (path, _) in enumerate(self.layers) if path in in_float32}
        self.free = [
            i for i in range(len(self.layers)) if i not in self.small and i not in self.float32
        ]
        self.alone = [self.trial.measure_8_bits_alone(i) for i in range(len(self.layers))]
        self.costs = [one.flops / max(self.trial.scaled.total, 1) for _, one in self.layers]

    def sets(self, met: Callable[[frozenset[int]], bool]) -> tuple[frozenset[int], bool]:
        """Returns the layers that run in 8 bits, and whether `met` confirmed them in a real run.

        After a miss the next set is chosen for a smaller budget; the last one is empty.
        """
        if not self.free:
            return frozenset(), False
        search = Search(self._measure, lambda i: self.alone[self.free[i]], self._kept_costs(), 0)
        search.alone = [self.alone[i] for i in self.free]
        search.runs = 2 * len(self.free) - 1
        search.known[search.every] = 0.0  # confirmed without 8 bits
        goal = self.budget
        for _ in range(_MOST_CONFIRMATIONS):
            kept = search.least(goal)
            if kept is None or kept == search.every:
                break
            chosen = frozenset(self.free[i] for i in search.every - kept)
            if met(chosen):
                return chosen, True
            search.refused.add(kept)
            goal *= 0.9
        return frozenset(), False

    def _kept_costs(self) -> Sequence[float]:
        return [self.costs[i] for i in self.free]

    def _measure(self, kept: WideModules) -> float:
        chosen = [layer for i, layer in enumerate(self.free) if i not in kept]
        return self.trial.measure_in_8_bits(self.wide, chosen)

    def states(self, chosen: frozenset[int]) -> dict[Path, LayerState]:
        """Returns how each path runs. Convolutions are kept in half precision."""
        assert self.trial.scaled is not None
        kept = {path for i, (path, _) in enumerate(self.layers) if i not in chosen}
        kept |= self.trial.scaled.convolutions
        wide = {self.trial.paths[i] for i in self.wide}

        def state(path: Path) -> LayerState:
            return "float32" if path in wide else "half" if path in kept else "8 bits"

        return {path: state(path) for path in self.trial.paths}

    def evidence(self, chosen: frozenset[int]) -> tuple[LayerEvidence, ...]:
        """Returns the measurements of each layer, the largest cost first."""
        found = [
            LayerEvidence(
                spelled(path),
                self.alone[i],
                self.costs[i],
                one.contraction,
                one.outputs,
                "" if i in chosen else self._why(i),
            )
            for i, (path, one) in enumerate(self.layers)
        ]
        return tuple(sorted(found, key=lambda one: -one.cost))

    def _why(self, i: int) -> Why:
        if i in self.float32:
            return "in float32"
        return "too small to gain" if i in self.small else "budget"


def rules_of(states: Mapping[Path, LayerState], policy: Policy, full: Policy) -> PolicyRules:
    """Returns the rules that give each path its state under a policy with ``m=``.

    Args:
      full: the policy of the paths in float32.
    """
    kept = policy.replace(matmul=None)
    inside = kept.replace(output_dtype=kept.compute_dtype)
    of_model = {spelled(path) for path in states if (found := divided(path)) and not found[1]}

    def obeyed(pattern: str, state: LayerState) -> Policy:
        if state == "half":
            return kept if pattern in of_model else inside
        return full if state == "float32" else policy

    named: list[tuple[str, LayerState]] = patterns_of_states(states, "8 bits")
    return PolicyRules([(pattern, obeyed(pattern, state)) for pattern, state in named])


def lines_of(evidence: Sequence[LayerEvidence], by: str, smallest: int) -> list[str]:
    """Returns the table of layers, as comments."""
    if not by:
        return []
    head = (
        f"# {'m=' + by:<50} {'error, alone in 8 bits':>20} {'cost':>8} {'size':>12}  "
        f"(too small: below {smallest})"
    )
    return ["", head, *(f"# {one}" for one in evidence)]


def full_policies(policy: Policy) -> tuple[Policy, Policy]:
    """Returns the policy of paths in float32, and the one that hands on compute_dtype, for code
    that can't take float32 from a layer.
    """
    full = get_policy("float32")
    return full, full.replace(output_dtype=policy.compute_dtype)

"""suggest: finds by measurement the cheapest rules under which a policy meets an error budget."""

from __future__ import annotations

import math
from typing import Any

from policy._jaxpr.paths import naming, spelled
from policy.matmul_dtypes import ScaledMatmul
from policy.parameters import ParamsArgument
from policy.policy import Policy
from policy.suggest.confirmed import confirmed
from policy.suggest.confirmed_in_8_bits import confirmed_in_8_bits, scaled_of
from policy.suggest.eight_bits import SMALLEST, EightBitSearch, split_policy
from policy.suggest.search import Search
from policy.suggest.suggestion import Suggestion
from policy.suggest.trial import Trial
from policy.traced.call import Call, checked_policy, program_of


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
    scaled = None if by is None or policy is None else scaled_of(call, policy, by, program, named)
    trial = Trial(program, named, scaled)
    search = Search(trial.measure, trial.measure_alone, trial.costs, 2 * len(trial.paths) - 1)
    if not trial.outside:
        search.known[search.every] = 0.0
    with naming(trial.paths):
        found = confirmed(call, policy, program, trial, search, budget)
        if scaled is None or policy is None:
            return found
        wide = frozenset(i for i, path in enumerate(trial.paths) if spelled(path) in found.paths)
        layers = EightBitSearch(trial, wide, budget, smallest)
        return confirmed_in_8_bits(call, policy.replace(matmul=by), program, layers, found)


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

"""suggest: finds by measurement the cheapest rules under which a policy meets an error budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from policy.autocasting.parameters import ParamsArgument
from policy.core.policy import Policy
from policy.core.precedence import collecting
from policy.core.rules import PolicyRules
from policy.core.scope import traced_for
from policy.inspect.estimate.steps import MadeCall
from policy.inspect.estimate.targets import Target
from policy.inspect.suggest.applied import confirmed, suggestion_of
from policy.inspect.suggest.on_target import require_timed, row_compiler, suggestion_on
from policy.inspect.suggest.patterns import ListeningRules
from policy.inspect.suggest.suggestion import Suggestion
from policy.inspect.suggest.trial import Trial
from policy.inspect.traced.call import Call, Program, checked_policy, program_of
from policy.programs.frameworks import with_policy
from policy.programs.paths import naming

POINTS = 5


def suggest(
    fn: Any,
    *args: Any,
    error: float | None = None,
    policy: Policy | str | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    on: str | Target | None = None,
    mesh: Mapping[str, int] | None = None,
    shardings: Any = None,
    points: int = POINTS,
    **kwargs: Any,
) -> Suggestion:
    """Finds the cheapest rules that keep a call under `policy` within `error` of float32.

    One program, compiled once, computes the function in float32 and rounds each value as the policy
    would, except at the paths selected by its flags. It measures each path alone in half precision,
    then sets of paths: of up to 8 paths it finds the cheapest set, of n more one without a
    superfluous path, in at most 3 n log2(n) runs. Then the rules are applied in a second program,
    whose outputs are measured. If it misses the budget, another set is confirmed, with one more
    compilation each time.

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

    With a target, ``on="v5e:4x4"``, cost is what its compiler says, and the result has the front of
    error against cost. No device of the target is needed.

    Args:
      fn, *args, **kwargs: as for `compare`.
      error: the allowed error relative to float32: norm of the difference / norm, of the worst
        output; or of all gradients together. It may be left out with `on`: the suggested rules are
        then those of the cheapest point.
      policy: the policy to run under; with `on`, the dtype ``half`` is the target's. None: the
        policy that the model carries, or its own half dtypes.
      backward: whether the budget is for the gradients of the loss that the function returns, not
        for its outputs.
      params: the arguments that are parameters, for gradients and for `autocast`; see
        `policy.audit`.
      on: the target whose compiler tells the cost, as for `policy.estimate`; one with cycles or
        published peaks. None: cost is a count of FLOPs and bytes.
      mesh, shardings: as for `policy.estimate`.
      points: the most points to compile for the target, at least 3.

    Returns:
      The rules and the measurements; see `Suggestion`. The rules are empty if the policy by itself
      meets the budget.

    Raises:
      TypeError: as `compare` does.
      RuntimeError: the target's compiler is not installed.
      ValueError: an argument is malformed or goes with another that is missing; the policy has
        ``m=``; nothing that a rule could name runs in half precision; float32 itself is not finite;
        no rules meet the budget, or none of those fits into the target's memory.
    """
    on = Target(on) if isinstance(on, str) else on
    with contextlib.nullcontext() if on is None else traced_for(on.devices[0]):
        policy = checked_policy(policy)
    _require(error, on, policy, (mesh, shardings), points)
    budget = math.inf if error is None else float(error)
    call = Call.measured("suggest", fn, args, kwargs, params, 1.0 if backward else None)
    trial = _trial(call, (fn, args, kwargs), policy, params)
    with naming(trial.paths):
        if on is not None and policy is not None:
            made = MadeCall(fn, args, kwargs, False)
            compiled = row_compiler(trial, on, made, policy, backward, params, mesh, shardings)
            return suggestion_on(trial, on, compiled, points, budget)
        search = trial.search(trial.costs)
        wide, rules, measured = confirmed(trial, search, budget)
        return suggestion_of(trial, search, wide, rules, budget, measured)


def _trial(call: Call, made: tuple[Any, Any, Any], policy: Policy | None, params: Any) -> Trial:
    """Returns the compiled program with flags, and how rules are applied to it.

    A model that carries a policy has rules in that policy: under its scope, or, if the model has
    captured the policy, on a copy.

    Args:
      call: the call to measure.
      made: its function, arguments and keyword arguments.
      policy: the policy given.
      params: as for `suggest`.
    """
    fn, args, kwargs = made
    own = _carried(call) if policy is None else None
    if own is not None and (known := with_policy(fn, args, own, PolicyRules())) is not None:

        def ported(rules: PolicyRules) -> Program:
            fn, args = with_policy(*made[:2], own, rules) or known
            return Call.measured("suggest", fn, args, kwargs, params, call.loss_scale).under(None)

        return Trial(call, own, program_of(call, None), None, ported)
    listening = ListeningRules()
    program = program_of(call, policy or own, listening)
    return Trial(
        call, policy or own, program, listening.heard if program.route == "scope" else None
    )


def _carried(call: Call) -> Policy | None:
    """Returns the policy that the models of a call carry; None for none, and for several."""
    with collecting(None, None) as asked:
        call.under(None)
    return next(iter(asked.of_models)) if len(asked.of_models) == 1 else None


def _require(
    error: Any, on: Target | None, policy: Policy | None, layout: tuple[Any, Any], points: Any
) -> None:
    is_given = layout != (None, None) or points != POINTS
    is_error = isinstance(error, (int, float)) and not isinstance(error, bool)
    wrong = {
        "suggest needs an error budget, such as error=0.02, or a target for the front of error "
        "against cost, such as on='v5e:1x1'.": error is None and on is None,
        f"error should be a positive number, the relative error allowed, but got {error!r}.": (
            error is not None and not (is_error and 0 < error < math.inf)
        ),
        "mesh=, shardings= and points= apply to a target, but on= is missing: pass it too, such as "
        "on='v5e:4x4'.": on is None and is_given,
        "suggest finds modules to keep in float32, and doesn't search in 8 bits, but the policy "
        f"is {policy and policy.short!r}: give it without m=.": bool(policy and policy.matmul),
        "on= compiles the program under a policy and its rules, but policy= is missing: pass it "
        "too, such as policy='mixed_bfloat16'.": on is not None and policy is None,
        f"points should be a number of programs to compile, at least 3, but got {points!r}.": (
            type(points) is not int or points < 3
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)
    if on is not None:
        require_timed(on)

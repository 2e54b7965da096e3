"""compare: a function under a policy beside the same function in float32, module by module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy._jaxpr.interpreter import Value
from policy._jaxpr.subprograms import opened
from policy.compare.comparison import Comparison
from policy.compare.dual_interpreter import Log, Paired, reference
from policy.compare.float32_values import lane_of
from policy.compare.rows import comparison_of
from policy.parameters import Params
from policy.policy import Policy
from policy.scope import RulesLike
from policy.traced.call import Call, Program, checked_policy, checked_rules, program_of, short_text

# What is written is what is run: XLA may leave roundings out otherwise.
EXACT: dict[str, str | bool] = {"xla_allow_excess_precision": False}


def compare(
    fn: Any,
    *args: Any,
    policy: Policy | str | None = None,
    rules: RulesLike | None = None,
    backward: bool = False,
    params: Params = None,
    loss_scale: float = 1.0,
    **kwargs: Any,
) -> Comparison:
    """`fn(*args, **kwargs)` under `policy` beside the same call in float32: how far each module is off, and where.

    The reference is the function traced in float32, so that its constants are those before rounding. It is paired with
    the half program, and both run in one compiled program, equation by equation; what could not be paired is compared
    with the half program, widened, and named in `Comparison.unpaired`. What passes from one module to another, and what
    the function returns, is reduced to a few numbers where it is. In a scan that is done in each step. Modules are
    linen's, nnx's, or parts named with `jax.named_scope`. Callbacks to the host are called once, with the values of
    `policy`.

    ```python
    comparison = compare(loss, params, batch, policy="mixed_float16", backward=True)
    print(comparison)             # a table: error, cosine, underflow, overflow by path
    comparison.first_jump         # "layer_12/attention": the first module that makes an error
    comparison.plot("errors.png")
    ```

    Args:
      fn: any function of arrays, bound method, or nnx module; a module's `apply`. Nothing of it is changed.
      *args, **kwargs: what it is called with: arrays, in the dtypes that it is meant to be called with.
      policy: what to run it under. Layers that obey `use_policy` do; where that changes no matmul, `autocast` does.
        None: as it is written, with its half dtypes in it.
      rules: policies by module path or layer class, beside `policy`.
      backward: whether gradients are compared too. The function then returns a loss, or (loss, aux).
      params: which arguments are parameters, for gradients and for `autocast`; see `policy.audit`.
      loss_scale: what the loss is multiplied by before. Errors do not change with it, but what underflows does.

    Returns:
      The rows for each path; see `Comparison`.

    Raises:
      TypeError: `fn` is no function, there are no arrays, or only shapes of some; `params` says nothing about
        arguments; with `backward`, there is no loss, or no floating argument.
      ValueError: the policy is none, or can't be honoured here; `rules` without `policy`; `loss_scale` is not positive;
        `params` names arguments where modules hold the parameters.
    """
    rules = checked_rules(rules, policy)
    policy = checked_policy(policy)
    call = Call.of("compare", fn, args, kwargs, params, _scale(backward, loss_scale))
    program = program_of(call, policy, rules=rules)
    log = Log()
    compiled = jax.jit(paired(program, log)).lower(*program.arguments.arrays).compile(compiler_options=EXACT)
    numbers, undefined = jax.device_get(compiled(*program.arguments.arrays))
    name = getattr(fn, "__name__", type(fn).__name__)
    return comparison_of(program, log, numbers, undefined, name, "" if policy is None else short_text(policy))


def _scale(backward: bool, loss_scale: float) -> float | None:
    if not isinstance(loss_scale, (int, float)) or not (0 < loss_scale < float("inf")):
        raise ValueError(f"loss_scale should be a positive number, but got {loss_scale!r}.")
    return float(loss_scale) if backward else None


def paired(program: Program, log: Log) -> Any:
    """The function of the program's arrays that runs both, and returns what was measured, and which inputs hold NaN."""
    body, consts = opened(program.jaxpr)

    def run(*arrays: Any) -> tuple[dict[int, Any], list[Any]]:
        log.places.clear()
        log.measurements.clear()
        pairing = program.reference
        log.unpaired = {} if pairing is None else dict(pairing.unpaired)
        both = Paired(log, bool(program.gradients), frozenset() if pairing is None else pairing.touched)
        both.lane = lane_of(pairing, reference, log.unpaired)
        outputs = both.run(body, [Value([const]) for const in consts], [Value([array]) for array in arrays])
        outputs = both.ended(outputs)
        both.returned(outputs, body.outvars)
        return both.notes, [_has_nan(array) for array in arrays]

    return run


def _has_nan(array: Any) -> Any:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.any(jnp.isnan(array)) if is_float else np.False_

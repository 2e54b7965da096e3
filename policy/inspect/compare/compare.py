"""Measures a function under a policy against the same function in float32, module by module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from policy.autocasting.parameters import ParamsArgument
from policy.core.policy import Policy
from policy.core.rules import RulesLike
from policy.inspect.compare.comparison import Comparison
from policy.inspect.compare.dual_interpreter import Log, Paired
from policy.inspect.compare.rows import comparison_of
from policy.inspect.traced.call import (
    Call,
    Program,
    checked_policy,
    checked_rules,
    program_of,
    short_text,
)
from policy.programs.jaxprs import opened
from policy.programs.rewriting.upcast import Device, PlacedValue, require_device


def compare(
    fn: Any,
    *args: Any,
    policy: Policy | str | None = None,
    rules: RulesLike | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    loss_scale: float = 1.0,
    on: Device | None = None,
    **kwargs: Any,
) -> Comparison:
    """Compares a call under `policy` with the same call in float32, module by module.

    The reference is the same program in float32, with the constants of the function traced in
    float32, which are not rounded. Both run in one compiled program, equation by equation. Values
    that pass from one module to another, and the function's outputs, are reduced to a few numbers
    on the device, in each step of a scan. Modules are linen's, nnx's, or parts named with
    `jax.named_scope`. Callbacks to the host are called once, with the values of `policy`.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> fn = lambda w, x: jnp.sum(jnp.dot(x, w))
    >>> w, x = jnp.full((4, 4), 1 / 3), jnp.ones((2, 4))
    >>> comparison = policy.compare(fn, w, x, policy="mixed_bfloat16")
    >>> 1e-4 < comparison.error < 1e-2
    True

    ``print(comparison)`` shows a table with the error, cosine, underflow and overflow of each path;
    ``comparison.first_jump`` is the first module that makes an error, such as "layer_12/attention";
    and ``comparison.plot("errors.png")`` draws the errors.

    Args:
      fn: any function of arrays, bound method, or nnx module; a module's `apply`. It is not
        modified.
      *args, **kwargs: the arguments of the call: arrays, in the dtypes that `fn` is normally called
        with.
      policy: the policy to run under, applied through layers that obey `use_policy`; if that
        changes no matmul, through `autocast`. None: as it is written, with its own half dtypes.
      rules: policies by module path or layer class, beside `policy`.
      backward: whether to compare gradients too. The function then returns a loss, or (loss, aux).
      params: the arguments that are parameters, for gradients and for `autocast`; see
        `policy.audit`.
      loss_scale: the factor of the loss before differentiation. It affects underflow, but not
        errors.
      on: "tpu" or "gpu": the program's float32 matmuls below the highest precision are multiplied
        as these devices do, in passes of bfloat16 or in TF32. None multiplies float32.

    Returns:
      The rows for each path; see `Comparison`.

    Raises:
      TypeError: `fn` is not a function; there are no arrays, or only their shapes; `params` doesn't
        select arguments; with `backward`, there is no loss.
      ValueError: the policy is malformed, or can't be honoured here; `rules` without `policy`;
        `loss_scale` is not positive, or `on` is no device; `params` names arguments where modules
        hold the parameters; with `backward`, there is no floating argument.
    """
    rules = checked_rules(rules, policy)
    policy = checked_policy(policy)
    if on is not None:
        require_device(on)
    if not isinstance(loss_scale, (int, float)) or not (0 < loss_scale < float("inf")):
        raise ValueError(f"loss_scale should be a positive number, but got {loss_scale!r}.")
    scale = float(loss_scale) if backward else None
    program = program_of(Call.measured("compare", fn, args, kwargs, params, scale), policy, rules)
    log, arrays = Log(), program.arguments.arrays
    numbers, undefined = jax.device_get(program.compiled(paired(program, log, on))(*arrays))
    name, text = getattr(fn, "__name__", type(fn).__name__), policy and short_text(policy)
    return comparison_of(program, log, numbers, undefined, name, text or "")


def paired(program: Program, log: Log, on: Device | None = None) -> Any:
    """Returns the function of the program's arrays that runs both programs.

    It returns the measurements, and for each input whether it contains NaN.
    """

    def run(*arrays: Any) -> tuple[dict[int, Any], list[Any]]:
        both = Paired(log, program, on)
        body, consts = opened(program.jaxpr)
        given = [[PlacedValue([array]) for array in each] for each in (consts, arrays)]
        outputs = both.run(body, *given)
        both.returned(outputs, body.outvars)
        return both.notes, [_has_nan(array) for array in arrays]

    return run


def _has_nan(array: Any) -> Any:
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return jnp.any(jnp.isnan(array)) if is_float else np.False_

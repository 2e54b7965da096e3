"""Policies for linen models that know nothing of us: a subclass whose calls adopt Flax's layers."""

from __future__ import annotations

from typing import TypeVar

import flax.linen as flax_nn

from mpmodules.calls.port_options import OwnCode, not_a_model, port_options
from mpmodules.linen._instances import fields_of, state_of
from mpmodules.linen._ported_classes import rebuild
from policy.core.policy import Policy
from policy.core.scope import RulesLike

M = TypeVar("M", bound=flax_nn.Module)


def apply_policy(
    model: M,
    policy: Policy | str,
    rules: RulesLike | None = None,
    *,
    keep_explicit: bool = False,
    dtype_fields: bool = False,
    cast_submodules: bool = False,
    own_code: OwnCode = None,
) -> M:
    """Returns the same linen model under a policy and rules, without an edit.

    Every Flax layer in the model, at any depth, obeys the policy: in compact and setup style,
    shared, scanned, rematerialised, vmapped and jitted, and inside Flax's own composites.
    Parameters that other modules create themselves come in param_dtype. Functions (pooling,
    softmax) and the model's own code run under autocast's rules.

    Args:
      model: an unbound linen module, Flax's own or ours. A `dtype_policy` that it carries itself is
        replaced.
      policy: a Policy or its text form.
      rules: `PolicyRules` or an argument for them; paths are those of the model's variables.
      keep_explicit: whether an explicit `dtype` of a Flax layer holds against the policy. An
        explicit `param_dtype` can't be told from the default and never does.
      dtype_fields: whether the fields `dtype` and `param_dtype` of modules that are neither ours
        nor layers of Flax's hold the policy's compute_dtype and param_dtype during their setup and
        calls, for models that hand ``self.dtype`` on to functions and casts. A field that holds a
        floating dtype or None is set, to a name, a scalar type or a `np.dtype` as it was.
      cast_submodules: whether the floating outputs of modules below the root that are neither ours
        nor layers of Flax's (its `Sequential` and `Bidirectional` are none) are cast to the
        compute_dtype of the module that calls them, so that branches in float32 and in half meet in
        one dtype. A scan's or a cell's carry keeps the dtype that it was given in.
      own_code: the treatment of code that no layer runs. "autocast": it is traced in float32 and
        runs by the rules of `policy.autocast`, under the policies that hold at each module; layers
        run as layers. "keep": it runs in the dtypes that it meets, and nothing is traced. None: as
        "autocast", or as "keep" beside the three options above.

    Returns:
      An instance of a subclass of the model's class with the same name, constructor, fields, state,
      variables and methods; equal for equal arguments, and picklable. A submodule taken out of a
      bound model and called by itself is not covered.

    Raises:
      TypeError: `model` is no linen module.
      ValueError: `model` is bound, the policy or rules are malformed, `own_code` is none of the
        above, or options contradict each other.

    Example:
      >>> model = linen.apply_policy(flax.linen.Dense(3), "params=bfloat16,compute=bfloat16")
      >>> y, variables = model.init_with_output(key, jnp.ones((2, 4)))
      >>> variables["params"]["kernel"].dtype
      dtype(bfloat16)
    """
    if not isinstance(model, flax_nn.Module):
        raise not_a_model(model, "a linen module", other="mpmodules.nnx")
    if model.scope is not None:
        raise ValueError(
            "apply_policy takes an unbound model; apply the policy before bind, init or apply."
        )
    options = port_options(
        policy,
        rules,
        keep_explicit=keep_explicit,
        dtype_fields=dtype_fields,
        cast_submodules=cast_submodules,
        own_code=own_code,
    )
    base = getattr(type(model), "_ported_from", type(model))
    fields, state = fields_of(model), state_of(model)
    if "dtype_policy" in fields:
        fields["dtype_policy"] = options.policy
    return rebuild(base, options, fields, state)

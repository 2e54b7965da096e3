"""The dtypes of the policy in force, for users' own code."""

from __future__ import annotations

import numpy as np

from policy.core.scope import current_policy


def param_dtype() -> np.dtype | None:
    """Returns the dtype of stored parameters under the policy in force; None without a policy.

    In a method of a linen or nnx module, the policy in force is the one that the module obeys.
    JAX's functions take None for their default, and Flax's layers take it for "as the inputs are".

    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     policy.param_dtype()
    dtype('float32')
    >>> policy.param_dtype() is None
    True
    """
    policy = current_policy()
    return None if policy is None else policy.param_dtype


def compute_dtype() -> np.dtype | None:
    """Returns the dtype of matmuls and activations under the policy in force; None without one.

    Cast a table that was computed in float32 to it, so that the table doesn't widen the activations
    that it is multiplied with. Inside `full_precision` it is reduction_dtype.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     cos = jnp.cos(jnp.arange(4.0)).astype(policy.compute_dtype())
    >>> cos.dtype
    dtype(bfloat16)
    """
    policy = current_policy()
    return None if policy is None else policy.compute_dtype


def output_dtype() -> np.dtype | None:
    """Returns the dtype that the policy in force returns to code outside; None without a policy.

    >>> import policy
    >>> with policy.use_policy("p=f32,c=bf16,o=bf16"):
    ...     policy.output_dtype()
    dtype(bfloat16)
    """
    policy = current_policy()
    return None if policy is None else policy.output_dtype


def reduction_dtype() -> np.dtype | None:
    """Returns the dtype of statistics, softmaxes and sums in force; None without a policy.

    >>> import policy
    >>> with policy.use_policy("mixed_bfloat16"):
    ...     policy.reduction_dtype()
    dtype('float32')
    """
    policy = current_policy()
    return None if policy is None else policy.reduction_dtype

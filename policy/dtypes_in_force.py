"""The dtypes of the policy in force, for code that a user writes."""

from __future__ import annotations

import numpy as np

from policy.scope import current_policy


def param_dtype() -> np.dtype | None:
    """Returns the dtype that parameters are stored in under the policy in force; None where no policy is.

    In a linen module's method and in an nnx module's, the policy in force is the one that the module obeys. JAX's
    functions take None for their default, and Flax's layers for "as the inputs are".
    """
    policy = current_policy()
    return None if policy is None else policy.param_dtype


def compute_dtype() -> np.dtype | None:
    """Returns the dtype that matmuls and activations run in under the policy in force; None where no policy is.

    ``cos = jnp.cos(angles).astype(policy.compute_dtype())`` keeps a table that is computed in float32 from widening
    what it is multiplied with. Inside of `full_precision` it is reduction_dtype.
    """
    policy = current_policy()
    return None if policy is None else policy.compute_dtype


def output_dtype() -> np.dtype | None:
    """Returns the dtype that the policy in force hands to code outside of it; None where no policy is."""
    policy = current_policy()
    return None if policy is None else policy.output_dtype


def reduction_dtype() -> np.dtype | None:
    """Returns the dtype of statistics, softmaxes and sums under the policy in force; None where no policy is."""
    policy = current_policy()
    return None if policy is None else policy.reduction_dtype

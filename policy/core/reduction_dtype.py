"""The dtype that reductions run in."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from policy.core.casting import require_available
from policy.core.scope import current_policy


def reduction_dtype_of(*arrays: ArrayLike) -> np.dtype:
    """Returns the dtype for a reduction of `arrays`, never narrower than they are.

    It is the policy's reduction_dtype, or float32 without a policy.

    >>> import jax.numpy as jnp
    >>> from policy import reductions
    >>> reductions.reduction_dtype_of(jnp.ones(2, jnp.bfloat16))
    dtype('float32')
    """
    policy = current_policy()
    dtype = jnp.dtype(jnp.float32) if policy is None else require_available(policy.reduction_dtype)
    return widest(
        [
            dtype,
            *(
                jnp.result_type(x)
                for x in arrays
                if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
            ),
        ]
    )


def widest(dtypes: Sequence[Any]) -> np.dtype:
    """Returns the dtype that holds the numbers of all."""
    # a question about dtypes, not a promotion of anyone's arrays
    with jax.numpy_dtype_promotion("standard"):
        return jnp.dtype(functools.reduce(jnp.promote_types, dtypes))

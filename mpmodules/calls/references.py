"""References: objects that a boundary passes on by identity."""

from __future__ import annotations

from typing import Any

import flax.linen as linen
import jax
from flax import nnx
from flax.core import Scope


def is_reference(x: Any) -> bool:
    """Returns whether `x` is, or is tied to, state that a copy would lose.

    nnx Modules, Rngs and Variables are pytrees: a tree map over them gives the same dropout mask at
    every call and loses the updates of batch statistics. linen Modules, Scopes and Variables are
    references as well.
    """
    return isinstance(
        x,
        nnx.Pytree
        | nnx.Variable
        | nnx.State
        | nnx.GraphDef
        | linen.Module
        | linen.Variable
        | Scope
        | jax.Ref,
    )

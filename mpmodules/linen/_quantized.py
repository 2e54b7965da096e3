"""Parameters of linen modules that are stored in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import meta
from flax.errors import ScopeParamShapeError

from mpmodules.linen._resolution import effective_policy
from policy.core.arrays import is_quantized
from policy.core.scope import current_scope
from policy.quantized.array import QuantizedArray
from policy.quantized.params import require_trainable

meta.AxisMetadata.register(QuantizedArray)  # modules of others read it as they read boxes


def layer_param(
    self: Any, name: str, init_fn: Callable[..., Any], *init_args: Any, **options: Any
) -> Any:
    """Declares a parameter of a layer; one that is stored in 8 or 4 bits is returned as codes.

    Args:
      name, init_fn, init_args, options: as in `flax.linen.Module.param`.

    Raises:
      flax.errors.ScopeParamShapeError: codes stand for an array of another shape.
    """
    if not self.has_variable("params", name):
        made = flax_nn.Module.param(self, name, init_fn, *init_args, **options)
        require_trainable(effective_policy(self, current_scope()).policy, (*self.path, name), made)
        return made
    stored = self.get_variable("params", name)
    if not is_quantized(stored):
        return flax_nn.Module.param(self, name, init_fn, *init_args, **options)
    made = jax.eval_shape(lambda: meta.unbox(init_fn(jax.random.key(0), *init_args)))
    if stored.shape != made.shape:
        raise ScopeParamShapeError(name, self.scope.path_text, stored.shape, made.shape)
    # Flax compares the shapes of codes and scales.
    return flax_nn.Module.param(self, name, lambda *_: stored, unbox=False).unbox_parts()

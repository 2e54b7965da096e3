"""Parameters of nnx modules that are stored in 8 or 4 bits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx as flax_nnx

from policy.core.arrays import is_quantized
from policy.core.policy import Policy
from policy.quantized.array import QuantizedArray
from policy.quantized.params import axis_of, quantized_param

_ARRAYS = (jax.Array, np.ndarray)  # while a model is printed, or abstract, it holds others


class QuantizedParam(flax_nnx.Variable[Any]):
    """A frozen parameter, stored as a `policy.quantized.QuantizedArray`.

    It is no `nnx.Param`: gradients, optimizers and filters of `nnx.Param` leave it alone. Read as a
    variable, it is the array that it was quantized from, widened.

    Example:
      >>> layer = flax.nnx.Linear(64, 8, rngs=flax.nnx.Rngs(0))
      >>> layer = nnx.apply_policy(layer, "params=int8,compute=bfloat16")
      >>> layer.kernel[...].dtype, layer.kernel.get_raw_value().codes.dtype
      (dtype('float32'), dtype('int8'))
    """

    def get_value(self, **options: Any) -> Any:
        """Returns the array, or an index of it; arguments as in `flax.nnx.Variable.get_value`."""
        stored = self.get_raw_value()
        if not isinstance(stored, QuantizedArray) or not isinstance(stored.codes, _ARRAYS):
            return super().get_value(**options)
        widened, index = stored.widened(), options.get("index", ...)
        return widened if index is ... else widened[index]


def as_stored(variable: Any) -> Any:
    """Returns the value of a parameter, as codes where it is stored so."""
    raw = variable.get_raw_value() if isinstance(variable, QuantizedParam) else None
    return raw if isinstance(raw, QuantizedArray) else variable[...]


def quantized_like(module: Any, param: Any, policy: Policy, names: tuple[str, ...]) -> Any:
    """Returns a parameter as a policy's codes; None of one that stays as it is.

    Args:
      module: that holds it.
      param: a variable.
      policy: it has a `param_format`.
      names: of the attributes that lead to it.

    Raises:
      ValueError: qwix put an adapter beside it.
    """
    held, array = policy.param_format, param.get_value()
    if held is None or isinstance(param, flax_nnx.LoRAParam) or is_quantized(array):
        return None
    is_general = isinstance(module, flax_nnx.LinearGeneral) and names[-1] == "kernel"
    last = -len(module.out_features) - 1 if is_general else -2
    axis = axis_of(names, tuple(array.shape), held, last)
    if axis is None:
        return None
    if isinstance(getattr(module, f"{names[-1]}_lora_a", None), flax_nnx.LoRAParam):
        raise ValueError(
            f"{'/'.join(names)} has an adapter of qwix, {names[-1]}_lora_a, which would have no "
            f"effect beside {held.name} codes: qwix takes an nnx.Param as its base. "
            "Give it a rule with params=bfloat16, or put an nnx.LoRA around the layer instead."
        )
    made = quantized_param(array, held, axis, "/".join(names))
    metadata = param.get_metadata()
    metadata.pop(
        "out_sharding", None
    )  # of the array's axes: values and scales stay as it was divided
    return QuantizedParam(made, **metadata)

"""Calls of Flax's attention functions, alike in both APIs: dropout, sown weights and the choice of
a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec

from mpmodules.calls.boundary import Crossing
from mpmodules.functions import attention
from mpmodules.functions.fused_attention import fused_kernel
from policy.core.arrays import cast_array
from policy.core.quantization import Quantized
from policy.core.scope import current_policy, current_scope, enter
from policy.programs import marks

Array = jax.Array
F = TypeVar("F", bound=Callable[..., Any])

_OPERANDS = {"query", "key", "value"}

# An attention layer's mask is left uncast, so that backward keeps one mask for all layers that are
# given it.
ATTENTION = Crossing(keeps=("mask",))


def reduction_dtype() -> np.dtype:
    """Returns the reduction_dtype of the policy in force; float32 where none is."""
    policy = current_policy()
    return jnp.dtype(jnp.float32) if policy is None else policy.reduction_dtype


def layer_in_own_code(function: F) -> F:
    """Makes an attention function a layer inside of a trace of a user's own code or of autocast.

    The trace is in float32. There the function casts its operands to compute_dtype of the policy in
    force, and returns float32 to the code around it. A call with a `dtype=` is left alone.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        policy = current_policy() if scope.traces_own_code else scope.attention_policy
        if policy is None or policy.compute_dtype.itemsize >= 4:
            return function(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if given.get("dtype") is not None:
            return function(*args, **kwargs)
        for name in _OPERANDS & given.keys():
            given[name] = cast_array(given[name], policy.compute_dtype)
        inside = dataclasses.replace(
            scope, policy=policy, traces_own_code=False, attention_policy=None
        )
        with enter(inside), marks.layer():
            out = function(**given)
        return marks.returned(out)

    return wrapped  # pyright: ignore[reportReturnType]


def codes_and_scales(
    query: Array, key: Array | Quantized, value: Array | Quantized | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Returns keys and values that may be in 8 bits as arrays, codes in the dtype of the queries,
    and the scales among the options of an `AttentionCall`.
    """
    arrays, scales = [], {}
    for name, x in (("key_scale", key), ("value_scale", value)):
        if isinstance(x, Quantized):
            scales[name] = x.scale
        arrays.append(x.qvalue.astype(query.dtype) if isinstance(x, Quantized) else x)
    return *arrays, scales


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The options of a call of Flax's attention functions, of queries (B..., T, N, H), keys
    (B..., S, K, H) and values (B..., S, K, any width) of one dtype.

    Attributes:
      bias, mask, is_causal, precision: as in `mpmodules.functions.attention.dot_product_attention`.
      broadcast_dropout: whether all batch entries and heads drop the same weights.
      dropout_rng: the key, or None.
      dropout_rate: the probability of dropping a weight.
      deterministic: whether none is dropped.
      module: the module whose `sow` stores the weights before dropout in `collection`; or None.
      einsum: computes the logits, and `values_einsum` the sum of the values, instead of ours.
      wide_weights: whether the weights stay in reduction_dtype.
      attention_axes: the mesh axes of queries; None for those of the policy's scope.
      soft_cap: limits the logits, or None.
      key_scale, value_scale: (B..., S, K, 1), of keys and values that are codes; None is 1.
    """

    bias: Array | None
    mask: Array | None
    broadcast_dropout: bool
    dropout_rng: Array | None
    dropout_rate: float
    deterministic: bool
    precision: PrecisionLike
    module: Any
    collection: Any
    is_causal: bool = False
    einsum: Callable[..., Array] | None = None
    values_einsum: Callable[..., Array] | None = None
    wide_weights: bool = False
    attention_axes: PartitionSpec | None = None
    soft_cap: float | None = None
    key_scale: Array | None = None
    value_scale: Array | None = None

    def weights(self, query: Array, key: Array) -> Array:
        """Computes attention weights (B..., N, T, S) in reduction_dtype, rounds and sows them, and
        drops some.
        """
        weights = attention.dot_product_attention_weights(
            query,
            key,
            einsum=self.einsum,
            dtype=None if self.wide_weights else query.dtype,
            key_scale=self.key_scale,
            **self._options,
        )
        if self.module is not None:
            sown = weights if self.wide_weights else weights.astype(query.dtype)
            self.module.sow(self.collection, "attention_weights", sown)
        if not self._drops:
            return weights
        return attention.dropout(
            weights,
            self.dropout_rate,
            broadcast=self.broadcast_dropout,
            batch_axes=key.ndim - 3,
            rng=self.dropout_rng,
        )

    def attend(
        self,
        implementation: str | None,
        query: Array,
        key: Array,
        value: Array,
        upstream: Callable[[], Array] | None,
    ) -> Array:
        """Computes attention (B..., T, N, width of `value`) in the values' dtype: by a fused
        kernel, or by XLA, which computes the weights themselves only where they are needed.

        Args:
          implementation: None chooses, and a name insists on a kernel or on XLA.
          query, key, value: see above.
          upstream: Flax's function where it is to compute the result, else None.

        Raises:
          ValueError: shapes that do not fit, or an `implementation` that lacks a feature that is
            asked for.
        """
        obstacles = {
            "dropout": self._drops,
            "sown weights": self.module is not None,
            "a custom einsum": bool(self.einsum or self.values_einsum),
            "force_fp32_for_softmax without a policy": self.wide_weights,
        }
        scales = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        has_codes = any(scale is not None for scale in scales.values())
        choice = fused_kernel(
            implementation,
            query,
            key,
            value,
            **self._options,
            attention_axes=self.attention_axes,
            obstacles=obstacles | {"keys and values in 8 bits": has_codes},
        )
        attention.check_soft_cap(self.soft_cap)
        with marks.attention(choice.program):
            if upstream is not None:
                return upstream()
            attention.check_shapes(query, key, value)
            if choice.attend is not None:
                return choice.attend(query, key, value)
            if not any(obstacles.values()):
                return attention.dot_product_attention(query, key, value, **scales, **self._options)
            weights = self.weights(query, key)
            if self.value_scale is not None:
                wide = (x.astype(reduction_dtype()) for x in (value, self.value_scale))
                value = operator.mul(*wide).astype(value.dtype)
            if self.values_einsum is not None:
                return self.values_einsum("...hqk,...khd->...qhd", weights, value)
            return attention.weighted_values(weights, value, precision=self.precision)

    @property
    def _drops(self) -> bool:
        return not self.deterministic and self.dropout_rate > 0.0

    @property
    def _options(self) -> dict[str, Any]:
        names = ("bias", "mask", "is_causal", "precision", "soft_cap")
        options = {name: getattr(self, name) for name in names}
        return options | {"reduction_dtype": reduction_dtype()}

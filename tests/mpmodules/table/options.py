"""Options of layers that Flax has too, in which no dtype is in question: rows beside the table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from tests.mpmodules.table.cases import (
    CAUSAL,
    IMAGE,
    KEYS,
    QUERIES,
    ROWS,
    SEQUENCE,
    TOKENS,
    Case,
    layer,
)

ONES = jax.nn.initializers.ones
NORMAL = jax.nn.initializers.normal(0.3)


def _reference_dot_general(*args: Any, **kwargs: Any) -> jax.Array:
    return jax.lax.dot_general(*args, **kwargs)


def _reference_conv(*args: Any, **kwargs: Any) -> jax.Array:
    return jax.lax.conv_general_dilated(*args, **kwargs)


def _linen_promote(*args: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    return [None if x is None else jnp.asarray(x, jnp.float32) for x in args]


def _nnx_promote(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> tuple[Any, ...]:
    return tuple(None if x is None else jnp.asarray(x, jnp.float32) for x in args)


# Options that the two APIs name alike.
DENSE: list[dict[str, Any]] = [
    {"dtype": jnp.float32, "param_dtype": jnp.float32},
    {"precision": "highest"},
    {"kernel_init": NORMAL, "bias_init": ONES},
    {"dot_general": _reference_dot_general},
]
CONV: list[dict[str, Any]] = [
    {"use_bias": False, "padding": "VALID"},
    {"strides": 2, "padding": "CIRCULAR"},
    {"strides": (2, 1), "padding": ((1, 0), (0, 2))},
    {"input_dilation": 2, "padding": 1},
    {"kernel_dilation": (1, 2), "padding": "REFLECT"},
    {"mask": jnp.ones((3, 3, 4, 6)).at[0].set(0.0)},
    {"conv_general_dilated": _reference_conv},
    {"kernel_init": NORMAL, "bias_init": ONES, "precision": "highest"},
]
TRANSPOSED: list[dict[str, Any]] = [
    {"use_bias": False, "padding": "VALID"},
    {"strides": (2, 2), "padding": "CIRCULAR"},
    {"strides": (2, 1), "kernel_dilation": (1, 2)},
    {"mask": jnp.ones((3, 3, 4, 6)).at[0].set(0.0)},
]
NORM: list[dict[str, Any]] = [
    {"epsilon": 1e-3},
    {"use_scale": False},
    {"scale_init": NORMAL},
    {"use_fast_variance": True},
    {"use_fast_variance": False},
    {"param_dtype": jnp.float32, "dtype": jnp.float32},
]
BIASED = [{"use_bias": False}, {"bias_init": NORMAL}]
AXES: list[dict[str, Any]] = [{"reduction_axes": -1}, {"force_float32_reductions": False}]
ATTENTION: list[dict[str, Any]] = [
    {"qkv_features": 16, "out_features": 6},
    {"use_bias": False},
    {"dropout_rate": 0.5, "deterministic": False, "broadcast_dropout": False},
    {"dropout_rate": 0.5, "deterministic": True},
    {"precision": "highest", "kernel_init": NORMAL, "bias_init": ONES},
    {"out_kernel_init": NORMAL, "out_bias_init": ONES},
]

TRAINING = {"use_running_average": False}
GROUPS = {"num_groups": 2}
SIZED = {"num_groups": None, "group_size": 2}
THREE = (QUERIES, KEYS, KEYS)


def _rows(
    name: str,
    given: tuple[Any, ...],
    options: list[dict[str, Any]],
    inputs: Any,
    base: Mapping[str, Any] = MappingProxyType({}),
    method: str = "__call__",
    **call: Any,
) -> list[Case]:
    """Returns a layer with each of the options; `call` are keyword arguments of the call."""
    how: dict[str, Any] = {"inputs": inputs, "call": call, "method": method}
    return [
        layer(name, _named(option | call), *given, **how, **base, **option) for option in options
    ]


def _named(arguments: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        is_array = hasattr(value, "shape")
        return "array" if is_array else str(getattr(value, "__name__", value)).replace(" ", "")

    return ",".join(f"{name}={text(value)}" for name, value in arguments.items())


def _shared(*width: int) -> list[Case]:
    """Rows of both APIs. nnx's layers are given their `width` first."""
    kernel, image = (*width, 6, (3, 3)), (IMAGE,)
    return [
        *_rows("Conv", kernel, CONV, image),
        *_rows("ConvTranspose", kernel, TRANSPOSED, image),
        *_rows("Embed", (5, 4), [{"dtype": jnp.float32}], (TOKENS,)),
        *_rows("Embed", (5, 4), [{"embedding_init": NORMAL}], (ROWS,), method="attend"),
        *_rows("LayerNorm", width, [*NORM, *BIASED], image),
        *_rows("RMSNorm", width, NORM, image),
        *_rows("GroupNorm", width, [*NORM, *BIASED], image, GROUPS),
        *_rows("GroupNorm", width, [{}], image, SIZED),
        *_rows("InstanceNorm", width, [*NORM, *BIASED], image),
        *_rows("BatchNorm", width, [*NORM, *BIASED, {"momentum": 0.5}], image, TRAINING),
        *_rows("BatchNorm", width, NORM, image, {"use_running_average": True}),
    ]


HEADS = {"num_heads": 2}
NNX_HEADS = {"num_heads": 2, "in_features": 8, "decode": False}
_DOT = "MultiHeadDotProductAttention"

LINEN: list[Case] = [
    *_rows("Dense", (3,), [*DENSE, {"promote_dtype": _linen_promote}], (ROWS,)),
    *_rows("Dense", (3,), [{"dot_general_cls": lambda: _reference_dot_general}], (ROWS,)),
    *_rows("DenseGeneral", ((3, 2),), [*DENSE, {"axis": (1, -1)}], (IMAGE,)),
    *_rows("Einsum", ((4, 3), "bsi,io->bso"), [{"use_bias": False}], (SEQUENCE,)),
    *_rows("ConvLocal", (6, (3, 3)), [{"padding": "VALID"}, {"strides": 2}], (IMAGE,)),
    *_rows("ConvTranspose", (4, (3, 3)), [{"transpose_kernel": True}], (IMAGE,)),
    *_shared(),
    *_rows("LayerNorm", (), AXES, (IMAGE,)),
    *_rows("RMSNorm", (), AXES, (IMAGE,)),
    *_rows("BatchNorm", (), [{"axis": 1}], (IMAGE,), TRAINING),
    *_rows(_DOT, (), ATTENTION, THREE, HEADS),
    *_rows(_DOT, (), [{"qkv_dot_general": _reference_dot_general}], (QUERIES,), HEADS),
    *_rows("MultiHeadAttention", (), [{"normalize_qk": True}], (QUERIES,), HEADS, mask=CAUSAL),
    *_rows("Dropout", (0.5,), [{"broadcast_dims": (1,)}], (ROWS,), {"deterministic": False}),
    *_rows("Dropout", (1.0,), [{}], (ROWS,), {"deterministic": False}),
]

NNX: list[Case] = [
    *_rows("Linear", (4, 3), [*DENSE, {"promote_dtype": _nnx_promote}], (ROWS,)),
    *_rows("Linear", (4, 3), [{"preferred_element_type": jnp.float32}], (ROWS,)),
    *_rows("LinearGeneral", (4, (3, 2)), DENSE, (IMAGE,)),
    *_rows("LinearGeneral", ((5, 4), 3), [{"axis": (1, -1)}], (IMAGE,)),
    *_rows("Einsum", ("bsi,io->bso", (4, 3)), [{"bias_shape": None}], (SEQUENCE,)),
    *_shared(4),
    *_rows("LayerNorm", (4,), [{"reduction_axes": (1, 2, 3)}, {"reduction_axes": -1}], (IMAGE,)),
    *_rows("BatchNorm", (4,), [{}], (IMAGE,), use_running_average=True),
    *_rows("BatchNorm", (4,), [{}], (IMAGE,), use_running_average=False),
    *_rows("MultiHeadAttention", (), ATTENTION, THREE, NNX_HEADS),
    *_rows("Dropout", (0.5,), [{"broadcast_dims": (1,)}], (ROWS,)),
]

OPTIONS = [("linen", case) for case in LINEN] + [("nnx", case) for case in NNX]

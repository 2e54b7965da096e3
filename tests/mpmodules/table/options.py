"""Options of layers that Flax has too, in which no dtype is in question: rows beside the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.mpmodules.table.cases import CAUSAL, IMAGE, KEYS, QUERIES, ROWS, SEQUENCE, TOKENS, Case

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


# Options that the two wings name alike, as (class, arguments, inputs, keyword arguments of the
# call).
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

Options = list[dict[str, Any]]


def _rows(cls: str, base: dict[str, Any], options: Options, inputs: Any, **call: Any) -> list[Case]:
    """Returns a layer with each of the options; `call` are keyword arguments of the call."""
    method = call.pop("method", "__call__")

    def made(arguments: dict[str, Any]) -> Callable[..., Any]:
        def make(modules: Any, rngs: Any = None, **dtypes: Any) -> Any:
            keys = {} if rngs is None else {"rngs": rngs}
            return getattr(modules, cls)(**arguments, **keys, **dtypes)

        return make

    return [
        Case(cls, _named(option | call), made(base | option), inputs, call, method)
        for option in options
    ]


def _named(arguments: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        is_array = hasattr(value, "shape")
        return "array" if is_array else str(getattr(value, "__name__", value)).replace(" ", "")

    return ",".join(f"{name}={text(value)}" for name, value in arguments.items())


def _attention_rows(options: Options, inputs: Any = (QUERIES,), **call: Any) -> list[Case]:
    return _rows("MultiHeadDotProductAttention", {"num_heads": 2}, options, inputs, **call)


def _nnx_attention_rows(options: Options, inputs: Any, **call: Any) -> list[Case]:
    base = {"num_heads": 2, "in_features": 8, "decode": False}
    return _rows("MultiHeadAttention", base, options, inputs, **call)


KERNEL = {"features": 6, "kernel_size": (3, 3)}
NNX_KERNEL = {"in_features": 4, "out_features": 6, "kernel_size": (3, 3)}
EMBED = {"num_embeddings": 5, "features": 4}
EINSUM = {"shape": (4, 3), "einsum_str": "bsi,io->bso"}
NNX_EINSUM = {"einsum_str": "bsi,io->bso", "kernel_shape": (4, 3)}
LINEAR = {"in_features": 4, "out_features": 3}
GENERAL = {"in_features": 4, "out_features": 3}
FOUR = {"num_features": 4}
TRAINING = {"use_running_average": False}

LINEN: list[Case] = [
    *_rows("Dense", {"features": 3}, [*DENSE, {"promote_dtype": _linen_promote}], (ROWS,)),
    *_rows(
        "Dense", {"features": 3}, [{"dot_general_cls": lambda: _reference_dot_general}], (ROWS,)
    ),
    *_rows("DenseGeneral", {"features": (3, 2)}, [*DENSE, {"axis": (1, -1)}], (IMAGE,)),
    *_rows("Einsum", EINSUM, [{"use_bias": False}], (SEQUENCE,)),
    *_rows("Conv", KERNEL, CONV, (IMAGE,)),
    *_rows("ConvLocal", KERNEL, [{"padding": "VALID"}, {"strides": 2}], (IMAGE,)),
    *_rows("ConvTranspose", KERNEL, TRANSPOSED, (IMAGE,)),
    *_rows("ConvTranspose", KERNEL | {"features": 4}, [{"transpose_kernel": True}], (IMAGE,)),
    *_rows("Embed", EMBED, [{"dtype": jnp.float32}], (TOKENS,)),
    *_rows("Embed", EMBED, [{"embedding_init": NORMAL}], (ROWS,), method="attend"),
    *_rows("LayerNorm", {}, [*NORM, *BIASED, *AXES], (IMAGE,)),
    *_rows("RMSNorm", {}, [*NORM, *AXES], (IMAGE,)),
    *_rows("GroupNorm", {"num_groups": 2}, [*NORM, *BIASED], (IMAGE,)),
    *_rows("GroupNorm", {"num_groups": None, "group_size": 2}, [{}], (IMAGE,)),
    *_rows("InstanceNorm", {}, [*NORM, *BIASED], (IMAGE,)),
    *_rows("BatchNorm", TRAINING, [*NORM, *BIASED, {"momentum": 0.5}, {"axis": 1}], (IMAGE,)),
    *_rows("BatchNorm", {"use_running_average": True}, NORM, (IMAGE,)),
    *_attention_rows(ATTENTION, (QUERIES, KEYS, KEYS)),
    *_attention_rows([{"qkv_dot_general": _reference_dot_general}]),
    *_rows(
        "MultiHeadAttention", {"num_heads": 2}, [{"normalize_qk": True}], (QUERIES,), mask=CAUSAL
    ),
    *_rows("Dropout", {"rate": 0.5, "deterministic": False}, [{"broadcast_dims": (1,)}], (ROWS,)),
    *_rows("Dropout", {"rate": 1.0, "deterministic": False}, [{}], (ROWS,)),
]

NNX: list[Case] = [
    *_rows("Linear", LINEAR, [*DENSE, {"promote_dtype": _nnx_promote}], (ROWS,)),
    *_rows("Linear", LINEAR, [{"preferred_element_type": jnp.float32}], (ROWS,)),
    *_rows("LinearGeneral", {"in_features": 4, "out_features": (3, 2)}, DENSE, (IMAGE,)),
    *_rows("LinearGeneral", GENERAL, [{"in_features": (5, 4), "axis": (1, -1)}], (IMAGE,)),
    *_rows("Einsum", NNX_EINSUM, [{"bias_shape": None}], (SEQUENCE,)),
    *_rows("Conv", NNX_KERNEL, CONV, (IMAGE,)),
    *_rows("ConvTranspose", NNX_KERNEL, TRANSPOSED, (IMAGE,)),
    *_rows("Embed", EMBED, [{"dtype": jnp.float32}], (TOKENS,)),
    *_rows("Embed", EMBED, [{"embedding_init": NORMAL}], (ROWS,), method="attend"),
    *_rows("LayerNorm", FOUR, [*NORM, *BIASED], (IMAGE,)),
    *_rows("LayerNorm", FOUR, [{"reduction_axes": (1, 2, 3)}, {"reduction_axes": (-1,)}], (IMAGE,)),
    *_rows("RMSNorm", FOUR, NORM, (IMAGE,)),
    *_rows("GroupNorm", FOUR | {"num_groups": 2}, [*NORM, *BIASED], (IMAGE,)),
    *_rows("GroupNorm", FOUR | {"num_groups": None, "group_size": 2}, [{}], (IMAGE,)),
    *_rows("InstanceNorm", FOUR, [*NORM, *BIASED], (IMAGE,)),
    *_rows("BatchNorm", FOUR, [*NORM, *BIASED, {"momentum": 0.5}], (IMAGE,)),
    *_rows("BatchNorm", FOUR | {"use_running_average": True}, NORM[:2], (IMAGE,)),
    *_rows("BatchNorm", FOUR, [{}], (IMAGE,), use_running_average=True),
    *_rows("BatchNorm", FOUR, [{}], (IMAGE,), use_running_average=False),
    *_nnx_attention_rows(ATTENTION, (QUERIES, KEYS, KEYS)),
    *_rows("Dropout", {"rate": 0.5}, [{"broadcast_dims": (1,)}], (ROWS,)),
]

OPTIONS = [("linen", case) for case in LINEN] + [("nnx", case) for case in NNX]

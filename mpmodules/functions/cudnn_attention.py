"""cuDNN's attention for NVIDIA GPUs: JAX's call of it, with names for what backward keeps.

`jax.nn.dot_product_attention` asks for cuDNN's version while it is traced. A program for a GPU that
need not be there is traced without that library, by the function that JAX calls next.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from mpmodules.functions.splash_attention import RESIDUALS
from policy.core.dtypes import backend_of
from policy.core.scope import current_scope

Array = jax.Array

_VERSION = 91000  # of cuDNN, ahead of time: 9.10, as in `gpu_target_config.txtpb`


def widest_head() -> int:
    """Returns the widest head that the kernel takes on the device that programs are traced for.

    0 where there is no such kernel. Ahead of time it is at most 128, since JAX compares wider heads
    with the device of this process.

    Source: cuDNN's documentation, "Fused flash attention": compute capability 8.0 and later, 256
    from 9.0 on.
    """
    ahead = current_scope().backend
    platform, capability = ahead or backend_of(jax.local_devices()[0])
    if platform != "gpu" or not capability.replace(".", "").isdigit():  # ROCm's are names
        return 0
    major = int(capability.split(".")[0])
    if ahead is not None:
        return 128 if major >= 8 and _ahead_of_time() is not None else 0
    return 256 if major >= 9 else 128 if major >= 8 else 0


def cudnn_attention(
    kinds: tuple[str, ...], is_causal: bool, query: Array, key: Array, value: Array, *biases: Array
) -> Array:
    """Computes softmax(q k^T / sqrt(H) + bias) v in one kernel.

    Its residuals are named "attention", for the policies of `jax.checkpoint`.

    Args:
      kinds: of each of `biases`, "bias" or "mask".
      is_causal: masks out the keys after each query.
      query: (B..., T, N, H); `key` and `value`: (B..., S, K, H), half precision.
      biases: (B or 1..., N or 1, T or 1, S or 1); a bias is added to the logits, and a mask, bool,
        masks a pair out where it is False.

    Returns:
      (B..., T, N, H) in the queries' dtype.
    """
    ahead = None if current_scope().backend is None else _ahead_of_time()
    attend = ahead or functools.partial(jax.nn.dot_product_attention, implementation="cudnn")

    def run(query: Array, key: Array, value: Array, *biases: Array) -> Array:
        options = {"bias": None, "mask": None, **dict(zip(kinds, biases, strict=True))}
        return attend(query, key, value, **options, is_causal=is_causal)

    operands = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    batch, lengths = query.shape[:-3], (query.shape[-3], key.shape[-3])
    wide = (_four_axes(x, batch, lengths) for x in biases)
    result: Any = _with_named_residuals(run, *operands, *wide)
    return result.reshape(query.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_named_residuals(run: Callable[..., Array], *operands: Array) -> Array:
    return run(*operands)


def _forward(run: Callable[..., Array], *operands: Array) -> tuple[Array, Any]:
    result, pullback = jax.vjp(run, *operands)
    named = checkpoint_name(result, RESIDUALS)
    of_sums = (result.shape[0], result.shape[2], result.shape[1])  # (B, N, T)

    def kept(leaf: Array) -> Array:
        if leaf is result:
            return named
        return checkpoint_name(leaf, RESIDUALS) if leaf.shape == of_sums else leaf

    return named, jax.tree.map(kept, pullback)


def _backward(run: Callable[..., Array], pullback: Any, cotangent: Array) -> tuple[Array, ...]:
    return pullback(cotangent)


_with_named_residuals.defvjp(_forward, _backward)


@functools.cache
def _ahead_of_time() -> Callable[..., Array] | None:
    """Returns the kernel for programs that are compiled without cuDNN's library; None where JAX has
    no such function.
    """
    try:
        module: Any = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        kernel, masks, combined = (
            module._dot_product_attention,
            module.MaskType,
            module.combine_bias_and_mask,
        )
        names = inspect.signature(kernel).parameters.keys()
    except (ImportError, AttributeError):
        return None
    absent = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k", "page_table_v")
    fixed: dict[str, Any] = {
        "seed": 42,
        "dropout_rate": 0.0,
        "layout": 0,  # (B, T, N, H)
        "sliding_window_length": None,
        "score_mod": None,
        "score_mod_args": (),
        "cudnn_version": _VERSION,
        "return_residual": False,
    }
    varied = ("query", "key", "value", "bias", "scale", "variadic_args", "mask_type")
    if not names <= {*absent, *fixed, *varied}:
        return None

    def attend(
        query: Array, key: Array, value: Array, *, bias: Any, mask: Any, is_causal: bool
    ) -> Array:
        unused = jnp.zeros(0, query.dtype)
        bias = combined(bias, mask, query.dtype)
        given: dict[str, Any] = {
            **fixed,
            **dict.fromkeys(absent, unused),
            "query": query,
            "key": key,
            "value": value,
            "bias": unused if bias is None else bias,
            "scale": 1.0 / np.sqrt(query.shape[-1]),
            "variadic_args": (bias is not None,) * 2,  # there is a bias, and its gradient
            "mask_type": masks.CAUSAL if is_causal else masks.NO_MASK,
        }
        return kernel(**{name: given[name] for name in names})

    return attend


def _four_axes(x: Array, batch: Sequence[int], lengths: tuple[int, int]) -> Array:
    """Broadcasts a bias or mask (B or 1..., N or 1, T, S) to (B, N, T, S); only B and N may stay
    1.
    """
    x = jnp.broadcast_to(x, (*x.shape[:-2], *lengths))
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return jnp.broadcast_to(x, (*batch, *x.shape[-3:])).reshape(-1, *x.shape[-3:])

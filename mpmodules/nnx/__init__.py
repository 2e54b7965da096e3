"""`flax.nnx` with dtype policies: all that it exports, with layers that obey policies."""

from __future__ import annotations

from typing import Any

import flax.nnx as _flax_nnx
from flax.nnx import *  # ours below replace what they name

from mpmodules.calls.classes import upstream_attribute as _upstream_attribute
from mpmodules.functions.reductions import (
    avg_pool,
    log_sigmoid,
    log_softmax,
    logsumexp,
    max_pool,
    min_pool,
    pool,
    softmax,
    softplus,
    standardize,
)
from mpmodules.nnx._layers.attention import MultiHeadAttention
from mpmodules.nnx._layers.dot_product_attention import dot_product_attention
from mpmodules.nnx._layers.elementwise import Dropout, PReLU, Sequential
from mpmodules.nnx._layers.linear import (
    Conv,
    ConvTranspose,
    Einsum,
    Embed,
    Linear,
    LinearGeneral,
    LoRA,
    LoRALinear,
)
from mpmodules.nnx._layers.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
    SpectralNorm,
    WeightNorm,
)
from mpmodules.nnx._layers.recurrent import (
    Bidirectional,
    GRUCell,
    LSTMCell,
    OptimizedLSTMCell,
    RNN,
    RNNCellBase,
    SimpleCell,
)
from mpmodules.nnx._module import Module
from mpmodules.nnx._port import apply_policy
from mpmodules.nnx._quantized import QuantizedParam
from mpmodules.nnx._summary import tabulate
from mpmodules.nnx._training import grad, ModelAndOptimizer, Optimizer, value_and_grad

if hasattr(_flax_nnx, "RoPE"):  # flax 0.12.12 and later
    from mpmodules.nnx._layers.newer_flax import RoPE, dot_product_attention_with_rope

if hasattr(_flax_nnx, "EMA"):  # flax 0.12.12 and later
    from mpmodules.nnx._layers.newer_flax import EMA


def __getattr__(name: str) -> Any:
    return _upstream_attribute(_flax_nnx, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_flax_nnx)})

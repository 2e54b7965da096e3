"""`flax.nnx` with dtype policies: all that it exports, with layers that obey policies."""

from __future__ import annotations

import importlib as _importlib
from importlib import util as _util
from typing import Any

import flax.nnx as _flax_nnx
from flax.nnx import *  # ours below replace what they name

from mpmodules.functions.activations import log_sigmoid as log_sigmoid
from mpmodules.functions.activations import log_softmax as log_softmax
from mpmodules.functions.activations import logsumexp as logsumexp
from mpmodules.functions.activations import softmax as softmax
from mpmodules.functions.activations import softplus as softplus
from mpmodules.functions.activations import standardize as standardize
from mpmodules.nnx._layers.activations import PReLU as PReLU
from mpmodules.nnx._layers.attention import MultiHeadAttention as MultiHeadAttention
from mpmodules.nnx._layers.dot_product_attention import (
    dot_product_attention as dot_product_attention,
)
from mpmodules.nnx._layers.containers import Sequential as Sequential
from mpmodules.nnx._layers.convolution import Conv as Conv
from mpmodules.nnx._layers.convolution import ConvTranspose as ConvTranspose
from mpmodules.nnx._layers.embedding import Embed as Embed
from mpmodules.nnx._gradients import grad as grad
from mpmodules.nnx._gradients import value_and_grad as value_and_grad
from mpmodules.nnx._layers.linear import Einsum as Einsum
from mpmodules.nnx._layers.linear import Linear as Linear
from mpmodules.nnx._layers.linear import LinearGeneral as LinearGeneral
from mpmodules.nnx._layers.lora import LoRA as LoRA
from mpmodules.nnx._layers.lora import LoRALinear as LoRALinear
from mpmodules.nnx._module import Module as Module
from mpmodules.nnx._layers.normalization import BatchNorm as BatchNorm
from mpmodules.nnx._layers.normalization import GroupNorm as GroupNorm
from mpmodules.nnx._layers.normalization import InstanceNorm as InstanceNorm
from mpmodules.nnx._layers.normalization import LayerNorm as LayerNorm
from mpmodules.nnx._layers.normalization import RMSNorm as RMSNorm
from mpmodules.nnx._optimizer import ModelAndOptimizer as ModelAndOptimizer
from mpmodules.nnx._optimizer import Optimizer as Optimizer
from mpmodules.nnx._port import apply_policy as apply_policy
from mpmodules.nnx._layers.recurrent import RNN as RNN
from mpmodules.nnx._layers.recurrent import Bidirectional as Bidirectional
from mpmodules.nnx._layers.recurrent import GRUCell as GRUCell
from mpmodules.nnx._layers.recurrent import LSTMCell as LSTMCell
from mpmodules.nnx._layers.recurrent import OptimizedLSTMCell as OptimizedLSTMCell
from mpmodules.nnx._layers.recurrent import RNNCellBase as RNNCellBase
from mpmodules.nnx._layers.recurrent import SimpleCell as SimpleCell
from mpmodules.nnx._layers.stochastic import Dropout as Dropout
from mpmodules.nnx._summary import tabulate as tabulate
from mpmodules.nnx._layers.weight_norms import SpectralNorm as SpectralNorm
from mpmodules.nnx._layers.weight_norms import WeightNorm as WeightNorm
from mpmodules.functions.pooling import avg_pool as avg_pool
from mpmodules.functions.pooling import max_pool as max_pool
from mpmodules.functions.pooling import min_pool as min_pool
from mpmodules.functions.pooling import pool as pool

if hasattr(_flax_nnx, "RoPE"):  # flax 0.12.12 and later
    from mpmodules.nnx._layers.rotary import RoPE as RoPE
    from mpmodules.nnx._layers.rotary import (
        dot_product_attention_with_rope as dot_product_attention_with_rope,
    )

if hasattr(_flax_nnx, "EMA"):  # flax 0.12.12 and later
    from mpmodules.nnx._layers.ema import EMA as EMA


def __getattr__(name: str) -> Any:
    try:
        return getattr(_flax_nnx, name)
    except AttributeError:
        if name.startswith("_") or _util.find_spec(f"flax.nnx.{name}") is None:
            raise
        # A submodule that Flax does not import by itself.
        return _importlib.import_module(f"flax.nnx.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_flax_nnx)})

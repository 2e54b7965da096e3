"""`flax.linen` with dtype policies: all that it exports, with layers that obey policies."""

from __future__ import annotations

import importlib as _importlib
from importlib import util as _util
from typing import Any

import flax.linen as _flax_linen
from flax.linen import *  # ours below replace what they name

from mpmodules.functions.activations import log_sigmoid as log_sigmoid
from mpmodules.functions.activations import log_softmax as log_softmax
from mpmodules.functions.activations import logsumexp as logsumexp
from mpmodules.functions.activations import softmax as softmax
from mpmodules.functions.activations import softplus as softplus
from mpmodules.functions.activations import standardize as standardize
from mpmodules.functions.activations import (
    standardize as normalize,
)  # Flax's deprecated name for it
from mpmodules.linen._layers.activations import PReLU as PReLU
from mpmodules.linen._layers.attention import MultiHeadAttention as MultiHeadAttention
from mpmodules.linen._layers.attention import (
    MultiHeadDotProductAttention as MultiHeadDotProductAttention,
)
from mpmodules.linen._layers.attention import SelfAttention as SelfAttention
from mpmodules.linen._layers.dot_product_attention import (
    dot_product_attention as dot_product_attention,
)
from mpmodules.linen._layers.dot_product_attention import (
    dot_product_attention_weights as dot_product_attention_weights,
)
from mpmodules.linen._layers.containers import Sequential as Sequential
from mpmodules.linen._layers.convolution import Conv as Conv
from mpmodules.linen._layers.convolution import ConvLocal as ConvLocal
from mpmodules.linen._layers.convolution import ConvTranspose as ConvTranspose
from mpmodules.linen._layers.embedding import Embed as Embed
from mpmodules.linen._layers.linear import Dense as Dense
from mpmodules.linen._layers.linear import DenseGeneral as DenseGeneral
from mpmodules.linen._layers.linear import Einsum as Einsum
from mpmodules.linen._module import Module as Module
from mpmodules.linen._layers.normalization import BatchNorm as BatchNorm
from mpmodules.linen._layers.normalization import GroupNorm as GroupNorm
from mpmodules.linen._layers.normalization import InstanceNorm as InstanceNorm
from mpmodules.linen._layers.normalization import LayerNorm as LayerNorm
from mpmodules.linen._layers.normalization import RMSNorm as RMSNorm
from mpmodules.linen._port import apply_policy as apply_policy
from mpmodules.linen._layers.recurrent import RNN as RNN
from mpmodules.linen._layers.recurrent import Bidirectional as Bidirectional
from mpmodules.linen._layers.recurrent import ConvLSTMCell as ConvLSTMCell
from mpmodules.linen._layers.recurrent import GRUCell as GRUCell
from mpmodules.linen._layers.recurrent import LSTMCell as LSTMCell
from mpmodules.linen._layers.recurrent import MGUCell as MGUCell
from mpmodules.linen._layers.recurrent import OptimizedLSTMCell as OptimizedLSTMCell
from mpmodules.linen._layers.recurrent import RNNCellBase as RNNCellBase
from mpmodules.linen._layers.recurrent import SimpleCell as SimpleCell
from mpmodules.linen._layers.stochastic import Dropout as Dropout
from mpmodules.linen._summary import tabulate as tabulate
from mpmodules.linen._layers.weight_norms import SpectralNorm as SpectralNorm
from mpmodules.linen._layers.weight_norms import WeightNorm as WeightNorm
from mpmodules.functions.pooling import avg_pool as avg_pool
from mpmodules.functions.pooling import max_pool as max_pool
from mpmodules.functions.pooling import pool as pool


def __getattr__(name: str) -> Any:
    try:
        return getattr(_flax_linen, name)
    except AttributeError:
        if name.startswith("_") or _util.find_spec(f"flax.linen.{name}") is None:
            raise
        # A submodule that Flax does not import by itself.
        return _importlib.import_module(f"flax.linen.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_flax_linen)})

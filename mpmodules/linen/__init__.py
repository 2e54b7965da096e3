"""`flax.linen` with dtype policies: all that it exports, with layers that obey policies."""

from __future__ import annotations

from typing import Any

import flax.linen as _flax_linen
from flax.linen import *  # ours below replace what they name

from mpmodules.calls.classes import upstream_attribute as _upstream_attribute
from mpmodules.functions.reductions import (
    avg_pool,
    log_sigmoid,
    log_softmax,
    logsumexp,
    max_pool,
    pool,
    softmax,
    softplus,
    standardize,
)
from mpmodules.linen._layers.attention import (
    MultiHeadAttention,
    MultiHeadDotProductAttention,
    SelfAttention,
)
from mpmodules.linen._layers.dot_product_attention import (
    dot_product_attention,
    dot_product_attention_weights,
)
from mpmodules.linen._layers.elementwise import Dropout, PReLU, Sequential
from mpmodules.linen._layers.linear import (
    Conv,
    ConvLocal,
    ConvTranspose,
    Dense,
    DenseGeneral,
    Einsum,
    Embed,
)
from mpmodules.linen._layers.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
    SpectralNorm,
    WeightNorm,
)
from mpmodules.linen._layers.recurrent import (
    Bidirectional,
    ConvLSTMCell,
    GRUCell,
    LSTMCell,
    MGUCell,
    OptimizedLSTMCell,
    RNN,
    RNNCellBase,
    SimpleCell,
)
from mpmodules.linen._module import Module
from mpmodules.linen._port import apply_policy
from mpmodules.linen._summary import tabulate

# Flax's deprecated name for it.
from mpmodules.functions.reductions import standardize as normalize


def __getattr__(name: str) -> Any:
    return _upstream_attribute(_flax_linen, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_flax_linen)})

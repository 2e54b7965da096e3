"""Every layer of both wings, in each setting that changes what it computes: the rows of the table
of contracts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.nnx
import numpy as np

_rng = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _rng.normal(size=shape).astype(np.float32)


ROWS, IMAGE, SEQUENCE = _normal(2, 3, 4), _normal(2, 5, 5, 4), _normal(2, 5, 4)
QUERIES, KEYS = _normal(2, 5, 8), _normal(2, 3, 8)
TOKENS = np.asarray([[0, 3, 3], [3, 4, 0]], np.int32)
CAUSAL = np.tril(np.ones((2, 1, 5, 5), bool))


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer in one setting.

    Attributes:
      layer: its name in the catalogue.
      setting: what the case is about, beside the layer's name.
      make: makes it, from Flax's wing or from ours, with the dtype arguments given. linen:
        ``make(nn, **dtypes)``; nnx: ``make(nnx, rngs, **dtypes)``.
      inputs: what it is initialised, and called, with. A cell's are its carry and these.
      call: keyword arguments of the call.
      method: what is called.
      steps: what it is called with where that differs from what it is initialised with.
      prepare: what is done to an nnx layer before its call.
      is_module: whether its call is a boundary as a root under a scope: containers and attention
        are modules.
    """

    layer: str
    setting: str
    make: Callable[..., Any]
    inputs: tuple[np.ndarray, ...] = (ROWS,)
    call: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    method: str = "__call__"
    steps: tuple[np.ndarray, ...] | None = None
    prepare: Callable[[Any], Any] | None = None
    is_module: bool = False

    @property
    def called_with(self) -> tuple[np.ndarray, ...]:
        return self.inputs if self.steps is None else self.steps

    @property
    def is_cell(self) -> bool:
        return self.layer.endswith("Cell")

    def __str__(self) -> str:
        return f"{self.layer} {self.setting}".strip()


_DROPOUT = {"dropout_rate": 0.5, "deterministic": False}
_MASKED = {"mask": IMAGE > -0.5}
_ALL_AT_ONCE = {"sow_weights": True, "mask": CAUSAL}
_LENGTHS = {"seq_lengths": np.asarray([5, 2], np.int32)}
_CELLS: dict[str, Any] = {
    "SimpleCell": {},
    "SimpleCell residual": {"residual": True},
    "GRUCell": {},
    "LSTMCell": {},
    "OptimizedLSTMCell": {},
}

# --------------------------------------------------------------------------------------------------
# linen
# --------------------------------------------------------------------------------------------------


def _linen(
    layer: str, setting: str, *given: Any, inputs: Any = (ROWS,), call: Any = (), **arguments: Any
) -> Case:
    """A layer of linen, made from positional arguments and keyword arguments."""
    method = arguments.pop("method", "__call__")

    def make(nn: Any, **dtypes: Any) -> Any:
        return getattr(nn, layer)(*given, **arguments, **dtypes)

    return Case(layer, setting, make, inputs, call=dict(call), method=method)


def _linen_attention(
    layer: str, setting: str, inputs: tuple[np.ndarray, ...], *, call: Any = (), **arguments: Any
) -> Case:
    case = _linen(layer, setting, inputs=inputs, call=call, num_heads=2, **arguments)
    steps = (QUERIES[:, :1],) if arguments.get("decode") else None
    return dataclasses.replace(case, steps=steps, is_module=True)


def _linen_norm(layer: str, setting: str = "", *, call: Any = (), **arguments: Any) -> Case:
    return _linen(layer, setting, inputs=(IMAGE,), call=call, **arguments)


def _linen_spectral(setting: str) -> Case:
    def make(nn: Any, **dtypes: Any) -> Any:
        return nn.SpectralNorm(nn.Dense(6, **dtypes), **dtypes)

    call = {"update_stats": setting == "in training"}
    return Case("SpectralNorm", setting, make, call=call, is_module=True)


_LINEN_CELLS: dict[str, Any] = _CELLS | {
    "MGUCell": {},
    "MGUCell without reset": {"reset_gate": False},
    "ConvLSTMCell": {"kernel_size": (2,)},
}


def _linen_cell(name: str, nn: Any, **dtypes: Any) -> Any:
    return getattr(nn, name.partition(" ")[0])(3, **_LINEN_CELLS[name], **dtypes)


def _linen_recurrent(name: str) -> list[Case]:
    layer, _, setting = name.partition(" ")
    step, steps = ROWS[:, 0], SEQUENCE
    if layer == "ConvLSTMCell":
        step, steps = ROWS, SEQUENCE[:, :, None]

    def rnn(nn: Any, **dtypes: Any) -> Any:
        return nn.RNN(_linen_cell(name, nn, **dtypes))

    return [
        Case(layer, setting, lambda nn, **dtypes: _linen_cell(name, nn, **dtypes), (step,)),
        Case("RNN", f"over {name}", rnn, (steps,), is_module=True),
    ]


def _linen_lengths(nn: Any, **dtypes: Any) -> Any:
    return nn.RNN(nn.GRUCell(3, **dtypes), reverse=True, keep_order=True)


def _linen_bidirectional(nn: Any, **dtypes: Any) -> Any:
    return nn.Bidirectional(nn.RNN(nn.LSTMCell(3, **dtypes)), nn.RNN(nn.GRUCell(3, **dtypes)))


def _linen_sequential(nn: Any, **dtypes: Any) -> Any:
    layers = [nn.Dense(6, **dtypes), nn.LayerNorm(**dtypes), nn.relu, nn.Dense(4, **dtypes)]
    return nn.Sequential(layers)


_DOT = "MultiHeadDotProductAttention"
_SQUARE = (3, 3)

LINEN = [
    _linen("Dense", "", 6),
    _linen("Dense", "without bias", 6, use_bias=False),
    _linen("DenseGeneral", "", (2, 3), axis=-1),
    _linen("DenseGeneral", "over batches", 3, batch_dims=(0,)),
    _linen("Einsum", "", (4, 6), "abc,cd->abd"),
    _linen("Conv", "", 6, _SQUARE, inputs=(IMAGE,)),
    _linen("Conv", "in groups", 6, _SQUARE, inputs=(IMAGE,), feature_group_count=2),
    _linen("Conv", "causal", 6, (3,), inputs=(SEQUENCE,), padding="CAUSAL"),
    _linen("Conv", "circular", 6, _SQUARE, inputs=(IMAGE,), padding="CIRCULAR"),
    _linen("ConvLocal", "", 2, _SQUARE, inputs=(IMAGE,)),
    _linen("ConvTranspose", "", 6, _SQUARE, inputs=(IMAGE,), strides=(2, 2)),
    _linen("ConvTranspose", "circular", 6, _SQUARE, inputs=(IMAGE,), padding="CIRCULAR"),
    _linen("Embed", "", 5, 4, inputs=(TOKENS,)),
    _linen("Embed", "of one token", 1, 4, inputs=(TOKENS * 0,)),
    _linen("Embed", "attend", 5, 4, method="attend"),
    _linen_norm("LayerNorm"),
    _linen_norm("LayerNorm", "over an image", reduction_axes=(1, 2, 3), feature_axes=(2, 3)),
    _linen_norm("LayerNorm", "one pass", use_fast_variance=True),
    _linen_norm("RMSNorm"),
    _linen_norm("GroupNorm", num_groups=2),
    _linen_norm("InstanceNorm"),
    *(_linen_norm(name, "masked", call=_MASKED) for name in ("LayerNorm", "RMSNorm")),
    _linen_norm("InstanceNorm", "masked", call=_MASKED),
    _linen_norm("GroupNorm", "masked", num_groups=2, call=_MASKED),
    _linen_norm("BatchNorm", "in training", use_running_average=False),
    _linen_norm("BatchNorm", "in evaluation", use_running_average=True),
    _linen_norm("BatchNorm", "masked", use_running_average=False, call=_MASKED),
    Case("WeightNorm", "", lambda nn, **kw: nn.WeightNorm(nn.Dense(6, **kw), **kw), is_module=True),
    _linen_spectral("in training"),
    _linen_spectral("in evaluation"),
    _linen_attention(_DOT, "", (QUERIES, KEYS, KEYS)),
    _linen_attention(_DOT, "with dropout", (QUERIES, KEYS, KEYS), **_DROPOUT),
    _linen_attention(_DOT, "sown", (QUERIES,), call={"sow_weights": True}),
    _linen_attention(_DOT, "masked", (QUERIES,), call={"mask": CAUSAL}),
    _linen_attention(_DOT, "decoding", (QUERIES,), decode=True),
    _linen_attention(_DOT, "normalised", (QUERIES,), normalize_qk=True),
    _linen_attention(_DOT, "forced", (QUERIES,), force_fp32_for_softmax=True),
    _linen_attention("MultiHeadAttention", "", (QUERIES, KEYS, KEYS)),
    _linen_attention(
        "MultiHeadAttention", "all at once", (QUERIES,), call=_ALL_AT_ONCE, **_DROPOUT
    ),
    _linen_attention("SelfAttention", "", (QUERIES,)),
    _linen_attention("SelfAttention", "decoding", (QUERIES,), decode=True),
    *(case for name in _LINEN_CELLS for case in _linen_recurrent(name)),
    Case("RNN", "of lengths", _linen_lengths, (SEQUENCE,), call=_LENGTHS, is_module=True),
    Case("Bidirectional", "", _linen_bidirectional, (SEQUENCE,), is_module=True),
    Case("Dropout", "", lambda nn, **_: nn.Dropout(0.5, deterministic=False)),
    Case("Dropout", "deterministic", lambda nn, **_: nn.Dropout(0.5, deterministic=True)),
    Case("Sequential", "", _linen_sequential, is_module=True),
    Case("PReLU", "", lambda nn, dtype=None, **kw: nn.PReLU(**kw)),
]

# --------------------------------------------------------------------------------------------------
# nnx
# --------------------------------------------------------------------------------------------------


def _nnx(
    layer: str, setting: str, *given: Any, inputs: Any = (ROWS,), call: Any = (), **arguments: Any
) -> Case:
    """A layer of nnx, made from positional arguments, keyword arguments and keys."""
    method = arguments.pop("method", "__call__")

    def make(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
        return getattr(nnx, layer)(*given, **arguments, **dtypes, rngs=rngs)

    return Case(layer, setting, make, inputs, call=dict(call), method=method)


def _nnx_norm(layer: str, setting: str = "", *, call: Any = (), **arguments: Any) -> Case:
    return _nnx(layer, setting, 4, inputs=(IMAGE,), call=call, **arguments)


def _nnx_attention(
    setting: str, inputs: tuple[np.ndarray, ...] = (QUERIES,), *, call: Any = (), **arguments: Any
) -> Case:
    decode = arguments.setdefault("decode", False)
    case = _nnx("MultiHeadAttention", setting, 2, 8, inputs=inputs, call=call, **arguments)
    prepare = (lambda layer: layer.init_cache(QUERIES.shape)) if decode else None
    steps = (QUERIES[:, :1],) if decode else None
    return dataclasses.replace(case, steps=steps, prepare=prepare, is_module=True)


def _nnx_spectral(setting: str) -> Case:
    def make(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
        return nnx.SpectralNorm(nnx.Linear(4, 6, **dtypes, rngs=rngs), **dtypes, rngs=rngs)

    call = {"update_stats": setting == "in training"}
    return Case("SpectralNorm", setting, make, call=call, is_module=True)


def _nnx_weight_norm(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    return nnx.WeightNorm(nnx.Linear(4, 6, **dtypes, rngs=rngs), **dtypes, rngs=rngs)


def _nnx_cell(name: str, nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    return getattr(nnx, name.partition(" ")[0])(4, 3, **_CELLS[name], **dtypes, rngs=rngs)


def _nnx_rnn(name: str, nnx: Any, rngs: Any, dtypes: Any, **arguments: Any) -> Any:
    return nnx.RNN(_nnx_cell(name, nnx, rngs, **dtypes), **arguments, rngs=rngs)


def _nnx_recurrent(name: str) -> list[Case]:
    layer, _, setting = name.partition(" ")

    def cell(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
        return _nnx_cell(name, nnx, rngs, **dtypes)

    def rnn(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
        return _nnx_rnn(name, nnx, rngs, dtypes)

    return [
        Case(layer, setting, cell, (ROWS[:, 0],)),
        Case("RNN", f"over {name}", rnn, (SEQUENCE,), is_module=True),
    ]


def _nnx_lengths(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    return _nnx_rnn("GRUCell", nnx, rngs, dtypes, reverse=True, keep_order=True)


def _nnx_bidirectional(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    forward = _nnx_rnn("LSTMCell", nnx, rngs, dtypes)
    return nnx.Bidirectional(forward, _nnx_rnn("GRUCell", nnx, rngs, dtypes), rngs=rngs)


def _nnx_sequential(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    norm = nnx.LayerNorm(6, **dtypes, rngs=rngs)
    first, last = (nnx.Linear(*sizes, **dtypes, rngs=rngs) for sizes in ((4, 6), (6, 4)))
    return nnx.Sequential(first, norm, nnx.relu, last)


def _lora_over_a_layer(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    base = nnx.Linear(4, 6, **dtypes, rngs=rngs)
    return nnx.LoRA(4, 2, 6, base_module=base, **dtypes, rngs=rngs)


NNX = [
    _nnx("Linear", "", 4, 6),
    _nnx("Linear", "without bias", 4, 6, use_bias=False),
    _nnx("LinearGeneral", "", 4, (2, 3)),
    _nnx("LinearGeneral", "over batches", 4, 3, batch_axis={0: 2}),
    _nnx("Einsum", "", "abc,cd->abd", (4, 6), (6,)),
    _nnx("Conv", "", 4, 6, _SQUARE, inputs=(IMAGE,)),
    _nnx("Conv", "in groups", 4, 6, _SQUARE, inputs=(IMAGE,), feature_group_count=2),
    _nnx("Conv", "causal", 4, 6, (3,), inputs=(SEQUENCE,), padding="CAUSAL"),
    _nnx("Conv", "circular", 4, 6, _SQUARE, inputs=(IMAGE,), padding="CIRCULAR"),
    _nnx("ConvTranspose", "", 4, 6, _SQUARE, inputs=(IMAGE,), strides=(2, 2)),
    _nnx("ConvTranspose", "circular", 4, 6, _SQUARE, inputs=(IMAGE,), padding="CIRCULAR"),
    _nnx("Embed", "", 5, 4, inputs=(TOKENS,)),
    _nnx("Embed", "of one token", 1, 4, inputs=(TOKENS * 0,)),
    _nnx("Embed", "attend", 5, 4, method="attend"),
    _nnx_norm("LayerNorm"),
    _nnx_norm("LayerNorm", "over an image", reduction_axes=(1, 2, 3)),
    _nnx_norm("LayerNorm", "one pass", use_fast_variance=True),
    _nnx_norm("RMSNorm"),
    _nnx_norm("GroupNorm", num_groups=2),
    _nnx_norm("InstanceNorm"),
    *(_nnx_norm(name, "masked", call=_MASKED) for name in ("LayerNorm", "RMSNorm")),
    _nnx_norm("InstanceNorm", "masked", call=_MASKED),
    _nnx_norm("GroupNorm", "masked", num_groups=2, call=_MASKED),
    _nnx_norm("BatchNorm", "in training", use_running_average=False),
    _nnx_norm("BatchNorm", "in evaluation", use_running_average=True),
    _nnx_norm("BatchNorm", "masked", use_running_average=False, call=_MASKED),
    Case("WeightNorm", "", _nnx_weight_norm, is_module=True),
    _nnx_spectral("in training"),
    _nnx_spectral("in evaluation"),
    _nnx_attention("", (QUERIES, KEYS, KEYS)),
    _nnx_attention("with dropout", (QUERIES, KEYS, KEYS), **_DROPOUT),
    _nnx_attention("sown", call={"sow_weights": True}),
    _nnx_attention("causal", call={"is_causal": True}),
    _nnx_attention("masked", call={"mask": CAUSAL}),
    _nnx_attention("of grouped queries", num_kv_heads=1),
    _nnx_attention("decoding", decode=True),
    _nnx_attention("normalised", normalize_qk=True),
    _nnx_attention("all at once", call=_ALL_AT_ONCE, num_kv_heads=1, **_DROPOUT),
    *(case for name in _CELLS for case in _nnx_recurrent(name)),
    Case("RNN", "of lengths", _nnx_lengths, (SEQUENCE,), call=_LENGTHS, is_module=True),
    Case("Bidirectional", "", _nnx_bidirectional, (SEQUENCE,), is_module=True),
    Case("Dropout", "", lambda nnx, r, **_: nnx.Dropout(0.5, deterministic=False, rngs=r)),
    Case("Dropout", "deterministic", lambda nnx, r, **_: nnx.Dropout(0.5, deterministic=True)),
    Case("Sequential", "", _nnx_sequential, is_module=True),
    Case("PReLU", "", lambda nnx, r, **kw: nnx.PReLU(**kw)),
    _nnx("LoRA", "", 4, 2, 6),
    Case("LoRA", "over a layer", _lora_over_a_layer),
    _nnx("LoRALinear", "", 4, 6, lora_rank=2),
]
if hasattr(flax.nnx, "RoPE"):
    _POSITIONS = {"input_positions": np.asarray([3.0, 1.0, 2.0], np.float32)}
    NNX += [
        Case("RoPE", "", lambda nnx, r, **_: nnx.RoPE()),
        Case("RoPE", "of tables", lambda nnx, r, **_: nnx.RoPE(embedding_size=4, max_seq_len=8)),
        Case("RoPE", "at positions", lambda nnx, r, **_: nnx.RoPE(), call=_POSITIONS),
    ]

CASES = [("linen", case) for case in LINEN] + [("nnx", case) for case in NNX]

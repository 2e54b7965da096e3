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


# --------------------------------------------------------------------------------------------------
# linen
# --------------------------------------------------------------------------------------------------


def _attention(
    layer: str, setting: str, inputs: tuple[np.ndarray, ...], *, call: Any = (), **arguments: Any
) -> Case:
    def make(nn: Any, **dtypes: Any) -> Any:
        return getattr(nn, layer)(num_heads=2, **arguments, **dtypes)

    steps = (QUERIES[:, :1],) if arguments.get("decode") else None
    return Case(layer, setting, make, inputs, call=dict(call), steps=steps, is_module=True)


def _norm(layer: str, setting: str = "", *, call: Any = (), **arguments: Any) -> Case:
    def make(nn: Any, **dtypes: Any) -> Any:
        return getattr(nn, layer)(**arguments, **dtypes)

    return Case(layer, setting, make, (IMAGE,), call=dict(call))


_DROPOUT = {"dropout_rate": 0.5, "deterministic": False}
_DOT = "MultiHeadDotProductAttention"
_CELLS: dict[str, Any] = {
    "SimpleCell": (),
    "SimpleCell residual": {"residual": True},
    "GRUCell": (),
    "LSTMCell": (),
    "OptimizedLSTMCell": (),
}


def _linen_cell(name: str, nn: Any, **dtypes: Any) -> Any:
    layer, _, _ = name.partition(" ")
    return getattr(nn, layer)(3, **dict(_LINEN_CELLS[name]), **dtypes)


_LINEN_CELLS: dict[str, Any] = _CELLS | {
    "MGUCell": (),
    "MGUCell without reset": {"reset_gate": False},
    "ConvLSTMCell": {"kernel_size": (2,)},
}


def _linen_recurrent(name: str) -> list[Case]:
    layer, _, setting = name.partition(" ")
    step, steps = (
        (ROWS, SEQUENCE[:, :, None]) if layer == "ConvLSTMCell" else (ROWS[:, 0], SEQUENCE)
    )
    cell = Case(layer, setting, lambda nn, **dtypes: _linen_cell(name, nn, **dtypes), (step,))
    rnn = Case(
        "RNN",
        f"over {name}",
        lambda nn, **kw: nn.RNN(_linen_cell(name, nn, **kw)),
        (steps,),
        is_module=True,
    )
    return [cell, rnn]


LINEN = [
    Case("Dense", "", lambda nn, **kw: nn.Dense(6, **kw)),
    Case("Dense", "without bias", lambda nn, **kw: nn.Dense(6, use_bias=False, **kw)),
    Case("DenseGeneral", "", lambda nn, **kw: nn.DenseGeneral((2, 3), axis=-1, **kw)),
    Case(
        "DenseGeneral", "over batches", lambda nn, **kw: nn.DenseGeneral(3, batch_dims=(0,), **kw)
    ),
    Case("Einsum", "", lambda nn, **kw: nn.Einsum((4, 6), "abc,cd->abd", **kw)),
    Case("Conv", "", lambda nn, **kw: nn.Conv(6, (3, 3), **kw), (IMAGE,)),
    Case(
        "Conv",
        "in groups",
        lambda nn, **kw: nn.Conv(6, (3, 3), feature_group_count=2, **kw),
        (IMAGE,),
    ),
    Case("Conv", "causal", lambda nn, **kw: nn.Conv(6, (3,), padding="CAUSAL", **kw), (SEQUENCE,)),
    Case(
        "Conv", "circular", lambda nn, **kw: nn.Conv(6, (3, 3), padding="CIRCULAR", **kw), (IMAGE,)
    ),
    Case("ConvLocal", "", lambda nn, **kw: nn.ConvLocal(2, (3, 3), **kw), (IMAGE,)),
    Case(
        "ConvTranspose",
        "",
        lambda nn, **kw: nn.ConvTranspose(6, (3, 3), strides=(2, 2), **kw),
        (IMAGE,),
    ),
    Case(
        "ConvTranspose",
        "circular",
        lambda nn, **kw: nn.ConvTranspose(6, (3, 3), padding="CIRCULAR", **kw),
        (IMAGE,),
    ),
    Case("Embed", "", lambda nn, **kw: nn.Embed(5, 4, **kw), (TOKENS,)),
    Case("Embed", "of one token", lambda nn, **kw: nn.Embed(1, 4, **kw), (TOKENS * 0,)),
    Case("Embed", "attend", lambda nn, **kw: nn.Embed(5, 4, **kw), method="attend"),
    _norm("LayerNorm"),
    _norm("LayerNorm", "over an image", reduction_axes=(1, 2, 3), feature_axes=(2, 3)),
    _norm("LayerNorm", "one pass", use_fast_variance=True),
    _norm("RMSNorm"),
    _norm("GroupNorm", num_groups=2),
    _norm("InstanceNorm"),
    *(
        _norm(name, "masked", call={"mask": IMAGE > -0.5})
        for name in ("LayerNorm", "RMSNorm", "InstanceNorm")
    ),
    _norm("GroupNorm", "masked", num_groups=2, call={"mask": IMAGE > -0.5}),
    _norm("BatchNorm", "in training", use_running_average=False),
    _norm("BatchNorm", "in evaluation", use_running_average=True),
    _norm("BatchNorm", "masked", use_running_average=False, call={"mask": IMAGE > -0.5}),
    Case("WeightNorm", "", lambda nn, **kw: nn.WeightNorm(nn.Dense(6, **kw), **kw), is_module=True),
    Case(
        "SpectralNorm",
        "in training",
        lambda nn, **kw: nn.SpectralNorm(nn.Dense(6, **kw), **kw),
        call={"update_stats": True},
        is_module=True,
    ),
    Case(
        "SpectralNorm",
        "in evaluation",
        lambda nn, **kw: nn.SpectralNorm(nn.Dense(6, **kw), **kw),
        call={"update_stats": False},
        is_module=True,
    ),
    _attention(_DOT, "", (QUERIES, KEYS, KEYS)),
    _attention(_DOT, "with dropout", (QUERIES, KEYS, KEYS), **_DROPOUT),
    _attention(_DOT, "sown", (QUERIES,), call={"sow_weights": True}),
    _attention(_DOT, "masked", (QUERIES,), call={"mask": CAUSAL}),
    _attention(_DOT, "decoding", (QUERIES,), decode=True),
    _attention(_DOT, "normalised", (QUERIES,), normalize_qk=True),
    _attention(_DOT, "forced", (QUERIES,), force_fp32_for_softmax=True),
    _attention("MultiHeadAttention", "", (QUERIES, KEYS, KEYS)),
    _attention(
        "MultiHeadAttention",
        "all at once",
        (QUERIES,),
        call={"sow_weights": True, "mask": CAUSAL},
        **_DROPOUT,
    ),
    _attention("SelfAttention", "", (QUERIES,)),
    _attention("SelfAttention", "decoding", (QUERIES,), decode=True),
    *(case for name in _LINEN_CELLS for case in _linen_recurrent(name)),
    Case(
        "RNN",
        "of lengths",
        lambda nn, **kw: nn.RNN(nn.GRUCell(3, **kw), reverse=True, keep_order=True),
        (SEQUENCE,),
        call={"seq_lengths": np.asarray([5, 2], np.int32)},
        is_module=True,
    ),
    Case(
        "Bidirectional",
        "",
        lambda nn, **kw: nn.Bidirectional(
            nn.RNN(nn.LSTMCell(3, **kw)), nn.RNN(nn.GRUCell(3, **kw))
        ),
        (SEQUENCE,),
        is_module=True,
    ),
    Case("Dropout", "", lambda nn, **_: nn.Dropout(0.5, deterministic=False)),
    Case("Dropout", "deterministic", lambda nn, **_: nn.Dropout(0.5, deterministic=True)),
    Case(
        "Sequential",
        "",
        lambda nn, **kw: nn.Sequential(
            [nn.Dense(6, **kw), nn.LayerNorm(**kw), nn.relu, nn.Dense(4, **kw)]
        ),
        is_module=True,
    ),
    Case(
        "PReLU", "", lambda nn, **kw: nn.PReLU(**{name: kw[name] for name in kw if name != "dtype"})
    ),
]

# --------------------------------------------------------------------------------------------------
# nnx
# --------------------------------------------------------------------------------------------------


def _nnx_norm(layer: str, setting: str = "", *, call: Any = (), **arguments: Any) -> Case:
    def make(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
        return getattr(nnx, layer)(4, **arguments, **dtypes, rngs=rngs)

    return Case(layer, setting, make, (IMAGE,), call=dict(call))


def _nnx_attention(
    setting: str, inputs: tuple[np.ndarray, ...], *, call: Any = (), **arguments: Any
) -> Case:
    decode = arguments.pop("decode", False)

    def make(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
        return nnx.MultiHeadAttention(2, 8, **arguments, decode=decode, **dtypes, rngs=rngs)

    prepare = (lambda layer: layer.init_cache(QUERIES.shape)) if decode else None
    steps = (QUERIES[:, :1],) if decode else None
    return Case(
        "MultiHeadAttention",
        setting,
        make,
        inputs,
        call=dict(call),
        steps=steps,
        prepare=prepare,
        is_module=True,
    )


def _nnx_cell(name: str, nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    layer, _, _ = name.partition(" ")
    return getattr(nnx, layer)(4, 3, **dict(_CELLS[name]), **dtypes, rngs=rngs)


def _nnx_recurrent(name: str) -> list[Case]:
    layer, _, setting = name.partition(" ")

    def rnn(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
        return nnx.RNN(_nnx_cell(name, nnx, rngs, **dtypes), rngs=rngs)

    return [
        Case(
            layer,
            setting,
            lambda nnx, rngs, **dtypes: _nnx_cell(name, nnx, rngs, **dtypes),
            (ROWS[:, 0],),
        ),
        Case("RNN", f"over {name}", rnn, (SEQUENCE,), is_module=True),
    ]


def _rnn(nnx: Any, rngs: Any, cell: str, dtypes: Any, **arguments: Any) -> Any:
    return nnx.RNN(getattr(nnx, cell)(4, 3, **dtypes, rngs=rngs), **arguments, rngs=rngs)


NNX = [
    Case("Linear", "", lambda nnx, r, **kw: nnx.Linear(4, 6, **kw, rngs=r)),
    Case(
        "Linear",
        "without bias",
        lambda nnx, r, **kw: nnx.Linear(4, 6, use_bias=False, **kw, rngs=r),
    ),
    Case("LinearGeneral", "", lambda nnx, r, **kw: nnx.LinearGeneral(4, (2, 3), **kw, rngs=r)),
    Case(
        "LinearGeneral",
        "over batches",
        lambda nnx, r, **kw: nnx.LinearGeneral(4, 3, batch_axis={0: 2}, **kw, rngs=r),
    ),
    Case("Einsum", "", lambda nnx, r, **kw: nnx.Einsum("abc,cd->abd", (4, 6), (6,), **kw, rngs=r)),
    Case("Conv", "", lambda nnx, r, **kw: nnx.Conv(4, 6, (3, 3), **kw, rngs=r), (IMAGE,)),
    Case(
        "Conv",
        "in groups",
        lambda nnx, r, **kw: nnx.Conv(4, 6, (3, 3), feature_group_count=2, **kw, rngs=r),
        (IMAGE,),
    ),
    Case(
        "Conv",
        "causal",
        lambda nnx, r, **kw: nnx.Conv(4, 6, (3,), padding="CAUSAL", **kw, rngs=r),
        (SEQUENCE,),
    ),
    Case(
        "Conv",
        "circular",
        lambda nnx, r, **kw: nnx.Conv(4, 6, (3, 3), padding="CIRCULAR", **kw, rngs=r),
        (IMAGE,),
    ),
    Case(
        "ConvTranspose",
        "",
        lambda nnx, r, **kw: nnx.ConvTranspose(4, 6, (3, 3), strides=(2, 2), **kw, rngs=r),
        (IMAGE,),
    ),
    Case(
        "ConvTranspose",
        "circular",
        lambda nnx, r, **kw: nnx.ConvTranspose(4, 6, (3, 3), padding="CIRCULAR", **kw, rngs=r),
        (IMAGE,),
    ),
    Case("Embed", "", lambda nnx, r, **kw: nnx.Embed(5, 4, **kw, rngs=r), (TOKENS,)),
    Case(
        "Embed", "of one token", lambda nnx, r, **kw: nnx.Embed(1, 4, **kw, rngs=r), (TOKENS * 0,)
    ),
    Case("Embed", "attend", lambda nnx, r, **kw: nnx.Embed(5, 4, **kw, rngs=r), method="attend"),
    _nnx_norm("LayerNorm"),
    _nnx_norm("LayerNorm", "over an image", reduction_axes=(1, 2, 3)),
    _nnx_norm("LayerNorm", "one pass", use_fast_variance=True),
    _nnx_norm("RMSNorm"),
    _nnx_norm("GroupNorm", num_groups=2),
    _nnx_norm("InstanceNorm"),
    *(
        _nnx_norm(name, "masked", call={"mask": IMAGE > -0.5})
        for name in ("LayerNorm", "RMSNorm", "InstanceNorm")
    ),
    _nnx_norm("GroupNorm", "masked", num_groups=2, call={"mask": IMAGE > -0.5}),
    _nnx_norm("BatchNorm", "in training", use_running_average=False),
    _nnx_norm("BatchNorm", "in evaluation", use_running_average=True),
    _nnx_norm("BatchNorm", "masked", use_running_average=False, call={"mask": IMAGE > -0.5}),
    Case(
        "WeightNorm",
        "",
        lambda nnx, r, **kw: nnx.WeightNorm(nnx.Linear(4, 6, **kw, rngs=r), **kw, rngs=r),
        is_module=True,
    ),
    *(
        Case(
            "SpectralNorm",
            setting,
            lambda nnx, r, **kw: nnx.SpectralNorm(nnx.Linear(4, 6, **kw, rngs=r), **kw, rngs=r),
            call={"update_stats": setting == "in training"},
            is_module=True,
        )
        for setting in ("in training", "in evaluation")
    ),
    _nnx_attention("", (QUERIES, KEYS, KEYS)),
    _nnx_attention("with dropout", (QUERIES, KEYS, KEYS), **_DROPOUT),
    _nnx_attention("sown", (QUERIES,), call={"sow_weights": True}),
    _nnx_attention("causal", (QUERIES,), call={"is_causal": True}),
    _nnx_attention("masked", (QUERIES,), call={"mask": CAUSAL}),
    _nnx_attention("of grouped queries", (QUERIES,), num_kv_heads=1),
    _nnx_attention("decoding", (QUERIES,), decode=True),
    _nnx_attention("normalised", (QUERIES,), normalize_qk=True),
    _nnx_attention(
        "all at once",
        (QUERIES,),
        call={"sow_weights": True, "mask": CAUSAL},
        num_kv_heads=1,
        **_DROPOUT,
    ),
    *(case for name in _CELLS for case in _nnx_recurrent(name)),
    Case(
        "RNN",
        "of lengths",
        lambda nnx, r, **kw: _rnn(nnx, r, "GRUCell", kw, reverse=True, keep_order=True),
        (SEQUENCE,),
        call={"seq_lengths": np.asarray([5, 2], np.int32)},
        is_module=True,
    ),
    Case(
        "Bidirectional",
        "",
        lambda nnx, r, **kw: nnx.Bidirectional(
            _rnn(nnx, r, "LSTMCell", kw), _rnn(nnx, r, "GRUCell", kw), rngs=r
        ),
        (SEQUENCE,),
        is_module=True,
    ),
    Case("Dropout", "", lambda nnx, r, **_: nnx.Dropout(0.5, deterministic=False, rngs=r)),
    Case(
        "Dropout", "deterministic", lambda nnx, r, **_: nnx.Dropout(0.5, deterministic=True, rngs=r)
    ),
    Case(
        "Sequential",
        "",
        lambda nnx, r, **kw: nnx.Sequential(
            nnx.Linear(4, 6, **kw, rngs=r),
            nnx.LayerNorm(6, **kw, rngs=r),
            nnx.relu,
            nnx.Linear(6, 4, **kw, rngs=r),
        ),
        is_module=True,
    ),
    Case("PReLU", "", lambda nnx, r, **kw: nnx.PReLU(**kw)),
    Case("LoRA", "", lambda nnx, r, **kw: nnx.LoRA(4, 2, 6, **kw, rngs=r)),
    Case(
        "LoRA",
        "over a layer",
        lambda nnx, r, **kw: nnx.LoRA(
            4, 2, 6, base_module=nnx.Linear(4, 6, **kw, rngs=r), **kw, rngs=r
        ),
    ),
    Case("LoRALinear", "", lambda nnx, r, **kw: nnx.LoRALinear(4, 6, lora_rank=2, **kw, rngs=r)),
]
if hasattr(flax.nnx, "RoPE"):
    NNX += [
        Case("RoPE", "", lambda nnx, r, **_: nnx.RoPE(), (ROWS,)),
        Case(
            "RoPE",
            "of tables",
            lambda nnx, r, **_: nnx.RoPE(embedding_size=4, max_seq_len=8),
            (ROWS,),
        ),
        Case(
            "RoPE",
            "at positions",
            lambda nnx, r, **_: nnx.RoPE(),
            (ROWS,),
            call={"input_positions": np.asarray([3.0, 1.0, 2.0], np.float32)},
        ),
    ]

CASES = [("linen", case) for case in LINEN] + [("nnx", case) for case in NNX]

"""Every layer of both APIs, in each setting that changes what it computes: the rows of the table
of contracts.
"""

import dataclasses
import functools
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
      layer: its name in the catalog.
      setting: what the case is about, beside the layer's name.
      make: makes it, from Flax's API or from ours, with the dtype arguments given. linen:
        ``make(nn, **dtypes)``; nnx: ``make(nnx, rngs, **dtypes)``.
      inputs: what it is initialized, and called, with. A cell's are its carry and these.
      call: keyword arguments of the call.
      method: what is called.
      steps: what it is called with where that differs from what it is initialized with.
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


def layer(
    name: str, setting: str, *given: Any, inputs: Any = (ROWS,), call: Any = (), **arguments: Any
) -> Case:
    """A layer of either API, made from positional arguments, keyword arguments, and nnx's keys."""
    method = arguments.pop("method", "__call__")

    def make(lib: Any, rngs: Any = None, **dtypes: Any) -> Any:
        return getattr(lib, name)(*given, **arguments, **dtypes, **_keys(rngs))

    return Case(name, setting, make, inputs, call=dict(call), method=method)


def _keys(rngs: Any) -> dict[str, Any]:
    return {} if rngs is None else {"rngs": rngs}


_DROPOUT = {"dropout_rate": 0.5, "deterministic": False}
_MASKED = {"mask": IMAGE > -0.5}
_ALL_AT_ONCE = {"sow_weights": True, "mask": CAUSAL}
_LENGTHS = {"seq_lengths": np.asarray([5, 2], np.int32)}
_SQUARE = (3, 3)
_CELLS: dict[str, Any] = {
    "SimpleCell": {},
    "SimpleCell residual": {"residual": True},
    "GRUCell": {},
    "LSTMCell": {},
    "OptimizedLSTMCell": {},
}
_LINEN_CELLS: dict[str, Any] = _CELLS | {
    "MGUCell": {},
    "MGUCell without reset": {"reset_gate": False},
    "ConvLSTMCell": {"kernel_size": (2,)},
}


def _dense(lib: Any, rngs: Any, width: int = 4, features: int = 6, **dtypes: Any) -> Any:
    if rngs is None:
        return lib.Dense(features, **dtypes)
    return lib.Linear(width, features, **dtypes, rngs=rngs)


def cell(name: str, lib: Any, rngs: Any = None, **options: Any) -> Any:
    """A cell of 3 features; a name may end with an option: "SimpleCell residual"."""
    sizes = (3,) if rngs is None else (4, 3)
    options |= _LINEN_CELLS[name]
    return getattr(lib, name.partition(" ")[0])(*sizes, **options, **_keys(rngs))


def _rnn(name: str, lib: Any, rngs: Any = None, *, options: Any = (), **dtypes: Any) -> Any:
    return lib.RNN(cell(name, lib, rngs, **dtypes), **dict(options), **_keys(rngs))


def _recurrent(name: str) -> list[Case]:
    kind, _, setting = name.partition(" ")
    step, steps = ROWS[:, 0], SEQUENCE
    if kind == "ConvLSTMCell":
        step, steps = ROWS, SEQUENCE[:, :, None]
    return [
        Case(kind, setting, functools.partial(cell, name), (step,)),
        Case("RNN", f"over {name}", functools.partial(_rnn, name), (steps,), is_module=True),
    ]


def _lengths(lib: Any, rngs: Any = None, **dtypes: Any) -> Any:
    options = {"reverse": True, "keep_order": True}
    return _rnn("GRUCell", lib, rngs, options=options, **dtypes)


def _bidirectional(lib: Any, rngs: Any = None, **dtypes: Any) -> Any:
    halves = [_rnn(name, lib, rngs, **dtypes) for name in ("LSTMCell", "GRUCell")]
    return lib.Bidirectional(*halves, **_keys(rngs))


def _reparameterized(name: str, lib: Any, rngs: Any = None, **dtypes: Any) -> Any:
    inside = _dense(lib, rngs, **dtypes)
    return getattr(lib, name)(inside, **dtypes, **_keys(rngs))


def _dropout(deterministic: bool, lib: Any, rngs: Any = None, **_: Any) -> Any:
    return lib.Dropout(0.5, deterministic=deterministic, **_keys(rngs))


def _shared(*width: int) -> list[Case]:
    """Cases of both APIs. nnx's layers are given their `width` first."""

    def norm(name: str, setting: str = "", call: Any = (), **arguments: Any) -> Case:
        return layer(name, setting, *width, inputs=(IMAGE,), call=call, **arguments)

    def convolution(name: str, setting: str, size: Any = _SQUARE, **arguments: Any) -> Case:
        inputs = (IMAGE if len(size) == 2 else SEQUENCE,)
        return layer(name, setting, *width, 6, size, inputs=inputs, **arguments)

    weight_norm, spectral_norm = (
        functools.partial(_reparameterized, name) for name in ("WeightNorm", "SpectralNorm")
    )
    return [
        convolution("Conv", ""),
        convolution("Conv", "in groups", feature_group_count=2),
        convolution("Conv", "causal", (3,), padding="CAUSAL"),
        convolution("Conv", "circular", padding="CIRCULAR"),
        convolution("ConvTranspose", "", **({} if width else {"strides": (2, 2)})),
        convolution("ConvTranspose", "circular", padding="CIRCULAR"),
        layer("Embed", "", 5, 4, inputs=(TOKENS,)),
        layer("Embed", "of one token", 1, 4, inputs=(TOKENS * 0,)),
        layer("Embed", "attend", 5, 4, method="attend"),
        norm("LayerNorm"),
        norm(
            "LayerNorm",
            "over an image",
            reduction_axes=(1, 2, 3),
            **({} if width else {"feature_axes": (2, 3)}),
        ),
        norm("LayerNorm", "one pass", use_fast_variance=True),
        norm("RMSNorm"),
        norm("GroupNorm", num_groups=2),
        norm("InstanceNorm"),
        *(norm(name, "masked", _MASKED) for name in ("LayerNorm", "RMSNorm", "InstanceNorm")),
        norm("GroupNorm", "masked", _MASKED, num_groups=2),
        norm("BatchNorm", "in training", use_running_average=False),
        norm("BatchNorm", "in evaluation", use_running_average=True),
        norm("BatchNorm", "masked", _MASKED, use_running_average=False),
        Case("WeightNorm", "", weight_norm, is_module=True),
        *(
            Case("SpectralNorm", setting, spectral_norm, call={"update_stats": on}, is_module=True)
            for setting, on in (("in training", True), ("in evaluation", False))
        ),
        *(case for name in (_CELLS if width else _LINEN_CELLS) for case in _recurrent(name)),
        Case("RNN", "of lengths", _lengths, (SEQUENCE,), call=_LENGTHS, is_module=True),
        Case("Bidirectional", "", _bidirectional, (SEQUENCE,), is_module=True),
        Case("Dropout", "", functools.partial(_dropout, False)),
        Case("Dropout", "deterministic", functools.partial(_dropout, True)),
    ]


def _attention(name: str, setting: str, *given: Any, inputs: Any = (QUERIES,), **more: Any) -> Case:
    """A layer of attention; one that decodes is called with a query at a time."""
    case = layer(name, setting, *given, inputs=inputs, **more)
    decodes = more.get("decode", False)
    prepare = (lambda layer: layer.init_cache(QUERIES.shape)) if decodes and given else None
    steps = (QUERIES[:, :1],) if decodes else None
    return dataclasses.replace(case, steps=steps, prepare=prepare, is_module=True)


def _linen_attention(name: str, setting: str, **arguments: Any) -> Case:
    return _attention(name, setting, num_heads=2, **arguments)


def _linen_sequential(nn: Any, **dtypes: Any) -> Any:
    layers = [nn.Dense(6, **dtypes), nn.LayerNorm(**dtypes), nn.relu, nn.Dense(4, **dtypes)]
    return nn.Sequential(layers)


_DOT = "MultiHeadDotProductAttention"
_THREE = (QUERIES, KEYS, KEYS)

LINEN = [
    layer("Dense", "", 6),
    layer("Dense", "without bias", 6, use_bias=False),
    layer("DenseGeneral", "", (2, 3), axis=-1),
    layer("DenseGeneral", "over batches", 3, batch_dims=(0,)),
    layer("Einsum", "", (4, 6), "abc,cd->abd"),
    layer("ConvLocal", "", 2, _SQUARE, inputs=(IMAGE,)),
    *_shared(),
    _linen_attention(_DOT, "", inputs=_THREE),
    _linen_attention(_DOT, "with dropout", inputs=_THREE, **_DROPOUT),
    _linen_attention(_DOT, "sown", call={"sow_weights": True}),
    _linen_attention(_DOT, "masked", call={"mask": CAUSAL}),
    _linen_attention(_DOT, "decoding", decode=True),
    _linen_attention(_DOT, "normalized", normalize_qk=True),
    _linen_attention(_DOT, "forced", force_fp32_for_softmax=True),
    _linen_attention("MultiHeadAttention", "", inputs=_THREE),
    _linen_attention("MultiHeadAttention", "all at once", call=_ALL_AT_ONCE, **_DROPOUT),
    _linen_attention("SelfAttention", ""),
    _linen_attention("SelfAttention", "decoding", decode=True),
    Case("Sequential", "", _linen_sequential, is_module=True),
    Case("PReLU", "", lambda nn, dtype=None, **kw: nn.PReLU(**kw)),
]


def _nnx_attention(setting: str, decode: bool = False, **arguments: Any) -> Case:
    return _attention("MultiHeadAttention", setting, 2, 8, decode=decode, **arguments)


def _nnx_sequential(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    norm = nnx.LayerNorm(6, **dtypes, rngs=rngs)
    first, last = (nnx.Linear(*sizes, **dtypes, rngs=rngs) for sizes in ((4, 6), (6, 4)))
    return nnx.Sequential(first, norm, nnx.relu, last)


def _lora_over_a_layer(nnx: Any, rngs: Any, **dtypes: Any) -> Any:
    base = nnx.Linear(4, 6, **dtypes, rngs=rngs)
    return nnx.LoRA(4, 2, 6, base_module=base, **dtypes, rngs=rngs)


NNX = [
    layer("Linear", "", 4, 6),
    layer("Linear", "without bias", 4, 6, use_bias=False),
    layer("LinearGeneral", "", 4, (2, 3)),
    layer("LinearGeneral", "over batches", 4, 3, batch_axis={0: 2}),
    layer("Einsum", "", "abc,cd->abd", (4, 6), (6,)),
    *_shared(4),
    _nnx_attention("", inputs=_THREE),
    _nnx_attention("with dropout", inputs=_THREE, **_DROPOUT),
    _nnx_attention("sown", call={"sow_weights": True}),
    _nnx_attention("causal", call={"is_causal": True}),
    _nnx_attention("masked", call={"mask": CAUSAL}),
    _nnx_attention("of grouped queries", num_kv_heads=1),
    _nnx_attention("decoding", decode=True),
    _nnx_attention("normalized", normalize_qk=True),
    _nnx_attention("all at once", call=_ALL_AT_ONCE, num_kv_heads=1, **_DROPOUT),
    Case("Sequential", "", _nnx_sequential, is_module=True),
    Case("PReLU", "", lambda nnx, r, **kw: nnx.PReLU(**kw)),
    layer("LoRA", "", 4, 2, 6),
    Case("LoRA", "over a layer", _lora_over_a_layer),
    layer("LoRALinear", "", 4, 6, lora_rank=2),
]
if hasattr(flax.nnx, "RoPE"):
    _POSITIONS = {"input_positions": np.asarray([3.0, 1.0, 2.0], np.float32)}
    NNX += [
        Case("RoPE", "", lambda nnx, r, **_: nnx.RoPE()),
        Case("RoPE", "of tables", lambda nnx, r, **_: nnx.RoPE(embedding_size=4, max_seq_len=8)),
        Case("RoPE", "at positions", lambda nnx, r, **_: nnx.RoPE(), call=_POSITIONS),
    ]

CASES = [("linen", case) for case in LINEN] + [("nnx", case) for case in NNX]

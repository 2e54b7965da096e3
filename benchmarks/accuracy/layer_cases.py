"""The layers that are measured, on which inputs. `small` shapes are for the test."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as flax_linen
import flax.nnx as flax_nnx
import jax
import numpy as np

from benchmarks.accuracy.cases import Case, Precision, normal, offsets
from benchmarks.accuracy.layers import Layer, layer_case
from mpmodules import linen as our_linen
from mpmodules import nnx as our_nnx
from policy import use_policy

Data = Callable[[np.random.Generator], tuple[np.ndarray, ...]]

BIAS = (
    "torch adds the bias to the accumulator; ours run Flax's program, which adds it to the rounded "
    "product"
)

CARRY = (
    "Flax's cells return float32 and keep a float32 carry whatever their dtype is; ours keep it in "
    "compute_dtype"
)


def layer_cases(small: bool = False) -> Iterator[Case]:
    yield from _matmuls(small)
    yield from _embeddings(small)
    yield from _norms(small)
    yield from _weight_norms(small)
    yield from _attention(small)
    yield from _attention_functions(small)
    yield from _recurrent(small)
    yield from _others(small)


def _matmuls(small: bool) -> Iterator[Case]:
    rows, width, out = (6, 24, 8) if small else (256, 256, 64)
    side = 6 if small else 12
    flat, image = (rows, width), (2, side, side, 8)
    layers: dict[str, tuple[Layer, tuple[int, ...]]] = {
        "Dense, Linear": (
            Layer(
                lambda nn, **kw: nn.Dense(out, **kw),
                lambda nnx, r, **kw: nnx.Linear(width, out, rngs=r, **kw),
            ),
            flat,
        ),
        "DenseGeneral, LinearGeneral": (
            Layer(
                lambda nn, **kw: nn.DenseGeneral((4, 2), **kw),
                lambda nnx, r, **kw: nnx.LinearGeneral(width, (4, 2), rngs=r, **kw),
            ),
            flat,
        ),
        "Einsum": (
            Layer(
                lambda nn, **kw: nn.Einsum((width, out), "bi,io->bo", **kw),
                lambda nnx, r, **kw: nnx.Einsum("bi,io->bo", (width, out), (out,), rngs=r, **kw),
            ),
            flat,
        ),
        "Conv": (
            Layer(
                lambda nn, **kw: nn.Conv(4, (3, 3), **kw),
                lambda nnx, r, **kw: nnx.Conv(8, 4, (3, 3), rngs=r, **kw),
            ),
            image,
        ),
        "ConvLocal": (Layer(lambda nn, **kw: nn.ConvLocal(4, (3, 3), **kw)), image),
        "ConvTranspose": (
            Layer(
                lambda nn, **kw: nn.ConvTranspose(4, (3, 3), (2, 2), **kw),
                lambda nnx, r, **kw: nnx.ConvTranspose(8, 4, (3, 3), (2, 2), rngs=r, **kw),
            ),
            image,
        ),
        "LoRALinear": (
            Layer(
                nnx=lambda nnx, r, dtype=None, param_dtype=None, **kw: nnx.LoRALinear(
                    width, out, lora_rank=2, rngs=r,
                    **_twice(dtype=dtype, param_dtype=param_dtype), **kw,
                )
            ),
            flat,
        ),
    }  # fmt: skip
    for name, (layer, shape) in layers.items():
        torch = name if name in ("Dense, Linear", "Conv", "ConvTranspose") else None
        for inputs, data in offsets(*shape).items():
            wide = inputs == "normal"
            yield layer_case(
                name, layer, "matmuls", inputs, data, wide=wide, torch=torch, accepted=BIAS
            )
        if name not in ("ConvLocal", "LoRALinear"):
            yield layer_case(
                name, layer, "sums", "normal", normal(*shape), gradient="bias", torch=torch
            )


def _embeddings(small: bool) -> Iterator[Case]:
    count, tokens = (10, 4000) if small else (100, 40000)
    layer = Layer(
        lambda nn, **kw: nn.Embed(count, 8, **kw),
        lambda nnx, r, **kw: nnx.Embed(count, 8, rngs=r, **kw),
        operands=False,
    )
    data: Data = lambda rng: (rng.integers(0, count, tokens),)  # noqa: E731
    yield layer_case("Embed", layer, "lookups", "uniform tokens", data, torch="Embed")
    yield layer_case(
        "Embed", layer, "sums", "uniform tokens", data, gradient="embedding", torch="Embed"
    )
    attend = Layer(layer.linen, layer.nnx, method="attend")
    if not small:
        yield layer_case("Embed.attend", attend, "matmuls", "normal", normal(64, 8))


def _norms(small: bool) -> Iterator[Case]:
    rows, width = (16, 64) if small else (256, 512)
    image = (4, 6, 6, 8) if small else (8, 16, 16, 32)
    groups = 4
    features = image[-1]
    kw: dict[str, Any] = {"operands": False, "norm": True}
    layers: dict[str, tuple[Layer, tuple[int, ...]]] = {
        "LayerNorm": (
            Layer(
                lambda nn, **k: nn.LayerNorm(**k),
                lambda nnx, r, **k: nnx.LayerNorm(width, rngs=r, **k),
                **kw,
            ),
            (rows, width),
        ),
        "RMSNorm": (
            Layer(
                lambda nn, **k: nn.RMSNorm(**k),
                lambda nnx, r, **k: nnx.RMSNorm(width, rngs=r, **k),
                **kw,
            ),
            (rows, width),
        ),
        "GroupNorm": (
            Layer(
                lambda nn, **k: nn.GroupNorm(groups, **k),
                lambda nnx, r, **k: nnx.GroupNorm(features, groups, rngs=r, **k),
                **kw,
            ),
            image,
        ),
        "InstanceNorm": (
            Layer(
                lambda nn, **k: nn.InstanceNorm(**k),
                lambda nnx, r, **k: nnx.InstanceNorm(features, rngs=r, **k),
                **kw,
            ),
            image,
        ),
        "BatchNorm, training": (
            Layer(
                lambda nn, **k: nn.BatchNorm(use_running_average=False, **k),
                lambda nnx, r, **k: nnx.BatchNorm(features, use_running_average=False, rngs=r, **k),
                **kw,
            ),
            image,
        ),
    }
    for name, (layer, shape) in layers.items():
        for inputs, data in offsets(*shape).items():
            yield layer_case(name, layer, "norms", inputs, data, torch=name, wide=True)
            yield layer_case(
                name, layer, "norms", f"{inputs}, float32", data, torch=name, given="float32"
            )
            for gradient in ("scale", "bias") if name != "RMSNorm" else ("scale",):
                if inputs == "mean 1000" or not small:
                    yield layer_case(
                        name, layer, "sums", inputs, data, gradient=gradient, torch=name
                    )
    for inputs, data in offsets(*image).items():
        layer = Layer(
            lambda nn, **k: nn.BatchNorm(use_running_average=True, **k),
            lambda nnx, r, **k: nnx.BatchNorm(features, use_running_average=True, rngs=r, **k),
            running_mean=1000.0 if inputs == "mean 1000" else 0.0,
            **kw,
        )
        name = "BatchNorm, evaluation"
        yield layer_case(name, layer, "norms", inputs, data, torch=name, wide=True)


def _weight_norms(small: bool) -> Iterator[Case]:
    """On the identity, so that what comes out is the normalized kernel."""
    width = 16 if small else 64
    data: Data = lambda rng: (np.eye(width),)  # noqa: E731
    weight = Layer(
        lambda nn, **kw: nn.WeightNorm(nn.Dense(8, use_bias=False, **kw), use_scale=False, **kw),
        lambda nnx, r, **kw: nnx.WeightNorm(
            nnx.Linear(width, 8, use_bias=False, rngs=r, **kw), use_scale=False, rngs=r, **kw
        ),
        operands=False,
    )
    spectral = Layer(
        lambda nn, **kw: nn.SpectralNorm(nn.Dense(8, use_bias=False, **kw), **kw),
        lambda nnx, r, **kw: nnx.SpectralNorm(
            nnx.Linear(width, 8, use_bias=False, rngs=r, **kw), rngs=r, **kw
        ),
        call={"update_stats": True},
        operands=False,
    )
    yield layer_case("WeightNorm without scale", weight, "norms", "identity", data)
    yield layer_case("SpectralNorm", spectral, "norms", "identity", data)


def _attention(small: bool) -> Iterator[Case]:
    length, width = (16, 16) if small else (128, 64)
    layer = Layer(
        lambda nn, **kw: nn.MultiHeadDotProductAttention(num_heads=4, **kw),
        lambda nnx, r, **kw: nnx.MultiHeadAttention(4, width, decode=False, rngs=r, **kw),
    )
    for inputs, scale in {"normal": 1.0, "large logits": 8.0}.items():
        data = normal(2, length, width, scale=scale)
        yield layer_case("MultiHeadAttention", layer, "matmuls", inputs, data)


def _attention_functions(small: bool) -> Iterator[Case]:
    length = 16 if small else 128
    apis = {
        "ours linen": our_linen,
        "ours nnx": our_nnx,
        "flax linen": flax_linen,
        "flax nnx": flax_nnx,
    }
    columns: dict[str, Any] = {name: functools.partial(_attend, api) for name, api in apis.items()}
    for inputs, scale in {"normal": 1.0, "large logits": 3.0}.items():
        data: Data = lambda rng, s=scale: tuple(  # noqa: E731
            s * rng.normal(size=(2, length, 4, 16)) for _ in range(3)
        )
        name = "dot_product_attention"
        yield Case(
            name, inputs, "matmuls", data, columns, columns["flax linen"], floor=1.0, torch=name
        )


def _attend(api: Any, precision: Precision, *arrays: Any) -> Any:
    with use_policy(precision.policy):
        return jax.jit(lambda q, k, v: api.dot_product_attention(q, k, v))(*arrays)


def _recurrent(small: bool) -> Iterator[Case]:
    hidden, width, steps = (4, 4, 3) if small else (32, 16, 12)
    for name in (
        ("SimpleCell",)
        if small
        else ("SimpleCell", "LSTMCell", "OptimizedLSTMCell", "GRUCell", "MGUCell")
    ):
        make_linen = lambda nn, name=name, **kw: nn.RNN(getattr(nn, name)(hidden, **kw))  # noqa: E731
        make_nnx = lambda nnx, r, name=name, **kw: nnx.RNN(  # noqa: E731
            getattr(nnx, name)(width, hidden, rngs=r, **kw), rngs=r
        )
        layer = Layer(
            make_linen, None if name == "MGUCell" else make_nnx, same_tree=name == "MGUCell"
        )
        for inputs, scale in {"normal": 1.0, "large": 8.0}.items():
            data = normal(8, steps, width, scale=scale)
            against = ("flax linen", "flax nnx")
            yield layer_case(
                f"RNN({name})", layer, "matmuls", inputs, data, accepted=CARRY, against=against
            )


def _others(small: bool) -> Iterator[Case]:
    shape = (16, 64) if small else (256, 256)
    prelu = Layer(
        lambda nn, **kw: nn.PReLU(**_without_dtype(kw)),
        lambda nnx, r, **kw: nnx.PReLU(**_without_dtype(kw)),
    )
    for inputs, data in offsets(*shape).items():
        yield layer_case("PReLU", prelu, "elementwise", inputs, data, torch="PReLU")
    yield layer_case(
        "PReLU", prelu, "sums", "normal", normal(*shape), gradient="negative_slope", torch="PReLU"
    )
    if hasattr(flax_nnx, "RoPE"):
        rope = Layer(
            nnx=lambda nnx, r, dtype_policy=None, **kw: nnx.RoPE()
        )  # no parameters, and no dtype of its own
        data: Data = lambda rng: (rng.normal(size=(64, 16)), np.arange(64) + 1000)  # noqa: E731
        yield layer_case("RoPE", rope, "elementwise", "positions from 1000", data)


def _twice(**dtypes: Any) -> dict[str, Any]:
    """The dtypes that are given, for the layer and for its low-rank part."""
    given = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    return given | {f"lora_{name}": dtype for name, dtype in given.items()}


def _without_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without the dtype that the layer does not take; parameters are stored in float32, or float64
    for the truth.
    """
    return {name: value for name, value in kwargs.items() if name != "dtype"}

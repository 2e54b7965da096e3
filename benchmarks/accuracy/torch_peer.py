# pyright: reportMissingImports=false
"""The torch column: the same layers and functions under CPU autocast, where torch is installed.

It is not among the extras, being several times the size of everything else together: `pip install
torch`, and run the command again. Layers get the same parameters, stored in float32; inputs are
what ours get.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


def available() -> bool:
    return importlib.util.find_spec("torch") is not None


def run(case: Any, precision: Any, inputs: list[np.ndarray]) -> np.ndarray | None:
    """A case's result in float64, or None where torch raises. Arguments as in `cases.measure`."""
    import torch

    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}[
        jnp.dtype(precision.operands).name
    ]
    given = torch.float32 if case.given == "float32" else half
    xs = [
        torch.tensor(x, dtype=given) if x.dtype == np.float64 else torch.tensor(x) for x in inputs
    ]
    program = Program(torch, functools.partial(_parameter, torch, case, precision, {}))
    try:
        with torch.autocast("cpu", dtype=half), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _result(torch, case, program, xs)
    except (RuntimeError, NotImplementedError):
        return None


def _result(torch: Any, case: Any, program: Program, xs: list[Any]) -> np.ndarray:
    if case.gradient == "inputs":
        xs[0].requires_grad_()
    y = RUNS[case.torch](program, *xs)
    if case.gradient is not None:
        of = xs[0] if case.gradient == "inputs" else program.made(case.gradient)
        pattern = (
            (np.arange(y.numel()) * 7919 % 16 + 1)
            / 16
            * np.where(np.arange(y.numel()) % 5 == 0, -1, 1)
        )
        (y,) = torch.autograd.grad(y, of, torch.tensor(pattern.reshape(y.shape), dtype=y.dtype))
        y = program.layout.get(case.gradient, lambda g: g)(y)
    return y.detach().double().numpy()


def _parameter(
    torch: Any, case: Any, precision: Any, made: dict[str, Any], name: str, *shape: int
) -> Any:
    """A leaf of the graph with the value that JAX's layers have under that name and shape."""
    if name not in made:
        value = case.values(precision, name, shape).astype(np.float32)
        made[name] = torch.tensor(value, requires_grad=name not in ("mean", "var"))
    return made[name]


class Program:
    """What a run needs of torch: its functions, and parameters by name and shape."""

    def __init__(self, torch: Any, parameter: Callable[..., Any]):
        self.torch, self.f, self.parameter = torch, torch.nn.functional, parameter
        self.layout: dict[str, Callable[[Any], Any]] = {}

    def made(self, name: str) -> Any:
        return self.parameter(name)


def _dense(p: Program, x: Any) -> Any:
    out = 8 if x.shape[-1] == 24 else 64
    return p.f.linear(x, p.parameter("kernel", x.shape[-1], out).T, p.parameter("bias", out))


def _conv(p: Program, x: Any) -> Any:
    kernel = p.parameter("kernel", 3, 3, 8, 4).permute(3, 2, 0, 1)
    return _last(p.f.conv2d(_first(x), kernel, p.parameter("bias", 4), padding=1))


def _conv_transpose(p: Program, x: Any) -> Any:
    kernel = p.parameter("kernel", 3, 3, 8, 4).permute(2, 3, 0, 1).flip(2, 3)
    y = p.f.conv_transpose2d(_first(x), kernel, p.parameter("bias", 4), stride=2)
    return _last(y[..., : 2 * x.shape[1], : 2 * x.shape[2]])  # what SAME keeps


def _embed(p: Program, tokens: Any) -> Any:
    return p.f.embedding(tokens, p.parameter("embedding", 10 if len(tokens) < 10000 else 100, 8))


def _layer_norm(p: Program, x: Any) -> Any:
    width = x.shape[-1:]
    return p.f.layer_norm(x, width, p.parameter("scale", *width), p.parameter("bias", *width), 1e-6)


def _rms_norm(p: Program, x: Any) -> Any:
    return p.f.rms_norm(x, x.shape[-1:], p.parameter("scale", x.shape[-1]), 1e-6)


def _group_norm(p: Program, x: Any) -> Any:
    c = x.shape[-1]
    return _last(
        p.f.group_norm(_first(x), 4, p.parameter("scale", c), p.parameter("bias", c), 1e-6)
    )


def _instance_norm(p: Program, x: Any) -> Any:
    c = x.shape[-1]
    y = p.f.instance_norm(
        _first(x), weight=p.parameter("scale", c), bias=p.parameter("bias", c), eps=1e-6
    )
    return _last(y)


def _batch_norm(p: Program, x: Any, training: bool) -> Any:
    c = x.shape[-1]
    mean, var = p.parameter("mean", c), p.parameter("var", c)
    y = p.f.batch_norm(
        _first(x),
        mean,
        var,
        p.parameter("scale", c),
        p.parameter("bias", c),
        training=training,
        eps=1e-5,
    )
    return _last(y)


def _attention(p: Program, *arrays: Any) -> Any:
    return p.f.scaled_dot_product_attention(*(x.transpose(1, 2) for x in arrays)).transpose(1, 2)


def _prelu(p: Program, x: Any) -> Any:
    slope = p.parameter("negative_slope")
    return p.torch.where(x >= 0, x, slope.to(x.dtype) * x)


def _first(x: Any) -> Any:
    return x.permute(0, 3, 1, 2)


def _last(x: Any) -> Any:
    return x.permute(0, 2, 3, 1)


def _pool(name: str) -> Callable[..., Any]:
    return lambda p, x: _last(getattr(p.f, name)(_first(x), 3, stride=1))


def _segment_sum(p: Program, x: Any, ids: Any) -> Any:
    return p.torch.zeros(8, x.shape[1], dtype=x.dtype).index_add(0, ids, x)


def _ctc(p: Program, logits: Any, labels: Any) -> Any:
    b, t, _ = logits.shape
    log_probabilities = p.f.log_softmax(logits, -1).transpose(0, 1)
    lengths = p.torch.full((b,), t), p.torch.full((b,), labels.shape[1])
    return p.f.ctc_loss(log_probabilities, labels, *lengths, reduction="none")


RUNS: dict[str, Callable[..., Any]] = {
    "Dense, Linear": _dense,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Embed": _embed,
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
    "GroupNorm": _group_norm,
    "InstanceNorm": _instance_norm,
    "BatchNorm, training": functools.partial(_batch_norm, training=True),
    "BatchNorm, evaluation": functools.partial(_batch_norm, training=False),
    "PReLU": _prelu,
    "dot_product_attention": _attention,
    "softmax": lambda p, x: p.torch.softmax(x, -1),
    "log_softmax": lambda p, x: p.torch.log_softmax(x, -1),
    "logsumexp": lambda p, x: p.torch.logsumexp(x, -1),
    "log_sigmoid": lambda p, x: p.f.logsigmoid(x),
    "softplus": lambda p, x: p.f.softplus(x),
    "mean": lambda p, x: x.mean(-1),
    "var": lambda p, x: x.var(-1, correction=0),
    "std": lambda p, x: x.std(-1, correction=0),
    "cumsum": lambda p, x: x.cumsum(1),
    "cumprod": lambda p, x: x.cumprod(1),
    "segment_sum": _segment_sum,
    "global_norm": lambda p, x: p.torch.linalg.vector_norm(x),
    "avg_pool, whole image": lambda p, x: x.mean((1, 2), keepdim=True),
    "avg_pool, 3x3": _pool("avg_pool2d"),
    "max_pool, 3x3": _pool("max_pool2d"),
    "softmax_cross_entropy_with_integer_labels": lambda p, x, y: p.f.cross_entropy(
        x, y, reduction="none"
    ),
    "softmax_cross_entropy": lambda p, x, y: p.f.cross_entropy(x, y, reduction="none"),
    "sigmoid_binary_cross_entropy": lambda p, x, y: p.f.binary_cross_entropy_with_logits(
        x, y, reduction="none"
    ),
    "squared_error": lambda p, x, y: p.f.mse_loss(x, y, reduction="none"),
    "cosine_similarity": lambda p, x, y: p.f.cosine_similarity(x, y, -1),
    "kl_divergence": lambda p, x, y: p.f.kl_div(x, y, reduction="none").sum(-1),
    "kl_divergence_with_log_targets": lambda p, x, y: p.f.kl_div(
        x, y, reduction="none", log_target=True
    ).sum(-1),
    "ctc_loss": _ctc,
}

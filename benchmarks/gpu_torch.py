"""torch under its autocast on the same models, eager, as its users run it. In a process of its own:
prints JSON lines.

    python -m benchmarks.gpu_torch '{"decoder": {...}, "seconds": 80, ...}'

One line a measurement: {"model": "decoder", "setting": "bf16", "rate": tokens or images a second,
"MiB": peak}. A process of its own, because the CUDA libraries of torch and of jaxlib are not made
to meet in one.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "TF32": None, "float32": None}
ORDER = (
    ("decoder", "bf16"),
    ("ResNet-50", "bf16"),
    ("decoder", "f16"),
    ("ViT-S", "bf16"),
    ("ResNet-50", "f16"),
    ("decoder", "TF32"),
    ("ResNet-50", "TF32"),
    ("ViT-S", "f16"),
    ("decoder", "float32"),
)


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.qkv(self.first(x)).chunk(3, dim=-1)
        )  # (B, N, T, H)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))


class Decoder(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads, causal=True) for _ in range(layers)])
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.logits(self.norm(self.blocks(self.embed(tokens) + positions)))


class VisionTransformer(nn.Module):
    """Images in, logits out."""

    def __init__(
        self, size: int, layers: int = 12, width: int = 384, heads: int = 6, classes: int = 1000
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros((size // 16) ** 2, width))
        self.blocks = nn.Sequential(*[Block(width, heads, causal=False) for _ in range(layers)])
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.logits(self.norm(self.blocks(x))[:, 0])


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, the strides in the 3x3."""

    def __init__(self, channels: int, filters: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, filters, 1), nn.ReLU(inplace=True),
            *_convolution(filters, filters, 3, stride), nn.ReLU(inplace=True),
            *_convolution(filters, 4 * filters, 1),
        )  # fmt: skip
        same = stride == 1 and channels == 4 * filters
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(*_convolution(channels, 4 * filters, 1, stride))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


def _convolution(channels: int, filters: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, filters, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(filters),
    ]


class ResNet(nn.Module):
    """ResNet-50, version 1.5."""

    def __init__(
        self, filters: int = 64, stages: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000
    ):
        super().__init__()
        layers = [*_convolution(3, filters, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        channels = filters
        for i, blocks in enumerate(stages):
            for j in range(blocks):
                layers.append(Bottleneck(channels, filters * 2**i, 2 if i and not j else 1))
                channels = 4 * filters * 2**i
        self.body, self.head = nn.Sequential(*layers), nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "decoder": Decoder,
    "ResNet-50": ResNet,
    "ViT-S": VisionTransformer,
}


def train_step(
    name: str, setting: str, options: dict[str, Any], shape: list[int], device: str
) -> Callable[[], None]:
    """A train step of a model on one random batch, and its optimizer's; float16 with a GradScaler.

    Args:
      options: of the model's class.
      shape: of the batch: (batch, length) of tokens, or (batch, 3, height, width).
    """
    dtype = DTYPES[setting]
    torch.set_float32_matmul_precision("high" if setting == "TF32" else "highest")
    torch.backends.cudnn.allow_tf32 = setting != "float32"
    model = MODELS[name](**options).to(device)
    if name == "decoder":
        x = y = torch.randint(0, options["vocabulary"], shape, device=device)
    else:
        x, y = torch.randn(shape, device=device), torch.randint(0, 10, shape[:1], device=device)
    if name == "ResNet-50":
        model, x = (
            model.to(memory_format=torch.channels_last),
            x.contiguous(memory_format=torch.channels_last),
        )
        tx = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9, nesterov=True)
    else:
        tx = torch.optim.AdamW(model.parameters(), 1e-4, fused=device == "cuda")
    scaler = torch.amp.GradScaler(device, enabled=setting == "f16")

    def step() -> None:
        with torch.autocast(device, dtype) if dtype else contextlib.nullcontext():
            loss = functional.cross_entropy(model(x).flatten(0, -2).float(), y.flatten())
        scaler.scale(loss).backward()
        scaler.step(tx)
        scaler.update()
        tx.zero_grad(set_to_none=True)

    return step


def rate(
    step: Callable[[], None], count: int, device: str, sample_seconds: float, rounds: int = 5
) -> float:
    """`count` times the steps a second: the median of the rounds."""

    def seconds(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(3)
    times = max(1, round(sample_seconds / max(seconds(1), 1e-6)))
    return count * times / statistics.median(seconds(times) for _ in range(rounds))


def measurements(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every measurement for which there is time; one that fails says why.

    Args:
      config: `seconds`, `sample_seconds`, `device`, and for each model `options` and `shape`.
    """
    deadline, device = time.perf_counter() + config["seconds"], config["device"]
    for name, setting in ORDER:
        if name not in config["models"] or time.perf_counter() > deadline:
            continue
        of = config["models"][name]
        count = of["shape"][0] * (of["shape"][1] if name == "decoder" else 1)
        try:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found = rate(
                train_step(name, setting, of["options"], of["shape"], device),
                count,
                device,
                config["sample_seconds"],
            )
        except RuntimeError as error:  # out of memory is one too
            yield {"model": name, "setting": setting, "error": str(error).splitlines()[0]}
            continue
        peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
        yield {"model": name, "setting": setting, "rate": found, "MiB": peak}


def main() -> None:
    config = json.loads(sys.argv[1])
    print(json.dumps({"version": torch.__version__, "cuda": torch.cuda.is_available()}), flush=True)
    if config["device"] == "cuda" and not torch.cuda.is_available():
        return
    for found in measurements(config):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

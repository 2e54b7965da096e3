"""kauldron: its transformer blocks, and its ViT."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.packages.cases import Case
from benchmarks.trainers.model import Model, draw_images
from benchmarks.trainers.sources import Trainer


def _module(name: str) -> Any:
    module = importlib.import_module(f"kauldron.modules.{name}")
    for each in [each for each in sys.modules if each.startswith("tensorflow")]:
        del sys.modules[each]  # einops would ask whether an array is a stub's
    return module


def _blocks(dtype: Any, num_heads: int, mlp_size: int) -> Any:
    """A block of each form; kauldron's own option is the dtype of the tokens."""
    transformers = _module("transformers")
    nn, norms = transformers.nn, {} if dtype is None else {"dtype": dtype}

    class Blocks(nn.Module):
        def setup(self) -> None:
            self.blocks = [
                block.from_spec(
                    num_heads,
                    mlp_size,
                    attention_norm=nn.LayerNorm(**norms),
                    mlp_norm=nn.LayerNorm(**norms),
                )
                for block in (transformers.PreNormBlock, transformers.ParallelAttentionBlock)
            ]

        def __call__(self, tokens: Any, mask: Any) -> Any:
            first, second = self.blocks
            tokens = tokens if dtype is None else tokens.astype(dtype)
            return second(first(tokens, mask))

    return Blocks()


def _vit(dtype: Any, classes: int, **sizes: int) -> Any:
    vit = _module("vit")
    encoder = vit.VitEncoder.from_spec(**sizes, **({} if dtype is None else {"dtype": dtype}))
    return vit.Vit(encoder=encoder, num_classes=classes)


def _logits(module: Any, images: Any) -> Any:
    half = module.encoder.layers[0].attention_norm.dtype
    return module(images if half is None else images.astype(half))


def _tokens(generator: np.random.Generator, batch: int, length: int, width: int) -> Any:
    """Tokens and a causal mask."""
    tokens = generator.normal(size=(batch, length, width)).astype(np.float32)
    mask = np.tril(np.ones((length, length), bool))
    return tokens, np.broadcast_to(mask, (batch, 1, length, length))


def models() -> Iterator[Model]:
    """Yields the models."""
    part = functools.partial
    blocks = part(_blocks, num_heads=4, mlp_size=128)
    large = Case(
        "",
        part(_blocks, num_heads=16, mlp_size=4096),
        part(_tokens, batch=32, length=512, width=1024),
        has_option=True,
    )
    tokens = part(_tokens, batch=4, length=16, width=64)
    yield Model("kauldron: transformer blocks", blocks, tokens, has_option=True, large=large)
    small = {"num_heads": 4, "hidden_size": 64, "num_layers": 2, "patch_size": 8, "mlp_size": 128}
    wide = {
        "num_heads": 12,
        "hidden_size": 768,
        "num_layers": 2,
        "patch_size": 16,
        "mlp_size": 3072,
    }
    large = Case(
        "", part(_vit, classes=1000, **wide), part(draw_images, batch=64, size=256), _logits, True
    )
    vit, images = part(_vit, classes=10, **small), part(draw_images, batch=4, size=32)
    yield Model("kauldron: ViT", vit, images, _logits, True, large)


_FOLDER = "kauldron/modules"
TRAINER = Trainer(
    name="kauldron",
    url="https://pypi.org/project/kauldron",
    revision="1.4.4",
    files={
        f"{_FOLDER}/attention.py": (
            "d270a4b8734456c42a81877d4509a4b2d9a4d913fbaa4b4ee1683d9e32f95112"
        ),
        f"{_FOLDER}/input_embeddings.py": (
            "8223775379c61edf4463ff4894cbf9a89f80a6158a1c80c3c8fb196c7ad22cb9"
        ),
        f"{_FOLDER}/pos_embeddings.py": (
            "bdc030cd8904e714e84a2fbb5cc952733a245696abf4ab9bc8beee9d648e45cf"
        ),
        f"{_FOLDER}/transformers.py": (
            "a383ec5c9e26cadaaa2825843eb7eef53afaaf38b02495873480ad78bed6e6e6"
        ),
        f"{_FOLDER}/vit.py": ("6692f9ba07a677f2fc237c0891a1e8e5894a76091cf2342ec7add1f9d0879009"),
    },
    models=models,
    stubs=("grain", "mediapy", "pandas", "tensorflow", "tensorflow_datasets"),
    wheels=(
        "kauldron==1.4.4",
        *("clu==0.0.12", "einops==0.8.2", "immutabledict==4.3.1", "jaxtyping==0.3.9"),
        *("lark==1.3.1", "ml_collections==1.1.0", "typeguard==4.6.1", "wadler-lindig==0.1.8"),
    ),
)

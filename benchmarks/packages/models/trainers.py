"""Models of trainers' repositories: big_vision, scenic, bonsai and tunix."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import policy
from benchmarks.packages.cases import Case
from benchmarks.packages.stubs import stubbed

# What the files import and the models don't need.
STUBS = (
    *("big_vision.utils", "big_vision.models.common", "bonsai.utils"),
    *("ml_collections", "tensorflow", "scenic.common_lib", "scenic.model_lib.base_models"),
)


def cases() -> Iterator[Case]:
    """Yields the models of each repository."""
    for found in (_big_vision, _scenic, _bonsai, _tunix):
        yield from found()


def _module(name: str) -> Any:
    with stubbed(*STUBS):
        return importlib.import_module(name)


def _images(generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.normal(size=(4, 32, 32, 3)).astype(np.float32),)


def _tokens(generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.integers(1, 64, size=(2, 16), dtype=np.int32),)


# --------------------------------------------------------------------------------------------------
# big_vision and scenic, of linen
# --------------------------------------------------------------------------------------------------


def _big_vision() -> Iterator[Case]:
    """Yields ViT as a loop over blocks and as a scan with remat, and SigLIP's two towers."""
    size = {"width": 64, "depth": 2, "mlp_dim": 128, "num_heads": 4}
    patches = {**size, "patch_size": (8, 8)}
    logits: Callable[..., Any] = lambda module, images: module(images)[0]  # noqa: E731
    vit = functools.partial(_vit, num_classes=10, **patches)
    yield Case("big_vision: ViT", vit, _images, logits, has_option=True)
    scanned = functools.partial(vit, scan=True, posemb="sincos2d", pool_type="tok")
    yield Case("big_vision: ViT, scanned", scanned, _images, logits, has_option=True)
    siglip = functools.partial(_siglip, image=patches, text={**size, "vocab_size": 64})
    embeddings: Callable[..., Any] = lambda module, *pair: module(*pair)[:2]  # noqa: E731
    pairs: Callable[..., Any] = lambda generator: (  # noqa: E731
        *_images(generator),
        generator.integers(64, size=(4, 8), dtype=np.int32),
    )
    yield Case("big_vision: SigLIP", siglip, pairs, embeddings, has_option=True)


def _matmuls(dtype: Any) -> dict[str, Any]:
    return {} if dtype is None else {"dtype_mm": "bfloat16"}


def _vit(dtype: Any, **options: Any) -> Any:
    return _module("big_vision.models.vit").Model(**options, **_matmuls(dtype))


def _siglip(dtype: Any, image: dict[str, Any], text: dict[str, Any]) -> Any:
    return _module("big_vision.models.proj.image_text.two_towers").Model(
        image={"pool_type": "map", **image, **_matmuls(dtype)},
        text=text,
        out_dim=(None, 64),
        temperature_init=10.0,
        bias_init=-10.0,
    )


def _scenic() -> Iterator[Case]:
    """Yields ViT with learned and with fixed positions, ResNet, and attention alone."""
    train: Callable[..., Any] = lambda module, images: module(images, train=True)  # noqa: E731
    size = {"num_layers": 2, "mlp_dim": 128, "num_heads": 4, "hidden_size": 64}
    vit = functools.partial(
        _of_scenic("projects.baselines.vit", "ViT"),
        **size,
        patches=SimpleNamespace(size=(8, 8)),
        num_classes=10,
        stochastic_depth=0.1,
    )
    yield Case("scenic: ViT", vit, _images, train, has_option=True)
    fixed = functools.partial(vit, positional_embedding="sinusoidal_2d", classifier="map")
    yield Case("scenic: ViT, fixed positions", fixed, _images, train, has_option=True)
    resnet = functools.partial(
        _of_scenic("projects.baselines.resnet", "ResNet"),
        num_outputs=10,
        num_layers=11,
        num_filters=16,
    )
    yield Case("scenic: ResNet", resnet, _images, train, has_option=True)
    attention = functools.partial(
        _of_scenic("model_lib.layers.attention_layers", "MultiHeadAttention"),
        num_heads=4,
        dropout_rate=0.1,
    )
    inputs: Callable[..., Any] = lambda generator: (  # noqa: E731
        generator.normal(size=(4, 16, 64)).astype(np.float32),
    )
    attend: Callable[..., Any] = lambda module, x: module(x, None)  # noqa: E731
    yield Case("scenic: MultiHeadAttention", attention, inputs, attend, has_option=True)


def _of_scenic(module: str, name: str) -> Callable[..., Any]:
    def make(dtype: Any, **options: Any) -> Any:
        half = {} if dtype is None else {"dtype": dtype}
        return getattr(_module(f"scenic.{module}"), name)(**options, **half)

    return make


# --------------------------------------------------------------------------------------------------
# bonsai and tunix, of nnx: without a dtype option they compute in the dtype of their weights
# --------------------------------------------------------------------------------------------------


def _stored_in(model: Any, dtype: Any) -> Any:
    """Casts the state of a model to `dtype`, as loaders of checkpoints do; None casts none."""
    if dtype is not None:
        model.stored_dtype = str(jnp.dtype(dtype))
        graph, state = nnx.split(model)  # buffers too, which are no variables
        model = nnx.merge(graph, policy.cast_floating(state, dtype))
    return model


def _in_stored_dtype(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a call of a model that has float32 params in the dtype of `_stored_in`, inputs
    included.
    """

    @functools.wraps(call)
    def cast(model: Any, *inputs: Any) -> Any:
        dtype = getattr(model, "stored_dtype", None)
        if dtype is None:
            return call(model, *inputs)
        return call(_stored_in(model, dtype), *policy.cast_floating(inputs, dtype))

    return cast


def _bonsai() -> Iterator[Case]:
    """Yields ViT."""

    def make(dtype: Any) -> Any:
        modeling = _module("bonsai.models.vit.modeling")
        sizes = {"image_size": (32, 32), "patch_size": (8, 8), "hidden_dim": 64, "num_heads": 4}
        sizes |= {"mlp_dim": 128, "num_layers": 2, "num_labels": 10}
        config = dataclasses.replace(modeling.ModelConfig.vit_p16_224(), **sizes)
        return _stored_in(modeling.ViTClassificationModel(config, rngs=nnx.Rngs(0)), dtype)

    classes = _in_stored_dtype(lambda model, images: model(images, rngs=None))
    yield Case("bonsai: ViT", make, _images, classes, has_option=True)


def _tunix() -> Iterator[Case]:
    """Yields Llama 3, and Qwen3 without and with experts."""
    yield Case("tunix: Llama 3", _llama3, _tokens, _logits, has_option=True)
    yield Case("tunix: Qwen3", _qwen3, _tokens, _logits, has_option=True)
    experts = functools.partial(_qwen3, num_experts=4, num_experts_per_tok=2)
    yield Case("tunix: Qwen3, with experts", experts, _tokens, _logits, has_option=True)


_SIZES = {
    "num_layers": 2,
    "vocab_size": 64,
    "embed_dim": 64,
    "hidden_dim": 128,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
    "rope_theta": 500_000,
    "norm_eps": 1e-5,
}


def _llama3(dtype: Any) -> Any:
    llama3 = _module("tunix.models.llama3.model")
    return _stored_in(llama3.Llama3(llama3.ModelConfig(**_SIZES), rngs=nnx.Rngs(0)), dtype)


def _qwen3(dtype: Any, **options: Any) -> Any:
    qwen3 = _module("tunix.models.qwen3.model")
    half = {} if dtype is None else {"dtype": dtype}
    return qwen3.Qwen3(qwen3.ModelConfig(**_SIZES, **options, **half), rngs=nnx.Rngs(0))


@_in_stored_dtype
def _logits(model: Any, tokens: Any) -> Any:
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (batch, length, length))
    return model(tokens, positions, None, mask)[0]

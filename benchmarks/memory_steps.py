"""Ten train steps, as shapes: each takes 1 to 2.5 GiB, and none of them the same way as another.

Some take their memory for params and the optimizer's state, some for the activations that backward
reads, one for the logits of a large vocabulary, one for the gradients of microbatches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import optax

from benchmarks import linen_models, nnx_models
from mpmodules import linen, nnx, use_policy
from policy import (
    accumulate_gradients,
    apply_gradients,
    loss_scale_of,
    mixed_precision,
    select_tree,
    split_batch,
    value_and_grad,
)
from policy.autocasting.transform import autocast

F32, I32 = jnp.float32, jnp.int32
# Modules, which hash.
FLAX: Any = flax.linen
LINEN: Any = linen
NNX: Any = nnx
Loss = Callable[..., tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step and shapes to call it with.

    Attributes:
      function: ``(params, opt_state, state, x, y) -> (params, opt_state, state, loss)``.
      arguments: trees of `jax.ShapeDtypeStruct`.
      init: the optimizer's, from params to its state.
      donated: positions of the arguments whose memory the results take.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    init: Callable[[Any], Any]
    donated: tuple[int, ...] = (0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss, ``loss(params, state, x, y) -> (loss, state)``, and the shapes of its trees."""

    loss: Loss
    params: Any
    state: Any


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def loss_of(outputs: jax.Array, y: jax.Array) -> jax.Array:
    """The mean cross-entropy of integer labels, or the mean square error."""
    outputs = outputs.astype(F32)
    if jnp.issubdtype(y.dtype, jnp.floating):
        return jnp.mean(jnp.square(outputs - y))
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


def of_linen(module: Any, x: Any, policy: str | None) -> Model:
    """A linen module; the policy decides how params are stored, too."""

    def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
        outputs, state = module.apply({"params": params, **state}, x, mutable=list(state))
        return loss_of(outputs, y), state

    with use_policy(policy):
        state = dict(jax.eval_shape(module.init, jax.random.key(0), x))
    return Model(loss, state.pop("params"), state)


def of_nnx(build: Callable[[], Any]) -> Model:
    """An nnx model, from a function that makes it: it captures its policy."""
    graph, params, state = flax.nnx.split(flax.nnx.eval_shape(build), flax.nnx.Param, ...)

    def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
        model = flax.nnx.merge(graph, params, state, copy=True)
        return loss_of(model(x), y), flax.nnx.state(model, flax.nnx.Not(flax.nnx.Param))

    return Model(loss, params, state)


def train_step(
    model: Model,
    tx: optax.GradientTransformation,
    policy: str,
    x: Any,
    y: Any,
    *,
    in_force: str | None = None,
    microbatches: int = 1,
    **options: Any,
) -> Step:
    """A step as the README has it.

    Args:
      in_force: the policy around the loss; None where the model has its own.
      microbatches: into how many the batch is split.
      **options: of `mixed_precision`.
    """
    wrapped = mixed_precision(tx, policy, **options)
    is_scaled = "loss_scale" in options
    loss = use_policy(in_force)(model.loss) if in_force else model.loss

    def step(params: Any, opt_state: Any, state: Any, x: Any, y: Any) -> Any:
        def of_batch(params: Any, batch: Any) -> Any:
            scale = loss_scale_of(opt_state) if is_scaled else None
            scaled = value_and_grad(loss, has_aux=True, loss_scale=scale, grads="compute")
            return scaled(params, state, *batch)

        if microbatches == 1:
            (value, new), grads = of_batch(params, (x, y))
        else:
            batches = split_batch((x, y), microbatches)
            (value, new), grads = accumulate_gradients(of_batch, params, batches)
        params, opt_state, finite = apply_gradients(wrapped, params, opt_state, grads)
        return params, opt_state, select_tree(finite, new, state), value

    arguments = model.params, jax.eval_shape(wrapped.init, model.params), model.state, x, y
    return Step(step, arguments, wrapped.init)


# --------------------------------------------------------------------------------------------------
# Models that the other tables don't have
# --------------------------------------------------------------------------------------------------


class Recurrent(nnx.Module):
    """An LSTM over a sequence, scanned, and logits of its last output."""

    def __init__(self, width: int, classes: int, rngs: Any):
        self.recurrent = nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs))
        self.logits = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.logits(self.recurrent(x)[:, -1])


class Tables(linen.Module):
    """Embeddings of several features of an item, and dense layers of all of them together."""

    features: int
    rows: int
    width: int

    @linen.compact
    def __call__(self, items: jax.Array) -> jax.Array:
        found = [
            linen.Embed(self.rows, self.width, name=f"feature_{i}")(items[:, i])
            for i in range(self.features)
        ]
        x = linen.relu(linen.Dense(self.width)(jnp.concatenate(found, -1)))
        return linen.Dense(1)(x)


@functools.cache
def scanned_decoder() -> Any:
    """A decoder's class: one layer, scanned over, of which backward keeps the inputs alone."""
    Block = linen_models.of(LINEN).Block

    class Layer(linen.Module):
        heads: int

        @linen.compact
        def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
            return Block(self.heads)(x, mask), None

    class Decoder(linen.Module):
        layers: int
        width: int
        heads: int
        vocabulary: int

        @linen.compact
        def __call__(self, tokens: jax.Array) -> jax.Array:
            over = linen.scan(
                linen.remat(Layer, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=linen.broadcast,  # pyright: ignore[reportArgumentType]
                length=self.layers,
            )
            x = linen.Embed(self.vocabulary, self.width)(tokens)
            x, _ = over(self.heads, name="layers")(x, linen.make_causal_mask(tokens))
            return linen.Dense(self.vocabulary, name="logits")(linen.LayerNorm(name="norm")(x))

    return Decoder


# --------------------------------------------------------------------------------------------------
# The steps
# --------------------------------------------------------------------------------------------------


def mlp(small: bool) -> Step:
    """Params and AdamW's moments in float32: nothing else is large."""
    width, batch = (32, 4) if small else (4096, 32)
    x = shape(batch, width)
    model = of_linen(linen_models.of(LINEN).Mlp(layers=5, width=width), x, "float32")
    return train_step(model, optax.adamw(1e-3), "float32", x, x, in_force="float32")


def resnet(small: bool) -> Step:
    """Activations of convolutions and BatchNorm."""
    sizes = {"filters": 4, "stages": (1,)} if small else {"filters": 32, "stages": (2, 2)}
    policy, (batch, pixels) = "mixed_bfloat16", (2, 32) if small else (40, 192)
    x, y = shape(batch, pixels, pixels, 3), shape(batch, dtype=I32)
    build = nnx_models.of(NNX).ResNet
    model = of_nnx(lambda: build(**sizes, dtype_policy=policy, rngs=flax.nnx.Rngs(0)))
    return train_step(model, optax.sgd(1e-3, 0.9, nesterov=True), policy, x, y)


def vit(small: bool) -> Step:
    """Activations of attention in float32."""
    sizes = {"layers": 1, "width": 16, "heads": 2} if small else {"layers": 4, "width": 192}
    batch, pixels = (2, 32) if small else (48, 224)
    x, y = shape(batch, pixels, pixels, 3), shape(batch, dtype=I32)
    build = nnx_models.of(NNX).VisionTransformer
    sizes |= {"dtype_policy": "float32"}
    model = of_nnx(lambda: build(**sizes, rngs=flax.nnx.Rngs(0)))
    return train_step(model, optax.adamw(1e-3), "float32", x, y)


def vocabulary(small: bool) -> Step:
    """Logits of 65,536 tokens, their softmax and its cotangent."""
    policy, tokens = "mixed_bfloat16", shape(*((2, 8) if small else (8, 128)), dtype=I32)
    width, words = (16, 32) if small else (256, 65536)
    module = linen_models.of(LINEN).Transformer(
        layers=1 if small else 2, width=width, heads=4, vocabulary=words
    )
    model = of_linen(module, tokens, policy)
    return train_step(model, optax.adamw(1e-3), policy, tokens, tokens, in_force=policy)


def lstm(small: bool) -> Step:
    """Residuals of a scan, one of each step, in float16 and with a loss scale."""
    policy, (batch, length, width) = "mixed_float16", (2, 4, 8) if small else (1280, 512, 64)
    x, y = shape(batch, length, width), shape(batch, dtype=I32)

    def build() -> Any:
        return Recurrent(width, 8, flax.nnx.Rngs(0), dtype_policy=policy)  # pyright: ignore[reportCallIssue]

    return train_step(of_nnx(build), optax.adam(1e-3), policy, x, y, loss_scale="dynamic")


def embeddings(small: bool) -> Step:
    """Tables of bfloat16 params with the remainders of float32 masters, and dense gradients."""
    policy, features = "bfloat16", 4
    rows, width, batch = (16, 8, 4) if small else (250_000, 64, 4096)
    x, y = shape(batch, features, dtype=I32), shape(batch, 1)
    model = of_linen(Tables(features, rows, width), x, policy)
    return train_step(
        model, optax.adamw(1e-3), policy, x, y, in_force=policy, master_weights="remainder"
    )


def scanned(small: bool) -> Step:
    """A decoder whose layers are scanned and rematerialized, with params in bfloat16."""
    policy, tokens = "bfloat16", shape(*((2, 8) if small else (4, 32)), dtype=I32)
    layers, width, words = (2, 16, 32) if small else (8, 1024, 8192)
    module = scanned_decoder()(layers, width, 4 if small else 16, words)
    model = of_linen(module, tokens, policy)
    return train_step(model, optax.adamw(1e-3), policy, tokens, tokens, in_force=policy)


def eight_bit_moments(small: bool) -> Step:
    """An encoder whose moments are stored in 8 bits."""
    policy, tokens = "mixed_bfloat16", shape(*((2, 8) if small else (2, 32)), dtype=I32)
    sizes = {"layers": 1 if small else 8, "width": 128 if small else 1024, "heads": 8}
    build = nnx_models.of(NNX).Transformer

    def built() -> Any:
        return build(
            **sizes, vocabulary=4096, causal=False, dtype_policy=policy, rngs=flax.nnx.Rngs(0)
        )

    moments = {"mu": "int8", "nu": "int8"}
    options = {"moment_dtype": moments, "key": jax.random.key(0)}
    return train_step(of_nnx(built), optax.adamw(1e-3), policy, tokens, tokens, **options)


def microbatches(small: bool) -> Step:
    """A decoder in float16, its gradients summed over four microbatches."""
    policy, tokens = "mixed_float16", shape(*((4, 8) if small else (8, 32)), dtype=I32)
    sizes = {"layers": 1, "width": 16} if small else {"layers": 6, "width": 768}
    module = linen_models.of(LINEN).Transformer(**sizes, heads=4, vocabulary=8192)
    options = {"microbatches": 4, "loss_scale": "dynamic", "in_force": policy}
    model = of_linen(module, tokens, policy)
    return train_step(model, optax.adamw(1e-3), policy, tokens, tokens, **options)


def autocasted(small: bool) -> Step:
    """An encoder of Flax's own layers under autocast: attention over long texts."""
    batch, length = (2, 8) if small else (4, 1024)
    tokens = shape(batch, length, dtype=I32)
    sizes = {"layers": 1, "width": 16} if small else {"layers": 5, "width": 128}
    module = linen_models.of(FLAX).Transformer(
        **sizes, heads=4, vocabulary=256, causal=False, length=length
    )
    plain = of_linen(module, tokens, None)
    model = dataclasses.replace(plain, loss=autocast(plain.loss, "mixed_bfloat16", params=0))
    return train_step(model, optax.adamw(1e-3), "mixed_bfloat16", tokens, tokens)


STEPS: dict[str, Callable[[bool], Step]] = {
    "MLP, linen, float32, AdamW": mlp,
    "ResNet, nnx, mixed_bfloat16, SGD": resnet,
    "ViT, nnx, float32, AdamW": vit,
    "decoder, 65536 tokens, linen, mixed_bfloat16": vocabulary,
    "LSTM, nnx, mixed_float16, loss scale": lstm,
    "embeddings, linen, bfloat16, remainders": embeddings,
    "decoder, scanned, remat, linen, bfloat16": scanned,
    "encoder, nnx, moments in 8 bits": eight_bit_moments,
    "decoder, linen, mixed_float16, microbatches": microbatches,
    "encoder, Flax's, autocast": autocasted,
}

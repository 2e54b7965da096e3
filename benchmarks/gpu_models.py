"""Train steps of whole models: ours as the README has them, by hand as Flax's examples do, in the
same dtypes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

from benchmarks import linen_models
from benchmarks.gpu_timing import Stepper
from mpmodules import linen as our_linen
from policy import apply_gradients, loss_scale_of, mixed_precision, value_and_grad

F32, I32 = jnp.float32, jnp.int32
LEARNING_RATE = 1e-4
FULL_MEMORY = 55e9  # an 80 GB device, of which JAX takes three quarters


@dataclasses.dataclass(frozen=True)
class Setting:
    """Dtypes of a run: float32 params, and matmuls in `dtype`.

    Attributes:
      name: as it is printed.
      dtype: threaded by hand; None is float32.
      policy: ours.
      precision: of float32 matmuls and convolutions, for `jax.default_matmul_precision`.
    """

    name: str
    dtype: Any
    policy: str
    precision: str | None = None

    @property
    def is_scaled(self) -> bool:
        return self.dtype == jnp.float16


SETTINGS = {
    "bf16": Setting("bf16", jnp.bfloat16, "mixed_bfloat16"),
    "f16": Setting("f16", jnp.float16, "mixed_float16"),
    "TF32": Setting("TF32", None, "float32", "tensorfloat32"),
    "float32": Setting("float32", None, "float32", "highest"),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, and what one step trains it on.

    Attributes:
      name: as it is printed.
      make: the module, from the layers' namespace and the dtype threaded by hand.
      x: the input.
      y: its labels.
      units: what a step's throughput counts, "tokens/s" or "images/s".
      tx: the optimizer.
    """

    name: str
    make: Callable[[Any, Any], Any]
    x: jax.ShapeDtypeStruct
    y: jax.ShapeDtypeStruct
    units: str
    tx: optax.GradientTransformation

    @property
    def count(self) -> int:
        """Tokens or images of a step."""
        return math.prod(self.y.shape)

    @property
    def classes(self) -> int:
        return jax.eval_shape(
            self.make(flax.linen, None).init_with_output, jax.random.key(0), self.x
        )[0].shape[-1]


def models(memory: float, *, tiny: bool) -> dict[str, Model]:
    """GPT-2's small shape (Radford et al. 2019) with 12 layers, ResNet-50 and ViT-S/16.

    Args:
      memory: bytes of the device: batches are halved, once or more, where there is less than
        FULL_MEMORY.
      tiny: one layer each, for a CPU.
    """
    share = 0.5 ** max(0, math.ceil(math.log2(FULL_MEMORY / memory)))
    if tiny:
        decoder, resnet = (
            {"layers": 1, "width": 16, "heads": 2, "vocabulary": 32},
            {"stages": (1,), "filters": 4},
        )
        vit, (batch, length, images, patches, size) = (
            {"layers": 1, "width": 16, "heads": 2},
            (2, 8, 2, 2, 32),
        )
    else:
        decoder = {"layers": 12, "width": 768, "heads": 12, "vocabulary": 32768}
        resnet, vit = {}, {}
        batch, images, patches = (max(1, int(full * share)) for full in (8, 256, 256))
        length, size = 1024, 224
    tokens = jax.ShapeDtypeStruct((batch, length), I32)
    shapes = {n: jax.ShapeDtypeStruct((n, size, size, 3), F32) for n in (images, patches)}
    labels = {n: jax.ShapeDtypeStruct((n,), I32) for n in (images, patches)}
    adamw, momentum = optax.adamw(LEARNING_RATE), optax.sgd(LEARNING_RATE, 0.9, nesterov=True)
    of = linen_models.of
    found = [
        Model(
            "decoder",
            lambda nn, d: of(nn).Transformer(d, **decoder),
            tokens,
            tokens,
            "tokens/s",
            adamw,
        ),
        Model(
            "ResNet-50",
            lambda nn, d: of(nn).ResNet(d, **resnet),
            shapes[images],
            labels[images],
            "images/s",
            momentum,
        ),
        Model(
            "ViT-S",
            lambda nn, d: of(nn).VisionTransformer(d, **vit),
            shapes[patches],
            labels[patches],
            "images/s",
            adamw,
        ),
    ]
    return {model.name: model for model in found}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), labels).mean()


def variables(model: Model) -> tuple[Any, dict[str, Any]]:
    """Params and other collections, filled without compiling an `init`: this is about speed, and
    numbers do it.

    Kernels and embeddings are normal, of deviation 0.02; scales and variances one; biases and means
    zero.
    """
    shapes = jax.eval_shape(model.make(flax.linen, None).init, jax.random.key(0), model.x)
    block = np.random.default_rng(0).standard_normal(2**20, np.float32) * np.float32(0.02)

    def filled(path: Any, leaf: Any) -> jax.Array:
        name = path[-1].key
        if name in ("scale", "var"):
            return jnp.ones(leaf.shape, leaf.dtype)
        if name in ("bias", "mean"):
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jnp.asarray(np.resize(block, leaf.shape))

    filled_tree = dict(jax.tree_util.tree_map_with_path(filled, shapes))
    return filled_tree.pop("params"), filled_tree


def batch(model: Model) -> tuple[jax.Array, jax.Array]:
    """A batch of random numbers."""
    generator, classes = np.random.default_rng(1), model.classes
    if jnp.issubdtype(model.x.dtype, jnp.floating):
        x = generator.standard_normal(model.x.shape, np.float32)
    else:
        x = generator.integers(0, classes, model.x.shape, np.int32)
    return jnp.asarray(x), jnp.asarray(generator.integers(0, classes, model.y.shape, np.int32))


def _loss(module: Any) -> Callable[..., tuple[jax.Array, Any]]:
    def loss(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        logits, state = module.apply({"params": params, **state}, x, mutable=list(state))
        return cross_entropy(logits, y), state

    return loss


def ours(model: Model, setting: Setting) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """This library's init of the optimizer, and its train step ``(params, opt_state, state), x,
    y``.
    """
    loss = _loss(model.make(our_linen, None))
    options = {"loss_scale": "dynamic"} if setting.is_scaled else {"skip_nonfinite": False}
    tx = mixed_precision(model.tx, setting.policy, **options)  # pyright: ignore[reportArgumentType]

    def step(carry: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state, state = carry
        scale = loss_scale_of(opt_state) if setting.is_scaled else None
        fn = value_and_grad(
            loss, has_aux=True, policy=setting.policy, loss_scale=scale, grads="compute"
        )
        (value, new), grads = fn(params, state, x, y)
        params, opt_state, finite = apply_gradients(tx, params, opt_state, grads)
        if setting.is_scaled:
            new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return (params, opt_state, new), value

    return tx.init, step


def by_hand(model: Model, setting: Setting) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """The step of Flax's ImageNet example: dtypes threaded through, and in float16 its
    `DynamicScale`.
    """
    loss = _loss(model.make(flax.linen, setting.dtype))

    def init(params: Any) -> Any:
        return model.tx.init(params), DynamicScale() if setting.is_scaled else None

    def step(carry: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, (opt_state, scale), state = carry
        if scale is None:
            (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params, state, x, y)
            updates, opt_state = model.tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), (opt_state, None), new), value
        scale, finite, (value, new), grads = scale.value_and_grad(loss, has_aux=True)(
            params, state, x, y
        )
        updates, new_opt_state = model.tx.update(grads, opt_state, params)
        stepped = optax.apply_updates(params, updates), new_opt_state, new
        kept = params, opt_state, state
        params, opt_state, state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), stepped, kept)
        return (params, (opt_state, scale), state), value

    return init, step


def stepper(
    model: Model,
    setting: Setting,
    make: Callable[[Model, Setting], tuple[Callable[[Any], Any], Callable[..., Any]]],
) -> Stepper:
    """The compiled train step, on the device with params, state and a batch."""
    init, step = make(model, setting)
    params, state = variables(model)
    opt_state = jax.jit(init)(params)
    with jax.default_matmul_precision(setting.precision):
        return Stepper.of(step, (params, opt_state, state), *batch(model))

"""The shape of Flax's imagenet example, small: a ResNet and its train step with a dynamic loss
scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state

CLASSES = 5


class ResNetBlock(nn.Module):
    filters: int
    conv: Any
    norm: Any
    act: Callable
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        residual = x
        y = self.act(self.norm()(self.conv(self.filters, (3, 3), self.strides)(x)))
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return self.act(residual + y)


class ResNet(nn.Module):
    """(n, size, size, 3) -> (n, CLASSES) logits."""

    stage_sizes: Sequence[int] = (1, 1)
    num_filters: int = 8
    dtype: Any = jnp.float32
    act: Callable = nn.relu

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
        )
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, block_size in enumerate(self.stage_sizes):
            for j in range(block_size):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = ResNetBlock(
                    self.num_filters * 2**i, strides=strides, conv=conv, norm=norm, act=self.act
                )(x)
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dense(CLASSES, dtype=self.dtype)(x)
        x = jnp.asarray(x, self.dtype)
        return x


def create_model(half_precision):
    platform = jax.local_devices()[0].platform
    model_dtype = jnp.float32
    if half_precision:
        model_dtype = jnp.bfloat16 if platform == "tpu" else jnp.float16
    return ResNet(dtype=model_dtype)


def initialized(key, image_size, model):
    shape = (1, image_size, image_size, 3)
    variables = model.init(key, jnp.ones(shape, model.dtype))
    return variables["params"], variables["batch_stats"]


def cross_entropy_loss(logits, labels):
    return jnp.mean(
        optax.softmax_cross_entropy(logits=logits, labels=jax.nn.one_hot(labels, CLASSES))
    )


class TrainState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: Any


def create_train_state(key, model, image_size, half_precision):
    dynamic_scale = None
    if half_precision:
        dynamic_scale = dynamic_scale_lib.DynamicScale()
    params, batch_stats = initialized(key, image_size, model)
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    return TrainState.create(
        apply_fn=model.apply,
        params=params,
        tx=tx,
        batch_stats=batch_stats,
        dynamic_scale=dynamic_scale,
    )


def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_model_state = state.apply_fn(variables, images, mutable=["batch_stats"])
        loss = cross_entropy_loss(logits, labels)
        weight_l2 = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + 0.5 * 1e-4 * weight_l2, new_model_state

    dynamic_scale, is_finite = state.dynamic_scale, True
    if dynamic_scale:
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        dynamic_scale, is_finite, (loss, model_state), grads = grad_fn(state.params)
    else:
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, model_state), grads = grad_fn(state.params)
    new_state = state.apply_gradients(grads=grads, batch_stats=model_state["batch_stats"])
    if dynamic_scale:
        select = functools.partial(jnp.where, is_finite)
        new_state = new_state.replace(
            opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),
            params=jax.tree.map(select, new_state.params, state.params),
            dynamic_scale=dynamic_scale,
        )
    return new_state, loss

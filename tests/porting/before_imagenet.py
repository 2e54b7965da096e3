"""The shape of Flax's imagenet example, small: a ResNet and its train step with a dynamic loss
scale.

What a port changes is marked: `goes` on a line that it deletes, and `# +` before one that it
writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import dynamic_scale as dynamic_scale_lib  # goes
from flax.training import train_state

# + from policy import loss_scale_of, mixed_precision, select_tree, value_and_grad
# + from policy.optim import finite_of

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
    dtype: Any = jnp.float32  # goes
    act: Callable = nn.relu

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)  # goes
        # + conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,  # goes
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
        x = nn.Dense(CLASSES, dtype=self.dtype)(x)  # goes
        # + x = nn.Dense(CLASSES)(x)
        x = jnp.asarray(x, self.dtype)  # goes
        return x


def create_model(half_precision):  # goes
    platform = jax.local_devices()[0].platform  # goes
    model_dtype = jnp.float32  # goes
    if half_precision:  # goes
        model_dtype = jnp.bfloat16 if platform == "tpu" else jnp.float16  # goes
    return ResNet(dtype=model_dtype)  # goes


# + def create_model(policy):
# +     return ResNet(dtype_policy=policy)


def initialized(key, image_size, model):
    shape = (1, image_size, image_size, 3)
    variables = model.init(key, jnp.ones(shape, model.dtype))  # goes
    # + variables = model.init(key, jnp.ones(shape))
    return variables["params"], variables["batch_stats"]


def cross_entropy_loss(logits, labels):
    return jnp.mean(
        optax.softmax_cross_entropy(logits=logits, labels=jax.nn.one_hot(labels, CLASSES))
    )


class TrainState(train_state.TrainState):
    batch_stats: Any
    dynamic_scale: Any  # goes


# + def create_train_state(key, model, image_size, policy):
def create_train_state(key, model, image_size, half_precision):  # goes
    dynamic_scale = None  # goes
    if half_precision:  # goes
        dynamic_scale = dynamic_scale_lib.DynamicScale()  # goes
    params, batch_stats = initialized(key, image_size, model)
    tx = optax.sgd(0.1, momentum=0.9, nesterov=True)
    # + tx = mixed_precision(tx, policy, loss_scale="dynamic")
    return TrainState.create(
        apply_fn=model.apply,
        params=params,
        tx=tx,
        batch_stats=batch_stats,
        dynamic_scale=dynamic_scale,  # goes
    )


def train_step(state, images, labels):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new_model_state = state.apply_fn(variables, images, mutable=["batch_stats"])
        loss = cross_entropy_loss(logits, labels)
        weight_l2 = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        return loss + 0.5 * 1e-4 * weight_l2, new_model_state

    dynamic_scale, is_finite = state.dynamic_scale, True  # goes
    if dynamic_scale:  # goes
        grad_fn = dynamic_scale.value_and_grad(loss_fn, has_aux=True)  # goes
        dynamic_scale, is_finite, (loss, model_state), grads = grad_fn(state.params)  # goes
    else:  # goes
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)  # goes
        (loss, model_state), grads = grad_fn(state.params)  # goes
    # + grad_fn = value_and_grad(loss_fn, has_aux=True, loss_scale=loss_scale_of(state.opt_state))
    # + (loss, model_state), grads = grad_fn(state.params)
    new_state = state.apply_gradients(grads=grads, batch_stats=model_state["batch_stats"])
    if dynamic_scale:  # goes
        select = functools.partial(jnp.where, is_finite)  # goes
        new_state = new_state.replace(  # goes
            opt_state=jax.tree.map(select, new_state.opt_state, state.opt_state),  # goes
            params=jax.tree.map(select, new_state.params, state.params),  # goes
            dynamic_scale=dynamic_scale,  # goes
        )  # goes
    # + finite = finite_of(new_state.opt_state)
    # + batch_stats = select_tree(finite, new_state.batch_stats, state.batch_stats)
    # + new_state = new_state.replace(batch_stats=batch_stats)
    return new_state, loss

"""A decoder of Llama's shape whose step is partitioned and rematerialized as a published run was.

Blocks as in `benchmarks/accel/scale_model.py`; the last layer and the loss are one function, which
never holds the logits of all tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, PartitionSpec

import policy
from benchmarks.accel.scale_model import Size, rotary
from benchmarks.estimates.training import adamw, devices_of, int32, train_step
from mpmodules import linen as nn
from mpmodules import nnx

TENSOR = "tensor"  # the axis that heads, the width of the MLP and the vocabulary are split over


@dataclasses.dataclass(frozen=True)
class Remat:
    """The values of a block that backward finds instead of computing them again.

    Attributes:
      saved: names of those that stay in the device's memory.
      offloaded: names of those that go to the host's memory and come back.
    """

    saved: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()

    def policy(self) -> Any:
        """Returns the policy of `jax.checkpoint`."""
        if not self.offloaded:
            return jax.checkpoint_policies.save_only_these_names(*self.saved)
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.saved),
            names_which_can_be_offloaded=list(self.offloaded),
            offload_src="device",
            offload_dst="pinned_host",
        )


PROJECTIONS = ("query", "key", "value", "out", "gate", "up", "down")
FULL = Remat()
MINIMAL = Remat(saved=PROJECTIONS)  # the products of all weights


def auto_axes() -> list[str]:
    """Returns the axes of the mesh in force that XLA partitions over; none without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return [name for name, kind in kinds if kind == AxisType.Auto]


def split(x: jax.Array) -> jax.Array:
    """Constrains activations (B, T, width): the batch is split over all axes of the mesh but
    `TENSOR`, and the width over that. Without a mesh they stay as they are.
    """
    axes = auto_axes()
    return lax.with_sharding_constraint(x, _spec(axes, None, TENSOR)) if axes else x


def attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Computes causal attention (B, T, N, H) on each device's texts and heads, so that the fused
    kernel takes it.
    """
    attend, axes = functools.partial(nnx.dot_product_attention, is_causal=True), auto_axes()
    dtype = policy.compute_dtype()
    query, key, value = (x if dtype is None else x.astype(dtype) for x in (query, key, value))
    if not axes:
        return attend(query, key, value)
    spec = _spec(axes, None, TENSOR, None)
    return jax.shard_map(attend, in_specs=(spec,) * 3, out_specs=spec)(query, key, value)


def _spec(axes: Sequence[str], *names: str | None) -> PartitionSpec:
    """Splits the batch over all axes but `TENSOR`, and further sides over those of `names`."""
    rows = tuple(name for name in axes if name != TENSOR)
    return PartitionSpec(rows, *[name if name in axes else None for name in names])


def param_spec(shape: Sequence[int], size: Size, axes: Sequence[str]) -> PartitionSpec:
    """Splits a kernel's side of the model's width over "fsdp", and its other side, of heads, the
    MLP or the vocabulary, over `TENSOR`; norms' scales stay whole.

    Args:
      shape: of the param, whose first axis may be the blocks'.
      size: of the model.
      axes: the names of the mesh's.
    """
    is_of_blocks = len(shape) > 2 or shape[0] == size.layers
    sides = shape[1:] if is_of_blocks else shape
    if len(sides) < 2:
        return PartitionSpec()
    inner = [None] * (len(sides) - 2)
    names = ["fsdp", TENSOR, *inner] if sides[0] == size.width else [TENSOR, *inner, "fsdp"]
    names = [name if name in axes else None for name in names]
    return PartitionSpec(*[None] * is_of_blocks, *names)


class Block(nn.Module):
    size: Size

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:  # (B, T, width)
        size = self.size
        norm = functools.partial(nn.RMSNorm, epsilon=1e-5)

        def linear(features: Any, name: str, x: jax.Array, axis: Any = -1) -> jax.Array:
            layer = nn.DenseGeneral(features, axis=axis, use_bias=False, name=name)
            return checkpoint_name(layer(x), name)

        x = checkpoint_name(split(x), "input")
        h = norm(name="attention_norm")(x)
        query = linear((size.heads, size.head_width), "query", h)
        key = linear((size.key_heads, size.head_width), "key", h)
        value = linear((size.key_heads, size.head_width), "value", h)
        h = attention(rotary(query), rotary(key), value)
        x = split(x + linear(size.width, "out", h, (-2, -1)))
        h = norm(name="mlp_norm")(x)
        h = nn.silu(linear(size.mlp_width, "gate", h)) * linear(size.mlp_width, "up", h)
        return split(x + linear(size.width, "down", h)), None


class Decoder(nn.Module):
    """Returns the loss of (B, T) tokens, each but the first predicted from those before it."""

    size: Size
    remat: Remat

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size = self.size
        x = nn.Embed(size.vocabulary, size.width, name="embed")(tokens)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False, policy=self.remat.policy()),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=size.layers,
        )
        x = nn.RMSNorm(epsilon=1e-5, name="norm")(layers(size, name="layers")(split(x), None)[0])
        shape, init = (size.width, size.vocabulary), nn.initializers.lecun_normal()
        head = self.param("head", init, shape, policy.param_dtype() or jnp.float32)
        labels = jnp.roll(tokens, -1, axis=1)
        is_counted = jnp.broadcast_to(
            jnp.arange(tokens.shape[1]) < tokens.shape[1] - 1, labels.shape
        )
        return policy.losses.linear_softmax_cross_entropy(x, head, labels, weights=is_counted)


def step_of(
    size: Size, batch: int, remat: Remat, mesh: Mesh | None = None
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step under the policy in force, and the shapes that it is called with.

    Args:
      size: of the model.
      batch: texts of a device.
      remat: what is not computed again.
      mesh: the devices.
    """
    model: Any = Decoder(size, remat)
    tokens = int32(batch * devices_of(mesh), size.length)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
    axes = () if mesh is None else mesh.axis_names

    def loss_fn(params: Any, batch_stats: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        return model.apply({"params": params}, tokens), batch_stats

    def spec_of(shape: tuple[int, ...]) -> PartitionSpec:
        return param_spec(shape, size, axes)

    return train_step(loss_fn, adamw(), params, (), tokens, mesh, spec_of)

"""A train step of a decoder of 8 billion params, Llama 3's shape, its layers scanned and
rematerialized.

    python -m policy estimate benchmarks/estimates/decoder_8b.py:example \\
        --on v5e:16x16 --mesh data=4,fsdp=64
    python -m policy estimate benchmarks/estimates/decoder_8b.py:example --on v5e:16x16 \\
        --policies mixed_bfloat16 --batch 256,512 --remat full,dots_saveable --mesh fsdp=256

The model of `benchmarks/accel/scale_model.py` in linen, one text of 4096 tokens a device. Params,
moments and remainders are split over the axis `fsdp` of the mesh, or over the only axis that it
has, along the model's width; the batch is split over all axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

import mpmodules.linen
from benchmarks.accel.scale_model import Size, cross_entropy_of_states, decoder_of, param_spec
from benchmarks.estimates.training import adamw, devices_of, int32, train_step
from policy.optim.storage_modes import MasterWeights

LLAMA = Size()
KEPT = jax.checkpoint_policies.save_only_these_names("attention", "projections", "gate")

QUICK = {
    "size": Size(
        layers=2,
        width=256,
        heads=4,
        key_heads=2,
        head_width=128,
        mlp_width=1024,
        vocabulary=2048,
        length=256,
    )
}


def flops_by_hand(size: Size = LLAMA) -> float:
    """Returns the FLOPs of a device's matmuls: 6 for each token and weight of the blocks and the
    head, 12 for each pair of positions and each of the width. Of a block attention, whose operands
    are kept, and the two matmuls around what is kept of its second half run forward twice.
    """
    heads = size.head_width * (size.heads + size.key_heads)
    last = size.mlp_width * size.width
    block = 2 * size.width * heads + 3 * last
    repeated = size.width * size.heads * size.head_width + last
    pairs = size.heads * size.head_width * size.length
    layers = size.layers * (6.0 * block + 2.0 * repeated + 16.0 * pairs)
    return size.length * (layers + 6.0 * size.width * size.vocabulary)


def example(
    mesh: Mesh | None = None,
    master_weights: MasterWeights = "auto",
    moment_dtype: str | None = None,
    size: Size = LLAMA,
    batch: int | None = None,
    remat: Callable[..., Any] | None = KEPT,
) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step under the policy in force, and the shapes that it is called with.

    Args:
      mesh: the devices.
      master_weights, moment_dtype: see `adamw`.
      size: of the model.
      batch: the number of texts of a step; None for one on each device.
      remat: the checkpoint policy of a layer; None saves its input alone. The default saves as well
        what backward needs of attention, and the gate's result.
    """
    nn: Any = mpmodules.linen
    model = decoder_of(nn)(size, remat=remat)
    tokens = int32(batch or devices_of(mesh), size.length)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]

    def loss_fn(params: Any, batch_stats: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        x = model.apply({"params": params}, tokens, head=False)
        return cross_entropy_of_states(x, params["head"]["kernel"], tokens), batch_stats

    def spec_of(shape: tuple[int, ...]) -> PartitionSpec:
        axis = "fsdp" if mesh is None else mesh.axis_names[-1]
        return PartitionSpec(*(axis if name else None for name in param_spec(shape, size)))

    tx = adamw(master_weights, moment_dtype)
    return train_step(loss_fn, tx, params, (), tokens, mesh, spec_of)

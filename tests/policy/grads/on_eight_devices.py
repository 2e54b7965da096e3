"""Gradients and comparisons. `test_collectives.py` runs this file where there are eight devices."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from policy import compare, mixed_precision, use_policy
from policy.losses import linear_softmax_cross_entropy
from policy.sharding import all_reduce, collectives_of
from tests.policy.functions.linear_operands import KERNEL, LABELS, OPTIONS, X
from tests.policy.grads.across_devices import (
    BATCH,
    EVERYWHERE,
    F32,
    SPLIT,
    curve,
    f32_loss,
    loss_fn,
    placed,
    plain_step,
    replicated_step,
)


def test_eight_devices_and_one_agree_to_float32_rounding():
    tx = mixed_precision(optax.adam(1e-2), "float32", loss_scale="dynamic", clip_global_norm=0.5)
    state = tx.init(F32)
    truth, end = curve(plain_step(tx, f32_loss, "float32"), F32, state, BATCH)
    assert truth[-1] < truth[0]
    ours = functools.partial(replicated_step, tx, f32_loss, "float32", "float32")
    steps = [ours(), ours(check_vma=False), ours(microbatches=2)]
    params, held = placed((F32, state), EVERYWHERE)
    others = [curve(step, F32, state, BATCH) for step in steps]
    others.append(curve(plain_step(tx, f32_loss, "float32"), params, held, placed(BATCH, SPLIT)))
    for losses, params in others:
        np.testing.assert_allclose(losses, truth, rtol=1e-5)
        for name in F32:
            np.testing.assert_allclose(params[name], end[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_gradients_cross_once_a_step_in_the_dtype_that_is_asked(dtype, check_vma):
    options: Any = {"loss_scale": "dynamic", "clip_global_norm": 0.5}
    tx = mixed_precision(optax.adam(1e-2), "mixed_bfloat16", **options)
    step = replicated_step(tx, loss_fn, dtype, check_vma=check_vma, microbatches=2)
    args = F32, tx.init(F32), BATCH
    for stage in ("traced", "partitioned"):
        found = [(c.dtype, c.shape) for c in collectives_of(step, *args, stage=stage) if c.size > 1]
        assert sorted(found) == [(dtype, (4, 16)), (dtype, (16, 1))]
        assert all(c.axes == ("data",) for c in collectives_of(step, *args, stage=stage))
    losses, _ = curve(step, *args)
    np.testing.assert_allclose(losses, curve(plain_step(tx, loss_fn), *args)[0], rtol=0.01)


def test_a_program_that_is_in_jaxs_compilation_cache_can_still_be_read():
    assert os.environ["JAX_COMPILATION_CACHE_DIR"], "the suite has a folder of compiled programs"
    x = placed(jnp.ones(8), SPLIT)
    found = [collectives_of(jax.jit(lambda x: x.sum()), x) for _ in range(2)]
    assert found[0] == found[1] and len(found[0]) == 1


def test_the_axes_of_a_mesh_of_two_are_told_apart_in_what_xla_wrote():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    part = PartitionSpec("data", "model")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=part, out_specs=PartitionSpec(), check_vma=False
    )
    def exchanges(x):
        x = all_reduce(x, "data", "bfloat16")  # (4, 2)
        x = lax.all_gather(x, "model", axis=1, tiled=True).astype(jnp.float16)  # (4, 4)
        x = lax.psum_scatter(x, "data", tiled=True).astype(jnp.int16)  # (1, 4)
        x = lax.ppermute(x, "model", [(0, 1), (1, 0)])
        return lax.pmax(x.astype(jnp.float32), ("data", "model"))

    expected = [
        ("all-reduce", "bfloat16", (4, 2), ("data",)),
        ("all-gather", "float32", (4, 4), ("model",)),
        ("reduce-scatter", "float16", (1, 4), ("data",)),
        ("collective-permute", "int16", (1, 4), ("model",)),
        ("all-reduce", "float32", (1, 4), ("data", "model")),
    ]
    x = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, part))
    for stage in ("traced", "partitioned"):
        found = [
            (c.operation, c.dtype, c.shape, c.axes)
            for c in collectives_of(jax.jit(exchanges), x, stage=stage)
        ]
        assert found == expected


KERNEL_48 = np.ascontiguousarray(KERNEL[:, :48])  # divides over eight devices


def _last_layer(
    mode: AxisType | None,
    check_vma: bool = True,
    kernel_spec: Any = (None, "model"),
    given: Any = OPTIONS[1],
):
    """Returns the loss of a last layer on a mesh: examples over one axis, classes over the other.

    Args:
      mode: of the mesh's axes; None is manual, inside `jax.shard_map`.
      kernel_spec: the axes that the kernel (d, K) is split over.
      given: options of the loss.
    """
    kinds = (AxisType.Auto if mode is None else mode,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    examples, columns = PartitionSpec("data"), PartitionSpec(*kernel_spec)
    options: dict[str, Any] = given | {"chunk_size": 2}
    all_labels = LABELS % 48

    def loss(x, kernel):
        return linear_softmax_cross_entropy(x, kernel, all_labels, **options)

    def local(x, kernel, labels):
        split = linear_softmax_cross_entropy(x, kernel, labels, axis_name="model", **options)
        return lax.pmean(split, "data")

    def placed(x, kernel, collect=None):
        with jax.set_mesh(mesh):
            pairs = (x, examples), (kernel, columns)
            operands = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in pairs]
            if mode is not None:
                step = jax.jit(jax.value_and_grad(loss, (0, 1)))
                return step(*operands) if collect is None else collect(step, *operands)
            in_specs = (examples, columns, examples)
            kinds = {"in_specs": in_specs, "out_specs": PartitionSpec(), "check_vma": check_vma}
            mapped = jax.shard_map(local, **kinds)
            return jax.jit(jax.value_and_grad(mapped, (0, 1)))(*operands, all_labels)

    return placed, loss


@pytest.mark.parametrize(
    ("mode", "check_vma"),
    [(AxisType.Auto, True), (AxisType.Explicit, True), (None, True), (None, False)],
)
def test_a_last_layer_split_over_examples_and_classes_has_one_devices_loss(mode, check_vma):
    placed, loss = _last_layer(mode, check_vma)
    found, truth = placed(X, KERNEL), jax.value_and_grad(loss, (0, 1))(X, KERNEL)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_bfloat16_every_device_has_its_own_exponentials(check_vma):
    placed, loss = _last_layer(None, check_vma, given={"z_loss": 1e-2})
    x = X * np.where(np.arange(4) == 1, 32, 1)[:, None, None].astype(np.float32)
    with use_policy("mixed_bfloat16"):
        found, truth = placed(x, KERNEL), jax.value_and_grad(loss, (0, 1))(x, KERNEL)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        assert np.linalg.norm(np.asarray(a) - b) < 2**-10 * np.linalg.norm(b)


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kernel_spec", [("data",), (None, "model"), ("data", "model")])
def test_a_kernel_that_is_split_along_its_width_is_gathered_once(mode, kernel_spec):
    placed, loss = _last_layer(mode, kernel_spec=kernel_spec)
    found, truth = placed(X, KERNEL_48), jax.value_and_grad(loss, (0, 1))(X, KERNEL_48)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-6)
    exchanged = placed(X, KERNEL_48, collectives_of)
    gathers = [c for c in exchanged if c.operation == "all-gather"]
    of_kernel = [c for c in gathers if len(c.shape) == 2 and c.shape[0] == len(KERNEL_48)]
    assert [c.axes for c in of_kernel] == [("data",)] * (kernel_spec[0] == "data")
    assert not any("while" in c.path for c in of_kernel)


def test_a_program_on_eight_devices_is_compared_with_one_on_a_single_device():
    params, batch = placed(F32, EVERYWHERE), placed(BATCH, SPLIT)
    found = compare(f32_loss, params, batch, backward=True, beside=(f32_loss, F32, BATCH))
    assert len(found.parameters) == 2 and max(row.error for row in found.rows) < 1e-6
    half = compare(loss_fn, params, batch, beside=(f32_loss, F32, BATCH))
    assert 1e-4 < half.error < 0.1

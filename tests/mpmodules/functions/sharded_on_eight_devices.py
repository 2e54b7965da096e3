"""Fused attention over a mesh of eight devices, in Pallas's interpreter, beside XLA's formula."""

import functools
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mpmodules import linen, nnx
from mpmodules.functions import splash_attention
from mpmodules.functions.fused_attention import fused_kernel
from mpmodules.layers import attention_calls
from policy import use_policy

RNG = np.random.default_rng(0)
APIS: dict[str, Any] = {"linen": linen, "nnx": nnx}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
AXES = P(("data", "fsdp"), None, "model")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    monkeypatch.setattr(splash_attention, "INTERPRET", True)


def mesh_of(*kinds: AxisType) -> Any:
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=kinds)


def qkv(heads=4, key_heads=2, batch=(4,), length=128, width=16) -> Any:
    shapes = ((*batch, length, heads, width), *[(*batch, length, key_heads, width)] * 2)
    return tuple(jnp.asarray(RNG.normal(size=shape), "bfloat16") for shape in shapes)


def value_and_gradients(attend):
    def loss(*operands):
        return jnp.sum(jnp.square(attend(*operands).astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def assert_agree(found: Any, wanted: Any, tolerance: float = 0.02) -> None:
    """Within `tolerance` of the largest number: kernel and formula round the weights, the result
    and the logits' cotangents to bfloat16 at different places, each to 2^-9 of a number.
    """
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = float(np.abs(np.asarray(plain, np.float32)).max())
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(plain, np.float32), atol=tolerance * scale
        )


def both(attend: Any, operands: Any, **options: Any) -> Any:
    """Returns what the kernel and the formula compute."""
    run = (
        value_and_gradients(functools.partial(attend, implementation=name, **options))
        for name in ("splash", "xla")
    )
    return [each(*operands) for each in run]


SHARDED: dict[str, tuple[dict[str, Any], P]] = {
    "by batch": ({}, P(("data", "fsdp"))),
    "by batch and heads": ({}, AXES),
    "by heads": ({}, P(None, None, ("data", "model"))),
    "one key head": ({"key_heads": 1}, AXES),
    "several batch axes": ({"batch": (4, 2)}, P(("data", "fsdp"))),
}


@pytest.mark.parametrize("how", SHARDED)
@pytest.mark.parametrize("api", APIS)
def test_automatic_axes_are_named_in_a_scope(api, how):
    shapes, axes = SHARDED[how]
    operands = qkv(**shapes)
    with jax.set_mesh(mesh_of(AUTO, AUTO, AUTO)), use_policy(None, attention_axes=axes):
        operands = jax.device_put(operands, P(("data", "fsdp")))
        mask = np.tri(128, dtype=bool)
        assert_agree(*both(APIS[api].dot_product_attention, operands, mask=mask))


@pytest.mark.parametrize("api", APIS)
def test_automatic_axes_are_named_by_an_argument_and_by_flaxs_logical_rules(api):
    operands, attend = qkv(), APIS[api].dot_product_attention
    with jax.set_mesh(mesh_of(AUTO, AUTO, AUTO)):
        assert_agree(*both(attend, operands, attention_axes=AXES))
        rules = (("batch", ("data", "fsdp")), ("heads", "model"), ("embed", "fsdp"))
        with flax.linen.logical_axis_rules(rules):
            assert_agree(*both(attend, operands))
        with pytest.raises(ValueError, match="automatic axes 'data', 'fsdp', 'model' of the mesh"):
            both(attend, operands)


@pytest.mark.parametrize(
    ("kinds", "spec", "axes"),
    [
        ((EXPLICIT, EXPLICIT, EXPLICIT), AXES, None),
        ((EXPLICIT, EXPLICIT, EXPLICIT), P(None, None, "model"), None),
        ((EXPLICIT, AUTO, AUTO), P("data"), AXES),
    ],
)
def test_explicit_axes_are_read(kinds, spec, axes):
    with jax.set_mesh(mesh_of(*kinds)):
        operands = jax.device_put(qkv(), spec)
        kernel, formula = both(nnx.dot_product_attention, operands, attention_axes=axes)
        assert_agree(kernel, formula)
        assert jax.typeof(kernel[1][0]).sharding.spec == jax.typeof(operands[0]).sharding.spec


def test_axes_that_shard_map_made_manual_are_left_out():
    operands = qkv()
    attend = functools.partial(nnx.dot_product_attention, attention_axes=AXES)

    def run(implementation):
        own = lambda *x: attend(*x, implementation=implementation)  # noqa: E731
        return value_and_gradients(
            jax.shard_map(own, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        )

    with jax.set_mesh(mesh_of(AUTO, AUTO, AUTO)):
        assert_agree(*[run(name)(*operands) for name in ("splash", "xla")])


def test_segments_windows_and_empty_rows_are_those_of_the_formula():
    operands = qkv()
    lengths, ids = jnp.asarray([128, 7, 100, 0]), jnp.asarray(RNG.integers(1, 4, (4, 128)))
    ids = jnp.sort(ids, axis=-1)

    def masked(implementation, kind, lengths, ids, *operands):
        position = jnp.arange(128)
        valid = position[None] < lengths[:, None]
        masks = {
            "padding": linen.make_attention_mask(valid, valid),
            "keys": valid[:, None, None, :],
            "packing": linen.make_attention_mask(ids, ids, jnp.equal),
            "all": linen.combine_masks(
                linen.make_causal_mask(ids, dtype=bool),
                linen.make_attention_mask(valid, valid, dtype=bool),
                linen.make_attention_mask(ids, ids, jnp.equal, dtype=bool),
                dtype=bool,
            ),
            "window": (abs(position[:, None] - position[None]) <= 9)[None, None],
        }
        attend = functools.partial(
            nnx.dot_product_attention, mask=masks[kind], implementation=implementation
        )
        return value_and_gradients(attend)(*operands)

    run = jax.jit(masked, static_argnums=(0, 1))
    with jax.set_mesh(mesh_of(AUTO, AUTO, AUTO)), use_policy(None, attention_axes=AXES):
        for kind in ("padding", "keys", "packing", "all", "window"):
            assert_agree(*[run(name, kind, lengths, ids, *operands) for name in ("splash", "xla")])


@pytest.mark.parametrize("api", APIS)
def test_layers_run_it_under_scan_remat_and_vmap(api):
    attend = functools.partial(APIS[api].dot_product_attention, implementation="splash")
    formula = functools.partial(APIS[api].dot_product_attention, implementation="xla")
    operands = qkv(key_heads=4)

    def stacked(attend, *operands):
        query, key, value = operands
        policy = jax.checkpoint_policies.save_only_these_names("attention")
        block = jax.checkpoint(lambda x: attend(x, key, value, mask=jnp.tril(jnp.ones((128, 128)))))
        saved = jax.checkpoint(lambda x: attend(x, key, value), policy=policy)
        out, _ = jax.lax.scan(lambda x, _: (saved(block(x)), None), query, None, 2)
        return out

    with jax.set_mesh(mesh_of(AUTO, AUTO, AUTO)), use_policy(None, attention_axes=AXES):
        both = [
            value_and_gradients(functools.partial(stacked, each))(*operands)
            for each in (attend, formula)
        ]
        assert_agree(*both, tolerance=0.05)  # four layers, each rounded to bfloat16
        mapped = [
            jax.jit(jax.vmap(each, in_axes=(1, 1, 1)))(*qkv(batch=(4, 3)))
            for each in (attend, formula)
        ]
    assert mapped[0].shape == mapped[1].shape


class Own(linen.Module):
    @linen.compact
    def __call__(self, query, key, value):
        return nnx.dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize(
    ("kinds", "axes"), [((AUTO, AUTO, AUTO), AXES), ((EXPLICIT, EXPLICIT, EXPLICIT), None)]
)
def test_attention_of_own_code_is_split_as_that_of_layers(monkeypatch, kinds, axes):
    operands = [x.astype(jnp.float32) for x in qkv(key_heads=4)]
    attend = functools.partial(Own(dtype_policy="mixed_bfloat16").apply, {})
    with jax.set_mesh(mesh_of(*kinds)), use_policy(None, attention_axes=axes):
        operands = jax.device_put(operands, AXES)
        formula = value_and_gradients(attend)(*operands)
        text = str(jax.make_jaxpr(attend)(*operands))
        assert text.count("shard_map[") == text.count("splash_attention[") == 1
        insisting = lambda _, *args, **options: fused_kernel("splash", *args, **options)  # noqa: E731
        monkeypatch.setattr(attention_calls, "fused_kernel", insisting)
        kernel = value_and_gradients(lambda *operands: attend(*operands))(*operands)
        assert_agree(kernel, formula, tolerance=0.03)


REJECTED: dict[str, tuple[dict[str, Any], P]] = {
    "a batch of 3 over 4 devices": ({"batch": (3,)}, AXES),
    "3 heads and 3 key heads over 2 devices": ({"heads": 3, "key_heads": 3}, AXES),
    "6 heads and 3 key heads over 4 devices": (
        {"heads": 6, "key_heads": 3},
        P(None, None, ("data", "model")),
    ),
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_does_not_divide_is_rejected_by_name_where_insisted_on_and_left_to_xla_else(what):
    shapes, axes = REJECTED[what]
    with jax.set_mesh(mesh_of(AUTO, AUTO, AUTO)), use_policy(None, attention_axes=axes):
        operands = qkv(**shapes)
        nnx.dot_product_attention(*operands)
        with pytest.raises(ValueError, match=what):
            nnx.dot_product_attention(*operands, implementation="splash")


def test_operands_sharded_in_other_ways_are_rejected():
    with jax.set_mesh(mesh_of(EXPLICIT, EXPLICIT, EXPLICIT)):
        attend = functools.partial(nnx.dot_product_attention, implementation="splash")
        positions = jax.device_put(qkv(), P("data", "model"))
        with pytest.raises(ValueError, match="sharded over positions"):
            attend(*positions)
        query, key, value = qkv()
        with pytest.raises(ValueError, match="sharded differently"):
            attend(jax.device_put(query, P("data")), key, value)


def test_an_axis_that_the_mesh_does_not_have_is_rejected():
    text = "names 'tensor', but the axes of the mesh"
    with jax.set_mesh(mesh_of(AUTO, AUTO, AUTO)), pytest.raises(ValueError, match=text):
        nnx.dot_product_attention(*qkv(), attention_axes=P("tensor"))


def test_arrays_of_a_mesh_that_is_not_set_are_split_where_their_axes_are_named():
    sharding = NamedSharding(mesh_of(AUTO, AUTO, AUTO), P(("data", "fsdp")))
    operands = jax.device_put(qkv(), sharding)
    assert_agree(*both(nnx.dot_product_attention, operands, attention_axes=AXES))


class Device:
    platform, device_kind, compute_capability = "gpu", "GPU", "9.0"


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
@pytest.mark.parametrize("masked", [False, True])
def test_cudnns_kernel_runs_on_each_shard(monkeypatch, kind, masked):
    """JAX's XLA implementation plays the kernel."""
    shapes: list[Any] = []
    plain: Any = jax.nn.dot_product_attention

    def kernel(query, key, value, *, mask, bias, is_causal, implementation):
        assert implementation == "cudnn"
        shapes.append([x.shape for x in (query, key, value, mask, bias) if x is not None])
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            wide = (None if x is None else x.astype("float32") for x in (query, key, value, bias))
            return plain(*wide, mask, is_causal=is_causal).astype(query.dtype)

    operands = qkv()
    options: dict[str, Any] = {"is_causal": True}
    if masked:
        options["mask"] = jnp.asarray(RNG.random((4, 1, 1, 128)) > 0.5).at[..., 0].set(True)
        options["bias"] = jnp.asarray(RNG.normal(size=(1, 4, 128, 128)), "bfloat16")
    with jax.set_mesh(mesh_of(kind, kind, kind)), use_policy(None, attention_axes=AXES):
        operands = jax.device_put(operands, AXES)
        attend = functools.partial(nnx.dot_product_attention, **options)
        formula = value_and_gradients(functools.partial(attend, implementation="xla"))(*operands)
        monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
        monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
        assert_agree(value_and_gradients(attend)(*operands), formula)
    assert shapes[0][:2] == [(1, 128, 2, 16), (1, 128, 1, 16)]
    assert shapes[0][3:] == ([(1, 1, 128, 128), (1, 2, 128, 128)] if masked else [])

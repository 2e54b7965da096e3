"""Splash attention: its numbers in Pallas's interpreter, its derivatives, when it is chosen, and
programs for TPUs.
"""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from mpmodules import linen, nnx
from mpmodules.functions import splash_attention as _splash_attention
from policy import audit, use_policy
from policy.inspect.estimate.costing import model_flops
from policy.programs.reading.graph import Graph
from tests.benchmarks.accelerators import target
from tests.eight_devices import run_tests_on_eight_devices

RNG = np.random.default_rng(0)
APIS: dict[str, Any] = {"linen": linen, "nnx": nnx}
CALL = 'custom_call_target="tpu_custom_call"'
needs_one_device = pytest.mark.skipif(
    jax.device_count() != 1, reason="needs a process with one device"
)


def qkv(queries=128, keys=128, heads=2, key_heads=2, width=16, batch=(2,), dtype="bfloat16") -> Any:
    shapes = ((*batch, queries, heads, width), *[(*batch, keys, key_heads, width)] * 2)
    return tuple(jnp.asarray(RNG.normal(size=shape), dtype) for shape in shapes)


def exact(operands, cotangent, allowed=None, soft_cap=None):
    """Attention, and the cotangents of its operands, in float64."""
    q, k, v, ct = (np.asarray(x, np.float64) for x in (*operands, cotangent))
    groups, scale = q.shape[-2] // k.shape[-2], 1 / np.sqrt(q.shape[-1])
    k, v = (np.repeat(x, groups, axis=-2) for x in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    slope = 1.0
    if soft_cap is not None:
        capped = np.tanh(logits / soft_cap)
        logits, slope = soft_cap * capped, 1 - capped**2
    logits = logits if allowed is None else np.where(allowed, logits, -1e30)  # or a uniform row
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("bqhd,bkhd->bhqk", ct, v)
    d_logits = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    d_logits *= slope * scale * (1.0 if allowed is None else allowed)
    out = np.einsum("bhqk,bkhd->bqhd", weights, v)
    d_query = np.einsum("bhqk,bkhd->bqhd", d_logits, k)
    d_key, d_value = (np.einsum("bhqk,bqhd->bkhd", *of) for of in ((d_logits, q), (weights, ct)))
    summed = (x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3) for x in (d_key, d_value))
    return out, d_query, *summed


def assert_close(found: Any, wanted: Any, ulps: float = 1.0) -> None:
    """Within `ulps` units in the last place of bfloat16 of the largest number."""
    assert found.dtype == jnp.bfloat16
    wanted = np.asarray(wanted, np.float64)
    error = np.abs(np.asarray(found, np.float64) - wanted).max() / np.abs(wanted).max()
    assert error <= ulps * float(jnp.finfo(jnp.bfloat16).eps)


@pytest.fixture
def interpreter(monkeypatch):
    """Pallas's interpreter in the place of a TPU."""
    monkeypatch.setattr(_splash_attention, "INTERPRET", True)


RANDOM_MASK = np.random.default_rng(1).random((1, 1, 128, 256)) > 0.7
HEADS_MASK = np.random.default_rng(2).random((2, 128, 128)) > 0.5
HEADS_MASK[:, :, :5] = False  # keys that no query attends to
HEADS_MASK[:, :, 5] = True
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": ({"queries": 256, "keys": 256}, {"is_causal": True}),
    "more keys than queries": ({"keys": 256}, {"is_causal": True}),
    "more queries than keys": ({"queries": 256}, {"is_causal": True}),
    "grouped": ({"heads": 4}, {}),
    "one key head": ({"key_heads": 1, "width": 128}, {"is_causal": True}),
    "a mask": ({"keys": 256}, {"mask": RANDOM_MASK}),
    "a mask for each head": ({}, {"mask": HEADS_MASK}),
    "a window": ({"keys": 256}, {"mask": abs(np.arange(128)[:, None] - np.arange(256)) < 9}),
    "a window and queries after all keys": (
        {"queries": 256},
        {"mask": np.arange(256)[:, None] - np.arange(128) < 9},
    ),
    "a soft cap": ({"keys": 256}, {"soft_cap": 0.5}),
    "several blocks": (
        {"queries": 640, "keys": 640, "heads": 1, "key_heads": 1, "batch": (1,)},
        {"is_causal": True},
    ),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_exact_to_its_inputs_dtype_forward_and_backward(interpreter, case):
    shapes, options = CASES[case]
    operands = qkv(**shapes)
    cotangent = jnp.asarray(RNG.normal(size=operands[0].shape), "bfloat16")
    allowed = options.get("mask")
    if options.get("is_causal"):
        allowed = np.tri(operands[0].shape[1], operands[1].shape[1], dtype=bool)
    attend: Any = functools.partial(nnx.dot_product_attention, implementation="splash", **options)
    out, pullback = jax.vjp(attend, *operands)
    wanted = exact(operands, cotangent, allowed, options.get("soft_cap"))
    results = (out, *pullback(cotangent)), wanted
    for found, true in zip(*results, strict=True):
        assert_close(found, true)
    if case == "full":
        assert_close(attend(*operands), out)  # without residuals


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("api", APIS)
def test_layers_of_both_apis_run_the_kernel_and_agree_with_xlas(interpreter, api):
    x = jnp.asarray(RNG.normal(size=(2, 128, 32)), jnp.float32)

    def gradient(implementation: str) -> Any:
        attend = functools.partial(APIS[api].dot_product_attention, implementation=implementation)
        if api == "linen":
            module = linen.MultiHeadDotProductAttention(2, attention_fn=attend)
            layer: Any = lambda x: module.init_with_output(jax.random.key(0), x)[0]  # noqa: E731
        else:
            rngs = nnx.Rngs(0)
            layer = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs, attention_fn=attend)
        return jax.value_and_grad(lambda x: jnp.mean(jnp.square(layer(x))))(x)

    with use_policy("mixed_bfloat16"):
        ours, plain = gradient("splash"), gradient("xla")
    for found, wanted in zip(ours, plain, strict=True):
        np.testing.assert_allclose(found, wanted, atol=0.03 * float(jnp.abs(wanted).max()))


@pytest.mark.slow
def test_the_kernel_has_derivatives_of_higher_order_and_vmap(interpreter):
    operands = qkv(heads=1, key_heads=1, batch=(1,))

    @functools.partial(jax.jit, static_argnums=0)
    def with_implementation(implementation, *operands):
        attend = functools.partial(nnx.dot_product_attention, implementation=implementation)

        def loss(*operands):
            return jnp.sum(jnp.square(attend(*operands).astype("float32"))).astype("bfloat16")

        gradient = jax.grad(loss, (0, 1, 2))
        hessian_product = jax.jvp(gradient, operands, operands)[1]
        twice = jax.grad(lambda q: jnp.sum(jax.grad(loss)(q, *operands[1:]) * q))(operands[0])
        stacked = jnp.stack([operands[0], -operands[0]], axis=2)
        mapped = jax.vmap(gradient, (2, None, None), 2)(stacked, *operands[1:])
        return [*hessian_product, twice, *mapped]

    results = (with_implementation(i, *operands) for i in ("splash", "xla"))
    for found, wanted in zip(*results, strict=True):
        assert_close(found, wanted, ulps=6)  # XLA's rounds weights and the logits' cotangents too


@needs_one_device
def test_forward_mode_is_xlas_and_rejected_where_the_kernel_runs():
    operands = qkv(batch=(1,))
    forward = jax.jit(functools.partial(jax.jvp, nnx.dot_product_attention))
    plain = functools.partial(nnx.dot_product_attention, implementation="xla")
    wanted = jax.jit(functools.partial(jax.jvp, plain))(operands, operands)
    jax.tree.map(np.testing.assert_array_equal, forward(operands, operands), wanted)
    with pytest.raises(TypeError, match="forward-mode"):
        forward.trace(operands, operands).lower(lowering_platforms=("tpu",))


def is_picked(function, *operands, **options) -> bool:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    return "platform_index" in str(jax.make_jaxpr(functools.partial(function, **options))(*shapes))


# What the kernel can't do, as it is told: shapes and dtypes, and options of the call.
REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float16 queries": ({"dtype": "float16"}, {}),
    "float32 queries": ({"dtype": "float32"}, {}),
    "100 queries and 128 keys (both should be multiples of 128)": ({"queries": 100}, {}),
    "heads of width 257 (at most 256)": ({"width": 257}, {}),
    "a bias": ({}, {"bias": jnp.zeros((1, 1, 128, 128), "bfloat16")}),
    "a mask that is not known while tracing, or differs within the batch": (
        {},
        {"mask": np.random.default_rng(3).random((2, 1, 1, 128)) > 0.5},
    ),
    "a precision": ({}, {"precision": "highest"}),
    "dropout": ({}, {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}),
}


@pytest.mark.cases(fast=1)
@needs_one_device
@pytest.mark.parametrize("what", REJECTED)
@pytest.mark.parametrize("api", APIS)
def test_for_what_it_cannot_do_the_kernel_is_not_picked_and_rejected_where_insisted_on(api, what):
    attend, (shapes, options) = APIS[api].dot_product_attention, REJECTED[what]
    assert not is_picked(attend, *qkv(**shapes), **options)
    text = rf"implementation='splash' does not support .*{re.escape(what)}"
    with pytest.raises(ValueError, match=text):
        attend(*qkv(**shapes), implementation="splash", **options)


@needs_one_device
@pytest.mark.parametrize("api", APIS)
def test_the_kernel_is_picked_for_what_it_can_do(api):
    attend = APIS[api].dot_product_attention
    assert is_picked(attend, *qkv())
    assert is_picked(attend, *qkv(heads=4, width=80, batch=(2, 3)), mask=np.tri(128, dtype=bool))
    assert is_picked(attend, *qkv(), mask=jnp.ones((1, 1, 1, 128), bool))
    assert not is_picked(attend, *qkv(), implementation="xla")
    by_pair = lambda q, k, v: attend(q, k, v, mask=q[:, None, :, :1, 0] > k[:, None, None, :, 0, 0])  # noqa: E731
    assert not is_picked(by_pair, *qkv())
    text = r"implementation='splash' is a kernel for TPUs\. Leave it out"
    with pytest.raises(ValueError, match=text):
        attend(*qkv(heads=3, key_heads=3), implementation="splash")


@pytest.mark.slow
@needs_one_device
def test_elsewhere_the_program_computes_what_xlas_does_in_every_mode():
    operands = qkv(batch=(1,))

    def results(implementation):
        attend = functools.partial(
            nnx.dot_product_attention, is_causal=True, implementation=implementation
        )

        def loss(*operands):
            return jnp.sum(jnp.square(attend(*operands).astype(jnp.float32)))

        def run(*operands):
            gradient = jax.grad(loss, (0, 1, 2))
            step = lambda c, _: (attend(c, *operands[1:]), None)  # noqa: E731
            scanned = jax.grad(lambda q: jax.lax.scan(step, q, None, 2)[0].sum())
            return (
                attend(*operands),
                jax.jvp(gradient, operands, operands),
                jax.vmap(gradient, (0, None, None))(operands[0], operands[1][0], operands[2][0]),
                jax.grad(jax.checkpoint(loss))(*operands),
                scanned(operands[0]),
            )

        return jax.jit(run)(*operands)

    jax.tree.map(np.testing.assert_array_equal, results(None), results("xla"))


def test_operands_that_vary_over_different_axes_are_rejected():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    attend = functools.partial(nnx.dot_product_attention, implementation="splash")
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x"))
    with pytest.raises(ValueError, match="operands that vary over different axes of shard_map"):
        jax.eval_shape(mapped, *qkv())


@pytest.fixture(scope="module")
def topology():
    """Four devices. Programs are not cached: without a TPU they can be written and not read."""
    before = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield target("v5e:2x2")
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


def value_and_gradients(implementation=None):
    def loss(*operands):
        out = nnx.dot_product_attention(*operands, is_causal=True, implementation=implementation)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    return jax.value_and_grad(loss, (0, 1, 2))


def program(function, sharding, shape=(4, 256, 2, 64), **options):
    operands = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding)] * 3
    return jax.jit(function, **options).trace(*operands).lower(lowering_platforms=("tpu",))


def compiled(*args, **options) -> str:
    return str(program(*args, **options).compile().as_text())


@pytest.mark.cases(slow=1)
@needs_one_device
@pytest.mark.parametrize("x64", [False, True])
def test_on_one_device_forward_and_backward_compile_to_the_kernel(topology, x64):
    with jax.enable_x64(x64):
        one = SingleDeviceSharding(topology.devices[0])
        assert compiled(value_and_gradients(), one).count(CALL) == 2
        assert CALL not in compiled(value_and_gradients("xla"), one)


@pytest.mark.slow
@needs_one_device
def test_under_automatic_sharding_xlas_program_stays_and_within_shard_map_the_kernel_is_there(
    topology,
):
    mesh = topology.mesh()
    sharded = NamedSharding(mesh, P("data"))
    lowered = (program(value_and_gradients(name), sharded).as_text() for name in (None, "xla"))
    assert len(set(lowered)) == 1
    assert CALL not in compiled(value_and_gradients(), sharded)

    def gradients(*operands):
        return value_and_gradients()(*operands)[1]

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert compiled(mapped, sharded).count(CALL) == 2


@pytest.mark.slow
@needs_one_device
def test_where_axes_are_named_the_kernel_is_there_once_for_a_scanned_and_rematerialized_layer(
    topology,
):
    mesh = topology.mesh({"data": 2, "model": 2})
    sharding = NamedSharding(mesh, P("data"))
    saved = jax.checkpoint_policies.save_only_these_names("attention")

    def gradients(policy, *operands):
        def block(x, _):
            mask = linen.make_causal_mask(x[..., 0, 0], dtype=bool)
            return linen.dot_product_attention(x, *operands[1:], mask=mask), None

        def loss(x):
            remat = jax.checkpoint(block, policy=policy, prevent_cse=False)
            return jnp.sum(jax.lax.scan(remat, x, None, 3)[0].astype(jnp.float32))

        return jax.grad(loss)(operands[0])

    with jax.set_mesh(mesh), use_policy(None, attention_axes=P("data", None, "model")):
        # forward, its second run for backward, and backward
        for policy, kernels in ((None, 3), (saved, 2)):
            text = compiled(functools.partial(gradients, policy), sharding)
            assert text.count(CALL) == kernels
            assert not re.search(r"= \S+ (all-|reduce-scatter|collective)", text)


@needs_one_device
def test_where_only_the_lowered_program_tells_of_several_devices_it_has_no_kernel(topology):
    sharding = NamedSharding(topology.mesh(), P("data"))
    assert CALL not in compiled(value_and_gradients(), None, in_shardings=sharding)
    text = r"a kernel that XLA can't partition\. Call it within jax.shard_map"
    with pytest.raises(ValueError, match=text):
        program(value_and_gradients("splash"), None, in_shardings=sharding)
    with pytest.raises(ValueError, match="attention_axes= does not name"):
        program(value_and_gradients("splash"), sharding)


@pytest.mark.slow
@needs_one_device
def test_a_program_for_several_platforms_holds_the_kernel_and_xlas_formula():
    operands = qkv(batch=(1,))
    platforms = ("cpu", "tpu", "cuda")
    exported = export.export(jax.jit(value_and_gradients()), platforms=platforms)(*operands)
    assert "tpu_custom_call" in exported.mlir_module()
    value, gradients = exported.call(*operands)
    expected, slopes = value_and_gradients("xla")(*operands)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, plain in zip(gradients, slopes, strict=True):
        assert_close(ours, plain)


@needs_one_device
def test_the_model_flops_of_an_attention_are_those_of_one_platform_with_and_without_remat():
    def loss(x):
        attend = lambda x: nnx.dot_product_attention(x, x, x, is_causal=True)  # noqa: E731
        step = jax.checkpoint(attend)
        out, _ = jax.lax.scan(lambda carry, _: (step(carry), None), x, None, 3)
        return jnp.sum(out.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    matmul = 2 * 2 * 4 * 128 * 128 * 64
    for function, matmuls in ((loss, 2), (jax.grad(loss), 6)):
        program = jax.make_jaxpr(function)(x)
        for platform in ("tpu", "cuda"):
            assert model_flops(Graph(program, platform=platform)) == 3 * matmuls * matmul


@pytest.mark.slow
def test_over_eight_devices_the_kernel_computes_what_xlas_formula_does():
    run_tests_on_eight_devices(Path(__file__).with_name("sharded_on_eight_devices.py"))


@needs_one_device
def test_an_audit_has_no_finding_where_the_kernel_is_for_tpus():
    x = jnp.ones((2, 128, 32))
    layer = linen.MultiHeadDotProductAttention(2, dtype_policy="mixed_bfloat16")
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    loss = lambda variables: jnp.sum(jnp.square(jnp.asarray(layer.apply(variables, x))))  # noqa: E731
    report = audit(jax.grad(loss), variables)
    assert not report.findings
    assert report.attention == {"MultiHeadDotProductAttention:": "splash"}


class Attends(linen.Module):
    @linen.compact
    def __call__(self, x, tokens):
        causal = linen.make_causal_mask(tokens)
        for i in range(2):
            x = x + linen.MultiHeadDotProductAttention(2, name=f"block_{i}")(x, mask=causal)
        traced = x[:, None, :, :1] > x[:, None, None, :, 0]
        x = linen.MultiHeadDotProductAttention(2, name="last")(x, mask=traced)
        heads = x.reshape(*x.shape[:-1], 2, 16)
        return linen.dot_product_attention(heads, heads, heads, mask=causal)


@needs_one_device
def test_an_audit_names_the_program_of_each_attention_and_what_keeps_a_kernel_from_running():
    x, tokens = jnp.ones((2, 128, 32)), jnp.ones((2, 128), jnp.int32)
    model = Attends()
    with use_policy("mixed_bfloat16"):
        variables = jax.eval_shape(model.init, jax.random.key(0), x, tokens)
        report = audit(lambda v: model.apply(v, x, tokens), variables)
    unknown = "XLA: a mask that is not known while tracing, or differs within the batch"
    names = {"block_0": "splash", "block_1": "splash", "last": unknown, "Attends:": "splash"}
    assert report.attention == names
    assert "  attention by splash: block_[0-1], Attends:" in str(report)
    assert unknown in str(report)

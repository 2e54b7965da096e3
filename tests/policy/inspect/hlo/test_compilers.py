"""Costs of programs as the compilers of a TPU v5e, an H100 and the processor make them, beside an
audit; skipped where a compiler is not installed, but in CI.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import policy
from policy.inspect.estimate.chips import compute_seconds, kernel_time
from policy.inspect.hlo.costs import Costs, costs_of
from policy.inspect.hlo.dump import without_cache
from policy.inspect.hlo.provenance import by_spelled_path
from tests.benchmarks.accelerators import target

pytestmark = pytest.mark.slow
NAMES = ("cpu", "h100", "v5e:1x1")


@pytest.fixture(autouse=True)
def without_a_cache_of_programs():
    """The GPU's compiler can't read what it wrote there without a GPU."""
    with without_cache():
        yield


def costs(name, function, *arguments, **options) -> Costs:
    on = target(name)
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=(on.platform,))
    text = lowered.compile(compiler_options=options or None).as_text()
    return costs_of(text or "", kernel_time(on.chip))


def on_first(name, arguments):
    sharding = jax.sharding.SingleDeviceSharding(target(name).devices[0])
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments]


def block(x, w):
    with jax.named_scope("block"):
        return jnp.tanh(x @ w), None


def net(w, x, kernel):
    """Three turns of a rematerialised block, attention, and a convolution without padding."""
    with jax.named_scope("Net"):
        with jax.named_scope("layers"):
            x = lax.scan(jax.checkpoint(block), x, w)[0]
        with jax.named_scope("attention"):
            q = x.reshape(8, 16, 4, 32)
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
            x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, q).reshape(x.shape)
        with jax.named_scope("conv"):
            y = lax.conv_general_dilated(
                x.reshape(8, 4, 4, 128),
                kernel,
                window_strides=(2, 2),
                padding="VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
    return jnp.sum(jnp.square(y.astype(jnp.float32)))


STEP = jax.grad(net, (0, 1, 2))
ARGUMENTS = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    for shape in ((3, 128, 128), (128, 128), (2, 2, 128, 64))
]


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_those_of_an_audit_and_times_are_by_module(name):
    found = costs(name, STEP, *on_first(name, ARGUMENTS))
    written = policy.audit(STEP, *ARGUMENTS).matmul_flops_by_dtype
    assert sum(found.flops.values()) == written["bfloat16"]
    if name != "cpu":  # processors without instructions for bfloat16 multiply in float32
        assert set(found.flops) == set(written) == {"bfloat16"}
    assert not found.uncounted
    paths = {"layers", "layers/block", "attention", "conv"} if name != "cpu" else set()
    assert paths <= set(by_spelled_path(found.by_path)) <= {*paths, "", "Net:"}
    assert sum(found.by_path.values()) == pytest.approx(found.time)
    assert (compute_seconds(target(name).chip, found) is None) is (name == "cpu")


def test_cublass_matmuls_count_as_tritons_do():
    on = on_first("h100", ARGUMENTS)
    found = costs("h100", STEP, *on, xla_gpu_enable_triton_gemm=False)
    assert found.flops == costs("h100", STEP, *on).flops


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_a_float32_matmul_of_highest_precision_takes_longer_on_a_gpu(precision):
    size = 4096
    square = on_first("h100", [jax.ShapeDtypeStruct((size, size), jnp.float32)] * 2)
    found = costs("h100", functools.partial(jnp.matmul, precision=precision), *square)
    key, peak = {"default": ("float32", 494.75e12), "highest": ("float32, highest", 67e12)}[
        precision
    ]
    assert found.flops == {key: 2 * size**3}
    assert found.time == pytest.approx(2 * size**3 / peak, rel=0.01)


@pytest.mark.parametrize(("name", "dtype"), [("h100:8", "float32"), ("v5e:2x2", "bfloat16")])
def test_a_scanned_and_sharded_models_exchanges_count_each_turn(name, dtype):
    on, turns, width = target(name), 5, 1024
    mesh, devices = on.mesh(), on.devices.size
    over = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    w = jax.ShapeDtypeStruct((turns, width, width), dtype, sharding=over(None, "data"))
    x = jax.ShapeDtypeStruct((devices * width, width), dtype, sharding=over("data"))

    def step(w, x):
        loss = lambda w: jnp.sum(lax.scan(block, x, w)[0].astype(jnp.float32))  # noqa: E731
        return lax.with_sharding_constraint(jax.grad(loss)(w), over(None, "data"))

    found = costs(name, step, w, x)
    short, size = {"float32": ("f32", 4), "bfloat16": ("bf16", 2)}[dtype]
    assert found.collectives == {
        ("all-gather", short): 2 * turns * width**2 * size,
        ("reduce-scatter", short): turns * width**2 * size,
    }
    assert sum(found.flops.values()) == 3 * turns * 2 * width**3

"""Costs of programs as the compilers of a TPU v5e, an H100 and the processor make them."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import ShapeDtypeStruct, lax
from jax.sharding import NamedSharding, PartitionSpec

import policy
from mpmodules import nnx
from policy import apply_gradients, mixed_precision
from policy.core.scope import traced_for
from policy.inspect.estimate.costing import compiled_step
from policy.inspect.estimate.targets import compute_seconds, kernel_time
from policy.inspect.hlo.costs import Costs, costs_of, turns
from policy.inspect.hlo.dump import without_cache
from policy.inspect.hlo.provenance import by_spelled_path
from policy.inspect.hlo.text import parse
from tests.benchmarks.accelerators import target

NAMES = ("cpu", "h100", "v5e:1x1")
F32 = jnp.float32


@pytest.fixture(autouse=True)
def without_a_cache_of_programs():
    """The GPU's compiler can't read what it wrote there without a GPU."""
    with without_cache():
        yield


def compiled(name, function, *arguments, **options) -> str:
    traced = jax.jit(function).trace(*arguments)
    lowered = traced.lower(lowering_platforms=(target(name).platform,))
    return lowered.compile(compiler_options=options or None).as_text() or ""


def costs(name, function, *arguments, **options) -> Costs:
    text = compiled(name, function, *arguments, **options)
    return costs_of(text, kernel_time(target(name).chip))


def on_first(name, arguments):
    sharding = jax.sharding.SingleDeviceSharding(target(name).devices[0])
    return [ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments]


def block(x, w):
    with jax.named_scope("block"):
        return jnp.tanh(x @ w), None


def net(w, x, kernel):
    """Three turns of a rematerialized block, attention, and a convolution without padding."""
    with jax.named_scope("Net"):
        with jax.named_scope("layers"):
            x = lax.scan(jax.checkpoint(block), x, w)[0]
        with jax.named_scope("attention"):
            q = x.reshape(8, 16, 4, 32)
            scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
            x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, q).reshape(x.shape)
        with jax.named_scope("conv"):
            x, numbers = x.reshape(8, 4, 4, 128), ("NHWC", "HWIO", "NHWC")
            y = lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=numbers)
    return jnp.sum(jnp.square(y.astype(F32)))


STEP = jax.grad(net, (0, 1, 2))
ARGUMENTS = [
    ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 128, 128), (128, 128), (2, 2, 128, 64))
]


@pytest.mark.cases(slow=2)
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


@pytest.mark.slow
def test_cublass_matmuls_count_as_tritons_do():
    on = on_first("h100", ARGUMENTS)
    found = costs("h100", STEP, *on, xla_gpu_enable_triton_gemm=False)
    assert found.flops == costs("h100", STEP, *on).flops


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ("h100", "a100"))
def test_attention_runs_in_cudnns_kernel_for_gpus_that_are_not_there(name):
    def loss(query, key, value):
        return jnp.sum(nnx.dot_product_attention(query, key, value, is_causal=True).astype(F32))

    operands = on_first(name, [ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)] * 3)
    with traced_for(target(name).devices[0]):
        found = costs(name, jax.grad(loss, (0, 1, 2)), *operands)
    pairs, matmuls = 256 * 257 // 2, 2 + 5
    assert found.flops == {"bfloat16": 2 * matmuls * 2 * 4 * pairs * 64}
    assert found.kernels < 6 and not found.uncounted
    row = policy.estimate(loss, *operands, policies=[None], on=name, backward=True)
    assert row.rows[0].model_flops == 6 * 2 * 2 * 4 * 256 * 256 * 64  # of the whole square
    assert [note for note in row.notes if "cuDNN's kernel, whose workspace is not known" in note]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("precision", "key", "peak"),
    [("default", "float32", 494.75e12), ("highest", "float32, highest", 67e12)],
)
def test_a_float32_matmul_of_highest_precision_takes_longer_on_a_gpu(precision, key, peak):
    size = 4096
    square = on_first("h100", [ShapeDtypeStruct((size, size), F32)] * 2)
    found = costs("h100", functools.partial(jnp.matmul, precision=precision), *square)
    assert found.flops == {key: 2 * size**3}
    assert found.time == pytest.approx(2 * size**3 / peak, rel=0.01)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("name", "dtype"), [("h100:8", "float32"), ("v5e:2x2", "bfloat16")])
def test_a_scanned_and_sharded_models_exchanges_count_each_turn(name, dtype):
    on, turns, width = target(name), 5, 1024
    mesh, devices = on.mesh(), on.devices.size
    over = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    w = ShapeDtypeStruct((turns, width, width), dtype, sharding=over(None, "data"))
    x = ShapeDtypeStruct((devices * width, width), dtype, sharding=over("data"))

    def step(w, x):
        loss = lambda w: jnp.sum(lax.scan(block, x, w)[0].astype(F32))  # noqa: E731
        return lax.with_sharding_constraint(jax.grad(loss)(w), over(None, "data"))

    found = costs(name, step, w, x)
    short, size = {"float32": ("f32", 4), "bfloat16": ("bf16", 2)}[dtype]
    assert found.collectives == {
        ("all-gather", short): 2 * turns * width**2 * size,
        ("reduce-scatter", short): turns * width**2 * size,
    }
    assert sum(found.flops.values()) == 3 * turns * 2 * width**3


CHIPS = ("v5e:1x1", "h100")
SQUARE = [ShapeDtypeStruct((128, 128), F32), ShapeDtypeStruct((64, 128), F32)]


def scanned(steps, w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=steps)[0]


def reversed_scan(steps, w, x):
    inputs = jnp.arange(steps * x.size, dtype=x.dtype).reshape(steps, *x.shape)
    return lax.scan(lambda c, x: (jnp.tanh(c @ w) + x, c.sum(1)), x, inputs, reverse=True)


def nested_scan(steps, w, x):
    return lax.scan(lambda c, _: (scanned(5, w, c), None), x, None, length=steps)[0]


def rematerialized(steps, w, x):
    body = jax.checkpoint(lambda c, _: (jnp.tanh(jnp.tanh(c @ w) @ w), None))
    return lax.scan(body, x, None, length=steps)[0]


def mapped(steps, w, x):
    return lax.map(lambda i: jnp.tanh(x @ w) * i, jnp.arange(steps, dtype=x.dtype))


def fori(steps, w, x):
    return lax.fori_loop(3, 3 + steps, lambda i, c: jnp.tanh(c @ w), x)


def gradient(function):
    def loss(steps, w, x):
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(function(steps, w, x)))

    return lambda steps, w, x: jax.grad(loss, (1, 2))(steps, w, x)


LOOPS = [scanned, reversed_scan, nested_scan, mapped, fori]
GRADIENTS = [gradient(f) for f in (scanned, reversed_scan, nested_scan, rematerialized, mapped)]


@pytest.mark.cases(slow=6)
@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("function", [*LOOPS, *GRADIENTS])
def test_a_loop_runs_as_often_as_it_was_told(name, function):
    text = compiled(name, lambda w, x: function(7, w, x), *on_first(name, SQUARE))
    found = {turns(i) for i in parse(text).instructions.values() if i.opcode == "while"}
    assert found in ({7}, {5, 7})


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["v5e", "v6e"])
def test_a_large_matmuls_cycles_are_the_published_peaks(name):
    chip = target(name).chip
    square = ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    found = costs(name, jnp.matmul, *on_first(name, [square, square]))
    at_the_peak = 2 * 4096**3 / chip.peak("bfloat16")
    assert at_the_peak <= found.time / chip.clock < 1.4 * at_the_peak


@pytest.mark.slow
def test_the_text_of_a_compiled_program_has_the_compilers_cycles():
    # That of XLA's dump has none, and each kernel would be at its roofline.
    chip = target("v5e:1x1")
    arrays = on_first("v5e:1x1", [ShapeDtypeStruct((256, 256), F32)] * 2)
    lowered = jax.jit(jnp.dot).trace(*arrays).lower(lowering_platforms=("tpu",))
    assert '"estimated_cycles":' in compiled_step(lowered, chip, ("x", "y")).text


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("turns", [None, 3])
def test_splash_attention_counts_the_blocks_that_a_causal_mask_leaves(turns):
    chip = target("v5e:1x1")
    arrays = on_first("v5e:1x1", [ShapeDtypeStruct((2, 1024, 4, 128), jnp.bfloat16)] * 3)
    attend = functools.partial(nnx.dot_product_attention, is_causal=True, implementation="splash")

    def loss(query, key, value):
        if turns is None:
            return jnp.sum(attend(query, key, value).astype(F32))
        body = lambda query, _: (attend(query, key, value), None)  # noqa: E731
        return jnp.sum(lax.scan(body, query, length=turns)[0].astype(F32))

    lowered = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays).lower(lowering_platforms=("tpu",))
    found = costs_of(compiled_step(lowered, chip, "qkv").text, kernel_time(chip.chip))
    matmuls = 2 + 7 if turns is None else turns * (2 + 7)  # a causal backward in two kernels
    # Three of the four blocks of 512 queries and 512 keys.
    assert found.flops == {"bfloat16": 3 / 4 * matmuls * 2 * (2 * 1024 * 4 * 128) * 1024}


@pytest.mark.slow
def test_a_program_that_is_too_large_has_no_cycles_bytes_and_kernels():
    """Its text is not the final one: costs of it were below what its matmuls take at the peak."""
    array = ShapeDtypeStruct((3 * 2**20, 1024), F32)
    found = policy.estimate(jnp.tanh, array, policies=["float32"], on=target("v5e:1x1"))
    row = found["float32"]
    assert row.is_exhausted and row.memory > row.capacity
    assert (row.cycles, row.seconds, row.bytes, row.kernels) == (None, None, None, None)
    assert "lacks" in str(found)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_a_state_in_the_hosts_memory_counts_apart_from_the_devices(name):
    params = {"w": ShapeDtypeStruct((32, 128), jnp.bfloat16)}

    def example(**options):
        tx = mixed_precision(optax.adamw(0.1), "bfloat16", **options)
        step = lambda p, s, g: apply_gradients(tx, p, s, g)[:2]  # noqa: E731
        return step, (params, jax.eval_shape(tx.init, params), params)

    rows = [(None, {}), (None, {"state_memory_kind": "pinned_host"})]
    found = policy.estimate(example, policies=rows, on=name, donate=(0, 1))
    plain, on_host = found.rows
    assert (plain.host, on_host.host) == (0, (4 + 4 + 2) * 32 * 128)
    assert plain.arguments - on_host.arguments == on_host.host
    assert "on the host" in str(found)

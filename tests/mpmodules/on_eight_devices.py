"""Models of both APIs on eight devices, beside one. `test_eight_devices.py` runs this file where
there are eight.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import policy
from mpmodules import linen as nn
from mpmodules import nnx, use_policy
from policy import (
    accumulate_gradients,
    apply_gradients,
    loss_scale_of,
    mixed_precision,
    split_batch,
    state_shardings,
    value_and_grad,
)
from policy.quantized import quantize_params
from policy.sharding import all_reduce, collectives_of, vary

DEVICES = 8
POLICY = "mixed_bfloat16"
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec("data")
MESH = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(32, 4)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(32, 1)), jnp.float32)
TX = mixed_precision(optax.adam(1e-2), POLICY, loss_scale="dynamic", clip_global_norm=0.5)


def placed(tree, spec):
    return jax.device_put(tree, NamedSharding(MESH, spec))


def squared_error(predictions, y):
    return jnp.mean(jnp.square(predictions - y))


def curve(step, *state, steps=4):
    """The losses of some steps of `step(*state, x, y) -> (*state, loss)`, and where they ended."""
    losses = []
    for _ in range(steps):
        *state, loss = step(*state, X, Y)
        losses.append(float(loss))
    return losses, state


def of_arrays(collectives):
    return sorted((c.dtype, c.shape) for c in collectives if c.size > 1)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.LayerNorm(name="norm")(nn.Dense(16, name="up")(x)))
        return nn.Dense(1, name="head")(x)


def linen_step(place):
    """One step of the linen model; `place` says where params become each device's own: nowhere, in
    the loss, before.
    """

    def loss_fn(params, batch):
        x, y = batch
        if place == "in the loss":
            params = vary(params, "data", "bfloat16")
        loss = squared_error(Linen().apply({"params": params}, x), y)
        return lax.pmean(loss, "data") if place == "in the loss" else loss

    def step(params, state, x, y):
        scale = loss_scale_of(state)
        fn = value_and_grad(loss_fn, policy=POLICY, loss_scale=scale, grads="compute")
        if place == "before":
            loss, grads = accumulate_gradients(fn, vary(params, "data"), split_batch((x, y), 2))
            loss, grads = lax.pmean(loss, "data"), all_reduce(grads, "data", "bfloat16")
        else:
            loss, grads = fn(params, (x, y))
        params, state, finite = apply_gradients(TX, params, state, grads)
        return params, state, jnp.where(finite, loss, jnp.nan)

    return step


def on_each_device(step, arrays, *, check_vma=True):
    """`step` under jit and shard_map: `arrays` replicated arguments, then a batch that is split."""
    specs = (*[EVERYWHERE] * arrays, SPLIT, SPLIT)
    outputs = (EVERYWHERE,) * (arrays + 1)
    return jax.jit(
        jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=outputs, check_vma=check_vma)
    )


@pytest.fixture(scope="module")
def linen_params():
    with use_policy(POLICY):
        return Linen().init(jax.random.key(0), X)["params"]


@pytest.fixture(scope="module")
def linen_truth(linen_params):
    return curve(jax.jit(linen_step("nowhere")), linen_params, TX.init(linen_params))[0]


@pytest.mark.parametrize(
    ("place", "check_vma"), [("before", True), ("before", False), ("in the loss", True)]
)
def test_a_linen_model_under_shard_map_trains_as_on_one_device(
    linen_params, linen_truth, place, check_vma
):
    step = on_each_device(linen_step(place), 2, check_vma=check_vma)
    state = TX.init(linen_params)
    shapes = [leaf.shape for leaf in jax.tree.leaves(linen_params)]
    found = of_arrays(collectives_of(step, linen_params, state, X, Y))
    # Each param's gradient, once.
    assert found == sorted(("bfloat16", shape) for shape in shapes if shape != (1,))
    losses, (params, state) = curve(step, linen_params, state)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses, linen_truth, rtol=2**-7)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, state.inner[0].mu))} == {"float32"}


def test_a_linen_model_under_jit_keeps_bias_and_norm_sums_in_float32(linen_params, linen_truth):
    step = jax.jit(linen_step("nowhere"))
    state = TX.init(linen_params)
    args = placed((linen_params, state), EVERYWHERE)
    found = of_arrays(collectives_of(step, *args, placed(X, SPLIT), placed(Y, SPLIT)))
    # the partitioner may turn a kernel over; a bias and a norm's scale are sums that run in float32
    sizes = [(dtype, int(np.prod(shape))) for dtype, shape in found]
    assert sizes == [("bfloat16", 16), ("bfloat16", 64), *[("float32", 16)] * 3]
    losses, _ = curve(lambda p, s, x, y: step(p, s, placed(x, SPLIT), placed(y, SPLIT)), *args)
    np.testing.assert_allclose(losses, linen_truth, rtol=2**-7)


class Nnx(nnx.Module):
    def __init__(self, axis_name, rngs):
        self.up = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, axis_name=axis_name, momentum=0.5, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.tanh(self.norm(self.up(x))))


def nnx_model(axis_name=None):
    return Nnx(axis_name, nnx.Rngs(0), dtype_policy=POLICY)


def nnx_loss(model, x, y):
    return squared_error(model(x), y)


def nnx_step(graphdef, axis=None):
    """One step of an nnx model, of its parts; across devices where there is an axis."""

    def step(params, rest, state, x, y):
        model = nnx.merge(graphdef, vary(params, axis) if axis else params, rest)
        fn = nnx.value_and_grad(nnx_loss, loss_scale=loss_scale_of(state), grads="compute")
        loss, grads = fn(model, x, y)
        if axis:
            loss, grads = lax.pmean(loss, axis), all_reduce(grads, axis, "bfloat16")
        params, state, finite = apply_gradients(TX, params, state, grads)
        return params, nnx.state(model, nnx.BatchStat), state, jnp.where(finite, loss, jnp.nan)

    return step


@functools.cache
def nnx_truth():
    """The losses on one device, and the statistics of BatchNorm after the first step."""
    graphdef, params, rest = nnx.split(nnx_model(), nnx.Param, ...)
    step = jax.jit(nnx_step(graphdef))
    state = TX.init(params)
    return curve(step, params, rest, state)[0], step(params, rest, state, X, Y)[1]


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_nnx_model_under_shard_map_trains_as_on_one_device(check_vma):
    graphdef, params, rest = nnx.split(nnx_model("data"), nnx.Param, ...)
    state = TX.init(params)
    step = on_each_device(nnx_step(graphdef, "data"), 3, check_vma=check_vma)
    found = of_arrays(collectives_of(step, params, rest, state, X, Y))
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    of_params = sorted(("bfloat16", shape) for shape in shapes if shape != (1,))
    assert [entry for entry in found if entry[0] == "bfloat16"] == of_params
    assert {dtype for dtype, _ in found} == {"bfloat16", "float32"}  # the statistics of BatchNorm
    losses, (_, _, after) = curve(step, params, rest, state)
    truth, true_statistics = nnx_truth()
    assert losses[-1] < losses[0]
    assert after.count == len(losses)
    np.testing.assert_allclose(losses, truth, rtol=2**-7)
    statistics = step(params, rest, state, X, Y)[1]  # of the whole batch, before any weight differs
    for a, b in zip(*map(jax.tree.leaves, (statistics, true_statistics)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_an_nnx_optimizer_under_jit_keeps_where_its_model_lies():
    model = nnx_model()
    params: Any = nnx.state(model, nnx.Param)
    shardings: Any = jax.tree.map(
        lambda p: NamedSharding(MESH, SPLIT if p.shape[0] == 16 else EVERYWHERE), params
    )
    nnx.update(model, jax.device_put(params, shardings))
    optimizer: Any = nnx.Optimizer(model, TX, wrt=nnx.Param)
    places = state_shardings(TX, nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model, optimizer, x, y):
        scale = loss_scale_of(optimizer.opt_state)
        loss, grads = nnx.value_and_grad(nnx_loss, loss_scale=scale)(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, placed(X, SPLIT), placed(Y, SPLIT))) for _ in range(4)]
    np.testing.assert_allclose(losses, nnx_truth()[0], rtol=2**-7)
    place = shardings["head"]["kernel"].get_value()
    assert place.spec == SPLIT
    assert places.inner[0].mu["head"]["kernel"].get_value() == place
    adam = optimizer.opt_state.inner[0]
    trees: list[Any] = [nnx.state(model, nnx.Param), adam.mu, adam.nu]
    for kept in trees:
        assert kept["head"]["kernel"].get_value().sharding.is_equivalent_to(place, 2)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_no_gradient_gathers_activations(kind):
    """Along explicit axes too, what crosses has the shapes of params: a bias's gradient is summed
    where it lies.
    """
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh), use_policy(POLICY):
        model: Any = Linen()
        variables = jax.jit(model.init)(jax.random.key(0), X)
        x = jax.device_put(X, NamedSharding(mesh, SPLIT))
        gradient = jax.grad(lambda variables, x: model.apply(variables, x).mean())
        found = collectives_of(gradient, variables, x)
    assert {c.operation for c in found} == {"all-reduce"}
    sizes = {leaf.size for leaf in jax.tree.leaves(variables)}
    assert {c.size for c in found} <= sizes and max(sizes) < 32 * 16  # an activation's
    assert ("float32", (16,)) in of_arrays(found)  # the sum of the first bias's gradient


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
@pytest.mark.parametrize(
    "text", ["m=f8", "m=i8", "m=i8:tensor", "m=i8:compute", "m=mxfp8", "m=nvfp4"]
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_matmuls_in_8_bits_are_those_of_one_device_and_gradients_lie_as_the_params(kind, text):
    layer = nn.Dense(8, dtype_policy=f"p=f32,c=bf16,{text}")
    params = layer.init(jax.random.key(0), X)

    def loss(params, x):
        y: Any = layer.apply(params, x)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    y, truth = jax.value_and_grad(loss)(params, X)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        specs = {"bias": PartitionSpec("model"), "kernel": PartitionSpec(None, "model")}
        split = {
            name: jax.device_put(params["params"][name], NamedSharding(mesh, spec))
            for name, spec in specs.items()
        }
        x = jax.device_put(X, NamedSharding(mesh, SPLIT))
        found, gradients = jax.jit(jax.value_and_grad(loss))({"params": split}, x)
    assert np.isclose(found, y, rtol=1e-5)
    for name, gradient in gradients["params"].items():
        # the sums of devices are rounded to bfloat16 one by one
        assert np.allclose(gradient, truth["params"][name], rtol=0.02, atol=2e-3)
        if kind == AxisType.Explicit:
            assert gradient.sharding.spec == specs[name]


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")  # a CPU emulates 8 bits
def test_a_convolution_on_a_mesh_of_explicit_axes_stays_in_compute_dtype():
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    layer: Any = nn.Conv(16, (3,))
    with jax.set_mesh(mesh), use_policy("mixed_int8"):
        x = jax.device_put(jnp.ones((8, 6, 16)), NamedSharding(mesh, SPLIT))
        params = layer.init(jax.random.key(0), x)
        cast = policy.autocast(layer.apply, "mixed_int8", params=0)
        for run in (layer.apply, cast):
            step = jax.grad(lambda params, run=run: run(params, x).astype(jnp.float32).sum())
            assert "i8[" not in str(jax.make_jaxpr(step)(params))
            assert jax.jit(step)(params)["params"]["kernel"].dtype == jnp.float32


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")  # a CPU emulates 8 bits
@pytest.mark.parametrize(
    ("text", "grads", "dtype"),
    [
        ("mixed_bfloat16", "float32", "bfloat16"),
        ("mixed_float8", "float32", "bfloat16"),
        ("mixed_int8:compute", "float32", "bfloat16"),
        ("mixed_bfloat16", "accumulator", "float32"),
        ("mixed_float8", "accumulator", "float32"),
    ],
)
def test_a_weight_s_gradient_is_exchanged_in_the_dtype_of_its_matmul(text, grads, dtype):
    """Scales of float8 are powers of two, so that its matmul may round before it is scaled."""
    text = text.replace("mixed_int8:compute", "p=f32,c=bf16,o=f32,m=i8:compute")
    layer: Any = nn.Dense(16, use_bias=False)
    with use_policy(text):
        params = layer.init(jax.random.key(0), X)

        def step(params, x):
            return value_and_grad(lambda params: layer.apply(params, x).sum(), grads=grads)(params)

        found = collectives_of(jax.jit(step), placed(params, EVERYWHERE), placed(X, SPLIT))
    kernel = [c.dtype for c in found if c.size == 64]  # the partitioner may turn it over
    assert [jnp.dtype(one) for one in kernel] == [jnp.dtype(dtype)]


def lookup(api, dtype_policy):
    """A table of 16 tokens: its params, and a function of them and of tokens."""
    if api == "linen":
        layer = nn.Embed(16, 4, dtype_policy=dtype_policy)
        return layer.init(jax.random.key(0), jnp.arange(16)), layer.apply
    graphdef, params = nnx.split(nnx.Embed(16, 4, rngs=nnx.Rngs(0), dtype_policy=dtype_policy))
    return params, lambda params, tokens: nnx.merge(graphdef, params)(tokens)


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("model")])
@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("text", ["float64", "float32", POLICY, "bfloat16"])
def test_microbatches_sum_the_gradient_of_a_table_exactly(api, text, spec):
    """Of whole numbers, which float32 adds exactly, and which bfloat16 does not above 256."""
    with jax.enable_x64(text == "float64"):
        params, apply = lookup(api, text)
        tokens = np.where(RNG.random((64, 16)) < 0.6, 3, RNG.integers(0, 16, (64, 16)))
        cotangents = RNG.integers(1, 4, (*tokens.shape, 4)).astype(text.replace(POLICY, "float32"))
        expected = np.zeros((16, 4))
        np.add.at(expected, tokens, cotangents.astype(np.float64))
        assert np.all(expected[3] > 512)

        def step(params, batch):
            def loss(params, batch):
                y = apply(params, batch[0]) * batch[1]
                return jnp.sum(y.astype(jnp.float32) if y.dtype.itemsize == 2 else y)

            return accumulate_gradients(value_and_grad(loss), params, split_batch(batch, 4))

        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        params = jax.device_put(params, NamedSharding(mesh, spec))
        batch = jax.device_put((tokens, cotangents), NamedSharding(mesh, SPLIT))
        (gradient,) = jax.tree.leaves(jax.jit(step)(params, batch)[1])
        assert gradient.dtype == ("float64" if text == "float64" else "float32")
        np.testing.assert_array_equal(gradient * 4, expected)  # the mean over microbatches


class EqualBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (1, x.shape[-1]))
        return x + jax.nn.softmax(nn.Dense(4)(nn.LayerNorm()(x)) * scale, -1)


def test_equal_blocks_vary_over_the_devices_that_their_inputs_vary_over():
    model: Any = nn.Sequential([EqualBlock() for _ in range(3)], dtype_policy=POLICY)
    params = model.init(jax.random.key(0), X)["params"]

    def gradient(params, x):
        return jax.grad(lambda p: jnp.mean(jnp.square(model.apply({"params": p}, x))))(params)

    def on_each(params, x):
        return lax.pmean(gradient(vary(params, "data"), x), "data")

    split = jax.shard_map(on_each, mesh=MESH, in_specs=(EVERYWHERE, SPLIT), out_specs=EVERYWHERE)
    found, exact = jax.jit(split)(params, X), jax.jit(gradient)(params, X)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2**-7)


def test_a_cache_in_8_bits_is_sharded_as_its_codes_are():
    tokens = jnp.asarray(RNG.normal(size=(8, 5, 16)), jnp.float32)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    layer = nn.MultiHeadDotProductAttention(4, decode=True, dtype_policy="p=f32,c=bf16,o=f32,k=i8")
    variables = layer.init(jax.random.key(0), tokens)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, params, token):
        y, after = layer.apply({"params": params, "cache": cache}, token, mutable=["cache"])
        return after["cache"], y

    def place(x):
        spec = PartitionSpec("data", None, "model") if x.ndim else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    outputs = []
    for cache in (variables["cache"], jax.tree.map(place, variables["cache"])):
        shardings = jax.tree.map(lambda x: x.sharding, cache)
        cache, params, found = jax.tree.map(jnp.copy, cache), variables["params"], []
        for i in range(3):
            cache, y = step(cache, params, tokens[:, i : i + 1])
            found.append(y)
        outputs.append(np.concatenate(found, 1))
        same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), cache, shardings)
        assert all(jax.tree.leaves(same))
    np.testing.assert_allclose(*outputs, atol=2**-5)  # two ulps of bfloat16 at 4
    exchanged = [c for c in collectives_of(step, cache, params, tokens[:, :1]) if c.size > 8 * 16]
    assert not exchanged  # no cache crosses devices: the largest is a result of a step


# --------------------------------------------------------------------------------------------------
# Parameters in 8 and 4 bits
# --------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Two matmuls, whose kernels are divided along their output and their input features."""

    @nn.compact
    def __call__(self, x):
        boxed = functools.partial(nn.with_partitioning, nn.initializers.lecun_normal())
        x = jnp.tanh(nn.Dense(256, kernel_init=boxed((None, "data")))(x))
        return nn.Dense(32, kernel_init=boxed(("data", None)))(x)


@pytest.mark.parametrize("text", ["int8", "int4:32"])
def test_quantized_params_are_divided_over_devices(text):
    stored_in = f"params={text},compute=bfloat16,output=float32"
    x = jnp.asarray(RNG.normal(size=(16, 64)), jnp.float32)
    variables = Wide(dtype_policy=POLICY).init(jax.random.key(0), x)
    stored, model = (
        quantize_params(variables, stored_in),
        Wide(dtype_policy=stored_in),
    )
    shardings = nn.get_sharding(stored, MESH)
    divided = jax.device_put(stored, shardings)
    codes = divided["params"]["Dense_0"]["kernel"].codes.value
    assert codes.addressable_shards[0].data.size * DEVICES == codes.size
    y: Any = jax.jit(model.apply, in_shardings=(shardings, NamedSharding(MESH, SPLIT)))(divided, x)
    expected: Any = model.apply(stored, x)
    np.testing.assert_allclose(y, expected, atol=2**-7 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("text", ["int8", "int4:32"])
def test_quantized_params_under_explicit_axes(text):
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Explicit,))
    layer = nnx.Linear(256, 32, rngs=nnx.Rngs(0))
    layer = nnx.apply_policy(layer, f"params={text},compute=bfloat16")
    x = jnp.asarray(RNG.normal(size=(16, 256)), jnp.float32)
    expected = layer(x)
    with jax.set_mesh(mesh):
        rows = jax.device_put(x, NamedSharding(mesh, SPLIT))
        features = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "data")))
        assert jax.typeof(layer(rows)).sharding.spec == PartitionSpec("data", None)
        np.testing.assert_array_equal(layer(rows), expected)
        summed = layer(features, out_sharding=EVERYWHERE)
    np.testing.assert_allclose(
        np.asarray(summed, np.float32), np.asarray(expected, np.float32), atol=2**-7 * 4
    )

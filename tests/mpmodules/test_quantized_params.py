"""Layers and models of both APIs on parameters that are stored in 8 and 4 bits."""

import functools
from typing import Any

import flax
import flax.errors
import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy
from mpmodules import linen, nnx
from policy.core.arrays import is_quantized
from policy.quantized import dequantize_params, merge_frozen, quantize_params, split_frozen

FORMATS = ("int8", "int4:32", "uint4:32", "nf4:32")
KEY = jax.random.key(0)


def array(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def texts(text):
    """A policy that stores codes, and one that reads the arrays that they stand for."""
    return f"params={text},compute=bfloat16,output=float32", "mixed_bfloat16"


# --------------------------------------------------------------------------------------------------
# Layers
# --------------------------------------------------------------------------------------------------

LINEN = {
    "Dense": (lambda **k: linen.Dense(32, **k), (4, 64)),
    "DenseGeneral": (lambda **k: linen.DenseGeneral((2, 32), name="query", **k), (4, 3, 64)),
    "DenseGeneral of two": (lambda **k: linen.DenseGeneral(64, axis=(-2, -1), **k), (4, 2, 32)),
    "Einsum": (lambda **k: linen.Einsum((64, 32), "bti,io->bto", **k), (2, 3, 64)),
    "Conv": (lambda **k: linen.Conv(32, (3,), **k), (2, 8, 64)),
    "ConvTranspose": (lambda **k: linen.ConvTranspose(32, (3,), **k), (2, 8, 64)),
    "attention": (lambda **k: linen.MultiHeadDotProductAttention(2, **k), (2, 8, 64)),
    "LSTM": (lambda **k: linen.RNN(linen.OptimizedLSTMCell(64, **k)), (2, 3, 64)),
}
NNX = {
    "Linear": (lambda r: flax.nnx.Linear(64, 32, rngs=r), (4, 64)),
    "LinearGeneral": (lambda r: flax.nnx.LinearGeneral(64, (2, 32), rngs=r), (4, 3, 64)),
    "Einsum": (lambda r: flax.nnx.Einsum("bti,io->bto", (64, 32), rngs=r), (2, 3, 64)),
    "Conv": (lambda r: flax.nnx.Conv(64, 32, (3,), rngs=r), (2, 8, 64)),
    "ConvTranspose": (lambda r: flax.nnx.ConvTranspose(64, 32, (3,), rngs=r), (2, 8, 64)),
    "LoRALinear": (lambda r: flax.nnx.LoRALinear(64, 32, lora_rank=4, rngs=r), (4, 64)),
    "attention": (lambda r: flax.nnx.MultiHeadAttention(2, 64, decode=False, rngs=r), (2, 8, 64)),
}


def close(y, expected):
    assert y.dtype == expected.dtype and y.shape == expected.shape
    scale = float(jnp.abs(expected.astype(jnp.float32)).max())
    np.testing.assert_allclose(
        np.asarray(y, np.float32), np.asarray(expected, np.float32), rtol=0, atol=0.01 * scale
    )  # sums in another order


def as_read(tree):
    """Returns the numbers that matmuls in bfloat16 read, in float32."""

    def read(x):
        return x.astype(jnp.bfloat16).widened().astype(jnp.float32) if is_quantized(x) else x

    return jax.tree.map(read, tree, is_leaf=is_quantized)


def assert_alike(call, expected, x):
    """Compares two functions of an array, and their gradients."""
    close(call(x), expected(x))
    gradients = [
        jax.grad(lambda x, f=f: (f(x).astype(jnp.float32) ** 2).sum())(x) for f in (call, expected)
    ]
    close(*gradients)


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("name", LINEN)
def test_linen_layers(name, text):
    make, shape = LINEN[name]
    stored_in, read_in = texts(text)
    x = array(*shape)
    cells = {} if name == "LSTM" else {"dtype_policy": read_in}
    reader = make(**cells)
    stored = quantize_params(reader.init(KEY, x), stored_in)
    assert any(map(is_quantized, jax.tree.leaves(stored, is_leaf=is_quantized)))
    layer = make(**({"dtype_policy": stored_in} if cells else {}))
    wide = as_read(stored)
    assert_alike(lambda x: layer.apply(stored, x), lambda x: reader.apply(wide, x), x)


@pytest.mark.cases(fast=1, slow=7)
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("name", NNX)
def test_nnx_layers(name, text):
    make, shape = NNX[name]
    stored_in, read_in = texts(text)
    x = array(*shape)
    given = make(flax.nnx.Rngs(0))
    layer = nnx.apply_policy(given, stored_in)
    reader = nnx.apply_policy(widened(layer, given), read_in)
    assert any(isinstance(v, nnx.QuantizedParam) for _, v in nnx.iter_graph(layer))
    assert_alike(layer, reader, x)
    again = nnx.merge(*nnx.split(layer))
    np.testing.assert_array_equal(again(x), layer(x))


def widened(model: Any, like: Any, reads: Any = as_read) -> Any:
    """Returns `like` with the numbers that the model's codes stand for."""
    copy = flax.nnx.clone(like)
    found = dict(flax.nnx.to_flat_state(flax.nnx.state(model)))
    for path, variable in flax.nnx.to_flat_state(flax.nnx.state(copy)):
        read = jax.tree.leaves(reads(found[path].get_raw_value()))[0]
        owner = functools.reduce(_attribute, path[:-1], copy)
        getattr(owner, str(path[-1])).set_value(read.astype(variable.dtype))
    return copy


def _attribute(owner, name):
    return owner[name] if isinstance(name, int) else getattr(owner, name)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("text", ["int8", "float8", "int4:32"])
def test_embeddings(text):
    stored_in, read_in = texts(text)
    tokens, query = jnp.array([[0, 3], [127, 5]]), array(4, 64)
    layer = linen.Embed(128, 64, dtype_policy=read_in)
    stored = quantize_params(layer.init(KEY, tokens), stored_in)
    wide, ours = (
        dequantize_params(stored),
        linen.Embed(128, 64, dtype_policy=stored_in),
    )
    np.testing.assert_array_equal(ours.apply(stored, tokens), layer.apply(wide, tokens))
    attended = [
        each.apply(variables, query, method="attend")
        for each, variables in ((ours, stored), (layer, wide))
    ]
    close(*attended)
    given = flax.nnx.Embed(128, 64, rngs=flax.nnx.Rngs(0))
    layer: Any = nnx.apply_policy(given, stored_in)
    reader: Any = nnx.apply_policy(widened(layer, given, dequantize_params), read_in)
    np.testing.assert_array_equal(layer(tokens), reader(tokens))
    close(layer.attend(query), reader.attend(query))
    labels = jnp.array([1, 2, 3, 4])
    np.testing.assert_allclose(
        layer.attend_cross_entropy(query, labels),
        reader.attend_cross_entropy(query, labels),
        rtol=1e-2,
    )


# --------------------------------------------------------------------------------------------------
# Models with code of their own
# --------------------------------------------------------------------------------------------------


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _=None):
        w = self.param("w", linen.initializers.lecun_normal(), (64, 64))
        x = x + jnp.tanh(linen.LayerNorm()(x) @ w)
        return x + linen.Dense(64)(x), None


class Stack(linen.Module):
    kind: str = "unrolled"

    @linen.compact
    def __call__(self, x):
        if self.kind == "unrolled":
            for _ in range(2):
                x, _ = Block()(x)
            return x
        block = linen.remat(Block) if self.kind == "remat" else Block
        layers = linen.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return layers()(x, None)[0]


class FlaxBlock(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        w = self.param("w", flax.linen.initializers.lecun_normal(), (64, 64))
        return flax.linen.Dense(64)(jnp.tanh(x @ w))


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("kind", ["unrolled", "scan", "remat"])
@pytest.mark.parametrize("text", ["int8", "int4:32"])
def test_linen_models(kind, text):
    stored_in, read_in = texts(text)
    x = array(4, 64)
    stored = quantize_params(Stack(kind, dtype_policy=read_in).init(KEY, x), stored_in)
    wide = dequantize_params(stored)
    ours, reader = Stack(kind, dtype_policy=stored_in), Stack(kind, dtype_policy=read_in)
    close(ours.apply(stored, x), reader.apply(wide, x))
    trainable, frozen = split_frozen(stored["params"])

    def loss(trainable, model, frozen):
        params = merge_frozen(trainable, frozen)
        return (model.apply({"params": params}, x) ** 2).mean()

    gradients = jax.jit(policy.grad(loss), static_argnums=1)(trainable, ours, frozen)
    _, arrays = split_frozen(dequantize_params(stored)["params"])
    assert not jax.tree.leaves(arrays)
    expected = jax.grad(loss)(trainable, reader, dequantize_params(frozen))
    jax.tree.map(close, gradients, expected)


@pytest.mark.slow
def test_flaxs_own_modules_read_codes():
    x = array(4, 64)
    model = FlaxBlock()
    stored = quantize_params(model.init(KEY, x), "params=int8")
    wide = dequantize_params(stored)
    np.testing.assert_array_equal(model.apply(stored, x), model.apply(wide, x))
    ported = linen.apply_policy(model, texts("int8")[0])
    close(ported.apply(stored, x), linen.apply_policy(model, "mixed_bfloat16").apply(wide, x))
    with pytest.raises(flax.errors.ScopeParamShapeError):
        linen.Dense(32).apply(quantize_params(linen.Dense(16).init(KEY, x), "p=i8"), x)


def test_boxed_parameters():
    init = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
    layer = linen.Dense(32, kernel_init=init, dtype_policy="mixed_bfloat16")
    x = array(4, 64)
    stored = quantize_params(layer.init(KEY, x), "params=int4:32")
    close(layer.apply(stored, x), layer.apply(dequantize_params(stored), x))
    kernel = stored["params"]["kernel"]
    names = ("embed", None, "mlp"), (None, "embed", "mlp")
    assert (kernel.codes.names, kernel.scales.names) == names
    specs = linen.get_partition_spec(stored)["params"]["kernel"]
    assert (tuple(specs.codes), tuple(specs.scales)) == names


class Net(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (64, 64)) / 8)
        self.layers = nnx.List([nnx.Linear(64, 64, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.head = nnx.Linear(64, 64, rngs=rngs)
        self.head.kernel = self.layers[0].kernel  # tied

    def __call__(self, x):
        x = jnp.tanh(x @ self.w)
        for layer in self.layers:
            x = self.norm(layer(x))
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["int8", "int4:32"])
def test_nnx_models(text):
    stored_in, read_in = texts(text)
    x, given = array(4, 64), Net(nnx.Rngs(0))
    model = nnx.apply_policy(given, stored_in, {"layers/1": "mixed_bfloat16"})
    assert model.head.kernel is model.layers[0].kernel  # what is shared stays shared
    assert isinstance(model.layers[1].kernel, nnx.Param)
    reader = nnx.apply_policy(widened(model, given), read_in)
    close(model(x), reader(x))
    close(nnx.jit(lambda model, x: model(x))(model, x), reader(x))
    gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(gradients)}
    assert "layers/1/kernel" in paths and "w" not in paths and "head/kernel" not in paths
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    optimizer.update(model, gradients)
    assert bool(jnp.isfinite(model(x)).all())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")  # emulated
def test_matmuls_in_8_bits_of_codes():
    x = array(4, 64)
    layer = linen.Dense(32, dtype_policy="params=int8,compute=bf16,m=i8")
    plain = linen.Dense(32, dtype_policy="mixed_bfloat16")
    stored = quantize_params(plain.init(KEY, x), "params=int8")
    expected: Any = plain.apply(dequantize_params(stored), x)
    y: Any = layer.apply(stored, x)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.05)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: linen.Dense(32, dtype_policy="params=int8").init(KEY, array(2, 64)),
        lambda: linen.Embed(64, 32, dtype_policy="params=nf4").init(KEY, jnp.arange(2)),
        lambda: Stack(dtype_policy="params=int4:32").init(KEY, array(2, 64)),
        lambda: linen.apply_policy(FlaxBlock(), "params=int8").init(KEY, array(2, 64)),
        lambda: nnx.Linear(64, 32, rngs=nnx.Rngs(0), dtype_policy="params=int8"),
        lambda: Net(nnx.Rngs(0), dtype_policy="params=int8"),
    ],
)
def test_fresh_parameters_are_rejected(make):
    with pytest.raises(
        ValueError, match=r"(kernel|embedding|w)' would be created in (int|nf).*adapters"
    ):
        make()


@pytest.mark.slow
def test_the_base_of_an_adapter_of_qwix_stays_a_param():
    """qwix looks for its base among the module's `nnx.Param`s, and leaves the adapter out else."""

    class Einsum(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((64, 8)))
            self.w_lora_a, self.w_lora_b = (nnx.LoRAParam(jnp.ones(s)) for s in ((64, 2), (2, 8)))

    assert isinstance(nnx.apply_policy(Einsum(), "bfloat16").w, nnx.Param)
    with pytest.raises(ValueError, match="w has an adapter of qwix, w_lora_a, which would have no"):
        nnx.apply_policy(Einsum(), "params=int8,compute=bfloat16")


@pytest.mark.parametrize("text", ["int4:32", "int8:32", "nf4:64"])
@pytest.mark.parametrize("heads", [1, 4])
def test_attentions_with_narrow_heads_keep_the_kernel_that_has_no_block(text, heads):
    x, stored_in = array(2, 8, 64), texts(text)[0]
    given = flax.nnx.MultiHeadAttention(heads, 64, decode=False, rngs=flax.nnx.Rngs(0))
    model: Any = nnx.apply_policy(given, stored_in)
    layer = linen.MultiHeadDotProductAttention(heads, dtype_policy="mixed_bfloat16")
    params = quantize_params(layer.init(KEY, x, x)["params"], stored_in)
    for name in ("query", "key", "value", "out"):
        is_param = isinstance(getattr(model, name).kernel, nnx.Param)
        assert is_param != is_quantized(params[name]["kernel"])
        assert is_param == (name == "out" and heads == 4)
    reader = nnx.apply_policy(widened(model, given), "mixed_bfloat16")
    close(model(x).astype(jnp.float32), reader(x).astype(jnp.float32))


def test_a_quantized_param_computes_as_its_array():
    given = flax.nnx.Linear(64, 32, rngs=flax.nnx.Rngs(0))
    model: Any = nnx.apply_policy(given, texts("int4:32")[0])
    kernel, wide = model.kernel, model.kernel[...]
    x = array(4, 64)
    for y, expected in (
        (kernel.T, wide.T),
        (kernel.reshape(-1, 4), wide.reshape(-1, 4)),
        (kernel.sum(0), wide.sum(0)),
        (kernel.at[0].set(1.0), wide.at[0].set(1.0)),
        (2 * kernel - kernel, wide),
        (x @ kernel, x @ wide),
        (jnp.stack(list(kernel)), wide),
    ):
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert len(kernel) == 64 and kernel.shape == (64, 32)
    with pytest.raises(ValueError, match=r"int4:32 along .* has values of float32"):
        jax.tree.map(lambda x: x.astype(jnp.float32) * 0.5, nnx.state(model))


@pytest.mark.parametrize("text", ["int8", "int4:32", "uint4:32"])
def test_sharded_params_of_nnx_keep_their_sharding(text):
    mesh = jax.make_mesh((1,), ("mp",), axis_types=(jax.sharding.AxisType.Auto,))
    init = flax.nnx.with_partitioning(flax.nnx.initializers.lecun_normal(), (None, "mp"))
    with jax.set_mesh(mesh):
        given = flax.nnx.Linear(64, 32, kernel_init=init, rngs=flax.nnx.Rngs(0))
        layer: Any = nnx.apply_policy(given, texts(text)[0])
        assert layer(array(4, 64)).shape == (4, 32)
    stored = layer.kernel.get_raw_value()
    assert stored.codes.sharding.mesh.shape == {"mp": 1} and stored.shape == (64, 32)

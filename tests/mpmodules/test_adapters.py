"""Adapters over frozen weights in 8 and 4 bits: gradients, steps, memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import policy
from mpmodules import linen as nn
from mpmodules import nnx, use_policy
from policy.core.param_formats import ParamFormat
from policy.quantized.params import axis_of

HELD = "params=nf4,compute={},output=float32"
WIDTH, RANK = 64, 4
x = jax.random.normal(jax.random.key(1), (8, WIDTH))
wanted = jax.random.normal(jax.random.key(2), (8, WIDTH))


class LoRADense(nn.Module):
    features: int = WIDTH

    @nn.compact
    def __call__(self, x):
        down = nn.Dense(RANK, use_bias=False, name="lora_a")(x)
        up = nn.Dense(self.features, use_bias=False, name="lora_b")(down)
        return nn.Dense(self.features, name="base")(x) + up


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.relu(LoRADense(name="dense")(nn.LayerNorm()(x))), None


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.LoRA(
            WIDTH, RANK, WIDTH, base_module=nnx.Linear(WIDTH, WIDTH, rngs=rngs), rngs=rngs
        )
        self.down = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss_of(model):
    return jnp.mean(jnp.square(model(x) - wanted).astype(jnp.float32))


@pytest.mark.slow
def test_gradients_of_adapters_are_those_over_the_widened_base():
    model = nn.Sequential([LoRADense(), nn.relu, LoRADense()])
    held = HELD.format("float32")
    params = policy.quantized.quantize_params(model.init(jax.random.key(0), x)["params"], held)
    trained, frozen = policy.quantized.split_frozen(params, lambda path: "lora_" in path)

    def gradients(frozen):
        def loss_fn(trained):
            whole = policy.quantized.merge_frozen(trained, frozen)
            return loss_of(lambda x: model.apply({"params": whole}, x))

        with use_policy(held):
            return policy.value_and_grad(loss_fn)(trained)[1]

    found, expected = gradients(frozen), gradients(policy.quantized.dequantize_params(frozen))
    assert len(jax.tree.leaves(found)) == 4
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_nnx_trains_adapters_alone(stored):
    adapter = f"params={stored},compute=bfloat16,output=float32"
    rules = {"up": adapter, "down/lora": adapter, "up/base_module": HELD.format("bfloat16")}
    model: Any = nnx.apply_policy(Net(nnx.Rngs(0)), HELD.format("bfloat16"), rules)
    kernels = [model.up.base_module.kernel, model.down.kernel]
    assert all(isinstance(kernel, nnx.QuantizedParam) for kernel in kernels)
    adapters = nnx.state(model, nnx.LoRAParam)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(adapters)} == {stored}
    before = jax.tree.leaves([kernel.get_raw_value() for kernel in kernels])
    tx = policy.mixed_precision(optax.adamw(1e-2), adapter)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        of_adapters = nnx.DiffState(0, nnx.LoRAParam)
        loss, grads = nnx.value_and_grad(loss_of, argnums=of_adapters)(model)
        optimizer.update(model, grads)
        return loss, grads

    losses, grads = [], None
    for _ in range(30):
        loss, grads = step(model, optimizer)
        losses.append(loss)
    assert losses[-1] < 0.7 * losses[0]
    assert len(jax.tree.leaves(grads)) == 4
    masters = policy.master_params(nnx.state(model, nnx.LoRAParam), optimizer)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(masters)} == {"float32"}
    after = jax.tree.leaves([kernel.get_raw_value() for kernel in kernels])
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype and bool((one == other).all())


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("is_rematerialized", [False, True])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_no_kernel_is_widened_for_backward_or_for_all_layers(is_scanned, is_rematerialized):
    layers, held = 6, HELD.format("bfloat16")
    block = nn.remat(Block, prevent_cse=not is_scanned) if is_rematerialized else Block

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            if is_scanned:
                scanned = nn.scan(
                    block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers
                )
                return scanned(name="layers")(x, None)[0]
            for i in range(layers):
                x, _ = block(name=f"block_{i}")(x)
            return x

    model = Stack()
    params = policy.quantized.quantize_params(model.init(jax.random.key(0), x)["params"], held)
    trained, frozen = policy.quantized.split_frozen(params, lambda path: "lora_" in path)
    codes = [x for x in jax.tree.leaves(frozen, is_leaf=_is_codes) if _is_codes(x)]
    assert sum(x.nbytes for x in codes) == layers * (WIDTH * WIDTH // 2 + 2 * WIDTH)

    def loss_fn(trained, frozen):
        whole = policy.quantized.merge_frozen(trained, frozen)
        return loss_of(lambda x: model.apply({"params": whole}, x))

    with use_policy(held):
        saved = jax.eval_shape(lambda *args: jax.vjp(loss_fn, *args)[1], trained, frozen)
        gradients = jax.jit(policy.value_and_grad(loss_fn))
        text = gradients.lower(trained, frozen).compile().as_text() or ""
    is_wide = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and x.size >= WIDTH * WIDTH  # noqa: E731
    assert not [x for x in jax.tree.leaves(saved) if is_wide(x)]
    for shape in (f"[{layers},{WIDTH},{WIDTH}]", f"[{layers},1,{WIDTH},{WIDTH}]"):
        assert f"f32{shape}" not in text and f"bf16{shape}" not in text


def _is_codes(x):
    return isinstance(x, policy.quantized.QuantizedArray)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("stored", "bytes_of_one"), [("int8", 1 + 2 / 256), ("int4:32", 0.5625), ("nf4", 0.53125)]
)
def test_estimates_and_programs_take_codes_and_scales(stored, bytes_of_one):
    held = f"params={stored},compute=bfloat16,output=bfloat16"
    model, x = nn.Dense(256, use_bias=False), jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    with use_policy("bfloat16"):
        made = jax.eval_shape(model.init, jax.random.key(0), x)
    params = policy.quantized.quantize_params(made, held)
    (row,) = policy.estimate(model.apply, params, x, policies=[held], on="cpu").rows
    with use_policy(held):
        compiled = jax.jit(model.apply).lower(params, x).compile()
    wanted = 256 * 256 * bytes_of_one + 2 * x.size
    assert row.arguments == wanted
    memory = compiled.memory_analysis()
    assert memory is not None and memory.argument_size_in_bytes == wanted


def test_merged_adapters_compute_what_they_did_beside_the_base():
    held = HELD.format("float32")
    model = nn.Sequential([LoRADense(), nn.relu, LoRADense()])
    params = policy.quantized.quantize_params(model.init(jax.random.key(0), x)["params"], held)
    wide = policy.quantized.dequantize_params(params)

    def merged(layer):
        kernel = layer["base"]["kernel"] + layer["lora_a"]["kernel"] @ layer["lora_b"]["kernel"]
        return {"kernel": kernel, "bias": layer["base"]["bias"]}

    whole = {name: merged(layer) for name, layer in wide.items()}
    plain = nn.Sequential([nn.Dense(WIDTH), nn.relu, nn.Dense(WIDTH)])
    y: Any = plain.apply({"params": whole}, x)
    expected: Any = model.apply({"params": wide}, x)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    again = policy.quantized.quantize_params(whole, held)
    assert again["layers_0"]["kernel"].format.text == "nf4:64"


@pytest.mark.slow
def test_adapters_stay_and_an_adapted_query_is_contracted_along_its_first_axis():
    nf4 = ParamFormat("nf4", 64)
    assert axis_of(("dense", "lora_a"), (64, 4), nf4) is None
    assert axis_of(("dense", "lora_a", "kernel"), (64, 4), nf4) is None
    assert axis_of(("query", "base_module", "kernel"), (64, 3, 2), nf4) == -3
    assert axis_of(("out", "base", "kernel"), (2, 64, 8), nf4) == -2

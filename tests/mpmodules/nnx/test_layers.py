"""LoRA's layers, and cells under class rules or stacked by nnx's transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import get_policy, use_policy
from tests.mpmodules.recurrent_cells import HIDDEN, WIDTH, dtypes, matmul_dtypes, sequence
from tests.programs import named, operations

X = jax.random.normal(jax.random.key(0), (3, 8))


def build(layers, name, **kwargs) -> Any:
    kwargs |= {"b_initializer": flax_nnx.initializers.normal(), "rngs": flax_nnx.Rngs(0)}
    if name == "LoRA":
        return layers.LoRA(8, 2, 4, **kwargs)
    return layers.LoRALinear(8, 4, lora_rank=2, **kwargs)


def state(model):
    return flax_nnx.to_pure_dict(flax_nnx.state(model))


def stored(model):
    return {leaf.dtype for leaf in jax.tree.leaves(state(model))}


@pytest.mark.parametrize("name", ("LoRA", "LoRALinear"))
def test_float32_without_a_policy_is_upstreams_bit_for_bit(name):
    ours, upstream = build(nnx, name), build(flax_nnx, name)
    assert jax.tree.structure(state(ours)) == jax.tree.structure(state(upstream))
    jax.tree.map(np.testing.assert_array_equal, state(ours), state(upstream))
    np.testing.assert_array_equal(ours(X), upstream(X))


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "mixed_float16", "bfloat16", "float32"))
@pytest.mark.parametrize("name", ("LoRA", "LoRALinear"))
def test_dtypes_are_the_policys(name, policy):
    policy = get_policy(policy)
    with use_policy(policy):
        inherits = build(nnx, name)
    carries = build(nnx, name, dtype_policy=policy)
    port = nnx.apply_policy(build(flax_nnx, name), policy)
    assert port(X).dtype == policy.output_dtype and stored(port) == {policy.param_dtype}
    assert inherits(X).dtype == policy.compute_dtype and carries(X).dtype == policy.output_dtype
    assert stored(inherits) == stored(carries) == {policy.param_dtype}
    gradients = flax_nnx.grad(lambda m: jnp.sum(m(X).astype(jnp.float32)))(carries)
    assert stored(gradients) == {policy.param_dtype}
    if policy.param_dtype != jnp.float32:
        return  # half initialisers draw other numbers
    expected = np.asarray(build(nnx, name)(X))
    error = np.abs(np.asarray(carries(X), np.float32) - expected).max()
    assert error <= 8 * float(jnp.finfo(policy.compute_dtype).eps) * np.abs(expected).max()


def test_what_a_base_module_returns_is_added_in_compute_dtype():
    base = nnx.Linear(8, 4, rngs=flax_nnx.Rngs(0), dtype_policy="mixed_bfloat16")
    assert base(X).dtype == jnp.float32
    with use_policy("mixed_bfloat16"):
        layer = build(nnx, "LoRA", base_module=base)
    assert layer(X).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"`self\.base_module` must be callable"):
        build(nnx, "LoRA", base_module=flax_nnx.Dict())(X)


def test_explicit_dtypes_of_the_low_rank_part_are_obeyed():
    with (
        use_policy("bfloat16"),
        pytest.warns(UserWarning, match="LoRA at 'lora' has an explicit dtype=float32"),
    ):
        layer = build(nnx, "LoRALinear", lora_dtype=jnp.float32, lora_param_dtype=jnp.float32)
    assert layer.lora.lora_a[...].dtype == jnp.float32 and layer.kernel[...].dtype == jnp.bfloat16
    assert layer.lora.dtype == jnp.float32 and layer(X).dtype == jnp.bfloat16


@pytest.mark.parametrize(("name", "over"), (("LoRA", ""), ("LoRA", "a layer"), ("LoRALinear", "")))
def test_one_that_is_a_boundary_returns_accumulators_and_runs_backward_in_half(name, over):
    def make(policy):
        base = nnx.Linear(8, 4, rngs=flax_nnx.Rngs(1), dtype_policy=policy)
        return build(nnx, name, dtype_policy=policy, **({"base_module": base} if over else {}))

    rounded_to_half = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    half, full = make("mixed_bfloat16"), make("float32")
    for layer in (half, full):
        flax_nnx.update(layer, jax.tree.map(rounded_to_half, state(layer)))
    x = rounded_to_half(X)
    graph, params = flax_nnx.split(half)
    total = lambda params, x: flax_nnx.merge(graph, params, copy=True)(x).sum()  # noqa: E731
    forward = named(operations(lambda x: half(x), x), "dot_general")
    backward = named(operations(jax.grad(total, argnums=(0, 1)), params, x), "dot_general")
    products = [op.outputs for op in forward]
    assert products.count(("float32",)) == (1 if name == "LoRA" else 2)
    # x @ lora_a, which goes into the next product, and what a layer inside of the boundary hands on
    assert products.count(("bfloat16",)) == (2 if over else 1)
    assert len(backward) == 3 * len(forward)
    assert {dtype for op in backward for dtype in op.inputs} == {"bfloat16"}
    lora = full if name == "LoRA" else full.lora
    between, base = x @ lora.lora_a[...], full(x) - x @ lora.lora_a[...] @ lora.lora_b[...]
    rounded = rounded_to_half(between) @ lora.lora_b[...]
    base = rounded_to_half(full.base_module(x)) if over else base
    np.testing.assert_allclose(half(x), base + rounded, rtol=0, atol=2e-6)


def test_class_rules_in_a_scope_reach_a_cell_that_is_built_there():
    with use_policy("bfloat16", {nnx.GRUCell: "float32"}):
        rnn: Any = nnx.RNN(nnx.GRUCell(WIDTH, HIDDEN, rngs=nnx.Rngs(0)))
    assert dtypes(flax_nnx.state(rnn, flax_nnx.Param)) == {"float32"}
    assert rnn.cell.dense_i.dtype == jnp.float32


def test_a_scan_over_stacked_rnns_and_a_rematerialised_rnn_run_in_compute_dtype():
    class Stack(nnx.Module):
        def __init__(self) -> None:
            @flax_nnx.vmap(in_axes=0, out_axes=0)
            def build(key: Any) -> Any:
                return nnx.RNN(nnx.GRUCell(HIDDEN, HIDDEN, rngs=flax_nnx.Rngs(key)))

            self.rnns = build(jax.random.split(jax.random.key(0), 2))

        def __call__(self, x: Any) -> Any:
            @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
            @flax_nnx.remat
            def layers(rnn: Any, x: Any) -> Any:
                return rnn(x)

            return layers(self.rnns, x)

    x = sequence()[..., :HIDDEN]
    with use_policy("mixed_bfloat16"):
        graph, params, rest = flax_nnx.split(Stack(), flax_nnx.Param, ...)
    call = lambda params, x: flax_nnx.merge(graph, params, rest, copy=True)(x)  # noqa: E731
    assert matmul_dtypes(call, params, x) == {"bfloat16"}
    y = jax.jit(call)(params, x)
    assert (y.dtype, y.shape) == (jnp.float32, x.shape)
    loss = lambda params: jnp.square(call(params, x)).sum()  # noqa: E731
    assert dtypes(jax.eval_shape(jax.grad(loss), params)) == {"float32"}

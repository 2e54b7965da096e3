"""LoRA and LoRALinear: what the policy says comes out, and the low-rank part follows it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx
from policy import get_policy, use_policy
from tests.programs import named, operations

X = jax.random.normal(jax.random.key(0), (3, 8))


def build(layers, name, **kwargs) -> Any:
    if name == "LoRA":
        return layers.LoRA(
            8, 2, 4, b_initializer=flax_nnx.initializers.normal(), rngs=flax_nnx.Rngs(0), **kwargs
        )
    initializer = {"b_initializer": flax_nnx.initializers.normal()}
    return layers.LoRALinear(8, 4, lora_rank=2, rngs=flax_nnx.Rngs(0), **initializer, **kwargs)


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
        base = (
            {"base_module": nnx.Linear(8, 4, rngs=flax_nnx.Rngs(1), dtype_policy=policy)}
            if over
            else {}
        )
        return build(nnx, name, dtype_policy=policy, **base)

    half, full = make("mixed_bfloat16"), make("float32")
    for layer in (half, full):
        flax_nnx.update(
            layer, jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), state(layer))
        )
    x = X.astype(jnp.bfloat16).astype(jnp.float32)
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
    rounded = between.astype(jnp.bfloat16).astype(jnp.float32) @ lora.lora_b[...]
    base = full.base_module(x).astype(jnp.bfloat16).astype(jnp.float32) if over else base
    np.testing.assert_allclose(half(x), base + rounded, rtol=0, atol=2e-6)

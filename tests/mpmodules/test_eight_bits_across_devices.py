"""Layers in 8 bits inside of `shard_map`, where the types of arrays say which vary by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mpmodules import linen, nnx
from policy import use_policy

X = jax.random.normal(jax.random.key(0), (2, 4, 8))
LINEN: dict[str, Callable[[], Any]] = {
    "dense": lambda: linen.Dense(8),
    "conv": lambda: linen.Conv(8, (3,)),
    "attention": lambda: linen.MultiHeadDotProductAttention(2),
}
NNX: dict[str, Callable[[nnx.Rngs], Any]] = {
    "dense": lambda rngs: nnx.Linear(8, 8, rngs=rngs),
    "conv": lambda rngs: nnx.Conv(8, 8, (3,), rngs=rngs),
    "attention": lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
}


def model(wing: str, name: str) -> tuple[Callable[[Any, jax.Array], jax.Array], Any]:
    """Returns a layer's function of its parameters and an input, and its parameters."""
    if wing == "linen":
        layer = LINEN[name]()
        return layer.apply, layer.init(jax.random.key(1), X)
    graph, params = nnx.split(NNX[name](nnx.Rngs(1)))
    return lambda params, x: nnx.merge(graph, params)(x), params


@pytest.mark.parametrize(
    "policy", ["mixed_int8", "mixed_float8", "p=f32,c=bf16,o=f32,m=i8:compute"]
)
@pytest.mark.parametrize("name", LINEN)
@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.filterwarnings("ignore:cpu has no:UserWarning")
def test_gradients_of_replicated_params_inside_of_shard_map_are_those_outside(wing, name, policy):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    by_data = PartitionSpec("data")
    with use_policy(policy):
        apply, params = model(wing, name)

        def loss(params: Any, x: jax.Array) -> jax.Array:
            return jnp.square(apply(params, x)).sum()

        def mapped(params: Any, x: jax.Array) -> Any:
            mean = lambda *args: jax.lax.pmean(loss(*args), "data")  # noqa: E731
            return jax.grad(mean, argnums=(0, 1))(params, x)

        specs = (PartitionSpec(), by_data)
        inside = jax.shard_map(mapped, mesh=mesh, in_specs=specs, out_specs=specs)(params, X)
        outside = jax.grad(loss, argnums=(0, 1))(params, X)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), inside, outside
    )


@pytest.mark.parametrize("policy", ["mixed_int8", "mixed_float8"])
@pytest.mark.parametrize("name", ["dense", "conv"])
@pytest.mark.parametrize("wing", ["linen", "nnx"])
@pytest.mark.filterwarnings("ignore:cpu has no:UserWarning")
def test_large_inputs_times_small_weights_are_finite(wing, name, policy):
    with use_policy(policy):
        apply, params = model(wing, name)
        # powers of two: the codes are the same
        small = jax.tree.map(lambda x: 2.0**-13 * x, params)
        large = apply(small, 2.0**123 * X)
        expected = 2.0**110 * np.asarray(apply(params, X), np.float32)
    assert np.abs(X).max() * 2.0**123 > 1e37
    np.testing.assert_allclose(np.asarray(large, np.float32), expected, rtol=1e-6)

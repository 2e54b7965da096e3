"""nnx.EMA: of float32 weights as Flax's, of half-precision ones refused by name."""

from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mpmodules import nnx
from policy import cast_floating, master_params, mixed_precision
from policy.optim import finite_of

if not hasattr(flax.nnx, "EMA"):
    pytest.skip("this Flax has no nnx.EMA", allow_module_level=True)

REFUSED = (
    r"An EMA should be of float32 params, but kernel is {0}: in half precision the average "
    r"stops following them\. Average the masters, master_params\(nnx\.state\(model, nnx\.Param\), "
    r"optimizer\), or cast_floating"
)


def linear(dtype):
    return nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0), param_dtype=dtype)


def test_of_float32_params_it_is_flaxs():
    model, ours, theirs = (
        linear(jnp.float32),
        *(cls(linear(jnp.float32), 0.9) for cls in (nnx.EMA, flax.nnx.EMA)),
    )
    assert isinstance(ours, flax.nnx.EMA)
    model.kernel[...] = model.kernel[...] + 1
    for ema in (ours, theirs):
        ema.update(model)
    np.testing.assert_array_equal(ours.params["kernel"][...], theirs.params["kernel"][...])
    assert ours.apply_to(model).kernel is ours.params["kernel"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_params_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match=REFUSED.format(dtype)):
        nnx.EMA(linear(dtype), 0.9)
    ema = nnx.EMA(cast_floating(nnx.state(linear(dtype)), "float32"), 0.9)
    with pytest.raises(ValueError, match=REFUSED.format(dtype)):
        ema.update(linear(dtype))
    nnx.EMA(linear(dtype), 0.9, only=nnx.BatchStat)  # tracks none of them


def test_what_it_refuses_stands_still_in_flaxs_and_the_masters_average_follows():
    model: Any = linear(jnp.bfloat16)
    model.kernel[...] = jnp.ones((2, 2), jnp.bfloat16)
    optimizer: Any = nnx.Optimizer(
        model, mixed_precision(optax.sgd(1e-2), "bfloat16"), wrt=nnx.Param
    )
    upstream: Any = flax.nnx.EMA(model, 0.999)
    ours: Any = nnx.EMA(master_params(nnx.state(model, nnx.Param), optimizer), 0.999)

    @nnx.jit
    def step(model, optimizer, ours, upstream):
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(
                model, jax.tree.map(lambda p: jnp.ones(p.shape), nnx.state(model, nnx.Param))
            )
        ours.update(master_params(nnx.state(model, nnx.Param), optimizer))
        upstream.update(model)

    for _ in range(100):
        step(model, optimizer, ours, upstream)
    assert finite_of(optimizer)
    expected, weight = 1.0, 1.0
    for _ in range(100):
        weight -= 1e-2
        expected = 0.999 * expected + 0.001 * weight
    np.testing.assert_allclose(ours.params["kernel"][...], expected, rtol=1e-5)
    if not np.array_equal(upstream.params["kernel"][...], np.ones((2, 2))):  # the true one is 0.95
        pytest.skip("this Flax averages half-precision params without losing them")

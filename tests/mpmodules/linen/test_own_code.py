"""linen's own ways to call a port whose own code multiplies."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules.linen import apply_policy
from policy import audit
from tests.mpmodules.own_code_models import Layers, Net, Projection
from tests.mpmodules.wings import KEY, MIXED

TOKENS = jnp.arange(16).reshape(2, 8)
X = jax.random.normal(jax.random.key(1), (2, 8, 16))


def share(model: Any, x: Any = X, **options: Any) -> float:
    """Returns the share of a port's float32 matmuls, forward."""
    variables = jax.eval_shape(lambda: model.init(KEY, x, **options))
    return audit(lambda v: model.apply(v, x, **options), variables).f32_matmul_share


class Scans(nn.Module):
    """Scans over a cell of Flax's, and multiplies by itself."""

    @nn.compact
    def __call__(self, x):
        axes: Any = {"in_axes": 1, "out_axes": 1}
        rngs: Any = {"params": False}
        cell = nn.scan(nn.GRUCell, variable_broadcast="params", split_rngs=rngs, **axes)(16)
        carry, y = cell(cell.initialize_carry(KEY, x[:, 0].shape), x)
        return Projection(4)(y + carry[:, None])


@pytest.mark.parametrize(("model", "carry"), [(Layers(), "bfloat16"), (Scans(), "float32")])
def test_a_scan_of_layers_hands_on_half_and_a_cell_keeps_its_carry(model, carry):
    port = apply_policy(model, MIXED)
    with jax.numpy_dtype_promotion("standard"):
        variables = jax.eval_shape(port.init, KEY, X)
        equations = jax.make_jaxpr(port.apply)(variables, X).eqns
        assert share(port) == 0
    scan: Any = next(e for e in equations if e.primitive.name == "scan")
    assert scan.outvars[0].aval.dtype == carry


def test_a_method_that_is_jitted_itself():
    class Model(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            return Projection(8)(nn.Dense(8)(x))

    assert share(apply_policy(Model(), MIXED)) == 0


def test_other_entries_bound_and_inside_of_another_model():
    class Around(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, tokens):
            return self.inner(tokens)

    model = apply_policy(Net(), MIXED)
    for method in ("hidden", Net.hidden, lambda net, x: net.block(x)[0]):
        assert share(model, method=method) == 0
    assert share(Around(model), TOKENS) == 0
    variables = jax.eval_shape(Net().init, KEY, TOKENS)
    assert audit(lambda v: model.bind(v)(TOKENS), variables).f32_matmul_share == 0


def test_variables_of_own_code_keep_their_dtype():
    class Cached(nn.Module):
        @nn.compact
        def __call__(self, x):
            key = Projection(16)(x)
            seen = self.variable("cache", "seen", jnp.zeros, key.shape, key.dtype)
            seen.value = seen.value + key
            self.sow("intermediates", "key", key)
            return nn.Dense(4)(seen.value)

    model = apply_policy(Cached(), MIXED)
    variables = jax.eval_shape(model.init, KEY, X)
    _, state = jax.eval_shape(
        lambda v: model.apply(v, X, mutable=["cache", "intermediates"]), variables
    )
    assert state["cache"]["seen"].dtype == variables["cache"]["seen"].dtype == jnp.float32
    assert state["intermediates"]["key"][0].dtype == jnp.float32

"""The bias gradients of an OptimizedLSTMCell: which function each gate goes through is found out,
never assumed.
"""

import inspect
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.dtypes import promote_dtype

from mpmodules import linen as nn
from mpmodules.linen import apply_policy
from mpmodules.linen._layers.lstm_gates import applied_gates
from policy import use_policy
from tests.programs import operations

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (300, 4))
CARRY = (jnp.zeros((300, 3)), jnp.zeros((300, 3)))


class Reordered(flax_nn.OptimizedLSTMCell):
    """What a newer Flax could be: the same cell, its gates applied in another order."""

    @flax_nn.compact
    def __call__(self, carry, inputs):
        c, h = carry
        sums = {}
        for gate in "ogfi":
            args = {"param_dtype": self.param_dtype, "bias_init": self.bias_init}
            part = {"kernel_init": self.kernel_init, "use_bias": False}
            wx, _ = DenseParams(self.features, **args, **part, name=f"i{gate}")(inputs)
            wh, b = DenseParams(
                self.features, **args, kernel_init=self.recurrent_kernel_init, name=f"h{gate}"
            )(h)
            inputs, h, wx, wh, b = promote_dtype(inputs, h, wx, wh, b, dtype=self.dtype)
            sums[gate] = inputs @ wx + h @ wh + b[None]
        out, new = self.gate_fn(sums["o"]), self.activation_fn(sums["g"])
        kept, taken = self.gate_fn(sums["f"]), self.gate_fn(sums["i"])
        c = kept * c + taken * new
        h = out * self.activation_fn(c)
        return (c, h), h


class Renamed(flax_nn.OptimizedLSTMCell):
    """What a newer Flax could be: parameters of other names."""

    @flax_nn.compact
    def __call__(self, carry, inputs):
        y = flax_nn.Dense(self.features, dtype=self.dtype, name="gates")(inputs)
        return (carry[0], y), y


DenseParams = flax_nn.recurrent.DenseParams
for _cls in (Reordered, Renamed):  # the layer's own code, not a user's on top of it
    _cls.__call__.__module__ = inspect.unwrap(_cls.__call__).__module__ = "flax.linen.recurrent"


def bias_gradients(cell: Any, variables: Any) -> Any:
    def loss(variables: Any) -> Any:
        (c, h), _ = cell.apply(variables, CARRY, X)
        return (c.astype(jnp.float32).sum() + 2 * h.astype(jnp.float32).sum()) / 300

    return {
        gate: part["bias"]
        for gate, part in jax.grad(loss)(variables)["params"].items()
        if gate[0] == "h"
    }


def test_the_gates_of_flaxs_own_cell_are_found_inside_jit_and_a_ported_model_alike():
    applied_gates.cache_clear()
    found = []
    jax.jit(lambda x: found.append(applied_gates(flax_nn.OptimizedLSTMCell)) or x)(1.0)
    applied_gates.cache_clear()
    cell: Any = apply_policy(flax_nn.OptimizedLSTMCell(3), "mixed_bfloat16")
    jax.eval_shape(cell.init, KEY, CARRY, X)
    found.append(applied_gates(flax_nn.OptimizedLSTMCell))
    assert found[0] == found[1] and applied_gates.cache_info().misses == 1
    gates = [gate for calls in found[0].values() for gate in calls if gate is not None]
    assert sorted(gates) == ["hf", "hg", "hi", "ho"] and "hg" in found[0]["activation_fn"]


@pytest.mark.parametrize("cls", (flax_nn.OptimizedLSTMCell, Reordered))
@pytest.mark.parametrize("lift", (lambda cls: cls, flax_nn.remat))
def test_each_gates_bias_gets_its_own_gradient_summed_in_float32(cls, lift):
    applied = applied_gates(cls)
    assert applied is not None
    if cls is Reordered:
        assert applied == {"gate_fn": ("ho", "hf", "hi"), "activation_fn": ("hg", None)}
    variables: Any = flax_nn.LSTMCell(3).init(KEY, CARRY, X)
    expected = bias_gradients(flax_nn.LSTMCell(3), variables)
    cell: Any = apply_policy(lift(cls)(3), "mixed_bfloat16")
    found = bias_gradients(cell, variables)
    sums = [
        op
        for op in operations(lambda v: bias_gradients(cell, v), variables)
        if op.name == "reduce_sum"
    ]
    assert {op.inputs[0] for op in sums} == {"float32"}
    for gate in expected:
        np.testing.assert_allclose(found[gate], expected[gate], rtol=0.02, atol=0.02)
    assert (
        np.ptp([float(jnp.abs(g).max()) for g in expected.values()]) > 0.1
    )  # one gate's is not another's


def test_a_cell_whose_gates_can_t_be_told_keeps_flaxs_own_gradients():
    assert applied_gates(Renamed) is None
    carry, cell = (
        jax.tree.map(lambda x: x.astype(jnp.bfloat16), CARRY),
        Renamed(3, dtype=jnp.bfloat16),
    )
    ported: Any = apply_policy(Renamed(3), "p=f32,c=bf16,o=bf16")
    variables = cell.init(KEY, carry, X)

    def gradient(cell: Any) -> Any:
        return jax.grad(lambda v: cell.apply(v, carry, X)[1].astype(jnp.float32).sum())(variables)

    jax.tree.map(np.testing.assert_array_equal, gradient(ported), gradient(cell))


@pytest.mark.parametrize("ported", (False, True))
def test_a_rule_for_the_parts_of_an_optimized_cell_is_refused(ported):
    wing: Any = flax_nn if ported else nn
    rnn, x = wing.RNN(wing.OptimizedLSTMCell(3)), X[None]

    def init(rules: Any) -> Any:
        if ported:
            return jax.eval_shape(apply_policy(rnn, "mixed_bfloat16", rules).init, KEY, x)
        with use_policy("mixed_bfloat16", rules):
            return jax.eval_shape(rnn.init, KEY, x)

    with pytest.raises(
        ValueError, match=r"^Rule 'cell/hi' matched no module. Modules seen: cell\.(\n|$)"
    ):
        init({"cell/hi": "float32"})
    variables = init({"cell(/hi)?": "p=bf16,c=f32"})
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"bfloat16"}


def test_a_rule_for_the_parts_of_a_root_cell_is_refused_too():
    cell: Any = nn.OptimizedLSTMCell(3)
    with (
        use_policy("mixed_bfloat16", {"h.": "float32"}),
        pytest.raises(ValueError, match="only the root"),
    ):
        jax.eval_shape(cell.init, KEY, CARRY, X)

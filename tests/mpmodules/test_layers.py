"""Every layer in half precision: near float32, with a policy of its own, on empty batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import get_policy
from tests.mpmodules.table.cases import CASES, Case
from tests.mpmodules.table.running import dtypes_of, program, scope_of, traced

pytestmark = [
    pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*value.*:DeprecationWarning"),
]
KEY = jax.random.key(0)
FIRST: dict[tuple[str, str], Case] = {}  # one case of each layer
for _wing, _case in CASES:
    FIRST.setdefault((_wing, _case.layer), _case)
LAYERS = [(wing, case) for (wing, _), case in FIRST.items()]
BARE = [
    (wing, case)
    for wing, case in LAYERS
    if not (case.is_module or case.is_cell or case.layer == "Dropout")
]


def each(cases: list[tuple[str, Case]]) -> pytest.MarkDecorator:
    ids = [f"{wing}-{case.layer}" for wing, case in cases]
    return pytest.mark.parametrize(("wing", "case"), cases, ids=ids)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@each(LAYERS)
def test_half_precision_is_close_to_our_own_float32_on_empty_batches_too(wing, case, policy):
    def run(policy):
        with scope_of(policy):
            layer = program(wing, case)
            params, rest = jax.jit(layer.init)(KEY)
            out, _ = layer.apply(params, rest, layer.inputs)
            empty = jax.tree.map(lambda x: x[:0], layer.inputs)
            nothing, _ = layer.apply(params, rest, empty)
            shaped, _ = jax.eval_shape(layer.apply, params, rest, empty)
        for found, expected in zip(*map(jax.tree.leaves, (nothing, shaped)), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert found.shape[0] == 0
        return jax.tree.leaves(out)

    # each layer rounds its operands and its result: a few ulps of the largest output, attention's
    # three matmuls more
    ulps = 12 if "Attention" in case.layer else 4
    eps = float(jnp.finfo(get_policy(policy).compute_dtype).eps)
    for half, exact in zip(run(policy), run(None), strict=True):
        atol = ulps * eps * max(1.0, float(jnp.abs(exact).max()))
        np.testing.assert_allclose(half.astype(jnp.float32), exact, atol=atol, rtol=0)


@each(BARE)
def test_a_layer_with_a_policy_of_its_own_stores_param_dtype_and_returns_output_dtype(wing, case):
    trace = traced(wing, case, None, dtype_policy="p=bf16,c=f16,o=f32")
    assert dtypes_of(trace.params) <= {"bfloat16"} and dtypes_of(trace.out) == {"float32"}

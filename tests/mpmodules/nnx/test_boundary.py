"""References that pass a boundary by identity, and modules that are shared or built before."""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx, use_policy
from policy import DtypePolicyWarning
from tests.mpmodules.wings import NnxModel

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
MIXED = "mixed_bfloat16"
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def linear(**options):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0), **options)


def test_a_shared_module_keeps_the_policy_it_was_built_under():
    class Holder(nnx.Module):
        def __init__(self, block):
            self.block = block

        def __call__(self, x):
            return self.block(x) * 2

    class Shares(nnx.Module):
        def __init__(self):
            self.block = nnx.Sequential(linear(), nnx.relu)
            self.inner = Holder(self.block)

        def __call__(self, x):
            return self.block(x), self.inner(x)

    shares = Shares(dtype_policy=MIXED)
    assert [out.dtype for out in shares(X)] == [F32, F32]
    assert NnxModel(shares).dots(X) == [("bfloat16", "bfloat16")] * 2
    with use_policy("f16"):
        outer = Holder(shares.block)
    assert outer(X).dtype == F16
    assert NnxModel(outer).dots(X) == [("bfloat16", "bfloat16")]


def test_a_layer_with_a_policy_by_a_class_rule_is_a_boundary():
    with use_policy("bf16", rules={nnx.Linear: MIXED}):
        layer = linear()
    assert layer(X).dtype == F32


class Receives(nnx.Module):
    def __call__(self, x, reference, call=None):
        return x, reference if call is None else call(reference, x)


@pytest.fixture
def receives() -> Any:
    return cast(Any, Receives(dtype_policy=MIXED))


@pytest.mark.parametrize(
    "reference",
    [
        lambda: nnx.Rngs(0),
        lambda: nnx.Rngs(0).dropout,
        lambda: nnx.Param(jnp.ones(3)),
        lambda: flax_nnx.Linear(4, 4, rngs=nnx.Rngs(0)),
        lambda: nnx.List([nnx.Param(jnp.ones(3))]),
        lambda: jax.new_ref(jnp.ones(3)),
    ],
    ids=["Rngs", "RngStream", "Variable", "Module", "List", "Ref"],
)
def test_references_pass_the_boundary_by_identity(reference, receives):
    reference = reference()
    x, out = receives(X, reference)
    assert out is reference and x.dtype == F32
    assert receives(X, {"a": [reference]})[1]["a"][0] is reference


def test_a_reference_that_the_code_closes_over_is_returned_by_identity():
    for reference in (nnx.Rngs(0), nnx.Param(jnp.ones(3)), linear()):
        receives = cast(Any, Receives(dtype_policy=MIXED))
        _, (inside, (deeper,)) = receives(X, None, call=lambda _, x, r=reference: (r, [r]))
        assert inside is deeper is reference


def test_a_state_passes_by_value_and_a_graph_by_identity(receives):
    graph, state = flax_nnx.split(linear())
    _, out = receives(X, state)
    assert type(out) is type(state)
    jax.tree.map(np.testing.assert_array_equal, out, state)
    with pytest.warns(DtypePolicyWarning, match="Receives can't be traced.* returns a GraphDef"):
        assert receives(X, graph)[1] is graph


def test_python_numbers_pass_and_numpys_are_arrays():
    model = Receives(dtype_policy="bf16")
    assert model(2.5, None)[0] == 2.5 and model(np.float32(2.5), None)[0].dtype == BF16


def test_what_an_argument_holds_is_changed_as_by_flax():
    def call(given, x):
        norm, theirs, dropout, rngs, count = given
        count.set_value(count.get_value() + 2)
        return norm(x), theirs(x), dropout(jnp.ones((8, 8)), rngs=rngs)

    norm, theirs = (layers.BatchNorm(4, rngs=nnx.Rngs(0)) for layers in (nnx, flax_nnx))
    dropout, rngs, count = nnx.Dropout(0.5, deterministic=False), nnx.Rngs(0), nnx.Variable(0.0)
    model = Receives(dtype_policy="inputs=keep,c=f32")
    masks = [np.asarray(model(X, (norm, theirs, dropout, rngs, count), call)[1][2]) for _ in "ab"]
    assert not np.array_equal(*masks) and rngs.default.count[...] == 2
    assert count.get_value() == 4.0
    np.testing.assert_allclose(norm.mean[...], theirs.mean[...], rtol=1e-6)
    assert norm.mean[...].dtype == F32 and np.any(norm.mean[...] != 0)

"""What the table of layers has to run for: initial values, jit, half precision near float32, empty
batches; and initializers in half.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import get_policy, use_policy
from tests.mpmodules.table.cases import CASES, Case
from tests.mpmodules.table.running import (
    DEPRECATIONS,
    THEIRS,
    dtypes_of,
    program,
    scope_of,
    traced,
)

pytestmark = DEPRECATIONS
# One case of each layer: settings share their parameters, and nothing that they do depends on jit.
FIRST: dict[tuple[str, str], Case] = {}
for _api, _case in CASES:
    FIRST.setdefault((_api, _case.layer), _case)
LAYERS = [(api, case) for (api, _), case in FIRST.items()]
BARE = [
    (api, case)
    for api, case in LAYERS
    if not (case.is_module or case.is_cell or case.layer == "Dropout")
]
KEY = jax.random.key(0)
# In half precision Flax can't initialize cells, rounds normalized weights, and keeps LoRALinear's
# low rank in float32.
REPAIRED = ("RNN", "Bidirectional", "WeightNorm", "SpectralNorm", "LoRALinear")


def each(cases: list[tuple[str, Case]]) -> pytest.MarkDecorator:
    ids = [f"{api}-{case.layer}" for api, case in cases]
    return pytest.mark.parametrize(("api", "case"), cases, ids=ids)


def initial_values(api: str, case: Case, modules: Any, **dtypes: Any) -> Any:
    """A jitted function of a key to the parameters."""
    run = program(api, case, modules, **dtypes)
    return jax.jit(lambda key: run.init(key)[0])


@pytest.mark.cases(fast=1, slow=9)
@pytest.mark.parametrize("policy", ("mixed_bfloat16", "bfloat16"))
@each(LAYERS)
def test_a_layer_has_flaxs_tree_and_initial_values(api, case, policy):
    param_dtype = get_policy(policy).param_dtype
    if param_dtype != jnp.float32 and (case.layer in REPAIRED or case.is_cell):
        pytest.skip("repaired: Flax fails there, or stores another dtype than param_dtype")
    given = {} if param_dtype == jnp.float32 else {"param_dtype": param_dtype}
    with scope_of(policy):
        ours = initial_values(api, case, None)
        lowered = ours.lower(KEY)
    with jax.numpy_dtype_promotion("standard"):
        theirs = initial_values(api, case, THEIRS[api], **given)
        expected = theirs.lower(KEY)
    types, wanted = (
        [str(x) for x in jax.tree.leaves(program.out_info)] for program in (lowered, expected)
    )
    assert types == wanted
    if lowered.as_text() != expected.as_text():
        for a, b in zip(jax.tree.leaves(ours(KEY)), jax.tree.leaves(theirs(KEY)), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def assert_near(found: Any, expected: Any, ulps: float, dtype: Any) -> None:
    """Within so many ulps of the largest number, or of 1."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        atol = ulps * float(jnp.finfo(dtype).eps) * max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=0, atol=atol)


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@each(LAYERS)
def test_half_is_close_to_our_own_float32_jit_changes_nothing_and_empty_batches_pass(
    api, case, policy
):
    def run(policy):
        with scope_of(policy):
            layer = program(api, case)
            params, rest = jax.jit(layer.init)(KEY)
            out, _ = layer.apply(params, rest, layer.inputs)
            jitted, _ = jax.jit(lambda params: layer.apply(params, rest, layer.inputs))(params)
            empty = jax.tree.map(lambda x: x[:0], layer.inputs)
            nothing, _ = layer.apply(params, rest, empty)
            shaped, _ = jax.eval_shape(layer.apply, params, rest, empty)
        for found, expected in zip(*map(jax.tree.leaves, (nothing, shaped)), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            assert found.shape[0] == 0
        return out, jitted

    compute, (out, jitted) = get_policy(policy).compute_dtype, run(policy)
    assert [x.dtype for x in jax.tree.leaves(out)] == [x.dtype for x in jax.tree.leaves(jitted)]
    # XLA rounds what it does not fuse; each layer rounds its operands and its result, attention's
    # three matmuls more
    assert_near(jitted, out, 4, compute)
    if compute != jnp.float32:  # whose variances are not Flax's
        assert_near(out, run(None)[0], 12 if "Attention" in case.layer else 4, compute)


@pytest.mark.cases(fast=1, slow=7)
@each(BARE)
def test_a_layer_with_a_policy_of_its_own_stores_param_dtype_and_returns_output_dtype(api, case):
    trace = traced(api, case, None, dtype_policy="p=bf16,c=f16,o=f32")
    assert dtypes_of(trace.params) <= {"bfloat16"} and dtypes_of(trace.out) == {"float32"}


ORTHOGONAL, X = jax.nn.initializers.orthogonal(), jnp.ones((2, 3, 4))
BOXED = linen.with_partitioning(ORTHOGONAL, ("a", "b"))
NAMED = flax_nnx.with_metadata(ORTHOGONAL, tag="a")
RNGS = flax_nnx.Rngs
MADE: dict[str, Any] = {
    "Dense": lambda: linen.Dense(4, kernel_init=ORTHOGONAL).init(KEY, X),
    "partitioned": lambda: linen.Dense(4, kernel_init=BOXED).init(KEY, X),
    "Embed": lambda: linen.Embed(4, 4, embedding_init=ORTHOGONAL).init(KEY, jnp.zeros(2, int)),
    "attention": lambda: linen.MultiHeadDotProductAttention(2, kernel_init=ORTHOGONAL).init(KEY, X),
    "Linear": lambda: flax_nnx.state(nnx.Linear(4, 4, kernel_init=ORTHOGONAL, rngs=RNGS(0))),
    "partitioned Linear": lambda: flax_nnx.state(nnx.Linear(4, 4, kernel_init=NAMED, rngs=RNGS(0))),
    "LoRA": lambda: flax_nnx.state(nnx.LoRA(4, 2, 4, a_initializer=ORTHOGONAL, rngs=RNGS(0))),
}


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("policy", ("bfloat16", "float16"))
@pytest.mark.parametrize("name", MADE)
def test_an_initializer_that_fails_in_half_runs_in_float32(name, policy):
    wide = MADE[name]()
    with use_policy(policy):
        found = MADE[name]()
    assert jax.tree.structure(found) == jax.tree.structure(wide)  # and a partition's names
    for a, b in zip(*map(jax.tree.leaves, (found, wide)), strict=True):
        if jnp.issubdtype(b.dtype, jnp.floating):
            assert a.dtype == policy
            if name in ("Dense", "Linear"):
                np.testing.assert_array_equal(a, b.astype(policy))

"""What the table of layers has to run for: initial values, and jit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import get_policy
from tests.mpmodules.table.cases import CASES, Case
from tests.mpmodules.table.running import THEIRS, program, scope_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Module.sow:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*value.*:DeprecationWarning"),
]
# One case of each layer: settings share their parameters, and nothing that they do depends on jit.
FIRST: dict[tuple[str, str], Case] = {}
for _wing, _case in CASES:
    FIRST.setdefault((_wing, _case.layer), _case)
EACH_LAYER = pytest.mark.parametrize(
    ("wing", "case"),
    [(wing, case) for (wing, _), case in FIRST.items()],
    ids=[f"{wing}-{layer}" for wing, layer in FIRST],
)
KEY = jax.random.key(0)
# In half precision Flax can't initialise cells, rounds normalised weights, and keeps LoRALinear's
# low rank in float32.
REPAIRED = ("RNN", "Bidirectional", "WeightNorm", "SpectralNorm", "LoRALinear")


def initial_values(wing: str, case: Case, modules: Any, **dtypes: Any) -> Any:
    """A jitted function of a key to the parameters."""
    run = program(wing, case, modules, **dtypes)
    return jax.jit(lambda key: run.init(key)[0])


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "bfloat16"))
@EACH_LAYER
def test_a_layer_has_flaxs_tree_and_initial_values(wing, case, policy):
    param_dtype = get_policy(policy).param_dtype
    if param_dtype != jnp.float32 and (case.layer in REPAIRED or case.layer.endswith("Cell")):
        pytest.skip("repaired: Flax fails there, or stores another dtype than param_dtype")
    given = {} if param_dtype == jnp.float32 else {"param_dtype": param_dtype}
    with scope_of(policy):
        ours = initial_values(wing, case, None)
        lowered = ours.lower(KEY)
    with jax.numpy_dtype_promotion("standard"):
        theirs = initial_values(wing, case, THEIRS[wing], **given)
        expected = theirs.lower(KEY)
    types, wanted = (
        [str(x) for x in jax.tree.leaves(program.out_info)] for program in (lowered, expected)
    )
    assert types == wanted
    if lowered.as_text() != expected.as_text():
        for a, b in zip(jax.tree.leaves(ours(KEY)), jax.tree.leaves(theirs(KEY)), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("policy", ("float32", "mixed_bfloat16"))
@EACH_LAYER
def test_jit_changes_nothing(wing, case, policy):
    with scope_of(policy):
        run = program(wing, case)
        params, rest = jax.jit(run.init)(KEY)
        jitted = jax.jit(lambda params, rest: run.apply(params, rest, run.inputs)[0])(params, rest)
        plain, _ = run.apply(params, rest, run.inputs)
    resolved = get_policy(policy)

    def close(a: jax.Array, b: jax.Array) -> None:
        assert a.dtype == b.dtype
        # XLA rounds what it does not fuse: an ulp of compute_dtype at each step, of the largest
        # value
        atol = 4 * float(jnp.finfo(resolved.compute_dtype).eps) * max(1.0, float(jnp.abs(b).max()))
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=atol
        )

    jax.tree.map(close, jitted, plain)

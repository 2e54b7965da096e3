"""The policy that an nnx layer holds, field by field, and what rules of a port leave alone.

`tests/mpmodules/test_precedence.py` has the levels of precedence, for both wings.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import get_policy, nnx, use_policy
from policy import DtypePolicyWarning

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
X = np.ones((2, 4), np.float32)


def linear(**options):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0), **options)


def test_a_dtype_policy_is_stronger_than_a_path_rule_of_apply_policy():
    with use_policy("f32"):
        model: Any = nnx.Sequential(linear(), linear(dtype_policy="f16"))
    model = nnx.apply_policy(model, "mixed_bfloat16", {"layers/.*": "bf16"})
    assert [str(layer.dtype_policy.compute_dtype) for layer in model.layers] == [
        "bfloat16",
        "float16",
    ]


def test_a_rule_in_an_outer_block_holds_in_an_inner_one_without_rules():
    with use_policy("f32", rules={nnx.Linear: "bf16"}), use_policy("f16"):
        assert linear().dtype_policy == get_policy("bf16")


# The effective policy, field by field: own or inherited policy, arguments -> (param, compute,
# output, reduction).
@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
@pytest.mark.parametrize(
    ("arguments", "inherited", "own"),
    [
        ({"dtype": F16}, (F32, F16, F16, F32), (F32, F16, F32, F32)),
        ({"param_dtype": BF16}, (BF16, BF16, F32, F32), (BF16, BF16, F32, F32)),
        ({"dtype": None, "param_dtype": None}, (F32, BF16, F32, F32), (F32, BF16, F32, F32)),
    ],
)
def test_the_effective_policy_is_formed_field_by_field(arguments, inherited, own):
    with use_policy("mixed_bfloat16"):
        found = linear(**arguments), nnx.LayerNorm(4, rngs=nnx.Rngs(0), **arguments)
    given = linear(dtype_policy="mixed_bfloat16", **arguments)
    for layer, fields in (*((layer, inherited) for layer in found), (given, own)):
        policy = layer.dtype_policy
        dtypes = policy.param_dtype, policy.compute_dtype, policy.output_dtype
        assert (*dtypes, policy.reduction_dtype) == tuple(map(jnp.dtype, fields))
        assert (layer.param_dtype, layer.dtype) == fields[:2]


def test_a_user_s_subclass_that_says_no_dtype_obeys_the_policy_and_its_argument_wins_over_it():
    class Mine(nnx.Linear):
        def __init__(self, width, *, rngs, **options):
            super().__init__(width, width, rngs=rngs, **options)

    with use_policy("bf16"):
        assert Mine(4, rngs=nnx.Rngs(0)).kernel.dtype == BF16
    with pytest.warns(DtypePolicyWarning, match="^Mine at 'Mine' has an explicit dtype=float16"):
        layer = Mine(4, rngs=nnx.Rngs(0), dtype=F16, dtype_policy="mixed_bfloat16")
    assert layer(X).dtype == F32

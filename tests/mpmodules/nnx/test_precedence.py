"""The order of precedence, from strongest to weakest: an argument of the layer, dtype_policy=, a
rule, the enclosing module or block, the global policy, none. One test for each neighbouring pair.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import Policy, get_policy, nnx, set_policy, use_policy
from policy import DtypePolicyWarning

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
X = np.ones((2, 4), np.float32)


def linear(**options):
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0), **options)


class Net(nnx.Module):
    def __init__(self, **options):
        self.linear = linear(**options)

    def __call__(self, x):
        return self.linear(x)


@pytest.fixture
def global_policy():
    yield set_policy
    set_policy(None)


def test_a_dtype_argument_is_stronger_than_dtype_policy():
    with pytest.warns(DtypePolicyWarning):
        layer = linear(dtype=F16, dtype_policy="mixed_bfloat16")
    assert layer.dtype == F16
    assert layer.dtype_policy == Policy(F32, F16, F32)
    assert layer(X).dtype == F32


def test_a_dtype_policy_is_stronger_than_a_rule():
    with use_policy("f32", rules={nnx.Linear: "bf16"}):
        assert linear(dtype_policy="f16").dtype_policy == get_policy("f16")


def test_a_dtype_policy_is_stronger_than_a_path_rule_of_apply_policy():
    with use_policy("f32"):
        model: Any = nnx.Sequential(linear(), linear(dtype_policy="f16"))
    model = nnx.apply_policy(model, "mixed_bfloat16", {"layers/.*": "bf16"})
    assert [str(layer.dtype_policy.compute_dtype) for layer in model.layers] == [
        "bfloat16",
        "float16",
    ]


def test_a_rule_is_stronger_than_the_enclosing_module_and_block():
    with use_policy("f32", rules={nnx.Linear: "bf16"}):
        assert Net(dtype_policy="f16").linear.dtype_policy == get_policy("bf16")
        assert linear().dtype_policy == get_policy("bf16")


def test_a_rule_in_an_outer_block_holds_in_an_inner_one_without_rules():
    with use_policy("f32", rules={nnx.Linear: "bf16"}), use_policy("f16"):
        assert linear().dtype_policy == get_policy("bf16")


def test_the_innermost_of_module_and_block_wins():
    class Builds(nnx.Module):
        def __init__(self):
            self.by_module = linear()
            with use_policy("f16"):
                self.by_block = linear()

    with use_policy("f32"):
        model = Builds(dtype_policy="bf16")
    assert [model.by_module.dtype, model.by_block.dtype] == [BF16, F16]


def test_a_block_is_stronger_than_the_global_policy(global_policy):
    global_policy("f32")
    with use_policy("bf16"):
        assert linear().dtype_policy == get_policy("bf16")
    assert linear().dtype_policy == get_policy("f32")


def test_the_global_policy_is_stronger_than_none(global_policy):
    global_policy("bf16")
    assert linear().dtype_policy == get_policy("bf16")
    global_policy(None)
    assert linear().dtype_policy is None


def test_global_class_rules_hold_everywhere(global_policy):
    global_policy("f32", {nnx.Linear: "bf16"})
    assert linear().dtype_policy == get_policy("bf16")
    assert nnx.LayerNorm(4, rngs=nnx.Rngs(0)).dtype_policy == get_policy("f32")


# The effective policy, field by field: own or inherited policy, arguments -> (param, compute,
# output, reduction).
FIELDS = [
    ("inherited", {}, (F32, BF16, F32, F32)),
    ("inherited", {"dtype": F16}, (F32, F16, F16, F32)),
    ("inherited", {"param_dtype": BF16}, (BF16, BF16, F32, F32)),
    ("inherited", {"dtype": F16, "param_dtype": F16}, (F16, F16, F16, F32)),
    ("own", {"dtype": F16}, (F32, F16, F32, F32)),
    ("own", {"param_dtype": BF16}, (BF16, BF16, F32, F32)),
    ("own", {"dtype": None, "param_dtype": None}, (F32, BF16, F32, F32)),
]


@pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")
@pytest.mark.parametrize(("given", "arguments", "fields"), FIELDS)
@pytest.mark.parametrize("layer", ["Linear", "LayerNorm", "Embed", "MultiHeadAttention"])
def test_the_effective_policy_is_formed_field_by_field(layer, given, arguments, fields):
    build = {
        "Linear": lambda **k: nnx.Linear(4, 4, rngs=nnx.Rngs(0), **k),
        "LayerNorm": lambda **k: nnx.LayerNorm(4, rngs=nnx.Rngs(0), **k),
        "Embed": lambda **k: nnx.Embed(4, 4, rngs=nnx.Rngs(0), **k),
        "MultiHeadAttention": lambda **k: nnx.MultiHeadAttention(
            2, 4, rngs=nnx.Rngs(0), decode=False, **k
        ),
    }[layer]

    def built():
        if given == "own":
            return build(dtype_policy="mixed_bfloat16", **arguments)
        with use_policy("mixed_bfloat16"):
            return build(**arguments)

    module = flax_nnx.eval_shape(built)
    policy = module.dtype_policy
    found = (policy.param_dtype, policy.compute_dtype, policy.output_dtype, policy.reduction_dtype)
    assert found == tuple(map(jnp.dtype, fields))
    assert (module.param_dtype, module.dtype) == fields[:2]


def test_a_param_dtype_of_float32_that_was_given_differs_from_one_that_was_not():
    with use_policy("bf16"):
        assert linear().kernel.dtype == BF16
        with pytest.warns(
            DtypePolicyWarning,
            match=r"has an explicit param_dtype=float32, which overrides the policy in force",
        ):
            assert linear(param_dtype=F32).kernel.dtype == F32


def test_a_dtype_of_none_that_was_given_counts_as_not_given():
    with use_policy("mixed_bfloat16"):
        assert linear(dtype=None, param_dtype=None).dtype == BF16
    assert linear(dtype=None, param_dtype=None).kernel.dtype == F32


def test_an_explicit_dtype_that_defeats_the_policy_warns_once_and_is_obeyed():
    expected = (
        r"^Linear at 'Linear' has an explicit dtype=float32 and param_dtype=float16, which "
        r"override the policy in force, 'params=float32,compute=bfloat16,output=float32'\. Delete "
        r"the argument to let the policy decide, or give the layer a dtype_policy\.$"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with use_policy("mixed_bfloat16"):
            layers = [linear(dtype=F32, param_dtype=F16) for _ in range(3)]
    assert len(caught) == 1
    assert {(layer.dtype, layer.kernel.dtype) for layer in layers} == {
        (jnp.dtype(F32), jnp.dtype(F16))
    }
    with use_policy("mixed_bfloat16"), pytest.warns(DtypePolicyWarning, match=expected):
        linear(dtype=F32, param_dtype=F16)


def test_explicit_dtypes_that_agree_with_the_policy_do_not_warn():
    with use_policy("mixed_bfloat16"):
        layer = linear(dtype=BF16, param_dtype=F32)
    assert layer.dtype_policy.output_dtype == BF16


def test_an_explicit_dtype_alone_makes_no_boundary():
    seen = []

    class Outer(nnx.Module):
        def __init__(self):
            self.linear = linear(dtype=F32)

        def __call__(self, x):
            seen.append(self.linear(x).dtype)
            return x

    with pytest.warns(DtypePolicyWarning):
        model = Outer(dtype_policy="mixed_bfloat16")
    model(X)
    assert seen == [F32]


def test_a_complex_dtype_stays_the_layer_s_own():
    with (
        use_policy("mixed_bfloat16"),
        pytest.warns(DtypePolicyWarning, match="dtype=complex64 and param_dtype=complex64"),
    ):
        layer = linear(dtype=jnp.complex64, param_dtype=jnp.complex64)
    assert layer.kernel.dtype == jnp.complex64
    assert layer(X.astype(np.complex64)).dtype == jnp.complex64


def test_a_user_s_subclass_that_says_no_dtype_obeys_the_policy_and_its_argument_wins_over_it():
    class Mine(nnx.Linear):
        def __init__(self, width, *, rngs, **options):
            super().__init__(width, width, rngs=rngs, **options)

    with use_policy("bf16"):
        assert Mine(4, rngs=nnx.Rngs(0)).kernel.dtype == BF16
    with pytest.warns(DtypePolicyWarning, match="^Mine at 'Mine' has an explicit dtype=float16"):
        layer = Mine(4, rngs=nnx.Rngs(0), dtype=F16, dtype_policy="mixed_bfloat16")
    assert layer(X).dtype == F32

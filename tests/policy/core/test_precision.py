"""The precision of a policy: its text, and what autocast and islands multiply at."""

import pickle

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import policy
from policy import Policy, PolicyRules, get_policy, use_policy
from tests.matmul_precisions import precisions

MIXED = "mixed_bfloat16"
X, W = jnp.ones((2, 4)), jnp.ones((4, 4))


@pytest.mark.parametrize(
    ("given", "compute", "name"),
    [
        (None, "f32", None),
        ("highest", "f32", "highest"),
        ("HIGH", "bf16", "high"),
        (lax.Precision.DEFAULT, "f32", "default"),
        ("bf16_bf16_f32_x3", "f32", "BF16_BF16_F32_X3"),
        (lax.DotAlgorithmPreset.F16_F16_F32, "f16", "F16_F16_F32"),
        ("F64_F64_F64", "f64", "F64_F64_F64"),
    ],
)
def test_a_precision_is_canonical_and_survives_its_text(given, compute, name):
    made = Policy("f32", compute, "f32", precision=given)
    assert made.precision == name
    for copy in (get_policy(str(made)), get_policy(made.short), pickle.loads(pickle.dumps(made))):
        assert copy == made and hash(copy) == hash(made)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("p=f32,c=f32,o=f32,x=hi", "no precision"),
        ("c=bf16,x=TF32_TF32_F32", "does not multiply bfloat16"),
        ("c=f32,x=F64_F64_F64", "does not multiply float32"),
        ("c=f32,x=ANY_F8_ANY_F8_F32", "does not multiply float32"),
        ("x=high,x=high", "second time"),
    ],
)
def test_an_unknown_or_unfit_precision_is_refused_with_those_that_fit(text, told):
    with pytest.raises(ValueError, match=told):
        get_policy(text)


def test_an_algorithm_is_dropped_with_the_dtype_that_it_is_for():
    half = get_policy("c=bf16,x=BF16_BF16_F32")
    assert half.replace(output_dtype="f32").precision == "BF16_BF16_F32"
    assert half.replace(compute_dtype="f32").precision is None
    assert get_policy("c=bf16,x=high").replace(compute_dtype="f32").precision == "high"


def mlp(params, x):
    with jax.named_scope("up"):
        x = jnp.tanh(x @ params["up"])
    with jax.named_scope("router"):
        return x @ params["router"]


PARAMS = {"up": W, "router": W}


def gradients(policy_text, rules=None):
    fn = policy.autocast(mlp, policy_text, rules=rules)
    return precisions(jax.grad(lambda p: fn(p, X).sum()), PARAMS)


def test_a_float32_rule_of_autocast_multiplies_at_the_highest_precision():
    found = gradients(MIXED, {"router": "float32"})
    assert found == {("bfloat16", None), ("float32", "highest")}
    assert gradients(MIXED, {"router": "c=f32,x=high"}) == {("bfloat16", None), ("float32", "high")}


def test_a_whole_float32_program_keeps_jaxs_default():
    assert gradients("float32") == {("float32", None)}
    assert gradients("float32", {"up": MIXED}) == {("float32", None), ("bfloat16", None)}
    assert gradients("c=f32,x=high") == {("float32", "high")}
    with jax.default_matmul_precision("high"):
        assert gradients("float32") == {("float32", "high")}


def test_half_precision_takes_the_precision_of_its_policy():
    assert gradients("c=bf16,x=BF16_BF16_F32") == {("bfloat16", "BF16_BF16_F32")}


def test_the_authors_precision_wins():
    def fn(w, x):
        with jax.named_scope("router"):
            return jnp.dot(x, w, precision="high")

    ruled = policy.autocast(fn, MIXED, rules={"router": "float32"})
    assert precisions(ruled, W, X) == {("float32", "high")}


def test_other_contractions_are_at_the_highest_precision_too():
    def contractions(w, x):
        with jax.named_scope("router"):
            y = lax.ragged_dot(x, w[None], jnp.array([2]))
            z = lax.conv_general_dilated(
                x[None], w[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
            return y + z[0]

    fn = policy.autocast(contractions, MIXED, rules=PolicyRules({"router": "float32"}))
    assert precisions(fn, W, X) == {("float32", "highest")}
    assert precisions(jax.grad(lambda w: fn(w, X).sum()), W) == {("float32", "highest")}


def test_an_island_multiplies_at_the_highest_precision_only_inside_of_half():
    def fn(x):
        with policy.full_precision():
            return x @ W

    assert precisions(fn, X) == {("float32", None)}
    with use_policy("float32"):
        assert precisions(fn, X) == {("float32", None)}
    with use_policy(MIXED):
        assert precisions(fn, X) == {("float32", "highest")}
        assert precisions(policy.full_precision(lambda x: x @ W), X) == {("float32", "highest")}
    with use_policy("c=bf16,x=BF16_BF16_F32"):
        assert precisions(fn, X) == {("float32", "highest")}


def test_an_island_of_autocast_multiplies_at_the_highest_precision():
    island = policy.autocast(lambda x: x @ W, enabled=False)
    fn = policy.autocast(lambda w, x: island(x @ w), MIXED, params=0)
    assert precisions(fn, W, X) == {("bfloat16", None), ("float32", "highest")}

"""The precisions that autocast and islands multiply at."""

import jax
import jax.numpy as jnp
from jax import lax

import policy
from policy import PolicyRules, use_policy
from tests.programs import precisions

MIXED = "mixed_bfloat16"
X, W = jnp.ones((2, 4)), jnp.ones((4, 4))


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


def test_a_whole_program_keeps_jaxs_default_or_has_the_precision_of_its_policy():
    assert gradients("float32") == {("float32", None)}
    assert gradients("float32", {"up": MIXED}) == {("float32", None), ("bfloat16", None)}
    assert gradients("c=f32,x=high") == {("float32", "high")}
    with jax.default_matmul_precision("high"):
        assert gradients("float32") == {("float32", "high")}
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

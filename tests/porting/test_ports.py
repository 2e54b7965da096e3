"""The four ported models beside those whose dtypes Flax's examples thread by hand, on the same random weights."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from policy.testing import assert_dots_in, assert_same_program
from tests.porting import models, recipe

TREES = 4
HALVES = {"bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}
# Upstream looks a token up, and adds its position, in float32, and rounds once; wmt multiplies the table by its last
# hidden values in float32 too. Under a policy that is three roundings, and half; two rules give float32 back.
AS_UPSTREAM = {"embed": "float32", ".*posembed": "p=f32,c=f32,o={half}"}
DIFFERENTIATED = ("lm1b", "gemma")  # in half too


def shapes(name: str) -> Any:
    return jax.eval_shape(models.by_hand(name).init)


@functools.cache
def results(name: str, made_by: str, dtype: str, *, gradients: bool = False) -> list[Any]:
    """(loss, logits) or, with gradients, ((loss, logits), gradients) of each of the random trees.

    Args:
      made_by: "hand", "policy", or "rules": the policy with the rules above.
    """
    if made_by == "hand":
        model = models.by_hand(name, jnp.dtype(dtype))
    else:
        rules = {path: text.format(half=dtype) for path, text in AS_UPSTREAM.items()} if made_by == "rules" else None
        model = models.by_policy(name, HALVES.get(dtype, dtype), rules)
    loss = models.loss_of(model)
    run = jax.value_and_grad(loss, has_aux=True) if gradients else loss
    trees = [(models.random_tree(shapes(name), seed), models.batch(name, seed)) for seed in range(TREES)]
    program = models.compiled(run, *trees[0])
    return [jax.tree.map(np.asarray, program(*tree)) for tree in trees]


def logits_error(name: str, made_by: str, dtype: str, *, gradients: bool = False) -> float:
    """The relative error of the logits over all trees, beside the ported model's in float32."""
    got = results(name, made_by, dtype, gradients=gradients)
    logits = [result[0][1] if gradients else result[1] for result in got]
    return models.relative_error(
        logits, [result[0][1] for result in results(name, "policy", "float32", gradients=True)]
    )


def loss_error(name: str, made_by: str, dtype: str, *, gradients: bool = False) -> float:
    """The root mean square of the losses' relative errors over the trees."""
    got = results(name, made_by, dtype, gradients=gradients)
    losses = [float(result[0][0] if gradients else result[0]) for result in got]
    return models.relative_error(
        losses, [float(result[0][0]) for result in results(name, "policy", "float32", gradients=True)]
    )


def gradients_error(name: str, made_by: str) -> float:
    """The median over the trees: near 0 a rounding turns a relu off, and then one tree is off by far more."""
    got, right = (results(name, *kind, gradients=True) for kind in ((made_by, "bfloat16"), ("policy", "float32")))
    return float(np.median([models.relative_error(a[1], b[1]) for a, b in zip(got, right, strict=True)]))


@pytest.mark.parametrize("name", recipe.NAMES)
def test_a_port_has_the_same_parameters(name):
    assert jax.eval_shape(models.by_policy(name, "mixed_bfloat16").init) == shapes(name)


@pytest.mark.parametrize("name", ["imagenet", "lm1b", "wmt"])
def test_without_a_policy_a_port_is_the_program_that_it_was(name):
    args = shapes(name), models.batch(name)
    assert_same_program(models.by_policy(name, None).logits, models.by_hand(name).logits, args)


@pytest.mark.parametrize("name", recipe.NAMES)
def test_in_float32_a_port_agrees_with_the_model_that_it_was(name):
    for ours, theirs in zip(*(results(name, by, "float32", gradients=True) for by in ("policy", "hand")), strict=True):
        (loss, logits), gradients = ours
        (their_loss, their_logits), their_gradients = theirs
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, their_logits, rtol=0, atol=1e-6 * np.abs(their_logits).max())
        np.testing.assert_allclose(loss, their_loss, rtol=1e-6)
        assert models.relative_error(gradients, their_gradients) < 2e-6


@pytest.mark.parametrize("name", recipe.NAMES)
@pytest.mark.parametrize("dtype", HALVES)
def test_in_half_a_port_is_as_right_as_the_model_that_it_was(name, dtype):
    with_gradients = dtype == "bfloat16" and name in DIFFERENTIATED
    ours, theirs = (logits_error(name, by, dtype, gradients=with_gradients) for by in ("policy", "hand"))
    assert ours < 2.5 * float(jnp.finfo(dtype).eps)
    assert ours < {"gemma": 0.85, "imagenet": 1.05}.get(name, 1.12) * theirs
    ours, theirs = (loss_error(name, by, dtype, gradients=with_gradients) for by in ("policy", "hand"))
    assert ours < 1.05 * theirs


@pytest.mark.parametrize("name", ["lm1b", "wmt"])
def test_two_rules_keep_the_float32_that_upstream_keeps(name):
    assert logits_error(name, "rules", "float16") < logits_error(name, "hand", "float16")


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_in_half_are_as_right_as_those_of_the_model_that_it_was(name):
    assert gradients_error(name, "policy") < {"gemma": 0.85}.get(name, 1.1) * gradients_error(name, "hand")


@pytest.mark.parametrize("name", recipe.NAMES)
@pytest.mark.parametrize("dtype", HALVES)
def test_the_loss_is_computed_from_float32_logits(name, dtype):
    args = shapes(name), models.batch(name)
    loss, logits = jax.eval_shape(models.loss_of(models.by_policy(name, HALVES[dtype])), *args)
    assert loss.dtype == logits.dtype == jnp.float32
    loss, logits = jax.eval_shape(models.loss_of(models.by_hand(name, jnp.dtype(dtype))), *args)
    assert loss.dtype == logits.dtype == dtype


@pytest.mark.parametrize("name", recipe.NAMES)
def test_every_matmul_of_a_port_multiplies_half_forward_and_backward(name):
    args = shapes(name), models.batch(name)
    assert_dots_in(models.by_policy(name, "mixed_bfloat16").logits, args, "bfloat16", backward=True)


@pytest.mark.parametrize("name", recipe.NAMES)
def test_an_audit_finds_what_the_port_repairs_and_nothing_after_it(name):
    args = shapes(name), models.batch(name)
    losses = (lambda *args, model=model: models.loss_of(model)(*args)[0] for model in pair(name))
    before, after = (policy.audit(loss, *args, backward=True).findings for loss in losses)
    kinds = {finding.kind for finding in before}
    assert "low-precision-function" in kinds  # the loss's exponentials, and those of attention
    assert not after, "\n".join(map(str, after))


def pair(name: str) -> tuple[models.Model, models.Model]:
    return models.by_hand(name, jnp.bfloat16), models.by_policy(name, "mixed_bfloat16")

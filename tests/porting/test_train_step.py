"""The imagenet example's train step after the port, beside its own with a `DynamicScale`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from tests.porting import models

POLICY = "mixed_float16"


@pytest.fixture(scope="module")
def tree() -> Any:
    return models.random_tree(jax.eval_shape(models.by_hand("imagenet").init), 0)


@pytest.fixture(scope="module")
def stepped(tree):
    """By who made the model: its state before and after a step, and after one that overflows."""
    images, labels = models.batch("imagenet").values()
    found = {}
    initialized = lambda *args: (tree["params"], tree["batch_stats"])  # noqa: E731
    infinite = np.full_like(images, np.inf)
    for by, module, half, dtypes in (
        ("hand", models.before("imagenet"), True, {"dtype": jnp.float16}),
        ("policy", models.after("imagenet"), POLICY, {"dtype_policy": POLICY}),
    ):
        model = module.ResNet(models.STAGES, **dtypes)
        with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
            patch.setattr(module, "initialized", initialized)
            state = module.create_train_state(jax.random.key(0), model, 16, half)
            step = models.compiled(module.train_step, state, images, labels)
        found[by] = state, *step(state, images, labels), step(state, infinite, labels)[0]
    return found


def test_a_step_goes_where_it_went(stepped, tree):
    (_, ours, loss, _), (_, theirs, their_loss, _) = stepped["policy"], stepped["hand"]
    assert loss.dtype == their_loss.dtype == jnp.float32  # theirs: of float16 numbers
    # two ulps of float16: theirs rounds its logits
    np.testing.assert_allclose(loss, their_loss, rtol=2e-3)
    both = (ours.params, theirs.params)
    moved = [jax.tree.map(jnp.subtract, after, tree["params"]) for after in both]
    assert models.relative_error(*moved) < 0.05
    assert models.relative_error(ours.batch_stats, theirs.batch_stats) < 1e-3


def test_a_step_that_overflows_is_skipped_with_its_batch_statistics(stepped, tree):
    start, _, _, skipped = stepped["policy"]
    for was, now in ((start.params, skipped.params), (start.batch_stats, skipped.batch_stats)):
        jax.tree.map(np.testing.assert_array_equal, was, now)
    assert not policy.optim.finite_of(skipped.opt_state)
    before, after = (policy.loss_scale_of(state.opt_state).loss_scale for state in (start, skipped))
    np.testing.assert_array_equal(after, before / 2)


def test_by_hand_the_batch_statistics_of_a_skipped_step_are_lost(stepped):
    start, _, _, skipped = stepped["hand"]
    jax.tree.map(np.testing.assert_array_equal, start.params, skipped.params)
    assert not policy.all_finite(skipped.batch_stats)

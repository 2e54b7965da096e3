"""A float32 dtype of a whole model is no request for those of its layers that are given it."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen, nnx
from policy import autocast
from tests.mpmodules import model_dtypes
from tests.programs import precisions

X, MIXED = jnp.ones((2, 8)), "mixed_bfloat16"


def calls() -> Any:
    model = model_dtypes.Linen()
    variables = model.init(jax.random.key(0), X)
    yield "linen", linen.apply_policy(model, MIXED).apply, (variables, X)
    yield "linen, autocast", autocast(model.apply, MIXED), (variables, X)
    yield "nnx", nnx.apply_policy(model_dtypes.Nnx(), MIXED), (X,)
    yield "nnx, autocast", autocast(model_dtypes.Nnx(), MIXED), (X,)


@pytest.mark.parametrize(
    ("call", "args"), [pytest.param(*case, id=name) for name, *case in calls()]
)
def test_it_is_left_to_the_policy_without_a_warning(call, args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert {dtype for dtype, _ in precisions(call, *args)} == {"bfloat16"}

"""A policy that is lost is told once, and what is done right is silent."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from policy import DtypePolicyWarning, current_policy, set_policy, use_policy
from policy.core import scope
from tests.mistakes import lost_policies as lost
from tests.mistakes.layers import KEY, X
from tests.mistakes.test_mistakes import told

TOLD = [
    pytest.param(kind, make, parts, id=parts[:70])
    for kind, table in (
        (DtypePolicyWarning, lost.SCOPES | lost.PARTS | lost.OTHERS),
        (TypeError, lost.ERRORS),
        (UserWarning, lost.DROPPED),
    )
    for parts, makes in table.items()
    for make in (makes if isinstance(makes, list) else [makes])
]
RIGHT = lost.SCOPES_RIGHT | lost.PARTS_RIGHT | lost.OTHERS_RIGHT


@pytest.fixture(autouse=True)
def nothing_was_read(monkeypatch):
    """As in a process of its own: other tests have read the policies."""
    monkeypatch.setattr(scope, "_read", set())
    monkeypatch.setattr(scope, "_unread", {})


@jax.numpy_dtype_promotion("standard")  # that of most users; Flax's layers mix dtypes
@pytest.mark.parametrize(("kind", "make", "parts"), TOLD)
def test_a_lost_policy_is_told_once_with_the_way_out(kind: Any, make: Any, parts: str):
    message = told(kind, make)
    missing = [part for part in parts.split(" … ") if part not in message]
    assert not missing, message or "nothing was said"
    assert message.count("\n") == 0


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_told_of_the_same_done_right(name):
    RIGHT[name]()


def test_a_policy_that_was_read_once_is_never_told():
    with use_policy("mixed_bfloat16"):
        assert current_policy() is not None
    with use_policy("p=f32,c=bf16,o=f32"):  # which is the same
        jnp.sin(X)
    with pytest.warns(DtypePolicyWarning, match="^Nothing obeyed"), use_policy("mixed_float16"):
        jnp.sin(X)


def test_a_block_that_nothing_reads_is_no_key_of_a_program():
    traces: list[int] = []
    function = jax.jit(lambda x: traces.append(1) or x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            with use_policy("mixed_bfloat16"):
                function(X)
    with use_policy("mixed_bfloat16"):
        nn.Dense(3).init(KEY, X)
        function(X)
    assert len(traces) == 1


def test_set_policy_in_a_with_statement_sets_nothing():
    with pytest.raises(TypeError):
        lost.with_set_policy()
    assert current_policy() is None
    set_policy("bfloat16")
    assert current_policy() is not None

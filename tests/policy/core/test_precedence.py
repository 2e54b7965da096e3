"""The effective policy is formed field by field, and a dtype that defeats it is told of once."""

import warnings

import jax.numpy as jnp
import pytest

from policy import DtypePolicyWarning, Policy, get_policy
from policy.core.messages import warn_once
from policy.core.precedence import with_explicit_dtypes
from policy.core.scope import Source

MIXED = get_policy("mixed_bfloat16")


def _form(base: Policy | None = MIXED, own=False, **dtypes):
    return with_explicit_dtypes(
        base, source=Source("scope", own=own), what="Dense", where="head", **dtypes
    )


def test_without_arguments_and_with_those_that_agree_the_policy_holds_as_it_is():
    effective = _form()
    assert effective.policy == effective.base == MIXED
    assert not effective.source.own
    assert _form(base=None, dtype=jnp.float16).policy is None
    assert _form(dtype="bfloat16", param_dtype=jnp.float32, own=True).policy == MIXED


def test_an_explicit_dtype_replaces_compute_and_the_output_of_a_layer_that_inherits():
    told = "Dense at 'head' has an explicit dtype=float16, which overrides the policy in force"
    with pytest.warns(DtypePolicyWarning, match=told):
        formed = _form(dtype=jnp.float16)
    assert (formed.policy, formed.base) == (Policy("f32", "f16", "f16"), MIXED)
    with pytest.warns(DtypePolicyWarning, match="Delete the argument to let the policy decide"):
        assert _form(dtype=jnp.float16, own=True).policy == Policy("f32", "f16", "f32")


def test_an_explicit_param_dtype_replaces_it_alone_and_both_dtypes_are_named_in_one_warning():
    with pytest.warns(DtypePolicyWarning, match="param_dtype=bfloat16"):
        assert _form(param_dtype=jnp.bfloat16).policy == Policy("bf16", "bf16", "f32")
    with pytest.warns(DtypePolicyWarning, match="dtype=float16 and param_dtype=float16") as caught:
        _form(dtype=jnp.float16, param_dtype=jnp.float16)
    assert len(caught) == 1


def test_a_complex_dtype_stays_the_layer_s_own():
    with pytest.warns(DtypePolicyWarning, match="dtype=complex64"):
        effective = _form(dtype=jnp.complex64)
    assert (effective.policy, effective.dtype) == (MIXED, jnp.complex64)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    ("argument", "dtype"), [("dtype", "int8"), ("param_dtype", "int32"), ("dtype", jnp.float8_e5m2)]
)
def test_a_dtype_that_a_layer_cannot_honor_is_rejected(argument, dtype):
    told = rf"Dense at 'head' can't use {argument}={jnp.dtype(dtype).name} under a policy"
    with pytest.raises(ValueError, match=told):
        _form(**{argument: dtype})


@pytest.mark.slow
def test_a_warning_comes_once_for_each_message():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_once("first")
            warn_once("second")
    assert [str(w.message) for w in caught] == ["first", "second"]
    with pytest.warns(DtypePolicyWarning, match="first"):
        warn_once("first")

"""The Policy value and its text form."""

import copy
import itertools
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from policy import Policy, get_policy

DTYPE_LIKES = {
    "float32": [jnp.float32, np.float32, np.dtype("float32"), "float32", "f32", "full"],
    "bfloat16": [jnp.bfloat16, jnp.dtype(jnp.bfloat16), "bfloat16", "bf16"],
    "float16": [jnp.float16, np.float16, np.dtype("float16"), "float16", "f16"],
}


@pytest.mark.parametrize("name", DTYPE_LIKES)
def test_equal_policies_hash_equal_whatever_they_were_made_from(name):
    policies = [Policy(a, b, c) for a, b, c in itertools.product(DTYPE_LIKES[name], repeat=3)]
    assert len(set(policies)) == 1
    assert policies[0].param_dtype == jnp.dtype(name)
    assert isinstance(policies[0].param_dtype, np.dtype)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("float32", ("float32", "float32", "float32")),
        ("full", ("float32", "float32", "float32")),
        ("bf16", ("bfloat16", "bfloat16", "bfloat16")),
        ("float64", ("float64", "float64", "float64")),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32")),
        ("mixed_float16", ("float32", "float16", "float32")),
        ("params=float32,compute=bfloat16,output=float32", ("float32", "bfloat16", "float32")),
        (" p = f32, c = bf16 , o=f32 ", ("float32", "bfloat16", "float32")),
        ("c=bf16", ("float32", "bfloat16", "bfloat16")),
        ("p=bf16", ("bfloat16", "bfloat16", "bfloat16")),
        ("o=f16", ("float32", "float32", "float16")),
        ("o=f32,c=f16,p=f32", ("float32", "float16", "float32")),
    ],
)
def test_text_forms_mean_what_jmp_makes_of_them(text, fields):
    policy = get_policy(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == tuple(
        map(jnp.dtype, fields)
    )
    assert policy.cast_inputs


def test_a_policy_of_jmp_is_refused_with_its_text():
    class Theirs:
        """A stand-in, with jmp's text."""

        __module__ = "jmp._src.policy"

        def __str__(self) -> str:
            return "p=f32,c=bf16,o=f32"

    given: Any = Theirs()
    with pytest.raises(TypeError, match="give the text: 'p=f32,c=bf16,o=f32'"):
        get_policy(given)


def _all_policies():
    names = ("float32", "bfloat16", "float16", "float64")
    for params, compute, output in itertools.product(names, repeat=3):
        for reduction, cast_inputs in itertools.product(
            (None, "float32", "float64"), (True, False)
        ):
            yield Policy(
                params, compute, output, reduction_dtype=reduction, cast_inputs=cast_inputs
            )


def test_policies_survive_their_text_pickle_and_copy():
    for policy in _all_policies():
        for again in (get_policy(str(policy)), pickle.loads(pickle.dumps(policy))):
            assert again == policy and hash(again) == hash(policy)
        assert copy.deepcopy(policy) == policy
        assert eval(repr(policy), {"Policy": get_policy}) == policy


def test_str_names_reduction_and_inputs_only_where_they_are_not_the_default():
    assert str(get_policy("mixed_bfloat16")) == "params=float32,compute=bfloat16,output=float32"
    policy = Policy("f32", "bf16", "f32", reduction_dtype="f32")
    text = "params=float32,compute=bfloat16,output=float32"
    assert str(policy) == text
    policy = policy.replace(reduction_dtype="f64", cast_inputs=False)
    assert str(policy) == f"{text},reduction=float64,inputs=keep"


def test_reductions_run_in_the_wider_of_float32_and_compute_dtype():
    assert get_policy("mixed_bfloat16").reduction_dtype == jnp.float32
    assert get_policy("float16").reduction_dtype == jnp.float32
    assert get_policy("float64").reduction_dtype == jnp.dtype("float64")
    assert Policy("f32", "bf16", "f32", reduction_dtype="bf16").reduction_dtype == jnp.bfloat16


def test_replace_lets_a_default_reduction_dtype_follow_compute_dtype():
    assert get_policy("float32").replace(compute_dtype="float64").reduction_dtype == jnp.dtype(
        "float64"
    )
    chosen = Policy("f32", "bf16", "f32", reduction_dtype="float64")
    assert chosen.replace(compute_dtype="f32").reduction_dtype == jnp.dtype("float64")
    assert get_policy("bf16").with_output_dtype(jnp.float32) == Policy("bf16", "bf16", "f32")
    with pytest.raises(
        TypeError,
        match=r"Policy.replace: no field compute; the fields are param_dtype, compute_dtype",
    ):
        chosen.replace(compute="f32")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.complex64, r"Policy\(compute_dtype=complex64\): it should be a floating dtype"),
        (None, r"Policy\(compute_dtype=None\): it should be a floating dtype"),
        ("bfloat17", r"Policy\(compute_dtype='bfloat17'\): it should be a floating dtype"),
        (
            jnp.float8_e4m3fn,
            r"Policy\(compute_dtype=float8_e4m3fn\): floats of 8 bits or fewer are for matmul "
            r"operands",
        ),
    ],
)
def test_a_dtype_that_no_policy_can_hold_is_refused_by_field(value, message):
    with pytest.raises(ValueError, match=message):
        Policy(jnp.float32, value, jnp.float32)


def test_every_field_is_checked():
    fields: dict[str, Any] = {"param_dtype": "f32", "compute_dtype": "f32", "output_dtype": "f32"}
    for field in ("param_dtype", "output_dtype", "reduction_dtype"):
        with pytest.raises(ValueError, match=rf"Policy\({field}=int8\)"):
            Policy(**fields | {field: "int8"})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"Policy\(cast_inputs='no'\): it should be True or False."):
        Policy("f32", "f32", "f32", cast_inputs="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "bf17",
            r"Unknown dtype 'bf17': it should be one of half, bfloat16.*A policy's text is one of "
            r"these dtypes, a preset",
        ),
        ("p=f32,c=int8", r"Unknown dtype 'int8'"),
        (
            "p=f32,d=bf16",
            r"Unknown key 'd' in 'p=f32,d=bf16': it should be params, compute, output, "
            r"reduction, matmul, precision or inputs",
        ),
        (
            "p=f32,params=bf16",
            r"Key 'params' in 'p=f32,params=bf16' sets param_dtype a second time.",
        ),
        (
            "inputs=no",
            r"Unknown value 'no' for inputs in 'inputs=no': it should be 'keep' or 'cast'.",
        ),
    ],
)
def test_a_text_that_means_nothing_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        get_policy(text)


@pytest.mark.parametrize("value", [None, jnp.bfloat16, 16, ("f32", "bf16", "f32")])
def test_what_is_neither_policy_nor_text_is_refused(value):
    with pytest.raises(
        TypeError, match=r"A policy should be a Policy or its text form such as 'mixed_bfloat16'"
    ):
        get_policy(value)


@pytest.mark.parametrize(
    "text", ["p=f32,c=bf16,o=f32", "p=f16,c=f64,o=bf16,r=f32", "p=f32,c=f16,o=f16,inputs=keep"]
)
def test_the_short_text_form_round_trips(text):
    assert get_policy(text).short == text

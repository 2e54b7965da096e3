"""The Policy value and its text form; malformed ones are in `tests.mistakes.policies`."""

import copy
import itertools
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy import Policy, get_policy
from policy.core.dtypes import ScaledMatmul, preferred, scaled_matmul_of

DTYPE_LIKES = {
    "float32": [jnp.float32, np.float32, np.dtype("float32"), "float32", "f32", "full"],
    "bfloat16": [jnp.bfloat16, jnp.dtype(jnp.bfloat16), "bfloat16", "bf16"],
    "float16": [jnp.float16, np.float16, np.dtype("float16"), "float16", "f16"],
}


def survives(policy: Policy) -> None:
    """Asserts that a policy comes back from its texts, pickle and copy."""
    copies = pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)
    texts = get_policy(str(policy)), get_policy(policy.short)
    for again in (*copies, *texts, eval(repr(policy), {"Policy": get_policy})):
        assert again == policy and hash(again) == hash(policy)


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
    dtypes = (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    assert dtypes == tuple(map(jnp.dtype, fields)) and policy.cast_inputs


def test_a_policy_of_jmp_is_rejected_with_its_text():
    class Theirs:
        __module__ = "jmp._src.policy"

        def __str__(self) -> str:
            return "p=f32,c=bf16,o=f32"

    given: Any = Theirs()
    with pytest.raises(TypeError, match="give the text: 'p=f32,c=bf16,o=f32'"):
        get_policy(given)


def test_policies_survive_their_text_pickle_and_copy():
    names = ("float32", "bfloat16", "float16", "float64")
    options = itertools.product((None, "float32", "float64"), (True, False))
    for dtypes, (reduction, casts) in itertools.product(
        itertools.product(names, repeat=3), options
    ):
        survives(Policy(*dtypes, reduction_dtype=reduction, cast_inputs=casts))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(
    "text", ["p=f32,c=bf16,o=f32", "p=f16,c=f64,o=bf16,r=f32", "p=f32,c=f16,o=f16,inputs=keep"]
)
def test_the_short_text_form_round_trips(text):
    assert get_policy(text).short == text


def test_str_names_reduction_and_inputs_only_where_they_are_not_the_default():
    text = "params=float32,compute=bfloat16,output=float32"
    policy = Policy("f32", "bf16", "f32", reduction_dtype="f32")
    assert str(policy) == str(get_policy("mixed_bfloat16")) == text
    policy = policy.replace(reduction_dtype="f64", cast_inputs=False)
    assert str(policy) == f"{text},reduction=float64,inputs=keep"


def test_reductions_run_in_the_wider_of_float32_and_compute_dtype():
    wide = jnp.dtype("float64")
    assert get_policy("mixed_bfloat16").reduction_dtype == jnp.float32
    assert get_policy("float64").reduction_dtype == wide
    assert get_policy("float32").replace(compute_dtype="float64").reduction_dtype == wide
    chosen = Policy("f32", "bf16", "f32", reduction_dtype="float64")
    assert chosen.replace(compute_dtype="f32").reduction_dtype == wide
    assert Policy("f32", "bf16", "f32", reduction_dtype="bf16").reduction_dtype == jnp.bfloat16


def test_a_policy_is_replaced_field_by_field():
    assert get_policy("bf16").with_output_dtype(jnp.float32) == Policy("bf16", "bf16", "f32")
    half = get_policy("c=bf16,x=BF16_BF16_F32")
    assert half.replace(output_dtype="f32").precision == "BF16_BF16_F32"
    assert half.replace(compute_dtype="f32").precision is None  # it was one for bfloat16
    assert get_policy("c=bf16,x=high").replace(compute_dtype="f32").precision == "high"
    assert get_policy("p=f32,c=bf16,m=f8").replace(matmul=None) == get_policy("p=f32,c=bf16")


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
    policy = Policy("f32", compute, "f32", precision=given)
    assert policy.precision == name
    survives(policy)


@pytest.mark.parametrize(
    ("given", "short", "dtype"),
    [
        ("int8", "i8", "int8"),
        (jnp.int8, "i8", "int8"),
        ("float8", "f8", "float8_e4m3fn"),
        (jnp.float8_e4m3fn, "f8", "float8_e4m3fn"),
        ("bf16", "bf16", "bfloat16"),
        (np.float16, "f16", "float16"),
        ("full", "f32", "float32"),
    ],
)
def test_the_dtype_of_a_cache_survives_its_text(given, short, dtype):
    policy = Policy("f32", "bf16", "f32", cache_dtype=given)
    assert policy.cache_dtype == jnp.dtype(dtype)
    assert policy.short == f"p=f32,c=bf16,o=f32,k={short}"
    assert get_policy(f"p=f32,c=bf16,o=f32,cache={short}") == policy
    assert policy.replace(output_dtype="bf16").cache_dtype == policy.cache_dtype
    assert policy.replace(cache_dtype=None) == get_policy("mixed_bfloat16")
    survives(policy)


@pytest.mark.parametrize(
    "text",
    [
        *("f8", "i8", "f8:tensor", "i8:compute", "f8:tensor:compute:fast"),
        *("float8_e4m3fn/float8_e4m3fn", "float8_e5m2/float8_e4m3fn:fast"),
        *("mxfp8", "mxfp8_up", "nvfp4:compute", "f8:mxfp8", "float8_e5m2/float8_e5m2:mxfp8_up"),
    ],
)
def test_the_text_of_matmuls_in_8_bits_comes_back(text):
    by = scaled_matmul_of(text)
    assert by is not None and by.text == text
    assert pickle.loads(pickle.dumps(by)) == copy.deepcopy(by) == by
    assert len({by, scaled_matmul_of(text)}) == 1
    policy = get_policy(f"p=f32,c=bf16,m={text}")
    assert policy.matmul == by == policy.replace(output_dtype="f32").matmul
    survives(policy)


def test_the_presets_are_mixed_bfloat16_with_matmuls_in_8_bits():
    plain = get_policy("mixed_bfloat16")
    assert get_policy("mixed_float8") == plain.replace(matmul="f8")
    assert get_policy("mixed_int8") == plain.replace(matmul="i8")
    assert str(get_policy("mixed_float8")).endswith("matmul=f8")


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [
        ("gpu", "8.0", None),
        ("gpu", "8.9", "f8"),
        ("cuda", "10.0", "f8"),
        ("tpu", "TPU v4", None),
        ("tpu", "TPU v5 lite", "i8"),
        ("tpu", "TPU v6 lite", "i8"),
        ("tpu", "TPU7x", "f8"),
        ("cpu", "cpu", None),
    ],
)
def test_8bit_is_the_kind_that_a_device_is_faster_in(platform, kind, expected):
    assert preferred(platform, kind) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m=f9", "Unknown 8-bit matmul 'f9': it should be f8, i8, 8bit"),
        ("m=mxfp8:row", "Unknown or repeated option in 'mxfp8:row'"),
        ("m=i8:mxfp8", "operands='int8'.*: it should be one of float8_e4m3fn, float8_e5m2"),
        ("m=f8:rows", "Unknown or repeated option in 'f8:rows'"),
        ("m=f8:row:tensor", "Unknown or repeated option in 'f8:row:tensor'"),
        ("m=float8_e4m3fn/float16", r"ScaledMatmul\(gradients='float16'\): it should be one of"),
        ("m=int8/float8_e5m2", "both should be int8, or both float8"),
        ("c=float8_e4m3fn", "Matmuls in 8 bits are m=f8 and m=i8"),
        ("c=f64,m=f8", r"compute_dtype=float64, matmul='f8'\): .* 16 or 32 bits"),
        ("p=f32,c=f32,o=f32,x=hi", "no precision"),
        ("c=bf16,x=TF32_TF32_F32", "does not multiply bfloat16"),
        ("c=f32,x=F64_F64_F64", "does not multiply float32"),
        ("c=f32,x=ANY_F8_ANY_F8_F32", "does not multiply float32"),
        ("x=high,x=high", "second time"),
        ("cache=int4", r"Policy\(cache_dtype=int4\): it should be one of int8, float8, bfloat16"),
        ("k=float64", r"Policy\(cache_dtype=float64\): it should be one of int8"),
        ("k=float8_e5m2", r"Policy\(cache_dtype=float8_e5m2\): it should be one of int8"),
        ("k=nf4", r"Policy\(cache_dtype='nf4'\): it should be one of int8"),
        ("k=i8,cache=i8", "sets cache_dtype a second time"),
    ],
)
def test_an_unfit_matmul_or_precision_is_rejected_with_those_that_fit(text, message):
    with pytest.raises(ValueError, match=message):
        get_policy(text)


def test_every_field_is_checked():
    fields: Any = {"param_dtype": "f32", "compute_dtype": "f32", "output_dtype": "f32"}
    for field in (*fields, "reduction_dtype"):
        for value, name in ((jnp.complex64, "complex64"), (None, "None"), ("bf17", "'bf17'")):
            if (field, value) != ("reduction_dtype", None):  # which is its default
                given = rf"(Policy\({field}={name}\)|Unknown format {name}): .* a floating"
                with pytest.raises(ValueError, match=given):
                    Policy(**fields | {field: value})
    with pytest.raises(
        ValueError, match=r"Policy\(compute_dtype=float8_e5m2\): .*, and matmul='f8"
    ):
        Policy("f32", jnp.float8_e5m2, "f32")
    with pytest.raises(TypeError, match=r"Policy\(matmul=8\): it should be a ScaledMatmul"):
        Policy(**fields | {"matmul": 8})
    with pytest.raises(TypeError, match=r"Policy\(precision=8\): it should be default, high"):
        Policy(**fields | {"precision": 8})
    column: Any = "column"
    with pytest.raises(ValueError, match=r"scaling='column'\): it should be 'row' or"):
        ScaledMatmul("int8", "int8", scaling=column)


@pytest.mark.parametrize("text", ["int3", "fp8", "NF4", "u4", "uint8", ""])
def test_unknown_formats_of_parameters_name_those_there_are(text):
    formats = "int8, float8, int4:32, uint4:32, nf4:64"
    for make in (lambda: get_policy(f"params={text}"), lambda: Policy(text, "bf16", "bf16")):
        given = rf"Unknown format '{text}': .* {formats}, .* bfloat16"
        with pytest.raises(ValueError, match=given):
            make()

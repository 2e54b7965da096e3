"""The text and the fields of 8-bit matmuls in a policy."""

from __future__ import annotations

import copy
import pickle

import jax.numpy as jnp
import pytest

from policy import Policy, get_policy
from policy.core.matmul_dtypes import ScaledMatmul, preferred, scaled_matmul_of

TEXTS = (
    "f8",
    "i8",
    "f8:tensor",
    "i8:compute",
    "f8:tensor:compute:fast",
    "float8_e4m3fn/float8_e4m3fn",
    "float8_e5m2/float8_e4m3fn:fast",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back(text):
    by = scaled_matmul_of(text)
    assert by is not None and by.text == text
    assert pickle.loads(pickle.dumps(by)) == copy.deepcopy(by) == by
    assert len({by, scaled_matmul_of(text)}) == 1
    policy = get_policy(f"p=f32,c=bf16,m={text}")
    assert policy.matmul == by
    for again in (str(policy), policy.short):
        assert get_policy(again) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert policy.replace(output_dtype="f32").matmul == by
    assert policy.replace(matmul=None) == get_policy("p=f32,c=bf16")


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
        ("m=f8:rows", "Unknown or repeated option in 'f8:rows'"),
        ("m=float8_e4m3fn/float16", r"ScaledMatmul\(gradients='float16'\): it should be one of"),
        ("m=int8/float8_e5m2", "both should be int8, or both float8"),
        ("c=float8_e4m3fn", "Matmuls in 8 bits are m=f8 and m=i8"),
        ("c=f64,m=f8", r"compute_dtype=float64, matmul='f8'\): .* 16 or 32 bits"),
    ],
)
def test_errors_name_the_value_and_the_way_out(text, message):
    with pytest.raises(ValueError, match=message):
        get_policy(text)


def test_the_fields_are_checked():
    with pytest.raises(TypeError, match=r"Policy\(matmul=8\): it should be a ScaledMatmul"):
        Policy("f32", "bf16", "f32", matmul=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scaling='column'\): it should be 'row' or"):
        ScaledMatmul("int8", "int8", scaling="column")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"only\. Use float16 or bfloat16 here, and matmul='f8'"):
        Policy("f32", jnp.float8_e5m2, "f32")

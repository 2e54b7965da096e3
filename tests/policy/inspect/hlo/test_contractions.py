"""FLOPs of matmuls and convolutions in programs' texts: beside XLA's own count, and of texts as the
compilers of GPUs and TPUs write them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy.inspect.hlo.costs import costs_of
from policy.inspect.hlo.text import numpy_name

F32 = jnp.float32


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def convolution(**options):
    options = {"window_strides": (1, 1), "padding": "SAME"} | options
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=numbers, **options)


def pullback(function):
    def backward(x, w, ct):
        return jax.vjp(function, x, w)[1](ct)

    return backward


IMAGE, KERNEL = shape(4, 9, 7, 4), shape(3, 2, 4, 6)
STRIDED = convolution(window_strides=(2, 1), padding=[(1, 2), (0, 1)])
CASES = {
    "a dot": (jnp.matmul, shape(5, 7), shape(7, 3)),
    "a batch of dots": (
        lambda x, y: jnp.einsum("bqhd,bkhd->bhqk", x, y),
        *(shape(2, 5, 3, 4), shape(2, 6, 3, 4)),
    ),
    "padding": (convolution(), IMAGE, KERNEL),
    "strides": (STRIDED, IMAGE, KERNEL),
    "padding at one end": (
        convolution(window_strides=(2, 1), padding=[(0, 1), (0, 0)]),
        *(IMAGE, KERNEL),
    ),
    "negative padding": (convolution(padding=[(-1, 2), (3, -2)]), IMAGE, KERNEL),
    "dilations": (
        convolution(lhs_dilation=(1, 3), rhs_dilation=(2, 1), padding=[(1, 2), (0, 3)]),
        *(IMAGE, KERNEL),
    ),
    "groups": (convolution(feature_group_count=2), IMAGE, shape(3, 2, 2, 6)),
    "depthwise": (convolution(feature_group_count=4), IMAGE, shape(3, 2, 1, 4)),
    "groups of the batch": (convolution(batch_group_count=2), IMAGE, KERNEL),
    "derivatives": (pullback(STRIDED), IMAGE, KERNEL, shape(4, 5, 7, 6)),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_of_xlas_own_count(case):
    function, *arguments = CASES[case]
    lowered: Any = jax.jit(function).lower(*arguments)
    text = lowered.compiler_ir("hlo").as_hlo_module().to_string()
    assert costs_of(text).flops == {"float32": lowered.cost_analysis()["flops"]}


def entry(line: str, arrays: str) -> str:
    """Returns a program of one instruction whose operands are of the given shapes."""
    declared = arrays.split()
    operands = ", ".join(f"%p{i}" for i in range(len(declared)))
    return "\n".join(
        [
            "HloModule m",
            "ENTRY %main () -> f32[] {",
            *(f"  %p{i} = {array} parameter({i})" for i, array in enumerate(declared)),
            f"  ROOT %result = {line.replace('OPERANDS', operands)}",
            "}",
        ]
    )


# As the compiler of an H100 prints them, cut down: the forward pass of a convolution of stride 2
# whose input was padded before, and both of its derivatives.
IN_CUDNN = "window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f"
CUDNN = {
    "__cudnn$convForward": ("bf16[8,16,16,64]", "bf16[8,33,33,32] bf16[64,3,3,32]"),
    "__cudnn$convBackwardInput": ("bf16[8,33,33,32]", "bf16[8,16,16,64] bf16[64,3,3,32]"),
    "__cudnn$convBackwardFilter": ("bf16[64,3,3,32]", "bf16[8,33,33,32] bf16[8,16,16,64]"),
}


@pytest.mark.parametrize("target", CUDNN)
def test_the_derivatives_of_cudnns_convolution_multiply_as_often_as_it_does(target):
    result, operands = CUDNN[target]
    line = f'({result}, u8[0]) custom-call(OPERANDS), {IN_CUDNN}, custom_call_target="{target}"'
    flops = 2 * (8 * 16 * 16 * 64) * (3 * 3 * 32)
    assert costs_of(entry(line, operands)).flops == {"bfloat16": flops}


@pytest.mark.parametrize(
    ("target", "dtype", "precision", "key"),
    [
        ("__cublas$gemm", "f32", '["DEFAULT","DEFAULT"]', "float32"),
        ("__cublas$gemm", "f32", '["HIGHEST","HIGHEST"]', "float32, highest"),
        ("__cublas$lt$matmul", "bf16", '["HIGHEST","HIGHEST"]', "bfloat16"),
        ("__cublas$lt$matmul", "s8", '["DEFAULT","DEFAULT"]', "int8"),
        ("__cublas$lt$matmul$f8", "f8e4m3fn", '["DEFAULT","DEFAULT"]', "float8_e4m3fn"),
    ],
)
def test_a_matmul_of_cublas_counts_by_the_dtype_and_precision_of_its_operands(
    target, dtype, precision, key
):
    line = (
        f'(f32[3,32,16], s8[4194304]) custom-call(OPERANDS), custom_call_target="{target}", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["2"],'
        '"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]},'
        f'"precision_config":{{"operand_precision":{precision},"algorithm":"ALG_UNSET"}}}}}}'
    )
    text = entry(line, f"{dtype}[3,64,32] {dtype}[3,16,64]")
    assert costs_of(text).flops == {key: 2 * 3 * 32 * 16 * 64}


@pytest.mark.parametrize(
    ("attribute", "key"),
    [
        ("", "float32"),
        ("operand_precision={high,high}", "float32, high"),
        ("operand_precision={default,highest}", "float32, highest"),
        ("algorithm=dot_f32_f32_f32", "float32, highest"),
        ("algorithm=dot_tf32_tf32_f32", "float32"),
        ("algorithm=dot_tf32_tf32_f32_x3", "float32, tf32 x3"),
        ("algorithm=dot_bf16_bf16_f32_x6", "float32, bfloat16 x6"),
        ("algorithm=dot_bf16_bf16_f32", "float32, bfloat16 x1"),
    ],
)
def test_the_precision_of_a_float32_dot_is_in_its_key(attribute, key):
    axes = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    line = f"f32[8,2] dot(OPERANDS), {axes}, {attribute}"
    costs = costs_of(entry(line, "f32[8,4] f32[4,2]"))
    assert costs.flops == {key: 2 * 8 * 4 * 2}
    assert costs.flops_by_dtype == {"float32": 2 * 8 * 4 * 2}


# As the compiler of a TPU v5e writes "bqhd,bkhd->bhqk": batches are axes of a convolution's window.
BATCHED = (
    "bf16[8,4,16,16] convolution(OPERANDS), window={size=8x4 stride=7x3 lhs_dilate=8x4}, "
    "dim_labels=0b1f_0o1i->01bf"
)


def test_a_tpus_batch_of_dots_is_a_convolution_that_meets_each_pair_once():
    costs = costs_of(entry(BATCHED, "bf16[8,16,4,32] bf16[8,16,4,32]"))
    assert costs.flops == {"bfloat16": 2 * 8 * 4 * 16 * 16 * 32}


NESTED = """HloModule m
%inner (a: bf16[8,4], b: f32[4,2]) -> f32[8,2] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = f32[4,2]{1,0} parameter(1)
  %wide = f32[8,4]{1,0} convert(%a)
  ROOT %dot.1 = f32[8,2]{1,0} dot(%wide, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%outer (c: bf16[8,4], d: f32[4,2]) -> bf16[8,2] {
  %c = bf16[8,4]{1,0} parameter(0)
  %d = f32[4,2]{1,0} parameter(1)
  %nested = f32[8,2]{1,0} fusion(%c, %d), kind=kOutput, calls=%inner
  ROOT %half = bf16[8,2]{1,0} convert(%nested)
}
ENTRY %main (x: bf16[8,4], y: f32[4,2]) -> bf16[8,2] {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = f32[4,2]{1,0} parameter(1)
  ROOT %fusion.1 = bf16[8,2]{1,0} fusion(%x, %y), kind=kOutput, calls=%outer
}
"""


def test_a_dot_in_nested_fusions_counts_by_the_dtype_that_it_multiplies():
    assert costs_of(NESTED).flops == {"float32": 2 * 8 * 4 * 2}
    mixed = NESTED.replace("f32[8,4]{1,0} convert", "bf16[8,4]{1,0} copy")
    assert costs_of(mixed).flops == {"float32": 2 * 8 * 4 * 2}  # the wider of the two
    half = mixed.replace("f32[4,2]", "bf16[4,2]")
    assert costs_of(half).flops == {"bfloat16": 2 * 8 * 4 * 2}


@pytest.mark.parametrize(
    ("hlo", "numpy"),
    [
        ("bf16", "bfloat16"),
        ("f32", "float32"),
        ("s8", "int8"),
        ("u4", "uint4"),
        ("pred", "bool"),
        ("c64", "complex64"),
        ("f8e4m3b11fnuz", "float8_e4m3b11fnuz"),
        ("token", "token"),
    ],
)
def test_dtypes_have_numpys_names(hlo, numpy):
    assert numpy_name(hlo) == numpy

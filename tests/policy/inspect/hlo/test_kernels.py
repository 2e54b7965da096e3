"""FLOPs and bytes of kernels in programs' texts, as XLA and the compilers of chips write them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from policy.inspect.hlo.costs import costs_of
from policy.inspect.hlo.kernels import moved, produced
from policy.inspect.hlo.text import arrays_in, numpy_name, parse
from tests.policy.inspect.hlo.texts import text_of

F32 = jnp.float32


def shape(*sizes, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def attention(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


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
DILATED = convolution(lhs_dilation=(1, 3), rhs_dilation=(2, 1), padding=[(1, 2), (0, 3)])
CASES = {
    "a dot": (jnp.matmul, shape(5, 7), shape(7, 3)),
    "a batch of dots": (attention, shape(2, 5, 3, 4), shape(2, 6, 3, 4)),
    "padding": (convolution(), IMAGE, KERNEL),
    "strides": (STRIDED, IMAGE, KERNEL),
    "padding at one end": (convolution(padding=[(0, 1), (0, 0)]), IMAGE, KERNEL),
    "negative padding": (convolution(padding=[(-1, 2), (3, -2)]), IMAGE, KERNEL),
    "dilations": (DILATED, IMAGE, KERNEL),
    "groups": (convolution(feature_group_count=2), IMAGE, shape(3, 2, 2, 6)),
    "depthwise": (convolution(feature_group_count=4), IMAGE, shape(3, 2, 1, 4)),
    "groups of the batch": (convolution(batch_group_count=2), IMAGE, KERNEL),
    "derivatives": (pullback(STRIDED), IMAGE, KERNEL, shape(4, 5, 7, 6)),
}


@pytest.mark.cases(fast=5)
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
    params = "".join(f"  %p{i} = {array} parameter({i})\n" for i, array in enumerate(declared))
    root = f"  ROOT %result = {line.replace('OPERANDS', operands)}\n"
    return f"HloModule m\nENTRY %main () -> f32[] {{\n{params}{root}}}\n"


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
    assert costs_of(entry(line, "f32[8,4] f32[4,2]")).flops == {key: 2 * 8 * 4 * 2}


def test_a_tpus_batch_of_dots_is_a_convolution_that_meets_each_pair_once():
    # As the compiler of a v5e writes "bqhd,bkhd->bhqk": batches are axes of a window.
    window = "window={size=8x4 stride=7x3 lhs_dilate=8x4}, dim_labels=0b1f_0o1i->01bf"
    line = f"bf16[8,4,16,16] convolution(OPERANDS), {window}"
    costs = costs_of(entry(line, "bf16[8,16,4,32] bf16[8,16,4,32]"))
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
    ("hlo", "numpy", "size"),
    [
        ("bf16", "bfloat16", 2),
        ("f32", "float32", 4),
        ("s8", "int8", 1),
        ("u4", "uint4", 0.5),
        ("pred", "bool", 1),
        ("c64", "complex64", 8),
        ("f8e4m3b11fnuz", "float8_e4m3b11fnuz", 1),
        ("token", "token", 0),
    ],
)
def test_dtypes_have_numpys_names_and_sizes(hlo, numpy, size):
    assert numpy_name(hlo) == numpy
    assert arrays_in(f"{hlo}[2,3]{{1,0}}")[0].bytes == 6 * size


def test_a_tpus_ragged_matmul_multiplies_each_row_by_one_group():
    line = 'bf16[256,32] custom-call(OPERANDS), custom_call_target="tpu_custom_call"'
    text = entry(line, "s32[4] bf16[256,64] bf16[4,64,32]").replace("%result", "%ragged-dot-none")
    assert costs_of(text).flops == {"bfloat16": 2 * 256 * 64 * 32}


FORWARD = 2 * 2 * (2 * 4 * 512 * 64) * 256  # of two matmuls of all queries with all keys


def splash(text: str) -> Any:
    return costs_of(text, lambda flops, moved: sum(flops.values()))


# As the compiler of an H100 writes a kernel of cuDNN, cut down.
FMHA = (
    '(bf16[2,4,1024,64], u8[0]) custom-call(OPERANDS), custom_call_target="__cudnn$fmhaSoftmax", '
    'backend_config={"cudnn_fmha_backend_config": {"fmha_scale": 0.125, "intermediate_tensor_shape"'
    ': {"element_type": "BF16", "dimensions": ["2", "4", "1024", "512"], "tuple_shapes": []}, '
    '"mask_type": "NO_MASK", "sliding_window_length": 0}}'
)


@pytest.mark.parametrize(
    ("old", "new", "matmuls", "pairs"),
    [
        ("", "", 2, 1024 * 512),
        ("Softmax", "SoftmaxBackward", 5, 1024 * 512),
        ("NO_MASK", "CAUSAL", 2, 512 * 513 // 2 + 512 * 512),
        ('"NO_MASK", "sliding_window_length": 0', '"CAUSAL", "sliding_window_length": 1', 2, 1024),
    ],
)
def test_cudnns_attention_counts_the_pairs_that_its_mask_leaves(old, new, matmuls, pairs):
    text = entry(FMHA.replace(old, new), "bf16[2,1024,4,64] bf16[2,512,4,64] bf16[2,512,4,64]")
    assert splash(text).flops == {"bfloat16": 2 * matmuls * 2 * 4 * pairs * 64}


def test_an_instruction_with_line_breaks_is_read_whole_and_so_is_what_follows_it():
    entry = parse(text_of("v5e_splash_attention")).entry
    assert list(entry.instructions)[-3:] == ["splash_mha_fwd_residuals.1", "out.1", "last.1"]
    kernel = entry.instructions["splash_mha_fwd_residuals.1"]
    assert kernel.op_name == "jit(step)/splash_mha_fwd_residuals"


@pytest.mark.parametrize(
    ("name", "results", "matmuls"),
    [
        ("splash_mha_fwd_residuals", "(bf16[2,4,512,64], f32[2,4,512,128])", 2),
        ("splash_mha_dq_no_residuals", "bf16[2,4,512,64]", 3),
        ("splash_mha_dkv_no_residuals", "(bf16[2,4,256,64], bf16[2,4,256,64])", 4),
        ("splash_mqa_dkv", "(bf16[2,1,4,512,64], bf16[2,256,64], bf16[2,256,64])", 5),
    ],
)
def test_splash_attentions_flops_follow_from_its_shapes_and_are_named_a_roofline(
    name, results, matmuls
):
    old = "(bf16[2,4,512,64]{3,2,1,0}, f32[2,4,512,128]{3,2,1,0}) custom-call"
    text = text_of("v5e_splash_attention").replace(old, f"{results} custom-call")
    found = splash(text.replace("splash_mha_fwd_residuals", name))
    flops = matmuls * 2 * (2 * 4 * 512 * 64) * 256  # matmuls of all queries with all keys
    assert found.time == flops + 7 and not found.uncounted
    assert found.rooflines == {name: flops}


BLOCKS = "s8[1,2,2]{2,1,0}"
SIZES = r"\"block_q\": 256, \"block_kv\": 128"


def blocks_text(table: str) -> str:
    """Returns the text of a kernel whose mask has four blocks of 256 queries and 128 keys."""
    text = text_of("v5e_splash_attention").replace(r"\"block_q\": 512", SIZES)
    tables = f"  %next.1 = {BLOCKS} constant({{...}})\n  %mask.1 = {BLOCKS} {table}"
    text = text.replace("  %mask.1 = s8[1,1,1]{2,1,0} constant({ { {0} } })", tables)
    return text.replace("custom-call(%mask.1,", "custom-call(%next.1, %mask.1,")


@pytest.mark.parametrize(
    ("table", "share"),
    [
        ("constant({ { { 1, 0 }, { 2, 1 } } })", 3 / 4),
        ("constant({ { { 1, 0 }, { 0, 1 } } })", 2 / 4),
        ("constant({...})", 1),  # left out
        ("parameter(2)", 1),
    ],
)
def test_splash_attention_multiplies_the_blocks_that_its_mask_leaves(table, share):
    assert splash(blocks_text(table)).flops == {"bfloat16": share * FORWARD}


LOOP = """HloModule m
%body (s.1: (s8[1,2,2], bf16[2,4,512,64])) -> (s8[1,2,2], bf16[2,4,512,64]) {
  %s.1 = (s8[1,2,2]{2,1,0}, bf16[2,4,512,64]{3,2,1,0}) parameter(0)
  %mask.2 = s8[1,2,2]{2,1,0} get-tuple-element(%s.1), index=0
  %q.2 = bf16[2,4,512,64]{3,2,1,0} get-tuple-element(%s.1), index=1
  %k.2 = bf16[2,4,64,256]{3,2,1,0} broadcast(%q.2), dimensions={}
  %splash_mha_fwd.2 = bf16[2,4,512,64]{3,2,1,0} custom-call(%mask.2, %mask.2, %q.2, %k.2, %k.2), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={"xprof_metadata":"{\\"block_q\\": 256, \\"block_kv\\": 128}"}}
  ROOT %t.2 = (s8[1,2,2]{2,1,0}, bf16[2,4,512,64]{3,2,1,0}) tuple(%KEPT, %splash_mha_fwd.2)
}
%condition (s.3: (s8[1,2,2], bf16[2,4,512,64])) -> pred[] {
  %s.3 = (s8[1,2,2]{2,1,0}, bf16[2,4,512,64]{3,2,1,0}) parameter(0)
  ROOT %yes.3 = pred[] constant(true)
}
ENTRY %main (q.4: bf16[2,4,512,64]) -> (s8[1,2,2], bf16[2,4,512,64]) {
  %q.4 = bf16[2,4,512,64]{3,2,1,0} parameter(0)
  %mask.4 = s8[1,2,2]{2,1,0} constant({ { { 1, 0 }, { 2, 1 } } })
  %t.4 = (s8[1,2,2]{2,1,0}, bf16[2,4,512,64]{3,2,1,0}) tuple(%mask.4, %q.4)
  ROOT %w.4 = (s8[1,2,2]{2,1,0}, bf16[2,4,512,64]{3,2,1,0}) while(%t.4), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
"""  # noqa: E501


def test_a_mask_that_a_loop_carries_unchanged_is_read():
    assert splash(LOOP.replace("KEPT", "mask.2")).flops == {"bfloat16": 3 * 3 / 4 * FORWARD}
    changed = LOOP.replace("KEPT", "negated").replace(
        "  ROOT %t.2", "  %negated = s8[1,2,2]{2,1,0} negate(%mask.2)\n  ROOT %t.2"
    )
    assert splash(changed).flops == {"bfloat16": 3 * FORWARD}


def test_an_authors_estimate_comes_first_and_an_unknown_kernel_is_uncounted():
    other = text_of("v5e_splash_attention").replace("splash_mha_fwd_residuals", "scatter")
    assert splash(other).uncounted == ["FLOPs of tpu_custom_call (jit(step)/scatter)"]
    estimated = other.replace(
        '"body":"TUzv"', '"body":"TUzv","cost_estimate":{"flops":"12","bytes_accessed":"3"}'
    )
    assert splash(estimated).time == 19
    pallas = costs_of(text_of("v5e_pallas"), lambda flops, moved: sum(flops.values()) / 1e6 + moved)
    assert pallas.rooflines == {"tpu_custom_call": 1e9 / 1e6 + 2 * 1024 * 512 * 4}
    assert pallas.time == 15249 + pallas.rooflines["tpu_custom_call"] and not pallas.uncounted


def test_a_slice_and_an_update_in_place_move_what_they_slice_and_update():
    array, whole = 128 * 128 * 4, 7 * 128 * 128 * 4
    # A copy of the input, a broadcast of it, and zeros.
    before = (2 * array) + (array + whole) + whole
    a_turn = (array + array) + (2 * array + array)  # reads and updates; reads, slices and adds
    scalars = costs_of(text_of("h100_scan_reversed")).bytes - before - 7 * a_turn
    assert 0 < scalars < 7 * 64


def test_what_starts_something_moves_it_once():
    array = 128 * 128 * 4
    every = parse(text_of("v5e_scan_grad")).entry.instructions.values()
    starts = [i for i in every if i.opcode == "copy-start"]
    assert [moved(i) for i in starts] == [array, array]  # from memory; to memory
    assert [len(produced(i)) for i in starts] == [1, 1]

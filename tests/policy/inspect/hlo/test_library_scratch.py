"""Copies that a processor's library kernels make."""

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

import policy
from policy.inspect.hlo.library_scratch import library_scratch

TEXT = """HloModule step, is_scheduled=true

%fused (p0: f32[4,8,8,16], p1: f32[3,3,16,2], p2: f32[32,64], p3: f32[]) -> f32[] {
  %p0 = f32[4,8,8,16]{3,2,1,0} parameter(0)
  %p1 = f32[3,3,16,2]{3,2,1,0} parameter(1)
  %p2 = f32[32,64]{1,0} parameter(2)
  %p3 = f32[] parameter(3)
  BODY
}

ENTRY %main (a: f32[4,8,8,16], b: f32[3,3,16,2], c: f32[32,64], d: f32[]) -> f32[] {
  %a = f32[4,8,8,16]{3,2,1,0} parameter(0)
  %b = f32[3,3,16,2]{3,2,1,0} parameter(1)
  %c = f32[32,64]{1,0} parameter(2)
  %d = f32[] parameter(3)
  ROOT %f = f32[] fusion(%a, %b, %c, %d), kind=kCustom, calls=%fused, backend_config={"kind":KIND}
}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "ROOT %r = f32[4,8,8,2]{3,2,1,0} convolution(%p0, %p1), window={size=3x3 pad=1_1x0_2}, "
            "dim_labels=b01f_01io->b01f",
            4 * 10 * 10 * 16 * 4,
        ),
        (
            "ROOT %r = f32[4,8,8,2]{3,2,1,0} convolution(%p0, %p1), dim_labels=b01f_01io->b01f",
            4 * 8 * 8 * 16 * 4,
        ),
        ("ROOT %r = f32[64]{0} reduce(%p2, %p3), dimensions={0}, to_apply=%add", 32 * 64 * 4),
        ("ROOT %r = f32[32]{0} reduce(%p2, %p3), dimensions={1}, to_apply=%add", 0),
        ("ROOT %r = f32[] reduce(%p2, %p3), dimensions={0,1}, to_apply=%add", 0),
        ("ROOT %r = f32[1,2]{1,0} reduce-window(%p2, %p3), window={size=32x32}", 0),
        (
            "%e = f32[32,64]{1,0} abs(%p2)\n"
            "  ROOT %r = f32[1,2]{1,0} reduce-window(%e, %p3), window={size=32x32}",
            32 * 64 * 4,
        ),
    ],
)
def test_a_library_kernel_copies_what_it_reads(body, expected):
    text = TEXT.replace("BODY", body)
    assert library_scratch(text.replace("KIND", '"__ynn_fusion"')) == expected
    assert library_scratch(text.replace("KIND", '"__triton"')) == 0


def test_an_estimate_on_a_processor_counts_the_copy_and_says_so():
    x = ShapeDtypeStruct((64, 1024), jnp.float32)
    fn = lambda x: jnp.sum(x, 0)  # noqa: E731
    found = policy.estimate(fn, x, policies=[None], on="cpu")
    text = jax.jit(fn).lower(x).compile().as_text()
    scratch = library_scratch(text or "")
    planned = jax.jit(fn).lower(x).compile().memory_analysis()
    assert planned is not None
    assert found.rows[0].temporaries == planned.temp_size_in_bytes + scratch
    assert any("library kernels" in note for note in found.notes) == (scratch > 0)

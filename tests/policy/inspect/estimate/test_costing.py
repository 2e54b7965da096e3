"""The FLOPs of matmuls by what a device multiplies."""

import jax.numpy as jnp
import pytest

from policy import audit
from policy.inspect.estimate.costing import matmul_flops


def program(x):
    half = x.astype(jnp.bfloat16)
    mixed = (("high", "default"), ("default", "highest"), ("highest", "high"))
    levels = (None, "default", "high", "highest", *mixed)
    return half @ half, [jnp.dot(x, x, precision=level) for level in levels]


@pytest.mark.parametrize(
    ("platform", "shares"),
    [
        ("cpu", {"bfloat16": 1, "float32": 7}),
        ("cuda", {"bfloat16": 1, "tf32": 4, "float32": 3}),
        (
            "tpu",
            {"bfloat16": 1, "float32": 2, "float32 x3": 2, "float32 x6": 1}
            | {"float32 x2": 1, "float32 x5": 1},
        ),
    ],
)
def test_float32_counts_by_its_passes_on_a_tpu_and_as_tf32_on_a_gpu(platform, shares):
    operations = audit(program, jnp.ones((4, 4))).operations
    found = matmul_flops(operations, platform)
    assert found == {dtype: 2 * 4**3 * count for dtype, count in shares.items()}
    assert list(found.values()) == sorted(found.values(), reverse=True)

"""A mixture of experts on TPUs, under policies and by hand in bfloat16: cycles and memory.

    python -m benchmarks.accel.moe            # v5e: 2 minutes
    python -m benchmarks.accel.moe --on v6e   # another chip's rows
    python -m benchmarks.accel.moe --small    # the smaller layer, and the ragged matmuls alone

Forward and backward of one layer with a top-2 router in float32 and two ragged matmuls: 4096 tokens
of width 1024, 8 experts of width 4096; and the same of width 2048 with experts of 8192. By hand,
the router's Dense is given float32 and the precision highest, and rows and kernels are cast to
bfloat16. Then the ragged matmuls of codes alone, without their scales, of 4096 rows, beside
bfloat16. Compiled and not run; cycles are the compiler's own, of ragged matmuls those of the chip's
roofline where it tells none.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.accel.program import Figures, measure, placed
from benchmarks.accel.targets import Target, chosen
from benchmarks.table import Row, run
from mpmodules import linen as nn
from mpmodules import use_policy
from policy.core.messages import DtypePolicyWarning

TARGETS = ("v5e:1x1",)
OTHERS = ("v6e:1x1", "h100")
TOKENS, EXPERTS, CHOSEN = 4096, 8, 2
WIDTHS = (1024, 2048)
POLICIES = {"mixed_bfloat16": "mixed_bfloat16", "int8": "mixed_int8"}
RULES = {"router": "float32"}
BOUNDS = {("cycles", "int8, 1024"): 1.1, ("temporary", "int8, 1024"): 1.15}

# of rows (T, D), kernels (E, D, H) and cotangents (T, H), by their names' letters
MATMULS = {
    "forward": ("TD EDH", (((1,), (1,)), ((), ())), (0,)),
    "gradient of rows": ("TH EDH", (((1,), (2,)), ((), ())), (0,)),
    "gradient of kernels": ("TD TH", (((0,), (0,)), ((), ())), ()),
}


def experts(x: jax.Array, logits: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """Returns the sum of each token's experts, by their weights."""
    weights, experts = lax.top_k(jax.nn.softmax(logits), CHOSEN)
    order = jnp.argsort(experts.ravel())
    sizes = jnp.bincount(experts.ravel(), length=EXPERTS)
    hidden = jax.nn.gelu(lax.ragged_dot(x[order // CHOSEN].astype(up.dtype), up, sizes))
    y = lax.ragged_dot(hidden, down, sizes) * weights.ravel()[order][:, None].astype(down.dtype)
    return jnp.zeros(x.shape, jnp.float32).at[order // CHOSEN].add(y)


def _kernels(module: Any, width: int) -> tuple[jax.Array, jax.Array]:
    init = flax_nn.initializers.lecun_normal(batch_axis=0)
    up = module.param("up", init, (EXPERTS, width, 4 * width))
    return up, module.param("down", init, (EXPERTS, 4 * width, width))


class Layer(nn.Module):
    """The layer, written as for float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = _kernels(self, x.shape[-1])
        logits = nn.Dense(EXPERTS, use_bias=False, name="router")(x)
        return experts(x, logits, up, down)


class ByHand(flax_nn.Module):
    """The layer in Flax, with bfloat16 written by hand."""

    @flax_nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = (kernel.astype(jnp.bfloat16) for kernel in _kernels(self, x.shape[-1]))
        precise: Any = {"dtype": jnp.float32, "precision": lax.Precision.HIGHEST}
        logits = flax_nn.Dense(EXPERTS, use_bias=False, name="router", **precise)(x)
        return experts(x, logits, up, down)


def figures(target: Target, layer: Any, policy: str | None, width: int) -> Figures:
    """Returns the figures of one layer, forward and backward."""
    x = jax.ShapeDtypeStruct((TOKENS, width), jnp.bfloat16)

    def step(params: Any, x: jax.Array, ct: jax.Array) -> tuple[Any, ...]:
        y, pullback = jax.vjp(layer.apply, params, x)
        return y, *pullback(ct.astype(y.dtype))

    with warnings.catch_warnings(), use_policy(policy, RULES if policy else None):
        warnings.simplefilter("ignore", DtypePolicyWarning)  # the machine here has no 8 bits
        params = jax.eval_shape(layer.init, jax.random.key(0), x)
        return measure(target, step, placed(target, (params, x, x)))


def of_matmul(target: Target, name: str, dtype: Any, accumulator: Any) -> Figures:
    """Returns the figures of one ragged matmul."""
    letters, contracted, groups = MATMULS[name]
    sizes = {"T": TOKENS, "E": EXPERTS, "D": WIDTHS[0], "H": 4 * WIDTHS[0]}
    shapes = [
        jax.ShapeDtypeStruct([sizes[letter] for letter in each], dtype) for each in letters.split()
    ]
    numbers = lax.RaggedDotDimensionNumbers(contracted, (0,), groups)

    def multiply(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=accumulator)

    group_sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    return measure(target, multiply, placed(target, (*shapes, group_sizes)))


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of rows' names.
    """
    for target in chosen(on, TARGETS, OTHERS):
        quantity = "cycles" if target.chip.clock else "bytes"
        for width in WIDTHS[:1] if small else WIDTHS:
            for name, policy in POLICIES.items():
                called = f"{name}, {width}"
                if only and not any(part in called for part in only):
                    continue
                hand = figures(target, ByHand(), None, width)
                ours = figures(target, Layer(), policy, width)
                for what in (quantity, "temporary"):
                    values = getattr(ours, what), getattr(hand, what)
                    bound = BOUNDS.get((what, called)) if target.name in TARGETS else None
                    yield Row(what, called, *values, bound, target=target.name)
        for name in MATMULS:
            called = f"int8 matmul, {name}"
            if only and not any(part in called for part in only):
                continue
            found = of_matmul(target, name, jnp.int8, jnp.int32)
            hand = of_matmul(target, name, jnp.bfloat16, jnp.bfloat16)
            values = getattr(found, quantity), getattr(hand, quantity)
            yield Row(quantity, called, *values, target=target.name)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "by hand"))

"""How an optimizer's state and step grow with params, to 70 billion of them: shapes, of which
nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks import optimizer
from benchmarks.scale_lines import equations
from benchmarks.scale_models import linen, transformer_params
from benchmarks.table import Row
from mpmodules import linen as nn
from policy import mixed_precision

# Layers and width of decoders, in GPT-3's proportions (Brown et al. 2020, table 2.1), and one
# beyond.
SIZES = {"0.14B": (12, 768), "1.3B": (24, 2048), "6.7B": (32, 4096), "70B": (86, 8192)}
VOCABULARY = 32768
EXACT = 1.0001
# How params are stored, and the options of `mixed_precision`.
STORAGE: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32": (jnp.float32, {}),
    "float32, bf16 moments": (jnp.float32, {"moment_dtype": "bfloat16"}),
    "bfloat16, full masters": (jnp.bfloat16, {"master_weights": "full"}),
    "bfloat16, remainder": (jnp.bfloat16, {"master_weights": "remainder"}),
    "bfloat16, stochastic": (jnp.bfloat16, {"master_weights": "stochastic"}),
    "bfloat16, no masters": (jnp.bfloat16, {"master_weights": "none"}),
    "float16, full masters": (jnp.float16, {"master_weights": "full"}),
}


def params(size: str, dtype: Any, *, stacked: bool = False) -> Any:
    """The params of a decoder, as shapes; with its layers one by one, or stacked as `nn.scan` has
    them.
    """
    layers, width = SIZES[size]
    tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32)
    tree = transformer_params(1 if stacked else layers, width, width // 64, VOCABULARY, tokens)
    blocks = tree.pop("block_0") if stacked else {}
    blocks = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((layers, *leaf.shape), leaf.dtype), blocks
    )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree | blocks)


def elements(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def stored(tree: Any) -> int:
    """Bytes of all leaves; a PRNG key counts as what it holds."""
    return sum(leaf.size * _itemsize(leaf) for leaf in jax.tree.leaves(tree))


def _itemsize(leaf: Any) -> int:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.dtype.itemsize
    data = jax.eval_shape(jax.random.key_data, leaf)
    return data.size // leaf.size * data.dtype.itemsize


def state_bytes(tx: optax.GradientTransformation, tree: Any) -> float:
    """Bytes of params and optimizer state, a param."""
    return (stored(tree) + stored(jax.eval_shape(tx.init, tree))) / elements(tree)


def state_rows() -> Iterator[Row]:
    """By storage mode: beside AdamW of float32 params, and the largest beside the smallest."""
    small, large = list(SIZES)[:: len(SIZES) - 1]
    plain = state_bytes(optax.adamw(1e-3), params(large, jnp.float32, stacked=True))
    for name, (dtype, options) in STORAGE.items():
        key = jax.random.key(0) if options.get("master_weights") == "stochastic" else None
        tx = mixed_precision(optax.adamw(1e-3), "float32", loss_scale="dynamic", key=key, **options)
        at = {size: state_bytes(tx, params(size, dtype, stacked=True)) for size in (small, large)}
        yield Row("state", f"a param, {name}, beside optax", at[large], plain)
        yield Row(
            "state", f"a param, {name}, {large} / {small}", at[large], at[small], EXACT, 1 / EXACT
        )


def step_bytes(row: optimizer.Pipeline, size: str) -> tuple[float, float]:
    """Bytes that a compiled optimizer step accesses, and its temporary bytes, a param. The layers
    are stacked.
    """
    init, step = row.make()
    tree = params(size, row.params, stacked=True)
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, row.gradients), tree)
    compiled = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(tree, jax.eval_shape(init, tree), gradients)
        .compile()
    )
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if cost is None or memory is None:
        raise RuntimeError("This backend analyzes no costs: run on CPU, with JAX_PLATFORMS=cpu.")
    return cost["bytes accessed"] / elements(tree), memory.temp_size_in_bytes / elements(tree)


def step_rows() -> Iterator[Row]:
    """Bytes of an AdamW step a param, the largest model beside the smallest. Single leaves pass
    2^31 elements.
    """
    table = {row.name: row for row in optimizer.pipelines()}
    small, large = list(SIZES)[:: len(SIZES) - 1]
    for name in ("f32 / bf16", "full masters, bf16 / bf16", "remainder, bf16 / bf16"):
        at = {size: step_bytes(table[name], size) for size in (small, large)}
        yield Row("moved", f"a param, {name}, {large} / {small}", at[large][0], at[small][0], 1.01)
        yield Row(
            "temporary", f"a param, {name}, {large} / {small}", at[large][1], at[small][1], 1.01
        )


def traced_rows() -> Iterator[Row]:
    """Equations of the decoder's value_and_grad, of as many layers and another width: there is
    nothing to grow.
    """

    def count(width: int) -> int:
        program = linen(2, nn=nn, policy="mixed_bfloat16", width=width, heads=width // 64)
        return equations(jax.make_jaxpr(jax.value_and_grad(program.loss))(*program.arguments).jaxpr)

    narrow, wide = count(128), count(8192)
    yield Row("equations", "linen, 2 layers, width 8192 / 128", wide, narrow, 1.0, 1.0)


def rows(small: bool) -> Iterator[Row]:
    """Every row; `small` compiles nothing."""
    yield from state_rows()
    yield from traced_rows()
    if not small:
        yield from step_rows()

"""A training of every storage mode that is saved, and the process that goes on with it.

    python -m tests.policy.optim.saving FOLDER

restores both checkpoints that lie in a folder, and writes where each of them ends.
"""

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization

import mpmodules  # noqa: F401  (tells Flax of the states)
from policy import DynamicLossScale
from tests.policy.optim.steps import MODES, RANDOM, bits, stepped, wrapped

EIGHT_BITS = "moments in 8 bits"
MOMENTS: Any = {"auto": "bfloat16", EIGHT_BITS: {"mu": "int8", "nu": "int8"}}
KINDS = ("orbax", "msgpack")
SAVED, STEPS = 6, 12
FAST: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def transform(mode: Any) -> Any:
    """The transform of a storage mode, or of moments in 8 bits."""
    rate = optax.linear_schedule(0.1, 0.01, 5)
    adamw: Any = optax.MultiSteps(optax.inject_hyperparams(optax.adamw)(learning_rate=rate), 2)
    scale = DynamicLossScale(2.0**10, period=4, factor=4, min_loss_scale=0.5, hysteresis=2)
    options = {"loss_scale": scale, "moment_dtype": MOMENTS.get(mode), "clip_global_norm": 1.0}
    if mode in (*MOMENTS, *RANDOM):
        options["key"] = jax.random.key(3)
    return wrapped(adamw, "bfloat16", "auto" if mode not in MODES else mode, **options)


@functools.cache
def start() -> Any:
    """Mode, or moments in 8 bits, to params and state."""
    wide, large = (np.random.default_rng(0).normal(size=shape) for shape in ((2, 3), (16, 300)))
    params: Any = {EIGHT_BITS: {"a": jnp.asarray(large, jnp.bfloat16)}}
    for mode in MODES:
        other = jnp.float16 if mode in ("auto", "full") else jnp.bfloat16
        dtypes = {"a": jnp.float32, "b": jnp.bfloat16, "c": other}
        params[mode] = {name: jnp.asarray(wide, dtype) for name, dtype in dtypes.items()}
    return {mode: (tree, transform(mode).init(tree)) for mode, tree in params.items()}


@functools.partial(jax.jit, compiler_options=FAST)
def _step(trees: Any, step: Any) -> Any:
    # one step is skipped
    value = jnp.where(step == 2, jnp.nan, 0.1 * jnp.cos(step.astype(jnp.float32)))
    after = {}
    for mode, (params, state) in trees.items():
        gradients = jax.tree.map(lambda p: value * jnp.cos(p.astype(jnp.float32)), params)
        after[mode] = stepped(transform(mode), params, state, gradients)
    return after


def run(trees: Any, first: int, last: int) -> Any:
    for step in range(first, last):
        trees = _step(trees, jnp.int32(step))
    return trees


def save(trees: Any, folder: Path) -> None:
    import orbax.checkpoint

    with warnings.catch_warnings():  # orbax's own
        warnings.simplefilter("ignore")
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "orbax", trees)
    (folder / "msgpack").write_bytes(serialization.to_bytes(trees))


def restore(kind: str, folder: Path) -> Any:
    import orbax.checkpoint

    if kind == "msgpack":
        trees = serialization.from_bytes(start(), (folder / "msgpack").read_bytes())
        return jax.tree.map(jnp.asarray, trees)
    like = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, start())
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "orbax", like)


def main(folder: Path) -> None:
    for kind in KINDS:
        trees = restore(kind, folder)
        np.savez(folder / f"{kind}.npz", *bits(run(trees, SAVED, STEPS)))
        (folder / f"{kind}.txt").write_text(describe(trees))


def describe(trees: Any) -> str:
    return f"{jax.tree.structure(trees)}\n{[str(leaf.dtype) for leaf in jax.tree.leaves(trees)]}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Functions that a user's modules of both wings call on their activations, and what is asked of
them.
"""

from __future__ import annotations

import os
import traceback
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback

import mpmodules
import policy

SEEN: list[Any] = []  # dtypes of the arrays that callbacks are given


def note(x: Any) -> np.ndarray:
    SEEN.append(x.dtype.name)
    return np.asarray(x)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x * 2


clipped.defvjp(lambda x: (x * 2, None), lambda _, g: (jnp.clip(g, -1, 1) * 2,))


@jax.custom_jvp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(x)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))


def debug_print(x: jax.Array) -> jax.Array:
    jax.debug.print("mean {m} of {n}", m=x.mean(), n=x.size)
    return x


def debug_callback(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda x: SEEN.append(x.dtype.name), x)
    return x


def io(x: jax.Array) -> jax.Array:
    return io_callback(note, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def checked(x: jax.Array) -> jax.Array:
    checkify.check(jnp.all(x < 1e9), "too large: {m}", m=x.max())
    return x


def checkpointed(x: jax.Array) -> jax.Array:
    names = jax.checkpoint_policies.save_only_these_names("kept")
    body = lambda x: checkpoint_name(x @ jnp.eye(4), "kept") @ jnp.eye(4) * 2  # noqa: E731
    return jax.checkpoint(body, policy=names)(x)


DIFFERENTIABLE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "checkpointed": checkpointed,
    "scanned": lambda x: jax.lax.scan(lambda c, _: (c @ jnp.eye(4) * 0.5, None), x, None, length=2)[
        0
    ],
    "conditional": lambda x: jax.lax.cond(
        x.sum() > 0, lambda x: x * 2, lambda x: x @ jnp.eye(4), x
    ),
    "debug_print": debug_print,
    "debug_callback": debug_callback,
    "custom_vjp": clipped,
    "custom_jvp": straight_through,
}


def _nest(container: Any, x: jax.Array) -> None:
    del container["gone"]
    container["inner"]["found"].append(x)


CONTAINERS: dict[str, Any] = {
    "list": (list, lambda found, x: found.append(x), lambda found: found[0]),
    "dict": (dict, lambda table, x: table.update(x=x), lambda table: table["x"]),
    "nested": (
        lambda: {"inner": {"found": []}, "gone": 1},
        _nest,
        lambda table: table["inner"]["found"][len(table) - 1],
    ),
    "object": (
        types.SimpleNamespace,
        lambda notes, x: setattr(notes, "hidden", x),
        lambda notes: notes.hidden,
    ),
}
"""By name: makes a container, writes an array into it, and reads that."""


def ours_in(error: BaseException) -> int:
    """Returns how many frames of an error are of this library."""
    roots = tuple(
        os.path.dirname(os.path.abspath(str(package.__file__))) + os.sep
        for package in (mpmodules, policy)
    )
    frames = traceback.extract_tb(error.__traceback__)
    return sum(os.path.abspath(frame.filename).startswith(roots) for frame in frames)

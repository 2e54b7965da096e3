"""How programs are read: places, indices that may repeat, and constants that are lost while a
function is traced.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy.inspect.audit.checks.sums import may_repeat
from policy.inspect.audit.flow import noticing
from policy.programs.reading.graph import Graph
from policy.programs.reading.walk import walk

F32 = jnp.float32
INTEGERS = jax.ShapeDtypeStruct((5,), jnp.int32)


def test_sites_say_where_they_stand():
    def body(x, _):
        with jax.named_scope("inner"):
            return jax.checkpoint(jnp.tanh)(x), None

    def fn(x):
        with jax.named_scope("Net"):
            return jax.lax.scan(body, x, None, length=4)[0].sum()

    sites = list(walk(jax.make_jaxpr(jax.grad(fn))(jnp.ones(2))))
    (forward,) = [site for site in sites if site.name == "tanh" and not site.is_backward]
    assert (forward.path, forward.count, forward.inside[:1]) == (("Net", "inner"), 4, ("scan",))
    (again,) = [site for site in sites if site.name == "tanh" and site.is_backward]
    assert (again.path, again.count, again.is_recomputed) == (("Net", "inner"), 4, True)
    assert forward.source.startswith("test_reading.py:")


@pytest.mark.parametrize(
    ("indices", "repeats"),
    (
        (lambda i: i, True),
        (lambda i: jnp.arange(5)[::-1], False),
        (lambda i: jnp.argsort(i), False),
        (lambda i: (jnp.arange(5) + i[0]) % 5, False),
        (lambda i: (jnp.arange(5) + i[0]) % 2, True),
        (lambda i: jnp.arange(5) // 2, True),
        (lambda i: jnp.array([0, 3]), False),
        (lambda i: jnp.array([3, 3]), True),
        (lambda i: jnp.sort(i), True),
        (lambda i: i[:1], False),
        (lambda i: 2 * jnp.arange(3) - i[0], False),
    ),
)
def test_indices_repeat_unless_the_program_counts_or_permutes(indices, repeats):
    def fn(x, i):
        return x.at[indices(i)].add(1.0)

    graph = Graph(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((8, 2), F32), INTEGERS))
    (scatter,) = [node for node in graph.nodes if node.name == "scatter-add"]
    assert may_repeat(scatter.inputs[1]) == (repeats and True)


def test_rows_are_distinct_along_every_axis_or_may_repeat():
    def fn(x, i):
        rows, columns = jnp.arange(4)[:, None], jnp.arange(3)[None]
        return x.at[rows, columns].add(1.0), x.at[rows, i[:3][None]].add(1.0)

    graph = Graph(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((8, 8), F32), INTEGERS))
    grid, looked_up = [node for node in graph.nodes if node.name == "scatter-add"]
    assert not may_repeat(grid.inputs[1]) and may_repeat(looked_up.inputs[1])


def test_what_numpy_loses_is_noticed_by_its_line_and_warns_nobody():
    with noticing() as lost:
        np.float32(1e9).astype(np.float16)
        np.float32(1e-9).astype(np.float16)
    (over,), (under,) = lost.overflowed, lost.vanished
    assert (
        over.startswith("test_reading.py:")
        and int(under.split(":")[1]) == int(over.split(":")[1]) + 1
    )

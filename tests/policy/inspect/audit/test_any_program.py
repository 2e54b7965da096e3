"""An audit reads whatever JAX can trace, and opens what it holds."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

from policy import audit
from policy.inspect.audit.checks.sums import may_repeat
from policy.inspect.audit.flow import noticing
from policy.inspect.traced.authors import source_of_site
from policy.programs.reading.graph import Graph
from policy.programs.reading.walk import walk
from tests.policy.inspect.audit.corpus.planting import BF16, F32, shape


def kinds(report: Any) -> list[str]:
    return [finding.kind for finding in report.findings]


def test_a_program_without_equations_has_neither_operations_nor_findings():
    report = audit(lambda x: x, shape(2))
    assert report.operations == report.findings == report.paths == ()
    assert report.f32_matmul_share == 0.0 and report.flops_by_dtype == report.bytes_by_dtype == {}
    assert "no findings" in str(report)


def test_integers_count_no_flops():
    report = audit(lambda x: jnp.cumsum(x @ x), shape(2, 2, dtype=jnp.int32))
    assert report.flops_by_dtype == {} and report.bytes_by_dtype.keys() == {"int32"}
    assert not report.findings


def solve(a: Any, b: Any) -> Any:
    solved = lambda matvec, x: jnp.linalg.solve(a, x[:, None])[:, 0]  # noqa: E731
    return lax.custom_linear_solve(lambda x: a @ x, b, solved)


def call_out(x: Any) -> Any:
    call = jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct((4,), BF16))
    return call(x) + jax.pure_callback(np.sin, x, x)


(SIZE,) = jax.export.symbolic_shape("n")
WIDE, COMPLEX = shape(3, dtype=F32), shape(2, 4, dtype=jnp.complex64)


@pytest.mark.parametrize(
    ("fn", "args", "primitives"),
    [
        (lambda: jnp.ones((2, 2)) @ jnp.ones((2, 2)), (), {"dot_general"}),
        (solve, (shape(3, 3, dtype=F32), WIDE), {"dot_general", "lu"}),
        (call_out, (shape(4),), {"ffi_call", "pure_callback"}),
        (jax.hessian(lambda x: jnp.tanh(x).sum()), (WIDE,), {"tanh"}),
        (lambda x: jax.jvp(jnp.exp, (x,), (x,)), (WIDE,), {"exp"}),
        (lambda x: jnp.exp(x).sum(dtype=F32), (jax.ShapeDtypeStruct((SIZE,), BF16),), {"exp"}),
        (jax.jit(lambda x, y: x @ y, donate_argnums=0), (shape(2, 2),) * 2, {"dot_general"}),
        (lambda x: jnp.abs(jnp.fft.fft(x)) @ jnp.ones(4), (COMPLEX,), {"fft", "dot_general"}),
    ],
)
def test_programs_of_every_kind_are_read(fn, args, primitives):
    report = audit(fn, *args)
    assert primitives <= {op.primitive for op in report.operations}
    assert args != (COMPLEX,) or not report.findings


@pytest.mark.parametrize("make", (jax.random.key, jax.random.PRNGKey))
def test_keys_and_random_numbers(make):
    draw = lambda key, x: x + jax.random.normal(key, x.shape, x.dtype)  # noqa: E731
    assert not kinds(audit(draw, jax.eval_shape(lambda: make(0)), shape(4, dtype=F32)))


def test_float64_is_wide():
    with jax.enable_x64(True):
        x = shape(2, 2, dtype=jnp.float64)
        report = audit(lambda x: jnp.exp(x @ x).sum(), x)
    assert not report.findings and report.f32_matmul_share == 1.0


def test_what_neither_a_result_nor_an_effect_depends_on_is_left_out():
    def fn(x):
        jax.nn.softmax(x)
        jax.debug.print("{}", jnp.cos(x))
        return x * 2

    found = {op.primitive for op in audit(fn, shape(4)).operations}
    assert {"cos", "mul"} <= found and not found & {"exp", "reduce_sum"}


def test_kernels_and_unknown_primitives_are_listed_and_not_opened():
    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.exp(x_ref[...])

    call = pl.pallas_call(kernel, out_shape=shape(8, 8), interpret=True)
    report = audit(lambda x: call(x) @ x, shape(8, 8))
    found = [(op.kind, op.primitive) for op in report.operations]
    assert found == [("opaque", "pallas_call"), ("dot", "dot_general")] and not report.findings
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    (operation,) = audit(lambda x: mystery.bind(x), shape(4)).operations
    assert (operation.kind, operation.primitive, operation.flops) == ("other", "mystery", 4)


def test_loops_multiply_counts_and_conditionals_count_each_branch_once():
    def fn(x):
        def body(x, _):
            return lax.cond(x[0, 0] > 0, lambda x: x @ x, jnp.tanh, x), None

        inner = lambda x, _: (lax.scan(body, x, None, length=3)[0], None)  # noqa: E731
        x = lax.scan(inner, x, None, length=5)[0]
        return lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x)

    runs = {(op.primitive, op.count, op.flops) for op in audit(fn, shape(2, 2)).operations}
    assert runs >= {("dot_general", 15, 15 * 16), ("tanh", 15, 60), ("dot_general", 1, 16)}
    assert sum(primitive in ("dot_general", "tanh") for primitive, *_ in runs) == 3


def test_shards_count_on_every_device():
    mesh = jax.sharding.AbstractMesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    whole = lambda x: x @ jnp.ones((8, 8), BF16)  # noqa: E731
    parts = jax.shard_map(whole, mesh=mesh, in_specs=spec, out_specs=spec)
    flops = audit(whole, shape(16, 8)).flops_by_dtype
    assert audit(parts, shape(16, 8)).flops_by_dtype == flops


def test_derivatives_that_a_function_takes_itself():
    def fn(w, x):
        with jax.named_scope("Net"):
            return jax.grad(lambda w: jnp.tanh(x @ w).astype(F32).sum())(w)

    dots = [op for op in audit(fn, shape(4, 4), shape(2, 4)).operations if op.kind == "dot"]
    assert {(op.path, op.is_backward) for op in dots} == {("Net:", False), ("Net:", True)}


def test_methods_partials_and_static_arguments():
    class Model:
        def loss(self, x, power):
            return (x**power).astype(F32).sum()

    report = audit(Model().loss, shape(4), 3)
    assert report.name == "loss" and report.operations
    assert audit(functools.partial(Model().loss, power=2), shape(4)).name == "loss"


@pytest.mark.slow
def test_large_programs_are_read_once():
    """A scan of many reads of one value, long chains and wide sums: nothing grows with the square
    of the program.
    """

    def fn(x):
        for _ in range(1500):
            x = jnp.tanh(x + jax.lax.cumsum(x)) * x
        return x

    jaxpr = jax.make_jaxpr(fn)(shape(2))
    assert sum(1 for _ in walk(jaxpr)) > 5000
    assert audit(fn, shape(2)).findings[0].count == 1500


# --------------------------------------------------------------------------------------------------
# Places, indices that may repeat, and constants that are lost
# --------------------------------------------------------------------------------------------------


INTEGERS = shape(5, dtype=jnp.int32)


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
    assert source_of_site(forward).startswith("test_any_program.py:")


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

    graph = Graph(jax.make_jaxpr(fn)(shape(8, 2, dtype=F32), INTEGERS))
    (scatter,) = [node for node in graph.nodes if node.name == "scatter-add"]
    assert may_repeat(scatter.inputs[1]) == (repeats and True)


def test_rows_are_distinct_along_every_axis_or_may_repeat():
    def fn(x, i):
        rows, columns = jnp.arange(4)[:, None], jnp.arange(3)[None]
        return x.at[rows, columns].add(1.0), x.at[rows, i[:3][None]].add(1.0)

    graph = Graph(jax.make_jaxpr(fn)(shape(8, 8, dtype=F32), INTEGERS))
    grid, looked_up = [node for node in graph.nodes if node.name == "scatter-add"]
    assert not may_repeat(grid.inputs[1]) and may_repeat(looked_up.inputs[1])


@pytest.mark.slow
def test_what_numpy_loses_is_noticed_by_its_line_and_warns_nobody():
    with noticing() as lost:
        np.float32(1e9).astype(np.float16)
        np.float32(1e-9).astype(np.float16)
    (over,), (under,) = lost.overflowed, lost.vanished
    assert (
        over.startswith("test_any_program.py:")
        and int(under.split(":")[1]) == int(over.split(":")[1]) + 1
    )

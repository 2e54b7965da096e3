"""An audit reads whatever JAX can trace, and opens what it holds."""

from __future__ import annotations

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
from policy.programs.reading.walk import walk

BF16, F32 = jnp.bfloat16, jnp.float32


def shape(*dims: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def kinds(report: Any) -> list[str]:
    return [finding.kind for finding in report.findings]


def test_a_program_without_equations_has_neither_operations_nor_findings():
    report = audit(lambda x: x, shape(2))
    assert (report.operations, report.findings, report.paths, report.f32_matmul_share) == (
        (),
        (),
        (),
        0.0,
    )
    assert report.flops_by_dtype == report.bytes_by_dtype == {}
    assert "no findings" in str(report)


def test_integers_count_no_flops():
    report = audit(lambda x: jnp.cumsum(x @ x), shape(2, 2, dtype=jnp.int32))
    assert report.flops_by_dtype == {} and report.bytes_by_dtype.keys() == {"int32"}
    assert not report.findings


def solve(a: Any, b: Any) -> Any:
    return lax.custom_linear_solve(
        lambda x: a @ x, b, lambda matvec, x: jnp.linalg.solve(a, x[:, None])[:, 0]
    )


def call_out(x: Any) -> Any:
    call = jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct((4,), BF16))
    return call(x) + jax.pure_callback(np.sin, x, x)


(SIZE,) = jax.export.symbolic_shape("n")
WIDE = shape(3, dtype=F32)


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
    ],
    ids=("no arguments", "solve", "calls out", "hessian", "jvp", "symbolic shape", "donated"),
)
def test_programs_of_every_kind_are_read(fn, args, primitives):
    assert primitives <= {op.primitive for op in audit(fn, *args).operations}


@pytest.mark.parametrize("make", (jax.random.key, jax.random.PRNGKey))
def test_keys_and_random_numbers(make):
    draw = lambda key, x: x + jax.random.normal(key, x.shape, x.dtype)  # noqa: E731
    assert not kinds(audit(draw, jax.eval_shape(lambda: make(0)), shape(4, dtype=F32)))


def test_complex_numbers():
    report = audit(
        lambda x: jnp.abs(jnp.fft.fft(x)) @ jnp.ones(4), shape(2, 4, dtype=jnp.complex64)
    )
    assert not report.findings
    assert {"fft", "dot_general"} <= {op.primitive for op in report.operations}


def test_float64_is_wide():
    with jax.enable_x64(True):
        report = audit(lambda x: jnp.exp(x @ x).sum(), shape(2, 2, dtype=jnp.float64))
        lossy = audit(
            lambda x: jnp.tanh(x.astype(F32).astype(jnp.float64)), shape(2, dtype=jnp.float64)
        )
    assert not report.findings and report.f32_matmul_share == 1.0
    assert kinds(lossy) == ["cast-round-trip"]


def test_effects_are_no_dead_code():
    def fn(x):
        jax.debug.print("{}", jnp.sum(jnp.exp(x), dtype=BF16))
        return x

    assert "exp" in {op.primitive for op in audit(fn, shape(4)).operations}


def test_what_no_result_depends_on_is_left_out():
    def fn(x):
        jax.nn.softmax(x)
        return x * 2

    report = audit(fn, shape(4))
    assert not report.findings and [op.primitive for op in report.operations] == ["mul"]


def _kernel(x_ref, out_ref):
    out_ref[...] = jnp.exp(x_ref[...])


def test_a_kernel_is_opaque_and_listed():
    call = pl.pallas_call(_kernel, out_shape=jax.ShapeDtypeStruct((8, 8), BF16), interpret=True)
    report = audit(lambda x: call(x) @ x, shape(8, 8))
    assert [(op.kind, op.primitive) for op in report.operations] == [
        ("opaque", "pallas_call"),
        ("dot", "dot_general"),
    ]
    assert not report.findings


def test_an_unknown_primitive_is_another_operation():
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    report = audit(lambda x: mystery.bind(x), shape(4))
    assert [(op.kind, op.primitive, op.flops) for op in report.operations] == [
        ("other", "mystery", 4)
    ]


def test_loops_multiply_counts_and_conditionals_count_each_branch_once():
    def fn(x):
        def body(x, _):
            return lax.cond(x[0, 0] > 0, lambda x: x @ x, jnp.tanh, x), None

        inner = lambda x, _: (lax.scan(body, x, None, length=3)[0], None)  # noqa: E731
        x = lax.scan(inner, x, None, length=5)[0]
        return lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x)

    report = audit(fn, shape(2, 2))
    runs = {
        (op.primitive, op.count, op.flops)
        for op in report.operations
        if op.primitive in ("dot_general", "tanh")
    }
    assert runs == {("dot_general", 15, 15 * 16), ("tanh", 15, 60), ("dot_general", 1, 16)}


def test_shards_count_on_every_device():
    mesh = jax.sharding.AbstractMesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    fn = jax.shard_map(
        lambda x: x @ jnp.ones((8, 8), BF16), mesh=mesh, in_specs=spec, out_specs=spec
    )
    whole = audit(lambda x: x @ jnp.ones((8, 8), BF16), shape(16, 8))
    assert audit(fn, shape(16, 8)).flops_by_dtype == whole.flops_by_dtype


def test_derivatives_that_a_function_takes_itself():
    def fn(w, x):
        with jax.named_scope("Net"):
            return jax.grad(lambda w: jnp.tanh(x @ w).astype(F32).sum())(w)

    report = audit(fn, shape(4, 4), shape(2, 4))
    assert {(op.path, op.is_backward) for op in report.operations if op.kind == "dot"} == {
        ("Net:", False),
        ("Net:", True),
    }


def test_methods_partials_and_static_arguments():
    class Model:
        def loss(self, x, power):
            return (x**power).astype(F32).sum()

    report = audit(Model().loss, shape(4), 3)
    assert report.name == "loss" and report.operations
    assert audit(functools.partial(Model().loss, power=2), shape(4)).name == "loss"


def test_large_programs_are_read_once():
    """A scan of many reads of one value, long chains and wide sums: nothing grows with the square
    of the program.
    """

    def fn(x):
        for _ in range(1500):
            x = jnp.tanh(x + x.astype(F32).astype(BF16)) * x
        return x

    jaxpr = jax.make_jaxpr(fn)(shape(2))
    assert sum(1 for _ in walk(jaxpr)) > 5000
    assert audit(fn, shape(2)).findings[0].count == 1500

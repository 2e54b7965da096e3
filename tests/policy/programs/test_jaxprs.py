"""The programs inside equations: roles, operands and constants."""

import functools

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from policy.programs import jaxprs
from policy.programs.rewriting import outlining

X = np.linspace(0.1, 1.2, 6, dtype=np.float32).reshape(2, 3)


def equation_of(fn, name, *args):
    jaxpr = jax.make_jaxpr(fn)(*(args or (X,)))
    return next(
        e for e in jaxprs.equations_within(jaxprs.opened(jaxpr)[0]) if e.primitive.name == name
    )


def scanned(x):
    scale = jnp.cos(x[0])
    return lax.scan(lambda c, row: (c * scale + row, c), x[0], x)


def counted(x):
    limit = x.sum()
    return lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] + x[0, 0], s[1] * 2), (0.0, x))


@pytest.mark.parametrize(
    ("fn", "name", "roles"),
    [
        (jax.jit(jnp.sin), "jit", ["call"]),
        (jax.checkpoint(jnp.sin), "checkpoint", ["remat"]),
        (scanned, "scan", ["loop"]),
        (counted, "while", ["cond", "loop"]),
        (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "cond", ["branch", "branch"]),
        (lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)), "reduce", ["combine"]),
        (jnp.sin, "sin", []),
    ],
)
def test_programs_of_an_equation_have_roles(fn, name, roles):
    name = "remat2" if name == "checkpoint" and not has(fn, name) else name
    assert [one.role for one in jaxprs.subprograms(equation_of(fn, name))] == roles


def has(fn, name):
    return any(e.primitive.name == name for e in jax.make_jaxpr(fn)(X).eqns)


def test_a_scan_has_fixed_carried_and_scanned_operands():
    equation = equation_of(scanned, "scan")
    program = jaxprs.subprogram(equation, "loop")
    operands = program.given(list(equation.invars))
    assert [v.aval.shape for v in operands[program.fixed]] == [(3,)]
    assert [v.aval.shape for v in operands[program.carry]] == [(3,)]
    assert [v.aval.shape for v in operands[program.rows]] == [(2, 3)]
    assert program.count == 2 and jaxprs.scan_arity(equation) == (1, 1)


def test_the_condition_and_the_body_of_a_while_have_their_own_constants():
    test, body = jaxprs.subprograms(equation_of(counted, "while"))
    assert (test.carried, body.carried) == (2, 2)
    assert test.operands and body.operands
    assert test.operands[test.fixed] != body.operands[body.fixed]


def test_with_subprograms_puts_programs_in_their_places():
    equation = equation_of(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), "cond")
    first, second = (one.jaxpr for one in jaxprs.subprograms(equation))
    params = jaxprs.with_subprograms(equation, [second, first])
    assert list(params["branches"]) == [second, first]
    flipped = jaxprs.bind(equation, [np.int32(0), X], params)
    right = jaxprs.bind(equation, [np.int32(1), X])
    np.testing.assert_array_equal(flipped[0], right[0])


def test_constants_can_be_arguments():
    table = jnp.asarray(X)
    closed = jax.make_jaxpr(lambda x: x + table)(X)
    body, consts = jaxprs.with_consts_as_arguments(closed)
    assert len(body.invars) == 1 + len(consts) and not body.constvars


def test_runs_any_enters_programs_but_no_combinations():
    run = functools.partial(jaxprs.runs_any, jaxprs.opened(jax.make_jaxpr(scanned)(X))[0])
    assert run({"mul"}) and not run({"sin"})
    summed = jax.make_jaxpr(lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)))(X)
    body = jaxprs.opened(summed)[0]
    assert not jaxprs.runs_any(body, {"mul"})


def block(x, scale):
    for _ in range(5):
        x = jnp.sin(x * scale) + jnp.cos(x)
    return x


def stacked(x, counts):
    for i, count in enumerate(counts):
        with jax.named_scope(f"block_{i}"):
            x = block(x, 2.0 if count else 3.0)
    return x


@pytest.mark.parametrize(("counts", "calls"), [((1, 1, 1), 3), ((1, 1, 0), 2), ((1,), 0)])
def test_equal_parts_of_a_program_are_calls_of_one_function(counts, calls):
    jaxpr = jax.make_jaxpr(lambda x: stacked(x, counts))(X)
    outlined = outlining.outlined(jaxpr)
    parts = [e for e in jaxprs.opened(outlined)[0].eqns if outlining.is_part(e)]
    assert len(parts) == calls
    assert len({id(e.params["jaxpr"]) for e in parts}) == min(calls, 1)
    (ours,) = jex_core.jaxpr_as_fun(outlined)(X)
    np.testing.assert_allclose(ours, stacked(X, counts), rtol=1e-6)
    if parts:
        assert [str(e.source_info.name_stack) for e in parts] == [
            f"block_{i}" for i in range(calls)
        ]

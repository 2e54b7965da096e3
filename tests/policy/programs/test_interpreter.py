"""Interpreters on programs with control flow: results, derivatives, kinds of values, and notes."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from policy.programs.jaxprs import bind, equations_within, opened
from policy.programs.rewriting.interpreter import Interpreter, handler_of, rebound, run_at_once

X = np.linspace(0.1, 1.2, 6, dtype=np.float32).reshape(2, 3)


class Rebuilt(Interpreter):
    """Evaluates equations as they were traced, and counts those without programs."""

    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def equation(self, equation, values):
        if handler := handler_of(equation):
            return handler(self, equation, values)
        self.seen[equation.primitive.name] += 1
        return bind(equation, values)


class Noting(Rebuilt):
    """Notes the sum of each sine."""

    def equation(self, equation, values):
        outputs = super().equation(equation, values)
        if equation.primitive.name == "sin":
            self.notes[0] = outputs[0].sum()
        return outputs


class Negated(Interpreter):
    """Evaluates on pairs of a kind and an array; floating arrays are negated."""

    def constant(self, array):
        return ("constant", self.signed(array))

    def arrays(self, value):
        return (value[1],)

    def filled(self, value, arrays):
        return (value[0], *arrays)

    def settled(self, value, like):
        return (like[0], value[1])

    def merge(self, equation, values, branches=()):
        return [("merged", None) for _ in equation.outvars]

    def equation(self, equation, values):
        if handler := handler_of(equation):
            return handler(self, equation, values)
        outputs = bind(equation, [self.signed(array) for _, array in values])
        return [("computed", self.signed(output)) for output in outputs]

    @staticmethod
    def signed(array):
        return -array if jnp.issubdtype(jnp.result_type(array), jnp.floating) else array


def looped(x):
    def step(carry, row):
        return carry + jnp.sin(row), carry * row

    return lax.scan(step, x[0], x, reverse=True)


def counted(x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1]


def counted_by_rows(x):
    def steps(row):
        return lax.while_loop(lambda y: y.sum() < 9.0, lambda y: y * 1.5, row)

    return jax.vmap(steps)(x)


def branched(x):
    return lax.cond(x[0, 0] < 0.5, jnp.sin, lambda x: 2 * x, x)


def nested(x):
    def step(carry, row):
        after = lax.cond(row[0] > 0.5, jnp.sin, jnp.cos, carry)
        return jax.checkpoint(jnp.tanh)(after), row

    return lax.scan(step, x[0], x)[0]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))

PROGRAMS = {
    "jit": jax.jit(lambda x: jnp.sin(x) * 2),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "scan": looped,
    "while": counted,
    "while of a vmap": counted_by_rows,
    "cond": branched,
    "nested": nested,
    "custom_vjp": doubled,
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, y: y * x + i, x),
    "map": functools.partial(lax.map, lambda row: jnp.sin(row).sum()),
}
NAMES = pytest.mark.parametrize("name", PROGRAMS)


def rebuilt(fn, interpreter=Rebuilt):
    """Returns a function as an interpreter evaluates it, and the interpreter's notes."""
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(X)
    body, consts = opened(jaxpr)

    def call(x):
        run = interpreter()
        outputs = run.run(body, [run.constant(const) for const in consts], [x])
        return jax.tree.unflatten(jax.tree.structure(shape), outputs), run

    return call


@NAMES
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_rebuilt_program_returns_the_same(name, wrap):
    fn = PROGRAMS[name]
    call = wrap(lambda x: rebuilt(fn)(x)[0])
    for ours, theirs in zip(*map(jax.tree.leaves, (call(X), fn(X))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if not name.startswith("while")])
def test_a_rebuilt_program_has_the_same_derivative(name):
    fn = PROGRAMS[name]
    # A derivative rule of one's own is inlined: what is rebuilt is differentiated already.
    truth = jax.vjp(fn, X) if name != "custom_vjp" else jax.vjp(lambda x: 2 * x, X)
    outputs, pullback = jax.vjp(lambda x: rebuilt(fn)(x)[0], X)
    np.testing.assert_allclose(pullback(outputs)[0], truth[1](truth[0])[0], rtol=1e-5)


@NAMES
def test_values_of_another_kind_go_through_every_program(name):
    jaxpr = jax.make_jaxpr(PROGRAMS[name])(X)
    outputs = Negated().run(*opened_with_constants(jaxpr), [("given", -X)])
    for (_, ours), theirs in zip(outputs, jax.tree.leaves(PROGRAMS[name](X)), strict=True):
        np.testing.assert_allclose(-ours, theirs, rtol=1e-6)


def opened_with_constants(jaxpr):
    body, consts = opened(jaxpr)
    return body, [Negated().constant(const) for const in consts]


@pytest.mark.parametrize("name", ["scan", "while", "cond"])
def test_the_results_of_loops_and_branches_are_of_the_merged_kind(name):
    body, consts = opened_with_constants(jax.make_jaxpr(PROGRAMS[name])(X))
    kinds = {kind for kind, _ in Negated().run(body, consts, [("given", -X)])}
    assert kinds == {"merged"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jit", np.sin(X).sum()),
        ("checkpoint", np.sin(np.cos(X)).sum()),
        ("scan", np.sin(X).sum(1)),  # one note for each step
        ("while", np.sin(X).sum()),  # the largest of all steps
        ("cond", np.sin(X).sum()),
        ("map", np.sin(X).sum(1)),
    ],
)
def test_notes_come_out_of_every_program(name, expected):
    call = rebuilt(PROGRAMS[name], Noting)
    np.testing.assert_allclose(jax.jit(lambda x: call(x)[1].notes)(X)[0], expected, rtol=1e-6)


def test_the_note_of_a_branch_that_was_not_taken_is_zero():
    assert rebuilt(branched, Noting)(X + 1)[1].notes[0] == 0


def test_a_shard_map_is_rebuilt_with_its_mesh():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data")
    fn = jax.shard_map(
        lambda x: jnp.sin(lax.psum(x, "data")), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
    )
    jaxpr = jax.make_jaxpr(lambda x: rebuilt(fn, Noting)(x)[0])(X)
    (equation,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    assert equation.params["mesh"].axis_names == ("data",)
    np.testing.assert_allclose(rebuilt(fn)(X)[0], np.sin(X), rtol=1e-6)


def test_a_jit_keeps_its_name_and_donated_operands():
    fn = jax.jit(lambda x: x * 2, donate_argnums=0)
    (equation,) = jax.make_jaxpr(lambda x: rebuilt_jit(fn, x))(X).eqns
    assert equation.params["donated_invars"] == (True,)


def rebuilt_jit(fn, x):
    (equation,) = jax.make_jaxpr(fn)(X).eqns
    return rebound(Rebuilt(), equation, [x])


def test_the_lines_names_and_settings_of_the_program_stay():
    def fn(x):
        with jax.named_scope("head"), jax.default_matmul_precision("float32"):
            return x @ x.T

    before = next(equations_within(jax.make_jaxpr(fn)(X).jaxpr))
    after = jax.make_jaxpr(lambda x: rebuilt(fn)(x)[0])(X)
    names = {str(eqn.source_info.name_stack) for eqn in equations_within(after.jaxpr)}
    (matmul,) = (e for e in equations_within(after.jaxpr) if e.primitive.name == "dot_general")
    assert names == {"head"} and before.primitive.name in ("transpose", "dot_general")
    assert {str(p) for p in matmul.params["precision"]} == {"HIGHEST"}


def test_what_no_output_needs_is_not_run_at_once():
    def fn(x):
        jnp.linalg.eigh(x.T @ x)
        return jnp.sin(x)

    run = run_at_once(jax.make_jaxpr(fn)(X))
    names = {equation.primitive.name for equation in equations_within(jax.make_jaxpr(run)(X).jaxpr)}
    assert "sin" in names and not names & {"eigh", "dot_general"}


@NAMES
def test_a_program_run_at_once_is_right_and_can_be_differentiated(name):
    fn = PROGRAMS[name]
    run = run_at_once(jax.make_jaxpr(fn)(X))
    for ours, theirs in zip(run(X), jax.tree.leaves(fn(X)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    if "while" not in name:
        ours, theirs = (jax.vjp(lambda x, f=f: jax.tree.leaves(f(x))[0], X)[1] for f in (run, fn))
        cotangent = jnp.ones_like(run(X)[0])
        np.testing.assert_allclose(ours(cotangent)[0], theirs(cotangent)[0], rtol=1e-5)

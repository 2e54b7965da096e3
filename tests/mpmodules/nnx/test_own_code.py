"""A user's own code in nnx modules, and their parameters: calls, copies, gradients, transforms."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIndexIssue=false

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import policy
from mpmodules import nnx
from policy import DtypePolicyWarning, audit
from tests.mpmodules.apis import MIXED, Text, X, dense, layer_norm, weight
from tests.mpmodules.own_code_models import NnxBlock, NnxNet, NnxProjection, error
from tests.programs import named, operations

TOKEN_VECTORS = jax.random.normal(jax.random.key(1), (2, 8, 16))


def ported(model):
    return nnx.apply_policy(model, MIXED)


def test_parts_of_a_model_and_ports_in_other_models():
    rngs = flax_nnx.Rngs(0)
    layer = flax_nnx.Linear(8, 8, rngs=rngs)
    foreign = NnxProjection(16, 8, rngs), layer, NnxProjection(8, 4, rngs)
    loss = lambda model, x: jnp.mean(jnp.square(model(x).astype(jnp.float32)))  # noqa: E731
    for model in (
        ported(NnxNet(rngs)).block,
        ported(flax_nnx.Sequential(*foreign)),
        nnx.Sequential(ported(NnxBlock(rngs))),
        flax_nnx.Sequential(ported(NnxBlock(rngs))),
    ):
        assert audit(loss, model, TOKEN_VECTORS, backward=True).f32_matmul_share == 0


class Stateful(flax_nnx.Module):
    """Changes all kinds of state in its calls."""

    def __init__(self, rngs):
        self.own, self.calls, self.mode = NnxProjection(16, 4, rngs), 0, "new"
        self.empty, self.none = flax_nnx.Variable({}), flax_nnx.Variable(None)
        self.pair = flax_nnx.Variable((jnp.zeros(2), jnp.zeros(3)))
        self.raw = flax_nnx.data(jnp.zeros(2))

    def __call__(self, x):
        first, second = self.pair.get_value()
        self.pair.set_value((first, second + 1))
        self.calls, self.mode, self.raw = self.calls + 1, "used", self.raw + 1
        return self.own(x)


@pytest.mark.slow
def test_all_kinds_of_state_are_changed_as_a_plain_call_changes_them():
    half, wide = ported(Stateful(flax_nnx.Rngs(0))), Stateful(flax_nnx.Rngs(0))
    for model in (half, wide):
        model(TOKEN_VECTORS)
        flax_nnx.jit(lambda model: model(TOKEN_VECTORS))(model)
    assert (half.calls, half.mode) == (wide.calls, wide.mode) == (2, "used")
    states = [jax.tree.leaves(flax_nnx.state(model)) for model in (half, wide)]
    for ours, theirs in zip(*states, strict=True):
        assert ours.dtype == theirs.dtype and jnp.array_equal(ours, theirs)
    assert half.pair.get_value()[1][0] == half.raw[0] == 2 and half.none.get_value() is None


@pytest.mark.slow
def test_no_tracer_is_leaked_no_parameter_touched_and_a_closed_over_model_differentiated():
    model = ported(NnxProjection(16, 4, flax_nnx.Rngs(0)))
    before = jax.tree.leaves(flax_nnx.state(model, flax_nnx.Param))
    with jax.checking_leaks():  # raises where a tracer outlives its trace
        out = model(TOKEN_VECTORS)
    assert error(out, jnp.dot(TOKEN_VECTORS, model.w[...])) < 0.01
    assert all(map(operator.is_, before, jax.tree.leaves(flax_nnx.state(model, flax_nnx.Param))))
    gradient = jax.grad(lambda x: jnp.sum(model(x)))(TOKEN_VECTORS)
    assert error(gradient, jnp.broadcast_to(model.w[...].sum(axis=1), TOKEN_VECTORS.shape)) < 0.01


ROWS = jnp.ones((2, 4))
MANY = jnp.zeros(4096, int)


READS: dict[str, Any] = {
    "[...]": lambda p: p[...],
    "[rows]": lambda p: p[:2],
    "get_value": lambda p: p.get_value(),
    "matmul": lambda p: p @ jnp.ones((4, 4), p[...].dtype),
    "times": lambda p: p * 2,
    "attribute": lambda p: p.T,
    "method": lambda p: p.reshape(-1),
    "sum": lambda p: p.sum(),
    "asarray": jnp.asarray,
    "jnp": lambda p: jnp.add(p, 1),
    "negative": lambda p: -p,
    "dtype": lambda p: p,
}


OTHERS = {"integers": "int32", "key": "key<fry>"}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_each_way_to_read_gives_float32_and_others_as_stored(text: str) -> None:
    class Reads(nnx.Module):
        keep_params = ("scale",)

        def __init__(self) -> None:
            self.w, self.scale = nnx.Param(jnp.ones((4, 4))), nnx.Param(jnp.ones(4))
            self.stat = nnx.BatchStat(jnp.ones(4))
            self.asked = nnx.Param(jnp.ones(4), compute_dtype=jnp.float32)
            self.list = nnx.List([nnx.Param(jnp.ones(2))])
            self.integers, self.key = nnx.Param(jnp.arange(2)), nnx.Param(jax.random.key(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            floats = self.scale, self.stat, self.asked, self.list[0]
            others = {name: str(getattr(self, name)[...].dtype) for name in OTHERS}
            found = [read(self.w).dtype.name for read in READS.values()]
            seen.append((found, [value[...].dtype.name for value in floats], others))
            return x

    seen: list[Any] = []
    model = Reads(dtype_policy=text)
    for run in (model, lambda x: jax.eval_shape(lambda x: model(x), x)):
        seen.clear()
        run(ROWS)  # traced in float32, and once more for the casts that it names
        assert seen[0] == (["float32"] * len(READS), ["float32"] * 4, OTHERS)
    stored = policy.get_policy(text).param_dtype
    assert {read(model.w).dtype for read in READS.values()} == {stored}  # outside of a call
    assert model.scale.dtype == jnp.float32 and model.list[0].dtype == stored


class Head(nnx.Module):
    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.table = nnx.Param(jnp.ones((8, 4)))
        self.head = Head(self.table)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table[ids]
        y = self.head(x)
        return y + (x @ self.table.T).astype(y.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "dtype"), [("f32", "float32"), ("mixed_bfloat16", "bfloat16")])
def test_a_tied_parameter_follows_its_reader(rule: str, dtype: str) -> None:
    model = nnx.apply_policy(Tied(), "mixed_bfloat16", {"head": rule})
    gradient = flax_nnx.grad(lambda m: m(MANY).sum())(model)["head"]["table"].get_value()
    dots = named(operations(lambda x: model(x), MANY), "dot_general")
    assert [op.inputs for op in dots] == [(dtype,) * 2, ("bfloat16",) * 2]
    np.testing.assert_array_equal(gradient[:, 0], [4096 * 18] + [4096 * 2] * 7)


def test_a_parameter_that_a_method_writes_back_is_averaged_in_float32() -> None:
    class Average(nnx.Module):
        def __init__(self) -> None:
            self.average, self.w = nnx.Param(jnp.zeros(())), nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.average[...] = 0.999 * self.average[...] + 0.001 * 1.2345678
            return x @ self.w

    model, plain = Average(dtype_policy="mixed_bfloat16"), Average()
    for call in (lambda m: m(ROWS), flax_nnx.jit(lambda m: m(ROWS))) * 2:
        assert call(model).dtype == call(plain).dtype == jnp.float32
    assert model.average[...] == plain.average[...]


class Linear(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((4, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w


class Lends(nnx.Module):
    """Hands out what it holds, and makes more of it."""

    def __init__(self) -> None:
        self.w, self.layer = nnx.Param(jnp.ones((1, 4))), nnx.List([Linear()])
        self.count = nnx.Variable(jnp.array(0))

    def child(self) -> Any:
        return {"layer": self.layer[0], "w": self.w}

    def function(self) -> Any:
        def call(x: jax.Array) -> jax.Array:
            self.count[...] += 1
            return x * self.w

        return call

    def parts(self) -> Any:
        return flax_nnx.split(self)

    def adopt(self, other: Any) -> Any:
        self.other = other
        del self.count
        return other

    def __call__(self, x: jax.Array) -> jax.Array:
        if not hasattr(self, "new"):
            self.new, self.cache = Linear(), nnx.Cache(jnp.zeros(3))
            self.layer.append(self.new)
        self.cache = nnx.Cache(self.cache[...] + 1)
        return self.layer[1](x) * self.w


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, lambda f: lambda m: flax_nnx.grad(lambda m: (f(m), m(ROWS).sum())[1])(m)],
    ids=["eager", "grad"],
)
def test_a_module_holds_the_very_objects_that_its_methods_return_and_make(wrap: Any) -> None:
    def call(model: Any) -> None:
        found, other = model.child(), Linear()
        assert found["layer"] is model.layer[0] and found["w"] is model.w
        assert model.adopt(other) is other is model.other and not hasattr(model, "count")
        for _ in range(2):
            assert model(ROWS).shape == ROWS.shape
        assert type(model.new) is Linear and model.layer[1] is model.new and len(model.layer) == 2
        assert (model.cache[...] == 2).all()

    wrap(call)(Lends(dtype_policy="mixed_bfloat16"))


def test_functions_and_graphs_that_a_method_returns_are_of_the_module_itself() -> None:
    model = Lends(dtype_policy="mixed_bfloat16")
    with pytest.warns(DtypePolicyWarning, match="Lends can't be traced, .*returns a function, "):
        call = model.function()
    model.w.set_value(jnp.full((1, 4), 3.0))
    assert call(ROWS)[0, 0] == 3 and int(model.count[...]) == 1
    with pytest.warns(DtypePolicyWarning, match="Lends can't be traced, .*returns a GraphDef, "):
        assert model.parts()[0] == flax_nnx.split(model)[0]
    table = nnx.Param(jnp.ones((8, 4)))  # handed in: not the module's to cast
    head = Head(table, dtype_policy="bfloat16")
    assert head.table is table and table.dtype == jnp.float32


HALF = ("bfloat16", "bfloat16")


class Counter(nnx.Module):
    def __init__(self, *, rngs):
        self.layer, self.calls = nnx.Linear(4, 4, rngs=rngs), 0

    def __call__(self, x):
        self.calls += 1
        return self.layer(x)


class Outer(nnx.Module):
    def __init__(self, *, rngs):
        self.inner = Counter(rngs=rngs)

    def __call__(self, x):
        return self.inner(self.inner(x))


def test_a_counter_in_python_counts_each_call():
    model, outer = (cls(dtype_policy=MIXED, rngs=nnx.Rngs(0)) for cls in (Counter, Outer))
    for i in range(1, 4):
        model(X)
        outer(X)
        assert (model.calls, outer.inner.calls) == (i, 2 * i)


BLOCK = Text(
    lambda self, x: self.layer(self.norm(x) @ self.w + self.b[None]),
    norm=layer_norm(4),
    layer=dense(4, 4),
    w=weight(4, 4),
    b=weight(4),
)


def stacked(modules: Any, rngs: Any) -> Any:
    make = nnx.vmap(lambda rngs: BLOCK.nnx(modules, rngs), in_axes=0, out_axes=0)
    return nnx.split_rngs(splits=3)(make)(rngs)


CARRIED: dict[str, Any] = {"in_axes": (0, nnx.Carry), "out_axes": nnx.Carry}
RUNS: dict[str, Any] = {
    "jit": nnx.jit(lambda block, x: block(x)),
    "remat": nnx.remat(lambda block, x: block(x)),
    "scan": nnx.scan(lambda block, x: block(x), **CARRIED),
    "scan of remat": nnx.scan(nnx.remat(lambda block, x: block(x)), **CARRIED),
    "vmap": nnx.vmap(lambda block, x: block(x), in_axes=(0, None), out_axes=0),
}


def around(modules: Any, how: str) -> Any:
    class Around(modules.Module):
        def __init__(self, *, rngs):
            one = how in ("jit", "remat")
            self.blocks = BLOCK.nnx(modules, rngs) if one else stacked(modules, rngs)
            self.position = nnx.Param(jnp.ones((1, 4)))

        def __call__(self, x):
            return RUNS[how](self.blocks, x * 2 + self.position)

    return Around


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("how", RUNS)
@pytest.mark.parametrize("where", ["outermost", "inside"])
@pytest.mark.parametrize("way", ["ours", "port"])
def test_transformations_of_nnx_multiply_in_half_and_sum_gradients_in_float32(way, how, where):
    wide = around(flax_nnx, how)(rngs=nnx.Rngs(0))
    half = nnx.apply_policy(wide, MIXED)
    if way == "ours":
        half = around(nnx, how)(rngs=nnx.Rngs(0), dtype_policy=MIXED)
    call = (lambda m, x: m(x)) if where == "inside" else (lambda m, x: RUNS[how](m.blocks, x))
    out, truth = (call(model, X) for model in (half, wide))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, truth, atol=0.05 * float(jnp.abs(truth).max()))
    graph, params, rest = flax_nnx.split(half, flax_nnx.Param, ...)
    loss = lambda p: call(flax_nnx.merge(graph, p, rest, copy=True), X).sum()  # noqa: E731
    ops = operations(jax.grad(loss), params)
    assert {op.inputs for op in named(ops, "dot_general")} == {HALF}
    assert {op.outputs for op in named(ops, "reduce_sum") if op.is_backward} == {("float32",)}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}

"""Parameters of a user's nnx modules: how nnx's code reads, shares, writes and makes them."""

# What Flax returns is typed as Flax's own class.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import policy
from mpmodules import nnx
from policy import DtypePolicyWarning
from tests.programs import named, operations

X = jnp.ones((2, 4))
MANY = jnp.zeros(4096, int)


class Table(nnx.Module):
    def __init__(self) -> None:
        self.table = nnx.Param(jnp.ones((8, 4)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.table[ids]

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


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


@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_each_way_to_read_gives_float32(text: str) -> None:
    class Reads(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x: jax.Array) -> jax.Array:
            seen.append({how: read(self.w).dtype.name for how, read in READS.items()})
            return x

    seen: list[Any] = []
    model = Reads(dtype_policy=text)
    model(X)
    jax.eval_shape(lambda x: model(x), X)
    assert seen == [dict.fromkeys(READS, "float32")] * len(seen) and seen
    stored = policy.get_policy(text).param_dtype
    assert {read(model.w).dtype for read in READS.values()} == {stored}  # outside of a call


@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_all_floats_are_float32_to_the_code_and_others_as_stored(text: str) -> None:
    class Kept(nnx.Module):
        keep_params = ("scale",)

        def __init__(self) -> None:
            self.scale, self.stat = nnx.Param(jnp.ones(4)), nnx.BatchStat(jnp.ones(4))
            self.asked = nnx.Param(jnp.ones(4), compute_dtype=jnp.float32)
            self.list = nnx.List([nnx.Param(jnp.ones(2))])
            self.integers, self.key = nnx.Param(jnp.arange(2)), nnx.Param(jax.random.key(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            read = (self.scale, self.stat, self.asked, self.list[0], self.integers, self.key)
            seen.append([str(value[...].dtype) for value in read])
            return x

    seen: list[Any] = []
    model = Kept(dtype_policy=text)
    model(X)
    jax.eval_shape(lambda x: model(x), X)
    assert seen == [["float32"] * 4 + ["int32", "key<fry>"]] * len(seen) and seen
    assert model.scale.dtype == jnp.float32
    assert model.list[0].dtype == policy.get_policy(text).param_dtype


# --- sharing --------------------------------------------------------------------------------------


class Head(nnx.Module):
    def __init__(self, table: Any) -> None:
        self.table = table

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class Tied(nnx.Module):
    def __init__(self) -> None:
        self.words = Table()
        self.head = Head(self.words.table)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.words(ids)
        y = self.head(x)
        return y + (x @ self.words.table.T).astype(y.dtype)


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
    for call in (lambda m: m(X), flax_nnx.jit(lambda m: m(X))) * 2:
        assert call(model).dtype == call(plain).dtype == jnp.float32
    assert model.average[...] == plain.average[...]


# --- state ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "wrap",
    [lambda f: f, lambda f: lambda m: flax_nnx.grad(lambda m: (f(m), m(X).sum())[1])(m)],
    ids=["eager", "grad"],
)
def test_a_module_holds_the_very_objects_that_its_methods_return_and_make(wrap: Any) -> None:
    def call(model: Any) -> None:
        found, other = model.child(), Linear()
        assert found["layer"] is model.layer[0] and found["w"] is model.w
        assert model.adopt(other) is other is model.other and not hasattr(model, "count")
        for _ in range(2):
            assert model(X).shape == X.shape
        assert type(model.new) is Linear and model.layer[1] is model.new and len(model.layer) == 2
        assert (model.cache[...] == 2).all()

    wrap(call)(Lends(dtype_policy="mixed_bfloat16"))


def test_functions_and_graphs_that_a_method_returns_are_of_the_module_itself() -> None:
    model = Lends(dtype_policy="mixed_bfloat16")
    with pytest.warns(DtypePolicyWarning, match="Lends can't be traced, .*returns a function, "):
        call = model.function()
    model.w.set_value(jnp.full((1, 4), 3.0))
    assert call(X)[0, 0] == 3 and int(model.count[...]) == 1
    with pytest.warns(DtypePolicyWarning, match="Lends can't be traced, .*returns a GraphDef, "):
        assert model.parts()[0] == flax_nnx.split(model)[0]
    table = nnx.Param(jnp.ones((8, 4)))  # handed in: not the module's to cast
    head = Head(table, dtype_policy="bfloat16")
    assert head.table is table and table.dtype == jnp.float32

"""Parameters of a user's nnx modules: stored in param_dtype, float32 to their code, used in
compute_dtype, gradients summed in float32.
"""

# What Flax returns is typed as Flax's own class.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import policy
from mpmodules import nnx
from policy import DtypePolicyWarning, use_policy
from tests.programs import named, operations

X = jnp.ones((2, 4))
MANY = jnp.zeros(4096, int)
POLICIES = (
    "mixed_bfloat16",
    "mixed_float16",
    "bfloat16",
    "float16",
    "float32",
    "p=f32,c=f32,o=bf16",
)


class Table(nnx.Module):
    def __init__(self) -> None:
        self.table = nnx.Param(jnp.ones((8, 4)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.table[ids]

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class Linear(nnx.Module):
    def __init__(self) -> None:
        self.w, self.b = nnx.Param(jnp.ones((4, 4))), nnx.Param(jnp.ones(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w + self.b[None]

    @nnx.jit
    def jitted(self, x: jax.Array) -> jax.Array:
        return x @ self.w + self.b[None]

    @nnx.remat
    def rematerialised(self, x: jax.Array) -> jax.Array:
        return x @ self.w + self.b[None]


def pure(model: Any) -> tuple[Any, Any]:
    """A loss of the state, and the state."""
    graph, state, rest = flax_nnx.split(model, flax_nnx.Param, ...)
    return (
        lambda call, state: (
            call(flax_nnx.merge(graph, state, rest, copy=True)).astype(jnp.float32).sum()
        )
    ), state


def gradient_ops(model: Any, call: Any) -> list[Any]:
    loss, state = pure(model)
    return operations(jax.grad(lambda state: loss(call, state)), state)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", POLICIES)
def test_a_parameter_is_stored_and_differentiated_in_the_policys_dtypes(text: str) -> None:
    wanted = policy.get_policy(text)
    model = Table(dtype_policy=text)
    assert model.table.dtype == wanted.param_dtype == model.table.get_value().dtype
    assert model(MANY).dtype == wanted.output_dtype
    loss, state = pure(model)
    gradient = jax.grad(lambda state: loss(lambda m: m(MANY), state))(state)
    assert gradient["table"].get_value().dtype == wanted.param_dtype
    assert gradient["table"].get_value()[0, 0] == 4096
    assert (
        flax_nnx.grad(lambda m: m(MANY).astype(jnp.float32).sum())(model)["table"].get_value()[0, 0]
        == 4096
    )


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
@pytest.mark.parametrize("how", READS)
def test_each_way_to_read_gives_float32(how: str, text: str) -> None:
    class Reads(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x: jax.Array) -> jax.Array:
            seen.append(READS[how](self.w).dtype)
            return x

    seen: list[Any] = []
    model = Reads(dtype_policy=text)
    model(X)
    jax.eval_shape(lambda x: model(x), X)
    assert set(seen) == {jnp.dtype("float32")}
    assert READS[how](model.w).dtype == policy.get_policy(text).param_dtype  # outside of a call


def test_parameters_are_used_in_compute_dtype() -> None:
    with use_policy("mixed_bfloat16"):
        model = Linear()
    loss, state = pure(model)
    ops = operations(jax.grad(lambda state: loss(lambda m: m(X), state)), state)
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16",) * 2}
    forward = [op for op in named(ops, "add") if not op.is_backward]
    assert {op.outputs for op in forward} == {("bfloat16",)}


class Against(nnx.Module):
    """Multiplies rounded activations by its parameters."""

    keep_params = ("kept",)

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer, self.plain = nnx.Linear(4, 4, rngs=rngs), nnx.Param(jnp.ones((1, 4)))
        self.kept = nnx.Param(jnp.ones((1, 4)))
        self.asked = nnx.Param(jnp.ones((1, 4)), compute_dtype=jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(x) * self.plain * self.kept * self.asked


@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_a_kept_parameter_and_one_asked_for_in_float32_hold_against_activations(text: str) -> None:
    model = Against(nnx.Rngs(0), dtype_policy=text)
    ops = named(operations(lambda x: model(x), X), "mul")
    assert [op.outputs[0] for op in ops] == ["bfloat16", "float32", "float32"]
    assert model.kept.dtype == jnp.float32


class Temperature(nnx.Module):
    def __init__(self, function: Any) -> None:
        self.t, self.function = nnx.Param(jnp.ones(())), function

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.function(self.t[...])


@pytest.mark.parametrize("function", [lambda t: t, jnp.exp, nnx.softplus], ids=["", "exp", "log"])
@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_the_gradient_of_a_function_of_a_scalar_is_summed_in_float32(
    text: str, function: Any
) -> None:
    with use_policy(text):
        model = Temperature(function)
    x = jnp.ones((4096, 64))
    loss, state = pure(model)
    gradient = jax.grad(lambda state: loss(lambda model: model(x), state) / x.size)(state)
    sums = named(gradient_ops(model, lambda model: model(x)), "reduce_sum")
    assert not [op for op in sums if "bfloat16" in op.outputs]
    # a value, its derivative and the sum's terms are rounded to bfloat16, each by 2**-9 at most
    np.testing.assert_allclose(gradient["t"][...], jax.grad(function)(1.0), rtol=2**-7)


class Kept(nnx.Module):
    keep_params = ("scale",)

    def __init__(self, seen: list[Any]) -> None:
        self.scale, self.asked = (
            nnx.Param(jnp.ones(4)),
            nnx.Param(jnp.ones(4), compute_dtype=jnp.float32),
        )
        self.list, self.dict = (
            nnx.List([nnx.Param(jnp.ones(2))]),
            nnx.Dict(a=nnx.Param(jnp.ones(2))),
        )
        self.integers, self.key = nnx.Param(jnp.arange(2)), nnx.Param(jax.random.key(0))
        self.variable, self.stat = nnx.Variable(jnp.ones(4)), nnx.BatchStat(jnp.ones(4))
        self.note = seen.append

    def __call__(self, x: jax.Array) -> jax.Array:
        read = {
            name: getattr(self, name)
            for name in ("scale", "asked", "integers", "key", "variable", "stat")
        }
        read |= {"list": self.list[0], "dict": self.dict.a}
        self.note({name: str(value[...].dtype) for name, value in read.items()})
        return x


@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_all_floats_are_float32_to_the_code_and_others_as_stored(text: str) -> None:
    seen: list[Any] = []
    model = Kept(seen, dtype_policy=text)
    model(X)
    jax.eval_shape(lambda x: model(x), X)
    names = ("scale", "asked", "variable", "stat", "list", "dict")
    others = {"integers": "int32", "key": "key<fry>"}
    assert seen == [dict.fromkeys(names, "float32") | others] * len(seen) and seen
    assert model.scale.dtype == jnp.float32
    assert model.list[0].dtype == policy.get_policy(text).param_dtype


def test_names_to_keep_are_a_tuple_of_names() -> None:
    for names in ("scale", 3, (1,)):
        with pytest.raises(
            TypeError, match=r"Wrong.keep_params should be a tuple of names, but got"
        ):
            type("Wrong", (nnx.Module,), {"keep_params": names, "__module__": __name__})


def test_a_name_to_keep_that_no_parameter_has_warns() -> None:
    class Misspelt(nnx.Module):
        keep_params = ("scael",)

        def __init__(self) -> None:
            self.scale = nnx.Param(jnp.ones(4))

    with pytest.warns(DtypePolicyWarning, match="Misspelt.keep_params names scael.* It has: scale"):
        Misspelt()


def test_layers_and_their_subclasses_keep_their_parameters() -> None:
    class Mine(nnx.Linear):
        def kernel_dtype(self) -> Any:
            return self.kernel[...].dtype

    class Uses(nnx.Module):
        def __init__(self) -> None:
            self.layer = Mine(4, 4, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            assert (
                self.layer.kernel_dtype()
                == self.layer.kernel[...].dtype
                == self.layer.kernel.dtype
                == jnp.float32
            )
            return self.layer(x)

    model = Uses(dtype_policy="mixed_bfloat16")
    assert model(X).dtype == jnp.float32
    assert {op.inputs for op in named(operations(lambda x: model(x), X), "dot_general")} == {
        ("bfloat16",) * 2
    }


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


def test_a_parameter_that_was_handed_in_is_not_the_modules_to_cast() -> None:
    table = nnx.Param(jnp.ones((8, 4)))
    head = Head(table, dtype_policy="bfloat16")
    assert head.table is table and table.dtype == jnp.float32


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


# --- transformations ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["__call__", "jitted", "rematerialised", "vmap", "function"])
def test_copies_inside_of_transformations_read_in_half(how: str) -> None:
    def call(model: Any) -> Any:
        x = jnp.ones((300, 4))
        if how == "vmap":
            return nnx.vmap(lambda m, row: m(row[None])[0], in_axes=(None, 0))(model, x)
        return model.through(x) if how == "function" else getattr(model, how)(x)

    class More(Linear):
        def through(self, x: jax.Array) -> jax.Array:
            @nnx.jit
            def inner(m: Any, x: jax.Array) -> jax.Array:
                return x @ m.w + m.b[None]

            return inner(self, x)

    model = More(dtype_policy="mixed_bfloat16")
    ops = gradient_ops(model, call)
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16",) * 2}
    assert call(model).dtype == jnp.float32


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w, self.b = (
            nnx.Param(jax.random.normal(rngs.params(), (4, 4))),
            nnx.Param(jnp.zeros(4)),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.w + self.b[None])


class Stacked(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, remat: bool, position: bool) -> None:
        make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Block(rngs), in_axes=0, out_axes=0))
        self.blocks = make(rngs)
        self.remat, self.position = remat, nnx.Param(jnp.zeros((1, 4))) if position else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x if self.position is None else x + self.position
        step = nnx.remat(lambda block, x: block(x)) if self.remat else lambda block, x: block(x)
        return nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.blocks, x)


@pytest.mark.parametrize("position", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_modules_read_in_half_and_sum_in_float32(remat: bool, position: bool) -> None:
    model = Stacked(nnx.Rngs(0), remat, position, dtype_policy="mixed_bfloat16")
    ops = gradient_ops(model, lambda m: m(jnp.ones((300, 4))))
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16",) * 2}
    assert {op.outputs for op in named(ops, "reduce_sum") if op.is_backward} == {("float32",)}
    assert {leaf.dtype for leaf in jax.tree.leaves(flax_nnx.state(model, flax_nnx.Param))} == {
        jnp.dtype("float32")
    }


# --- state ----------------------------------------------------------------------------------------


class Busy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.dropout, self.norm = nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.scale, self.calls, self.count = (
            nnx.Param(jnp.ones((1, 4))),
            0,
            nnx.Variable(jnp.zeros((), int)),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        self.count[...] = self.count[...] + 1
        return self.dropout(self.norm(self.dropout(x @ self.w))) * self.scale


def test_state_and_random_streams_are_those_of_flax() -> None:
    x = jax.random.normal(jax.random.key(2), (16, 4))
    plain, half = (
        Busy(nnx.Rngs(0, dropout=1), dtype_policy=text) for text in (None, "mixed_bfloat16")
    )
    for call in (lambda m: m(x), flax_nnx.jit(lambda m: m(x))):
        np.testing.assert_array_equal(call(plain) == 0, call(half) == 0)
    for model in (plain, half):
        nnx.grad(lambda m: m(x).sum())(model)
    assert (plain.calls, int(plain.count[...])) == (half.calls, int(half.count[...])) == (3, 3)
    assert jax.tree.structure(flax_nnx.state(plain)) == jax.tree.structure(flax_nnx.state(half))
    np.testing.assert_allclose(plain.norm.mean[...], half.norm.mean[...], atol=1e-2)
    copied = copy.deepcopy(half)
    assert (copied.w[...] == half.w[...]).all() and type(copied.w) is flax_nnx.Param


class Lends(nnx.Module):
    """Hands out what it holds, and makes more of it."""

    def __init__(self) -> None:
        self.w, self.layer, self.count = (
            nnx.Param(jnp.ones((1, 4))),
            nnx.List([Linear()]),
            nnx.Variable(jnp.array(0)),
        )

    def child(self) -> Any:
        return {"layer": self.layer[0], "w": self.w}

    def function(self) -> Any:
        def call(x: jax.Array) -> jax.Array:
            self.count[...] += 1
            return x * self.w

        return call

    def parts(self) -> Any:
        return flax_nnx.split(self)

    def gradient(self, x: jax.Array) -> Any:
        return flax_nnx.grad(lambda m: m.layer[0](x).astype(jnp.float32).sum())(self)

    def adopt(self, other: Any) -> Any:
        self.other = other
        return other

    def forget(self) -> None:
        del self.count

    def __call__(self, x: jax.Array) -> jax.Array:
        if not hasattr(self, "new"):
            self.new, self.cache = Linear(), nnx.Cache(jnp.zeros(3))
            self.layer.append(self.new)
        self.cache = nnx.Cache(self.cache[...] + 1)
        return self.layer[1](x) * self.w


TRANSFORMS: Any = pytest.mark.parametrize(
    "wrap",
    [lambda f: f, lambda f: lambda m: flax_nnx.grad(lambda m: (f(m), m(X).sum())[1])(m)],
    ids=["eager", "grad"],
)


@TRANSFORMS
def test_a_method_returns_the_very_objects_that_a_module_holds(wrap: Any) -> None:
    def call(model: Any) -> None:
        found, other = model.child(), Linear()
        assert found["layer"] is model.layer[0] and found["w"] is model.w
        assert model.adopt(other) is other is model.other
        model.forget()
        assert not hasattr(model, "count")

    wrap(call)(Lends(dtype_policy="mixed_bfloat16"))


@TRANSFORMS
def test_what_a_call_makes_is_put_in_place(wrap: Any) -> None:
    def call(model: Any) -> None:
        for _ in range(2):
            assert model(X).shape == X.shape
        assert type(model.new) is Linear and model.layer[1] is model.new and len(model.layer) == 2
        assert (model.cache[...] == 2).all()

    wrap(call)(Lends(dtype_policy="mixed_bfloat16"))


def test_a_function_that_a_method_returns_holds_the_module_itself() -> None:
    model = Lends(dtype_policy="mixed_bfloat16")
    with pytest.warns(DtypePolicyWarning, match="Lends can't be traced, .*returns a function, "):
        call = model.function()
    model.w.set_value(jnp.full((1, 4), 3.0))
    assert call(X)[0, 0] == 3 and int(model.count[...]) == 1


def test_the_parts_of_a_module_are_those_seen_from_outside() -> None:
    model = Lends(dtype_policy="mixed_bfloat16")
    with pytest.warns(DtypePolicyWarning, match="Lends can't be traced, .*returns a GraphDef, "):
        assert model.parts()[0] == flax_nnx.split(model)[0]
    assert not [name for name in model.gradient(X)["w"].get_metadata() if name.startswith("policy")]
    assert not [
        name for name in flax_nnx.clone(model).w.get_metadata() if name.startswith("policy")
    ]


def test_abstract_models_and_states_hold() -> None:
    model = nnx.eval_shape(lambda: Table(dtype_policy="bfloat16"))
    assert model.table.get_value().dtype == jnp.bfloat16
    other = Table(dtype_policy="bfloat16")
    flax_nnx.update(other, flax_nnx.state(Table(dtype_policy="bfloat16")))
    assert (other.table.get_value() == 1).all()


def test_eager_code_that_needs_values_runs() -> None:
    class Eager(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((1, 4)))

        def __call__(self, x: jax.Array) -> jax.Array:
            y = x * self.w
            return y * 2 if float(y.astype(jnp.float32).sum()) > 0 else y

    model = Eager(dtype_policy="mixed_bfloat16")
    with pytest.warns(DtypePolicyWarning, match="Eager can't be traced at test_own_param") as told:
        assert model(X)[0, 0] == model(X)[0, 0] == 2
    assert len(told) == 1


def test_without_a_policy_the_program_is_flaxs() -> None:
    programs = []
    bases: Any = (nnx.Module, flax_nnx.Module)
    for module in bases:

        class Plain(module):
            def __init__(self) -> None:
                self.w = flax_nnx.Param(jnp.ones((4, 4)))

            def __call__(self, x: jax.Array) -> jax.Array:
                return x @ self.w

        loss, state = pure(Plain())
        programs.append(
            str(
                jax.make_jaxpr(jax.grad(lambda state, loss=loss: loss(lambda m: m(X), state)))(
                    state
                )
            )
        )
    assert programs[0] == programs[1]


def test_scopes_do_not_change_how_a_built_model_reads() -> None:
    model = Table()
    with (
        use_policy("mixed_bfloat16"),
        pytest.warns(DtypePolicyWarning, match="changes no nnx layer"),
    ):
        assert model(MANY).dtype == jnp.float32


def test_flaxs_parameters_have_what_is_hooked() -> None:
    """Reads pass through these two: a Flax that renames them must not pass unseen."""
    assert callable(flax_nnx.Variable.get_value) and callable(flax_nnx.Variable.__getattr__)

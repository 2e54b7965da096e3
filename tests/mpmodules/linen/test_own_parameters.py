"""Parameters of a user's linen modules: stored in param_dtype, float32 to their code, used in
compute_dtype, gradients summed in float32.
"""

from __future__ import annotations

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from mpmodules import linen as nn
from policy import DtypePolicyWarning, audit, use_policy
from tests.programs import apply, named, operations

KEY = jax.random.key(0)
ONES, NORMAL = nn.initializers.ones, nn.initializers.normal(1.0)
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


class Table(nn.Module):
    """A hand-written embedding, in setup style."""

    def setup(self) -> None:
        self.table = self.param("table", ONES, (8, 4))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.table[ids]

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class Linear(nn.Module):
    """A hand-written layer, in compact style."""

    note: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w, b = self.param("w", NORMAL, (4, 4)), self.param("b", NORMAL, (4,))
        if self.note is not None:
            self.note(w.dtype)
        return x @ w + b[None]


def total(model: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss of variables: the sum of what the model returns."""
    return lambda variables: apply(model, variables, *args, **kwargs).astype(jnp.float32).sum()


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", POLICIES)
def test_a_parameter_is_stored_used_and_differentiated_in_the_policys_dtypes(text: str) -> None:
    seen: list[Any] = []
    model, wanted = Linear(seen.append), policy.get_policy(text)
    with use_policy(text):
        variables = model.init(KEY, X)
        outputs, gradients = apply(model, variables, X), jax.grad(total(model, X))(variables)
        ops = named(operations(jax.grad(total(model, X)), variables), "dot_general")
    assert {leaf.dtype for leaf in jax.tree.leaves((variables, gradients))} == {wanted.param_dtype}
    assert set(seen) == {jnp.dtype("float32")} and len(seen) >= 3
    assert {op.inputs for op in ops} == {(wanted.compute_dtype.name,) * 2}
    assert outputs.dtype == wanted.output_dtype


def test_without_a_policy_a_parameter_is_as_stored() -> None:
    seen: list[Any] = []
    model = Linear(seen.append)
    variables = jax.tree.map(lambda a: a.astype(jnp.float16), model.init(KEY, X))
    apply(model, variables, X.astype(jnp.float16))
    assert seen == [jnp.float32, jnp.float16]


# --- sums of gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_embeddings_gradient_counts_4096_equal_ids(text: str, wrap: Any) -> None:
    with use_policy(text):
        variables = Table().init(KEY, MANY)
        gradient = wrap(jax.grad(total(Table(), MANY)))(variables)["params"]["table"]
    assert gradient[0, 0] == 4096 and gradient.dtype == policy.get_policy(text).param_dtype


class Uses(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        w = self.param("w", ONES, (4,))
        if self.how == "broadcast":
            return x + w[None]
        if self.how == "product":
            return x * w[None]
        if self.how == "quotient":
            return x / w[None]
        if self.how.startswith("scalar"):
            t = self.param("t", ONES, ())
            return {"scalar": x * t, "scalar quotient": x / t, "scalar sum": t - x}[self.how] * w[
                None
            ]
        if self.how == "repeated":
            return sum((x[i : i + 1] * w[None] for i in range(300)), jnp.zeros_like(x[:1]))
        if self.how == "concatenated":
            return x + jnp.concatenate([w[:2], w[2:]])[None]
        if self.how == "scan":
            return jax.lax.scan(lambda carry, row: (carry, row * w), 0, x)[1]
        if self.how == "cond":
            return jax.lax.cond(x[0, 0] > 0, lambda x: x * w[None], lambda x: x, x)
        if self.how == "checkpoint":
            return jax.checkpoint(lambda x, w: jnp.sin(x * w[None]))(x, w)
        if self.how == "jit":
            return jax.jit(lambda x, w: x * w[None])(x, w)
        return jax.vmap(lambda row: row * w)(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
@pytest.mark.parametrize("name", ["exp", "softplus", "reciprocal"])
@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_the_gradient_of_a_function_of_a_parameter_is_summed_in_float32(
    text: str, name: str, wrap: Any
) -> None:
    """The learned temperature of a contrastive loss: a bfloat16 sum stops at a quarter."""
    function = {"exp": jnp.exp, "softplus": nn.softplus, "reciprocal": lambda t: 1 / t}[name]

    class Temperature(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return x * wrap(function)(self.param("t", ONES, ()))

    x = jnp.ones((4096, 64))
    with use_policy(text):
        model = Temperature()
        variables = model.init(KEY, x)
        loss = lambda v: apply(model, v, x).astype(jnp.float32).mean()  # noqa: E731
        gradient = jax.grad(loss)(variables)["params"]["t"]
        sums = named(operations(jax.grad(loss), variables), "reduce_sum")
    assert not [op for op in sums if "bfloat16" in op.outputs]
    # a value, its derivative and the sum's terms are rounded to bfloat16, each by 2**-9 at most
    np.testing.assert_allclose(gradient, jax.grad(function)(1.0), rtol=2**-7)


@pytest.mark.parametrize(
    "how",
    [
        "broadcast",
        "product",
        "quotient",
        "scalar",
        "scalar quotient",
        "scalar sum",
        "repeated",
        "concatenated",
        "scan",
        "cond",
        "checkpoint",
        "jit",
        "vmap",
    ],
)
def test_gradients_of_many_uses_are_summed_in_float32(how: str) -> None:
    x = jnp.ones((1024, 4))
    with use_policy("mixed_bfloat16"):
        variables = Uses(how).init(KEY, x)
        ops = operations(jax.grad(total(Uses(how), x)), variables)
        gradient = jax.grad(total(Uses(how), x))(variables)["params"]["w"]
    exact = jax.grad(total(Uses(how), x))(variables)["params"]["w"]
    np.testing.assert_allclose(
        gradient, exact, rtol=2**-7
    )  # one rounding of each contribution, none of the sum
    sums = named(ops, "reduce_sum", "scatter-add", "add_any")
    assert not [op for op in sums if op.is_backward and "bfloat16" in op.outputs]


def test_what_only_reads_parameters_stays_as_an_author_writes_it() -> None:
    with use_policy("mixed_bfloat16"):
        variables = Linear().init(KEY, X)
        report = audit(jax.grad(total(Linear(), X)), variables)
    assert report.findings == ()


@pytest.mark.parametrize(
    "transform", ["vmap", "jvp", "linearize", "hessian", "checkpoint", "value_and_grad"]
)
def test_jaxs_transformations_hold(transform: str) -> None:
    ids, model = jnp.arange(6).reshape(2, 3), Table()
    with use_policy("mixed_bfloat16"):
        variables = model.init(KEY, ids)

        def loss(variables: Any, ids: jax.Array = ids) -> jax.Array:
            return jnp.square(apply(model, variables, ids).astype(jnp.float32)).sum()

        gradient = jax.grad(loss)(variables)["params"]["table"]
        if transform == "vmap":
            found = jax.vmap(jax.grad(loss), (None, 0))(variables, ids)["params"]["table"].sum(0)
        elif transform == "jvp":
            found = jax.jvp(jax.grad(loss), (variables,), (variables,))[1]["params"][
                "table"
            ]  # linear in the table
        elif transform == "linearize":
            found = jax.linear_transpose(jax.linearize(loss, variables)[1], variables)(1.0)[0][
                "params"
            ]["table"]
        elif transform == "hessian":
            found = jax.hessian(loss)(variables)["params"]["table"]["params"]["table"].sum((2, 3))
        elif transform == "checkpoint":
            found = jax.jit(jax.grad(jax.checkpoint(loss)))(variables)["params"]["table"]
        else:
            found = policy.value_and_grad(loss)(variables)[1]["params"]["table"]
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, gradient)


# --- lifted, shared and tied ----------------------------------------------------------------------


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return jnp.tanh(
            x @ self.param("w", NORMAL, (4, 4)) + self.param("b", NORMAL, (4,))[None]
        ), None


class Stacked(nn.Module):
    how: str
    position: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.position:
            x = x + self.param("position", NORMAL, (1, 4))
        cls: Any = Block
        if "remat" in self.how:
            cls = nn.remat(cls)
        if "scan" in self.how:
            cls = nn.scan(cls, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        if "vmap" in self.how:
            axes: Any = None
            cls = nn.vmap(
                cls,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=axes,
                axis_size=3,
            )
        if "jit" in self.how:
            cls = nn.jit(cls)
        return cls()(x, None)[0]


@pytest.mark.parametrize("position", [False, True])
@pytest.mark.parametrize("how", ["remat", "scan", "scan remat", "vmap", "jit"])
def test_lifted_modules_read_in_half_and_sum_in_float32(how: str, position: bool) -> None:
    model, x = Stacked(how, position), jnp.ones((300, 4))
    with use_policy("mixed_bfloat16"):
        variables = model.init(KEY, x)
        ops = operations(jax.grad(total(model, x)), variables)
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16", "bfloat16")}
    assert {op.outputs for op in named(ops, "reduce_sum") if op.is_backward} == {("float32",)}
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}


class Head(nn.Module):
    table: Table

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.table.table.T


class Tied(nn.Module):
    def setup(self) -> None:
        self.words = Table()
        self.head = Head(self.words)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.words(ids)
        return self.head(x) + self.words.attend(x).astype(self.head(x).dtype)


@pytest.mark.parametrize(("rule", "dtype"), [("f32", "float32"), ("mixed_bfloat16", "bfloat16")])
def test_a_tied_parameter_follows_its_reader(rule: str, dtype: str) -> None:
    model: Any = Tied()
    with use_policy("mixed_bfloat16", {"head": rule}):
        variables = model.init(KEY, MANY)
        gradient = jax.grad(lambda v: apply(model, v, MANY).sum())(variables)["params"]["words"][
            "table"
        ]
        dots = named(operations(model.apply, variables, MANY), "dot_general")
    assert [op.inputs for op in dots] == [(dtype,) * 2, ("bfloat16",) * 2, (dtype,) * 2]
    # 4096 rows of ones through two heads of 8 outputs: 2 x 8 x 4096 in the row that is looked up, 2
    # x 4096 in each row.
    np.testing.assert_array_equal(gradient[:, 0], [4096 * 18] + [4096 * 2] * 7)


# --- what stays as it is stored -------------------------------------------------------------------


class Kept(nn.Module):
    keep_params = ("scale",)
    note: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        boxed: Any = nn.with_partitioning(ONES, (None,))
        read = {
            "scale": self.param("scale", ONES, (4,)),
            "asked": self.param("asked", ONES, (4,), compute_dtype=jnp.float32),
            "boxed": self.param("boxed", boxed, (4,), unbox=False).value,  # type: ignore[attr-defined]
            "unboxed": self.param("unboxed", boxed, (4,)),
            "integers": self.param("integers", lambda key: jnp.arange(3)),
            "complex": self.param("complex", lambda key: jnp.ones(3, jnp.complex64)),
            "key": self.param("key", lambda key: key),
            "tree": self.param("tree", lambda key: {"a": jnp.ones(2)})["a"],
            "variable": self.variable("stats", "v", jnp.ones, 3).value,
            "in variables": self.variables["params"]["tree"]["a"],
            "got": self.get_variable("params", "tree")["a"],
        }
        self.note({name: str(value.dtype) for name, value in read.items()})
        return x


@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_all_floats_are_float32_to_the_code_and_others_as_stored(text: str) -> None:
    seen: list[Any] = []
    model, stored = Kept(seen.append), str(policy.get_policy(text).param_dtype)
    with use_policy(text):
        variables: Any = model.init(KEY, X)
        jax.eval_shape(jax.grad(lambda x: apply(model, variables, x).sum()), X)
    others = {"integers": "int32", "complex": "complex64", "key": "key<fry>"}
    floats = dict.fromkeys(seen[0].keys() - others.keys(), "float32")
    assert len(seen) >= 2
    for each in seen[1:]:
        assert each == floats | others
    made = dict.fromkeys(("boxed", "in variables", "got"), stored)  # which init has just made
    assert seen[0] == floats | others | made
    assert variables["params"]["scale"].dtype == jnp.float32
    assert (
        variables["params"]["asked"].dtype == variables["params"]["unboxed"].value.dtype == stored
    )


class Against(nn.Module):
    """Multiplies rounded activations by its parameters."""

    keep_params = ("kept",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(4)(x)
        for name, options in READ.items():
            x = x * self.param(name, ONES, (1, 4), **options)  # pyright: ignore
        return x


READ: dict[str, Any] = {
    "plain": {},
    "kept": {},
    "float32": {"compute_dtype": jnp.float32},
}


@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_a_kept_parameter_and_one_asked_for_in_float32_hold_against_activations(text: str) -> None:
    with use_policy(text):
        variables: Any = Against().init(KEY, X)
        ops = named(operations(Against().apply, variables, X), "mul")
    assert [op.outputs[0] for op in ops] == ["bfloat16", "float32", "float32"]
    assert variables["params"]["kept"].dtype == jnp.float32


def test_names_to_keep_are_a_tuple_of_names() -> None:
    for names in ("scale", 3, (1,)):
        with pytest.raises(
            TypeError, match=r"Wrong.keep_params should be a tuple of names, but got"
        ):
            type("Wrong", (nn.Module,), {"keep_params": names, "__module__": __name__})


def test_a_name_to_keep_that_no_parameter_has_warns() -> None:
    class Misspelt(nn.Module):
        keep_params = ("scael",)

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.param("scale", ONES, (1, 4))

    with pytest.warns(DtypePolicyWarning, match="Misspelt.keep_params names scael.* It has: scale"):
        Misspelt().init(KEY, X)


def test_a_read_outside_of_a_call_is_as_stored() -> None:
    with use_policy("mixed_bfloat16"):
        bound: Any = Table().bind(Table().init(KEY, MANY))
        assert bound.table.dtype == jnp.float32
        assert bound(MANY).dtype == jnp.float32  # the output_dtype, of bfloat16 rows
        assert bound.table.dtype == jnp.float32
    with pytest.raises(AttributeError, match="no attribute"):
        _ = bound.tabel


def test_a_rule_keeps_a_module_in_float32() -> None:
    seen: list[Any] = []
    model = Linear(seen.append)
    with use_policy("mixed_bfloat16", {"": "f32"}):
        jax.eval_shape(jax.grad(total(model, X)), model.init(KEY, X))
    assert set(seen) == {jnp.dtype("float32")}


def test_layers_and_their_subclasses_keep_their_parameters() -> None:
    class Mine(nn.Dense):
        @nn.compact
        def __call__(self, inputs: jax.Array) -> jax.Array:
            scale = self.param("scale", ONES, (4,))
            seen.append(scale.dtype)
            return super().__call__(inputs)

    seen: list[Any] = []
    with use_policy("mixed_bfloat16"):
        variables = Mine(4).init(KEY, X)
        jax.eval_shape(jax.grad(total(Mine(4), X)), variables)
    assert set(seen) == {jnp.dtype("float32")}


# --- the call -------------------------------------------------------------------------------------


class Busy(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dropout(0.5, deterministic=False)(x @ self.param("w", NORMAL, (4, 4)))
        x = nn.BatchNorm(use_running_average=False)(x)
        self.sow("intermediates", "hidden", x)
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(3)(x)) * self.param(
            "scale", ONES, (1, 3)
        )


def test_state_random_streams_and_intermediates_are_those_of_flax() -> None:
    x = jax.random.normal(jax.random.key(2), (16, 4))
    model, keys = Busy(), {"params": KEY, "dropout": jax.random.key(1)}
    variables = model.init(keys, x)
    call: Any = jax.jit(
        lambda v, policy_text: _busy(model, v, x, policy_text),
        static_argnums=1,
    )
    plain, (half, state) = call(variables, None), call(variables, "mixed_bfloat16")
    np.testing.assert_array_equal(plain[0] == 0, half == 0)  # the same dropout
    assert jax.tree.structure(plain[1]) == jax.tree.structure(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(state["batch_stats"])} == {jnp.dtype("float32")}
    names = [
        path[-2].key for path, _ in jax.tree_util.tree_leaves_with_path(state["intermediates"])
    ]
    assert sorted(names) == sorted(["hidden", *["__call__"] * 5])  # each call is captured once


def _busy(model: Any, variables: Any, x: jax.Array, policy_text: str | None) -> Any:
    with use_policy(policy_text):
        return model.apply(
            variables,
            x,
            rngs={"dropout": jax.random.key(5)},
            mutable=["batch_stats", "intermediates"],
            capture_intermediates=True,
        )


def test_eager_code_that_needs_values_runs() -> None:
    class Eager(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y = x * self.param("w", ONES, (1, 4))
            return y * 2 if float(np.asarray(y.astype(jnp.float32)).sum()) > 0 else y

    with use_policy("mixed_bfloat16"):
        variables = Eager().init(KEY, X)
        with pytest.warns(
            DtypePolicyWarning, match="Eager can't be traced at test_own_param"
        ) as told:
            assert apply(Eager(), variables, X)[0, 0] == apply(Eager(), variables, X)[0, 0] == 2
        assert len(told) == 1
        with pytest.raises(jax.errors.TracerArrayConversionError):
            jax.jit(Eager().apply)(variables, X)


def test_what_a_call_returns_may_be_no_array() -> None:
    class Returns(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return {"x": x * self.param("w", ONES, (1, 4)), "name": "x", "none": None, "n": 3}

    with use_policy("mixed_bfloat16"):
        variables = Returns().init(KEY, X)
        found: Any = {}

        def loss(variables: Any) -> jax.Array:
            found.update(apply(Returns(), variables, X))
            return found["x"].sum()

        jax.grad(loss)(variables)
    assert (found["name"], found["none"], found["n"]) == ("x", None, 3)


def test_an_object_that_holds_arrays_is_returned_too() -> None:
    class Holder:
        def __init__(self, x: jax.Array):
            self.x = x

    class Returns(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Holder:
            return Holder(x * self.param("w", ONES, (1, 4)))

    with use_policy("mixed_bfloat16"):
        variables = Returns().init(KEY, X)
        with pytest.warns(
            DtypePolicyWarning, match="Returns can't be traced, because its code ret"
        ):
            gradient = jax.grad(lambda v: apply(Returns(), v, X).x.astype(jnp.float32).sum())(
                variables
            )
    assert gradient["params"]["w"][0, 0] == 2


class Outer(nn.Module):
    """Reads the parameter of a module that it holds, and has none itself."""

    def setup(self) -> None:
        self.words = Table()

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.words.table[ids]


def test_a_parameter_that_only_another_module_reads_sums_in_float32() -> None:
    with use_policy("mixed_bfloat16"):
        variables = Outer().init(KEY, MANY)
        gradient = jax.grad(total(Outer(), MANY))(variables)["params"]["words"]["table"]
    assert gradient[0, 0] == 4096


class Lends(nn.Module):
    def setup(self) -> None:
        self.dense, self.scale = nn.Dense(4), self.param("scale", ONES, (1, 4))

    def layer(self) -> nn.Module:
        return self.dense

    def function(self) -> Any:
        scale = self.scale
        return lambda x: self.dense(x) * scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x) * self.scale


class Borrows(nn.Module):
    how: str

    def setup(self) -> None:
        self.lends = Lends()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.lends(x) + getattr(self.lends, self.how)()(x)


@pytest.mark.parametrize("how", ["layer", "function"])
def test_a_method_may_return_a_module_or_a_function(how: str) -> None:
    with use_policy("mixed_bfloat16"):
        variables = Borrows(how).init(KEY, X)
        gradient = jax.grad(total(Borrows(how), X))(variables)["params"]["lends"]
    assert (gradient["dense"]["bias"] == 4).all() and gradient["scale"].dtype == jnp.float32


def test_an_interceptor_sees_each_call_once() -> None:
    seen: list[Any] = []

    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append((type(context.module).__name__, context.method_name, sorted(kwargs)))
        return call(*args, **kwargs)

    with use_policy("mixed_bfloat16"):
        variables = Borrows("layer").init(KEY, X)
        with flax_nn.intercept_methods(intercept):
            jax.grad(lambda v: apply(Lends(), v, x=X).sum())(
                {"params": variables["params"]["lends"]}
            )
    assert seen == [("Lends", "setup", []), ("Lends", "__call__", ["x"]), ("Dense", "__call__", [])]


def test_a_ported_model_of_ours_reads_in_the_policys_dtype() -> None:
    model = nn.apply_policy(Linear(), "mixed_bfloat16")
    variables = model.init(KEY, X)
    ops = operations(jax.grad(total(model, X)), variables)
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16", "bfloat16")}


def test_the_methods_through_which_flax_runs_others_are_there() -> None:
    """`_call_wrapped_method` is where a call is traced: a Flax that renames it must not pass
    unseen.
    """
    assert callable(flax_nn.Module._call_wrapped_method)  # type: ignore[attr-defined]
    assert callable(flax_nn.Module.__getattr__) and callable(flax_nn.Module.param)

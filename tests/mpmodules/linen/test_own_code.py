"""A user's own code in linen modules, and their parameters: entries, lifted classes, variables."""

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from mpmodules import linen as nn
from policy import audit, use_policy
from tests.mpmodules.apis import KEY, MIXED, NORMAL, X, compact
from tests.mpmodules.own_code_models import Layers, Net, Projection
from tests.programs import apply, named, operations

TOKENS = jnp.arange(16).reshape(2, 8)
TOKEN_VECTORS = jax.random.normal(jax.random.key(1), (2, 8, 16))


def share(model: Any, x: Any = TOKEN_VECTORS, **options: Any) -> float:
    """Returns the share of a port's float32 matmuls, forward."""
    variables = jax.eval_shape(lambda: model.init(KEY, x, **options))
    return audit(lambda v: model.apply(v, x, **options), variables).f32_matmul_share


def scans(x: jax.Array) -> jax.Array:
    """Scans over a cell of Flax's, and multiplies by itself."""
    axes: Any = {"in_axes": 1, "out_axes": 1, "split_rngs": {"params": False}}
    cell = flax_nn.scan(flax_nn.GRUCell, variable_broadcast="params", **axes)(16)
    carry, y = cell(cell.initialize_carry(KEY, x[:, 0].shape), x)
    return Projection(4)(y + carry[:, None])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "carry"), [(Layers(), "bfloat16"), (compact(scans, flax_nn)(), "float32")]
)
def test_a_scan_of_layers_hands_on_half_and_a_cell_keeps_its_carry(model, carry):
    port = nn.apply_policy(model, MIXED)
    with jax.numpy_dtype_promotion("standard"):
        variables = jax.eval_shape(port.init, KEY, TOKEN_VECTORS)
        equations = jax.make_jaxpr(port.apply)(variables, TOKEN_VECTORS).eqns
        assert share(port) == 0
    scan: Any = next(e for e in equations if e.primitive.name == "scan")
    assert scan.outvars[0].aval.dtype == carry


@pytest.mark.slow
def test_other_entries_bound_and_inside_of_another_model():
    model = nn.apply_policy(Net(), MIXED)
    for method in ("hidden", Net.hidden, lambda net, x: net.block(x)[0]):
        assert share(model, method=method) == 0
    assert share(flax_nn.Sequential([model]), TOKENS) == 0
    variables = jax.eval_shape(Net().init, KEY, TOKENS)
    assert audit(lambda v: model.bind(v)(TOKENS), variables).f32_matmul_share == 0


ROWS = jnp.ones((2, 4))
MANY = jnp.zeros(4096, int)


class Table(nn.Module):
    """A hand-written embedding, in setup style."""

    def setup(self) -> None:
        self.table = self.param("table", nn.initializers.ones, (8, 4))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.table[ids]

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


def total(model: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss of variables: the sum of what the model returns."""
    return lambda variables: apply(model, variables, *args, **kwargs).astype(jnp.float32).sum()


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


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(("rule", "dtype"), [("f32", "float32"), ("mixed_bfloat16", "bfloat16")])
def test_a_tied_parameter_follows_its_reader(rule: str, dtype: str) -> None:
    model: Any = Tied()
    with use_policy("mixed_bfloat16", {"head": rule}):
        variables = model.init(KEY, MANY)
        gradients: Any = jax.grad(total(model, MANY))(variables)
        dots = named(operations(model.apply, variables, MANY), "dot_general")
    assert [op.inputs for op in dots] == [(dtype,) * 2, ("bfloat16",) * 2, (dtype,) * 2]
    # 4096 rows of ones through two heads of 8 outputs: 2 x 8 x 4096 in the row that is looked up, 2
    # x 4096 in each row.
    table = gradients["params"]["words"]["table"]
    np.testing.assert_array_equal(table[:, 0], [4096 * 18] + [4096 * 2] * 7)


class Kept(nn.Module):
    keep_params = ("scale",)
    note: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        boxed: Any = nn.with_partitioning(nn.initializers.ones, (None,))
        read = {
            "scale": self.param("scale", nn.initializers.ones, (4,)),
            "asked": self.param("asked", nn.initializers.ones, (4,), compute_dtype=jnp.float32),
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


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_all_floats_are_float32_to_the_code_and_others_as_stored(text: str) -> None:
    seen: list[Any] = []
    model, stored = Kept(seen.append), str(policy.get_policy(text).param_dtype)
    with use_policy(text):
        variables: Any = model.init(KEY, ROWS)
        jax.eval_shape(jax.grad(lambda x: apply(model, variables, x).sum()), ROWS)
    others = {"integers": "int32", "complex": "complex64", "key": "key<fry>"}
    floats = dict.fromkeys(seen[0].keys() - others.keys(), "float32")
    assert len(seen) >= 2
    for each in seen[1:]:
        assert each == floats | others
    made = dict.fromkeys(("boxed", "in variables", "got"), stored)  # which init has just made
    assert seen[0] == floats | others | made
    assert variables["params"]["scale"].dtype == jnp.float32
    assert variables["params"]["asked"].dtype == stored
    assert variables["params"]["unboxed"].value.dtype == stored


def test_a_read_outside_of_a_call_is_as_stored() -> None:
    with use_policy("mixed_bfloat16"):
        bound: Any = Table().bind(Table().init(KEY, MANY))
        assert bound.table.dtype == jnp.float32
        assert bound(MANY).dtype == jnp.float32  # the output_dtype, of bfloat16 rows
        assert bound.table.dtype == jnp.float32
    with pytest.raises(AttributeError, match="no attribute"):
        _ = bound.tabel


class Lends(nn.Module):
    def setup(self) -> None:
        self.dense, self.scale = nn.Dense(4), self.param("scale", nn.initializers.ones, (1, 4))

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


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("how", ["layer", "function"])
def test_a_method_may_return_a_module_or_a_function(how: str) -> None:
    with use_policy("mixed_bfloat16"):
        variables = Borrows(how).init(KEY, ROWS)
        gradient = jax.grad(total(Borrows(how), ROWS))(variables)["params"]["lends"]
    assert (gradient["dense"]["bias"] == 4).all() and gradient["scale"].dtype == jnp.float32


HALF = ("bfloat16", "bfloat16")


def block(nn: Any) -> Any:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            w, b = self.param("w", NORMAL, (4, 4)), self.param("b", NORMAL, (4,))
            return nn.Dense(4)(nn.LayerNorm()(x) @ w + jnp.broadcast_to(b, x.shape)), None

        def twice(self, x):
            return self(self(x)[0])[0]

    return Block


EACH: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
LIFTS: dict[str, Any] = {
    "jit": nn.jit,
    "remat": nn.remat,
    "scan": lambda cls: nn.scan(cls, length=2, **EACH),
    "vmap": lambda cls: nn.vmap(cls, in_axes=0, **EACH),
    "remat scan": lambda cls: LIFTS["scan"](nn.remat(cls)),
}


def lifted(nn: Any, how: str, where: str) -> Any:
    """Returns a lifted class, or one that has a module of it and a parameter before it."""

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x, *args):
            x = x * 2 + self.param("position", NORMAL, (1, 4))
            return LIFTS[how](block(nn))(name="block")(x, *args)

    return Outer if where == "inside" else LIFTS[how](block(nn))


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("how", LIFTS)
@pytest.mark.parametrize("where", ["outermost", "inside"])
@pytest.mark.parametrize("way", ["ours", "port"])
def test_lifted_classes_multiply_in_half_and_sum_gradients_in_float32(way, how, where):
    plain = lifted(flax_nn, how, where)()
    args = (jnp.tile(X, (2, 1)),) if how == "vmap" else (jnp.tile(X, (2, 1)), None)
    variables = plain.init(KEY, *args)
    ours = lambda: lifted(nn, how, where)(dtype_policy=MIXED)  # noqa: E731
    model = ours() if way == "ours" else nn.apply_policy(plain, MIXED)

    def loss(variables, model=model):
        return apply(model, variables, *args)[0].astype(jnp.float32).sum()

    ops = operations(jax.grad(loss), variables)
    assert {op.inputs for op in named(ops, "dot_general")} == {HALF}
    sums = {op.outputs for op in named(ops, "reduce_sum") if op.is_backward}
    assert sums == {("float32",)} or (how == "vmap" and where == "outermost" and not sums)
    out, truth = (apply(each, variables, *args)[0] for each in (model, plain))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, truth, atol=0.05 * float(jnp.abs(truth).max()))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("how", ["jit", "remat"])
def test_lifted_methods(how):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            cls = block(nn)
            return getattr(nn, how)(cls.twice)(cls(), x)

    model: Any = Outer(dtype_policy=MIXED)
    dots = named(operations(model.apply, model.init(KEY, X), X), "dot_general")
    assert len(dots) == 4 and {op.inputs for op in dots} == {HALF}


def fresh_cache(nn: Any, how: str, where: str) -> Any:
    """Attention's cache without a cast, in a module or in one inside of it."""

    class Writes(nn.Module):
        def setup(self):
            if "setup" in where:
                self.made = self.made_there()

        def made_there(self):
            return self.variable("cache", "keys", jnp.zeros, (8, 4), jnp.bfloat16)

        @nn.compact
        def __call__(self, x, _=None):
            cache = self.made if "setup" in where else self.made_there()
            index = self.variable("cache", "index", lambda: jnp.array(0))
            key = self.param("key", nn.initializers.ones, (4, 4))
            for _ in range(2):
                if how == "slice":
                    update = jax.lax.dynamic_update_slice
                    cache.value = update(cache.value, x @ key, (index.value, 0))
                else:
                    cache.value = cache.value.at[index.value].set((x @ key)[0])
                index.value = index.value + 1
            return x + cache.value.sum(0, keepdims=True), None

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            if where == "scan":
                axes = {"params": 0, "cache": 0}
                return nn.scan(Writes, axes, split_rngs={"params": True}, length=2)()(x, None)
            return nn.LayerNorm()(Writes()(x)[0]), None

    return Outer() if where == "scan" or "inside" in where else Writes()


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("where", ["alone", "inside", "setup", "inside, setup", "scan"])
@pytest.mark.parametrize("api", ["ours", "port"])
@pytest.mark.parametrize("how", ["slice", "at"])
def test_a_fresh_cache_in_half_may_be_written_with_what_the_code_computes(how, api, where):
    if api == "ours":
        model = fresh_cache(nn, how, where).clone(dtype_policy=MIXED)
    else:
        model = nn.apply_policy(fresh_cache(flax_nn, how, where), MIXED)
    variables = model.init(KEY, X[:1])
    _, fresh = model.apply({"params": variables["params"]}, X[:1], mutable=["cache"])
    (out, _), state = model.apply(variables, X[:1], mutable=["cache"])
    structures = [
        jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), tree)
        for tree in (variables["cache"], fresh["cache"], state["cache"])
    ]
    assert structures[0] == structures[1] == structures[2] and out.dtype == jnp.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(fresh)} == {"bfloat16", "int32"}
    jax.tree.map(np.testing.assert_array_equal, fresh["cache"], variables["cache"])


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("api", [nn, flax_nn], ids=["ours", "a port"])
def test_a_logical_constraint_shards_what_compute_dtype_has(api: Any) -> None:
    class Model(api.Module):
        @api.compact
        def __call__(self, x):
            x = api.with_logical_constraint(api.Dense(16)(x), ("batch", "time", "width"))
            positions = self.param("positions", api.initializers.normal(), (1, *x.shape[1:]))
            return api.with_logical_constraint(x + positions, ("batch", "time", "width"))

    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    model = nn.apply_policy(Model(), MIXED) if api is flax_nn else Model(dtype_policy=MIXED)
    variables = model.init(KEY, TOKEN_VECTORS)
    rules = (("batch", "data"), ("time", None), ("width", None))
    with jax.set_mesh(mesh), flax_nn.logical_axis_rules(rules):
        found = operations(lambda v: model.apply(v, TOKEN_VECTORS), variables)
    constraints = named(found, "sharding_constraint")
    assert [operation.outputs for operation in constraints] == [("bfloat16",)] * 2

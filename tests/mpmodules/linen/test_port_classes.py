"""The class that a port makes: constructor, state and methods are those of the model's. Parameters
of modules inside of it that are no layers.
"""

import copy
import dataclasses
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_nn
from policy import current_policy, use_policy
from tests.mpmodules.apis import KEY, MIXED, compact, dtypes
from tests.programs import apply, boundary_casts, named, operations

apply_policy = our_nn.apply_policy
X = jnp.ones((2, 4))


def matmul_dtypes(model: Any, *args: Any, **kwargs: Any) -> set[str]:
    """Dtypes of the operands of every matmul that `model.apply` runs, with variables from
    `model.init`.
    """
    variables = jax.eval_shape(functools.partial(model.init, **kwargs), KEY, *args)
    ops = operations(lambda v, *args: apply(model, v, *args, **kwargs), variables, *args)
    dots = named(ops, "dot_general")
    assert dots
    return {dtype for op in dots for dtype in op.inputs}


def registered(cls: Any) -> Any:
    """Replaces a class's generated constructor by one that keeps a config beside the fields, as
    diffusers does.
    """
    constructor = cls.__init__

    @functools.wraps(constructor)
    def init(self, *args, **kwargs):
        names = [field.name for field in dataclasses.fields(self)]
        fields = [name for name in names if name not in ("name", "parent", "dtype")]
        config = {name: getattr(self, name, None) for name in fields}
        config |= dict(zip(fields, args, strict=False))
        self.register(**config | {name: value for name, value in kwargs.items() if name in config})
        constructor(self, *args, **kwargs)

    cls.__init__ = init
    return cls


class Configured:
    """A mixin, as the one that holds a model's config."""

    def register(self, **config: Any) -> None:
        self._config = {**getattr(self, "_config", {}), **config}

    @property
    def config(self) -> dict[str, Any]:
        return self._config


@registered
class Registered(nn.Module, Configured):
    width: int = 3
    depth: int = 1

    def setup(self):
        self.layers = [nn.Dense(self.config["width"]) for _ in range(self.config["depth"])]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Written(nn.Module):
    """A module with a constructor of its own."""

    width: int

    def __init__(self, width: int, name: str | None = None, parent: Any = None):
        self.width, self.name, self.parent = width, name, parent
        object.__setattr__(self, "twice", 2 * width)
        self.__post_init__()

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.twice)(x)


def test_a_constructor_that_is_wrapped_or_written_is_kept_and_runs():
    ported = apply_policy(Registered(5, depth=2), MIXED)
    assert ported.config == {"width": 5, "depth": 2}
    assert ported.clone(width=6).config == {"width": 6, "depth": 2}
    assert jax.eval_shape(lambda: ported.init_with_output(KEY, X)[0]).shape == (2, 5)
    assert matmul_dtypes(ported, X) == {"bfloat16"}
    written = apply_policy(Written(3), MIXED)
    assert written.twice == 6 and written == apply_policy(Written(3), MIXED)
    assert matmul_dtypes(written, X) == {"bfloat16"}


def test_state_added_after_construction_is_there_on_the_port_and_its_copies():
    model = Registered(5)
    model.register(_class_name="Registered")
    ported = apply_policy(model, MIXED)
    copies = copy.copy(ported), copy.deepcopy(ported), pickle.loads(pickle.dumps(ported))
    for port in (ported, apply_policy(ported, "float32"), *copies):
        assert port.config == model.config == {"width": 5, "depth": 1, "_class_name": "Registered"}
    fresh = apply_policy(Registered(5), MIXED)
    assert ported == fresh and hash(ported) == hash(fresh)


class ByWidth(nn.Module):
    """A module with an equality of its own."""

    width: int = 3
    note: Any = None

    def __eq__(self, other):
        return isinstance(other, ByWidth) and self.width == other.width

    def __hash__(self):
        return hash(self.width)


def test_an_equality_and_a_hash_of_the_classs_own_are_kept():
    one, two = (apply_policy(ByWidth(note=note), MIXED) for note in ([1], [2]))
    assert one == two and hash(one) == hash(two) == hash(ByWidth())


class Encodes:
    """A mixin that is no module: Flax does not wrap its methods."""

    layer: Any

    def encode(self, x):
        return self.layer(x)


class Base(nn.Module, Encodes):
    def setup(self):
        self.layer = nn.Dense(4)

    def __call__(self, x):
        x = self.layer(x)
        return self.message(x) if type(self).message is not Base.message else x

    def message(self, x):
        raise NotImplementedError

    @nn.compact_name_scope
    def named(self, x):
        return nn.Dense(4)(x)

    @nn.remat
    def saved(self, x):
        return self.layer(x)

    def _private(self, x):
        return self.layer(x)


class Plain(Base):
    pass


class Overriding(Base):
    def message(self, x):
        return 2 * x


OF_A_LAYER = ("__call__", "setup", "apply", "init", "bind", "tabulate")
METHODS = (*OF_A_LAYER, "encode", "message", "named", "saved", "_private")
MODELS = [(model, METHODS) for model in (Base(), Plain(), Overriding(), nn.remat(Base)())]
MODELS += [(nn.Dense(3), OF_A_LAYER), (our_nn.Dense(3), OF_A_LAYER)]


@pytest.mark.parametrize(("model", "names"), MODELS)
def test_the_methods_of_a_ports_class_are_those_of_the_models_class(model, names):
    for name in names:
        assert getattr(type(apply_policy(model, MIXED)), name) is getattr(type(model), name)


def test_a_model_that_asks_for_overrides_runs_as_it_did():
    ported = apply_policy(Overriding(), MIXED)
    variables = ported.init(KEY, X)
    assert named(operations(ported.apply, variables, X), "mul")


class Encoder(nn.Module):
    @nn.compact
    def encode(self, x, scale=1):
        return scale * nn.Dense(3, name="layer")(x)


class Wider(Encoder):
    def encode(self, x, scale=1):
        return super().encode(x, scale)


ENTRIES: dict[str, tuple[Any, Any]] = {
    "by name": (Plain(), "encode"),
    "a mixin's function": (Plain(), Encodes.encode),
    "a base's function": (Plain(), Base.encode),
    "a compact name scope": (Plain(), "named"),
    "a transformed method": (Plain(), "saved"),
    "a transformed function": (Plain(), Base.saved),
    "own": (Wider(), Wider.encode),
    "of a base that it overrides": (Wider(), Encoder.encode),
    "partial": (Wider(), functools.partial(Wider.encode, scale=2)),
    "in a function": (Wider(), lambda module, x: Encoder.encode(module, x)),
}


@pytest.mark.cases(fast=1, slow=6)
@pytest.mark.parametrize(("model", "method"), ENTRIES.values(), ids=ENTRIES)
def test_a_method_however_it_is_given_is_a_boundary(model, method):
    ported = apply_policy(model, MIXED)
    assert matmul_dtypes(ported, X, method=method) == {"bfloat16"}
    variables = jax.eval_shape(functools.partial(ported.init, method=method), KEY, X)
    casts = boundary_casts(operations(lambda v: apply(ported, v, X, method=method), variables))
    assert casts[-1].outputs == ("float32",) and len(casts) <= 2


def test_a_public_method_of_an_unbound_port_may_initialize_it():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

        def init_weights(self, key):
            return self.init(key, X)["params"]

    (leaf, *_) = jax.tree.leaves(jax.eval_shape(apply_policy(Model(), "bf16").init_weights, KEY))
    assert leaf.dtype == jnp.bfloat16


class Adapter(nn.Dense):
    """A subclass of a Flax layer that asks what was overridden."""

    def __call__(self, inputs):
        assert type(self).rank is Adapter.rank and type(self).__call__ is Adapter.__call__
        assert type(self).setup is nn.Dense.setup
        return self.rank(super().__call__(inputs))

    def rank(self, x):
        return x


@registered
class RegisteredDense(nn.Dense, Configured):
    @nn.remat
    @nn.compact
    def __call__(self, inputs):  # the transform calls it on a clone
        assert self.config["features"] == self.features
        return nn.Dense(self.features, name="inner")(inputs)


@pytest.mark.parametrize("layer", [Adapter(3), RegisteredDense(3)])
def test_a_users_subclass_of_a_layer_keeps_its_methods_and_its_constructor(layer):
    for model in (layer, nn.Sequential([layer])):
        ported = apply_policy(model, MIXED)
        assert matmul_dtypes(ported, X) == {"bfloat16"}
        assert jax.eval_shape(lambda p=ported: p.init_with_output(KEY, X)[0]).dtype == jnp.float32


@pytest.mark.slow
def test_ports_that_differ_in_an_option_share_no_trace():
    class Block(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, dtype=jnp.float16)(x)

    Net = compact(lambda x: Block()(x), nn)
    assert matmul_dtypes(apply_policy(Net(), "bf16"), X) == {"bfloat16"}
    with pytest.warns(UserWarning, match="has an explicit dtype=float16"):
        assert matmul_dtypes(apply_policy(Net(), "bf16", keep_explicit=True), X) == {"float16"}
    assert matmul_dtypes(apply_policy(Net(), "bf16"), X) == {"bfloat16"}


def test_bind_works_and_a_submodule_taken_out_is_not_covered():
    ported = apply_policy(Plain(), MIXED)
    bound = ported.bind(ported.init(KEY, X))
    assert bound(X).dtype == jnp.float32
    for function, dtype in ((bound.encode, "bfloat16"), (bound.layer, "float32")):
        dots = named(operations(function, X), "dot_general")
        assert {op.inputs for op in dots} == {(dtype, dtype)}


def test_a_ported_model_ignores_the_scope_around_it_and_leaves_none_behind():
    with use_policy("f16"):
        assert matmul_dtypes(apply_policy(Plain(), MIXED), X) == {"bfloat16"}
    assert current_policy() is None


# What autocast does is no matter here.
keeping = functools.partial(apply_policy, own_code="keep")
HALF = "p=f16,c=bf16,o=f32"


def initialized(model: Any) -> dict[str, str]:
    """Dtypes of the variables that `model.init` makes, by path, collections included."""
    return dtypes(jax.eval_shape(model.init, KEY, X))


class Kernel(nn.Module):
    """A matmul with parameters of its own, and with some that no policy is for."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 4))
        self.param("steps", lambda key: jnp.zeros((), jnp.int32))
        self.param("phase", lambda key: jnp.ones((2,), jnp.complex64))
        self.variable("batch_stats", "mean", jnp.zeros, (4,))
        return x @ kernel.astype(x.dtype)


class InSetup(nn.Module):
    def setup(self):
        self.kernel = self.param("kernel", nn.initializers.orthogonal(), (4, 4))
        self.bias = self.variable("params", "bias", lambda: jnp.zeros((4,)))

    def __call__(self, x):
        return x @ self.kernel.astype(x.dtype) + self.bias.value.astype(x.dtype)[None]


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.ones_init(), ("in", "out"))
        kernel: Any = self.param(name="kernel", init_fn=init, shape=(4, 4))  # type: ignore[call-overload]
        return x @ kernel.astype(x.dtype)


Step = compact(lambda carry, _: (Kernel()(carry), None), nn)


STACKED: Any = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
LIFTED: dict[str, Any] = {
    "scan": nn.scan(Step, length=3, **STACKED),
    "remat": nn.remat(Kernel),
    "vmap": nn.vmap(Kernel, **STACKED),
    "jit": nn.jit(Kernel),
}


class Lifts(nn.Module):
    lift: str

    @nn.compact
    def __call__(self, x):
        block = LIFTED[self.lift]()
        return block(x, None)[0] if self.lift == "scan" else block(x)


MAKERS = {
    "compact": Kernel(),
    "setup": InSetup(),
    "boxed": Boxed(),
    "inside": nn.Sequential([InSetup(), nn.Dense(4)]),
}
MAKERS |= {lift: Lifts(lift) for lift in LIFTED}
MAKERS |= {f"root {lift}": LIFTED[lift]() for lift in LIFTED if lift != "scan"}


def expected(name: str, dtype: str) -> str:
    others = {"steps": "int32", "phase": "complex64", "stats": "float32"}
    return next((kind for part, kind in others.items() if part in name), dtype)


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("name", MAKERS)
def test_parameters_that_a_module_creates_itself_come_in_param_dtype(name):
    model = MAKERS[name]
    plain = initialized(model)
    assert "float32" in plain.values()
    for policy, dtype in ((HALF, "float16"), ("bfloat16", "bfloat16"), (MIXED, "float32")):
        port = keeping(model, policy)
        assert initialized(port) == {name: expected(name, dtype) for name in plain}
    assert matmul_dtypes(keeping(model, "bfloat16"), X) == {"bfloat16"}


@pytest.mark.cases(slow=2)
@pytest.mark.parametrize("name", ["compact", "setup", "boxed", "scan", "vmap"])
def test_their_values_are_those_of_the_initializers_in_float32_rounded(name):
    maker = MAKERS[name]
    plain, half, mixed = (
        model.init(KEY, X) for model in (maker, keeping(maker, HALF), keeping(maker, MIXED))
    )
    assert jax.tree.structure(plain) == jax.tree.structure(half)
    for written, rounded, same in zip(*map(jax.tree.leaves, (plain, half, mixed)), strict=True):
        np.testing.assert_array_equal(rounded, written.astype(rounded.dtype))
        np.testing.assert_array_equal(same, written)


@pytest.mark.slow
def test_parameters_that_apply_is_given_stay_as_they_are():
    variables = Kernel().init(KEY, X)
    model = keeping(Kernel(), "bf16")
    _, updated = model.apply(variables, X, mutable=["params"])
    assert dtypes(updated["params"])["kernel"] == "float32"
    given: Any = jax.tree.map(lambda leaf: leaf, updated)
    np.testing.assert_array_equal(given["params"]["kernel"], variables["params"]["kernel"])
    _, made = jax.eval_shape(lambda: model.apply({}, X, mutable=True, rngs={"params": KEY}))
    assert dtypes(made["params"])["kernel"] == "bfloat16"

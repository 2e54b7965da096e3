"""The class that a port makes: constructor, state and methods are those of the model's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from mpmodules import linen as our_nn
from tests.programs import apply, boundary_casts, named, operations

apply_policy = our_nn.apply_policy
KEY = jax.random.key(0)
X = jnp.ones((2, 4))
MIXED = "mixed_bfloat16"


def matmul_dtypes(model: Any, *args: Any, **kwargs: Any) -> set[str]:
    """Dtypes of the operands of every matmul that `model.apply` runs, with variables from
    `model.init`.
    """
    variables = jax.eval_shape(functools.partial(model.init, **kwargs), KEY, *args)
    ops = operations(lambda v, *args: apply(model, v, *args, **kwargs), variables, *args)
    dots = named(ops, "dot_general")
    assert dots
    return {dtype for op in dots for dtype in op.inputs}


# --- the constructor ------------------------------------------------------------------------------


def registered(cls: Any) -> Any:
    """Replaces a class's generated constructor by one that keeps a config beside the fields, as
    diffusers does.
    """
    constructor = cls.__init__

    @functools.wraps(constructor)
    def init(self, *args, **kwargs):
        fields = [
            field
            for field in dataclasses.fields(self)
            if field.name not in ("name", "parent", "dtype")
        ]
        config = {field.name: getattr(self, field.name, None) for field in fields}
        config |= {field.name: value for field, value in zip(fields, args, strict=False)}
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


def test_a_wrapped_constructor_is_kept_and_runs():
    ported = apply_policy(Registered(5, depth=2), MIXED)
    assert type(ported).__init__ is Registered.__init__
    assert ported.config == {"width": 5, "depth": 2}
    assert ported.clone(width=6).config == {"width": 6, "depth": 2}
    assert jax.eval_shape(lambda: ported.init_with_output(KEY, X)[0]).shape == (2, 5)
    assert matmul_dtypes(ported, X) == {"bfloat16"}


def test_a_written_constructor_is_kept_and_runs():
    ported = apply_policy(Written(3), MIXED)
    assert ported.twice == 6 and ported == apply_policy(Written(3), MIXED)
    assert matmul_dtypes(ported, X) == {"bfloat16"}


def test_state_added_after_construction_is_there_on_the_port_and_its_copies():
    model = Registered(5)
    model.register(_class_name="Registered")
    ported = apply_policy(model, MIXED)
    again = apply_policy(ported, "float32")
    for port in (
        ported,
        again,
        copy.copy(ported),
        copy.deepcopy(ported),
        pickle.loads(pickle.dumps(ported)),
    ):
        assert port.config == model.config == {"width": 5, "depth": 1, "_class_name": "Registered"}
    assert ported == apply_policy(Registered(5), MIXED) and hash(ported) == hash(
        apply_policy(Registered(5), MIXED)
    )


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


# --- override checks ------------------------------------------------------------------------------


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


class Another(Base):
    pass


class Overriding(Base):
    def message(self, x):
        return 2 * x


LIFTED = nn.remat(Base)
METHODS = (
    "__call__",
    "setup",
    "encode",
    "message",
    "named",
    "saved",
    "_private",
    "apply",
    "init",
    "bind",
    "tabulate",
)


OF_A_LAYER = ("__call__", "setup", "apply", "init", "bind", "tabulate")
MODELS = [(Base(), METHODS), (Plain(), METHODS), (Overriding(), METHODS), (LIFTED(), METHODS)]
MODELS += [(nn.Dense(3), OF_A_LAYER), (our_nn.Dense(3), OF_A_LAYER)]


@pytest.mark.parametrize(
    ("model", "name"), [(model, name) for model, names in MODELS for name in names]
)
def test_the_methods_of_a_ports_class_are_those_of_the_models_class(model, name):
    assert getattr(type(apply_policy(model, MIXED)), name) is getattr(type(model), name)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_two_classes_inherit_is_one_object_in_both_ports(name):
    assert getattr(type(apply_policy(Plain(), MIXED)), name) is getattr(
        type(apply_policy(Another(), "f32")), name
    )


def test_a_model_that_asks_for_overrides_runs_as_it_did():
    assert matmul_dtypes(apply_policy(Plain(), MIXED), X) == {"bfloat16"}
    ported = apply_policy(Overriding(), MIXED)
    variables = ported.init(KEY, X)
    assert named(operations(ported.apply, variables, X), "mul")


ENTRIES = {
    "by name": "encode",
    "a mixin's function": Encodes.encode,
    "a base's function": Base.encode,
    "a compact name scope": "named",
    "a transformed method": "saved",
    "a transformed function": Base.saved,
}


@pytest.mark.parametrize("method", ENTRIES.values(), ids=ENTRIES)
def test_methods_that_flax_does_not_wrap_are_boundaries_too(method):
    ported = apply_policy(Plain(), MIXED)
    assert matmul_dtypes(ported, X, method=method) == {"bfloat16"}
    variables = jax.eval_shape(functools.partial(ported.init, method=method), KEY, X)
    ops = operations(lambda v, x: apply(ported, v, x, method=method), variables, X)
    casts = boundary_casts(ops)
    assert [op.outputs for op in casts] == [("bfloat16",), ("float32",)]


class Encoder(nn.Module):
    @nn.compact
    def encode(self, x, scale=1):
        return scale * nn.Dense(3, name="layer")(x)


class Wider(Encoder):
    def encode(self, x, scale=1):
        return super().encode(x, scale)


FUNCTIONS = {
    "own": Wider.encode,
    "of a base that it overrides": Encoder.encode,
    "partial": functools.partial(Wider.encode, scale=2),
    "in a function": lambda module, x: Encoder.encode(module, x),
}


@pytest.mark.parametrize("method", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_method_given_as_a_function_of_any_base_is_entered(method):
    assert matmul_dtypes(apply_policy(Wider(), MIXED), X, method=method) == {"bfloat16"}


def test_a_private_method_called_from_outside_casts_nothing_and_its_layers_obey():
    ported = apply_policy(Plain(), MIXED)
    variables = jax.eval_shape(ported.init, KEY, X)
    ops = operations(lambda v, x: apply(ported, v, x, method="_private"), variables, X)
    assert boundary_casts(ops) == []
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16", "bfloat16")}


def test_a_public_method_of_an_unbound_port_may_initialise_it():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

        def init_weights(self, key):
            return self.init(key, X)["params"]

    (leaf, *_) = jax.tree.leaves(jax.eval_shape(apply_policy(Model(), "bf16").init_weights, KEY))
    assert leaf.dtype == jnp.bfloat16


# --- layers inside --------------------------------------------------------------------------------


class Adapter(nn.Dense):
    """A subclass of a Flax layer that asks what was overridden."""

    def __call__(self, inputs):
        assert type(self).rank is Adapter.rank and type(self).__call__ is Adapter.__call__
        assert type(self).setup is nn.Dense.setup
        return self.rank(super().__call__(inputs))

    def rank(self, x):
        return x


class Inherits(nn.Embed):
    """A subclass of a Flax layer that adds a check to what it inherits."""

    def looked_up(self, tokens):
        assert type(self).attend is nn.Embed.attend and type(self).__call__ is nn.Embed.__call__
        return self.attend(self(tokens))


class Holds(nn.Module):
    @nn.compact
    def __call__(self, x):
        tokens = jnp.zeros(x.shape[:1], int)
        return Adapter(4)(x), Inherits(3, 4)(tokens), Inherits(3, 4).looked_up(tokens)


def test_a_users_subclass_of_a_layer_keeps_its_methods():
    ported = apply_policy(Holds(), MIXED)
    variables = jax.eval_shape(ported.init, KEY, X)
    assert matmul_dtypes(ported, X) == {"bfloat16"}
    assert matmul_dtypes(apply_policy(Adapter(4), MIXED), X) == {"bfloat16"}
    assert {
        leaf.dtype.name for leaf in jax.tree.leaves(jax.eval_shape(ported.apply, variables, X))
    } == {"float32"}


@registered
class RegisteredDense(nn.Dense, Configured):
    @nn.remat
    @nn.compact
    def __call__(self, inputs):  # the transform calls it on a clone
        assert self.config["features"] == self.features
        return nn.Dense(self.features, name="inner")(inputs)


def test_a_users_subclass_of_a_layer_keeps_its_constructor():
    assert matmul_dtypes(apply_policy(nn.Sequential([RegisteredDense(3)]), MIXED), X) == {
        "bfloat16"
    }
    assert matmul_dtypes(apply_policy(RegisteredDense(3), MIXED), X) == {"bfloat16"}


class Parts(nn.Dense):
    """A subclass of a Flax layer with a setup, whose layer and attributes are asked for outside."""

    def setup(self):
        self.inner = nn.Dense(4)
        self.width = self.features

    def __call__(self, inputs):
        return self.inner(self.twice(inputs))

    @nn.compact
    def twice(self, x):
        return nn.Dense(x.shape[-1], name="again")(x)


class Asks(nn.Module):
    def setup(self):
        self.parts, self.embed = Parts(5), nn.Embed(3, 4)
        self.rnn, self.norm = nn.RNN(nn.LSTMCell(4)), nn.BatchNorm(use_running_average=False)

    def __call__(self, x):
        layers = self.parts, self.embed, self.rnn, self.rnn.cell, self.norm
        before = [(type(layer), *map(layer.__dict__.get, DTYPE_FIELDS)) for layer in layers]
        x = self.embed.attend(self.norm(self.parts(self.parts(x))))
        x = self.rnn(x[:, None] @ self.embed.embedding)
        after = [(type(layer), *map(layer.__dict__.get, DTYPE_FIELDS)) for layer in layers]
        assert before == after
        assert self.parts.inner.parent is self.parts and self.parts.width == 5
        return self.parts.inner(x)


DTYPE_FIELDS = ("dtype", "param_dtype", "use_fast_variance", "dtype_policy", "_declared_fields")


@pytest.mark.parametrize("own_code", [None, "keep"])
def test_flaxs_layers_keep_their_class_and_their_fields(own_code):
    ported = apply_policy(Asks(), "p=bf16,c=bf16,o=f32", own_code=own_code)
    with jax.numpy_dtype_promotion("standard"):  # of the matmul in `Asks` where it is kept
        variables = jax.eval_shape(ported.init, KEY, X)
        assert matmul_dtypes(ported, X, mutable=["params", "batch_stats"]) == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables["params"])} == {"bfloat16"}


def test_an_interceptor_inside_of_a_port_is_around_the_policys_layer():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            with nn.intercept_methods(note):
                x = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x))
                return nn.RNN(nn.GRUCell(3))(x[None])

    calls: list[Any] = []

    def note(next_fun, args, kwargs, context):
        calls.append((context.module.name, context.method_name))
        return next_fun(*args, **kwargs)

    ported = apply_policy(Model(), MIXED)
    plain, variables = (jax.eval_shape(model.init, KEY, X) for model in (Model(), ported))
    assert plain == variables
    called = calls[: len(calls) // 2]
    assert called == calls[len(calls) // 2 :] and ("Dense_0", "__call__") in called
    ops = operations(lambda v, x: apply(ported, v, x, mutable=["batch_stats"]), variables, X)
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16", "bfloat16")}


def test_ports_that_differ_in_an_option_share_no_trace():
    class Block(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, dtype=jnp.float16)(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Block()(x)

    assert matmul_dtypes(apply_policy(Net(), "bf16"), X) == {"bfloat16"}
    with pytest.warns(UserWarning, match="has an explicit dtype=float16"):
        assert matmul_dtypes(apply_policy(Net(), "bf16", keep_explicit=True), X) == {"float16"}
    assert matmul_dtypes(apply_policy(Net(), "bf16"), X) == {"bfloat16"}

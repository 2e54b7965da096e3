"""A port patches no class. Its modules are of subclasses that look like their classes: names,
override checks, identities of methods.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportIncompatibleMethodOverride=false, reportFunctionMemberAccess=false

import functools
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

import policy
from mpmodules import get_policy, nnx, use_policy
from mpmodules.nnx import apply_policy
from tests.mpmodules.wings import NnxModel
from tests.programs import named

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
MIXED = get_policy("mixed_bfloat16")
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Mixin:
    def described(self, x):
        return x * 2


class Convolved(Mixin, flax_nnx.Module):
    """A base class that asks what its subclasses override, as graph nets do."""

    def __init__(self, *, rngs):
        self.linear = flax_nnx.Linear(4, 4, rngs=rngs)
        self.seen = ""

    def make(self, x):
        raise NotImplementedError

    def update(self, x):
        return self.linear(x)

    def __call__(self, x):
        x = self.update(x)
        return self.make(x) if type(self).make is not Convolved.make else x

    alias = update

    @staticmethod
    def static(x):
        return x

    @classmethod
    def of_class(cls, x):
        return x

    @property
    def width(self):
        return 4

    def _private(self, x):
        return x


class Plain(Convolved):
    pass


class Other(Convolved):
    def make(self, x):
        self.seen = x.dtype.name
        return super().update(x)


class Gated(flax_nnx.Linear):
    def __call__(self, x):
        assert isinstance(self, Gated)
        return super().__call__(x) * jax.nn.sigmoid(x)


class Net(flax_nnx.Module):
    def __init__(self, *, rngs):
        self.graph = Other(rngs=rngs)
        self.gate = Gated(4, 4, rngs=rngs)
        self.heads = flax_nnx.Dict({name: flax_nnx.Linear(4, 2, rngs=rngs) for name in "ab"})
        norms = flax_nnx.LayerNorm, flax_nnx.BatchNorm
        self.norms = flax_nnx.List([norm(4, rngs=rngs) for norm in norms])
        self.attn = flax_nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.rnn = flax_nnx.RNN(flax_nnx.LSTMCell(4, 4, rngs=rngs))
        self.block = flax_nnx.Sequential(flax_nnx.Linear(4, 4, rngs=rngs), flax_nnx.relu)

    def __call__(self, x):
        x = self.block(self.gate(self.graph(x)))
        for norm in self.norms:
            x = norm(x)
        x = self.rnn(self.attn(x[None]))[0]
        return sum(head(x) for _, head in self.heads.items())


@pytest.fixture(scope="module")
def built():
    return Net(rngs=flax_nnx.Rngs(0))


@pytest.fixture
def net(built):
    return flax_nnx.clone(built)


def types_of(model):
    graph = flax_nnx.iter_graph(model)
    return {path: type(node) for path, node in graph if isinstance(node, flax_nnx.Pytree)}


def test_layers_are_ours_and_other_modules_are_of_subclasses_of_the_same_name(net):
    model = apply_policy(net, MIXED)
    before, after = types_of(net), types_of(model)
    assert before.keys() == after.keys()
    for path, cls in after.items():
        theirs = before[path]
        assert issubclass(cls, theirs)
        assert (cls.__name__, cls.__qualname__) == (theirs.__name__, theirs.__qualname__)
    assert type(model.heads["a"]) is type(model.block.layers[0]) is nnx.Linear
    assert type(model.norms) is flax_nnx.List and type(model.heads) is flax_nnx.Dict
    assert isinstance(model.gate, Gated) and isinstance(model.gate, nnx.Linear)
    assert types_of(apply_policy(model, "f16")) == after == types_of(apply_policy(net, MIXED))
    assert types_of(flax_nnx.merge(*flax_nnx.split(model))) == after
    assert model(X).dtype == F32 and np.any(model.norms[1].mean[...] != 0)
    assert list(model.heads) == ["a", "b"] and len(model.norms) == 2
    model.norms.append(flax_nnx.Param(jnp.ones(2)))
    assert model.norms[2].dtype == F32


@pytest.mark.slow
def test_no_class_of_flax_s_or_of_a_user_s_changes(net):
    classes = {base for cls in types_of(net).values() for base in cls.__mro__ if base is not object}
    assert {Net, Gated, Other, Convolved, Mixin, flax_nnx.Linear, flax_nnx.Module} <= classes
    before = {cls: dict(vars(cls)) for cls in classes}
    values = [value for attributes in before.values() for value in attributes.values()]
    functions = {value: dict(vars(value)) for value in values if inspect.isfunction(value)}
    model = apply_policy(net, MIXED)
    model(X)
    flax_nnx.grad(lambda model: model(X).sum())(model)
    for each in (net, model):
        policy.audit(each, X)
        policy.compare(each, X)
        for part in (each.graph, each.gate, each.block):
            nnx.tabulate(part, X)
        policy.autocast(each, MIXED)(X)
    nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), dtype_policy="bf16")
    assert {cls: dict(vars(cls)) for cls in classes} == before
    assert {function: dict(vars(function)) for function in functions} == functions


def test_override_checks_and_the_identity_of_methods_hold(net):
    for cls in (Plain, Other):
        model = apply_policy(cls(rngs=flax_nnx.Rngs(0)), "bf16")
        ported = type(model)
        for name in ("make", "update", "alias", "described", "__call__", "_private", "static"):
            assert getattr(ported, name) is getattr(cls, name)
        assert ported.alias is ported.update and ported.of_class(3) == 3 and model.width == 4
        assert (ported.make is Convolved.make) is (cls is Plain)
        assert model(X).dtype == model.update(X).dtype == model.described(X).dtype == BF16
    assert apply_policy(net, "bf16").gate.__call__.__name__ == "__call__"


def test_a_method_called_by_super_or_from_inside_is_no_second_boundary():
    model = NnxModel(apply_policy(Other(rngs=flax_nnx.Rngs(0)), MIXED))
    assert model(X).dtype == model(X, method="make").dtype == F32
    assert len([op for op in model.operations(X) if op.is_placed]) == 2
    gate = NnxModel(apply_policy(Gated(4, 4, rngs=flax_nnx.Rngs(0)), MIXED))
    (dot,) = named(gate.operations(X), "dot_general")
    assert dot.outputs == ("bfloat16",) and gate(X).dtype == F32


def test_instances_that_were_not_ported_run_the_same_program():
    class Fresh(flax_nnx.Module):
        def __init__(self, *, rngs):
            self.gate = Gated(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.gate(x)

    model = Fresh(rngs=flax_nnx.Rngs(0))
    before, y = NnxModel(model).operations(X), model(X)
    apply_policy(Fresh(rngs=flax_nnx.Rngs(1)), MIXED)
    apply_policy(model, MIXED)
    with use_policy("f16"):  # of no concern to a model that knows no policy
        assert NnxModel(model).operations(X) == before
        np.testing.assert_array_equal(model(X), y)
    assert flax_nnx.graphdef(model) == flax_nnx.graphdef(Fresh(rngs=flax_nnx.Rngs(2)))
    assert not hasattr(model, "dtype_policy")


def test_ports_that_threads_make_at_once_are_of_one_class():
    class Once(flax_nnx.Module):
        def __call__(self, x):
            return x * 2

    with ThreadPoolExecutor(8) as threads:
        models = list(threads.map(lambda _: apply_policy(Once(), "bf16"), range(8)))
    assert len({type(model) for model in models}) == 1
    assert len({flax_nnx.graphdef(model) for model in models}) == 1


def test_a_user_s_init_subclass_is_not_called_for_a_port():
    class Registered(flax_nnx.Module):
        known: ClassVar[dict[str, type]] = {}

        def __init_subclass__(cls, *, name, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.known[name] = cls

    class Net(Registered, name="net"):
        def __call__(self, x):
            return x * 2

    assert apply_policy(Net(), "bf16")(X).dtype == BF16
    assert Registered.known == {"net": Net}


def test_methods_of_python_s_classes_and_of_flax_s_containers_are_no_boundaries():
    class Table(flax_nnx.Module, Mapping[str, Any]):
        def __init__(self):
            self.table = flax_nnx.Dict(a=flax_nnx.Param(jnp.ones(4)))

        def __getitem__(self, name):
            return self.table[name]

        def __iter__(self):
            return iter(self.table)

        def __len__(self):
            return len(self.table)

        def __call__(self, x):
            return x * self["a"][None]

    class Stack(flax_nnx.List):
        def __call__(self, x):
            for layer in self:
                x = layer(x)
            return x

    table = apply_policy(Table(), "bf16")
    assert list(table.keys()) == ["a"] and table.get("a") is table.table["a"]
    assert table(X).dtype == BF16
    stack = apply_policy(Stack([flax_nnx.Linear(4, 4, rngs=flax_nnx.Rngs(0))]), MIXED)
    stack.append(jnp.sin)
    assert len(stack) == 2 and stack(X).dtype == F32


def test_methods_stored_as_attributes_are_those_of_the_port():
    class Net(flax_nnx.Module):
        def __init__(self, *, rngs):
            self.linear = flax_nnx.Linear(4, 4, rngs=rngs)
            self.branch = self.project
            self.scaled = functools.partial(self.project, scale=3)

        def project(self, x, scale=2):
            return self.linear(x) * scale

        def __call__(self, x):
            return self.branch(x) + self.scaled(x)

    theirs = Net(rngs=flax_nnx.Rngs(0))
    model = apply_policy(theirs, "bf16", own_code="keep")
    assert model.branch.__self__ is model.scaled.func.__self__ is model
    assert model(X).dtype == BF16 and theirs(X).dtype == F32


def test_importing_wraps_nothing_and_a_pickle_obeys_in_a_fresh_process(tmp_path):
    rngs = flax_nnx.Rngs(0)
    model = flax_nnx.Sequential(flax_nnx.Linear(4, 4, rngs=rngs), flax_nnx.LayerNorm(4, rngs=rngs))
    model = apply_policy(model, MIXED, {"layers/1": "f32"})
    path = tmp_path / "model"
    own = apply_policy(Plain(rngs=rngs), MIXED)
    path.write_bytes(pickle.dumps((flax_nnx.graphdef(model), model, own)))
    definition = pickle.loads(pickle.dumps(flax_nnx.graphdef(own)))
    assert definition == flax_nnx.graphdef(own) != flax_nnx.graphdef(Plain(rngs=rngs))
    code = f"""
import pickle, jax, numpy as np
from flax import nnx
import mpmodules.nnx
classes = (nnx.Linear, nnx.LayerNorm, nnx.Sequential, nnx.LSTMCell)
mpmodules.nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), dtype_policy="bf16")
assert not any(hasattr(cls.__call__, "__wrapped__") for cls in classes)
definition, model, own = pickle.load(open({str(path)!r}, "rb"))
assert type(model.layers[0]) is mpmodules.nnx.Linear and definition == nnx.graphdef(model)
assert own.__class__.__name__ == "Plain" and nnx.graphdef(own) != definition
x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
assert model(x).dtype == "float32" and model.layers[0](x).dtype == "bfloat16"
assert ":bf16[2,4] = dot_general" in str(jax.make_jaxpr(lambda x: model(x))(x))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


# --- what a ported model is used with -------------------------------------------------------------


def test_what_a_call_puts_on_a_layer_lands_on_the_layer():
    layer: Any = flax_nnx.MultiHeadAttention(2, 4, decode=True, rngs=flax_nnx.Rngs(0))
    layer = apply_policy(layer, MIXED)
    layer.init_cache((1, 3, 4))
    assert layer.cached_key[...].dtype == BF16
    layer(X[:1, None])
    assert layer.cache_index[...] == 1
    layer.set_view(decode=False)
    with pytest.warns(DeprecationWarning, match="sow"):
        layer(X[None], sow_weights=True)
    assert layer.attention_weights.get_value()[0].shape == (1, 2, 2, 2)


def test_threads_audit_models_of_one_class_with_the_names_of_their_modules(net):
    def paths(model):
        return {operation.path for operation in policy.audit(model, X).operations}

    models = [flax_nnx.clone(net) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(paths, models)) == [paths(net)] * 4
    assert "graph/linear" in paths(net)


def test_a_linen_module_inside_runs_as_it_is_and_its_parameters_are_cast():
    module = flax_nnx.bridge.ToNNX(flax_linen.Dense(3), rngs=flax_nnx.Rngs(0)).lazy_init(X)
    model = apply_policy(flax_nnx.Sequential(module, lambda x: x), "bf16", own_code="keep")
    assert model.layers[0].kernel.dtype == BF16 and module.kernel.dtype == F32
    assert model(X).dtype == BF16


def test_subclasses_of_flax_s_layers_reach_what_is_ours_by_super():
    class Cell(flax_nnx.LSTMCell):
        def initialize_carry(self, *args, **kwargs):
            assert isinstance(self, Cell)
            return super().initialize_carry(*args, **kwargs)

        def __call__(self, carry, inputs):
            carry, y = super().__call__(carry, inputs)
            assert (carry[0].dtype, y.dtype) == (BF16, F32)  # a carry keeps its dtype
            return carry, y * 2

    class Norm(flax_nnx.BatchNorm):
        def __call__(self, x, **options):
            return super().__call__(x, **options) + 1

    rngs = flax_nnx.Rngs(0)
    model = apply_policy(flax_nnx.RNN(Cell(4, 3, rngs=rngs), return_carry=True, rngs=rngs), MIXED)
    carry, y = model(X[None])
    assert (carry[0].dtype, y.dtype) == (BF16, F32) and isinstance(model.cell, Cell)
    norm = apply_policy(Norm(4, rngs=rngs), MIXED)
    x = (1000 + np.arange(256, dtype=np.float32) % 7).reshape(64, 4)  # bfloat16 holds 1000 to 4
    np.testing.assert_allclose(norm(x).astype(F32), 1 + (x - x.mean(0)) / x.std(0), atol=0.05)
    assert np.all(norm.mean[...] > 0)


def test_transformed_methods_and_classes_of_any_module_are_ported():
    class Jitted(flax_nnx.Module):
        def __init__(self, *, rngs):
            self.linear = flax_nnx.Linear(4, 4, rngs=rngs)

        @flax_nnx.jit
        def __call__(self, x):
            return self.linear(x)

    plain = Jitted(rngs=flax_nnx.Rngs(0))
    ported = apply_policy(flax_nnx.clone(plain), MIXED)
    assert ported(X).dtype == plain(X).dtype == F32
    body = {"__module__": "code", "__call__": lambda self, x: x * 2}  # like Python's own module
    assert apply_policy(type("Net", (flax_nnx.Module,), body)(), "bf16")(X).dtype == BF16
    assert "bf16" in Jitted.__call__.lower(ported, X).as_text()
    assert "bf16" not in Jitted.__call__.lower(plain, X).as_text()


def test_summaries_and_representations_have_the_names_of_the_model_s_own_classes():
    rngs = flax_nnx.Rngs(0)
    attention = flax_nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
    parts = Gated(4, 4, rngs=rngs), Other(rngs=rngs), attention
    model = apply_policy(flax_nnx.Sequential(*parts), MIXED)
    options = {"console_kwargs": {"width": 300, "no_color": True, "force_terminal": False}}
    table = nnx.tabulate(model, X, **options)
    for name in ("Gated", "Other", "MultiHeadAttention", "p=f32,c=bf16,o=f32"):
        assert name in table
    assert "Gated(" in repr(model) and "_ported" not in repr(model)
    assert nnx.tabulate(model, X, **options) == table

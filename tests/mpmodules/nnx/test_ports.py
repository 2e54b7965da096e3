"""`apply_policy` copies a built model, ours or not, under a policy: by path and class, or not at
all. A port patches no class: its modules are of subclasses that look like their classes.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
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
import optax
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

import policy
from mpmodules import get_policy, nnx, use_policy
from mpmodules.nnx import apply_policy
from policy import DtypePolicyWarning
from tests.mpmodules.apis import NnxModel
from tests.programs import named

BF16, F16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
MIXED, HALF, FULL = get_policy("mixed_bfloat16"), get_policy("bf16"), get_policy("f32")
IDS = np.array([[0, 2, 1], [3, 3, 0]])
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
    static = staticmethod(lambda x: x)
    of_class = classmethod(lambda cls, x: x)
    width = property(lambda self: 4)

    def _private(self, x):
        return x


class Inherits(Convolved):
    pass


class Other(Convolved):
    def make(self, x):
        self.seen = x.dtype.name
        return super().update(x)


class Gated(flax_nnx.Linear):
    """A user's subclass of a layer of Flax's."""

    def __call__(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        assert isinstance(self, Gated)
        return super().__call__(x) * jax.nn.sigmoid(x)


class Block(flax_nnx.Module):
    def __init__(self, *, rngs):
        self.attn = flax_nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.norm = flax_nnx.LayerNorm(4, rngs=rngs)
        self.mlp = flax_nnx.Sequential(
            flax_nnx.Linear(4, 4, rngs=rngs), flax_nnx.gelu, Gated(4, 4, rngs=rngs)
        )

    def __call__(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(flax_nnx.Module):
    """A third-party model: it knows nothing of policies."""

    def __init__(self, *, rngs):
        self.embed = flax_nnx.Embed(4, 4, rngs=rngs)
        self.blocks = flax_nnx.List([Block(rngs=rngs), Block(rngs=rngs)])
        self.heads = flax_nnx.Dict(
            a=flax_nnx.Linear(4, 2, rngs=rngs), b=flax_nnx.Linear(4, 2, rngs=rngs)
        )
        self.graph, self.bn = Other(rngs=rngs), flax_nnx.BatchNorm(4, rngs=rngs)
        self.rnn = flax_nnx.RNN(flax_nnx.LSTMCell(4, 4, rngs=rngs))

    def features(self, ids):
        x = self.graph(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.rnn(self.bn(x))

    def __call__(self, ids):
        x = self.features(ids)
        return self.heads.a(x), self.heads.b(x)


@pytest.fixture(scope="module")
def built():
    return Model(rngs=flax_nnx.Rngs(0))


@pytest.fixture
def model(built):
    return flax_nnx.clone(built)


def policies(model):
    """Of every module but Flax's containers, which have no methods to obey one."""
    containers = (flax_nnx.List, flax_nnx.Dict)
    return {
        "/".join(map(str, path)): module.dtype_policy
        for path, module in flax_nnx.iter_modules(model)
        if not isinstance(module, containers)
    }


def test_rules_by_path_reach_lists_dicts_sequentials_and_layers_inside_attention(model):
    rules = {
        "blocks/0/attn/query": "f32",  # the first that matches wins
        "blocks/0/attn/(query|key)": "f16",
        "blocks/1": "f16",
        "blocks/0/mlp/layers/2": "p=bf16,c=f32",
        "heads/b": "f32",
        "embed": "p=bf16,c=bf16",
    }
    found = policies(apply_policy(model, "mixed_bfloat16", rules))
    others = {
        "embed": "p=bf16,c=bf16",
        "blocks/0/attn/query": "f32",
        "blocks/0/attn/key": "f16",
        "blocks/0/mlp/layers/2": "p=bf16,c=f32",
        "heads/b": "f32",
    }
    for path, held in found.items():
        inherited = "f16" if path.startswith("blocks/1") else MIXED
        assert held == get_policy(others.get(path, inherited)), path
    assert apply_policy(model, "f32", [("", "bf16")]).dtype_policy == HALF  # the root


def test_rules_by_class_take_flax_s_class_ours_a_user_s_and_their_subclasses(model):
    rules = {nnx.LayerNorm: "f32", Block: "f16", Gated: "bf16", flax_nnx.Linear: "f32"}
    found = policies(apply_policy(model, "mixed_bfloat16", rules))
    assert found["blocks/0/norm"] == found["heads/a"] == found["blocks/1/mlp/layers/0"] == FULL
    assert found["blocks/1/mlp/layers/2"] == HALF and found["embed"] == MIXED
    assert found["blocks/1/attn/out"] == get_policy("f16")


@pytest.mark.slow
def test_a_change_of_mind_copies_no_array_that_keeps_its_dtype_and_forgets_the_rules(model):
    theirs = apply_policy(model, "mixed_bfloat16", {"heads/b": "f32", "blocks": "f16"})
    assert theirs.heads.a.kernel.get_value() is model.heads.a.kernel.get_value()
    for text, dtype in (("bf16", BF16), ("mixed_float16", F32)):
        theirs = apply_policy(theirs, text)
        assert theirs.heads.a.kernel.dtype == dtype
        assert [x.dtype for x in theirs(IDS)] == [dtype, dtype]
        assert set(policies(theirs).values()) == {get_policy(text)}


def test_a_shared_variable_stays_shared_and_is_cast_once():
    class Tied(flax_nnx.Module):
        def __init__(self, *, rngs):
            self.embed = flax_nnx.Embed(4, 4, rngs=rngs)
            self.head = flax_nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.head.kernel = self.embed.embedding
            self.table = flax_nnx.data({"again": self.embed.embedding})

        def __call__(self, ids):
            return self.head(self.embed(ids))

    theirs = Tied(rngs=flax_nnx.Rngs(0))
    tied = apply_policy(theirs, "bf16")
    assert tied.head.kernel is tied.embed.embedding is tied.table["again"]
    assert tied.head.kernel.dtype == BF16 and theirs.head.kernel.dtype == F32
    paths = [flax_nnx.to_flat_state(flax_nnx.state(model)).paths for model in (tied, theirs)]
    assert paths[0] == paths[1]


def test_keep_explicit_keeps_a_dtype_that_a_layer_was_built_with_in_ports_of_ports():
    kept = flax_nnx.Sequential(
        flax_nnx.Linear(4, 4, dtype=F16, rngs=nnx.Rngs(0)), flax_nnx.Embed(4, 4, rngs=nnx.Rngs(0))
    )
    for text, found in ((MIXED, BF16), ("f32", F32)):
        with pytest.warns(DtypePolicyWarning, match="^Linear at 'layers/0' has an explicit dtype="):
            kept = apply_policy(kept, text, keep_explicit=True)
        assert [layer.dtype for layer in kept.layers] == [F16, found]
    with use_policy("mixed_bfloat16"):  # which is no dtype that was given
        ours: Any = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    assert apply_policy(ours, "f16", keep_explicit=True).layers[0].dtype == F16


def test_an_attention_fn_of_the_user_s_own_stays_in_place():
    calls = []

    def mine(query, key, value, **options):
        calls.append(query.dtype)
        return value

    options = {"decode": False, "attention_fn": mine}
    layer = flax_nnx.MultiHeadAttention(2, 4, rngs=flax_nnx.Rngs(0), **options)
    apply_policy(layer, "mixed_bfloat16")(np.ones((1, 3, 4), np.float32))
    assert calls == [BF16]


@pytest.mark.slow
def test_split_merged_and_abstract_models_get_and_keep_a_policy(model):
    definition, state = flax_nnx.split(model)
    theirs = apply_policy(flax_nnx.merge(definition, state, copy=True), "mixed_bfloat16")
    again = flax_nnx.merge(*flax_nnx.split(theirs))
    assert policies(again) == policies(theirs)
    assert [x.dtype for x in again(IDS)] == [F32, F32]
    abstract = apply_policy(flax_nnx.eval_shape(lambda: Model(rngs=flax_nnx.Rngs(0))), "bf16")
    params = jax.tree.leaves(flax_nnx.state(abstract, flax_nnx.Param))
    assert {leaf.dtype for leaf in params} == {BF16}


@pytest.mark.slow
def test_an_optimizer_made_for_the_copy_trains_it_alone(model):
    before = jax.tree.map(np.asarray, flax_nnx.state(model, flax_nnx.Param))
    ported = apply_policy(model, "mixed_bfloat16")
    optimizer = flax_nnx.Optimizer(ported, optax.sgd(0.1), wrt=flax_nnx.Param)
    loss = lambda model: sum(jnp.square(x - 1).mean() for x in model(IDS))  # noqa: E731
    optimizer.update(ported, flax_nnx.grad(loss)(ported))
    assert np.any(ported.heads.a.kernel[...] != model.heads.a.kernel[...])
    jax.tree.map(np.testing.assert_array_equal, before, flax_nnx.state(model, flax_nnx.Param))


def test_bare_parameters_of_a_module_are_cast_and_cycles_end():
    class Bare(flax_nnx.Module):
        def __init__(self):
            self.position = flax_nnx.Param(jnp.ones(4))
            self.stack = flax_nnx.data([flax_nnx.Linear(4, 4, rngs=flax_nnx.Rngs(0))])
            self.me = self

        def __call__(self, x):
            return self.stack[0](x + self.position[None])

    bare = apply_policy(Bare(), "bf16", {"stack/0": "p=f32,c=bf16"})
    assert bare.position[...].dtype == BF16
    assert bare.stack[0].kernel.dtype == F32
    assert bare(np.ones((2, 4), np.float32)).dtype == BF16


@pytest.mark.slow
def test_complex_layers_keep_their_dtypes():
    layer = flax_nnx.Linear(4, 4, param_dtype=jnp.complex64, rngs=flax_nnx.Rngs(0))
    layer = apply_policy(layer, "bf16")
    assert layer.kernel.dtype == jnp.complex64
    assert layer(np.ones((2, 4), np.complex64)).dtype == jnp.complex64


@pytest.mark.slow
def test_a_model_with_a_metaclass_of_its_own_is_adopted():
    class Meta(type(flax_nnx.Module)):
        pass

    class Theirs(flax_nnx.Module, metaclass=Meta):
        def __init__(self, *, rngs):
            self.linear = flax_nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    theirs = apply_policy(Theirs(rngs=flax_nnx.Rngs(0)), "mixed_bfloat16")
    assert theirs(np.ones((2, 4), np.float32)).dtype == F32
    assert isinstance(type(theirs), Meta)


class Plain(flax_nnx.Module, pytree=False):
    def __init__(self, *, rngs):
        layer = lambda: flax_nnx.Linear(4, 4, rngs=rngs)  # noqa: E731
        norms = [flax_nnx.LayerNorm(4, rngs=rngs)]
        self.blocks = [{"linear": layer(), "norms": norms}, {"linear": layer()}]
        self.pair = (layer(), [layer()])
        self.shared = {"head": self.pair[0]}
        self.scales = [flax_nnx.Param(jnp.ones(4))]
        self.sizes = [1, "two"]

    def __call__(self, x):
        for block in self.blocks:
            x = block["linear"](x)
            for norm in block.get("norms", []):
                x = norm(x)
        x = self.pair[1][0](flax_nnx.relu(self.pair[0](x)))
        return self.shared["head"](x * self.scales[0][...].astype(x.dtype)[None])


class Nets(flax_nnx.Module):
    def __init__(self):
        self.nets = flax_nnx.List([plain()])

    def __call__(self, x):
        return self.nets[0](x)


def plain():
    return Plain(rngs=flax_nnx.Rngs(0))


@pytest.mark.slow
def test_the_state_and_the_structure_of_the_graph_stay():
    model = plain()
    before = flax_nnx.state(model)
    model = apply_policy(model, MIXED)
    after = flax_nnx.state(model)
    assert isinstance(model, Plain)
    assert len(jax.tree.leaves(after)) == 11
    assert jax.tree.structure(after) == jax.tree.structure(before)
    again = flax_nnx.graphdef(apply_policy(plain(), MIXED))
    assert flax_nnx.graphdef(model) == again != flax_nnx.graphdef(plain())
    copies = flax_nnx.merge(*flax_nnx.split(model)), pickle.loads(pickle.dumps(model))
    for twin in (*copies, flax_nnx.clone(model)):
        assert type(twin) is type(model) and twin.pair[0] is twin.shared["head"]
        np.testing.assert_array_equal(twin(X), model(X))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("below", ["", "nets/0/"])  # a list of a module that is a pytree
def test_layers_in_nested_lists_tuples_and_dicts_obey_rules_by_their_paths(below):
    rules = {"blocks/0/linear": "f32", "blocks/0/norms/0": "f16", "pair/1/0": "bf16"}
    rules = {below + path: policy for path, policy in rules.items()}
    outer = Nets() if below else plain()
    ported = apply_policy(outer, MIXED, rules)
    model = ported.nets[0] if below else ported
    assert model.blocks[0]["linear"].dtype_policy == FULL
    assert model.blocks[0]["norms"][0].dtype_policy == get_policy("f16")
    assert model.blocks[1]["linear"].dtype_policy == model.pair[0].dtype_policy == MIXED
    assert model.pair[1][0].kernel.dtype == BF16 and model.blocks[1]["linear"].kernel.dtype == F32
    assert ported(X).dtype == F32 and len(jax.tree.leaves(flax_nnx.state(ported))) == 11
    text = f"Modules seen: .*{below}blocks/0/linear, {below}blocks/0/norms/0, .*{below}shared"
    with pytest.raises(ValueError, match=text):
        apply_policy(outer, MIXED, {"blocks/2": "f32"})


@pytest.mark.parametrize("path", ["pair/0", "shared/head"])
def test_a_shared_layer_stays_one_and_obeys_a_rule_of_each_of_its_paths(path):
    model = apply_policy(plain(), "bf16", {path: "f32"})
    assert model.pair[0] is model.shared["head"]
    assert model.pair[0].dtype_policy == FULL
    assert model.scales[0].dtype == BF16  # a parameter in a list


def test_one_that_derives_from_a_layer_runs_as_ours_does():
    class Dense(flax_nnx.Linear, pytree=False):
        def __init__(self, *, rngs):
            super().__init__(4, 4, rngs=rngs)
            self.notes = [1, 2]

    layer = NnxModel(apply_policy(Dense(rngs=flax_nnx.Rngs(0)), MIXED))
    assert isinstance(layer.instance, Dense) and layer(X).dtype == F32
    (dot,) = named(layer.operations(X), "dot_general")
    assert dot.outputs == ("float32",)  # the accumulator


def types_of(model):
    graph = flax_nnx.iter_graph(model)
    return {path: type(node) for path, node in graph if isinstance(node, flax_nnx.Pytree)}


@pytest.mark.slow
def test_layers_are_ours_and_other_modules_are_of_subclasses_of_the_same_name(model):
    port = apply_policy(model, MIXED)
    before, after = types_of(model), types_of(port)
    assert before.keys() == after.keys()
    for path, cls in after.items():
        theirs = before[path]
        assert issubclass(cls, theirs)
        assert (cls.__name__, cls.__qualname__) == (theirs.__name__, theirs.__qualname__)
    assert type(port.heads["a"]) is type(port.blocks[0].mlp.layers[0]) is nnx.Linear
    assert type(port.blocks) is flax_nnx.List and type(port.heads) is flax_nnx.Dict
    gate = port.blocks[0].mlp.layers[2]
    assert isinstance(gate, Gated) and isinstance(gate, nnx.Linear)
    assert gate.__call__.__name__ == "__call__"
    assert types_of(apply_policy(port, "f16")) == after == types_of(apply_policy(model, MIXED))
    assert types_of(flax_nnx.merge(*flax_nnx.split(port))) == after
    assert port(IDS)[0].dtype == F32 and np.any(port.bn.mean[...] != 0)
    assert list(port.heads) == ["a", "b"] and len(port.blocks) == 2
    port.blocks.append(flax_nnx.Param(jnp.ones(2)))
    assert port.blocks[2].dtype == F32


@pytest.mark.slow
def test_no_class_of_flax_s_or_of_a_user_s_changes(model):
    types = types_of(model).values()
    classes = {base for cls in types for base in cls.__mro__ if base is not object}
    assert {Model, Gated, Other, Convolved, Mixin, flax_nnx.Linear, flax_nnx.Module} <= classes
    before = {cls: dict(vars(cls)) for cls in classes}
    values = [value for attributes in before.values() for value in attributes.values()]
    functions = {value: dict(vars(value)) for value in values if inspect.isfunction(value)}
    port = apply_policy(model, MIXED)
    port(IDS)
    flax_nnx.grad(lambda model: model(IDS)[0].sum())(port)
    for each in (model, port):
        policy.audit(each, IDS)
        policy.compare(each, IDS)
        for part in (each.graph, each.blocks[0].mlp):
            nnx.tabulate(part, X)
        policy.autocast(each, MIXED)(IDS)
    nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), dtype_policy="bf16")
    assert {cls: dict(vars(cls)) for cls in classes} == before
    assert {function: dict(vars(function)) for function in functions} == functions


def test_override_checks_and_the_identity_of_methods_hold():
    for cls in (Inherits, Other):
        model = apply_policy(cls(rngs=flax_nnx.Rngs(0)), "bf16")
        ported = type(model)
        for name in ("make", "update", "alias", "described", "__call__", "_private", "static"):
            assert getattr(ported, name) is getattr(cls, name)
        assert ported.alias is ported.update and ported.of_class(3) == 3 and model.width == 4
        assert (ported.make is Convolved.make) is (cls is Inherits)
        assert model(X).dtype == model.update(X).dtype == model.described(X).dtype == BF16


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


@pytest.mark.slow
def test_importing_wraps_nothing_and_a_pickle_obeys_in_a_fresh_process(tmp_path):
    rngs = flax_nnx.Rngs(0)
    model = flax_nnx.Sequential(flax_nnx.Linear(4, 4, rngs=rngs), flax_nnx.LayerNorm(4, rngs=rngs))
    model = apply_policy(model, MIXED, {"layers/1": "f32"})
    path = tmp_path / "model"
    own = apply_policy(Inherits(rngs=rngs), MIXED)
    path.write_bytes(pickle.dumps((flax_nnx.graphdef(model), model, own)))
    definition = pickle.loads(pickle.dumps(flax_nnx.graphdef(own)))
    assert definition == flax_nnx.graphdef(own) != flax_nnx.graphdef(Inherits(rngs=rngs))
    code = f"""
import pickle, jax, numpy as np
from flax import nnx
import mpmodules.nnx
classes = (nnx.Linear, nnx.LayerNorm, nnx.Sequential, nnx.LSTMCell)
mpmodules.nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), dtype_policy="bf16")
assert not any(hasattr(cls.__call__, "__wrapped__") for cls in classes)
definition, model, own = pickle.load(open({str(path)!r}, "rb"))
assert type(model.layers[0]) is mpmodules.nnx.Linear and definition == nnx.graphdef(model)
assert own.__class__.__name__ == "Inherits" and nnx.graphdef(own) != definition
x = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
assert model(x).dtype == "float32" and model.layers[0](x).dtype == "bfloat16"
assert ":bf16[2,4] = dot_general" in str(jax.make_jaxpr(lambda x: model(x))(x))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.slow
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


def test_threads_audit_models_of_one_class_with_the_names_of_their_modules(model):
    def paths(model):
        return {operation.path for operation in policy.audit(model, IDS).operations}

    models = [flax_nnx.clone(model) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(paths, models)) == [paths(model)] * 4
    assert "graph/linear" in paths(model)


def test_a_linen_module_inside_runs_as_it_is_and_its_parameters_are_cast():
    module = flax_nnx.bridge.ToNNX(flax_linen.Dense(3), rngs=flax_nnx.Rngs(0)).lazy_init(X)
    model = apply_policy(flax_nnx.Sequential(module, lambda x: x), "bf16", own_code="keep")
    assert model.layers[0].kernel.dtype == BF16 and module.kernel.dtype == F32
    assert model(X).dtype == BF16


@pytest.mark.slow
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

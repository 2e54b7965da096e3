"""The policy is captured when a module is built: a static attribute, in the graph definition and
never in the state.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import copy
import inspect
import pickle
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import Policy, get_policy, nnx, set_policy, use_policy
from policy import DtypePolicyWarning

MIXED = get_policy("mixed_bfloat16")
HALF = get_policy("bfloat16")
FULL = get_policy("float32")
X = np.ones((2, 4), np.float32)


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


def test_an_argument_gives_a_policy_to_what_is_built_inside():
    layer = nnx.Linear(4, 4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    assert layer.dtype_policy == MIXED
    assert (layer.dtype, layer.param_dtype) == (jnp.bfloat16, jnp.float32)
    net = Net(dtype_policy="bf16", rngs=nnx.Rngs(0))
    assert net.dtype_policy == net.linear.dtype_policy == net.norm.dtype_policy == HALF
    assert net.linear.kernel.dtype == net.norm.scale.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (nnx.LayerNorm, (MIXED, MIXED, FULL)),
        (flax_nnx.LayerNorm, (MIXED, MIXED, FULL)),
        (Net, (FULL, FULL, FULL)),
    ],
)
def test_a_class_rule_in_force_holds_for_the_class_and_what_it_builds(cls, expected):
    with use_policy("mixed_bfloat16", rules={cls: "f32"}):
        net, other = Net(rngs=nnx.Rngs(0)), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert (net.dtype_policy, net.linear.dtype_policy, net.norm.dtype_policy) == expected
    assert other.dtype_policy == MIXED


def test_a_class_rule_reaches_the_layers_that_attention_builds():
    with use_policy("mixed_bfloat16", rules={nnx.LinearGeneral: "f32"}):
        layer = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=False)
    assert layer.dtype_policy == MIXED
    assert (layer.query.dtype_policy, layer.query.dtype) == (FULL, jnp.float32)


def test_path_rules_around_construction_are_refused_with_a_pointer():
    with (
        use_policy("f32", rules={"head": "bf16"}),
        pytest.raises(
            ValueError, match=r"^Building Linear under .*: path rules can't apply here, "
        ),
    ):
        nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def test_a_block_and_the_global_policy_give_a_policy_and_without_either_there_is_none():
    set_policy("float32")
    with use_policy("mixed_bfloat16"):
        assert Net(rngs=nnx.Rngs(0)).linear.dtype_policy == MIXED
    assert Net(rngs=nnx.Rngs(0)).linear.dtype_policy == FULL
    with use_policy(None):
        assert Net(rngs=nnx.Rngs(0)).linear.dtype_policy is None
    set_policy(None)
    net = Net(rngs=nnx.Rngs(0))
    assert net.dtype_policy is net.linear.dtype_policy is net.linear.dtype is None


def test_a_module_built_in_a_call_obeys_the_caller():
    class Lazy(nnx.Module):
        def __call__(self, x):
            self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            return self.linear(x)

    lazy = Lazy(dtype_policy="mixed_bfloat16")
    assert lazy(X).dtype == jnp.float32
    assert lazy.linear.dtype_policy == MIXED


def test_a_child_built_before_its_parent_obeys_what_was_in_force_then():
    class Holder(nnx.Module):
        def __init__(self, child):
            self.child = child

    with use_policy("mixed_bfloat16"):
        child = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    with use_policy("float32"):
        holder = Holder(child)
    assert (holder.dtype_policy, holder.child.dtype_policy) == (FULL, MIXED)


class Stack(nnx.Module):
    def __init__(self, layers):
        self.layers = nnx.List(layers)


def test_a_container_refuses_a_policy_that_its_children_can_t_follow():
    ours = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError,
        match=r"^Sequential\(dtype_policy=.*: LayerNorm, Linear had been built before, ",
    ):
        nnx.Sequential(*ours, dtype_policy=MIXED)
    with pytest.raises(ValueError, match=r"^Stack\(dtype_policy=.*: Linear had been built before"):
        Stack([flax_nnx.Linear(4, 4, rngs=nnx.Rngs(0))], dtype_policy=MIXED)


def test_a_container_takes_children_that_obey_its_policy_or_carry_their_own():
    with use_policy("mixed_bfloat16"):
        inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float32"):
            explicit = nnx.Linear(4, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    own = nnx.Linear(4, 4, dtype_policy="f32", rngs=nnx.Rngs(0))
    model = nnx.Sequential(inner, nnx.relu, own, explicit, dtype_policy="mixed_bfloat16")
    assert model(X).dtype == jnp.float32


def test_the_signature_shows_dtype_policy():
    signature = inspect.signature(nnx.Linear)
    assert list(signature.parameters)[:2] == ["in_features", "out_features"]
    assert signature.parameters["dtype_policy"].kind is inspect.Parameter.KEYWORD_ONLY
    assert signature.parameters["dtype_policy"].default is None
    assert list(inspect.signature(Net).parameters) == ["rngs", "dtype_policy"]

    class Open(nnx.Module):
        def __init__(self, width, **options): ...

    assert list(inspect.signature(Open).parameters) == ["width", "dtype_policy", "options"]


@pytest.mark.parametrize("base", [flax_nnx.Module, nnx.Module])
def test_a_class_is_mapped_over_as_in_flax(base):
    class Block(base):
        def __init__(self, rngs, width=3, *, use_bias=False):
            self.up = nnx.Linear(2, width, use_bias=use_bias, rngs=rngs)

    with use_policy("bfloat16"):
        blocks = nnx.vmap(Block)(nnx.Rngs(0).split(4))
        of_split = nnx.split_rngs(splits=4)(nnx.vmap(Block))(nnx.Rngs(0))
    for each in (blocks, of_split):
        assert each.up.kernel.shape == (4, 2, 3) and each.up.kernel.dtype == jnp.bfloat16


def test_the_policy_is_in_the_graph_definition_and_never_in_the_state():
    with use_policy("mixed_bfloat16"):
        net, again = Net(rngs=nnx.Rngs(0)), Net(rngs=nnx.Rngs(0))
    with use_policy("p=f32,c=f16,o=f32"):
        other = Net(rngs=nnx.Rngs(0))
    plain = Net(rngs=nnx.Rngs(0))
    definition, state = flax_nnx.split(net)
    assert jax.tree.structure(state) == jax.tree.structure(flax_nnx.state(plain))
    assert definition == flax_nnx.graphdef(again)
    assert hash(definition) == hash(flax_nnx.graphdef(again))
    assert definition != flax_nnx.graphdef(other)
    assert definition != flax_nnx.graphdef(plain)


def test_a_policy_given_and_one_captured_differ_only_where_the_boundary_does():
    given = nnx.Linear(4, 4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    with use_policy("mixed_bfloat16"):
        captured = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert (given(X).dtype, captured(X).dtype) == (jnp.float32, jnp.bfloat16)
    assert flax_nnx.graphdef(given) != flax_nnx.graphdef(captured)


@pytest.mark.parametrize("copied", ["merge", "clone", "deepcopy", "pickle", "eval_shape"])
def test_copies_keep_the_policy(copied):
    layer = nnx.Linear(4, 4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    copies = {
        "merge": lambda: flax_nnx.merge(*flax_nnx.split(layer)),
        "clone": lambda: flax_nnx.clone(layer),
        "deepcopy": lambda: copy.deepcopy(layer),
        "pickle": lambda: pickle.loads(pickle.dumps(layer)),
        "eval_shape": lambda: flax_nnx.eval_shape(lambda: flax_nnx.clone(layer)),
    }
    twin = copies[copied]()
    assert twin is not layer
    assert twin.dtype_policy == MIXED
    assert flax_nnx.graphdef(twin) == flax_nnx.graphdef(layer)


def test_a_user_s_subclass_of_a_layer_needs_no_dtype_in_its_init():
    class Scaled(nnx.Linear):
        def __init__(self, width, *, rngs):
            self.gate = nnx.Linear(width, width, rngs=rngs)
            super().__init__(width, width, use_bias=False, rngs=rngs)
            self.scale = nnx.Linear(width, width, dtype_policy="f32", rngs=rngs)

        def __call__(self, x):  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().__call__(x) * self.gate(x)

    with use_policy("bf16"):
        layer = Scaled(4, rngs=nnx.Rngs(0))
    assert (layer.dtype_policy, layer.kernel.dtype, layer.gate.kernel.dtype) == (
        HALF,
        jnp.bfloat16,
        jnp.bfloat16,
    )
    assert layer.scale.kernel.dtype == jnp.float32
    given = Scaled(4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    assert (given.dtype_policy, given.dtype, given.gate.dtype_policy) == (
        MIXED,
        jnp.bfloat16,
        MIXED,
    )
    assert given(X).dtype == jnp.float32


def test_a_user_s_subclass_of_every_layer_obeys_the_policy():
    builders = {
        nnx.LinearGeneral: (4, 4),
        nnx.Einsum: ("ab,bc->ac", (4, 4)),
        nnx.Conv: (4, 4, (3,)),
        nnx.ConvTranspose: (4, 4, (3,)),
        nnx.Embed: (4, 4),
        nnx.RMSNorm: (4,),
        nnx.BatchNorm: (4,),
        nnx.MultiHeadAttention: (2, 4),
    }
    for base, arguments in builders.items():
        derived = type(
            base.__name__,
            (base,),
            {"__init__": lambda self, base=base, **k: base.__init__(self, **k)},
        )
        names = list(inspect.signature(base).parameters)
        with use_policy("p=bf16,c=f16,o=f32"):
            layer = flax_nnx.eval_shape(
                lambda derived=derived, names=names, arguments=arguments: derived(
                    **dict(zip(names, arguments, strict=False)), rngs=nnx.Rngs(0)
                )
            )
        assert (layer.dtype, layer.param_dtype) == (jnp.float16, jnp.bfloat16), base
        params = jax.tree.leaves(flax_nnx.state(layer, flax_nnx.Param))
        assert {leaf.dtype for leaf in params} == {jnp.dtype(jnp.bfloat16)}, base


def test_a_module_may_have_a_dtype_policy_parameter_of_its_own():
    class Own(nnx.Module):
        def __init__(self, width, dtype_policy=None, *, rngs):
            self.seen = str(dtype_policy)
            self.linear = nnx.Linear(width, width, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    for own in (
        Own(4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0)),
        Own(4, MIXED, rngs=nnx.Rngs(0)),
    ):
        assert own.seen in ("mixed_bfloat16", str(MIXED))
        assert own.dtype_policy == own.linear.dtype_policy == MIXED
        assert own(X).dtype == jnp.float32
    assert Own(4, rngs=nnx.Rngs(0)).seen == "None"
    assert list(inspect.signature(Own).parameters) == ["width", "dtype_policy", "rngs"]


def test_a_module_that_stores_its_own_dtype_policy_argument_keeps_a_policy_there():
    class Stores(nnx.Module):
        def __init__(self, dtype_policy=None):
            self.dtype_policy = dtype_policy

        def __call__(self, x):
            return x * 2

    assert Stores(dtype_policy="mixed_bfloat16").dtype_policy == MIXED
    assert Stores("f32").dtype_policy == FULL
    assert Stores()(X).dtype == jnp.float32
    with use_policy("bf16"):
        assert Stores().dtype_policy == HALF


def test_dataclass_modules_take_a_policy():
    @flax_nnx.dataclass
    class Data(nnx.Module):
        linear: nnx.Linear
        width: int = flax_nnx.static(default=4)

        def __call__(self, x):
            return self.linear(x) * self.width

    with use_policy("mixed_bfloat16"):
        model = Data(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    assert model.dtype_policy == MIXED
    assert model(X).dtype == jnp.float32
    given = Data(
        linear=nnx.Linear(4, 4, dtype_policy="bf16", rngs=nnx.Rngs(0)),
        dtype_policy="mixed_bfloat16",
    )
    assert given(X).dtype == jnp.float32


def test_a_metaclass_of_the_user_s_own_can_derive_from_ours():
    built = []

    class Counting(type(nnx.Module)):
        def __call__(cls, *args, **kwargs):
            built.append(cls.__name__)
            return super().__call__(*args, **kwargs)

    class Counted(nnx.Module, metaclass=Counting):
        def __call__(self, x):
            return x + 1

    assert Counted(dtype_policy="bf16")(X).dtype == jnp.bfloat16
    assert built == ["Counted"]


def test_multiple_inheritance_with_a_flax_module_is_one_of_ours():
    class Theirs(flax_nnx.Module):
        def __init__(self, *, rngs):
            self.linear = flax_nnx.Linear(4, 4, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    class Both(nnx.Module, Theirs):
        pass

    model = Both(dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    assert model(X).dtype == jnp.float32


def test_isinstance_holds_across_the_port():
    ours, theirs = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), flax_nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    for layer in (ours, theirs):
        assert isinstance(layer, nnx.Module)
        assert isinstance(layer, flax_nnx.Module)
        assert isinstance(layer, nnx.Linear)
        assert isinstance(layer, flax_nnx.Linear)
        assert not isinstance(layer, nnx.Conv)
    assert isinstance(nnx.List([ours]), nnx.Module)
    assert issubclass(flax_nnx.Linear, nnx.Linear)
    assert not issubclass(flax_nnx.Linear, Net)
    assert not isinstance(ours, Net)
    assert not isinstance(X, nnx.Module)


def test_a_failed_construction_leaves_no_policy_behind():
    class Broken(nnx.Module):
        def __init__(self):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Broken(dtype_policy="bf16")
    assert nnx.Linear(4, 4, rngs=nnx.Rngs(0)).dtype_policy is None


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ("mixed_bfloat16", "under 'params=float32,compute=bfloat16,output=float32'"),
        (None, "under no policy"),
    ],
)
def test_a_scope_around_a_call_changes_no_layer_and_warns_once(policy, told):
    net = Net(dtype_policy=policy, rngs=nnx.Rngs(0))
    expected = str(jax.make_jaxpr(lambda x: net(x))(X))
    with use_policy("f16"), pytest.warns(DtypePolicyWarning) as warned:
        assert str(jax.make_jaxpr(lambda x: net(x))(X)) == expected
        net(X)
    assert len(warned) == 1
    text = f"^Net was built {told}\\. The scope around this call, .*, changes no nnx layer, because"
    assert re.match(text, str(warned[0].message))


def test_no_warning_where_the_scope_agrees_or_there_is_none():
    with use_policy("mixed_bfloat16"):
        net = Net(rngs=nnx.Rngs(0))
        net(X)
    net(X)
    with use_policy(Policy("f32", "bf16", "f32")):
        net(X)


def test_a_method_that_init_calls_does_not_warn_that_the_module_has_no_policy():
    class Built(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.width = self.features(jnp.ones((1, 4))).shape[-1]

        def features(self, x):
            return self.linear(x)

        def __call__(self, x):
            return self.features(x)

    class Derived(nnx.Linear):
        def __init__(self, *, rngs):
            super().__init__(4, 4, rngs=rngs)
            self.width = self(jnp.ones((1, 4))).shape[-1]

    with warnings.catch_warnings(), use_policy(MIXED):
        warnings.simplefilter("error")
        models = [
            Built(rngs=nnx.Rngs(0)),
            Built(rngs=nnx.Rngs(0), dtype_policy="bf16"),
            Derived(rngs=nnx.Rngs(0)),
        ]
    assert [model.dtype_policy for model in models] == [MIXED, get_policy("bf16"), MIXED]


def test_another_module_that_was_built_under_no_policy_still_warns_when_init_calls_it():
    plain = nnx.Sequential(lambda x: x)

    class Calls(nnx.Module):
        def __init__(self):
            self.width = plain(jnp.ones((1, 4))).shape[-1]

    with (
        use_policy(MIXED),
        pytest.warns(DtypePolicyWarning, match="^Sequential was built under no policy"),
    ):
        Calls()


def test_dtype_attributes_of_modules_of_ours_are_their_own():
    class Ours(nnx.Module):
        def __init__(self):
            self.dtype = jnp.float32

        def __call__(self, x):
            return x

    assert nnx.apply_policy(Ours(), MIXED, dtype_fields=True).dtype is jnp.float32

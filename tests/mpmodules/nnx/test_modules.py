"""The policy is captured when a module is built: a static attribute, in the graph definition and
never in the state, that no hand sets. What Flax does with its own modules works on ours.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import contextlib
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import get_policy, nnx, use_policy
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


@pytest.mark.cases(fast=1)
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
    with use_policy("mixed_bfloat16", rules={nnx.LinearGeneral: "f32"}):
        attention = nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=False)
    assert (attention.dtype_policy, attention.query.dtype_policy) == (MIXED, FULL)
    with use_policy("bf16", rules={nnx.Linear: MIXED}):
        layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    assert layer(X).dtype == jnp.float32  # a boundary


def test_what_raises_while_it_is_built_leaves_no_policy_behind():
    class Broken(nnx.Module):
        def __init__(self):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Broken(dtype_policy="bf16")
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


def test_a_container_takes_children_that_obey_its_policy_or_carry_their_own_and_no_others():
    with use_policy("mixed_bfloat16"):
        inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    own = nnx.Linear(4, 4, dtype_policy="f32", rngs=nnx.Rngs(0))
    model = nnx.Sequential(inner, nnx.relu, own, dtype_policy="mixed_bfloat16")
    assert model(X).dtype == jnp.float32
    for module, name in ((nnx, "LayerNorm, Linear"), (flax_nnx, "LayerNorm, Linear")):
        layers = module.Linear(4, 4, rngs=nnx.Rngs(0)), module.LayerNorm(4, rngs=nnx.Rngs(0))
        text = rf"^Sequential\(dtype_policy=.*: {name} had been built before, .*Build them inside"
        with pytest.raises(ValueError, match=text):
            nnx.Sequential(*layers, dtype_policy=MIXED)


def test_the_signature_shows_dtype_policy():
    signature = inspect.signature(nnx.Linear)
    assert list(signature.parameters)[:2] == ["in_features", "out_features"]
    assert signature.parameters["dtype_policy"].kind is inspect.Parameter.KEYWORD_ONLY
    assert signature.parameters["dtype_policy"].default is None
    assert list(inspect.signature(Net).parameters) == ["rngs", "dtype_policy"]

    class Open(nnx.Module):
        def __init__(self, width, **options): ...

    assert list(inspect.signature(Open).parameters) == ["width", "dtype_policy", "options"]


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("base", [flax_nnx.Module, nnx.Module])
def test_a_class_is_mapped_over_as_in_flax(base):
    class Block(base):
        def __init__(self, rngs, width=3, *, use_bias=False):
            self.up = nnx.Linear(2, width, use_bias=use_bias, rngs=rngs)

    told = pytest.warns(DtypePolicyWarning, match="^Block of flax.nnx obeys no policy: .*nnx from ")
    with use_policy("bfloat16"), contextlib.nullcontext() if base is nnx.Module else told:
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
    given = nnx.Linear(4, 4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    assert flax_nnx.graphdef(given) != flax_nnx.graphdef(net.linear)  # it is a boundary
    abstract = flax_nnx.eval_shape(lambda: flax_nnx.clone(net))
    for twin in (flax_nnx.merge(definition, state), abstract):
        assert twin is not net and flax_nnx.graphdef(twin) == definition


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
    assert layer.dtype_policy == HALF and layer.scale.kernel.dtype == jnp.float32
    assert layer.kernel.dtype == layer.gate.kernel.dtype == jnp.bfloat16
    given = Scaled(4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    assert given.dtype_policy == given.gate.dtype_policy == MIXED and given.dtype == jnp.bfloat16
    assert given(X).dtype == jnp.float32


@pytest.mark.parametrize("stores", [False, True])
def test_a_module_may_have_a_dtype_policy_parameter_of_its_own(stores):
    class Own(nnx.Module):
        def __init__(self, width, dtype_policy=None, *, rngs):
            self.seen = dtype_policy
            self.linear = nnx.Linear(width, width, rngs=rngs)
            if stores:
                self.dtype_policy = dtype_policy

        def __call__(self, x):
            return self.linear(x)

    named = Own(4, dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    for own, seen in ((named, "mixed_bfloat16"), (Own(4, MIXED, rngs=nnx.Rngs(0)), MIXED)):
        assert own.seen == seen
        assert own.dtype_policy == own.linear.dtype_policy == MIXED
        assert own(X).dtype == jnp.float32
    with use_policy("bf16"):
        assert Own(4, rngs=nnx.Rngs(0)).dtype_policy == HALF
    assert list(inspect.signature(Own).parameters) == ["width", "dtype_policy", "rngs"]


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
    layer = nnx.Linear(4, 4, dtype_policy="bf16", rngs=nnx.Rngs(0))
    given = Data(linear=layer, dtype_policy="mixed_bfloat16")
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


TOLD = {MIXED: f"under '{MIXED}'", None: "under no policy"}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize(("policy", "told"), TOLD.items())
def test_a_scope_around_a_call_changes_no_layer_and_warns_once(policy, told):
    net = Net(dtype_policy=policy, rngs=nnx.Rngs(0))
    expected = str(jax.make_jaxpr(lambda x: net(x))(X))
    with use_policy("f16"), pytest.warns(DtypePolicyWarning) as warned:
        assert str(jax.make_jaxpr(lambda x: net(x))(X)) == expected
        net(X)
    assert len(warned) == 1
    text = f"^Net was built {told}\\. The scope around this call, .*, changes no nnx layer, because"
    message = str(warned[0].message)
    assert re.match(text, message) and "build the model in" in message
    with use_policy(None):
        net(X)


@pytest.mark.slow
def test_a_method_that_init_calls_does_not_warn_that_the_module_has_no_policy():
    class Built(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.width = self.features(jnp.ones((1, 4))).shape[-1]

        def features(self, x):
            return self.linear(x)

        def __call__(self, x):
            return self.features(x)

    plain = nnx.Sequential(lambda x: x)
    with use_policy(MIXED):
        assert Built(rngs=nnx.Rngs(0)).dtype_policy == MIXED
        assert Built(rngs=nnx.Rngs(0), dtype_policy="bf16").dtype_policy == HALF
        with pytest.warns(DtypePolicyWarning, match="^Sequential was built under no policy"):
            plain(X)  # another module does


def test_a_policy_that_is_set_by_hand_is_rejected_and_the_module_stays_as_it_was():
    class Late(nnx.Module):
        def __init__(self, rngs: Any):
            self.net = Net(rngs=rngs)
            self.net.dtype_policy = None

    for built_under, given in ((None, "bf16"), (MIXED, None), (MIXED, get_policy("mixed_float16"))):
        with use_policy(built_under):
            model = Net(rngs=nnx.Rngs(0))
        for module in (model, model.linear):
            with pytest.raises(ValueError, match=r"by hand.*nnx\.apply_policy\(model, '?(None|\w)"):
                module.dtype_policy = given
            assert module.dtype_policy == built_under
        model(X)
    with pytest.raises(ValueError, match="by hand"):
        Late(nnx.Rngs(0), dtype_policy="bf16")


ROWS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)


class Attends(nnx.Module):
    def __init__(self, *, rngs):
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def features(self, x):
        return self.norm(x)

    def __call__(self, x):
        return self.drop(self.attn(self.features(x)))


@pytest.fixture
def net():
    return Attends(dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))


def test_display_repr_and_tabulate_show_the_policy_and_do_not_fail(net, capsys):
    assert "dtype_policy=Policy('params=float32,compute=bfloat16,output=float32')" in repr(net)
    assert "Policy('params=float32,compute=bfloat16,output=float32')" in str(flax_nnx.graphdef(net))
    flax_nnx.display(net)
    assert "BatchNorm" in capsys.readouterr().out


@pytest.mark.slow
def test_train_eval_view_and_set_attributes_reach_our_layers(net):
    net.eval()
    assert net.norm.use_running_average
    assert net.drop.deterministic
    before = net.norm.mean[...]
    np.testing.assert_array_equal(net(ROWS), net(ROWS))
    np.testing.assert_array_equal(net.norm.mean[...], before)
    net.train()
    net(ROWS)
    assert np.any(net.norm.mean[...] != before)
    view = flax_nnx.view(net, deterministic=True, use_running_average=True)
    assert view.drop.deterministic
    assert view.dtype_policy == net.dtype_policy
    np.testing.assert_array_equal(view(ROWS), view(ROWS))
    assert not net.drop.deterministic
    before = net.norm.mean[...]
    flax_nnx.view(net, use_running_average=False)(ROWS)  # changes the model's own statistics
    assert np.any(net.norm.mean[...] != before)
    net.set_attributes(deterministic=True, raise_if_not_found=False)
    assert net.drop.deterministic


def test_capture_sow_and_perturb_see_rounded_float32_inside():
    class Sows(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            x = self.perturb("at", self.linear(x))
            self.sow(nnx.Intermediate, "hidden", x)
            return x

    model = Sows(dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    capture: Any = flax_nnx.capture(model, flax_nnx.Perturbation, flax_nnx.Intermediate)
    out, perturbations, sown = capture(ROWS)
    (hidden,) = sown["hidden"].get_value()
    assert out.dtype == hidden.dtype == perturbations["at"].get_value().dtype == jnp.float32
    np.testing.assert_array_equal(hidden, out)
    np.testing.assert_array_equal(hidden, hidden.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_capturing_every_method_s_output_shows_what_flax_shows(policy):
    def captured(module, **options):
        class Model(module.Module):
            def __init__(self, *, rngs):
                self.linear = module.Linear(4, 4, rngs=rngs)
                self.norm = module.LayerNorm(4, rngs=rngs)

            def features(self, x):
                return self.linear(x)

            def __call__(self, x):
                return self.norm(self.features(x))

        model = Model(rngs=module.Rngs(0), **options)
        forward = flax_nnx.capture(
            model, flax_nnx.Intermediate, method_outputs=flax_nnx.Intermediate
        )
        out, state = forward(ROWS)
        assert isinstance(model.linear, module.Linear)
        np.testing.assert_array_equal(model(ROWS), out)
        return {
            "/".join(map(str, path)): [x.shape for x in leaf.get_value()]
            for path, leaf in flax_nnx.to_flat_state(state)
        }

    options = {} if policy is None else {"dtype_policy": policy}
    assert captured(nnx, **options) == captured(flax_nnx)


@pytest.mark.slow
def test_ours_run_in_linen_through_flax_s_bridge():
    model = flax_nnx.bridge.to_linen(nnx.Linear, 4, 4, dtype_policy="mixed_bfloat16")
    variables = model.init(jax.random.key(0), ROWS)
    assert model.apply(variables, ROWS).dtype == jnp.float32

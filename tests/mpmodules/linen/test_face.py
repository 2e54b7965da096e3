"""Our layers look to a model's own code, and to Flax's tools, as Flax's do."""

from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen as our_nn
from policy import Policy, current_policy, use_policy
from tests.mpmodules.apis import KEY, compact
from tests.programs import apply

X = jnp.ones((2, 4))


def net(nn: Any) -> Any:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(4)(x))
            return nn.Dense(2)(nn.LayerNorm()(x))

    return Net


Net, FlaxNet = net(our_nn), net(flax_nn)
Net.__qualname__ = "Net"  # pickle finds it


def attention_model(nn: Any) -> Any:
    def call(x):
        x = nn.MultiHeadDotProductAttention(2)(nn.Embed(5, 4)(x))
        return nn.Sequential([nn.Dense(4), nn.GroupNorm(2)])(x)

    return compact(call, nn)()


@pytest.mark.slow
def test_a_users_own_field_called_policy_is_the_users():
    class Agent(our_nn.Module):
        policy: Any
        keep: str = "x"

        @our_nn.compact
        def __call__(self, x):
            return self.policy(x)

    agent = Agent(our_nn.Dense(2), dtype_policy="mixed_bfloat16")
    variables = agent.init(KEY, X)
    assert list(variables["params"]) == ["policy"]
    assert isinstance(agent.dtype_policy, Policy) and isinstance(agent.policy, flax_nn.Dense)


def test_a_text_policy_is_stored_as_a_policy():
    layer = our_nn.Dense(3, dtype_policy="p=f32, c=bf16, o=f32")
    assert layer.dtype_policy == Policy("f32", "bf16", "f32")
    assert layer == our_nn.Dense(3, dtype_policy="mixed_bfloat16")
    assert hash(layer) == hash(our_nn.Dense(3, dtype_policy="mixed_bfloat16"))
    assert layer != our_nn.Dense(3) and "dtype_policy" in repr(layer)
    assert layer.clone(dtype_policy="f16").dtype_policy == Policy("f16", "f16", "f16")
    unbound, _ = layer.bind(layer.init(KEY, X)).unbind()
    assert unbound.dtype_policy == layer.dtype_policy


def test_a_clone_made_during_a_call_has_what_the_user_declared():
    seen = []

    class Layer(our_nn.Dense):
        @our_nn.compact
        def __call__(self, inputs):
            seen.append(self.clone(parent=None))
            return super().__call__(inputs)

    model = our_nn.Sequential([Layer(3)], dtype_policy="mixed_bfloat16")
    model.init(KEY, X)
    assert [layer.dtype_policy for layer in seen] == [None]
    assert list(model.layers) == [Layer(3)]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_interceptors_and_captures_see_the_calls_that_they_see_in_flax(policy):
    def seen(model, x):
        calls = []

        def note(next_fun, args, kwargs, context):
            calls.append((type(context.module).__name__, context.method_name, context.module.path))
            return next_fun(*args, **kwargs)

        variables = model.init(KEY, x)
        with flax_nn.intercept_methods(note):
            _, state = model.apply(variables, x, capture_intermediates=True)
        return calls, jax.tree.structure(state["intermediates"])

    tokens = jnp.zeros((1, 3), int)
    theirs = [seen(FlaxNet(), X), seen(attention_model(flax_nn), tokens)]
    with use_policy(policy):
        ours = [seen(Net(), X), seen(attention_model(our_nn), tokens)]
    assert ours == theirs
    pairs = (FlaxNet(), X), (attention_model(flax_nn), tokens)
    ports = [seen(our_nn.apply_policy(model, policy or "f32"), x) for model, x in pairs]
    assert ports == theirs


NORMS: dict[str, Any] = {"LayerNorm": {}, "RMSNorm": {}, "InstanceNorm": {}} | {
    "GroupNorm": {"num_groups": 2},
    "BatchNorm": {"use_running_average": False},
}


@pytest.mark.cases(fast=1, slow=4)
@pytest.mark.parametrize("lift", [lambda cls: cls, our_nn.remat, our_nn.jit])
@pytest.mark.parametrize("norm", NORMS)
def test_a_captured_output_is_what_the_call_returned(norm, lift):

    block = compact(lambda x: getattr(our_nn, norm)(**NORMS[norm], name="norm")(x))
    model: Any = compact(lambda x: lift(block)(name="block")(x))(dtype_policy="mixed_bfloat16")
    x = jax.random.normal(KEY, (2, 3, 4))
    variables = model.init(KEY, x)
    mutable = ["intermediates", "batch_stats"]
    y, state = model.apply(variables, x, capture_intermediates=True, mutable=mutable)
    (outer,), block = state["intermediates"]["__call__"], state["intermediates"]["block"]
    np.testing.assert_array_equal(outer, y)
    for (inner,) in (block["__call__"], block["norm"]["__call__"]):
        assert inner.dtype == jnp.float32
        np.testing.assert_array_equal(inner, y)
    np.testing.assert_array_equal(y, y.astype(jnp.bfloat16).astype(jnp.float32))  # rounded


def test_a_modules_setup_runs_under_its_policy():
    def param_dtype():
        policy = current_policy()
        assert policy is not None
        return policy.param_dtype

    class Inner(our_nn.Module):
        def setup(self):
            self.scale = self.param("scale", our_nn.initializers.ones, (), param_dtype())

        def __call__(self, x):
            return x * self.scale.astype(x.dtype)

    parts = [Inner(dtype_policy="p=bf16,c=f32"), Inner()]
    model = our_nn.Sequential(parts, dtype_policy="float16")
    params = jax.eval_shape(model.init, KEY, X)["params"]
    assert [params[f"layers_{i}"]["scale"].dtype.name for i in (0, 1)] == ["bfloat16", "float16"]


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_the_name_stack_names_each_layer_once_and_a_boundarys_casts(policy):
    def stacks(model, policy):
        variables = jax.eval_shape(lambda: model.init(KEY, X))
        with use_policy(policy):
            eqns = jax.make_jaxpr(model.apply)(variables, X).jaxpr.eqns
        dots = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
        return [str(eqn.source_info.name_stack) for eqn in (*dots, eqns[0], eqns[-1])]

    ours, theirs = stacks(Net(), policy), stacks(FlaxNet(), None)
    assert ours[:2] == theirs[:2] == ["Net/Dense_0", "Net/Dense_1"]
    casts = ["Net/Dense_0/policy_boundary", "Net/policy_boundary"]
    assert ours[2:] == (casts if policy else theirs[2:])


@pytest.mark.slow
def test_share_scope_perturb_and_sow_work_under_a_policy():
    class Model(our_nn.Module):
        @our_nn.compact
        def __call__(self, x):
            x = self.perturb("p", our_nn.Dense(4)(x))
            self.sow("intermediates", "hidden", x)
            return x

    model = Model(dtype_policy="mixed_bfloat16")
    variables: Any = model.init(KEY, X)
    out, state = apply(model, variables, X, mutable=["intermediates"])
    (hidden,) = state["intermediates"]["hidden"]
    assert {out.dtype, hidden.dtype, variables["perturbations"]["p"].dtype} == {out.dtype}
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(hidden, out)

    def loss(perturbations):
        return (apply(model, {**variables, "perturbations": perturbations}, X) * 3).sum()

    assert (jax.grad(loss)(variables["perturbations"])["p"] == 3).all()

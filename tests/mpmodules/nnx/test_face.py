"""The wing's face: everything of Flax's is there, and what Flax does with its own modules works on
ours.
"""

# What Flax returns is typed as Flax's own class: the attributes that ours add, and NumPy inputs,
# are unknown to it.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4)


class Net(nnx.Module):
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
    return Net(dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))


def test_display_repr_and_tabulate_show_the_policy_and_do_not_fail(net, capsys):
    assert "dtype_policy=Policy('params=float32,compute=bfloat16,output=float32')" in repr(net)
    assert "Policy('params=float32,compute=bfloat16,output=float32')" in str(flax_nnx.graphdef(net))
    flax_nnx.display(net)
    assert "BatchNorm" in capsys.readouterr().out


def test_train_eval_view_and_set_attributes_reach_our_layers(net):
    net.eval()
    assert net.norm.use_running_average
    assert net.drop.deterministic
    before = net.norm.mean[...]
    np.testing.assert_array_equal(net(X), net(X))
    np.testing.assert_array_equal(net.norm.mean[...], before)
    net.train()
    net(X)
    assert np.any(net.norm.mean[...] != before)
    view = flax_nnx.view(net, deterministic=True, use_running_average=True)
    assert view.drop.deterministic
    assert view.dtype_policy == net.dtype_policy
    np.testing.assert_array_equal(view(X), view(X))
    assert not net.drop.deterministic
    net.set_attributes(deterministic=True, raise_if_not_found=False)
    assert net.drop.deterministic


def test_training_through_a_view_updates_the_model_s_statistics(net):
    view = flax_nnx.view(net, deterministic=True, use_running_average=False)
    view(X)
    assert np.any(net.norm.mean[...] != 0)
    np.testing.assert_array_equal(net.norm.mean[...], view.norm.mean[...])


def test_capture_and_sow_see_rounded_float32_inside():
    class Sows(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            x = self.linear(x)
            self.sow(nnx.Intermediate, "hidden", x)
            return x

    model = Sows(dtype_policy="mixed_bfloat16", rngs=nnx.Rngs(0))
    out, sown = flax_nnx.capture(model, flax_nnx.Intermediate)(X)
    assert out.dtype == jnp.float32
    (hidden,) = sown["hidden"].get_value()
    assert hidden.dtype == jnp.float32
    np.testing.assert_array_equal(hidden, out)
    np.testing.assert_array_equal(hidden, hidden.astype(jnp.bfloat16).astype(jnp.float32))


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
        out, state = forward(X)
        assert isinstance(model.linear, module.Linear)
        np.testing.assert_array_equal(model(X), out)
        return {
            "/".join(map(str, path)): [x.shape for x in leaf.get_value()]
            for path, leaf in flax_nnx.to_flat_state(state)
        }

    options = {} if policy is None else {"dtype_policy": policy}
    assert captured(nnx, **options) == captured(flax_nnx)


def test_perturb_works_through_a_boundary():
    class Perturbs(nnx.Module):
        def __call__(self, x):
            return self.perturb("at", x) * 2

    model = Perturbs(dtype_policy="mixed_bfloat16")
    _, perturbations = flax_nnx.capture(lambda model, x: model(x), flax_nnx.Perturbation)(model, X)
    assert perturbations["at"].get_value().dtype == jnp.float32


def test_ours_run_in_linen_through_flax_s_bridge():
    model = flax_nnx.bridge.to_linen(nnx.Linear, 4, 4, dtype_policy="mixed_bfloat16")
    variables = model.init(jax.random.key(0), X)
    assert model.apply(variables, X).dtype == jnp.float32

"""Classes that do not say where they were defined, and other ways to declare a module, behave as
all do.
"""

# Classes made by exec have no type.
# pyright: reportCallIssue=false, reportArgumentType=false

import types
from typing import Any

import flax.linen
import flax.nnx
import jax.numpy as jnp
import pytest

from mpmodules import linen as nn
from mpmodules import nnx, use_policy
from tests.mistakes.layers import KEY, X

LINEN = """
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)

class Twice(nn.Dense):
    def __call__(self, x):
        return 2 * super().__call__(x)

class Norm(nn.LayerNorm):
    def __call__(self, x):
        return super().__call__(x)

class Cell(nn.GRUCell):
    pass
"""
NNX = """
class Net(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.layer(x)

class Twice(nnx.Linear):
    def __init__(self, rngs, **kwargs):
        super().__init__(4, 4, rngs=rngs, **kwargs)

    def __call__(self, x):
        return 2 * super().__call__(x)

class Norm(nnx.LayerNorm):
    def __init__(self, rngs, **kwargs):
        super().__init__(4, rngs=rngs, **kwargs)

    def __call__(self, x):
        return super().__call__(x)
"""


def executed(source: str, **names: Any) -> dict[str, Any]:
    """The classes of a source that runs without `__name__` among its globals, as in a notebook's or
    a test's exec.
    """
    exec(source, names)
    assert names["Net"].__call__.__module__ is None
    return names


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", ["Net", "Twice", "Norm"])
def test_a_class_made_by_exec_obeys_its_policy(name):
    arguments = () if name != "Twice" else (4,)
    layer = executed(LINEN, nn=nn)[name](*arguments, dtype_policy="bf16")
    assert layer.init_with_output(KEY, X)[0].dtype == jnp.bfloat16
    assert executed(NNX, nnx=nnx)[name](nnx.Rngs(0), dtype_policy="bf16")(X).dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_linen_cell_made_by_exec_runs_in_an_rnn():
    rnn = nn.RNN(executed(LINEN, nn=nn)["Cell"](4), dtype_policy="bf16")
    assert rnn.init_with_output(KEY, X[None])[0].dtype == jnp.bfloat16


def test_flax_classes_made_by_exec_are_ported():
    linen = executed(LINEN, nn=flax.linen)["Net"]()
    assert nn.apply_policy(linen, "bf16").init_with_output(KEY, X)[0].dtype == jnp.bfloat16
    model = executed(NNX, nnx=flax.nnx)["Net"](flax.nnx.Rngs(0))
    assert nnx.apply_policy(model, "bf16")(X).dtype == jnp.bfloat16


def test_a_class_made_without_a_class_statement_is_nobody_s_layer():
    setup = lambda self: setattr(self, "layer", nn.Dense(4))  # noqa: E731
    methods = {"setup": setup, "__call__": lambda self, x: self.layer(x)}
    made = types.new_class("Made", (nn.Module,), {}, lambda namespace: namespace.update(methods))
    assert made(dtype_policy="bf16").init_with_output(KEY, X)[0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_policy_that_an_nnx_constructor_declares_as_default_holds():
    class Net(nnx.Module):
        def __init__(self, *, rngs: Any, dtype_policy: str | None = "bf16"):
            self.layer = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    assert Net(rngs=nnx.Rngs(0))(X).dtype == jnp.bfloat16
    assert Net(rngs=nnx.Rngs(0), dtype_policy="f16")(X).dtype == jnp.float16
    with use_policy("f16"):
        assert Net(rngs=nnx.Rngs(0), dtype_policy=None)(X).dtype == jnp.float16


@pytest.mark.slow
def test_a_policy_set_on_a_linen_module_before_it_is_bound_holds():
    net = nn.Dense(4)
    net.dtype_policy = "bf16"
    assert net.init_with_output(KEY, X)[0].dtype == jnp.bfloat16


@pytest.mark.slow
def test_keep_inputs_of_a_base_class_may_wait_for_the_methods_of_another():
    class Timed(nn.Module):
        keep_inputs = ("time",)

    class Net(Timed):
        @nn.compact
        def __call__(self, x, time):
            return nn.Dense(4)(x), time

    class Any_(Timed):
        @nn.compact
        def __call__(self, x, **conditions):
            return nn.Dense(4)(x), conditions["time"]

    for cls in (Net, Any_):
        outputs, _ = cls(dtype_policy="bf16").init_with_output(KEY, X, time=X)
        # kept on the way in, cast on the way out
        assert [each.dtype for each in outputs] == [jnp.bfloat16] * 2
    told = r"Timed\.keep_inputs names 'time', but its public methods take no arguments"
    with pytest.raises(ValueError, match=told):
        Timed()

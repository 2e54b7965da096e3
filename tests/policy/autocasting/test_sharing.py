"""Programs that several equations share are rewritten once; each keeps its own numbers, dtypes and
names.
"""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules.linen import apply_policy
from policy.autocasting.transform import autocast
from policy.programs.paths import path_of
from policy.programs.rewriting import control_flow

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))
# One trace for all calls, as `policy.functions.checkpointing.cached_inline_jit` makes it.
once = jax.jit(doubled, inline=True)
rematerialised = jax.jit(jax.checkpoint(lambda x, scale: jnp.tanh(x) * scale), inline=True)


@pytest.fixture
def bodies(monkeypatch):
    """The programs rewritten as functions, in order."""
    seen = []
    init = control_flow.Body.__init__
    monkeypatch.setattr(
        control_flow.Body, "__init__", lambda self, *args: seen.append(args[1]) or init(self, *args)
    )
    return seen


def scaled(params, x):
    for scale in params:
        x = rematerialised(once(x), scale)
    return jnp.sum(x)


@pytest.mark.parametrize("times", [1, 5])
def test_equations_that_hold_the_same_program_are_rewritten_once(bodies, times):
    params = [jnp.full((1, 8), 0.1 * i) for i in range(1, times + 1)]
    jax.make_jaxpr(autocast(scaled, "mixed_bfloat16", params=0))(params, X)
    assert len(bodies) == 2


def test_operands_of_another_dtype_are_another_program():
    def mixed(params, x):
        half = x @ params  # bfloat16
        return jnp.sum(once(half).astype(jnp.float32)) + jnp.sum(once(x))

    traced = jax.make_jaxpr(autocast(mixed, "mixed_bfloat16", params=0))(jnp.eye(8), X)
    assert traced.out_avals[0].dtype == jnp.float32
    y = autocast(mixed, "mixed_bfloat16", params=0)(jnp.eye(8), X)
    np.testing.assert_allclose(y, 4 * jnp.sum(X), rtol=1e-2, atol=0.05)


def test_names_stay_those_of_each_layer():
    class Model(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            for i in range(3):
                x = flax.linen.LayerNorm(name=f"norm_{i}")(x)
            return x

    model = apply_policy(Model(), "mixed_bfloat16")
    params = model.init(jax.random.key(0), X)
    jaxpr = jax.make_jaxpr(
        jax.grad(
            autocast(lambda p, x: jnp.sum(jnp.asarray(model.apply(p, x))), "bfloat16", params=0)
        )
    )(params, X)

    def paths(jaxpr, above):
        for equation in jaxpr.eqns:
            path = path_of(str(equation.source_info.name_stack), above)
            inner = equation.params.get("jaxpr")
            if inner is None:
                yield path, equation.primitive.name
            else:
                yield from paths(getattr(inner, "jaxpr", inner), path)

    found = {path[-1] for path, name in paths(jaxpr.jaxpr, ()) if name == "rsqrt"}
    assert found == {"norm_0", "norm_1", "norm_2"}

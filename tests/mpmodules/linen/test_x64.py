"""With x64 enabled: float64 is a policy like any other, and nothing becomes float64 by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

# In a process of its own: x64 is a setting of the process, and programs made without it would stay
# in the caches.
PROGRAM = """
    import jax
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    import flax.linen as flax_nn
    import jax.numpy as jnp
    import numpy as np
    from mpmodules import linen as nn
    from policy import use_policy
    from tests.programs import operations

    KEY = jax.random.key(0)
    X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.float32)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.Dense(4)(x))
            x = x + nn.MultiHeadDotProductAttention(2)(x)
            x = x + nn.Embed(3, 4)(jnp.zeros(x.shape[:2], int))
            return nn.GroupNorm(2)(nn.RMSNorm()(x))

    def dtypes(ops):
        return {name for op in ops for name in (*op.inputs, *op.outputs)}
"""


def run(body: str) -> None:
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(body)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_half_policy_makes_no_float64_and_a_float64_policy_is_obeyed():
    run("""
        # in float32, Flax's own attention runs, and takes one scalar's square root in float64
        for policy in ("mixed_bfloat16", "mixed_float16"):
            model = Net(dtype_policy=policy)
            variables = jax.eval_shape(lambda: model.init(KEY, X))
            assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float32"}
            def loss(variables, x):
                return model.apply(variables, x).astype(jnp.float32).sum()
            ops = operations(jax.grad(loss), variables, X)
            found = [op for op in ops if "float64" in (*op.inputs, *op.outputs)]
            assert not found, (policy, found)

        model = Net(dtype_policy="float64")
        variables = model.init(KEY, X)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float64"}
        out = model.apply(variables, X)
        assert out.dtype == jnp.float64
        ops = operations(model.apply, variables, X.astype(jnp.float64))
        assert not dtypes(ops) & {"float32", "bfloat16"}

        # our own float32 against our own float64
        narrow = Net(dtype_policy="float32").apply(variables, X)
        np.testing.assert_allclose(narrow, out, rtol=1e-4, atol=1e-5)

        # reductions in float64 under a float32 policy
        x = np.asarray(1e5 + np.random.default_rng(0).normal(size=(8, 256)), np.float32)
        with use_policy("p=f32,c=f32,o=f32,reduction=float64"):
            out = nn.LayerNorm().init_with_output(KEY, x)[0]
        wide = np.asarray(x, np.float64)
        truth = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, truth, rtol=3e-7, atol=1e-7)

        # a float64 input meets a policy at the boundary, and a foreign model obeys one
        out = Net(dtype_policy="mixed_bfloat16").apply(variables, X.astype(jnp.float64))
        assert out.dtype == jnp.float32
        ported = nn.apply_policy(flax_nn.Dense(3), "float64")
        assert ported.init_with_output(KEY, X)[0].dtype == jnp.float64
    """)

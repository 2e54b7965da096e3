"""Policies under JAX's and nnx's transforms: no stale program, one boundary each, outside the
transform.
"""

import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import nnx, set_policy, use_policy
from policy import compute_dtype
from policy.programs.walk import walk

X = np.ones((2, 4), np.float32)
MIXED = "mixed_bfloat16"


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.linear(x))


def pure(model, call=lambda model, *args: model(*args)):
    """`call` on a copy of `model` that is made inside, so that it can be traced."""
    definition, state = flax_nnx.split(model)
    return lambda *args: call(flax_nnx.merge(definition, state, copy=True), *args)


def boundary_casts(function, *args):
    """The casts that boundaries made while `function` was traced, as (from, to, inside which
    primitives).
    """
    casts = [
        s
        for s in walk(jax.make_jaxpr(function)(*args))
        if s.name == "convert_element_type" and s.is_placed
    ]
    return [
        (str(s.equation.invars[0].aval.dtype), str(s.equation.outvars[0].aval.dtype), s.inside)
        for s in casts
    ]


ONE_BOUNDARY = [("float32", "bfloat16", ()), ("bfloat16", "float32", ())]


def test_a_jitted_function_traces_once_for_each_policy_of_the_model():
    traces = []
    models = {}
    for policy in ("mixed_bfloat16", "f16"):
        with use_policy(policy):
            models[policy] = Net(rngs=nnx.Rngs(0))

    @flax_nnx.jit
    def forward(model, x):
        traces.append(model.dtype_policy)
        return model(x)

    dtypes = [forward(models[p], X).dtype for p in ("mixed_bfloat16", "f16", "mixed_bfloat16")]
    assert dtypes == [jnp.float32, jnp.float16, jnp.float32]
    assert len(traces) == 2


def test_building_inside_jit_is_traced_anew_in_another_scope_and_goes_back_to_the_first_program():
    traces = []

    @jax.jit
    def forward(x):
        traces.append(None)
        return Net(rngs=nnx.Rngs(0))(x)

    def under(policy):
        with use_policy(policy):
            return forward(X).dtype

    assert [under(p) for p in ("mixed_bfloat16", "f16", "mixed_bfloat16")] == [
        jnp.float32,
        jnp.float16,
        jnp.float32,
    ]
    assert len(traces) == 2


def test_a_change_of_mind_retraces_nnx_jit_and_going_back_reuses_the_program():
    traces = []
    model = flax_nnx.Linear(4, 4, rngs=flax_nnx.Rngs(0))

    @flax_nnx.jit
    def forward(model, x):
        traces.append(None)
        return model(x)

    dtypes = [
        forward(nnx.apply_policy(model, policy), X).dtype
        for policy in ("p=f32,c=bf16", "f32", "p=f32,c=bf16")
    ]
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.bfloat16]
    assert len(traces) == 2


def test_split_and_merge_under_jit_keep_the_policy():
    with use_policy(MIXED):
        model = flax_nnx.eval_shape(lambda: Net(rngs=nnx.Rngs(0)))
    definition, state = flax_nnx.split(model)

    def forward(state, x):
        return flax_nnx.merge(definition, state)(x)

    assert jax.eval_shape(forward, state, X).dtype == jnp.float32
    assert "bf16[2,4] = dot_general" in str(jax.make_jaxpr(forward)(state, X))


def test_a_model_in_lax_scan_and_checkpoint_keeps_one_boundary():
    with use_policy(MIXED):
        model = Net(rngs=nnx.Rngs(0))

    def scanned(x):
        return jax.lax.scan(lambda carry, _: (model(carry), None), x, length=3)[0]

    assert jax.eval_shape(scanned, X).dtype == jnp.float32
    assert [cast[:2] for cast in boundary_casts(scanned, X)] == [cast[:2] for cast in ONE_BOUNDARY]
    assert [cast[:2] for cast in boundary_casts(jax.checkpoint(model), X)] == [
        cast[:2] for cast in ONE_BOUNDARY
    ]


def jit_method(method):
    return nnx.jit(method)


def remat_method(method):
    return nnx.remat(method)


def remat_method_inside(method):
    def call(self, x):
        return nnx.remat(method)(self, x)

    return call


def vmap_method(method):
    return nnx.vmap(method, in_axes=(None, 0))


@pytest.mark.parametrize("transform", [jit_method, remat_method, remat_method_inside, vmap_method])
def test_a_transformed_method_has_one_cast_in_where_inputs_are_used_and_one_out(transform):
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        @transform
        def __call__(self, x):
            return nnx.relu(self.linear(x))

    with use_policy(MIXED):
        model = Model(rngs=nnx.Rngs(0))
    within = ("remat2",) if transform in (remat_method, remat_method_inside) else ()
    cast_in, cast_out = ONE_BOUNDARY
    assert boundary_casts(pure(model), X) == [(*cast_in[:2], within), cast_out]
    assert model(X).dtype == jnp.float32


def test_remat_saves_compute_dtype_residuals():
    class Model(nnx.Module):
        def __init__(self, *, rngs):
            self.first, self.second = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)

        @nnx.remat
        def block(self, x):
            return nnx.tanh(self.second(nnx.tanh(self.first(x))))

        def __call__(self, x):
            return self.block(x)

    with use_policy(MIXED):
        model = Model(rngs=nnx.Rngs(0))
    text = str(jax.make_jaxpr(jax.grad(pure(model, lambda model, x: model(x).sum())))(X))
    assert re.search(r"dot_general\[", text)
    assert not re.search(r"f32\[2,4\] = dot_general", text)


def test_a_method_that_scans_over_stacked_layers_has_one_boundary_and_a_compute_dtype_carry():
    class Stack(nnx.Module):
        def __init__(self, *, rngs):
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=0, out_axes=0)
            def build(rngs):
                return Net(rngs=rngs)

            self.layers = build(rngs)

        def __call__(self, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, layer):
                return layer(x)

            return run(x, self.layers)

    with use_policy(MIXED):
        stack = Stack(rngs=nnx.Rngs(0))
    assert stack.layers.linear.kernel.shape == (3, 4, 4)
    assert stack.layers.linear.kernel.dtype == jnp.float32
    assert stack.layers.dtype_policy == stack.dtype_policy
    assert boundary_casts(pure(stack), X) == ONE_BOUNDARY
    assert stack(X).dtype == jnp.float32


def test_a_function_that_scans_over_a_built_model_from_outside_keeps_the_carry_s_type():
    @flax_nnx.vmap(in_axes=0, out_axes=0)
    def build(key):
        return Net(rngs=nnx.Rngs(key))

    with use_policy(MIXED):
        layers = build(jax.random.split(jax.random.key(0), 3))
    run = flax_nnx.scan(
        lambda x, layer: layer(x), in_axes=(flax_nnx.Carry, 0), out_axes=flax_nnx.Carry
    )
    assert run(jnp.asarray(X), layers).dtype == jnp.float32


@pytest.mark.parametrize("by", ["vmap", "jit", "eval_shape"])
def test_a_model_built_inside_a_transform_captures_the_policy_in_force(by):
    builders = {
        "vmap": lambda: flax_nnx.vmap(lambda key: Net(rngs=nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), 2)
        ),
        "jit": lambda: flax_nnx.jit(lambda: Net(rngs=nnx.Rngs(0)))(),
        "eval_shape": lambda: flax_nnx.eval_shape(lambda: Net(rngs=nnx.Rngs(0))),
    }
    with use_policy("bf16"):
        model = builders[by]()
    assert str(model.linear.dtype_policy) == "params=bfloat16,compute=bfloat16,output=bfloat16"
    assert model.linear.kernel.dtype == jnp.bfloat16


def test_another_thread_sees_the_global_policy_and_not_this_one_s_scope():
    seen = {}

    def build():
        seen["policy"] = nnx.Dropout(0.5).dtype_policy

    def in_thread():
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        return seen["policy"]

    set_policy("float32")
    try:
        with use_policy(MIXED):
            assert str(in_thread()) == "params=float32,compute=float32,output=float32"
    finally:
        set_policy(None)
    with use_policy(MIXED):
        assert in_thread() is None


def test_threads_that_build_and_call_at_once_do_not_mix_their_policies():
    barrier, seen = threading.Barrier(2), {}

    class Slow(nnx.Module):
        def __init__(self, name):
            barrier.wait(timeout=60)
            self.child = nnx.Dropout(0.0)
            barrier.wait(timeout=60)

        def __call__(self, x):
            barrier.wait(timeout=60)
            out = self.child(x)
            barrier.wait(timeout=60)
            return out, str(compute_dtype())

    def work(name):
        model = Slow(name, dtype_policy=name)
        seen[name] = (model.child.dtype_policy == model.dtype_policy, model(jnp.asarray(X))[1])

    threads = [threading.Thread(target=work, args=(name,)) for name in ("bf16", "f16")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"bf16": (True, "bfloat16"), "f16": (True, "float16")}


def test_a_donated_model_state_trains_under_a_policy():
    with use_policy(MIXED):
        model = Net(rngs=nnx.Rngs(0))
    definition, state = flax_nnx.split(model)

    def step(state, x):
        gradients = jax.grad(lambda s: flax_nnx.merge(definition, s, copy=True)(x).sum())(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients)

    lowered = jax.jit(step, donate_argnums=0).lower(state, X)
    assert lowered.as_text().count("tf.aliasing_output") == 2

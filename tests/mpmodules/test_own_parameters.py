"""Parameters of a user's modules: used in compute_dtype, gradients summed in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from policy import DtypePolicyWarning, audit, get_policy
from tests.mpmodules.wings import BOTH, MIXED, ONES, Text, X, dense, weight
from tests.programs import named

MANY = jnp.zeros(4096, int)
MIXED_AND_HALF = pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
TABLE = Text(lambda self, ids: self.table[ids], "Table", table=weight(8, 4, init=ONES))
LINEAR = Text(
    lambda self, x: x @ self.w + jnp.asarray(self.b)[None],
    "Linear",
    w=weight(4, 4),
    b=weight(4),
)


@BOTH
def test_parameters_are_used_in_compute_dtype(wing):
    model = wing.ours(LINEAR, MIXED)
    ops = model.operations(X, gradient=True)
    assert {op.inputs for op in named(ops, "dot_general")} == {("bfloat16",) * 2}
    forward = [op for op in named(ops, "add") if not op.is_backward]
    assert {op.outputs for op in forward} == {("bfloat16",)}
    assert audit(jax.grad(model.total(X)), model.params).findings == ()


@BOTH
def test_without_a_policy_a_parameter_is_as_stored(wing):
    seen: list[Any] = []

    def call(self, x):
        seen.append(jnp.asarray(self.w).dtype.name)
        return x @ self.w

    model = wing.ours(Text(call, w=weight(4, 4)), None)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), model.params)
    model.pure(half, X.astype(jnp.float16))
    assert seen[-1] == "float16"


# --- sums of gradients ----------------------------------------------------------------------------


@BOTH
@MIXED_AND_HALF
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("where", ["own", "of a module that it holds"])
def test_an_embeddings_gradient_counts_4096_equal_ids(wing, text, wrap, where):
    outer = Text(lambda self, ids: self.words.table[ids], "Outer", words=TABLE)
    model = wing.ours(TABLE if where == "own" else outer, text, MANY)
    (gradient,) = jax.tree.leaves(wrap(jax.grad(model.total(MANY)))(model.params))
    assert gradient[0, 0] == 4096 and gradient.dtype == get_policy(text).param_dtype


FUNCTIONS: dict[str, Any] = {
    "itself": lambda t: t,
    "exp": jnp.exp,
    "softplus": jax.nn.softplus,
    "reciprocal": lambda t: 1 / t,
}


@BOTH
@MIXED_AND_HALF
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_of_a_function_of_a_parameter_is_summed_in_float32(wing, text, name, wrap):
    """The learned temperature of a contrastive loss: a bfloat16 sum stops at a quarter."""
    x, function = jnp.ones((4096, 64)), FUNCTIONS[name]
    temperature = Text(lambda self, x: x * wrap(function)(jnp.asarray(self.t)), t=weight(init=ONES))
    model = wing.ours(temperature, text, x)
    sums = named(model.operations(x, gradient=True), "reduce_sum")
    assert not [op for op in sums if "bfloat16" in op.outputs]
    (gradient,) = jax.tree.leaves(jax.grad(lambda p: model.total(x)(p) / x.size)(model.params))
    # a value, its derivative and the sum's terms are rounded to bfloat16, each by 2**-9 at most
    np.testing.assert_allclose(gradient, jax.grad(function)(1.0), rtol=2**-7)


USES: dict[str, Any] = {
    "broadcast": lambda x, w, t: x + w[None],
    "product": lambda x, w, t: x * w[None],
    "quotient": lambda x, w, t: x / w[None],
    "scalar": lambda x, w, t: x * t * w[None],
    "scalar quotient": lambda x, w, t: x / t * w[None],
    "scalar sum": lambda x, w, t: (t - x) * w[None],
    "repeated": lambda x, w, t: sum(
        (x[i : i + 1] * w[None] for i in range(300)), jnp.zeros_like(x[:1])
    ),
    "concatenated": lambda x, w, t: x + jnp.concatenate([w[:2], w[2:]])[None],
    "scan": lambda x, w, t: jax.lax.scan(lambda carry, row: (carry, row * w), 0, x)[1],
    "cond": lambda x, w, t: jax.lax.cond(x[0, 0] > 0, lambda x: x * w[None], lambda x: x, x),
    "checkpoint": lambda x, w, t: jax.checkpoint(lambda x, w: jnp.sin(x * w[None]))(x, w),
    "jit": lambda x, w, t: jax.jit(lambda x, w: x * w[None])(x, w),
    "vmap": lambda x, w, t: jax.vmap(lambda row: row * w)(x),
}


@BOTH
@pytest.mark.parametrize("how", USES)
def test_gradients_of_many_uses_are_summed_in_float32(wing, how):
    x = jnp.ones((1024, 4))
    parts: dict[str, Any] = {"w": weight(4, init=ONES), "t": weight(init=ONES)}
    uses = Text(lambda self, x: USES[how](x, jnp.asarray(self.w), jnp.asarray(self.t)), **parts)
    half, plain = wing.ours(uses, MIXED, x), wing.ours(uses, None, x)
    gradient, exact = (jax.grad(model.total(x))(model.params) for model in (half, plain))
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact), strict=True):
        # one rounding of each contribution, none of the sum
        np.testing.assert_allclose(a, b, rtol=2**-7)
    sums = named(half.operations(x, gradient=True), "reduce_sum", "scatter-add", "add_any")
    assert not [op for op in sums if op.is_backward and "bfloat16" in op.outputs]


IDS = jnp.arange(6).reshape(2, 3)
# Of a loss that is quadratic in its parameters, and that adds up over rows of ids.
TRANSFORMS: dict[str, Any] = {
    "vmap": lambda loss, p: jax.tree.map(
        lambda leaf: leaf.sum(0), jax.vmap(jax.grad(loss), (None, 0))(p, IDS)
    ),
    "jvp": lambda loss, p: jax.jvp(jax.grad(loss), (p,), (p,))[1],
    "linearize": lambda loss, p: jax.linear_transpose(jax.linearize(loss, p)[1], p)(1.0)[0],
    "hessian": lambda loss, p: jax.tree.leaves(jax.hessian(loss)(p))[0].sum((2, 3)),
    "checkpoint": lambda loss, p: jax.jit(jax.grad(jax.checkpoint(loss)))(p),
    "value_and_grad": lambda loss, p: policy.value_and_grad(loss)(p)[1],
}


@BOTH
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_jaxs_transformations_hold(wing, transform):
    model = wing.ours(TABLE, MIXED, IDS)

    def loss(params, ids=IDS):
        return jnp.square(model.pure(params, ids).astype(jnp.float32)).sum()

    (gradient,) = jax.tree.leaves(jax.grad(loss)(model.params))
    (found,) = jax.tree.leaves(TRANSFORMS[transform](loss, model.params))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, gradient)


# --- what is kept in float32 ----------------------------------------------------------------------


@BOTH
@MIXED_AND_HALF
def test_a_kept_parameter_and_one_asked_for_in_float32_hold_against_activations(wing, text):
    against = Text(
        lambda self, x: self.layer(x) * self.plain * self.kept * self.asked,
        attributes={"keep_params": ("kept",)},
        layer=dense(4, 4),
        plain=weight(1, 4, init=ONES),
        kept=weight(1, 4, init=ONES),
        asked=weight(1, 4, init=ONES, compute_dtype=jnp.float32),
    )
    model = wing.ours(against, text)
    products = named(model.operations(X), "mul")
    assert [op.outputs[0] for op in products] == ["bfloat16", "float32", "float32"]
    made = model.made()
    assert made["kept"] == "float32"
    assert made["plain"] == made["asked"] == get_policy(text).param_dtype.name


@BOTH
def test_names_to_keep_are_a_tuple_of_names_that_parameters_have(wing):
    for names in ("scale", 3, (1,)):
        with pytest.raises(
            TypeError, match=r"Wrong.keep_params should be a tuple of names, but got"
        ):
            type("Wrong", (wing.module.Module,), {"keep_params": names, "__module__": __name__})
    misspelt = Text(lambda self, x: x, "Misspelt", {"keep_params": ("scael",)}, scale=weight(1, 4))
    with pytest.warns(DtypePolicyWarning, match="Misspelt.keep_params names scael.* It has: scale"):
        wing.ours(misspelt, MIXED).made()

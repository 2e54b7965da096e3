"""Parameters of a user's linen modules: how linen's code reads, shares and lends them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from mpmodules import linen as nn
from policy import use_policy
from tests.programs import apply, named, operations

KEY = jax.random.key(0)
ONES, NORMAL = nn.initializers.ones, nn.initializers.normal(1.0)
X = jnp.ones((2, 4))
MANY = jnp.zeros(4096, int)


class Table(nn.Module):
    """A hand-written embedding, in setup style."""

    def setup(self) -> None:
        self.table = self.param("table", ONES, (8, 4))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.table[ids]

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


def total(model: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss of variables: the sum of what the model returns."""
    return lambda variables: apply(model, variables, *args, **kwargs).astype(jnp.float32).sum()


# --- lifted, shared and tied ----------------------------------------------------------------------


class Head(nn.Module):
    table: Table

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.table.table.T


class Tied(nn.Module):
    def setup(self) -> None:
        self.words = Table()
        self.head = Head(self.words)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.words(ids)
        return self.head(x) + self.words.attend(x).astype(self.head(x).dtype)


@pytest.mark.parametrize(("rule", "dtype"), [("f32", "float32"), ("mixed_bfloat16", "bfloat16")])
def test_a_tied_parameter_follows_its_reader(rule: str, dtype: str) -> None:
    model: Any = Tied()
    with use_policy("mixed_bfloat16", {"head": rule}):
        variables = model.init(KEY, MANY)
        gradient = jax.grad(lambda v: apply(model, v, MANY).sum())(variables)["params"]["words"][
            "table"
        ]
        dots = named(operations(model.apply, variables, MANY), "dot_general")
    assert [op.inputs for op in dots] == [(dtype,) * 2, ("bfloat16",) * 2, (dtype,) * 2]
    # 4096 rows of ones through two heads of 8 outputs: 2 x 8 x 4096 in the row that is looked up, 2
    # x 4096 in each row.
    np.testing.assert_array_equal(gradient[:, 0], [4096 * 18] + [4096 * 2] * 7)


# --- what stays as it is stored -------------------------------------------------------------------


class Kept(nn.Module):
    keep_params = ("scale",)
    note: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        boxed: Any = nn.with_partitioning(ONES, (None,))
        read = {
            "scale": self.param("scale", ONES, (4,)),
            "asked": self.param("asked", ONES, (4,), compute_dtype=jnp.float32),
            "boxed": self.param("boxed", boxed, (4,), unbox=False).value,  # type: ignore[attr-defined]
            "unboxed": self.param("unboxed", boxed, (4,)),
            "integers": self.param("integers", lambda key: jnp.arange(3)),
            "complex": self.param("complex", lambda key: jnp.ones(3, jnp.complex64)),
            "key": self.param("key", lambda key: key),
            "tree": self.param("tree", lambda key: {"a": jnp.ones(2)})["a"],
            "variable": self.variable("stats", "v", jnp.ones, 3).value,
            "in variables": self.variables["params"]["tree"]["a"],
            "got": self.get_variable("params", "tree")["a"],
        }
        self.note({name: str(value.dtype) for name, value in read.items()})
        return x


@pytest.mark.parametrize("text", ["mixed_bfloat16", "bfloat16"])
def test_all_floats_are_float32_to_the_code_and_others_as_stored(text: str) -> None:
    seen: list[Any] = []
    model, stored = Kept(seen.append), str(policy.get_policy(text).param_dtype)
    with use_policy(text):
        variables: Any = model.init(KEY, X)
        jax.eval_shape(jax.grad(lambda x: apply(model, variables, x).sum()), X)
    others = {"integers": "int32", "complex": "complex64", "key": "key<fry>"}
    floats = dict.fromkeys(seen[0].keys() - others.keys(), "float32")
    assert len(seen) >= 2
    for each in seen[1:]:
        assert each == floats | others
    made = dict.fromkeys(("boxed", "in variables", "got"), stored)  # which init has just made
    assert seen[0] == floats | others | made
    assert variables["params"]["scale"].dtype == jnp.float32
    assert (
        variables["params"]["asked"].dtype == variables["params"]["unboxed"].value.dtype == stored
    )


def test_a_read_outside_of_a_call_is_as_stored() -> None:
    with use_policy("mixed_bfloat16"):
        bound: Any = Table().bind(Table().init(KEY, MANY))
        assert bound.table.dtype == jnp.float32
        assert bound(MANY).dtype == jnp.float32  # the output_dtype, of bfloat16 rows
        assert bound.table.dtype == jnp.float32
    with pytest.raises(AttributeError, match="no attribute"):
        _ = bound.tabel


# --- the call -------------------------------------------------------------------------------------


class Lends(nn.Module):
    def setup(self) -> None:
        self.dense, self.scale = nn.Dense(4), self.param("scale", ONES, (1, 4))

    def layer(self) -> nn.Module:
        return self.dense

    def function(self) -> Any:
        scale = self.scale
        return lambda x: self.dense(x) * scale

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(x) * self.scale


class Borrows(nn.Module):
    how: str

    def setup(self) -> None:
        self.lends = Lends()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.lends(x) + getattr(self.lends, self.how)()(x)


@pytest.mark.parametrize("how", ["layer", "function"])
def test_a_method_may_return_a_module_or_a_function(how: str) -> None:
    with use_policy("mixed_bfloat16"):
        variables = Borrows(how).init(KEY, X)
        gradient = jax.grad(total(Borrows(how), X))(variables)["params"]["lends"]
    assert (gradient["dense"]["bias"] == 4).all() and gradient["scale"].dtype == jnp.float32

"""Options of `apply_policy`: dtype fields of foreign modules, and casts of what they hand on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from policy import DtypePolicyWarning
from tests.mpmodules.wings import BOTH, MIXED, Part, Text, X, dense, layer, weight

HALF = jnp.dtype("bfloat16")
WIDE = jnp.dtype("float32")


def fields(call: Any, **values: Any) -> Text:
    """A module with fields, of which linen makes arguments of the constructor."""
    annotations = dict.fromkeys(values, Any)
    return Text(call, "Fields", {"__annotations__": annotations, **values}, w=weight(4, 4))


def multiplies(dtype: Any = jnp.float32) -> Text:
    """As published models do it: the field goes to a cast and a matmul."""
    return fields(
        lambda self, x: jnp.asarray(x, self.dtype) @ jnp.asarray(self.w).astype(self.dtype),
        dtype=dtype,
        param_dtype=None,
    )


def chain(*parts: Any) -> Text:
    def call(self, x):
        for i in range(len(parts)):
            x = getattr(self, f"part_{i}")(x)
        return x

    return Text(call, "Chain", **{f"part_{i}": part for i, part in enumerate(parts)})


# --- dtype fields ---------------------------------------------------------------------------------


@BOTH
def test_dtype_fields_follow_the_policy_at_their_path_where_that_is_asked_for(wing):
    kept = wing.port(chain(multiplies(), dense(4, 4)), MIXED, own_code="keep")
    assert kept.dots(X) == [("float32", "float32"), ("bfloat16", "bfloat16")]
    rules = {"part_2": "p=f16,c=f16,o=bf16"}
    three = chain(multiplies(), multiplies(np.float32), multiplies())
    model = wing.port(three, MIXED, rules, dtype_fields=True)
    assert [name for name, _ in model.dots(X)] == ["bfloat16", "bfloat16", "float16"]
    assert set(model.dots(X, gradient=True)) == {("bfloat16",) * 2, ("float16",) * 2}
    assert model.made() == {"part_0/w": "float32", "part_1/w": "float32", "part_2/w": "float16"}
    again = wing.module.apply_policy(model.instance, "f32", dtype_fields=True)
    assert jax.eval_shape(lambda: _call(wing, again, model.params)).dtype == jnp.float32


def _call(wing: Any, instance: Any, params: Any) -> Any:
    return instance.apply({"params": params}, X) if wing.name == "linen" else instance(X)


@BOTH
def test_a_dtype_field_is_spelled_as_it_was_and_other_values_stay(wing):
    scalar: Any = jnp.bfloat16
    for given, expected in (
        ("float32", "bfloat16"),
        (WIDE, HALF),
        (None, HALF),
        (jnp.float32, scalar),
        (np.float32, scalar),
        (jnp.int32, jnp.int32),
        (jnp.complex64, jnp.complex64),
        ("auto", "auto"),
        (3, 3),
    ):
        seen: list[Any] = []
        noting = fields(lambda self, x, seen=seen: (seen.append(self.dtype), x)[1], dtype=given)
        wing.port(noting, MIXED, dtype_fields=True)(X)
        assert seen[-1] == expected and type(seen[-1]) is type(expected)


@BOTH
def test_keep_explicit_keeps_the_dtypes_of_layers_alone(wing):
    refused = r"keep_explicit=True keeps the dtypes .* and dtype_fields=True replaces them"
    with pytest.raises(ValueError, match=refused):
        wing.port(multiplies(), MIXED, keep_explicit=True, dtype_fields=True)

    def threads(dtype: Any) -> Text:
        return Text(lambda self, x: self.layer(x), "Threads", layer=dense(4, 4, dtype=dtype))

    replaced = wing.port(chain(threads(jnp.float16), dense(4, 4)), "bf16")
    assert {name for name, _ in replaced.dots(X)} == {"bfloat16"}
    assert set(replaced.made().values()) == {"bfloat16"}
    with pytest.warns(DtypePolicyWarning, match="has an explicit dtype=float16") as told:
        kept = wing.port(chain(threads(jnp.float16), dense(4, 4)), MIXED, keep_explicit=True)
        assert [name for name, _ in kept.dots(X)] == ["float16", "bfloat16"]
    assert len(told) == 1 and "at 'part_0/layer'" in str(told[0].message)


# --- what submodules hand on ----------------------------------------------------------------------


def scaled(self, x):
    """Computes in float32, whatever it is given."""
    assert x.dtype == jnp.float32  # a method of its own hands on nothing
    return jnp.sin(x)


IN_FLOAT32 = Text(lambda self, x: self.scaled(x.astype(jnp.float32)), "Wide", {"scaled": scaled})


@BOTH
@pytest.mark.parametrize("rules", [None, {"wide": "float32"}])
def test_branches_of_two_dtypes_meet_in_compute_dtype_where_that_is_asked_for(wing, rules):
    seen: list[Any] = []

    def call(self, x):
        wide, half = self.wide(x), self.half(x)
        seen.append((wide.dtype.name, half.dtype.name))
        return jax.lax.add(wide, half)

    branches = Text(call, wide=IN_FLOAT32, half=dense(4, 4))
    with pytest.raises(TypeError, match=r"add requires arguments to have .* dtypes, got float32"):
        wing.port(branches, MIXED, rules, own_code="keep")(X)
    model = wing.port(branches, MIXED, rules, cast_submodules=True)
    assert model(X).dtype == jnp.float32 and seen[-1] == ("bfloat16", "bfloat16")
    assert set(model.dots(X, gradient=True)) == {("bfloat16", "bfloat16")}


@BOTH
def test_a_roots_result_is_not_rounded(wing):
    root = Text(lambda self, x: self.branch(x).astype(jnp.float32) + 2.0**-12, branch=IN_FLOAT32)
    out = wing.port(root, MIXED, cast_submodules=True)(X)
    assert out.dtype == jnp.float32
    assert not np.array_equal(out, out.astype(jnp.bfloat16).astype(jnp.float32))


def wide_layer(base: Any) -> Any:
    """A class that derives from a layer of Flax's."""

    class Wide(base):
        def __call__(self, x):
            return super().__call__(x).astype(jnp.float32)

    return Wide


LinenWide, NnxWide = wide_layer(flax_linen.Dense), wide_layer(flax_nnx.Linear)


@BOTH
def test_flax_s_sequential_is_cast_and_a_class_that_derives_from_a_layer_is_not(wing):
    seen: list[Any] = []

    def call(self, x):
        wide, layers = self.wide(x), self.layers(x)
        seen.append((wide.dtype.name, layers.dtype.name))
        return layers

    calls = Text(
        call,
        wide=layer(lambda nn: LinenWide(4), lambda nnx, rngs: NnxWide(4, 4, rngs=rngs)),
        layers=layer(
            lambda nn: nn.Sequential([LinenWide(4), jnp.sin]),
            lambda nnx, rngs: nnx.Sequential(NnxWide(4, 4, rngs=rngs), jnp.sin),
        ),
    )
    wing.port(calls, MIXED, cast_submodules=True)(X)
    assert seen[-1] == ("float32", "bfloat16")


class Carried:
    """A cell that adds up in float32."""

    def added(self, carry, x):
        carry = carry + x.astype(jnp.float32)
        return carry, carry

    @property
    def num_feature_axes(self):
        return 1


class LinenCell(Carried, flax_linen.RNNCellBase):
    @flax_linen.compact
    def __call__(self, carry, x):
        return self.added(carry, x)


class NnxCell(Carried, flax_nnx.RNNCellBase):
    def __call__(self, carry, x):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.added(carry, x)


@BOTH
def test_a_cell_keeps_its_carry(wing):
    seen: list[Any] = []

    def call(self, x):
        carry, y = self.cell(jnp.zeros(x.shape), x)
        seen.append((carry.dtype.name, y.dtype.name))
        return y

    cell = Part(lambda self, nn, name: LinenCell(), lambda nnx, rngs: NnxCell())
    wing.port(Text(call, cell=cell), MIXED, cast_submodules=True)(X)
    assert seen[-1] == ("float32", "bfloat16")

"""Recurrent cells of both wings as pure functions, for the tests of one contract for both."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

from mpmodules import linen, nnx
from policy import use_policy
from policy.programs.reading.walk import walk

BATCH, TIME, WIDTH, HIDDEN = 2, 5, 4, 3
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Pure:
    """A built module as a function of its parameters, which calls it under the policy given."""

    module: Any
    call: Callable[..., Any]
    params: Any


@dataclasses.dataclass(frozen=True)
class Wing:
    name: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return self.name

    def cell(self, lib: Any, name: str, **options: Any) -> Any:
        """Makes a cell; a name may end with options: "SimpleCell residual"."""
        name, _, option = name.partition(" ")
        options |= {"residual": {"residual": True}, "no reset": {"reset_gate": False}}.get(
            option, {}
        )
        if name == "ConvLSTMCell":
            return lib.ConvLSTMCell(HIDDEN, kernel_size=(2,), **options)
        if self.name == "linen":
            return getattr(lib, name)(HIDDEN, **options)
        return getattr(lib, name)(WIDTH, HIDDEN, rngs=lib.Rngs(0), **options)

    def carry(self, cell: Any, shape: tuple[int, ...] = (BATCH, WIDTH)) -> Any:
        if self.name == "linen":
            return cell.initialize_carry(KEY, shape)
        return cell.initialize_carry(shape, flax.nnx.Rngs(1))

    def pure(
        self, build: Callable[[], Any], *args: Any, policy: Any = None, abstract: bool = False
    ) -> Pure:
        """Builds a module and its parameters; `args` are what it is initialised with.

        Where it is `abstract`, linen's parameters are shapes and dtypes.
        """
        graphdef: Any = None
        rest: Any = None
        with _scope(policy):
            module = build()
            if self.name == "linen":
                init = functools.partial(jax.eval_shape, module.init)
                params = (init if abstract else jax.jit(module.init))(KEY, *args)
            else:
                graphdef, params, rest = flax.nnx.split(module, flax.nnx.Param, ...)

        def call(params: Any, *args: Any, **kwargs: Any) -> Any:
            with _scope(policy):
                if self.name == "linen":
                    return module.apply(params, *args, **kwargs)
                return flax.nnx.merge(graphdef, params, rest, copy=True)(*args, **kwargs)

        return Pure(module, call, params)

    def values(self, params: Any) -> Any:
        """The parameters as a plain tree."""
        return params if self.name == "linen" else flax.nnx.to_pure_dict(params)


LINEN, NNX = Wing("linen", linen, flax.linen), Wing("nnx", nnx, flax.nnx)
WINGS = (LINEN, NNX)
_BOTH = ("SimpleCell", "SimpleCell residual", "LSTMCell", "OptimizedLSTMCell", "GRUCell")
CELLS = [(wing, name) for wing in WINGS for name in _BOTH]
CELLS += [(LINEN, name) for name in ("MGUCell", "MGUCell no reset", "ConvLSTMCell")]


def _scope(policy: Any) -> Any:
    """The scope of a policy, or of a policy and rules."""
    if policy is None:
        return contextlib.nullcontext()
    return use_policy(*policy) if isinstance(policy, tuple) else use_policy(policy)


def shape_of(name: str) -> tuple[int, ...]:
    """The shape of one step's input."""
    return (BATCH, 3, WIDTH) if name == "ConvLSTMCell" else (BATCH, WIDTH)


def sequence(name: str = "", dtype: Any = jnp.float32, steps: int = TIME) -> jax.Array:
    """(batch, time, features...)."""
    batch, *rest = shape_of(name)
    return jnp.asarray(np.random.default_rng(0).normal(size=(batch, steps, *rest)), dtype)


@functools.cache
def built(wing: Wing, name: str, policy: str | None = None, **options: Any) -> tuple[Pure, Any]:
    """Our cell, and its first carry."""
    with _scope(policy):
        carry = wing.carry(wing.cell(wing.ours, name, **options), shape_of(name))
    x = sequence(name)[:, 0]
    return wing.pure(lambda: wing.cell(wing.ours, name, **options), carry, x, policy=policy), carry


def loop(wing: Wing, lib: Any, name: str, policy: str | None = None, **options: Any) -> Pure:
    """An RNN over a cell of `lib`."""
    make = lambda: lib.RNN(wing.cell(lib, name, **options), return_carry=True)  # noqa: E731
    return wing.pure(make, sequence(name), policy=policy)


def dtypes(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def types(tree: Any) -> list[str]:
    return [leaf.dtype.name for leaf in jax.tree.leaves(tree)]


def equations(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Every equation of a program, those of inner bodies included."""
    return [site.equation for site in walk(jax.make_jaxpr(fn)(*args).jaxpr)]


def matmul_dtypes(fn: Callable[..., Any], *args: Any) -> set[str]:
    """The dtypes of all operands and results of all matmuls and convolutions."""
    found = [
        e
        for e in equations(fn, *args)
        if e.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    assert found
    return {v.aval.dtype.name for e in found for v in (*e.invars, *e.outvars)}


def lowered(fn: Callable[..., Any], *args: Any) -> str:
    return jax.jit(lambda *args: fn(*args)).lower(*args).as_text()


def assert_same_bits(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


def assert_close(ours: Any, theirs: Any, atol: float) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=atol
        )

"""Recurrent cells of both wings as pure functions, for the tests of one contract for both."""

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
        given = {"residual": {"residual": True}, "no reset": {"reset_gate": False}}
        options |= given.get(option, {})
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


def loop(wing: Wing, lib: Any, name: str, policy: str | None = None, **options: Any) -> Pure:
    """An RNN over a cell of `lib`."""
    make = lambda: lib.RNN(wing.cell(lib, name, **options), return_carry=True)  # noqa: E731
    return wing.pure(make, sequence(name), policy=policy)


def dtypes(tree: Any) -> set[str]:
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def equations(fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Every equation of a program, those of inner bodies included."""
    return [site.equation for site in walk(jax.make_jaxpr(fn)(*args).jaxpr)]


def matmul_dtypes(fn: Callable[..., Any], *args: Any) -> set[str]:
    """The dtypes of all operands and results of all matmuls and convolutions."""
    names = ("dot_general", "conv_general_dilated")
    found = [e for e in equations(fn, *args) if e.primitive.name in names]
    assert found
    return {v.aval.dtype.name for e in found for v in (*e.invars, *e.outvars)}


def assert_close(ours: Any, theirs: Any, atol: float) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=0, atol=atol)

"""The two APIs behind one face: models of one text, in modules of Flax's or of ours."""

# What Flax returns is typed as Flax's own class.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmodules import linen, nnx
from policy import audit, get_policy, use_policy
from policy.inspect.audit.report import Audit
from tests.programs import Operation, named, operations

KEY = jax.random.key(0)
X = jnp.linspace(-1, 1, 12).reshape(3, 4)
MIXED = "mixed_bfloat16"
OF_FILE = functools.partial(dict, dtype=jnp.float32)  # stands for a line that gives a layer float32
NORMAL, ONES = jax.nn.initializers.normal(1.0), jax.nn.initializers.ones


@dataclasses.dataclass(frozen=True)
class Part:
    """What a module holds under a name.

    Attributes:
      linen: makes it in `setup`, of the module, the modules to make it of, and its name.
      nnx: makes it in the constructor, of the modules to make it of, and random streams.
    """

    linen: Callable[[Any, Any, str], Any]
    nnx: Callable[[Any, Any], Any]


def weight(*shape: int, init: Any = NORMAL, **options: Any) -> Part:
    """A parameter."""
    return Part(
        lambda self, nn, name: self.param(name, init, shape, **options),
        lambda nnx, rngs: nnx.Param(init(rngs.params(), shape), **options),
    )


def layer(linen: Callable[[Any], Any], nnx: Callable[..., Any]) -> Part:
    """A layer: `linen` makes it of the module of layers, `nnx` of that and random streams."""
    return Part(lambda self, nn, name: linen(nn), nnx)


def dense(width: int, features: int, **options: Any) -> Part:
    return layer(
        lambda nn: nn.Dense(features, **options),
        lambda nnx, rngs: nnx.Linear(width, features, rngs=rngs, **options),
    )


def layer_norm(width: int, **options: Any) -> Part:
    return layer(
        lambda nn: nn.LayerNorm(**options),
        lambda nnx, rngs: nnx.LayerNorm(width, rngs=rngs, **options),
    )


def batch_norm(width: int, **options: Any) -> Part:
    options = {"use_running_average": False, "momentum": 0.5} | options
    return layer(
        lambda nn: nn.BatchNorm(**options),
        lambda nnx, rngs: nnx.BatchNorm(width, rngs=rngs, **options),
    )


def dropout(rate: float) -> Part:
    return layer(
        lambda nn: nn.Dropout(rate, deterministic=False),
        lambda nnx, rngs: nnx.Dropout(rate, rngs=rngs),
    )


def cache(value: jax.Array) -> Part:
    """A variable that calls change."""
    return Part(
        lambda self, nn, name: self.variable("cache", name, lambda: value),
        lambda nnx, rngs: nnx.Cache(value),
    )


def read(variable: Any) -> Any:
    return variable[...] if isinstance(variable, flax.nnx.Variable) else variable.value


def write(variable: Any, value: Any) -> None:
    if isinstance(variable, flax.nnx.Variable):
        variable[...] = value
    else:
        variable.value = value


class Text:
    """A module's text.

    Args:
      call: its `__call__`.
      name: its class's name.
      attributes: further methods and attributes of the class.
      parts: what it holds, by name: parts and texts.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        name: str = "Model",
        attributes: Mapping[str, Any] | None = None,
        **parts: Any,
    ):
        self.call, self.name, self.parts = call, name, parts
        self.attributes = {"__module__": __name__, **(attributes or {})}

    def linen_class(self, nn: Any) -> Any:
        def setup(module: Any) -> None:
            for name, part in self.parts.items():
                setattr(module, name, part.linen(module, nn, name))

        body = {"setup": setup, "__call__": self.call, **self.attributes}
        return type(self.name, (nn.Module,), body)

    def nnx_class(self, nnx: Any) -> Any:
        def construct(module: Any, *, rngs: Any) -> None:
            for name, part in self.parts.items():
                setattr(module, name, part.nnx(nnx, rngs))

        body = {"__init__": construct, "__call__": self.call, **self.attributes}
        return type(self.name, (nnx.Module,), body)

    def linen(self, module: Any, nn: Any, name: str) -> Any:
        return self.linen_class(nn)()

    def nnx(self, nnx: Any, rngs: Any) -> Any:
        return self.nnx_class(nnx)(rngs=rngs)


def under(text: Text, policy: Any) -> Part:
    """A module with a policy of its own."""
    return Part(
        lambda self, nn, name: text.linen_class(nn)(dtype_policy=policy),
        lambda nnx, rngs: text.nnx_class(nnx)(dtype_policy=policy, rngs=rngs),
    )


def compact(body: Callable[..., Any], nn: Any = linen) -> Any:
    """Returns a class of linen modules whose compact `__call__` is `body`."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return body(*args)

    return Model


@dataclasses.dataclass(frozen=True)
class Pair:
    """A model that is written for each API: each makes an instance."""

    linen_model: Callable[[], Any]
    nnx_model: Callable[[], Any]


def dtypes(tree: Any) -> dict[str, str]:
    """Returns the dtypes of the leaves of a tree, by path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def added_up(outputs: Any) -> jax.Array:
    sums = [leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(outputs)]
    return functools.reduce(operator.add, sums)


def assert_same_bits(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


@dataclasses.dataclass
class Model:
    """A model with its variables.

    Attributes:
      instance: the module.
      params: its parameters.
      pure: what it returns, of parameters and arguments; its state stays.
    """

    instance: Any
    params: Any
    pure: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls it as users do, who keep its state."""
        raise NotImplementedError

    def made(self) -> dict[str, str]:
        """Returns the dtypes of the parameters that the API makes, by path."""
        raise NotImplementedError

    def total(self, *args: Any, **kwargs: Any) -> Callable[[Any], jax.Array]:
        """Returns a loss of the parameters: the sum of all that the model returns."""
        return lambda params: added_up(self.pure(params, *args, **kwargs))

    def audit(self, *args: Any, backward: bool = False, **kwargs: Any) -> Audit:
        """Returns the audit of `total`, with the names of modules."""
        return audit(self.total(*args, **kwargs), self.params, backward=backward)

    def operations(self, *args: Any, gradient: bool = False, **kwargs: Any) -> list[Operation]:
        """Returns the operations of `total` or its gradient."""
        total = self.total(*args, **kwargs)
        return operations(jax.grad(total) if gradient else total, self.params)

    def dots(self, *args: Any, gradient: bool = False, **kwargs: Any) -> list[tuple[str, ...]]:
        """Returns the dtypes of the operands of each matmul."""
        found = self.operations(*args, gradient=gradient, **kwargs)
        return [op.inputs for op in named(found, "dot_general")]


class LinenModel(Model):
    """A linen module, with variables that Flax initialized: its code has not run under a policy."""

    def __init__(
        self, instance: Any, plain: Any, policy: Any, args: tuple[Any, ...], kept: Any = ()
    ):
        self.args, self.keys = args, {"params": KEY, "dropout": jax.random.key(1)}
        with jax.numpy_dtype_promotion("standard"):
            variables = dict(plain.init(self.keys, *args))
        params = variables.pop("params", {})

        def stored(path: Any, leaf: jax.Array) -> jax.Array:
            is_kept = path[-1].key in kept or leaf.dtype != jnp.float32
            return leaf if is_kept else leaf.astype(get_policy(policy).param_dtype)

        if policy is not None:
            params = jax.tree_util.tree_map_with_path(stored, params)
        self.state = variables
        super().__init__(instance, params, self._pure)

    def _apply(self, params: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
        variables = {"params": params, **self.state}
        if not self.state:
            return self.instance.apply(variables, *args, rngs=self.keys, **kwargs), {}
        mutable = list(self.state)
        return self.instance.apply(variables, *args, rngs=self.keys, mutable=mutable, **kwargs)

    def _pure(self, params: Any, *args: Any, **kwargs: Any) -> Any:
        return self._apply(params, args, kwargs)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, state = self._apply(self.params, args, kwargs)
        self.state = {**self.state, **state}
        return out

    def made(self) -> dict[str, str]:
        return dtypes(jax.eval_shape(self.instance.init, self.keys, *self.args)["params"])


class NnxModel(Model):
    """An nnx module."""

    def __init__(self, instance: Any):
        graph, params, rest = flax.nnx.split(instance, flax.nnx.Param, ...)

        def pure(params: Any, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
            copy = flax.nnx.merge(graph, params, rest, copy=True)
            return getattr(copy, method)(*args, **kwargs)

        super().__init__(instance, params, pure)

    @property
    def state(self) -> Any:
        others = flax.nnx.Any(flax.nnx.Param, flax.nnx.RngState)
        return flax.nnx.state(self.instance, flax.nnx.Not(others))

    def __call__(self, *args: Any, method: str = "__call__", **kwargs: Any) -> Any:
        return getattr(self.instance, method)(*args, **kwargs)

    def made(self) -> dict[str, str]:
        return dtypes(flax.nnx.to_pure_dict(self.params))

    def audit(self, *args: Any, backward: bool = False, **kwargs: Any) -> Audit:
        method = kwargs.pop("method", "__call__")

        def total(instance: Any) -> jax.Array:
            return added_up(getattr(instance, method)(*args, **kwargs))

        return audit(total, self.instance, backward=backward)


class Linen:
    name, module, flax = "linen", linen, flax.linen

    def theirs(self, text: Any, *args: Any) -> Model:
        """Returns the model in Flax's modules; `args` are what it is initialized with."""
        plain = self._plain(text)
        return LinenModel(plain, plain, None, args or (X,))

    def ours(self, text: Text, policy: Any, *args: Any) -> Model:
        """Returns the model in our modules, with a policy of its own."""
        instance = text.linen_class(linen)(dtype_policy=policy)
        attributes = {k: v for k, v in text.attributes.items() if k != "keep_params"}
        plain = Text(text.call, text.name, attributes, **text.parts).linen_class(linen)()
        kept = text.attributes.get("keep_params", ())
        return LinenModel(instance, plain, policy, args or (X,), kept)

    def scoped(self, text: Text, policy: Any, rules: Any = None, *args: Any) -> Model:
        """Returns the model in our modules, called in a scope."""
        instance = text.linen_class(linen)()
        model = LinenModel(instance, instance, policy, args or (X,))
        inner = model.pure

        def pure(*args: Any, **kwargs: Any) -> Any:
            with use_policy(policy, rules):
                return inner(*args, **kwargs)

        model.pure = pure
        return model

    def port(self, text: Any, policy: Any, rules: Any = None, *args: Any, **options: Any) -> Model:
        """Returns `apply_policy` of the model in Flax's modules."""
        plain = self._plain(text)
        instance = linen.apply_policy(plain, policy, rules, **options)
        return LinenModel(instance, plain, policy, args or (X,))

    def _plain(self, text: Any) -> Any:
        return text.linen_model() if isinstance(text, Pair) else text.linen_class(flax.linen)()


class Nnx:
    name, module, flax = "nnx", nnx, flax.nnx

    def theirs(self, text: Any, *args: Any) -> Model:
        return NnxModel(self._plain(text))

    def ours(self, text: Text, policy: Any, *args: Any) -> Model:
        rngs = nnx.Rngs(0, dropout=1)
        return NnxModel(text.nnx_class(nnx)(dtype_policy=policy, rngs=rngs))

    def scoped(self, text: Text, policy: Any, rules: Any = None, *args: Any) -> Model:
        """Returns the model in our modules, built in a scope."""
        with use_policy(policy, rules):
            return self.ours(text, None)

    def port(self, text: Any, policy: Any, rules: Any = None, *args: Any, **options: Any) -> Model:
        return NnxModel(nnx.apply_policy(self._plain(text), policy, rules, **options))

    def _plain(self, text: Any) -> Any:
        if isinstance(text, Pair):
            return text.nnx_model()
        return text.nnx_class(flax.nnx)(rngs=flax.nnx.Rngs(0, dropout=1))


APIS: dict[str, Any] = {"linen": Linen(), "nnx": Nnx()}
BOTH = pytest.mark.parametrize("api", APIS.values(), ids=APIS)
"""Runs a test for each api."""

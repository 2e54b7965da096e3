"""Calls of linen methods as calls of pure functions: variables and random keys go in, updates of
them come out.

Variables in half precision, such as caches, stay so: a user's code reads them in float32, and they
are rounded where it writes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import Scope, lift
from flax.linen.transforms import decorator_lift_transform

from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import is_reference
from mpmodules.calls.under_way import linen_calls as calls
from policy.core.arrays import cast_array, is_floating
from policy.programs import marks

Method = Callable[..., Any]
Run = Callable[..., Any]
"""Returns the results of ``call(params, others, inputs)``, given `call` and its arguments."""


def run_lifted(call: MethodCall, leaves: Sequence[Any], run: Run, *, has_references: bool) -> Any:
    """Calls a method of a module, given as a pure function to `run`.

    Args:
      call: the call, of a method that Flax wrapped.
      leaves: of its arguments, references among them.
      run: runs the pure function.
      has_references: whether references are among the leaves.
    """
    module, args, kwargs = call.module, call.args, call.kwargs

    @functools.wraps(call.method)
    def unpacking(module: Any, given: _Given) -> Any:
        return call.method(module, *given.args, **given.kwargs)

    counters = _copied(module.scope.rng_counters)
    before = calls.seen, calls.validates

    def start() -> None:
        calls.seen, calls.validates = before
        set_counters(module.scope.rng_counters, counters)

    transform = functools.partial(_transform, run=run, start=start)
    # Flax runs setup before it starts, and again inside: no call is a root's meanwhile.
    calls.seen, calls.validates = {} if calls.seen is None else calls.seen, False
    try:
        if any(isinstance(leaf, _OF_LINEN) for leaf in leaves):
            return decorator_lift_transform(transform, call.method)(module, *args, **kwargs)
        # Flax would copy lists and objects among the arguments.
        given = _Given(args, kwargs, has_references)
        return decorator_lift_transform(transform, unpacking)(module, given)
    finally:
        calls.seen, calls.validates = before


_OF_LINEN = (flax_nn.Module, flax_nn.Variable)


@dataclasses.dataclass(frozen=True)
class _Held:
    """An object with state, such as an nnx module, which is not to be copied."""

    value: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Counts:
    """The counts of the random streams of scopes after a call, in the structure of its results."""

    of_scopes: list[dict[Any, Any]]


def _held(tree: Any) -> Any:
    return jax.tree.map(lambda x: _Held(x) if is_reference(x) else x, tree, is_leaf=is_reference)


def _released(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.value if isinstance(x, _Held) else x, tree)


@dataclasses.dataclass(frozen=True, eq=False)
class _Given:
    """The arguments of a call, which Flax takes for one.

    Attributes:
      args, kwargs: the arguments, whose lists and dicts are the caller's.
      has_references: whether references are among them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_references: bool


def _transform(
    core: Callable[..., Any], *, run: Run, start: Callable[[], None]
) -> Callable[..., Any]:
    """Lifts a function of scopes: its variables and random keys become arguments of a pure one."""

    def inner(
        scope_fn: Any,
        repack: Any,
        variables: Any,
        rngs: Any,
        *,
        counters: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        params, others = variables
        packed = args[0] if args and isinstance(args[0], _Given) else None

        def call(params: Any, others: Any, inputs: Any) -> Any:
            (variables, rngs), (args, kwargs) = others, inputs
            scopes = scope_fn((params, variables), rngs)
            if packed is not None:
                if packed.has_references:
                    args, kwargs = _released((args, kwargs))
                args, kwargs = (_Given(args, kwargs, packed.has_references),), {}
            outputs = core(scopes, *args, **kwargs)
            return outputs, repack(scopes), _Counts(list(map(_copied, counters)))

        inputs = (args, kwargs) if packed is None else (packed.args, packed.kwargs)
        inputs = _held(inputs) if packed is not None and packed.has_references else inputs
        trees = params, (others, rngs), inputs
        outputs, state, counted = run(call, trees)
        for counts, after in zip(counters, counted.of_scopes, strict=True):
            set_counters(counts, after)
        return outputs, state

    def lifted(scopes: Any, *args: Any, **kwargs: Any) -> Any:
        start()
        counters = [scope.rng_counters for scope in jax.tree.leaves(scopes)]
        before = list(map(_copied, counters))
        call = functools.partial(inner, counters=counters, args=args, kwargs=kwargs)
        try:
            return lift.pack(call, ("params", True), (True,), (True,))(scopes)
        except BaseException:
            for counts, old in zip(counters, before, strict=True):
                set_counters(counts, old)
            raise

    return lifted


def _copied(counters: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns a copy of a scope's counters. Flax knows some of the keys by their identity."""
    return {key: _copied(x) if isinstance(x, dict) else x for key, x in counters.items()}


def set_counters(counters: dict[Any, Any], counts: Mapping[Any, Any]) -> None:
    """Sets the counters of a scope's random streams, and those of scopes inside of it."""
    for key in counters.keys() - counts.keys():
        del counters[key]
    for key, count in counts.items():
        if isinstance(count, dict):
            set_counters(counters.setdefault(key, {}), count)
        else:
            counters[key] = count


# --------------------------------------------------------------------------------------------------
# Half-precision variables
# --------------------------------------------------------------------------------------------------


class _Float32Scope(Scope):
    """A scope whose half-precision variables are float32 to the code that reads and writes them."""

    def get_variable(self, col: str, name: str, default: Any = None) -> Any:
        stored = super().get_variable(col, name, default)
        if col == "params" or not any(map(_is_half, jax.tree.leaves(stored))):
            return stored
        return jax.tree.map(lambda x: marks.returned_if_half(x) if _is_half(x) else x, stored)

    def put_variable(self, col: str, name: str, value: Any) -> None:
        stored = super().get_variable(col, name)
        if col != "params" and jax.tree.structure(stored) == jax.tree.structure(value):
            value = jax.tree.map(_as_stored, value, stored)
        super().put_variable(col, name, value)

    def rewound(self, rewind_rngs: bool = False) -> Scope:
        return _as(_Float32Scope, super().rewound(rewind_rngs))


def _as(cls: type[Scope], scope: Scope) -> Scope:
    """Returns a scope of another class that shares all state with `scope`."""
    other = object.__new__(cls)
    object.__setattr__(other, "__dict__", vars(scope))
    return other


@contextlib.contextmanager
def half_variables_in_float32(module: Any) -> Iterator[None]:
    """Makes half-precision variables float32 to a user's module in a block, params aside."""
    if type(module.scope) is not Scope:
        yield
        return
    object.__setattr__(module, "scope", _as(_Float32Scope, module.scope))
    try:
        yield
    finally:
        object.__setattr__(module, "scope", _as(Scope, module.scope))


def _as_stored(new: Any, stored: Any) -> Any:
    return cast_array(new, stored.dtype) if _is_half(stored) and is_floating(new) else new


def _is_half(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return getattr(dtype, "itemsize", 0) == 2 and is_floating(leaf)

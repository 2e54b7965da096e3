"""A traced train step: its program, its params, and what its optimizer tells."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from policy.autocasting.parameters import ParamsArgument, parameters
from policy.grads.loss_scale import StaticLossScale
from policy.inspect.audit.flow import State, states_of
from policy.inspect.monitor.updates import Param
from policy.inspect.traced.call import Call, input_paths, leaf_path
from policy.optim.state import states_in
from policy.programs.jaxprs import opened
from policy.programs.rewriting.parts import TwoParts, divisible
from policy.programs.tracing.trace import Traced, without_static


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A traced train step.

    Attributes:
      call: the call.
      shape: the shape of its result.
      jaxpr: the program.
      paths: the path of each array among its arguments.
      carried: the places of the outputs that are the next values of arguments, by theirs.
      params: the params.
    """

    call: Call
    shape: Any
    jaxpr: Any
    paths: tuple[str, ...]
    carried: Mapping[int, int]
    params: tuple[Param, ...]

    @classmethod
    def of(
        cls, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], params: ParamsArgument
    ) -> TrainStep:
        """Traces a call.

        Raises:
          ValueError: none of its arguments is a param of which it returns a new value.
        """
        call = Call.of(fn, args, kwargs, params)
        jaxpr, shape = call.traced()
        called = None if call.lowered else fn
        traced = Traced(jaxpr, _without_nesting(shape), call.arguments, called)
        paths = tuple(_named_paths(call, fn))
        states = states_of(traced)
        carried = {state.argument: state.output for state in reversed(states)}
        found = tuple(_params(call, called, paths, states))
        if not found:
            raise ValueError(
                "monitor found no params: the step should take floating params, and return new "
                "ones under the same keys. Name the argument, as in params='weights'."
            )
        return cls(call, shape, jaxpr, paths, carried, found)

    def parts(self, on_nonfinite: bool) -> TwoParts:
        """Returns the program in two parts. With `on_nonfinite` the first one tells whether the
        step is finite, by the flags that depend on no new param; else there is nothing in it.
        """
        if not on_nonfinite:
            return TwoParts(self.jaxpr, ())
        outputs = opened(self.jaxpr)[0].outvars
        arrays = [i for i in self.carried.values() if outputs[i].aval.shape]
        divided, found = divisible(self.jaxpr, self.flags, arrays)
        return TwoParts(divided, found, arrays if found else ())

    @property
    def flags(self) -> list[int]:
        """The outputs that tell whether the step is finite: floating scalars, and the flag of
        `mixed_precision`.
        """
        paths, carried = self.paths, self.carried
        finite = {
            carried[i] for i, path in enumerate(paths) if _is_state(path, "finite") and i in carried
        }
        return [
            i
            for i, atom in enumerate(opened(self.jaxpr)[0].outvars)
            if i in finite
            or (atom.aval.shape == () and jnp.issubdtype(atom.aval.dtype, jnp.floating))
        ]

    @property
    def outputs(self) -> int:
        """The number of the program's outputs."""
        return len(opened(self.jaxpr)[0].outvars)

    @property
    def arrays(self) -> list[Any]:
        """The arrays among the arguments."""
        return list(self.call.arguments.arrays)

    def result(self, results: Sequence[Any]) -> Any:
        """Returns the result of the call, from those of the program."""
        out = without_static(jax.tree.unflatten(jax.tree.structure(self.shape), results))
        return out if self.call.lowered is None else self.call.lowered.finish(out)

    def optimizer(self, arrays: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the loss scale of the step, () float32, NaN without one; and whether it was
        finite, by `mixed_precision`'s flag, () bool.
        """
        scale, finite = jnp.float32(jnp.nan), jnp.array(True)
        for state in states_in(self.call.arguments.filled(arrays)):
            if isinstance(state.loss_scale, StaticLossScale):
                scale = jnp.float32(state.loss_scale.loss_scale)
        for i, array in enumerate(arrays):
            if _is_state(self.paths[i], "loss_scale") and not array.shape:
                scale = array.astype(jnp.float32)
            if _is_state(self.paths[i], "finite") and i in self.carried:
                finite = finite & jnp.all(results[self.carried[i]])
        return scale, finite


def _without_nesting(shape: Any) -> Any:
    """Returns a result with the elements of tuples in a tuple as its own: the carry of a scan."""
    if type(shape) is not tuple:
        return shape
    return tuple(itertools.chain(*(one if type(one) is tuple else (one,) for one in shape)))


def _named_paths(call: Call, fn: Any) -> list[str]:
    """Returns the path of each array; that of a bare argument is its name.

    Paths of nnx's state begin below its module.
    """
    names = _argument_names(fn)
    of = call.lowered
    if of is None or not of.states:
        bare = {f"args[{i}]": name for i, name in enumerate(names)}
        return [bare.get(path, path) for path in input_paths(call.arguments, of is not None)]
    tree = jax.tree.unflatten(call.arguments.treedef, call.arguments.is_array)
    keys = [key for key, is_array in jax.tree_util.tree_leaves_with_path(tree) if is_array]
    origins = itertools.compress(of.origins(), call.arguments.is_array)
    found: list[str] = []
    for key, origin in zip(keys, origins, strict=True):
        is_state = key[1].idx < 2  # parameters, and other state, by the place of their module
        path = leaf_path(key[3:]).removesuffix("/value") if is_state else ""
        name = names[origin] if origin is not None and origin < len(names) else ""
        full = "/".join(filter(None, (name, path)))
        numbered = (f"{full}/{i}" for i in range(len(keys)))
        found.append(next(one for one in (path, full, *numbered) if one and one not in found))
    return found


def _argument_names(fn: Any) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # of a class without a signature
        return []


def _is_state(path: str, name: str) -> bool:
    """Returns whether a path is that of a field of `mixed_precision`'s state."""
    return path == name or path.endswith(f"/{name}")


def _params(call: Call, called: Any, paths: Sequence[str], states: Sequence[State]) -> list[Param]:
    outputs: dict[int, tuple[int, ...]] = {}
    for state in states:
        outputs[state.argument] = (*outputs.get(state.argument, ()), state.output)
    args, kwargs = call.arguments.filled(call.arguments.arrays)
    named = call.params
    if named is None and called is not None and "params" in _argument_names(called):
        named = "params"
    marks = parameters(call.fn, named, args, kwargs)
    places = [
        i for i, mark in enumerate(itertools.compress(marks, call.arguments.is_array)) if mark
    ]
    of_state = [i for i in places if paths[i].startswith("params/")]
    stored = {path: i for i, path in enumerate(paths) if "masters/" in path and i in outputs}
    return [
        Param(i, outputs[i], _beside(paths[i], stored))
        for i in of_state or places
        if i in outputs and jnp.issubdtype(call.arguments.arrays[i].dtype, jnp.inexact)
    ]


def _beside(path: str, stored: Mapping[str, int]) -> int | None:
    """Returns the place of the array that `mixed_precision` stores beside a param."""
    ends = {path, path.partition("/")[2]}
    return next((i for each, i in stored.items() if each.split("masters/", 1)[1] in ends), None)

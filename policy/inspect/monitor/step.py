"""A traced train step: its program, its params, and the state that it returns."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from policy.autocasting.parameters import ParamsArgument, parameters
from policy.grads.loss_scale import StaticLossScale
from policy.inspect.audit.flow import states_of
from policy.inspect.monitor.updates import Param, is_trained
from policy.inspect.traced.call import Call, input_paths, leaf_path
from policy.optim.state import states_in
from policy.programs.jaxprs import opened
from policy.programs.reading.graph import Graph
from policy.programs.tracing.trace import Traced, without_static

_DEPTH = 2  # of a result, at which the new value of an argument is looked for


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
      graph: the program's graph.
    """

    call: Call
    shape: Any
    jaxpr: Any
    paths: tuple[str, ...]
    carried: Mapping[int, int]
    params: tuple[Param, ...]
    graph: Graph

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
        names = _argument_names(fn)
        traced = Traced(jaxpr, shape, call.arguments, called)
        paths = tuple(_named_paths(call, names))
        carried = _carried(traced, names)
        graph = Graph(jaxpr)
        found = tuple(_params(call, called, names, paths, carried, graph))
        if not found:
            raise ValueError(
                "monitor found no params: the step should take floating params, and return new "
                "ones under the same keys. Name the argument, as in params='weights'."
            )
        return cls(call, shape, jaxpr, paths, carried, found, graph)

    @property
    def flags(self) -> dict[int, str]:
        """The paths of the outputs that tell whether the step is finite, by their places: floating
        state and scalars, and the flag of `mixed_precision`.
        """
        given = {output: i for i, output in self.carried.items()}
        results = [leaf_path(path) for path, _ in jax.tree.leaves_with_path(self.shape)]
        found: dict[int, str] = {}
        for i, variable in enumerate(opened(self.jaxpr)[0].outvars):
            path = self.paths[given[i]] if i in given else f"result {results[i]}".rstrip()
            is_float = jnp.issubdtype(variable.aval.dtype, jnp.inexact)
            if (is_float and (i in given or not variable.aval.shape)) or _is_state(path, "finite"):
                found[i] = path
        return found

    def finite(self, arrays: Sequence[Any], results: Sequence[Any]) -> jax.Array:
        """Returns whether each of `flags` is finite, (flags,) bool.

        State is, too, where it was not finite before the step.
        """
        given = {output: i for i, output in self.carried.items()}
        each = []
        for i in self.flags:
            is_flag = results[i].dtype == bool
            is_finite = results[i] if is_flag else jnp.isfinite(results[i])
            if i in given and not is_flag:
                is_finite |= ~jnp.isfinite(arrays[given[i]])
            each.append(jnp.all(is_finite))
        return jnp.stack(each)

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


def _is_state(path: str, name: str) -> bool:
    """Returns whether a path is that of a field of `mixed_precision`'s state."""
    return path == name or path.endswith(f"/{name}")


def _argument_names(fn: Any) -> list[str]:
    try:
        return list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # of a class without a signature
        return []


# --------------------------------------------------------------------------------------------------
# State
# --------------------------------------------------------------------------------------------------


_Tree = dict[tuple[Any, ...], Any]  # shapes and dtypes of arrays, by their keys


def _carried(traced: Traced, names: Sequence[str]) -> dict[int, int]:
    """Returns the places of the outputs that are the next values of arguments, by theirs.

    An argument's next value is the first part of the result with its keys, shapes and dtypes; one
    that is returned under the argument's name comes before others. Arrays without keys are no
    state.
    """
    found: dict[int, int] = {}
    tree = jax.tree.unflatten(traced.arguments.treedef, traced.arguments.is_array)
    paths = [path for path, is_array in jax.tree.leaves_with_path(tree) if is_array]
    results = [path for path, _ in jax.tree.leaves_with_path(traced.shape)]
    given = _parts(paths, traced.jaxpr.in_avals, 2)
    returned = [_parts(results, traced.jaxpr.out_avals, depth) for depth in range(_DEPTH + 1)]
    for (_, key), (places, tree) in given.items() if traced.called else ():
        name = names[key] if isinstance(key, int) and key < len(names) else key
        alike = [
            (prefix[-1:] != (name,), outputs)
            for parts in returned
            for prefix, (outputs, part) in parts.items()
            if part == tree and () not in tree
        ]
        taken = {*found.values()}
        free = [outputs for _, outputs in sorted(alike) if taken.isdisjoint(outputs)]
        found |= dict(zip(places, free[0], strict=True)) if free else {}
    for state in states_of(traced):
        if state.argument not in found and state.output not in found.values():
            found[state.argument] = state.output
    return found


def _parts(
    paths: Sequence[Any], avals: Sequence[Any], depth: int
) -> dict[tuple[Any, ...], tuple[list[int], _Tree]]:
    """Returns the parts of a tree at a depth by the keys to them: places of arrays, and shapes."""
    found: dict[tuple[Any, ...], tuple[list[int], _Tree]] = {}
    for i, (path, aval) in enumerate(zip(paths, avals, strict=True)):
        keys = tuple(map(_key, path))
        if len(keys) >= depth:
            places, tree = found.setdefault(keys[:depth], ([], {}))
            places.append(i)
            tree[keys[depth:]] = aval.shape, aval.dtype
    return found


def _key(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


# --------------------------------------------------------------------------------------------------
# Paths and params
# --------------------------------------------------------------------------------------------------


def _named_paths(call: Call, names: Sequence[str]) -> list[str]:
    """Returns the path of each array, below its argument; that of a bare argument is its name.

    Paths that several arguments have begin with the name of the argument.
    """
    of, arguments = call.lowered, call.arguments
    tree = jax.tree.unflatten(arguments.treedef, arguments.is_array)
    keys = [key for key, is_array in jax.tree.leaves_with_path(tree) if is_array]
    if of is None or not of.states:
        short = input_paths(arguments, of is not None)
        origins = [_key(key[1]) for key in keys]
        bare = {f"args[{i}]": name for i, name in enumerate(names)}
        short = [bare.get(path, path) for path in short]
    else:
        origins = list(itertools.compress(of.origins(), arguments.is_array))
        # parameters, and other state, by the place of their module
        is_state = [key[1].idx < 2 for key in keys]
        pairs = zip(keys, is_state, strict=True)
        short = [leaf_path(key[3:]).removesuffix("/value") if ours else "" for key, ours in pairs]
    found: list[str] = []
    for origin, path in zip(origins, short, strict=True):
        name = names[origin] if isinstance(origin, int) and origin < len(names) else origin or ""
        full = "/".join(filter(None, (str(name), path)))
        is_first = bool(path) and short.count(path) == 1
        options = (path if is_first else full, *(f"{full}/{i}" for i in range(len(keys))))
        found.append(next(one for one in options if one and one not in found))
    return found


def _params(
    call: Call,
    called: Any,
    names: Sequence[str],
    paths: Sequence[str],
    carried: Mapping[int, int],
    graph: Graph,
) -> Iterator[Param]:
    """Yields the params: those that are named so, and those that the step trains."""
    args, kwargs = call.arguments.filled(call.arguments.arrays)
    named = call.params
    if named is None and called is not None and "params" in names:
        named = "params"
    marks = parameters(call.fn, named, args, kwargs)
    arrays = call.arguments.arrays
    state = [i for i in carried if jnp.issubdtype(arrays[i].dtype, jnp.inexact)]
    marked = list(itertools.compress(marks, call.arguments.is_array))
    places = [i for i in state if marked[i]]
    if call.params is None:
        given = (*args, *kwargs.values())
        is_collection = any(isinstance(one, Mapping) and "params" in one for one in given)
        fields = [i for i in places if paths[i].startswith("params/")]
        is_sure = bool(named) or is_collection
        every = _stored(state, paths, carried)
        trained = [one.leaf for one in every if is_trained(graph, one)]
        places = sorted({*(places if is_sure else fields), *trained}) or places
    yield from _stored(places, paths, carried)


def _stored(places: Sequence[int], paths: Sequence[str], carried: Mapping[int, int]) -> list[Param]:
    """Returns params with the arrays that `mixed_precision` stores with them, each for one."""
    stored = {paths[i].split("masters/", 1)[1]: i for i in carried if "masters/" in paths[i]}
    found: list[Param] = []
    for i in places:
        end = next((end for end in (paths[i], paths[i].partition("/")[2]) if end in stored), None)
        found.append(Param(i, carried[i], None if end is None else stored.pop(end)))
    return found

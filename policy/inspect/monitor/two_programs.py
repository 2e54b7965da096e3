"""A monitored step as two programs, between which the host chooses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from policy.autocasting.parameters import ParamsArgument
from policy.inspect.monitor.snapshot import Snapshot, SnapshotRows
from policy.inspect.monitor.step import TrainStep


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["is_finite"], meta_fields=["kept"]
)
@dataclasses.dataclass(frozen=True)
class Finiteness:
    """The finiteness of a step, and the state that it keeps if it is not finite.

    Attributes:
      is_finite: () bool.
      kept: of state that a step returns, and that stays as it was if the step is not finite: its
        place among the leaves of the arguments, and of the result. None of what modules hold.
    """

    is_finite: jax.Array
    kept: tuple[tuple[int, int], ...]


def kept_unless_finite(fn: Callable[..., Any], params: ParamsArgument = None) -> Callable[..., Any]:
    """Returns a train step that leaves its state as it was if it is not finite.

    Returns:
      A function that returns the result of `fn` and a `Finiteness`.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[Any, Finiteness]:
        traced = TrainStep.of(fn, args, kwargs, params)
        arrays = traced.arrays
        results = jex_core.jaxpr_as_fun(traced.jaxpr)(*arrays)
        is_finite = jnp.all(traced.finite(arrays, results))
        for i, output in traced.carried.items():
            results[output] = jnp.where(is_finite, results[output], arrays[i])
        leaves = list(itertools.compress(itertools.count(), traced.call.arguments.is_array))
        places = {} if traced.call.lowered else traced.carried
        kept = tuple((leaves[i], output) for i, output in places.items())
        return traced.result(results), Finiteness(is_finite, kept)

    return step


def chosen_by_host(
    plain: Callable[..., Any], watched: Callable[..., Any], every: int
) -> Callable[..., tuple[Any, Snapshot]]:
    """Returns a function of a step's number, an integer on the host, and its arguments.

    Args:
      plain: a step that returns its result, and a `Finiteness` or None.
      watched: one that returns its result and its snapshot.
      every: steps from one snapshot to the next.

    Raises:
      ValueError: at the call: `plain` would not find arguments that it overwrites if it ran again.
    """

    def step(number: int, args: Any, kwargs: Any) -> tuple[Any, Snapshot]:
        if number % every:
            result, found = plain(*args, **kwargs)
            if found is not None:
                _require_kept(args, kwargs, found)
            if found is None or np.all(found.is_finite):
                return result, _not_taken(number)
            if found.kept:
                args, kwargs = _as_before(args, kwargs, result, found)
        result, snapshot = watched(*args, **kwargs)
        step = np.full(np.shape(snapshot.step), number, np.int32)
        return result, dataclasses.replace(snapshot, step=step)

    return step


def _require_kept(args: Any, kwargs: Any, found: Finiteness) -> None:
    """Raises unless a step returns all that it overwrites."""
    kept = {argument for argument, _ in found.kept}
    leaves = enumerate(jax.tree.leaves((args, kwargs)))
    lost = [i for i, x in leaves if i not in kept and isinstance(x, jax.Array) and x.is_deleted()]
    if lost:
        path, _ = jax.tree.leaves_with_path((args, kwargs))[lost[0]]
        name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
        raise ValueError(
            f"A step that is not finite runs again, but {name} is donated, and the step does not "
            "return it under the same key. Don't donate it, or give on_nonfinite=False."
        )


def _as_before(args: Any, kwargs: Any, result: Any, found: Finiteness) -> Any:
    """Returns the arguments of a step that kept its state, which may have overwritten them."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    outputs = jax.tree.leaves(result)
    for argument, output in found.kept:
        leaves[argument] = outputs[output]
    return jax.tree.unflatten(treedef, leaves)


def _not_taken(number: int) -> Snapshot:
    no = np.zeros((), bool)
    of_step: list[Any] = [np.int32(number), no, np.float32(np.nan), no]
    of_step += [np.ones(0, bool), np.zeros(0)]
    return Snapshot(*of_step, layout=SnapshotRows())

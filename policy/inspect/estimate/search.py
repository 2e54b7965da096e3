"""The rows of a search: each policy with each batch, each checkpoint policy and each mesh."""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from policy.inspect.estimate.placement import mesh_of
from policy.inspect.estimate.steps import Candidate
from policy.inspect.estimate.targets import Target, axes_text
from policy.programs.reading.walk import walk
from policy.programs.tracing.trace import function_name

MOST_COMPILES = 24
Mesh = Mapping[str, int]

# What `jax.checkpoint(policy=...)` takes, by name.
CHECKPOINT_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": (jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "none": jax.checkpoint_policies.everything_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
}
_NAMES = "names:"


def remat_policy(name: str) -> Callable[..., Any]:
    """Returns the checkpoint policy of a name, as `jax.checkpoint(policy=...)` takes it.

    >>> from policy.inspect.estimate.search import remat_policy
    >>> remat_policy("full") is jax.checkpoint_policies.nothing_saveable
    True

    Args:
      name: "full" or "nothing_saveable", which saves nothing; "dots_saveable";
        "dots_with_no_batch_dims_saveable"; "none" or "everything_saveable", which repeats nothing;
        or "names:a,b", which saves values that `jax.ad_checkpoint.checkpoint_name` named a or b.

    Raises:
      ValueError: there is no such name.
    """
    if isinstance(name, str) and name in CHECKPOINT_POLICIES:
        return CHECKPOINT_POLICIES[name]
    if isinstance(name, str) and name.startswith(_NAMES) and all(saved := _saved(name)):
        return jax.checkpoint_policies.save_only_these_names(*saved)
    near = difflib.get_close_matches(str(name), CHECKPOINT_POLICIES, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"remat has no value {name!r}.{hint} Values: {', '.join(CHECKPOINT_POLICIES)}, and "
        "names:a,b for values that checkpoint_name names. Another checkpoint policy goes to the "
        "example in a row's options: ('bfloat16', {'remat': policy})."
    )


def _saved(name: str) -> list[str]:
    return [part.strip() for part in name.removeprefix(_NAMES).split(",")]


def require_names(row: Candidate, jaxpr: Any) -> None:
    """Rejects a row that saves values by names that its program does not have.

    Raises:
      ValueError: the message has the names that there are.
    """
    if not row.remat.startswith(_NAMES):
        return
    known = {str(site.equation.params["name"]) for site in walk(jaxpr) if site.name == "name"}
    for name in _saved(row.remat):
        if name not in known:
            there = f"Names: {', '.join(sorted(known))}." if known else "It names none."
            raise ValueError(
                f"remat={row.remat!r}: the step has no value that checkpoint_name names {name!r}. "
                f"{there}"
            )


# --------------------------------------------------------------------------------------------------
# Rows
# --------------------------------------------------------------------------------------------------


SearchSpace = Mapping[str, tuple[Any, ...]]
"""Values of "batch", "remat" and "mesh" to combine with policies; () leaves one to the example."""


def search_of(batch: Any, remat: Any, mesh: Any, target: Target) -> SearchSpace:
    """Returns the values that `policy.estimate` is given.

    Raises:
      TypeError: a batch is no whole number, or a mesh no dict.
      ValueError: a batch is below 1, there is no such checkpoint policy, a mesh has another number
        of devices than the target, or a value is given twice.
    """
    batches, remats, meshes = (_several(given) for given in (batch, remat, mesh))
    for one in batches:
        if type(one) is not int:
            raise TypeError(
                "batch should be the number of examples of a step, or a list of numbers, which go "
                f"to the example's parameter `batch`, but got {one!r}. An argument of that name "
                "is given by functools.partial(fn, batch=...)."
            )
        if one < 1:
            raise ValueError(f"batch should be at least 1, but got {one}.")
    for one in remats:
        remat_policy(one)
    for one in meshes:
        mesh_of(target, one, ())
    given = {"batch": (batch, batches), "remat": (remat, remats), "mesh": (mesh, meshes)}
    for name, (value, values) in given.items():
        if value is not None and not values:
            raise ValueError(f"{name} has no values: leave it out, or give one.")
        twice = next((one for i, one in enumerate(values) if one in values[:i]), None)
        if twice is not None:
            raise ValueError(f"{name} has {twice!r} twice: drop one.")
    return {name: values for name, (_, values) in given.items()}


def _several(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def require_parameters(fn: Any, is_example: bool, options: Sequence[str]) -> None:
    """Rejects options that a function does not take.

    Raises:
      ValueError: it is no example, or it has no such parameter.
    """
    if not options:
        return
    if not is_example:
        raise ValueError(
            f"{' and '.join(options)} go to an example as keyword arguments: give estimate a "
            "function that returns (function, args), in place of the function and its arguments."
        )
    parameters = inspect.signature(fn).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    names = [one.name for one in parameters]
    for option in options:
        if option not in names:
            raise ValueError(
                f"{function_name(fn)} has no parameter {option!r}, which {option}= goes to. "
                f"Parameters: {', '.join(names) or 'none'}."
            )


def rows_of_search(
    candidates: Sequence[Candidate], search: SearchSpace, max_compiles: int
) -> tuple[Candidate, ...]:
    """Returns each candidate with each batch, each checkpoint policy and each mesh.

    A row's name has the values that differ between rows: "mixed_bfloat16, batch=256, remat=full,
    data=4 fsdp=4".

    Raises:
      ValueError: a candidate has an option that is searched, or there are more rows than
        `max_compiles`.
    """
    for candidate in candidates:
        if option := next((name for name in candidate.options if search.get(name)), None):
            raise ValueError(
                f"The row {candidate.name!r} has the option {option!r}, and {option}= gives it to "
                "all rows: drop one."
            )
    batches, remats, meshes = (search[name] for name in ("batch", "remat", "mesh"))
    values = (candidates, batches, remats, meshes)
    counts = [max(len(each), 1) for each in values]
    if math.prod(counts) > max(max_compiles, len(candidates)):
        words = zip(counts, ("policies", "batches", "remats", "meshes"), strict=True)
        product = " x ".join(f"{count} {word}" for count, word in words if count > 1)
        raise ValueError(
            f"The search compiles {math.prod(counts)} programs ({product}), more than max_compiles="
            f"{max_compiles}: give fewer values, or max_compiles={math.prod(counts)}."
        )
    combined = itertools.product(candidates, batches or (None,), remats or ("",), meshes or (None,))
    return tuple(_row(*one, [count > 1 for count in counts]) for one in combined)


def _row(
    candidate: Candidate, batch: int | None, remat: str, mesh: Mesh | None, differ: Sequence[bool]
) -> Candidate:
    texts = (
        candidate.name,
        f"batch={batch}",
        f"remat={remat}",
        "" if mesh is None else axes_text(mesh).replace(", ", " "),
    )
    name = ", ".join(text for text, differs in zip(texts, differ, strict=True) if differs)
    given: dict[str, Any] = {} if batch is None else {"batch": batch}
    if remat:
        given["remat"] = remat_policy(remat)
    options = {**candidate.options, **given}
    return Candidate(name or candidate.name, candidate.policy, options, remat, mesh)

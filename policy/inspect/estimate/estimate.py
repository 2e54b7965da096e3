"""The memory, traffic and time of a step under policies, on devices that need not be there."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import use_abstract_mesh

from policy.autocasting.parameters import ParamsArgument
from policy.core.messages import DtypePolicyWarning
from policy.core.rules import RulesLike, as_rules
from policy.core.scope import traced_for
from policy.inspect.estimate.costing import CompiledRow, compiled_row, compiler_of
from policy.inspect.estimate.placement import Placement, mesh_of, on_targets_mesh, placement_of
from policy.inspect.estimate.report import Estimate
from policy.inspect.estimate.search import (
    MOST_COMPILES,
    require_names,
    require_parameters,
    rows_of_search,
    search_of,
)
from policy.inspect.estimate.steps import (
    Candidate,
    MadeCall,
    RowLike,
    made_call,
    rows_of,
    traced_step,
)
from policy.inspect.estimate.targets import Target
from policy.programs.tracing.trace import function_name

DEFAULT = ("float32", "mixed_bfloat16", "bfloat16")
Progress = Callable[[str, int, int], None]
_SAME = (
    "The arguments are the same under every policy, whatever its param_dtype. To have params in "
    "param_dtype, give functions that build the arguments, or an example."
)


def estimate(
    fn: Any,
    *args: Any,
    policies: Sequence[RowLike] | Mapping[str, RowLike] | str = DEFAULT,
    on: str | Target = "here",
    batch: int | Sequence[int] | None = None,
    remat: str | Sequence[str] | None = None,
    mesh: Mapping[str, int] | Sequence[Mapping[str, int]] | None = None,
    shardings: Any = None,
    rules: RulesLike | None = None,
    donate: int | Sequence[int] | None = None,
    backward: bool = False,
    params: ParamsArgument = None,
    max_compiles: int = MOST_COMPILES,
    progress: Progress | None = None,
    **kwargs: Any,
) -> Estimate:
    """Estimates what a step costs under policies, on devices that need not be there.

    The step is traced and compiled by the target's own compiler for each policy, from shapes alone:
    nothing runs, and no array is allocated. Where a device's memory does not suffice, that is a
    result.

    >>> import jax, jax.numpy as jnp, policy
    >>> def step(w, x):
    ...     return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    >>> w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8)))
    >>> found = policy.estimate(step, w, x, policies=["float32"], on="cpu", donate=0)
    >>> found["float32"].arguments
    384

    The step is given in one of two ways.

    - A function and its arguments, for which shapes will do. An argument that depends on the policy
      is given as a function without arguments that builds it: an nnx model, which captures the
      policy where it is built, or params in param_dtype:
      ``estimate(train_step, lambda: Net(rngs=nnx.Rngs(0)), images, labels)``. Nothing of it is
      allocated either.
    - An example: a function without required arguments that returns ``(function, args)`` or
      ``(function, args, kwargs)``. It is called under each policy, with the row's options as
      keyword arguments, and with the mesh where it has a parameter ``mesh``. So may an optimizer's
      storage be a row: ``policies=["bfloat16", ("bfloat16", {"master_weights": "remainder"})]``.

    Args:
      fn: any function of arrays, an nnx module or a method of one, a function of nnx modules, or an
        example; jitted or not.
      *args, **kwargs: the arguments of the call; `jax.ShapeDtypeStruct`s in place of arrays.
      policies: the rows: policies, or pairs of a policy and a dict of the example's options, in a
        sequence or in a mapping from names. Each policy is applied as in `policy.audit`, by
        `use_policy`, or by `autocast` where no layer obeys it. None estimates the code as it is
        written. In texts, ``half`` and ``m=8bit`` are those of the target.
      on: the target: a TPU topology such as "v5e:4x4", one or several GPUs of one machine, "h100"
        and "h100:8", a JSON file of a GPU's figures, "cpu", or "here" for JAX's default devices.
        See `policy.inspect.estimate.targets.Target`.
      batch: the number of examples of a step, or several to search over; it goes to the example's
        parameter `batch`. Times then compare by example.
      remat: the name of a checkpoint policy, or several to search over; the policy goes to the
        example's parameter `remat`, as `jax.checkpoint(policy=...)` takes it. "full" saves nothing
        and "none" repeats nothing; see `policy.inspect.estimate.search.remat_policy`.
      mesh: the axes of the mesh and their sizes, as in ``{"data": 4, "fsdp": 4}``, or several to
        search over. None: those of the arguments' own shardings, or one axis "data" of all devices.
      shardings: an entry for each positional argument, or a dict of entries by position: a
        PartitionSpec for all of its arrays, a tree of them, a function of an array's path and
        shape that returns one, or None. None: the arrays' own shardings, whatever devices they are
        of; arrays without are on each device. A step without any shardings runs on one device.
      rules: policies by module path or layer class, beside each policy.
      donate: positions of the arguments that may be overwritten; None for those that a jitted `fn`
        donates.
      backward: whether to estimate the gradients of the floating outputs as well, as
        `policy.audit` does.
      params: the arguments to differentiate by; see `policy.audit`.
      max_compiles: the largest number of programs that a search compiles: the product of policies,
        batches, remats and meshes.
      progress: is called before each row is compiled, with its name, the number of rows that are
        done, and that of all.

    Returns:
      An `Estimate`: prints as a table, ``to_json()``.

    Raises:
      TypeError: `fn` can't be called, or an argument is of another kind; any exception of `fn`
        while it is traced.
      ValueError: there is no such target or topology; a policy is malformed; the mesh has another
        number of devices than the target; an array doesn't divide by its sharding; the step can't
        be lowered or compiled for the target (a kernel of another platform, a callback). In a
        search, and before anything is compiled: the example lacks a parameter, there is no such
        checkpoint policy, or there are more than `max_compiles` programs.
      RuntimeError: the target's compiler is not installed; the message has the command.
    """
    target = on if isinstance(on, Target) else Target(on)
    found: list[tuple[MadeCall, Placement, CompiledRow]] = []
    search = search_of(batch, remat, mesh, target)
    options = [name for name in ("batch", "remat") if search[name]]
    require_parameters(fn, not args and not kwargs, options)
    with traced_for(target.devices[0]):
        candidates, ruled = rows_of_search(rows_of(policies), search, max_compiles), as_rules(rules)

        def estimated(row: Candidate) -> tuple[MadeCall, Placement, CompiledRow]:
            devices = mesh_of(target, row.mesh, (args, kwargs))
            # An abstract mesh: arrays that an example makes, such as keys, are of this machine.
            abstract = use_abstract_mesh(devices.abstract_mesh)
            with contextlib.nullcontext() if row.mesh is None else abstract:
                call = made_call(fn, args, kwargs, row, ruled, devices)
            placement = placement_of(target, row.mesh, shardings, (call.args, call.kwargs))
            own = on_targets_mesh(placement, args=call.args, kwargs=call.kwargs)
            call = dataclasses.replace(call, **own)
            with placement.scope():
                step = traced_step(call, row, ruled, donate, backward, params)
                require_names(row, step.traced.jaxpr)
            return call, placement, compiled_row(row, call, step, placement, shardings)

        for row in candidates:
            if progress is not None:
                progress(row.name, len(found), len(candidates))
            try:
                with warnings.catch_warnings():
                    # a row says in its route whether anything obeyed its policy
                    warnings.filterwarnings("ignore", "Nothing obeyed", DtypePolicyWarning)
                    found.append(estimated(row))
            except Exception as error:
                error.add_note(f"This is the row {row.name!r} of an estimate on {target.name}.")
                raise
    placement, costs = found[0][1], tuple(one.cost for _, _, one in found)
    return Estimate(
        name=function_name(fn),
        target=target.name,
        devices=placement.devices,
        mesh=costs[0].mesh if all(cost.mesh == costs[0].mesh for cost in costs) else {},
        capacity=placement.capacity,
        clock=target.chip.clock,
        timing=target.timing,
        source=target.chip.source,
        compiler=compiler_of(target),
        rows=costs,
        notes=tuple(dict.fromkeys(_notes(candidates, found))),
    )


def _notes(
    candidates: Sequence[Candidate], found: Sequence[tuple[MadeCall, Placement, CompiledRow]]
) -> list[str]:
    notes = [note for _, place, row in found for note in (*place.notes, *row.notes)]
    # The policies of arguments that do not depend on them.
    pairs = zip(candidates, found, strict=True)
    unheeded = [row.policy for row, (call, *_) in pairs if row.policy and not call.is_made]
    return [*notes, _SAME] if len({given.param_dtype for given in unheeded}) > 1 else notes

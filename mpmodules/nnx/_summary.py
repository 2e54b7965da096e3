"""`tabulate` of nnx objects, with the policy of each module and where it comes from."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
from flax import nnx as flax_nnx
from flax.nnx import summary as flax_summary

from mpmodules.calls import summary
from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.classes import InstanceMethod, is_ours
from mpmodules.calls.under_way import nnx_calls as calls
from mpmodules.layers.matmul_calls import may_multiply_in_8_bits
from mpmodules.tracing.nnx_rebuilding import Rebuilding, stand_in

_OPTIONS = inspect.signature(flax_nnx.tabulate).parameters


@summary.with_signature_of(flax_nnx.tabulate)
def tabulate(obj: Any, *input_args: Any, policy_columns: bool | None = None, **kwargs: Any) -> str:
    """`flax.nnx.tabulate`, with two columns more: the policy that each module obeys, and where it
    comes from.

    The policy is the one that the module captured, in its short text form, empty where there is
    none; ``m=`` is left out of layers whose matmuls stay in compute_dtype, as of those with a
    `dot_general` of the user's. The source is one of

    - ``argument: dtype_policy`` or ``argument: apply_policy``;
    - ``argument: dtype=float32; else ...``, a dtype argument that holds against the policy;
    - ``rule: 'encoder/.*'`` or ``rule: Linear``, of the module itself or of one above;
    - ``enclosing module: encoder``, the nearest that carries a policy by an argument: its path
      where `apply_policy` put it there, its class where it was built with it;
    - ``scope``, the `use_policy` block that it was built in, or ``global``, `set_policy`;
    - ``none``, and ``none: Flax's own`` of one that obeys no policy, even where one is in force.

    Layers are shown with the inputs and outputs that they compute with, modules with code of their
    own with those that the code sees.

    Args:
      obj: an nnx module, or another graph object.
      *input_args: the method's arguments.
      policy_columns: whether our columns are there. By default they are where any module obeys a
        policy: without one the table is Flax's.

    Other arguments as in `flax.nnx.tabulate`.

    Returns:
      The table, as text.

    Example:
      >>> model = nnx.Linear(4, 3, rngs=nnx.Rngs(0), dtype_policy="mixed_bfloat16")
      >>> table = nnx.tabulate(model, jnp.ones((2, 4)), console_kwargs={"width": 200})
      >>> "argument: dtype_policy" in table
      True
    """
    class_of = functools.cache(_recorded_class)  # Flax's `tabulate` leaves methods on the classes
    obj = Rebuilding(lambda node: class_of(type(node)))(obj)
    if policy_columns is False:
        return flax_nnx.tabulate(obj, *input_args, **kwargs)
    return _with_columns(obj, input_args, kwargs, policy_columns)


def _with_columns(
    obj: Any, input_args: tuple[Any, ...], kwargs: dict[str, Any], policy_columns: bool | None
) -> str:
    is_shown = kwargs.pop("row_filter", _OPTIONS["row_filter"].default)
    cells: list[summary.Cells] = []

    def row_filter(row: Any) -> bool:  # asked once of each row, in the order of the table
        shown = is_shown(row)
        if shown:
            cells.append(_cells(obj, row.path))
        return shown

    def draw(table: Any, console_kwargs: Any) -> str:
        wider = summary.with_columns(table, cells, kwargs.get("column_kwargs", {}), policy_columns)
        return flax_summary._get_rich_repr(wider, console_kwargs)

    # What the layers computed with in their last calls, by the numbers that Flax gives them.
    runs: dict[int, tuple[str, Any]] = {}

    def note(call: MethodCall, outputs: Any) -> None:
        inputs = flax_summary._get_inputs_repr(call.args, call.kwargs)
        outputs = jax.tree.map(flax_summary._to_dummy_array, outputs)
        runs[call.module._nnx_tabulate_id] = inputs, outputs

    def row(order: int, object_id: int, kind: type, path: Any, *rest: Any) -> Any:
        inputs, outputs = runs.pop(object_id, rest[:2])
        return flax_summary.CallInfo(order, object_id, kind, path, inputs, outputs, *rest[2:])

    noting = summary.hooked(flax_summary, "_save_call_info", CallInfo=row)
    tabulate_ = summary.hooked(
        flax_summary, "tabulate", _get_rich_repr=draw, _save_call_info=noting
    )
    with calls.noting(recorded=note):
        return tabulate_(obj, *input_args, row_filter=row_filter, **kwargs)


def _recorded_class(cls: Any) -> Any:
    """Makes the subclass whose methods Flax's `tabulate` is to replace: functions all of them."""
    attributes = {name: inspect.getattr_static(cls, name, None) for name in dir(cls)}
    methods = {
        name: method.run
        for name, method in attributes.items()
        if isinstance(method, InstanceMethod)
    }
    return stand_in(cls, methods)


def _cells(obj: Any, path: tuple[Any, ...]) -> summary.Cells:
    """Returns our columns for a path of the table, which ends in the method's name where that is
    not __call__.
    """
    for key in path:
        child = getattr(obj, key, None) if isinstance(key, str) else None
        if inspect.ismethod(child):
            break
        obj = obj[key] if child is None else child
    if not is_ours(type(obj)):
        return summary.NOT_OURS
    may_scale = may_multiply_in_8_bits(obj)
    return summary.cells_of(obj.dtype_policy, obj._policy_source, may_scale=may_scale)

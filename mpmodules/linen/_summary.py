"""`tabulate` of linen modules, with the policy of each and where it comes from."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
from flax.core import meta
from flax.linen import summary as flax_summary

from mpmodules.calls import summary
from mpmodules.calls.boundary import MethodCall
from mpmodules.calls.under_way import linen_calls as calls
from mpmodules.layers.matmul_calls import may_multiply_in_8_bits
from policy.core.arrays import path_name
from policy.core.messages import DtypePolicyWarning
from policy.core.policy import Policy
from policy.core.precedence import Effective
from policy.core.scope import Scope, current_scope, enter
from policy.quantized.array import QuantizedArray
from policy.quantized.params import stored_by_policy

_SIGNATURE = inspect.signature(flax_summary.tabulate)


@summary.with_signature_of(flax_summary.tabulate)
def tabulate(
    module: flax_nn.Module,
    rngs: Any,
    *options: Any,
    policy_columns: bool | None = None,
    **named_options: Any,
) -> Callable[..., str]:
    """`flax.linen.tabulate`, with two columns more: the policy that each module obeys, and where it
    comes from.

    The policy is in its short text form, empty where none holds; ``m=`` is left out of layers whose
    matmuls stay in compute_dtype, as of those with a `dot_general` of the user's. The
    source is one of

    - ``argument: dtype_policy`` or ``argument: apply_policy``;
    - ``argument: dtype=float32; else ...``, a dtype argument that holds against the policy;
    - ``rule: 'encoder/.*'`` or ``rule: Dense``, of the module itself or of one above;
    - ``enclosing module: encoder``, the nearest that carries a policy by an argument;
    - ``scope``, a `use_policy` block, or ``global``, `set_policy`;
    - ``none``, and ``none: Flax's own`` of one that obeys no policy, even where one is in force.

    Layers are shown with the inputs and outputs that they compute with, modules with code of their
    own with those that the code sees.

    Args:
      module: the module to tabulate.
      rngs: as `Module.init` takes them.
      policy_columns: whether our columns are there. By default they are where any module obeys a
        policy: without one the table is Flax's.

    Other arguments as in `flax.linen.tabulate`.

    Returns:
      A function of the method's arguments that returns the table as text.

    Example:
      >>> model = linen.Dense(3, dtype_policy="mixed_bfloat16")
      >>> table = linen.tabulate(model, key, console_kwargs={"width": 200})(jnp.ones((2, 4)))
      >>> "argument: dtype_policy" in table
      True
    """
    if policy_columns is False:
        return flax_summary.tabulate(module, rngs, *options, **named_options)
    given = _SIGNATURE.bind(module, rngs, *options, **named_options).arguments

    def tabulated(*args: Any, **kwargs: Any) -> str:
        recorded = _Recorded()
        with calls.noting(recorded=recorded):
            shown: list[_RecordedCall] = []  # the calls of the rows

            def flops(call: Any, *which: bool) -> tuple[int, int]:  # asked of each row, before it
                shown.append(recorded.calls.get(call.index, _RecordedCall()))
                return _flops(shown[-1], call, *which)

            def row(path: Any, copy: Any, method: str, *rest: Any) -> Any:
                inputs_and_outputs = shown[-1].run or rest[:2]
                variables = (recorded.as_stored(path, each) for each in rest[2:4])
                return flax_summary.Row(
                    path, copy, method, *inputs_and_outputs, *variables, *rest[4:]
                )

            def draw(table: Any, console_kwargs: Any) -> str:
                cells = [call.cells for call in shown]
                wider = summary.with_columns(
                    table, cells, given.get("column_kwargs", {}), policy_columns
                )
                return flax_summary._get_rich_repr(wider, console_kwargs)

            render = summary.hooked(flax_summary, "_render_table", _get_rich_repr=draw)
            rows = summary.hooked(flax_summary, "_get_module_table", _get_call_flops=flops, Row=row)
            tabulate_ = summary.hooked(
                flax_summary, "tabulate", _render_table=render, _get_module_table=rows
            )
            return tabulate_(module, rngs, *options, **named_options)(*args, **kwargs)

    return tabulated


@summary.with_signature_of(flax_nn.Module.tabulate)
def tabulate_method(
    module: flax_nn.Module, rngs: Any, *args: Any, policy_columns: bool | None = None, **kwargs: Any
) -> str:
    """Runs `tabulate` as `Module.tabulate` does: its options by name, and the arguments of the
    tabulated method.
    """
    _, _, *names, _ = _SIGNATURE.parameters  # without module, rngs and **kwargs
    options = {name: kwargs.pop(name) for name in names if name in kwargs}
    return tabulate(module, rngs, policy_columns=policy_columns, **options)(*args, **kwargs)


def _flops(call: _RecordedCall, info: Any, *which: bool) -> tuple[int, int]:
    """Counts FLOPs as Flax does, under the inherited policy: Flax calls each module as a root,
    without path rules.
    """
    policy = current_scope().policy if call.effective is None else call.effective.base
    with enter(Scope(policy)), warnings.catch_warnings():
        # Told of already, under the module's own path.
        warnings.simplefilter("ignore", DtypePolicyWarning)
        return flax_summary._get_call_flops(info, *which)


# --------------------------------------------------------------------------------------------------
# Calls
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _RecordedCall:
    """A call of a module.

    Attributes:
      effective: the policy that the module obeys in it; None of one that is not ours.
      cells: the texts of our columns.
      run: the inputs and outputs of a layer in a trace of own code, in the dtypes that the layer
        computes in, as Flax's summaries represent them; None of other modules.
    """

    effective: Effective | None = None
    cells: summary.Cells = summary.NOT_OURS
    run: tuple[Any, Any] | None = None


class _Recorded:
    """The calls of our modules, by the numbers that Flax's summaries give them, and the last one of
    each path.
    """

    def __init__(self) -> None:
        self.calls: dict[int, _RecordedCall] = {}
        self.last: dict[tuple[str, ...], _RecordedCall] = {}
        self.policies: dict[tuple[str, ...], Policy | None] = {}  # by the paths of modules

    def note(self, module: flax_nn.Module, effective: Effective) -> None:
        """Notes the policy of a call that has begun, the last one that Flax has numbered."""
        summaries = flax_nn.module._context.call_info_stack
        if not summaries or summaries[-1].index - 1 in self.calls:
            return
        may_scale = may_multiply_in_8_bits(module)
        cells = summary.cells_of(effective.policy, effective.source, may_scale=may_scale)
        call = self.calls[summaries[-1].index - 1] = _RecordedCall(effective, cells)
        self.last[module.path] = call
        self.policies.setdefault(module.path, effective.policy)

    def __call__(self, call: MethodCall, outputs: Any) -> None:
        """Notes the inputs and outputs with which a layer has run."""
        if not call.is_lifted and call.module.path in self.last:
            trees = flax_summary._represent_tree((call.args, call.kwargs, outputs))
            inputs = flax_summary._process_inputs(*trees[:2])
            self.last[call.module.path].run = inputs, trees[2]

    def as_stored(self, path: tuple[str, ...], variables: dict[str, Any]) -> dict[str, Any]:
        """Returns variables below a path, with codes and scales for parameters in 8 and 4 bits."""

        def stored(place: Any, leaf: Any) -> Any:
            names = *path, *path_name(place).split("/")
            above = (names[:n] for n in range(len(names) - 1, -1, -1))
            policy = next((p for p in map(self.policies.get, above) if p is not None), None)
            made = leaf if policy is None else stored_by_policy(leaf, names, policy)
            is_codes = isinstance(made, QuantizedArray)
            return {"codes": made.codes, "scales": made.scales} if is_codes else made

        params = variables.get("params")
        if params is None:
            return variables
        is_box = lambda x: isinstance(x, meta.AxisMetadata)  # noqa: E731
        return {
            **variables,
            "params": jax.tree_util.tree_map_with_path(stored, params, is_leaf=is_box),
        }

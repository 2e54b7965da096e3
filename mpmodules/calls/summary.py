"""Summary tables with two columns more: the policy that a module obeys, and where it comes from."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rich.text import Text  # Flax draws its tables with it

from policy.core.policy import Policy
from policy.core.scope import Source

F = TypeVar("F", bound=Callable[..., Any])

HEADERS = ("policy", "policy source")
Cells = tuple[str, str]

NOT_OURS: Cells = ("", "none: Flax's own")


def cells_of(policy: Policy | None, source: Source, *, may_scale: bool) -> Cells:
    """Returns the texts of the two columns for one module, without ``m=`` if it is a layer that has
    no matmul in 8 bits.
    """
    if policy is None:
        return "", "none"
    return (policy if may_scale else policy.replace(matmul=None)).short, str(source)


def hooked(module: types.ModuleType, name: str, **names: Any) -> Callable[..., Any]:
    """Copies a function of a module of Flax's with other values for some of the module's names.

    Flax itself is not changed.

    Raises:
      RuntimeError: the module has no such names.
    """
    missing = [each for each in (name, *names) if not hasattr(module, each)]
    if missing:
        raise RuntimeError(
            "The policy columns can't be added: this version of Flax draws its tables differently "
            f"({', '.join(missing)} is missing). Pass policy_columns=False for Flax's own table."
        )
    function = getattr(module, name)
    twin = types.FunctionType(
        function.__code__, vars(module) | names, name, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def with_signature_of(upstream: Callable[..., Any]) -> Callable[[F], F]:
    """Shows the signature of Flax's function, and `policy_columns` after it."""
    *parameters, keywords = inspect.signature(upstream).parameters.values()
    added = inspect.Parameter(
        "policy_columns", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="bool | None"
    )

    def mark(function: F) -> F:
        function.__signature__ = inspect.Signature([*parameters, added, keywords])  # type: ignore[attr-defined]
        return function

    return mark


def with_columns(
    table: Any,
    cells: Sequence[Cells],
    column_kwargs: Mapping[str, Any],
    policy_columns: bool | None,
) -> Any:
    """Inserts our columns in a `rich` table of Flax's, after a module's path and class.

    Args:
      table: the table, its rows those of `cells`.
      cells: the texts of our columns, by row.
      column_kwargs: those that the caller of `tabulate` gives for `add_column`.
      policy_columns: whether to insert them; None does where any row has a policy.
    """
    if policy_columns is None and not any(policy for policy, _ in cells):
        return table
    wider = copy.copy(table)
    wider.columns, wider.rows = [], []
    for i, column in enumerate(table.columns):
        if i == 2:
            for header in HEADERS:
                wider.add_column(header, **column_kwargs)
        wider.add_column(column.header, column.footer, **column_kwargs)
    for row, ours in zip(
        zip(*(column.cells for column in table.columns), strict=True), cells, strict=True
    ):
        path, kind, *rest = row
        # As texts: brackets in names are no markup.
        wider.add_row(Text(path), kind, *map(Text, ours), *rest)
    return wider

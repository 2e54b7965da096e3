"""The operations that assertions are about, the dtypes that they accept, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy.core.dtypes import dtype_names, parse_dtype
from policy.core.rules import PolicyRules, matches
from policy.inspect.audit.checks.sums import terms_of
from policy.inspect.audit.values import is_matmul
from policy.inspect.audit.weights import names_of
from policy.programs.dtypes import is_inexact_name
from policy.programs.operations import operands_of, sums
from policy.programs.paths import spelled
from policy.programs.reading.graph import Graph, Node, is_joint
from policy.programs.reading.matmul_operands import are_codes
from policy.programs.reading.walk import Site

DTypes = DTypeLike | Collection[DTypeLike]
# As in a policy's text: NumPy's f8 and i8 are float64 and int64.
_EIGHT_BITS = {"f8": ("float8_e4m3fn", "float8_e5m2"), "i8": ("int8",)}


def accepted_dtypes(dtype: DTypes) -> frozenset[str]:
    """Returns the names of one accepted dtype, or of several."""
    given: Any = dtype
    if isinstance(dtype, (str, type, np.dtype)) or not isinstance(dtype, Collection):
        given = [dtype]
    names = [name for one in given for name in _names(one)]
    if not names:
        raise ValueError("No accepted dtype was given: pass one or several, such as 'bf16'.")
    return frozenset(names)


def _names(dtype: Any) -> tuple[str, ...]:
    if isinstance(dtype, str) and (dtype in _EIGHT_BITS or dtype == "backend"):
        return _EIGHT_BITS.get(dtype, (dtype,))
    is_known = isinstance(dtype, str) and dtype in dtype_names()
    try:
        return ((parse_dtype(dtype) if is_known else jnp.dtype(dtype)).name,)
    except TypeError:
        raise TypeError(
            "dtype should be one dtype or several, such as 'bf16' or jnp.bfloat16, but got "
            f"{dtype!r}."
        ) from None


def listed(dtypes: frozenset[str]) -> str:
    """Returns the names of dtypes in a sentence."""
    return " or ".join(sorted(dtypes))


def allowed(graph: Graph, allow: Collection[str]) -> list[Node]:
    """Returns the nodes of a program that no path pattern leaves out.

    Raises:
      ValueError: a pattern matches no path.
    """
    if isinstance(allow, str):
        raise TypeError(
            f"allow should be a collection of path patterns, such as ({allow!r},), but got the "
            "string itself."
        )
    nodes = [node for node in graph.nodes if not is_joint(node)]
    patterns = PolicyRules(dict.fromkeys(allow, "float32")).rules  # refuses malformed patterns
    paths = dict.fromkeys(node.site.path for node in nodes)
    left_out = set[tuple[str, ...]]()
    for pattern, _ in patterns:
        found = [
            path
            for path in paths
            if any(matches(pattern, name, model=model) for name, model in names_of(path))
        ]
        if not found:
            known = ", ".join(sorted(spelled(path) for path in paths if path)) or "none"
            raise ValueError(f"allow: '{pattern}' matches no path. Paths: {known}.")
        left_out.update(found)
    return [node for node in nodes if node.site.path not in left_out]


def rounds_a_result(node: Node) -> bool:
    """Returns whether a node sums more than one floating number, as an audit checks."""
    equation = node.site.equation
    return (
        sums(equation) and any(map(is_inexact_name, operands_of(equation))) and bool(terms_of(node))
    )


def multiplies(node: Node) -> bool:
    """Returns whether a node multiplies matrices of floating numbers, or int8 codes of them."""
    is_floating = any(map(is_inexact_name, operands_of(node.site.equation)))
    return is_matmul(node) and (is_floating or are_codes(node))


def require_any(found: Sequence[Any], what: str, allow: Collection[str]) -> None:
    """Raises an `AssertionError` if nothing would be asserted."""
    if not found:
        but = f" apart from those that allow={tuple(allow)!r} excludes" if allow else ""
        raise AssertionError(f"The program has no {what}{but}: nothing would be asserted.")


def require_dtypes(
    nodes: Sequence[Node],
    accepted: frozenset[str],
    should: str,
    of: Callable[[Any], tuple[str, ...]] = operands_of,
) -> None:
    """Raises an `AssertionError` that lists the nodes with other dtypes than the accepted ones.

    Args:
      of: gives the dtypes of an equation.
    """
    found = [(node.site, of(node.site.equation)) for node in nodes]
    wrong = [line_of(site, dtypes) for site, dtypes in found if not accepted.issuperset(dtypes)]
    if wrong:
        operations = f"{len(wrong)} operation{'s' if len(wrong) > 1 else ''}"
        lines = "\n".join(dict.fromkeys(wrong))
        raise AssertionError(f"{operations} should {should} {listed(accepted)}:\n{lines}")


def line_of(site: Site, dtypes: Iterable[str]) -> str:
    """Returns the line of a message about one operation."""
    return line(site.name, spelled(site.path), dtypes, site.is_backward, site.source)


def line(primitive: str, path: str, dtypes: Iterable[str], is_backward: bool, source: str) -> str:
    """Returns the line of a message: operation, path, dtypes, pass and source line."""
    where = f"at '{path}'" if path else "outside of any module"
    backward = ", backward" if is_backward else ""
    return (
        f"  {primitive} {where} in {', '.join(dtypes)}{backward}: {source or 'source line unknown'}"
    )

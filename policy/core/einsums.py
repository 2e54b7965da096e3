"""Einsums of two operands as matmuls."""

from __future__ import annotations

from collections.abc import Sequence

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""As of `jax.lax.dot_general`: contracted axes of both operands, and batch axes of both."""


def dot_of_einsum(
    subscripts: str, lhs_ndim: int, rhs_ndim: int
) -> tuple[DimensionNumbers, list[int]] | None:
    """Returns the dot of an einsum, and the permutation of its result's axes that follows.

    Returns None where it is no matmul: where a name stands twice in an operand, or in one operand
    and not in the result.

    >>> from policy.core.einsums import dot_of_einsum
    >>> dot_of_einsum("ij,jk->ki", 2, 2)
    ((([1], [0]), ([], [])), [1, 0])

    Args:
      subscripts: as in `jax.numpy.einsum`, for two operands, with "->".
      lhs_ndim, rhs_ndim: of the operands.
    """
    names = _names(subscripts, lhs_ndim, rhs_ndim)
    if names is None:
        return None
    left, right, out = names
    shared = [name for name in left if name in right]
    is_matmul = all(len(set(part)) == len(part) for part in names) and all(
        name in out for name in (*left, *right) if name not in shared
    )
    if not is_matmul or not set(out) <= {*left, *right}:
        return None
    summed, kept = ([n for n in shared if (n in out) == is_kept] for is_kept in (False, True))
    numbers = (
        ([*map(left.index, summed)], [*map(right.index, summed)]),
        ([*map(left.index, kept)], [*map(right.index, kept)]),
    )
    found = [*kept, *(name for name in (*left, *right) if name not in shared)]
    return numbers, [found.index(name) for name in out]


def _names(subscripts: str, *ndims: int) -> tuple[list[str], list[str], list[str]] | None:
    """Returns the names of the axes of both operands and of the result.

    The axes of an ellipsis are named by their numbers from the end.
    """
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != 2:
        return None

    def named(part: str, count: int) -> list[str]:
        before, ellipsis, after = part.partition("...")
        inside = [str(i) for i in range(count, 0, -1)] if ellipsis else []
        return [*before, *inside, *after]

    counts = [
        ndim - len(part.replace("...", "")) if "..." in part else 0
        for part, ndim in zip(operands, ndims, strict=True)
    ]
    left, right = map(named, operands, counts)
    return left, right, named(output, max(counts))

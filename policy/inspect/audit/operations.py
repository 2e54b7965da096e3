"""The operations and findings of an audit, and totals of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable

from policy.inspect.audit.values import bits, is_eight_bits, is_sixteen_bits, is_wide

_WIDTHS = {"8 bits": is_eight_bits, "half": is_sixteen_bits, "float32": is_wide}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One primitive at one place, in one set of dtypes; equal ones are one row.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> x = jnp.ones((2, 2), jnp.bfloat16)
    >>> [operation] = policy.audit(jnp.matmul, x, x).operations
    >>> operation.primitive, operation.operands, operation.flops
    ('dot_general', ('bfloat16', 'bfloat16'), 16)

    Attributes:
      path: the module path, its names joined by "/", as in rules; the model itself is ``Net:``, ""
        is outside of any module.
      kind: "dot", "convolution", "reduction", "scatter-add", "transcendental", "collective",
        "cast", "opaque", or "other".
      primitive: its name in JAX.
      operands: dtypes of the array operands.
      accumulation: the declared dtype of sums: `preferred_element_type` or the dot algorithm, and
        the operand dtype of a reduction; "backend" if a half-precision matmul declares none; "" if
        nothing is summed.
      result: the dtype of the first result; "" if there is none.
      source: the line of the user's code, as "model.py:12 (Net.__call__)"; the module's path and
        class, as "encoder/out (Dense)", if no user code called it; "" if JAX knows neither.
      is_backward: whether it belongs to a backward pass.
      count: the number of runs, with scan lengths multiplied.
      flops: floating-point operations of all these runs.
      bytes: of the operands and results of all these runs.
      precision: of a matmul of float32 operands: "default", "high", "highest" or the name of an
        algorithm; "highest, default" where its operands differ; "" of any other operation.
    """

    path: str
    kind: str
    primitive: str
    operands: tuple[str, ...]
    accumulation: str
    result: str
    source: str
    is_backward: bool
    count: int
    flops: int
    bytes: int
    precision: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A likely unintended loss of accuracy or speed.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> fn = lambda x: jnp.exp(x.astype(jnp.float16))
    >>> [finding.kind for finding in policy.audit(fn, jnp.ones(2)).findings]
    ['low-precision-function']

    Attributes:
      kind: one of `policy.inspect.audit.findings.FINDING_KINDS`.
      path: the module path, as in rules; "" outside of any module.
      primitive: the name of the operation concerned.
      dtypes: the dtypes involved, in the order of the message.
      message: the problem and its remedy, in a sentence or two.
      source: the line of the user's code, or the module, as `Operation.source`.
      is_backward: whether it belongs to a backward pass.
      count: the number of occurrences, with scan lengths multiplied.
    """

    kind: str
    path: str
    primitive: str
    dtypes: tuple[str, ...]
    message: str
    source: str
    is_backward: bool
    count: int


@dataclasses.dataclass(frozen=True)
class AuditFigures:
    """Operations and findings, and their totals: an audit, or a part of one.

    Attributes:
      operations, findings, name, policy: those of `policy.Audit`.
    """

    operations: tuple[Operation, ...]
    findings: tuple[Finding, ...] = ()
    name: str = ""
    policy: str = ""

    @functools.cached_property
    def flops_by_dtype(self) -> dict[str, int]:
        """FLOPs by the widest dtype of each operation's operands, the largest first."""
        return _totals((widest_dtype(op.operands), op.flops) for op in self.operations)

    @functools.cached_property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes read and written by the dtype of the operations' results; the largest first."""
        return _totals((op.result, op.bytes) for op in self.operations)

    @functools.cached_property
    def matmul_flops_by_dtype(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by the widest dtype of their operands."""
        matmuls = filter(is_matmul_operation, self.operations)
        return _totals((widest_dtype(op.operands), op.flops) for op in matmuls)

    @functools.cached_property
    def f32_matmul_share(self) -> float:
        """The share of matmul and convolution FLOPs in float32 or wider; 0.0 if there are none."""
        flops = self.matmul_flops_by_dtype
        wide = sum(amount for dtype, amount in flops.items() if is_wide(dtype))
        return wide / sum(flops.values()) if wide else 0.0

    @functools.cached_property
    def matmul_shares(self) -> dict[str, float]:
        """The shares of matmul and convolution FLOPs in "8 bits", "half" and "float32" or wider.

        Those that are zero are left out; so are matmuls of other integers.
        """
        flops = self.matmul_flops_by_dtype
        widths = {
            width: sum(amount for dtype, amount in flops.items() if holds(dtype))
            for width, holds in _WIDTHS.items()
        }
        total = sum(widths.values())
        return {width: amount / total for width, amount in widths.items() if amount}

    @functools.cached_property
    def eight_bit_matmul_share(self) -> float:
        """The share of matmul and convolution FLOPs in 8 bits; 0.0 if there are none."""
        return self.matmul_shares.get("8 bits", 0.0)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The module paths of all operations, in program order."""
        return tuple(dict.fromkeys(op.path for op in self.operations))


def operation_name(operation: Operation) -> str:
    """Returns the primitive of an operation, and the precision where it is not the default."""
    if operation.precision in ("", "default"):
        return operation.primitive
    return f"{operation.primitive}, {operation.precision}"


def is_matmul_operation(operation: Operation) -> bool:
    """Returns whether an operation is a matmul or a convolution."""
    return operation.kind in ("dot", "convolution")


def widest_dtype(dtypes: tuple[str, ...]) -> str:
    """Returns the widest of some dtypes; "" of none."""
    return max(dtypes, key=bits, default="")


def _totals(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Returns the sums of amounts by dtype, the largest first, without zeros."""
    totals: Counter[str] = Counter()
    for dtype, amount in amounts:
        totals[dtype or "none"] += amount
    return {dtype: amount for dtype, amount in totals.most_common() if amount}

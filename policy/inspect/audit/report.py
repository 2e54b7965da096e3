"""The result of an audit: operations and findings, with JSON, HTML, files and text."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TextIO


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
class Audit:
    """The dtypes that a program runs in, and the findings about them; returned by `policy.audit`.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> report = policy.audit(jnp.dot, jnp.ones((4, 8)), jnp.ones((8, 2), jnp.float32))
    >>> report.f32_matmul_share
    1.0
    >>> report.flops_by_dtype
    {'float32': 128}

    Attributes:
      operations: the operations, in program order.
      findings: the findings, the gravest first.
      name: of the function.
      policy: the policy in force around the call, in its short form; "of modules" if modules or
        parts of it obey their own policies; "" if none was in force.
    """

    operations: tuple[Operation, ...]
    findings: tuple[Finding, ...]
    name: str = ""
    policy: str = ""

    @functools.cached_property
    def flops_by_dtype(self) -> dict[str, int]:
        """FLOPs by the widest dtype of each operation's operands, the largest first."""
        return _by_dtype(self.operations, "flops")

    @functools.cached_property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes read and written by the dtype of the operations' results; the largest first."""
        return _by_dtype(self.operations, "bytes")

    @functools.cached_property
    def f32_matmul_share(self) -> float:
        """The share of matmul and convolution FLOPs in float32 or wider; 0.0 if there are none."""
        matmuls = [op for op in self.operations if is_matmul_operation(op)]
        flops = sum(op.flops for op in matmuls)
        wide = sum(
            op.flops for op in matmuls if widest_dtype(op.operands) in ("float32", "float64")
        )
        return wide / flops if flops else 0.0

    @functools.cached_property
    def matmul_flops_by_dtype(self) -> dict[str, int]:
        """FLOPs of matmuls and convolutions by the widest dtype of their operands."""
        return _by_dtype(tuple(op for op in self.operations if is_matmul_operation(op)), "flops")

    @functools.cached_property
    def matmul_shares(self) -> dict[str, float]:
        """The shares of matmul and convolution FLOPs in "8 bits", "half" and "float32" or wider.

        Those that are zero are left out; so are matmuls of other integers.
        """
        widths = by_width(self.matmul_flops_by_dtype)
        total = sum(widths.values())
        return {width: flops / total for width, flops in widths.items()}

    @functools.cached_property
    def eight_bit_matmul_share(self) -> float:
        """The share of matmul and convolution FLOPs in 8 bits; 0.0 if there are none."""
        return self.matmul_shares.get("8 bits", 0.0)

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The module paths of all operations, in program order."""
        return tuple(dict.fromkeys(op.path for op in self.operations))

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns the audit as JSON: one object.

        Its members are ``version`` (1: names and meanings stay within a version), ``name``,
        ``policy``, ``flops_by_dtype``, ``bytes_by_dtype`` and ``matmul_flops_by_dtype`` (objects,
        the largest first), ``f32_matmul_share`` and ``eight_bit_matmul_share`` (numbers from 0 to
        1), and ``findings`` and ``operations``: lists of
        objects with the attributes of `Finding` and `Operation`. Dtypes have their full names;
        FLOPs and bytes are whole numbers.
        """
        return json.dumps(
            {
                "version": 1,
                "name": self.name,
                "policy": self.policy,
                "flops_by_dtype": self.flops_by_dtype,
                "bytes_by_dtype": self.bytes_by_dtype,
                "matmul_flops_by_dtype": self.matmul_flops_by_dtype,
                "f32_matmul_share": self.f32_matmul_share,
                "eight_bit_matmul_share": self.eight_bit_matmul_share,
                "findings": [dataclasses.asdict(finding) for finding in self.findings],
                "operations": [dataclasses.asdict(operation) for operation in self.operations],
            },
            indent=indent,
        )

    def to_html(self) -> str:
        """Returns the audit as one self-contained HTML page."""
        from policy.inspect.audit.render.html import page

        return page(self)

    def save(self, path: str | Path) -> None:
        """Writes an HTML page to ``path.html``, or JSON to ``path.json``.

        Raises:
          ValueError: the file's name has another ending.
        """
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"An audit is saved as .html or .json, but got {str(path)!r}.")
        path.write_text(
            self.to_html() if path.suffix == ".html" else self.to_json(), encoding="utf-8"
        )

    def show(self, file: TextIO | None = None) -> None:
        """Prints the audit to `file` or the standard output.

        It is in colour on a terminal, unless NO_COLOR is set.
        """
        from policy.inspect.audit.render.text import show

        show(self, file)

    def __str__(self) -> str:
        from policy.inspect.audit.render.text import text

        return text(self)


def named(audit: Audit, name: str, *, without: Collection[str] = ()) -> Audit:
    """Returns an audit under another name, without findings of some kinds."""
    findings = tuple(finding for finding in audit.findings if finding.kind not in without)
    return dataclasses.replace(audit, name=name, findings=findings)


_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def widest_dtype(dtypes: tuple[str, ...]) -> str:
    """Returns the widest of some dtypes; "" of none."""
    return max(dtypes, key=lambda name: _BITS.get(name, 0), default="")


_WIDTHS = ("8 bits", "half", "float32")


def operation_name(operation: Operation) -> str:
    """Returns the primitive of an operation, and the precision where it is not the default."""
    if operation.precision in ("", "default"):
        return operation.primitive
    return f"{operation.primitive}, {operation.precision}"


def is_matmul_operation(operation: Operation) -> bool:
    """Returns whether an operation is a matmul or a convolution."""
    return operation.kind in ("dot", "convolution")


def by_width(flops: Mapping[str, int]) -> dict[str, int]:
    """Returns FLOPs by dtype as those in "8 bits", "half" and "float32" or wider."""
    found = dict.fromkeys(_WIDTHS, 0)
    for dtype, amount in flops.items():
        width = 8 if dtype == "int8" or dtype.startswith("float8") else _BITS.get(dtype, 0)
        if width:
            found[_WIDTHS[(width > 8) + (width > 16)]] += amount
    return {width: amount for width, amount in found.items() if amount}


def _by_dtype(operations: tuple[Operation, ...], what: str) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for op in operations:
        amount: Any = getattr(op, what)
        totals[(widest_dtype(op.operands) if what == "flops" else op.result) or "none"] += amount
    return {name: amount for name, amount in totals.most_common() if amount}

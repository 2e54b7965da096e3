"""The result of an audit: operations and findings, as figures, JSON, files and text."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, TextIO


@dataclasses.dataclass(frozen=True)
class Operation:
    """One primitive at one place, in one set of dtypes; equal ones are one row.

    Attributes:
      path: the module path, its names joined by "/", as rules take it; the model itself is ``Net:``, "" is outside of
        any module.
      kind: "dot", "convolution", "reduction", "scatter-add", "transcendental", "collective", "cast", "opaque", or
        "other".
      primitive: its name in JAX.
      operands: dtypes of the operands that are arrays.
      accumulation: the dtype that sums are declared to be made in: `preferred_element_type` or the dot algorithm, and
        the operand dtype of a reduction; "backend" where a half matmul leaves that open; "" where nothing is summed.
      result: the dtype of the first result; "" where there is none.
      source: the line of the user's code, as "model.py:12 (Net.__call__)"; the module's path and class, as
        "encoder/out (Dense)", where no code of a user's called it; "" where JAX knows neither.
      is_backward: whether it is of a backward pass.
      count: how often it runs, lengths of scans multiplied.
      flops: floating-point operations of all of these runs.
      bytes: of the operands and results of all of these runs.
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


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that costs accuracy, or speed, and was hardly meant.

    Attributes:
      kind: one of `policy.audit.findings.KINDS`.
      path: the module path, as rules take it; "" outside of any module.
      primitive: of the operation that it is about.
      dtypes: the dtypes involved, in the order that the message names them.
      message: what happens and what to do about it, in a sentence or two.
      source: the line of the user's code, or the module, as `Operation.source`.
      is_backward: whether it is of a backward pass.
      count: how often it happens, lengths of scans multiplied.
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
    """The dtypes that a program runs in, and what is wrong with them.

    Attributes:
      operations: what it runs, in the order of the program.
      findings: what should be looked at, the gravest first.
      name: of the function.
      policy: the policy that was in force around the call, in its short form; "of modules" where modules or parts of it
        obey policies of their own; "" where none was in force.
    """

    operations: tuple[Operation, ...]
    findings: tuple[Finding, ...]
    name: str = ""
    policy: str = ""

    @functools.cached_property
    def flops_by_dtype(self) -> dict[str, int]:
        """FLOPs by the dtype of what is multiplied or summed, the widest operand's; the most first."""
        return _by_dtype(self.operations, "flops")

    @functools.cached_property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes read and written by the dtype of the operations' results; the most first."""
        return _by_dtype(self.operations, "bytes")

    @functools.cached_property
    def f32_matmul_share(self) -> float:
        """The share of the FLOPs of dots and convolutions that multiply float32 or wider; 0.0 where there are none."""
        matmuls = [op for op in self.operations if op.kind in ("dot", "convolution")]
        flops = sum(op.flops for op in matmuls)
        wide = sum(op.flops for op in matmuls if _widest(op.operands) in ("float32", "float64"))
        return wide / flops if flops else 0.0

    @functools.cached_property
    def paths(self) -> tuple[str, ...]:
        """The module paths that anything runs at, in the order of the program."""
        return tuple(dict.fromkeys(op.path for op in self.operations))

    def to_json(self, *, indent: int | None = 1) -> str:
        """The audit as JSON: one object.

        Its members are ``version`` (1: names and meanings stay within a version), ``name``, ``policy``,
        ``flops_by_dtype`` and ``bytes_by_dtype`` (objects, the largest first), ``f32_matmul_share`` (a number from 0 to
        1), and ``findings`` and ``operations``: lists of objects with the attributes of `Finding` and `Operation`.
        Dtypes have their full names; FLOPs and bytes are whole numbers.
        """
        return json.dumps(
            {
                "version": 1,
                "name": self.name,
                "policy": self.policy,
                "flops_by_dtype": self.flops_by_dtype,
                "bytes_by_dtype": self.bytes_by_dtype,
                "f32_matmul_share": self.f32_matmul_share,
                "findings": [dataclasses.asdict(finding) for finding in self.findings],
                "operations": [dataclasses.asdict(operation) for operation in self.operations],
            },
            indent=indent,
        )

    def to_html(self) -> str:
        """The audit as one page that needs nothing beside itself."""
        from policy.audit.render.html import page

        return page(self)

    def save(self, path: str | Path) -> None:
        """Writes the page to a file that ends in ``.html``, or the JSON to one that ends in ``.json``.

        Raises:
          ValueError: the file's name ends otherwise.
        """
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise ValueError(f"An audit is saved as .html or .json, but got {str(path)!r}.")
        path.write_text(self.to_html() if path.suffix == ".html" else self.to_json(), encoding="utf-8")

    def show(self, file: TextIO | None = None) -> None:
        """Prints the audit to `file`, or to the standard output: in colour on a terminal, unless NO_COLOR is set."""
        from policy.audit.render.text import show

        show(self, file)

    def __str__(self) -> str:
        from policy.audit.render.text import text

        return text(self)


def named(audit: Audit, name: str, *, without: Collection[str] = ()) -> Audit:
    """An audit under another name, without findings of some kinds."""
    findings = tuple(finding for finding in audit.findings if finding.kind not in without)
    return dataclasses.replace(audit, name=name, findings=findings)


_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


def _widest(dtypes: tuple[str, ...]) -> str:
    return max(dtypes, key=lambda name: _BITS.get(name, 0), default="")


def _by_dtype(operations: tuple[Operation, ...], what: str) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for op in operations:
        amount: Any = getattr(op, what)
        totals[(_widest(op.operands) if what == "flops" else op.result) or "none"] += amount
    return {name: amount for name, amount in totals.most_common() if amount}

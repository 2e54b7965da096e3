"""The result of an audit: operations and findings, with JSON and text."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TextIO

from policy.inspect.audit.findings import Finding as Finding
from policy.inspect.audit.operations import AuditFigures
from policy.inspect.audit.operations import Operation as Operation
from policy.inspect.audit.render.text import text
from policy.inspect.render.text import shows_color

_TOTALS = "flops_by_dtype bytes_by_dtype matmul_flops_by_dtype f32_matmul_share"
_FIGURES = f"name policy attention {_TOTALS} eight_bit_matmul_share".split()


@dataclasses.dataclass(frozen=True)
class Audit(AuditFigures):
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
      attention: of each module that attends by this library's functions, the program that computes
        it: ``"splash"`` or ``"cudnn"``, else ``"XLA: "`` and what keeps a kernel from running.
    """

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns the audit as JSON: one object.

        Its members are ``version`` (1: names and meanings stay within a version), ``name``,
        ``policy``, ``attention`` (an object by path), ``flops_by_dtype``, ``bytes_by_dtype`` and
        ``matmul_flops_by_dtype`` (objects, the largest first), ``f32_matmul_share`` and
        ``eight_bit_matmul_share`` (numbers from 0 to 1), and ``findings`` and ``operations``: lists
        of objects with the attributes of `Finding` and `Operation`. Dtypes have their full names;
        FLOPs and bytes are whole numbers.
        """
        return json.dumps(
            {
                "version": 1,
                **{name: getattr(self, name) for name in _FIGURES},
                "findings": [dataclasses.asdict(finding) for finding in self.findings],
                "operations": [dataclasses.asdict(operation) for operation in self.operations],
            },
            indent=indent,
        )

    def show(self, file: TextIO | None = None) -> None:
        """Prints the audit to `file` or the standard output.

        It is in color on a terminal, unless NO_COLOR is set.
        """
        print(text(self, color=shows_color(file or sys.stdout)), file=file)

    def __str__(self) -> str:
        return text(self)

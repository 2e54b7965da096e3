"""The result of a comparison: one row for each module path."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from policy.inspect.compare.render.chart import plot, svg
from policy.inspect.compare.render.text import comparison_table
from policy.inspect.compare.report import OperandCodes as OperandCodes
from policy.inspect.compare.report import Row as Row
from policy.inspect.compare.report import Rows


@dataclasses.dataclass(frozen=True)
class Comparison(Rows):
    """A function under a policy compared with itself in float32; returned by `policy.compare`.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> fn = lambda x: jnp.square(x) / x
    >>> comparison = policy.compare(fn, jnp.array([300.0], jnp.float16))
    >>> comparison.outputs[0].overflow, comparison.first_jump
    (1.0, '')

    Attributes:
      rows: for the module paths, then the parameters' gradients, then the outputs, each in program
        order.
      first_jump: the path of the first module, in program order, that makes an error: the error of
        its outputs is over eight times that of its inputs and of one rounding to half precision; or
        it overflows. It is the innermost module, as in rules. "" is code outside of any module;
        None: the error jumps nowhere.
      jump_step: the step of a scan, counted from 0, if `first_jump` is in one.
      notes: further information, in sentences.
      name: of the function.
      policy: the policy's text form; "" if the function was compared as it is written.
      route: the way the policy was applied: "scope" by layers that obey it, "autocast", or "as
        written".
      unpaired: the paths with constants that have no counterpart in the function's float32 trace.
        They keep their rounding to half precision in the reference. `notes` says so too.
      codes: the operands of matmuls in 8 bits, in program order. Of several in a module, and in the
        steps of a loop, the largest shares.
    """

    def __getitem__(self, path: str) -> Row:
        """Returns the first row of a path: activations, otherwise gradients, parameters, outputs.

        Raises:
          KeyError: there is no such row; lists the existing ones.
        """
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(
            f"No row {path!r}. Rows: {', '.join(dict.fromkeys(row.path for row in self.rows))}."
        )

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns the comparison as JSON.

        Infinite values and NaN are texts, "inf" or "nan", as JSON has no such numbers.
        """
        return json.dumps(_plain({"version": 1, **dataclasses.asdict(self)}), indent=indent)

    def to_svg(self) -> str:
        """Returns a drawing of the errors by path, to embed in a page."""
        return svg(self)

    def plot(self, file: str | Path) -> None:
        """Writes the errors by path to a PNG file, or another format of matplotlib's by its ending.

        Raises:
          ImportError: matplotlib is not installed.
        """
        plot(self, file)

    def __str__(self) -> str:
        return comparison_table(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

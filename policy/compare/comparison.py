"""The result of a comparison: one row for each module path, and readings of the rows."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, Literal

Kind = Literal["activation", "gradient", "parameter", "output"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Distance of one place's values from float32's; where there are several, the worst of each figure.

    Attributes:
      path: the module path, as rules take it; the model itself is ``Net:``, "" is outside of any module. Of a parameter
        or an output: its name.
      kind: "activation": what a module hands on. "gradient": the cotangents that it hands back. "parameter": the
        gradient of one. "output": what the function returns.
      error: norm of the difference / norm of float32's; infinite where a value overflowed. Of integers and booleans:
        the share of the elements that differ.
      cosine: of the angle between the two; of integers and booleans, the share of the elements that are equal.
      underflow: share of the elements that are zero where float32's are not.
      subnormal: share of the elements that are subnormal in their dtype.
      overflow: share of the elements that are infinite or NaN where float32's are finite.
      largest: the largest magnitude.
      limit: the largest number of the dtype that came nearest to its limit.
      dtype: that dtype.
      reference_largest: the largest magnitude in float32.
      undefined: share of the elements where float32 itself is infinite or NaN.
      entering: the worst error of what the module was handed.
      steps: the error in each step of the scans around it, nested as they are; () outside of any.
      primitive, source: the operation that made the error, where this is a jump, or else computed the worst value; and
        the line of the user's code, or the module's path and class where no code of a user's called it.
      is_jump: whether the error is made here: see `Comparison.first_jump`.
    """

    path: str
    kind: Kind
    error: float
    cosine: float
    underflow: float
    subnormal: float
    overflow: float
    largest: float
    limit: float
    dtype: str
    reference_largest: float
    undefined: float = 0.0
    entering: float = 0.0
    steps: tuple[Any, ...] = ()
    primitive: str = ""
    source: str = ""
    is_jump: bool = False

    @property
    def headroom(self) -> float:
        """The largest magnitude, as a share of the dtype's largest number: above 1 it overflowed."""
        return self.largest / self.limit


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A function under a policy beside the same function in float32.

    Attributes:
      rows: of the module paths, then of the parameters' gradients, then of the outputs, each in program order.
      first_jump: the path of the first module, in the order of the program, that makes an error: what it hands on is
        off by eight times as much as what it was handed, and as half precision rounds by; or it overflows. The
        innermost module is named, as rules take it. "" is code outside of any module; None: the error jumps nowhere.
      jump_step: in which step of a scan, counted from 0, where `first_jump` is in one.
      notes: what else should be known, in sentences.
      name: of the function.
      policy: the policy's text form; "" where the function was compared as it is written.
      route: how the policy was applied: "scope" by layers that obey it, "autocast", or "as written".
      unpaired: the paths whose values have no counterpart in the function as it is traced in float32. They are compared
        with the program itself, widened, whose constants are as half precision rounded them. `notes` says so too.
    """

    rows: tuple[Row, ...]
    first_jump: str | None = None
    jump_step: int | None = None
    notes: tuple[str, ...] = ()
    name: str = ""
    policy: str = ""
    route: str = "as written"
    unpaired: tuple[str, ...] = ()

    def _of(self, kind: Kind) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == kind)

    @functools.cached_property
    def activations(self) -> tuple[Row, ...]:
        """The rows of values that modules hand on."""
        return self._of("activation")

    @functools.cached_property
    def gradients(self) -> tuple[Row, ...]:
        """The cotangents that each module hands back."""
        return self._of("gradient")

    @functools.cached_property
    def parameters(self) -> tuple[Row, ...]:
        """The gradient of each parameter."""
        return self._of("parameter")

    @functools.cached_property
    def outputs(self) -> tuple[Row, ...]:
        """The rows of the function's outputs."""
        return self._of("output")

    @property
    def error(self) -> float:
        """The worst error of what the function returns; of integers and booleans, the share that differs."""
        return max((row.error for row in self.outputs), default=0.0)

    def __getitem__(self, path: str) -> Row:
        """The row of a module path: of its activations, or where it has none, of its gradients; else of a parameter.

        Raises:
          KeyError: there is none; names those that there are.
        """
        for row in self.rows:
            if row.path == path:
                return row
        raise KeyError(f"No row {path!r}. Rows: {', '.join(dict.fromkeys(row.path for row in self.rows))}.")

    def to_json(self, *, indent: int | None = 1) -> str:
        """The comparison as JSON; what is infinite or NaN is a text, "inf" or "nan", as JSON has no such numbers."""
        found = {"version": 1, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "rows"}}
        return json.dumps(_plain({**found, "rows": [dataclasses.asdict(row) for row in self.rows]}), indent=indent)

    def to_svg(self) -> str:
        """The errors by path as a drawing that a page can hold."""
        from policy.compare.render.chart import svg

        return svg(self)

    def plot(self, file: str | Path) -> None:
        """Writes the errors by path to a file: PNG, or what else its ending asks matplotlib for.

        Raises:
          ImportError: matplotlib is not installed.
        """
        from policy.compare.render.chart import plot

        plot(self, file)

    def __str__(self) -> str:
        from policy.compare.render.text import table

        return table(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""The result of a comparison: one row for each module path, as a table and JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from policy.inspect.compare.statistics import is_discrete
from policy.inspect.render.table import Column, Table
from policy.inspect.render.text import OUTSIDE

RowKind = Literal["activation", "gradient", "parameter", "output"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Distance of the values at one place from float32's, with the worst figures of all values.

    With `beside`, "float32" stands below for the function or policy that is the reference.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> comparison = policy.compare(jnp.square, jnp.array([1e-4], jnp.float16))
    >>> row = comparison.outputs[0]
    >>> row.dtype, row.underflow, row.subnormal
    ('float16', 1.0, 0.0)

    Attributes:
      path: the module path, as in rules; the model itself is ``Net:``, "" is outside of any module.
        For a parameter or an output: its name.
      kind: "activation": values that a module returns. "gradient": the cotangents that it returns.
        "parameter": the gradient of a parameter. "output": an output of the function.
      error: norm of the difference / norm of float32's; infinite if a value overflowed. For
        integers and booleans: the share of the elements that differ.
      cosine: of the angle between the two; for integers and booleans, the share of the elements
        that are equal.
      underflow: share of the elements that are zero but nonzero in float32.
      subnormal: share of the elements that are subnormal in their dtype.
      overflow: share of the elements that are infinite or NaN but finite in float32.
      largest: the largest magnitude.
      limit: the largest number of the dtype that came nearest to its limit.
      dtype: that dtype.
      reference_largest: the largest magnitude in float32.
      undefined: share of the elements that are infinite or NaN in float32 itself.
      entering: the worst error of the module's inputs.
      steps: the error in each step of the enclosing scans, nested as they are; () outside of any.
      primitive, source: the operation that made the error, if this row is a jump, otherwise the one
        that computed the worst value; and the line of the user's code, or the module's path and
        class if no user code called it.
      is_jump: whether the error is made here: see `Comparison.first_jump`.
      rms: root mean square of the difference, in the unit of the values: nats for log-probs.
        Infinite if a value overflowed; 0 for integers and booleans.
    """

    path: str
    kind: RowKind
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
    rms: float = 0.0

    @property
    def is_continuous(self) -> bool:
        """True for floating and complex values, False for integers and booleans."""
        return not is_discrete(np.dtype(self.dtype))

    @property
    def headroom(self) -> float:
        """The largest magnitude as a share of the dtype's largest number; above 1 on overflow."""
        return self.largest / self.limit


@dataclasses.dataclass(frozen=True)
class OperandCodes:
    """The 8-bit codes of an operand of a module's matmuls.

    >>> from policy.inspect.compare.comparison import OperandCodes
    >>> OperandCodes("up", "weight", "int8", saturated=0.01, underflow=0.02).operand
    'weight'

    Attributes:
      path: the module path, as in rules.
      operand: "input", "weight" or "cotangent": what was cast to 8 bits.
      dtype: of the codes.
      saturated: share of the elements whose code is the largest: those that were clipped, and those
        that the scale takes there, one for each scale at least.
      underflow: share of the elements that are not zero, but whose code is.
    """

    path: str
    operand: Literal["input", "weight", "cotangent"]
    dtype: str
    saturated: float
    underflow: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A function under a policy compared with itself in float32; returned by `policy.compare`.

    With `beside`, it is compared with another function, or with itself under another policy.

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
        its outputs is over eight times that of its inputs, and that which roundings to half
        precision inside of it add up to; or it overflows. It is the innermost module, as in rules.
        "" is code outside of any module; None: the error jumps nowhere.
      jump_step: the step of a scan, counted from 0, if `first_jump` is in one.
      notes: further information, in sentences.
      name: of the function.
      policy: the policy's text form; "" if the function was compared as it is written.
      route: the way the policy was applied: "scope" by layers that obey it, "autocast", or "as
        written".
      unpaired: the paths with constants that have no counterpart in the function's float32 trace.
        They keep their rounding to half precision in the reference. `notes` says so too.
      codes: the operands of matmuls in 8 bits, in program order. Of several in a module, and in the
        steps of a loop, the largest shares; () with `beside`.
      beside: the name of the reference; "" for float32.
      alone: with `beside`, the modules of either that have no counterpart of their shape.
    """

    rows: tuple[Row, ...]
    first_jump: str | None = None
    jump_step: int | None = None
    notes: tuple[str, ...] = ()
    name: str = ""
    policy: str = ""
    route: str = "as written"
    unpaired: tuple[str, ...] = ()
    codes: tuple[OperandCodes, ...] = ()
    beside: str = ""
    alone: tuple[str, ...] = ()

    def _of(self, kind: RowKind) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == kind)

    @functools.cached_property
    def activations(self) -> tuple[Row, ...]:
        """The rows of the values that modules return."""
        return self._of("activation")

    @functools.cached_property
    def gradients(self) -> tuple[Row, ...]:
        """The rows of the cotangents that modules return."""
        return self._of("gradient")

    @functools.cached_property
    def parameters(self) -> tuple[Row, ...]:
        """The rows of the parameters' gradients."""
        return self._of("parameter")

    @functools.cached_property
    def outputs(self) -> tuple[Row, ...]:
        """The rows of the function's outputs."""
        return self._of("output")

    @property
    def error(self) -> float:
        """The worst error of the function's outputs; of integers, the share that differs."""
        return max((row.error for row in self.outputs), default=0.0)

    @property
    def rms(self) -> float:
        """The largest root mean square of the outputs' differences: in nats for log-probs."""
        return max((row.rms for row in self.outputs), default=0.0)

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

    def __str__(self) -> str:
        return _text(self)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------------------------------------
# The tables
# --------------------------------------------------------------------------------------------------

_TITLES: dict[RowKind, str] = {
    "activation": "activations",
    "gradient": "gradients of activations",
    "parameter": "gradients of parameters",
    "output": "outputs",
}
_ROUTES = {"scope": "layers that obey it", "autocast": "autocast", "as written": "its own dtypes"}
_WIDTH, _LONGEST = 160, 40  # of a table, and of the names in it


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.2e}"


def _share(share: float) -> str:
    if not math.isfinite(share):
        return str(share)
    return "0" if share == 0 else f"{share:.2%}" if share >= 1e-4 else "<0.01%"


# heading, attribute and form
_FIGURES = (
    ("error", "error", _number),
    ("rms", "rms", _number),
    ("cosine", "cosine", "{:.6f}".format),
    ("underflow", "underflow", _share),
    ("subnormal", "subnormal", _share),
    ("overflow", "overflow", _share),
    ("largest", "largest", _number),
    ("of limit", "headroom", _share),
)


def _text(comparison: Comparison) -> str:
    """Returns the tables, with the first jump and the notes above them."""
    policy = f" under {comparison.policy}" if comparison.policy else ""
    reference = comparison.beside or "float32"
    lines = [
        f"{comparison.name or 'function'}{policy} (by {_ROUTES[comparison.route]}) against "
        f"{reference}",
        f"The error jumps {_jump(comparison)}.",
        *comparison.notes,
    ]
    tables = [_table(kind, comparison) for kind in _TITLES if comparison._of(kind)]
    tables += [_codes(comparison.codes)] if comparison.codes else []
    return "\n".join([*lines, *(f"\n{table}" for table in tables)])


def _table(kind: RowKind, comparison: Comparison) -> Table:
    rows = comparison._of(kind)
    columns = [
        Column(
            head,
            [getattr(row, name) if head == "error" or row.is_continuous else None for row in rows],
            form,
            unknown="",
        )
        for head, name, form in _FIGURES
        if head != "rms" or comparison.beside
    ]
    columns.append(Column("", list(map(_remark, rows)), side="<"))
    names = [row.path or ("(result)" if kind == "output" else OUTSIDE) for row in rows]
    return Table(_TITLES[kind], names, columns, _WIDTH, longest=_LONGEST)


def _codes(codes: Sequence[OperandCodes]) -> Table:
    """Returns the table of operands in 8 bits."""
    columns = [
        Column("operand", [one.operand for one in codes], side="<"),
        Column("dtype", [one.dtype for one in codes], side="<"),
        Column("saturated", [one.saturated for one in codes], _share),
        Column("underflow", [one.underflow for one in codes], _share),
    ]
    names = [one.path or OUTSIDE for one in codes]
    return Table("operands in 8 bits", names, columns, _WIDTH, longest=_LONGEST)


def _jump(comparison: Comparison) -> str:
    path = comparison.first_jump
    if path is None:
        return "nowhere"
    step = "" if comparison.jump_step is None else f", step {comparison.jump_step} of its scan"
    row = next((row for row in comparison.rows if row.path == path and row.is_jump), None)
    made = "" if row is None or not row.source else f", in {row.primitive}, {row.source}"
    return f"first at {path or OUTSIDE}{step}{made}"


def _remark(row: Row) -> str:
    found = ["<- jumps"] if row.is_jump else []
    if not row.is_continuous:
        found.append(f"{_share(row.error)} of the {row.dtype} differ")
    elif row.steps:
        worst = np.asarray(row.steps).reshape(len(row.steps), -1).max(1).argmax()
        found.append(f"worst in step {worst} of {len(row.steps)}")
    return "  ".join(found)

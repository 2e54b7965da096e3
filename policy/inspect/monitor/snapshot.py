"""`Snapshot`: what a monitored step returns beside its result, and its form in a log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from policy.inspect.monitor import tensor_statistics as statistics
from policy.inspect.monitor.nonfinite import FirstSpan, StepOperation

Kind = Literal["activation", "cotangent", "gradient", "param", "update", "codes", "input"]
KINDS: tuple[Kind, ...] = (
    *("activation", "cotangent", "gradient", "param", "update", "codes", "input"),
)
REASONS = ("", "every", "nonfinite")


class Span(NamedTuple):
    """The numbers of one value in those of a snapshot.

    Attributes:
      start: the place of the first.
      width: numbers of one step of the scans around it.
      steps: lengths of these scans, outermost first.
      is_layers: for each of them, whether its steps are layers; those of microbatches are not.
      size: elements of the value in one step.
      examples: the length of its first axis if that is the batch's, else 0.
    """

    start: int
    width: int
    steps: tuple[int, ...]
    is_layers: tuple[bool, ...]
    size: int
    examples: int

    def of(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the numbers, (repetitions, *layers, width).

        Layers of nested scans are one axis.
        """
        stop = self.start + math.prod(self.steps) * self.width
        found = numbers[self.start : stop].reshape(*self.steps, self.width)
        order = np.argsort(self.is_layers, kind="stable")
        found = np.transpose(found, (*map(int, order), len(self.steps)))
        layers = [n for n, is_one in zip(self.steps, self.is_layers, strict=True) if is_one]
        return found.reshape(-1, *([math.prod(layers)] if layers else []), self.width)


@dataclasses.dataclass(frozen=True)
class SnapshotRow:
    """The values that a row of a record is about.

    Attributes: those of a record's row, and the places of its values.
    """

    path: str
    kind: Kind
    dtype: str
    line: str
    spans: tuple[Span, ...]

    def record(self, numbers: np.ndarray) -> dict[str, Any]:
        """Returns the row for JSON from all numbers of a snapshot."""
        whole = [span.of(numbers) for span in self.spans]
        found = [each[..., : len(statistics.STATISTICS)] for each in whole]
        if len({each.shape[1:] for each in found}) > 1:  # some are in a scan, and some are not
            found = [each.reshape(-1, each.shape[-1]) for each in found]
        sizes = np.concatenate(
            [np.full(len(f), span.size) for f, span in zip(found, self.spans, strict=True)]
        )
        every = np.concatenate(found)
        if self.kind == "codes":
            above, below = np.moveaxis(every.astype(np.float64), -1, 0)
            of = {"above": above.max(0), "below": below.max(0)}
        else:
            more = ["lost"] if self.kind == "update" else []
            of = statistics.named(every, sizes, np.dtype(self.dtype), more)
        row: dict[str, Any] = {
            "path": self.path,
            "kind": self.kind,
            "dtype": self.dtype,
            "line": self.line,
            "size": sum(span.size for span in self.spans),
            "numbers": {name: _json(number) for name, number in of.items()},
        }
        own = [each[..., len(statistics.STATISTICS) :] for each in whole if self.kind != "codes"]
        devices = [statistics.outlying(each) for each in own if each.shape[-1]]
        found = sorted({device for each in devices for device in each or ()})
        return row | ({"devices": found} if found else {})


def _json(number: Any) -> Any:
    if np.ndim(number):
        return [_json(each) for each in number]
    value = float(number)
    return value if math.isfinite(value) else str(value)


@dataclasses.dataclass(frozen=True)
class SnapshotRows:
    """The static part of a snapshot: what its numbers are of.

    Attributes:
      rows: the rows.
      operations: those that may make infinities, in program order.
      firsts: the numbers of the first of them that did.
      entered: the codes of the step's arguments.
      paths, dtypes: of these arguments.
    """

    rows: tuple[SnapshotRow, ...]
    operations: tuple[StepOperation, ...]
    firsts: tuple[FirstSpan, ...]
    entered: Span
    paths: tuple[str, ...]
    dtypes: tuple[str, ...]

    def first(self, numbers: np.ndarray, is_finite: bool) -> dict[str, Any] | None:
        """Returns the first value of a step that is not finite, for JSON; None if there is none.

        An operation that makes infinities counts if the step is not finite, or if one leaves a
        module, is in a gradient, a param or an update, or was given to the step.
        """
        spans = sorted({span for row in self.rows for span in row.spans if row.kind != "codes"})
        bad = [span for span in spans if span.of(numbers)[..., statistics.COUNTS_NOT_FINITE].any()]
        codes = self.entered.of(numbers).ravel()
        entered = [path for path, code in zip(self.paths, codes, strict=True) if code]
        made = [found for span in self.firsts if (found := span.found(numbers))]
        if (is_finite and not bad and not entered) or not (made or entered):
            return None
        if entered:
            dtype = self.dtypes[self.paths.index(entered[0])]
            operation = StepOperation(entered[0], "forward", "argument", "", dtype)
            layer = devices = None
        else:
            number, layer, devices = min(made, key=lambda found: found[0])
            operation = self.operations[number]
        of_batch = [span for span in bad if span.examples]
        examples = None
        if of_batch:
            examples = statistics.examples_of(of_batch[0].of(numbers), of_batch[0].examples)
        return operation._asdict() | {
            "layer": layer,
            "examples": examples,
            "devices": devices,
            "entered": entered[0] if entered else None,
        }


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Statistics of one step of training, as small arrays on the device.

    It is a pytree, which leaves `jax.jit` and `jax.lax.scan`. Its numbers are zeros unless `taken`.

    >>> import jax, jax.numpy as jnp
    >>> import policy
    >>> step = jax.jit(policy.monitor(lambda params: {"w": params["w"] - 0.001}, every=2))
    >>> params, snapshot = step(0, {"w": jnp.ones(3, jnp.bfloat16)})
    >>> isinstance(snapshot, policy.inspect.Snapshot), bool(snapshot.taken)
    (True, True)
    >>> row = snapshot.record()["rows"][-1]
    >>> row["kind"], row["path"], row["numbers"]["lost"]
    ('update', 'w', 1.0)

    Attributes:
      step: () int32.
      taken: () bool, whether statistics of this step were computed.
      reason: () int32, 1 for a step that was due, 2 for one that is not finite.
      loss_scale: () float32, that of the step; NaN without one.
      skipped: () bool, whether `mixed_precision` skipped the step.
      numbers: (n,) float32, of all rows.
      layout: the rows; static.
    """

    step: jax.Array
    taken: jax.Array
    reason: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array
    numbers: jax.Array
    layout: SnapshotRows

    def record(self) -> dict[str, Any] | None:
        """Returns the snapshot for JSON, a line of the log; None unless it was taken.

        Raises:
          ValueError: the snapshot holds several steps, those of a scan: call `records`.
        """
        if np.ndim(self.step):
            raise ValueError(
                f"The snapshot holds {len(self.step)} steps of a scan: call records(), which "
                "returns a list."
            )
        return next(self._records(), None)

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of all steps that were taken, also of a scan over steps."""
        return list(self._records())

    def _records(self) -> Iterator[dict[str, Any]]:
        arrays = (self.step, self.taken, self.reason, self.loss_scale, self.skipped)
        host = [np.ravel(one) for one in jax.device_get(arrays)]
        if not host[1].any():
            return
        every = np.asarray(jax.device_get(self.numbers)).reshape(len(host[0]), -1)
        for step, taken, reason, loss_scale, skipped, numbers in zip(*host, every, strict=True):
            if taken:
                yield {
                    "version": 1,
                    "step": int(step),
                    "reason": REASONS[int(reason)],
                    "loss_scale": None if np.isnan(loss_scale) else float(loss_scale),
                    "skipped": bool(skipped),
                    "first": self.layout.first(numbers, int(reason) < 2),
                    "rows": [
                        row.record(numbers)
                        for row in self.layout.rows
                        if not (skipped and row.kind == "update")
                    ],
                }


jax.tree_util.register_dataclass(
    Snapshot, ["step", "taken", "reason", "loss_scale", "skipped", "numbers"], ["layout"]
)

"""`Snapshot`: what a monitored step returns beside its result, and its form in a log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from policy.inspect.monitor import tensor_statistics as statistics
from policy.inspect.monitor.nonfinite import MadeOperation, Scan, operations_made

Kind = Literal["activation", "cotangent", "gradient", "param", "update", "input"]
KINDS: tuple[Kind, ...] = ("activation", "cotangent", "gradient", "param", "update", "input")
VERSION = 3
_MOST = 4  # operations in a record that made infinities or NaN

StepNumbers = Mapping[int, np.ndarray]  # of one step, by their keys


class NumbersPlace(NamedTuple):
    """The position of some numbers in a program.

    Attributes:
      scans: those around it.
      size: elements of the value that they are of, on all devices.
      shape: of the numbers, (*steps of the scans, width).
    """

    scans: tuple[Scan, ...] = ()
    size: int = 0
    shape: tuple[int, ...] = ()

    def by_layer(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the numbers, (repetitions, *layers, width). Layers of nested scans are one axis.

        Args:
          numbers: (repetitions, *steps, width).
        """
        is_layers = [False, *(scan.is_layers for scan in self.scans)]
        order = np.argsort(is_layers, kind="stable")
        found = np.transpose(numbers, (*map(int, order), numbers.ndim - 1))
        layers = [n for n, is_one in zip(numbers.shape, is_layers, strict=False) if is_one]
        return found.reshape(-1, *([math.prod(layers)] if layers else []), numbers.shape[-1])


class SnapshotRow(NamedTuple):
    """The values that a row of a record is about.

    Attributes: those of a record's row, and the keys of its values.
    """

    path: str
    kind: Kind
    dtype: str
    line: str
    keys: tuple[int, ...]

    def record(self, numbers: StepNumbers, places: Mapping[int, NumbersPlace]) -> dict[str, Any]:
        """Returns the row for JSON."""
        found = [places[key].by_layer(numbers[key]) for key in self.keys]
        if len({each.shape[1:] for each in found}) > 1:  # some are in a scan, and some are not
            found = [each.reshape(-1, each.shape[-1]) for each in found]
        of_value = [places[key].size for key in self.keys]
        sizes = np.repeat(of_value, [len(each) for each in found])
        of = statistics.named(np.concatenate(found), sizes, np.dtype(self.dtype))
        return {
            "path": self.path,
            "kind": self.kind,
            "dtype": self.dtype,
            "line": self.line,
            "size": sum(of_value),
            "numbers": {name: _json(number) for name, number in of.items()},
        }


def _json(number: Any) -> Any:
    if np.ndim(number):
        return [_json(each) for each in number]
    value = float(number)
    return value if math.isfinite(value) else str(value)


class SnapshotRows(NamedTuple):
    """The static part of a snapshot: what its numbers are of.

    Attributes:
      rows: the rows.
      operations: those that may make infinities, in program order: path, direction, operation,
        line and dtype.
      places: those of all numbers, with their keys, in order.
      firsts: the keys of `first_made`'s results.
      entered: the key of the codes of the step's arguments.
      arguments: the paths and kinds of these arguments: "param", "state" or "input".
      flags: the paths of the outputs that tell whether the step is finite.
    """

    rows: tuple[SnapshotRow, ...] = ()
    operations: tuple[tuple[str, ...], ...] = ()
    places: tuple[tuple[int, NumbersPlace], ...] = ()
    firsts: tuple[int, ...] = ()
    entered: int = 0
    arguments: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()

    def by_key(self, numbers: np.ndarray) -> StepNumbers:
        """Returns numbers (repetitions, n) by their keys, (repetitions, *shape)."""
        ends = np.cumsum([math.prod(place.shape) for _, place in self.places])
        parts = np.split(numbers, ends[:-1], axis=1)
        pairs = zip(self.places, parts, strict=True)
        return {key: part.reshape(len(numbers), *place.shape) for (key, place), part in pairs}

    def facts(self, numbers: StepNumbers, finite: np.ndarray) -> dict[str, Any]:
        """Returns the values of a step that are not finite, for JSON.

        `finite` are the flags (flags,).
        """
        codes, places = numbers[self.entered].max(0), dict(self.places)
        entered = [
            {"path": path, "kind": kind}
            for (path, kind), code in zip(self.arguments, codes, strict=True)
            if code
        ]
        made = sorted(
            one
            for key in self.firsts
            for each in numbers[key]
            for one in operations_made(each, places[key].scans)
        )
        outputs = [path for path, is_one in zip(self.flags, finite, strict=True) if not is_one]
        facts = {
            "outputs": outputs,
            "entered": entered,
            "made": [self._operation(one) for one in made[:_MOST]],
        }
        return {"first": first_of(facts) if outputs else None} | facts

    def _operation(self, one: MadeOperation) -> dict[str, Any]:
        names = ("path", "direction", "operation", "line", "dtype")
        return dict(zip(names, self.operations[one.number], strict=True)) | {
            "value": "nan" if one.is_nan else "inf",
            "is_fresh": one.is_fresh,
            "layer": one.layer,
        }


def first_of(facts: Mapping[str, Any], usual: Collection[Any] = ()) -> dict[str, Any] | None:
    """Returns the value of a step that is taken to be its first infinity or NaN; None without any.

    It is a param, or else the first operation with finite operands, or else an input, an operation
    with an infinite constant, other state, an operation with infinite operands that makes NaN, or
    an output.

    Args:
      facts: the values of a step that are not finite, of its record.
      usual: `identity_of` values that are not finite in finite steps either.
    """
    entered = [one for one in facts["entered"] if identity_of(one) not in usual]
    made = [one for one in facts["made"] if identity_of(one) not in usual]
    params = [one for one in entered if one["kind"] == "param"]
    inputs = [one for one in entered if one["kind"] == "input"]
    with_constant = [one for one in made if one["is_fresh"] and " " in one["operation"]]
    fresh = [one for one in made if one["is_fresh"] and one not in with_constant]
    outputs = [{"path": path, "kind": "output"} for path in facts["outputs"]]
    order = [*params, *fresh, *inputs, *with_constant, *entered, *made, *outputs]
    found = next(iter(order), None)
    if found is None or "operation" in found:
        return found and found | {"entered": None}
    what = {"direction": "forward", "line": "", "dtype": "", "value": "", "layer": None}
    is_output = found["kind"] == "output"
    operation = "output" if is_output else "argument"
    name = None if is_output else found["path"]
    return {"path": found["path"], "operation": operation, "entered": name} | what


def identity_of(fact: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what identifies an argument or an operation in all records of a run."""
    return tuple(fact.get(name) for name in ("path", "direction", "operation", "line"))


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
      loss_scale: () float32, that of the step; NaN without one.
      skipped: () bool, whether `mixed_precision` skipped the step.
      finite: (outputs,) bool, whether each new state and floating scalar is finite.
      numbers: (n,) float32, of all rows.
      layout: the rows; static.
    """

    step: jax.Array
    taken: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array
    finite: jax.Array
    numbers: jax.Array
    layout: SnapshotRows

    def record(self) -> dict[str, Any] | None:
        """Returns the snapshot for JSON, a line of the log; None unless it was taken.

        Raises:
          ValueError: the snapshot holds several steps, those of a scan: call `records`.
        """
        steps = set(np.ravel(jax.device_get(self.step)).tolist())
        if len(steps) > 1:
            raise ValueError(
                f"The snapshot holds {len(steps)} steps of a scan: call records(), which returns a "
                "list."
            )
        return next(self._records(), None)

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of all steps that were taken, also of a scan over steps."""
        return list(self._records())

    def _records(self) -> Iterator[dict[str, Any]]:
        """Yields records; a step that several devices have, as in `jax.pmap`, is one."""
        arrays = (self.step, self.taken, self.loss_scale, self.skipped)
        step, taken, scale, skipped = map(np.ravel, jax.device_get(arrays))
        if not taken.any():
            return
        every = np.asarray(jax.device_get(self.numbers)).reshape(len(step), -1)
        finite = np.asarray(jax.device_get(self.finite)).reshape(len(step), -1)
        for number in dict.fromkeys(step[taken].tolist()):
            alike = np.flatnonzero(taken & (step == number))
            first = alike[0]
            numbers = self.layout.by_key(every[alike])
            rows = self.layout.rows
            places = dict(self.layout.places)
            yield {
                "version": VERSION,
                "step": number,
                "loss_scale": None if np.isnan(scale[first]) else float(scale[first]),
                "skipped": bool(skipped[first]),
                **self.layout.facts(numbers, np.asarray(finite[alike].all(0))),
                "rows": [
                    row.record(numbers, places)
                    for row in rows
                    if not (skipped[first] and row.kind == "update")
                ],
            }


jax.tree_util.register_dataclass(
    Snapshot,
    ["step", "taken", "loss_scale", "skipped", "finite", "numbers"],
    ["layout"],
)

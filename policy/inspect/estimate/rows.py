"""The costs of a program under each policy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from policy.core.policy import get_policy
from policy.inspect.hlo.memory import Buffer as Buffer
from policy.inspect.traced.call import short_text

Point = tuple[float, float]  # two costs


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchanges of one kind and dtype.

    >>> from policy.inspect.estimate.rows import Exchange
    >>> Exchange("all-reduce", "bfloat16", 2e9, 0.01).dtype
    'bfloat16'

    Attributes:
      operation: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute" or
        "ragged-all-to-all".
      dtype: the dtype that is exchanged.
      bytes: of the results on one device, of a reduce-scatter of its operands.
      seconds: what they take at the published bandwidth of the links, where an all-reduce sends its
        result twice and the others once; None where none is published.
    """

    operation: str
    dtype: str
    bytes: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class PolicyCost:
    """The costs of one step under one policy, on one of the target's devices unless said otherwise.

    >>> import jax, jax.numpy as jnp, policy
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> row = policy.estimate(jnp.matmul, x, x, policies=["float32"], on="cpu")["float32"]
    >>> row.arguments, row.outputs, dict(row.matmul_flops), row.fits
    (512, 256, {'float32': 1024}, True)

    Attributes:
      name: the row's name.
      policy: the policy's short form.
      route: how the policy is applied: "scope" by layers that obey it, "autocast", or "as written".
      memory: bytes that a step takes: arguments, temporaries, outputs that overwrite no argument,
        and the program itself.
      capacity: bytes that the device has; 0 if unknown.
      arguments, temporaries, outputs, code: bytes of the parts of `memory`.
      flops: floating-point operations of all devices together, by the widest dtype of the operands,
        the largest first.
      matmul_flops: those of matmuls and convolutions. Float32 on a GPU is "tf32" below the highest
        precision; on a TPU "float32 x3" and "float32 x6" take three and six passes, and
        operands of different precisions "x2", "x3" or "x5".
      bytes: read from and written to the device's memory by kernels; None if the program didn't
        compile.
      cycles: the compiler's estimate; None where it gives none.
      compute_seconds: the time of the kernels, exchanges left out; None where neither cycles nor
        published peaks are known.
      overlapped_seconds: the time of kernels and exchanges, where exchanges run beside the kernels
        that the compiled program's schedule has between their start and their end; None if the time
        of either is unknown.
      model_flops: floating-point operations of matmuls, of all devices together, without those
        that a checkpoint repeats.
      peak: FLOP/s of a device in half precision, as published; 0 if unknown.
      devices: how many run the step.
      mesh: the axes of their mesh and their sizes; empty on one device.
      batch: the examples of a step, as the row's option `batch` says; None if it has none.
      remat: the name of the checkpoint policy that the example was given; "" if none was.
      collectives: exchanges between devices.
      kernels: how many kernels run; None if the program didn't compile.
      uncounted: costs that the figures leave out.
      buffers: the largest arrays when the most memory is taken, the largest first.
      compile_seconds: CPU seconds of the compiler.
      cost_by_path: cycles, or seconds where there are none, of each module path.
      is_exhausted: whether the compiler ran out of memory.
      host: bytes of arguments in the host's memory, which are no part of `memory`; 0 on processors.
    """

    name: str
    policy: str
    route: str
    memory: int
    capacity: int
    arguments: int
    temporaries: int
    outputs: int
    code: int
    flops: Mapping[str, float]
    matmul_flops: Mapping[str, float]
    bytes: float | None = None
    cycles: float | None = None
    compute_seconds: float | None = None
    overlapped_seconds: float | None = None
    model_flops: float = 0.0
    peak: float = 0.0
    devices: int = 1
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    batch: int | None = None
    remat: str = ""
    collectives: tuple[Exchange, ...] = ()
    kernels: int | None = None
    uncounted: tuple[str, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    compile_seconds: float = 0.0
    cost_by_path: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_exhausted: bool = False
    host: int = 0

    @property
    def fits(self) -> bool | None:
        """True if the step fits into the device's memory; None if that is unknown."""
        if self.is_exhausted:
            return False
        return self.memory <= self.capacity if self.capacity else None

    @property
    def spare(self) -> int | None:
        """Bytes of the device's memory that are left, negative where they lack; None if unknown."""
        return self.capacity - self.memory if self.capacity else None

    @property
    def exchange_seconds(self) -> float | None:
        """Seconds of the exchanges; None if any of them is unknown."""
        seconds = [one.seconds for one in self.collectives if one.seconds is not None]
        return float(sum(seconds)) if len(seconds) == len(self.collectives) else None

    @property
    def seconds(self) -> float | None:
        """Seconds of a step: `overlapped_seconds`, or else `sequential_seconds`."""
        if self.overlapped_seconds is not None:
            return self.overlapped_seconds
        return self.sequential_seconds

    @property
    def sequential_seconds(self) -> float | None:
        """Seconds of the kernels, and of the exchanges after them where those are known."""
        if self.compute_seconds is None:
            return None
        return self.compute_seconds + (self.exchange_seconds or 0.0)

    @property
    def seconds_per_example(self) -> float | None:
        """Seconds of a step, by the examples of its batch; None if either is unknown."""
        return self.seconds / self.batch if self.seconds is not None and self.batch else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: `model_flops` in `seconds` as a share of the `peak` of all
        devices; None if unknown. Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), appendix B.
        """
        if not self.seconds or not self.peak or not self.model_flops:
            return None
        return self.model_flops / (self.seconds * self.peak * self.devices)

    @property
    def is_lower_bound(self) -> bool:
        """True if `seconds` leaves something out: exchanges, or kernels without an estimate."""
        return self.exchange_seconds is None or bool(self.uncounted)


@dataclasses.dataclass(frozen=True)
class EstimateRows:
    """The costs of a step under each policy on a target, without ways to show them: see `Estimate`,
    which has the attributes.
    """

    name: str
    target: str
    devices: int
    mesh: Mapping[str, int]
    capacity: int
    clock: float
    timing: str
    source: str
    compiler: str
    rows: tuple[PolicyCost, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> PolicyCost:
        """Returns a row by its name; "f32" and other texts of "float32" find the row "float32".

        Raises:
          KeyError: there is no such row; the message names those that there are.
        """
        names = [name]
        with contextlib.suppress(ValueError, TypeError):  # a name of the caller's own
            names.append(short_text(get_policy(name)))
        found = {row.name: row for row in self.rows}
        for wanted in names:
            if wanted in found:
                return found[wanted]
        raise KeyError(f"There is no row {name!r}. Rows: {', '.join(found)}.")

    @property
    def compares_examples(self) -> bool:
        """True if all rows say how many examples a step has, so that times compare by example."""
        return all(row.batch for row in self.rows)

    @property
    def front(self) -> tuple[PolicyCost, ...]:
        """The rows that fit and that no other row beats: none takes less time without more memory,
        or less memory without more time. The quickest comes first.

        Time is that of an example if `compares_examples`, else that of a step; rows of unknown time
        are left out.
        """
        places: dict[str, Point] = {}
        for row in self.rows:
            seconds = row.seconds_per_example if self.compares_examples else row.seconds
            if seconds is not None and row.fits is not False:
                places[row.name] = seconds, row.memory
        best = [name for name, one in places.items() if not is_beaten(one, places.values())]
        return tuple(self[name] for name in sorted(best, key=places.__getitem__))

    @property
    def is_search(self) -> bool:
        """True if rows differ in their batch, their remat or their mesh."""
        return len({(row.batch, row.remat, tuple(row.mesh.items())) for row in self.rows}) > 1

    def to_json(self, *, indent: int | None = 1) -> str:
        """Returns the estimate as JSON: one object.

        Its members are ``version`` (1: names and meanings stay within a version), the attributes of
        `Estimate`, ``front`` (the names of its rows), and ``rows``: a list of objects with the
        attributes of `PolicyCost`, its properties ``fits``, ``spare``, ``exchange_seconds``,
        ``seconds``, ``sequential_seconds``, ``seconds_per_example``, ``mfu`` and
        ``is_lower_bound``, and the attributes of `Exchange` and `Buffer` in ``collectives`` and
        ``buffers``. Dtypes have their full names; what is unknown is null.
        """
        front = [row.name for row in self.front]
        found = {"version": 1, **_plain(self), "front": front}
        return json.dumps(found, indent=indent, allow_nan=False)


def is_beaten(place: Point, others: Iterable[Point]) -> bool:
    """Returns whether another place is better in one of its numbers, and worse in neither."""
    return any(other != place and other[0] <= place[0] and other[1] <= place[1] for other in others)


_DERIVED = (
    *("fits", "spare", "exchange_seconds", "seconds", "sequential_seconds"),
    *("seconds_per_example", "mfu", "is_lower_bound"),
)


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it: infinite numbers and NaN are null."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += _DERIVED if isinstance(value, PolicyCost) else ()
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    number = value.item() if hasattr(value, "item") else value  # of numpy
    return None if isinstance(number, float) and not math.isfinite(number) else number

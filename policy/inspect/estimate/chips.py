"""Published figures of accelerators (`chips.toml`), by which bytes and FLOPs become seconds.

A kernel takes no less than its matmuls take at the peak of their dtypes, and no less than its bytes
take at the memory's bandwidth [1]. Launches, caches and the work of other units are left out: a run
takes longer than the sum over its kernels.

[1] Williams, Waterman, Patterson: Roofline. Communications of the ACM, 2009.
"""

from __future__ import annotations

import dataclasses
import json
import string
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from policy.inspect.hlo.costs import Costs, KernelTime

Platform = Literal["tpu", "cuda", "cpu"]
_FIGURES = ("memory", "bandwidth", "peaks", "link_bandwidth", "source")


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device in JAX's count: a chip of v5p, v6e and v5e, half a chip of v4 and tpu7x.

    Attributes:
      platform: "tpu", "cuda" or "cpu".
      memory: bytes that programs may take: on a TPU what its compiler leaves them.
      bandwidth: of that memory, bytes a second; 0 where none is published.
      peaks: FLOP/s of the matmul units by the operands' dtype. Float32 is what a matmul of default
        precision takes: TF32 on a GPU, one pass of bfloat16 on a TPU. "float32, high" and
        "float32, highest" are three and six passes on a TPU; on a GPU the first is TF32, and the
        second the peak of its other units. Empty where none is published.
      link_bandwidth: of all links to other devices together, bytes a second, in one direction; 0
        where none is published.
      clock: Hz of the matmul units, by which cycles become seconds; 0 where the compiler gives no
        cycles.
      source: the document of these figures.
      kinds: parts of the names that JAX has for the device.
      axes: of a topology of TPUs.
      largest: the chips of their largest topology.
      device: what XLA's compiler is told of a GPU.
    """

    platform: Platform
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    link_bandwidth: float
    clock: float
    source: str
    kinds: tuple[str, ...] = ()
    axes: int = 0
    largest: int = 0
    device: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Returns FLOP/s of matmuls of operands in `dtype`; of an unlisted one those of float32.

        A precision may follow the dtype, as in "float32, highest".
        """
        names = (dtype, dtype.partition(",")[0], "float32")
        return next((self.peaks[name] for name in names if name in self.peaks), 0.0)

    def target_config(self) -> str:
        """Writes the figures of a GPU as the text of XLA's `GpuTargetConfigProto`."""
        device = dict(self.device)
        major, minor = device.pop("capability")
        return string.Template(_text("gpu_target_config.txtpb")).substitute(
            device,
            memory=int(self.memory),
            major=major,
            minor=minor,
            feature="ACCELERATED_FEATURES" if device["accelerated"] else "NONE",
        )


def _text(name: str) -> str:
    return resources.files("policy.inspect.estimate").joinpath(name).read_text(encoding="utf-8")


def _chip(table: dict[str, Any]) -> Chip:
    half = table["peaks"]["bfloat16"]
    if table["platform"] == "tpu":
        peaks = {"float32": half, "float32, high": half / 3, "float32, highest": half / 6}
    else:
        peaks = {"float16": half, "float32": half / 2}
    return Chip(**{"clock": 0.0, **table, "peaks": {**peaks, **table["peaks"]}})


CHIPS: dict[str, Chip] = {
    name: _chip(table) for name, table in tomllib.loads(_text("chips.toml")).items()
}


# --------------------------------------------------------------------------------------------------
# Figures of one's own
# --------------------------------------------------------------------------------------------------


def own_gpu(path: str) -> Chip:
    """Returns the figures of a GPU from a JSON file.

    The file holds one object: ``like``, the name of the GPU whose figures it shares, and those that
    differ: ``memory`` (bytes), ``bandwidth`` and ``link_bandwidth`` (bytes a second), ``peaks`` (an
    object of FLOP/s by dtype), ``source``, and of the device ``name``, ``capability`` (two whole
    numbers), ``accelerated``, ``cores``, ``units_per_core``, ``clock_ghz``, ``l2_cache``,
    ``shared_memory_per_core`` and ``shared_memory_per_block_optin``, as in `chips.toml`:

        {"like": "h100", "memory": 1e11, "peaks": {"bfloat16": 7.5e14}, "cores": 114}

    Raises:
      ValueError: the file can't be read, or holds something else; the message names it.
    """
    try:
        given = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}.") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} should hold one JSON object, but holds a {type(given).__name__}.")
    like = given.pop("like", "h100")
    gpus = {name: chip for name, chip in CHIPS.items() if chip.platform == "cuda"}
    if like not in gpus:
        raise ValueError(f"{path}: 'like' should be one of {', '.join(gpus)}, but is {like!r}.")
    base = gpus[like]
    known = {**{name: getattr(base, name) for name in _FIGURES}, **base.device}
    del known["memory_bandwidth"]  # follows from the other
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"{path}: unknown figure {name!r}. Known figures: like, {', '.join(known)}."
            )
        if not _is_like(value, known[name]):
            raise ValueError(
                f"{path}: {name!r} should have the form of {known[name]!r}, but is {value!r}."
            )
        known[name] = {**known[name], **value} if name == "peaks" else value
    figures = {name: known.pop(name) for name in _FIGURES} | {"source": given.get("source", path)}
    device = {**known, "memory_bandwidth": int(figures["bandwidth"])}
    return dataclasses.replace(base, **figures, device=device)


def _is_like(value: Any, known: Any) -> bool:
    """Returns whether a figure has the form of another."""
    if isinstance(known, (str, bool)):
        return type(value) is type(known)
    if isinstance(known, list):
        return isinstance(value, list) and [type(n) for n in value] == [type(n) for n in known]
    if isinstance(known, Mapping):
        return isinstance(value, dict) and all(_is_like(part, 1.0) for part in value.values())
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


# --------------------------------------------------------------------------------------------------
# Times by published figures
# --------------------------------------------------------------------------------------------------


def kernel_time(chip: Chip) -> KernelTime | None:
    """Returns the `kernel_time` of `costs_of` for a chip's programs: the roofline in cycles of the
    chip's clock, or in seconds where it has none.

    It takes the FLOPs of a kernel's matmuls and convolutions by the dtype that is multiplied, as
    `Costs.flops` has them ("bfloat16", "float32, highest", "float32, bfloat16 x3"), and the bytes
    that it reads and writes.

    Returns:
      None where the chip's figures are not published, as a processor's.
    """
    if not chip.bandwidth or not chip.peaks:
        return None

    def time(flops: Mapping[str, float], moved: float) -> float:
        computing = sum(amount / _peak(chip, dtype) for dtype, amount in flops.items())
        return max(computing, moved / chip.bandwidth) * (chip.clock or 1.0)

    return time


def compute_seconds(chip: Chip, costs: Costs) -> float | None:
    """Returns the seconds of a program's kernels, one after another.

    Args:
      chip: the device that the program was compiled for.
      costs: of `costs_of(text, kernel_time(chip))`.

    Returns:
      None where the chip has neither cycles nor published peaks.
    """
    if not chip.bandwidth or not chip.peaks:
        return None
    return costs.time / (chip.clock or 1.0)


def exchange_seconds(chip: Chip, collectives: Mapping[tuple[str, str], float]) -> float | None:
    """Returns the seconds of collectives: an all-reduce sends its result twice, the others once.

    This is the limit of a ring of many devices; a ring of n sends ``(n - 1) / n`` of it.

    Returns:
      None where there are collectives and the bandwidth of the chip's links is not published.
    """
    sent = sum(
        size * (2 if operation == "all-reduce" else 1)
        for (operation, _), size in collectives.items()
    )
    if not sent:
        return 0.0
    return sent / chip.link_bandwidth if chip.link_bandwidth else None


def _peak(chip: Chip, dtype: str) -> float:
    """Returns FLOP/s of products of a dtype, of which "float32, bfloat16 x3" takes three of
    another's. TF32 is float32 of default precision.
    """
    _, _, multiplied = dtype.partition(", ")
    base, by, passes = multiplied.partition(" x")
    if not by:
        return chip.peak(dtype)
    return chip.peak(base) / int(passes)  # of "tf32", which is unlisted, that of float32

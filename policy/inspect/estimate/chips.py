"""Published figures of accelerators (`chips.toml`), by which bytes and FLOPs become seconds."""

from __future__ import annotations

import dataclasses
import string
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal

Platform = Literal["tpu", "cuda", "cpu"]


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

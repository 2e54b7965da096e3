"""Published figures of accelerators, by which bytes and FLOPs become seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

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
    """

    platform: Platform
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    link_bandwidth: float
    clock: float
    source: str

    def peak(self, dtype: str) -> float:
        """Returns FLOP/s of matmuls of operands in `dtype`; of an unlisted one those of float32.

        A precision may follow the dtype, as in "float32, highest".
        """
        names = (dtype, dtype.partition(",")[0], "float32")
        return next((self.peaks[name] for name in names if name in self.peaks), 0.0)


_GIB = 2.0**30


def _tpu(
    memory: float,
    bandwidth: float,
    half: float,
    links: float,
    clock: float,
    source: str,
    **peaks: float,
) -> Chip:
    flops = {
        "bfloat16": half,
        "float32": half,
        "float32, high": half / 3,
        "float32, highest": half / 6,
        **peaks,
    }
    return Chip("tpu", memory * _GIB, bandwidth, flops, links, clock, f"Google Cloud, {source}")


def _gpu(
    memory: float,
    bandwidth: float,
    half: float,
    links: float,
    source: str,
    highest: float,
    **peaks: float,
) -> Chip:
    flops = {
        "bfloat16": half,
        "float16": half,
        "float32": half / 2,
        "float32, highest": highest,
        **peaks,
    }
    return Chip("cuda", memory, bandwidth, flops, links, 0.0, f"NVIDIA, {source}")


def _eight(flops: float) -> dict[str, float]:
    return dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), flops)


# A TPU's clock follows from its peak: FLOP/s / (2 * multiply-adds a cycle): units of 128 x 128, one
# for a core of v2, 2 of v3, 4 of v4, 4 for v5e, 8 for v5p; of 256 x 256, 4 for v6e and 4 for each
# half of tpu7x. Peaks of a GPU are dense ones, and of highest precision those that its data sheet
# gives for FP32 (for eight B200 600e12); its memory is what the device reports.
CHIPS: dict[str, Chip] = {
    "v2": _tpu(
        7.48, 350e9, 23e12, 124e9, 0.7e9, "TPU v2, a core; Jouppi et al., 2020, for its links"
    ),
    "v3": _tpu(
        15.48, 450e9, 61.5e12, 164e9, 0.94e9, "TPU v3, a core; Jouppi et al., 2020, for its links"
    ),
    "v4": _tpu(15.25, 614e9, 137.5e12, 150e9, 1.05e9, "TPU v4: system architecture, half a chip"),
    "v5e": _tpu(15.75, 819e9, 197e12, 200e9, 1.5e9, "TPU v5e: system architecture", int8=394e12),
    "v5p": _tpu(95.74, 2765e9, 459e12, 600e9, 1.75e9, "TPU v5p: system architecture", int8=918e12),
    "v6e": _tpu(31.25, 1640e9, 918e12, 400e9, 1.75e9, "TPU v6e: system architecture", int8=1836e12),
    "tpu7x": _tpu(
        94.75,
        3690e9,
        1153.5e12,
        300e9,
        2.2e9,
        "TPU7x (Ironwood), half a chip",
        float8_e4m3fn=2307e12,
        float8_e5m2=2307e12,
    ),
    "a100": _gpu(
        85100068864,
        2039e9,
        312e12,
        300e9,
        "A100 data sheet, 2022",
        highest=19.5e12,
        int8=624e12,
        float64=19.5e12,
    ),
    "h100": _gpu(
        84942979072,
        3350e9,
        989.5e12,
        450e9,
        "H100 data sheet, 2024",
        highest=67e12,
        **_eight(1979e12),
        float64=67e12,
    ),
    "h200": _gpu(
        150754820096,
        4800e9,
        989.5e12,
        450e9,
        "H200 data sheet, 2024",
        highest=67e12,
        **_eight(1979e12),
        float64=67e12,
    ),
    "b200": _gpu(
        191514411008,
        8000e9,
        2250e12,
        900e9,
        "HGX B200 data sheet, 2025, an eighth of it",
        highest=75e12,
        **_eight(4500e12),
        float64=37e12,
    ),
}

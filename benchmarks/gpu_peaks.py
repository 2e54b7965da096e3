"""What data sheets promise: dense matmul rates and memory bandwidth, by the name that JAX gives a
device.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Peak:
    """Of one device.

    Attributes:
      float32: TFLOP/s of the ordinary units.
      tf32: of the tensor units for float32 operands; None where they take none.
      half: of the tensor units for float16 and bfloat16, summed in float32, no sparsity.
      bandwidth: GB/s of the device's memory.
      source: the document.
      has_bfloat16: whether the tensor units take bfloat16.
    """

    float32: float
    tf32: float | None
    half: float
    bandwidth: float
    source: str
    has_bfloat16: bool = True

    def of(self, setting: str) -> float | None:
        """TFLOP/s of a setting: "bf16", "f16", "TF32" or "float32"; None where the device has no
        unit for it.
        """
        if setting == "bf16" and not self.has_bfloat16:
            return None
        return {"bf16": self.half, "f16": self.half, "TF32": self.tf32, "float32": self.float32}[
            setting
        ]


# Device names start with these; the first that fits is taken. Data sheets that give figures "with
# sparsity" are halved.
_VOLTA = "NVIDIA Tesla V100 data sheet, 2020"
_AMPERE = "NVIDIA A100 data sheet, 2022"
_HOPPER = "NVIDIA H100 data sheet, 2024"
PEAKS = {
    "NVIDIA B200": Peak(75, 1125, 2250, 8000, "NVIDIA HGX B200 data sheet, 2025, an eighth of it"),
    "NVIDIA H200": Peak(67, 494.5, 989.5, 4800, "NVIDIA H200 data sheet, 2024"),
    "NVIDIA H100 80GB HBM3": Peak(67, 494.5, 989.5, 3350, _HOPPER),
    "NVIDIA H100 PCIe": Peak(51, 378, 756, 2000, "NVIDIA H100 PCIe data sheet, 2022"),
    "NVIDIA A100-SXM4-80GB": Peak(19.5, 156, 312, 2039, _AMPERE),
    "NVIDIA A100 80GB PCIe": Peak(19.5, 156, 312, 1935, _AMPERE),
    "NVIDIA A100": Peak(19.5, 156, 312, 1555, "NVIDIA A100 40 GB data sheet, 2020"),
    "NVIDIA L40S": Peak(91.6, 183, 362, 864, "NVIDIA L40S data sheet, 2023"),
    "NVIDIA L4": Peak(30.3, 60, 121, 300, "NVIDIA L4 data sheet, 2023"),
    "Tesla T4": Peak(8.1, None, 65, 320, "NVIDIA T4 data sheet, 2019", has_bfloat16=False),
    "Tesla V100-SXM2": Peak(15.7, None, 125, 900, _VOLTA, has_bfloat16=False),
    "Tesla V100-PCIE": Peak(14, None, 112, 900, _VOLTA, has_bfloat16=False),
}


def peak_of(device_kind: str) -> Peak | None:
    """The peak of a device by its name (`jax.Device.device_kind`); None where the table has none:
    it is unknown.
    """
    for name, peak in PEAKS.items():
        rest = device_kind.removeprefix(name)
        if rest != device_kind and not rest[:1].isalnum():  # an L4 is no L40S
            return peak
    return None

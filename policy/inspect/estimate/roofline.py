"""Times of kernels and exchanges by a chip's published figures.

A kernel takes no less than its matmuls take at the peak of their dtypes, and no less than its bytes
take at the memory's bandwidth [1]. Launches, caches and the work of other units are left out: a run
takes longer than the sum over its kernels.

[1] Williams, Waterman, Patterson: Roofline. Communications of the ACM, 2009.
"""

from __future__ import annotations

from collections.abc import Mapping

from policy.inspect.estimate.chips import Chip
from policy.inspect.hlo.costs import Costs, KernelTime


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

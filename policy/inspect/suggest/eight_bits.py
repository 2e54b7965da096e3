"""The matmuls in 8 bits that a suggestion is asked for, and the evidence of their layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from policy.core.dtypes import ScaledMatmul
from policy.core.policy import Policy

SMALLEST = 2048
"""The least contraction and number of outputs of a layer that gains by 8 bits: below it they take
more cycles on every chip of the table in docs/eight_bits.md (`benchmarks/accel/eight_bits.py`).
"""
Why = Literal["", "budget", "too small to gain", "in float32"]


@dataclasses.dataclass(frozen=True)
class LayerEvidence:
    """Measurements of one layer's matmuls in 8 bits.

    >>> from policy.inspect.suggest.eight_bits import LayerEvidence
    >>> LayerEvidence("head", 0.02, 0.1, 4096, 256, "too small to gain").runs_in_8_bits
    False

    Attributes:
      path: the module path, its names joined by "/".
      alone: the error with this layer alone in 8 bits, and everything else in float32.
      cost: the share of its matmuls in the FLOPs of all matmuls.
      contraction, outputs: the sizes of its largest matmul, of what is contracted and of what the
        parameters alone have.
      kept: the reason why it is kept out of 8 bits; "" if it is not.
    """

    path: str
    alone: float
    cost: float
    contraction: int
    outputs: int
    kept: Why

    @property
    def runs_in_8_bits(self) -> bool:
        """True if its matmuls run in 8 bits by the suggested rules."""
        return not self.kept

    def __str__(self) -> str:
        said = "8 bits" if self.runs_in_8_bits else f"kept: {self.kept}"
        size = f"{self.contraction}x{self.outputs}"
        return f"{self.path:<50} {self.alone:>20.3g} {self.cost:>8.2%} {size:>12}  {said}"


def split_policy(
    policy: Policy | None, matmul: ScaledMatmul | str | None
) -> tuple[Policy | None, ScaledMatmul | None]:
    """Returns the policy without ``m=``, and the matmuls in 8 bits that are asked for.

    Raises:
      TypeError, ValueError: `matmul` is neither a ScaledMatmul nor a known text; it disagrees with
        the policy's ``m=``; there is no policy; or its compute_dtype is not half precision.
    """
    if policy is None:
        if matmul is not None:
            raise ValueError(
                f"matmul={matmul!r} applies to layers that obey a policy, but policy= is missing: "
                "pass it too, such as policy='mixed_bfloat16'."
            )
        return None, None
    by = policy.matmul if matmul is None else policy.replace(matmul=matmul).matmul
    if policy.matmul not in (None, by):
        raise ValueError(f"matmul={matmul!r} disagrees with the policy '{policy.short}'.")
    if by is not None and policy.compute_dtype.itemsize != 2:
        raise ValueError(
            f"suggest picks layers for m={by.text} among those in half precision, but the policy "
            f"'{policy.short}' computes in {policy.compute_dtype}: give a policy that computes in "
            "bfloat16 or float16."
        )
    return policy.replace(matmul=None), by


def lines_of(evidence: Sequence[LayerEvidence], by: str, smallest: int) -> list[str]:
    """Returns the table of layers, as comments."""
    if not by:
        return []
    head = (
        f"# {'m=' + by:<50} {'error, alone in 8 bits':>20} {'cost':>8} {'size':>12}  "
        f"(too small: below {smallest})"
    )
    return ["", head, *(f"# {one}" for one in evidence)]

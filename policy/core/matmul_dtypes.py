"""The 8-bit dtypes of matmuls with weights, how they are scaled, and their text form.

The formats are those of Micikevicius et al., "FP8 formats for deep learning" (arXiv:2209.05433).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from policy.programs.thread import thread

_SCALINGS = ("row", "tensor")
_WEIGHT_GRADIENTS = ("same", "compute")
_FLOAT8 = tuple(np.dtype(getattr(jnp, name)) for name in ("float8_e4m3fn", "float8_e5m2"))
INT8 = np.dtype(np.int8)
_SHORT = {"f8": ("float8_e4m3fn", "float8_e5m2"), "i8": ("int8", "int8")}


@dataclasses.dataclass(frozen=True)
class ScaledMatmul:
    """The dtypes and the scaling of matmuls with weights in 8 bits.

    >>> import policy
    >>> policy.ScaledMatmul("float8_e4m3fn", "float8_e5m2")
    ScaledMatmul('f8')
    >>> policy.ScaledMatmul("int8", "int8", scaling="tensor").text
    'i8:tensor'

    Attributes:
      operands: the dtype of both operands: float8_e4m3fn, float8_e5m2 or int8.
      gradients: the dtype of cotangents in the two matmuls of backward, of the same kind.
      scaling: "row" gives a scale to each row of the left operand and each column of the right one:
        each part that is contracted. "tensor" gives one to each operand.
      weight_gradient: "same" multiplies the saved 8-bit operand and the 8-bit cotangent, and
        "compute" both in compute_dtype, whose input is saved in compute_dtype then.
      fast_accumulation: lets the accelerator add up in fewer bits: about 14 on an H100.

    Raises:
      ValueError: a dtype that has no 8-bit matmul, dtypes of two kinds, or an unknown option.
    """

    operands: np.dtype
    gradients: np.dtype
    scaling: Literal["row", "tensor"]
    weight_gradient: Literal["same", "compute"]
    fast_accumulation: bool

    def __init__(
        self,
        operands: DTypeLike,
        gradients: DTypeLike,
        scaling: Literal["row", "tensor"] = "row",
        weight_gradient: Literal["same", "compute"] = "same",
        fast_accumulation: bool = False,
    ):
        for field, value in (("operands", operands), ("gradients", gradients)):
            object.__setattr__(self, field, _eight_bits(field, value))
        if (self.operands == INT8) != (self.gradients == INT8):
            raise ValueError(
                f"ScaledMatmul(operands={self.operands}, gradients={self.gradients}): both should "
                "be int8, or both float8: accelerators multiply no other pairs."
            )
        for field, value, known in (
            ("scaling", scaling, _SCALINGS),
            ("weight_gradient", weight_gradient, _WEIGHT_GRADIENTS),
            ("fast_accumulation", fast_accumulation, (True, False)),
        ):
            if not any(value is one or (isinstance(value, str) and value == one) for one in known):
                raise ValueError(
                    f"ScaledMatmul({field}={value!r}): it should be "
                    f"{' or '.join(map(repr, known))}."
                )
            object.__setattr__(self, field, value)

    @property
    def text(self) -> str:
        """The text form, ``f8:tensor``; `scaled_matmul_of` parses it."""
        names = (self.operands.name, self.gradients.name)
        short = next((text for text, known in _SHORT.items() if known == names), "/".join(names))
        options = [
            *([self.scaling] if self.scaling != "row" else []),
            *(["compute"] if self.weight_gradient != "same" else []),
            *(["fast"] if self.fast_accumulation else []),
        ]
        return ":".join([short, *options])

    def __repr__(self) -> str:
        return f"ScaledMatmul('{self.text}')"

    def __reduce__(self):
        return scaled_matmul_of, (self.text,)


def _eight_bits(field: str, value: DTypeLike) -> np.dtype:
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = np.dtype(bool)
    if dtype not in (*_FLOAT8, INT8):
        names = ", ".join(one.name for one in (*_FLOAT8, INT8))
        raise ValueError(f"ScaledMatmul({field}={value!r}): it should be one of {names}.")
    return dtype


def scaled_matmul_of(text: str) -> ScaledMatmul | None:
    """Returns the `ScaledMatmul` of a text such as ``f8``, ``i8:tensor`` or ``8bit``.

    The text is ``f8`` (float8_e4m3fn, gradients float8_e5m2), ``i8`` (int8), or two dtypes
    ``float8_e4m3fn/float8_e4m3fn``; then, each after a colon, ``tensor`` for one scale an operand,
    ``compute`` for weight gradients in compute_dtype, and ``fast`` for fast accumulation. ``8bit``
    is the kind that the backend multiplies: see `preferred`.

    Raises:
      ValueError: an unknown dtype or option.
    """
    kind, *options = text.split(":")
    fields = {
        "tensor": {"scaling": "tensor"},
        "row": {"scaling": "row"},
        "compute": {"weight_gradient": "compute"},
        "fast": {"fast_accumulation": True},
    }
    unknown = [option for option in options if option not in fields]
    if unknown or len({next(iter(fields[option])) for option in options}) < len(options):
        raise ValueError(
            f"Unknown or repeated option in '{text}': after f8, i8 or 8bit it takes "
            f"{', '.join(fields)}, each once."
        )
    if kind == "8bit":
        kind = preferred(*backend())
        if kind is None:
            return None
    dtypes = _SHORT.get(kind, tuple(kind.split("/")))
    if len(dtypes) != 2:
        raise ValueError(
            f"Unknown 8-bit matmul '{text}': it should be f8, i8, 8bit, or two dtypes such as "
            "float8_e4m3fn/float8_e5m2."
        )
    given: dict[str, Any] = {}
    for option in options:
        given |= fields[option]
    return ScaledMatmul(*dtypes, **given)


def backend() -> tuple[str, str]:
    """Returns the platform of the devices that programs are traced for, and their kind or compute
    capability: of the default backend, or of one that is traced for.
    """
    return thread.backend or backend_of(jax.devices()[0])


def backend_of(device: Any) -> tuple[str, str]:
    """Returns a device's platform, and its kind or compute capability."""
    return device.platform, str(getattr(device, "compute_capability", device.device_kind))


def preferred(platform: str, kind: str) -> Literal["f8", "i8"] | None:
    """Returns the 8-bit dtypes that a device multiplies faster than 16 bits, or None.

    >>> from policy.core.matmul_dtypes import preferred
    >>> preferred("gpu", "9.0"), preferred("tpu", "TPU v5 lite"), preferred("cpu", "cpu")
    ('f8', 'i8', None)

    Args:
      platform: of a `jax.Device`.
      kind: its `compute_capability` on a GPU, else its `device_kind`.
    """
    if platform in ("gpu", "cuda"):
        major, _, minor = kind.partition(".")
        return "f8" if (int(major or 0), int(minor or 0)) >= (8, 9) else None
    if platform != "tpu":
        return None
    name = kind.lower().removeprefix("tpu").strip()
    if name.startswith(("7", "v7")):
        return "f8"
    return "i8" if name.startswith(("v5", "v6")) else None

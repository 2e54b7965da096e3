"""The dtypes and precisions of a policy's fields, and their text forms."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.core.arrays import cast_floating
from policy.programs.thread import thread

T = TypeVar("T")

# --------------------------------------------------------------------------------------------------
# Names of dtypes, and the backend's 16-bit float
# --------------------------------------------------------------------------------------------------

# Every name in the text form, by dtype; `str(policy)` prints the first one.
dtype_to_names: dict[Any, tuple[str, ...]] = {
    jnp.bfloat16: ("bfloat16", "bf16"),
    jnp.float16: ("float16", "f16"),
    jnp.float32: ("float32", "f32", "full"),
    jnp.float64: ("float64", "f64"),
}
_name_to_dtype = {
    name: jnp.dtype(dtype) for dtype, names in dtype_to_names.items() for name in names
}

_EIGHT_BITS = re.compile(r"(u?int8|float8|fp8|f8|i8)")


def half_dtype() -> np.dtype:
    """Returns the backend's 16-bit float, as in jmp: bfloat16 on TPU, float16 elsewhere.

    >>> import policy
    >>> policy.half_dtype().itemsize
    2
    """
    return jnp.dtype(jnp.bfloat16 if backend()[0] == "tpu" else jnp.float16)


def cast_to_full(tree: T) -> T:
    """Casts the floating arrays of a tree to float32.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> policy.cast_to_full({"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype
    dtype('float32')
    """
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Casts the floating arrays of a tree to `half_dtype()`.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> policy.cast_to_half(jnp.ones(2)).dtype == policy.half_dtype()
    True
    """
    return cast_floating(tree, half_dtype())


def dtype_names() -> tuple[str, ...]:
    """Returns every name of a dtype that a policy takes."""
    return ("half", *_name_to_dtype)


def parse_dtype(name: str) -> np.dtype:
    """Returns the dtype of a name such as ``bf16``, ``float32``, ``full`` or ``half``.

    Raises:
      ValueError: no dtype that a policy takes has this name.
    """
    if name == "half":
        return half_dtype()
    try:
        return _name_to_dtype[name]
    except KeyError:
        known = ", ".join(dtype_names())
        hint = " Matmuls in 8 bits are m=f8 and m=i8." if _EIGHT_BITS.match(name) else ""
        raise ValueError(f"Unknown dtype '{name}': it should be one of {known}.{hint}") from None


def dtype_or_none(value: Any) -> np.dtype | None:
    """Returns the dtype of a dtype-like, or None for other values."""
    try:
        return None if value is None else jnp.dtype(value)  # NumPy takes None for float64
    except TypeError:
        return None


# --------------------------------------------------------------------------------------------------
# Caches of keys and values
# --------------------------------------------------------------------------------------------------

# The names of the dtypes of a cache; texts print the first and the second one.
cache_dtype_to_names: dict[Any, tuple[str, ...]] = {
    jnp.int8: ("int8", "i8"),
    jnp.float8_e4m3fn: ("float8", "f8", "float8_e4m3fn"),
    **{dtype: dtype_to_names[dtype] for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)},
}
_name_to_cache_dtype = {
    name: jnp.dtype(dtype) for dtype, names in cache_dtype_to_names.items() for name in names
}


def cache_dtype_of(value: DTypeLike | None) -> np.dtype | None:
    """Returns the dtype of a cache of keys and values: None for None, the compute_dtype.

    >>> from policy.core.dtypes import cache_dtype_of
    >>> cache_dtype_of("float8")
    dtype(float8_e4m3fn)

    Raises:
      ValueError: no dtype that a cache is stored in.
    """
    if value is None:
        return None
    named = _name_to_cache_dtype.get(value) if isinstance(value, str) else None
    dtype = dtype_or_none(value) if named is None else named
    if dtype is None or dtype not in _name_to_cache_dtype.values():
        known = ", ".join(names[0] for names in cache_dtype_to_names.values())
        given = repr(value) if dtype is None else dtype.name
        raise ValueError(f"Policy(cache_dtype={given}): it should be one of {known}.")
    return dtype


def cache_dtype_name(dtype: np.dtype) -> str:
    """Returns the name of a cache's dtype in a policy's text."""
    return next(names[0] for known, names in cache_dtype_to_names.items() if dtype == known)


# --------------------------------------------------------------------------------------------------
# Matmuls with weights in 8 bits
#
# The formats are those of Micikevicius et al., "FP8 formats for deep learning" (arXiv:2209.05433),
# of the OCP Microscaling Formats (MX) Specification v1.0, 2023, and of NVIDIA, "Pretraining Large
# Language Models with NVFP4" (arXiv:2509.25149).
# --------------------------------------------------------------------------------------------------


_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
INT8 = np.dtype(np.int8)


class BlockFormat(NamedTuple):
    """Blocks along the contracted axis, each with a scale of its own.

    Attributes:
      size: the elements of a block.
      elements: the names of their dtypes.
      scale: the dtype of a block's scale. float8_e8m0fnu is a power of two. Scales of another dtype
        are relative to one of the array, in float32.
      rounds_up: whether a power of two is rounded up, so that no element is clipped.
    """

    size: int
    elements: tuple[str, ...]
    scale: str
    rounds_up: bool = False


_BLOCKS = {
    "mxfp8": BlockFormat(32, _FLOAT8, "float8_e8m0fnu"),
    "mxfp8_up": BlockFormat(32, _FLOAT8, "float8_e8m0fnu", rounds_up=True),
    "nvfp4": BlockFormat(16, ("float4_e2m1fn",), "float8_e4m3fn"),
}
_SHORT = {
    "f8": ("float8_e4m3fn", "float8_e5m2", "row"),
    "i8": ("int8", "int8", "row"),
    # One dtype for all three matmuls, as in "Recipes for Pre-training LLMs with MXFP8"
    # (arXiv:2506.08027).
    "mxfp8": ("float8_e4m3fn", "float8_e4m3fn", "mxfp8"),
    "mxfp8_up": ("float8_e4m3fn", "float8_e4m3fn", "mxfp8_up"),
    "nvfp4": ("float4_e2m1fn", "float4_e2m1fn", "nvfp4"),
}
Scaling = Literal["row", "tensor", "mxfp8", "mxfp8_up", "nvfp4"]
_SCALINGS = ("row", "tensor", *_BLOCKS)


@dataclasses.dataclass(frozen=True)
class ScaledMatmul:
    """The dtypes and the scaling of matmuls with weights in 8 or 4 bits.

    >>> import policy
    >>> policy.quantized.ScaledMatmul("float8_e4m3fn", "float8_e5m2")
    ScaledMatmul('f8')
    >>> policy.quantized.ScaledMatmul("int8", "int8", scaling="tensor").text
    'i8:tensor'

    Attributes:
      operands: the dtype of both operands: float8_e4m3fn, float8_e5m2, int8, or float4_e2m1fn.
      gradients: the dtype of cotangents in the two matmuls of backward, of the same kind.
      scaling: "row" gives a scale to each row of the left operand and each column of the right one:
        each part that is contracted. "tensor" gives one to each operand. "mxfp8", "mxfp8_up" and
        "nvfp4" give one to each block along the contracted axis: see `BlockFormat`.
      weight_gradient: "same" multiplies the saved 8-bit operand and the 8-bit cotangent, and
        "compute" both in compute_dtype, whose input is saved in compute_dtype then.
      fast_accumulation: lets the accelerator add up in fewer bits: about 14 on an H100.

    Raises:
      ValueError: a dtype that has no such matmul, dtypes of two kinds, or an unknown option.
    """

    operands: np.dtype
    gradients: np.dtype
    scaling: Scaling
    weight_gradient: Literal["same", "compute"]
    fast_accumulation: bool

    def __init__(
        self,
        operands: DTypeLike,
        gradients: DTypeLike,
        scaling: Scaling = "row",
        weight_gradient: Literal["same", "compute"] = "same",
        fast_accumulation: bool = False,
    ):
        blocks = _BLOCKS.get(scaling) if isinstance(scaling, str) else None
        known_dtypes = (*_FLOAT8, INT8.name) if blocks is None else blocks.elements
        for field, value in (("operands", operands), ("gradients", gradients)):
            object.__setattr__(self, field, _one_of(known_dtypes, field, value))
        if (self.operands == INT8) != (self.gradients == INT8):
            raise ValueError(
                f"ScaledMatmul(operands={self.operands}, gradients={self.gradients}): both should "
                "be int8, or both float8: accelerators multiply no other pairs."
            )
        for field, value, known in (
            ("scaling", scaling, _SCALINGS),
            ("weight_gradient", weight_gradient, ("same", "compute")),
            ("fast_accumulation", fast_accumulation, (True, False)),
        ):
            if not any(value is one or (isinstance(value, str) and value == one) for one in known):
                names = " or ".join(map(repr, known))
                raise ValueError(f"ScaledMatmul({field}={value!r}): it should be {names}.")
            object.__setattr__(self, field, value)

    @property
    def blocks(self) -> BlockFormat | None:
        """The blocks that have scales; None where rows or arrays have them."""
        return _BLOCKS.get(self.scaling)

    @property
    def text(self) -> str:
        """The text form, ``f8:tensor``; `scaled_matmul_of` parses it."""
        names = self.operands.name, self.gradients.name
        short_of = {known: text for text, known in _SHORT.items()}
        by_row = short_of.get((*names, "row"), "/".join(names))
        others = by_row if self.scaling == "row" else f"{by_row}:{self.scaling}"
        options = [
            *(["compute"] if self.weight_gradient != "same" else []),
            *(["fast"] if self.fast_accumulation else []),
        ]
        return ":".join([short_of.get((*names, self.scaling), others), *options])

    def __repr__(self) -> str:
        return f"ScaledMatmul('{self.text}')"

    def __reduce__(self):
        return scaled_matmul_of, (self.text,)


def _one_of(names: tuple[str, ...], field: str, value: DTypeLike) -> np.dtype:
    dtype = dtype_or_none(value)
    if dtype is None or dtype.name not in names:
        raise ValueError(
            f"ScaledMatmul({field}={value!r}): it should be one of {', '.join(names)}."
        )
    return dtype


def scaled_matmul_of(text: str) -> ScaledMatmul | None:
    """Returns the `ScaledMatmul` of a text such as ``f8``, ``i8:tensor`` or ``8bit``.

    The text is ``f8`` (float8_e4m3fn, gradients float8_e5m2), ``i8`` (int8), or two dtypes
    ``float8_e4m3fn/float8_e4m3fn``; then, each after a colon, ``tensor`` for one scale an operand,
    ``compute`` for weight gradients in compute_dtype, and ``fast`` for fast accumulation. ``mxfp8``
    (float8_e4m3fn), ``mxfp8_up`` and ``nvfp4`` have a scale for each block. ``8bit`` is the kind
    that the backend multiplies: see `preferred`.

    Raises:
      ValueError: an unknown dtype or option.
    """
    kind, *options = text.split(":")
    fields: dict[str, dict[str, Any]] = {
        **{scaling: {"scaling": scaling} for scaling in _SCALINGS},
        "compute": {"weight_gradient": "compute"},
        "fast": {"fast_accumulation": True},
    }
    given: dict[str, Any] = fields[kind].copy() if kind in _BLOCKS else {}
    for option in options:
        if option not in fields or given.keys() & fields[option].keys():
            raise ValueError(
                f"Unknown or repeated option in '{text}': after f8, i8 or 8bit it takes row, "
                "tensor, compute, fast, each once, and after mxfp8 or nvfp4 compute."
            )
        given |= fields[option]
    if kind == "8bit":
        kind = preferred(*backend())
        if kind is None:
            return None
    dtypes = _SHORT[kind][:2] if kind in _SHORT else tuple(kind.split("/"))
    if len(dtypes) != 2:
        raise ValueError(
            f"Unknown 8-bit matmul '{text}': it should be f8, i8, 8bit, mxfp8, nvfp4, or two "
            "dtypes such as float8_e4m3fn/float8_e5m2."
        )
    return ScaledMatmul(*dtypes, **given)


def backend() -> tuple[str, str]:
    """Returns the platform of the devices that programs are traced for, and their kind or compute
    capability: of the default backend, or of one that is traced for.
    """
    return thread.backend or backend_of(jax.devices()[0])


def backend_of(device: Any) -> tuple[str, str]:
    """Returns a device's platform, and its kind or compute capability."""
    return device.platform, str(getattr(device, "compute_capability", device.device_kind))


def compute_capability(kind: str) -> tuple[int, int]:
    """Returns the major and the minor number of a text such as "8.9"."""
    major, _, minor = kind.partition(".")
    return int(major or 0), int(minor or 0)


def preferred(platform: str, kind: str) -> Literal["f8", "i8"] | None:
    """Returns the 8-bit dtypes that a device multiplies faster than 16 bits, or None.

    >>> from policy.core.dtypes import preferred
    >>> preferred("gpu", "9.0"), preferred("tpu", "TPU v5 lite"), preferred("cpu", "cpu")
    ('f8', 'i8', None)

    Args:
      platform: of a `jax.Device`.
      kind: its `compute_capability` on a GPU, else its `device_kind`.
    """
    if platform in ("gpu", "cuda"):
        return "f8" if compute_capability(kind) >= (8, 9) else None
    if platform != "tpu":
        return None
    name = kind.lower().removeprefix("tpu").strip()
    if name.startswith(("7", "v7")):
        return "f8"
    return "i8" if name.startswith(("v5", "v6")) else None


# --------------------------------------------------------------------------------------------------
# Precisions of matmuls
# --------------------------------------------------------------------------------------------------


HIGHEST = "highest"
_PRECISIONS = ("default", "high", HIGHEST)


def precision_named(value: Any, compute_dtype: np.dtype) -> str | None:
    """Returns the canonical name of a precision, or None for None.

    Args:
      value: None, one of ``default``, ``high`` and ``highest``, a `jax.lax.Precision`, or a
        `jax.lax.DotAlgorithmPreset` or its name.
      compute_dtype: the dtype of the operands.

    Raises:
      ValueError: an unknown name, or an algorithm for operands of other dtypes.
      TypeError: a value of another type.
    """
    if value is None:
        return None
    if not isinstance(value, (str, lax.Precision, lax.DotAlgorithmPreset)):
        raise TypeError(
            f"Policy(precision={value!r}): it should be {', '.join(_PRECISIONS)}, the name of a "
            "jax.lax.DotAlgorithmPreset, or None."
        )
    name = value if isinstance(value, str) else value.name
    if name.lower() in _PRECISIONS:
        return name.lower()
    name = name.upper()
    fitting = [
        algorithm.name
        for algorithm in lax.DotAlgorithmPreset
        if any(compute_dtype == np.dtype(t) for t in algorithm.supported_lhs_types or ())
    ]
    if name not in fitting:
        known = name in lax.DotAlgorithmPreset.__members__
        reason = f"it does not multiply {compute_dtype}" if known else "it is no precision"
        raise ValueError(
            f"Policy(precision={value!r}): {reason}. It should be one of "
            f"{', '.join((*_PRECISIONS, *fitting))}."
        )
    return name


def is_algorithm(name: str | None) -> bool:
    """Returns whether a canonical name is that of an algorithm: it is for operands of a dtype."""
    return name is not None and name not in _PRECISIONS


def precision_around() -> str | None:
    """Returns the precision in force, by `jax.default_matmul_precision`; None where none is."""
    config: Any = jax.config
    return config.jax_default_matmul_precision


def canonical_precision(name: str) -> Any:
    """Returns a precision as the primitives of matmuls and convolutions hold it."""
    if name in _PRECISIONS:
        return (lax.Precision[name.upper()],) * 2
    return lax.DotAlgorithmPreset[name]

"""Arrays stored as codes and scales."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from policy.core.arrays import require_available
from policy.core.dtypes import dtype_or_none
from policy.core.param_formats import CODES, Codec, ParamFormat, format_of
from policy.programs.jaxprs import Equation
from policy.programs.marks import REGION
from policy.quantized.codes import in_memory, numbers, quantized

_WIDENED = f"{REGION}widened_"
_NO_VALUES = jnp.bool_, jax.dtypes.float0  # of a mask, of a tree of tangents


@dataclasses.dataclass(frozen=True)
class CodeLayout:
    """The layout of codes and scales of an array of shape (leading..., n, trailing...).

    In blocks, codes are (leading..., n / block, block, trailing), all trailing axes in one, which
    XLA widens inside of a matmul; otherwise they have the array's shape. Scales are codes without
    the axis of the codes that share one; where a block has a minimum, scale and minimum stand along
    that axis. Leading axes may be added and taken away, as `vmap` and `scan` do; after them scales
    have an axis of size 1, so that no other axis of values and scales is mapped as one of these.

    Attributes:
      format: the kind of codes, and the size of blocks.
      sizes: of the quantized axis of the array and of those after it: n, trailing....
      dtype: the floating dtype that the array is read in.
    """

    format: ParamFormat
    sizes: tuple[int, ...]
    dtype: np.dtype

    @property
    def codec(self) -> Codec:
        return CODES[self.format.name]

    @property
    def text(self) -> str:
        """The format and the axes, for messages and files."""
        sizes = ", ".join(map(str, self.sizes))
        return f"{self.format.text} along axis {self.axis} of (..., {sizes})"

    @property
    def axis(self) -> int:
        """The quantized axis of the array, counted from its end."""
        return -len(self.sizes)

    @property
    def shared(self) -> int:
        """The axis of the codes that share a scale, counted from their end."""
        return self.axis if self.format.block is None else 1 - len(self.held)

    @property
    def held(self) -> tuple[int, ...]:
        """The sizes of the codes' axes without the leading ones."""
        (size, *trailing), block = self.sizes, self.format.block
        if block is None:
            return self.sizes
        return (size // block, block, *((math.prod(trailing),) if trailing else ()))

    @property
    def of_scales(self) -> tuple[int, ...]:
        """The sizes of the scales' axes without the leading ones."""
        shared = len(self.held) + self.shared
        pair = [2] if self.codec.has_minimum else []
        return (1, *self.held[:shared], *pair, *self.held[shared + 1 :])

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the array whose codes have the given one."""
        if self.format.block is None:
            return tuple(codes)
        start, trailing = len(codes) - len(self.held), self.sizes[1:]
        trailing = codes[-1:] if len(trailing) == 1 else trailing  # a part, in shard_map
        return (*codes[:start], codes[start] * codes[start + 1], *trailing)

    def fault(self, codes: Any, scales: Any) -> str | None:
        """Returns the reason why codes and scales are none of this layout, or None."""
        dtype = self.codec.stored
        if codes.dtype != dtype or not jnp.issubdtype(scales.dtype, jnp.floating):
            return (
                f"has values of {codes.dtype} and scales of {scales.dtype}, not of "
                f"{dtype} and a floating dtype: arithmetic or a cast of the tree's "
                "leaves changed values and scales apart. Upcast it with "
                "policy.quantized.dequantize_params first, or leave it out with "
                "policy.quantized.split_frozen."
            )
        if jax.sharding.get_abstract_mesh().manual_axes:
            return None  # shard_map gives each device a part
        leading = tuple(codes.shape[: len(codes.shape) - len(self.held)])
        if (codes.shape, scales.shape) == (leading + self.held, leading + self.of_scales):
            return None
        return (
            f"has values of shape {codes.shape} and scales of shape {scales.shape}, whose last "
            f"axes should be {self.held} and {self.of_scales}: they are another array's, or were "
            "sliced, stacked or mapped along another axis than the first. Use in_axes=0 and "
            "out_axes=0, or upcast it with policy.quantized.dequantize_params first."
        )

    def numbers(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Returns the array in the shape of its codes: each number is rounded once."""
        x = numbers(codes, self.format.name, self.dtype)
        scales = jnp.squeeze(scales, -len(self.of_scales)).astype(jnp.float32)
        if not self.codec.has_minimum:
            return (x * jnp.expand_dims(scales, self.shared)).astype(self.dtype)
        scale, minimum = jnp.split(scales, 2, self.shared)
        return (x * scale + minimum).astype(self.dtype)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedArray:
    """An array stored in 8 or 4 bits: integers or small floats, and a scale for each block of them.

    It stands in a tree of parameters for the array that it was made from, and converts to that
    wherever JAX wants an array; `jnp.asarray` widens it. In layers of `mpmodules`, in code that a
    policy or `autocast` evaluates, matmuls widen it a tile at a time. It is frozen: it has no
    gradient.

    >>> import jax, jax.numpy as jnp
    >>> import policy
    >>> kernel = jax.random.normal(jax.random.key(0), (64, 16))
    >>> stored = policy.quantized.QuantizedArray.of(kernel, "int4:32")
    >>> stored.shape, stored.codes.shape, stored.codes.dtype, stored.nbytes
    ((64, 16), (2, 32, 16), dtype(int4), 576)

    Attributes:
      codes: int8, the bits of float8 in uint8, or int4 or uint4, of which a compiled program holds
        two in a byte.
      scales: floating.
      layout: how both make up the array.
    """

    codes: Any
    scales: Any
    layout: CodeLayout

    is_quantized = True
    __array_priority__ = 100  # NumPy leaves operators to it

    @classmethod
    def of(
        cls,
        array: Any,
        format: ParamFormat | str,
        *,
        axis: int = -2,
        scale_dtype: DTypeLike = jnp.bfloat16,
    ) -> QuantizedArray:
        """Quantizes an array.

        Args:
          array: floating.
          format: such as ``int8``, ``int4:32`` or ``nf4``.
          axis: the one along which codes share scales: the contracted axis of a matmul's kernel.
          scale_dtype: the dtype of the scales.

        Raises:
          ValueError: there is no such axis, the axis is no multiple of the block, or the format is
            unknown.
          TypeError: the array or the scales are not floating.
        """
        held = _required(format)
        _require_floating(held, array=array, scale_dtype=scale_dtype)
        array = jnp.asarray(array)
        layout = _layout(array.shape, held, axis, array.dtype)
        leading = array.shape[: layout.axis]
        array = jnp.reshape(array, (*leading, *layout.held))
        codes, scales = _quantized(array, held.name, layout.shared, jnp.dtype(scale_dtype))
        return cls(codes, jnp.reshape(scales, (*leading, *layout.of_scales)), layout)

    @classmethod
    def of_codes(
        cls,
        codes: Any,
        scales: Any,
        format: ParamFormat | str,
        *,
        axis: int = -2,
        minimums: Any = None,
        dtype: DTypeLike = jnp.float32,
    ) -> QuantizedArray:
        """Stores codes and scales as they are, such as those of a published file.

        >>> import numpy as np
        >>> import policy
        >>> codes, scales = np.full((64, 16), -8), np.full((2, 16), 0.5, np.float16)
        >>> stored = policy.quantized.QuantizedArray.of_codes(codes, scales, "int4:32")
        >>> stored, stored.scales.dtype, float(stored[0, 0])
        (QuantizedArray('int4:32', (64, 16), float32), dtype('float16'), -4.0)

        Args:
          codes: in the array's shape: integers, or float8 numbers, as numbers of any real dtype.
          scales: floating, in the array's shape, but one for each block along `axis`.
          format: as in `of`.
          axis: as in `of`.
          minimums: the numbers that ``uint4`` is counted from, in the dtype and shape of `scales`.
          dtype: the floating dtype that the array is read in.

        Raises:
          ValueError: the axis is none or no multiple of the block, the shape of scales or minimums
            is another, scales or minimums are not finite, minimums are missing or too many, or the
            format has no such codes.
          TypeError: the axis is no integer, codes are not real, or scales, minimums or `dtype` not
            floating.
        """
        held = _required(format)
        _require_floating(held, scales=scales, dtype=dtype)
        layout = _layout(codes.shape, held, axis, dtype)
        if (minimums is None) == layout.codec.has_minimum:
            needed = "needs" if minimums is None else "has no"
            raise ValueError(f"{held.text} {needed} minimums, the numbers of the code 0.")
        shape, axis = list(codes.shape), len(codes.shape) + layout.axis
        shape[axis] = 1 if held.block is None else shape[axis] // held.block
        for name, each in (("scales", scales), ("minimums", minimums)):
            if each is not None and list(each.shape) != shape:
                raise ValueError(
                    f"{name} should be {tuple(shape)}, one for each block of {held.text} along "
                    f"axis {axis} of codes of shape {tuple(codes.shape)}, but got "
                    f"{tuple(each.shape)}."
                )
            numpy: Any = jnp if isinstance(each, jax.Array) else np
            is_known = each is not None and not isinstance(each, jax.core.Tracer)
            if is_known and not numpy.isfinite(each).all():
                raise ValueError(f"{name} of {held.text} hold numbers that are not finite.")
        if minimums is not None:
            _require_floating(held, minimums=minimums)
        parts = [jnp.asarray(each) for each in (scales, minimums) if each is not None]
        leading, together = codes.shape[: layout.axis], jnp.stack(parts, axis + 1)
        codes = jnp.reshape(_codes_of(codes, held), (*leading, *layout.held))
        return cls(codes, jnp.reshape(together, (*leading, *layout.of_scales)), layout)

    def tree_flatten_with_keys(self) -> Any:
        # A file of the tree, by paths, fits no tree of another format.
        keys = map(jax.tree_util.DictKey, (self.format.name, "scales"))
        return tuple(zip(keys, (self.codes, self.scales), strict=True)), self.layout

    @classmethod
    def tree_unflatten(cls, layout: CodeLayout, children: Any) -> QuantizedArray:
        codes, scales = children
        made = cls(codes, scales, layout)
        are_arrays = all(isinstance(x, (jax.Array, np.ndarray)) for x in (codes, scales))
        return made.checked_parts() if are_arrays and codes.dtype not in _NO_VALUES else made

    # As an array --------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape(self.checked_parts().codes.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.layout.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales in a compiled program."""
        parts = self.unbox_parts()
        bits = 4 if self.layout.codec.dtype in (jnp.int4, jnp.uint4) else 8
        scales = math.prod(parts.scales.shape) * jnp.dtype(parts.scales.dtype).itemsize
        return math.prod(parts.codes.shape) * bits // 8 + scales

    @property
    def format(self) -> ParamFormat:
        """The format that it is stored in."""
        return self.layout.format

    def astype(self, dtype: DTypeLike) -> Any:
        """Returns the same codes and scales, to be read in another floating dtype; an array in
        another dtype.
        """
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.widened().astype(dtype)
        layout = dataclasses.replace(self.layout, dtype=require_available(dtype))
        return dataclasses.replace(self, layout=layout)

    def widened(self) -> jax.Array:
        """Returns the array, in its dtype."""
        return _widening(self.layout)(*frozen(self))

    def __jax_array__(self) -> jax.Array:
        return self.widened()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.widened(), dtype)

    def __getitem__(self, index: Any) -> Any:
        return self if index is ... else self.widened()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return iter(self.widened())

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ARRAYS:
            return getattr(self.widened(), name)
        raise AttributeError(f"'QuantizedArray' object has no attribute '{name}'")

    def __repr__(self) -> str:
        parts = self.unbox_parts()
        if not hasattr(parts.codes, "shape") or self.layout.fault(parts.codes, parts.scales):
            return f"QuantizedArray({self.format.name})"
        return f"QuantizedArray('{self.format.text}', {self.shape}, {self.dtype})"

    # As a box of Flax's ---------------------------------------------------------------------------

    def unbox(self) -> jax.Array:
        return self.widened()

    def unbox_parts(self) -> QuantizedArray:
        """Returns it with codes and scales out of the boxes that name their axes, if they are in
        some.
        """
        return self._of_boxes(None, "unbox") if self._is_boxed else self

    def checked_parts(self) -> QuantizedArray:
        """Returns `unbox_parts`, or raises ValueError for codes and scales of another layout."""
        parts = self.unbox_parts()
        fault = self.layout.fault(parts.codes, parts.scales)
        if fault is not None:
            raise ValueError(f"A QuantizedArray, {self.layout.text}, {fault}")
        return parts

    def replace_boxed(self, value: Any) -> Any:
        return value

    def get_partition_spec(self) -> QuantizedArray:
        """Returns the specs of codes and scales, in their places."""
        return self._of_boxes(PartitionSpec(), "get_partition_spec")

    def get_sharding(self, mesh: Any) -> QuantizedArray:
        """Returns the shardings of codes and scales, in their places."""
        return self._of_boxes(NamedSharding(mesh, PartitionSpec()), "get_sharding", mesh)

    def add_axis(self, index: int, params: dict[Any, Any]) -> QuantizedArray:
        return self._mapped("add_axis", index, params)

    def remove_axis(self, index: int, params: dict[Any, Any]) -> QuantizedArray:
        return self._mapped("remove_axis", index, params)

    def _mapped(self, method: str, index: int, params: dict[Any, Any]) -> QuantizedArray:
        if index != 0:
            raise ValueError(
                f"A quantized parameter of shape {self.shape} is mapped over axis {index}, but its "
                "codes can be stacked along axis 0 only: use variable_axes={'params': 0}."
            )
        return self._of_boxes(None, method, index, params) if self._is_boxed else self

    def _of_boxes(self, default: Any, method: str, *args: Any) -> QuantizedArray:
        """Returns what a method of the boxes of codes and scales returns, or else the default."""
        if not self._is_boxed:
            return QuantizedArray(default, default, self.layout)
        codes, scales = (getattr(box, method)(*args) for box in (self.codes, self.scales))
        return QuantizedArray(codes, scales, self.layout)

    @property
    def _is_boxed(self) -> bool:
        return hasattr(self.codes, "unbox")


# What an array has beside the above, of the upcast array. Frameworks probe for other names.
_ATTRIBUTES = (
    "T mT real imag at all any argmax argmin argpartition argsort choose clip compress conj "
    "conjugate cumprod cumsum diagonal dot flatten item max mean min nonzero prod ptp ravel repeat "
    "reshape round searchsorted sort squeeze std sum swapaxes take tolist trace transpose var"
)
_OF_ARRAYS = frozenset(_ATTRIBUTES.split())
_BINARY = "__add__ __sub__ __mul__ __truediv__ __floordiv__ __mod__ __pow__ __matmul__"
_OTHERS = "__neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __bool__"


def _operator(name: str) -> Any:
    def method(stored: QuantizedArray, *others: Any) -> Any:
        if others and not hasattr(stored.unbox_parts().codes, "dtype"):
            return NotImplemented  # in a tree of specs or masks
        return getattr(stored.widened(), name)(*others)

    return method


for (
    _name
) in f"{_BINARY} {_BINARY.replace(' __', ' __r').replace('__', '__r', 1)} {_OTHERS}".split():
    setattr(QuantizedArray, _name, _operator(_name))


def frozen(stored: QuantizedArray) -> tuple[jax.Array, jax.Array]:
    """Returns codes and scales, out of boxes, without gradients."""
    parts = stored.checked_parts()
    return lax.stop_gradient(parts.codes), lax.stop_gradient(parts.scales)


def _required(value: ParamFormat | str) -> ParamFormat:
    held = format_of(value)
    if held is None:
        raise ValueError(
            f"Unknown format {value!r}: it should be one of {', '.join(CODES)}, with the size of a "
            "block after a colon, as in int4:32."
        )
    return held


def _require_floating(format: ParamFormat, **given: Any) -> None:
    for name, value in given.items():
        value = value if isinstance(value, type) else getattr(value, "dtype", value)
        dtype = dtype_or_none(value)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            kind = type(value).__name__ if dtype is None else dtype
            raise TypeError(
                f"{format.text}: {name} should be floating, of 16 bits or more, but got {kind}."
            )


def _codes_of(codes: Any, format: ParamFormat) -> jax.Array:
    """Returns codes in the dtype of the format, or raises for numbers that it doesn't have."""
    dtype = jnp.dtype(CODES[format.name].dtype)
    if not any(jnp.issubdtype(codes.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise TypeError(f"{format.text}: codes should be real numbers, but got {codes.dtype}.")
    if isinstance(codes, jax.core.Tracer) and codes.dtype != dtype:
        raise TypeError(
            f"{format.text}: traced codes, whose range is not known, should be {dtype}, but got "
            f"{codes.dtype}. Call of_codes outside of jax.jit."
        )
    if isinstance(codes, jax.core.Tracer):
        return in_memory(codes, format.name)
    with jax.ensure_compile_time_eval():
        held, wide = jnp.asarray(codes, dtype), codes.astype(np.float32)
        if not (held.astype(jnp.float32) == wide).all():
            info = jnp.finfo(dtype) if format.name == "float8" else jnp.iinfo(dtype)
            raise ValueError(
                f"{format.text}: codes should be numbers of {dtype}, {info.min} to {info.max}, but "
                f"got {codes.dtype} from {wide.min()} to {wide.max()}. Subtract the number that "
                "they are counted from, such as 8 of GGUF's Q4_0."
            )
    return in_memory(held, format.name)


def _layout(shape: Sequence[int], format: ParamFormat, axis: int, dtype: DTypeLike) -> CodeLayout:
    if not isinstance(axis, int | np.integer):
        raise TypeError(f"{format.text}: axis should be an integer, but got {axis!r}.")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{format.text}: an array of shape {tuple(shape)} has no axis {axis}.")
    axis = axis % len(shape)
    if not shape[axis]:
        raise ValueError(
            f"{format.text}: axis {axis} of an array of shape {tuple(shape)} is empty."
        )
    if format.block is not None and shape[axis] % format.block:
        raise ValueError(
            f"{format.text}: axis {axis - len(shape)} of an array of shape {tuple(shape)} is no "
            f"multiple of {format.block}. Take another size of blocks, or exclude the array by a "
            "rule."
        )
    return CodeLayout(format, tuple(shape[axis:]), require_available(dtype))


_quantized = jax.jit(quantized, static_argnums=(1, 2, 3))


@functools.cache
def _widening(layout: CodeLayout) -> Any:
    """Returns a function of codes and scales, whose name in a program tells the layout."""

    def widened(codes: jax.Array, scales: jax.Array) -> jax.Array:
        return layout.numbers(codes, scales).reshape(layout.shape(codes.shape))

    widened.__name__ = f"{_WIDENED}{len(_layouts)}"
    _layouts[widened.__name__] = layout
    return jax.jit(widened)


_layouts: dict[str, CodeLayout] = {}


def widened_layout(equation: Equation) -> CodeLayout | None:
    """Returns the layout of the codes that an equation widens, or None of other equations."""
    name = equation.params.get("name") if _layouts else None
    layout = _layouts.get(name) if isinstance(name, str) else None
    # Partial evaluation divides a function, under the same name.
    is_whole = len(equation.invars) == 2 and len(equation.outvars) == 1
    return layout if is_whole else None

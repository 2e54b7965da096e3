"""Policies: three storage and compute dtypes, one reduction dtype, and their text form."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from policy.core.arrays import cast_floating
from policy.core.dtypes import (
    ScaledMatmul,
    cache_dtype_name,
    cache_dtype_of,
    cache_dtype_to_names,
    dtype_names,
    dtype_or_none,
    dtype_to_names,
    is_algorithm,
    parse_dtype,
    precision_named,
    scaled_matmul_of,
)
from policy.core.param_formats import ParamFormat, format_of

T = TypeVar("T")

_MIXED = {
    "mixed_bfloat16": (jnp.bfloat16, None),
    "mixed_float16": (jnp.float16, None),
    "mixed_float8": (jnp.bfloat16, "f8"),
    "mixed_int8": (jnp.bfloat16, "i8"),
}
_INSIDE = ("f32_inside", "float32_inside")
# the output dtype of a policy that hands on the compute_dtype of the code around it
CALLER = "caller"
_FIELDS = {
    "params": "param_dtype",
    "compute": "compute_dtype",
    "output": "output_dtype",
    "reduction": "reduction_dtype",
    "matmul": "matmul",
    "precision": "precision",
    "cache": "cache_dtype",
    "inputs": "cast_inputs",
}
_SHORT = {key: key[0] for key in _FIELDS} | {"precision": "x", "cache": "k", "inputs": "inputs"}
_KEYS = _FIELDS | {_SHORT[key]: field for key, field in _FIELDS.items()}


def _floating_dtype(field: str, value: DTypeLike) -> np.dtype:
    """Returns `value` as a dtype for a policy field.

    Raises ValueError, naming the field, if it is unsuitable.
    """
    if isinstance(value, str) and value in dtype_names():
        return parse_dtype(value)
    dtype = dtype_or_none(value)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        given = repr(value) if dtype is None else dtype.name
        raise ValueError(
            f"Policy({field}={given}): it should be a floating dtype, such as jnp.bfloat16 or "
            "'bf16'. Integers, booleans and complex numbers pass through every policy unchanged."
        )
    if dtype.itemsize < 2:
        raise ValueError(
            f"Policy({field}={dtype.name}): floats of 8 bits or fewer are for matmul operands "
            "only. Use float16 or bfloat16 here, and matmul='f8' (m=f8 in a text) for matmuls in "
            "8 bits."
        )
    return dtype


@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """The dtypes that numbers are stored, multiplied, summed and returned in.

    Policies are values: frozen and hashable, with equality and hash independent of the dtype-likes
    they were made from.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> mixed = policy.Policy(jnp.float32, jnp.bfloat16, jnp.float32)
    >>> mixed
    Policy('params=float32,compute=bfloat16,output=float32')
    >>> mixed.cast_to_compute(jnp.ones(2)).dtype
    dtype(bfloat16)
    >>> mixed.replace(output_dtype="bf16").short
    'p=f32,c=bf16,o=bf16'

    Attributes:
      param_dtype: the dtype that parameters are created and stored in. A format in 8 or 4 bits,
        such as "int8", "float8", "int4:32" or "nf4", is for frozen ones: it is held in
        `param_format`, and parameters that are not quantized are float32.
      param_format: the 8- or 4-bit format in which `policy.quantized.quantize_params` stores
        parameters, or None.
      compute_dtype: the dtype of matmuls, convolutions and activations.
      output_dtype: the dtype that a module returns to callers outside the policy. "caller" stands
        for the compute_dtype of the calling code. It is stored as `compute_dtype`, which is used at
        a model's output, where there is no such code.
      follows_caller: True if `output_dtype` was given as "caller".
      reduction_dtype: the dtype of statistics, softmax, losses and accumulations. None stands for
        the wider of float32 and `compute_dtype`, and is stored as that dtype.
      cast_inputs: True if a boundary casts floating inputs to `compute_dtype`. False leaves them
        uncast (positions, rotary tables, diffusion times).
      matmul: the 8-bit dtypes of matmuls with weights, and how they are scaled; None for matmuls in
        compute_dtype. A text such as ``f8`` is parsed by
        `policy.core.dtypes.scaled_matmul_of`.
      precision: the precision of matmuls and convolutions: "default", "high", "highest", or the
        name of a `jax.lax.DotAlgorithmPreset` that multiplies `compute_dtype`. None is JAX's
        default, but "highest" for a module in float32 inside a half-precision model: see the page
        "float32 on a TPU and GPU".
      cache_dtype: the dtype of keys and values in the cache of an attention that decodes: int8,
        float8_e4m3fn ("float8"), bfloat16, float16 or float32. The 8-bit ones have a scale for
        each head and position. None is `compute_dtype`.

    Raises:
      ValueError: a field is not a floating dtype of at least 16 bits, `matmul` or
        `cache_dtype` is unknown, or `precision` is unknown or does not fit `compute_dtype`.
      TypeError: `cast_inputs` is not a bool, `matmul` neither a ScaledMatmul nor a text, or
        `precision` neither a text nor JAX's.
    """

    param_dtype: np.dtype
    compute_dtype: np.dtype
    output_dtype: np.dtype
    reduction_dtype: np.dtype
    cast_inputs: bool
    matmul: ScaledMatmul | None
    precision: str | None
    cache_dtype: np.dtype | None
    follows_caller: bool = dataclasses.field(init=False)
    param_format: ParamFormat | None = dataclasses.field(init=False)

    def __init__(
        self,
        param_dtype: DTypeLike | ParamFormat,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        *,
        reduction_dtype: DTypeLike | None = None,
        cast_inputs: bool = True,
        matmul: ScaledMatmul | str | None = None,
        precision: str | lax.Precision | lax.DotAlgorithmPreset | None = None,
        cache_dtype: DTypeLike | None = None,
    ):
        if not isinstance(cast_inputs, bool):
            raise TypeError(f"Policy(cast_inputs={cast_inputs!r}): it should be True or False.")
        if isinstance(matmul, str):
            matmul = scaled_matmul_of(matmul)
        if not isinstance(matmul, (ScaledMatmul, type(None))):
            raise TypeError(
                f"Policy(matmul={matmul!r}): it should be a ScaledMatmul, its text such as 'f8', "
                "or None."
            )
        compute = _floating_dtype("compute_dtype", compute_dtype)
        if matmul is not None and compute.itemsize > 4:
            raise ValueError(
                f"Policy(compute_dtype={compute}, matmul={matmul.text!r}): matmuls in 8 bits need "
                "a compute_dtype of 16 or 32 bits."
            )
        follows_caller = isinstance(output_dtype, str) and output_dtype == CALLER
        output = compute if follows_caller else output_dtype
        wide = _default_reduction_dtype(compute) if reduction_dtype is None else reduction_dtype
        param_format = format_of(param_dtype)
        stored: Any = param_dtype if param_format is None else jnp.float32
        fields = {
            "param_dtype": _floating_dtype("param_dtype", stored),
            "param_format": param_format,
            "compute_dtype": compute,
            "output_dtype": _floating_dtype("output_dtype", output),
            "follows_caller": follows_caller,
            "reduction_dtype": _floating_dtype("reduction_dtype", wide),
            "cast_inputs": cast_inputs,
            "matmul": matmul,
            "precision": precision_named(precision, compute),
            "cache_dtype": cache_dtype_of(cache_dtype),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> Policy:
        """Returns a copy with some fields changed.

        A default `reduction_dtype` follows a changed `compute_dtype`, and an algorithm in
        `precision`, which is one for the old dtype, is dropped.

        Raises:
          TypeError: a name is not a field.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if fields.pop("follows_caller"):
            fields["output_dtype"] = CALLER
        fields["param_dtype"] = fields.pop("param_format") or self.param_dtype
        if self.reduction_dtype == _default_reduction_dtype(self.compute_dtype):
            fields["reduction_dtype"] = None
        unknown = sorted(set(changes) - set(fields))
        if unknown:
            names = ", ".join(fields)
            raise TypeError(
                f"Policy.replace: no field {', '.join(unknown)}; the fields are {names}."
            )
        compute = _floating_dtype("compute_dtype", changes.get("compute_dtype", self.compute_dtype))
        if compute != self.compute_dtype and is_algorithm(self.precision):
            fields["precision"] = None
        return Policy(**(fields | changes))

    def with_output_dtype(self, output_dtype: DTypeLike) -> Policy:
        """Returns a copy with another `output_dtype`."""
        return self.replace(output_dtype=output_dtype)

    def cast_to_param(self, tree: T) -> T:
        """Casts the floating arrays of a tree to `param_dtype`.

        Other leaves are returned unchanged.

        Raises:
          ValueError: the policy stores parameters in 8 or 4 bits: see
            `policy.quantized.quantize_params`.
        """
        if self.param_format is not None:
            raise ValueError(
                f"'{self}' stores parameters in {self.param_format.text}, which is no cast: use "
                "policy.quantized.quantize_params(params, policy)."
            )
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: T) -> T:
        """Casts the floating arrays of a tree to `compute_dtype`.

        Other leaves are returned unchanged.
        """
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: T) -> T:
        """Casts the floating arrays of a tree to `output_dtype`.

        Other leaves are returned unchanged.
        """
        return cast_floating(tree, self.output_dtype)

    def __str__(self) -> str:
        quantized = self.param_format
        parts = [
            f"params={self.param_dtype.name if quantized is None else quantized.text}",
            f"compute={self.compute_dtype.name}",
            f"output={CALLER if self.follows_caller else self.output_dtype.name}",
        ]
        if self.reduction_dtype != _default_reduction_dtype(self.compute_dtype):
            parts.append(f"reduction={self.reduction_dtype.name}")
        if not self.cast_inputs:
            parts.append("inputs=keep")
        if self.matmul is not None:
            parts.append(f"matmul={self.matmul.text}")
        if self.precision is not None:
            parts.append(f"precision={self.precision}")
        if self.cache_dtype is not None:
            parts.append(f"cache={cache_dtype_name(self.cache_dtype)}")
        return ",".join(parts)

    def __repr__(self) -> str:
        return f"Policy('{self}')"

    @property
    def short(self) -> str:
        """The short text form, ``p=f32,c=bf16,o=f32``, as shown in tables.

        `get_policy` parses it.
        """
        known = (*dtype_to_names.values(), *cache_dtype_to_names.values())
        names = {long: short for long, short, *_ in known}
        parts = (part.split("=") for part in str(self).split(","))
        return ",".join(f"{_SHORT[key]}={names.get(value, value)}" for key, value in parts)

    def __reduce__(self):
        return get_policy, (str(self),)


def _default_reduction_dtype(compute_dtype: np.dtype) -> np.dtype:
    return jnp.dtype(jnp.float32) if compute_dtype.itemsize < 4 else compute_dtype


def get_policy(policy: Policy | str) -> Policy:
    """Returns the policy for a text; a `Policy` is returned unchanged.

    The text is one of

    - a preset: ``float32``, ``bfloat16``, ``float16``, ``float64`` (all three fields),
      ``mixed_bfloat16`` = (float32, bfloat16, float32), ``mixed_float16`` = (float32, float16,
      float32), ``mixed_float8`` and ``mixed_int8`` = mixed_bfloat16 with matmuls of weights in 8
      bits, or ``f32_inside`` = (float32, float32, caller) for a layer inside a model that
      computes in float32 and returns the compute_dtype of the surrounding code;
    - a bare dtype for all three fields: ``f32``, ``bf16``, ``f16``, ``full``, or ``half`` (the
      backend's preferred one);
    - ``params=float32,compute=bfloat16,output=float32``, short ``p=f32,c=bf16,o=f32``, with
      ``reduction=DTYPE``, ``inputs=keep``, ``matmul=f8``, ``precision=highest`` (short ``x=``) and
      ``cache=int8`` (short ``k=``) if they are not the default. Spaces are allowed. Missing parts
      follow jmp's grammar: params default to float32, compute to params, output to compute.
      ``output=caller`` is the compute_dtype of the code around the module.

    `str(policy)` is such a text, and ``get_policy(str(policy)) == policy``.

    >>> import policy
    >>> policy.get_policy("mixed_bfloat16")
    Policy('params=float32,compute=bfloat16,output=float32')
    >>> policy.get_policy("p=f32,c=bf16").output_dtype
    dtype(bfloat16)

    Args:
      policy: a Policy or a text.

    Raises:
      ValueError: the text has an unknown key or dtype, or gives a key twice.
      TypeError: `policy` is neither a Policy nor a text.
    """
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        is_jmps = type(policy).__module__.startswith("jmp.")  # whose text has the same grammar
        hint = f" Of jmp's policy give the text: {str(policy)!r}." if is_jmps else ""
        raise TypeError(
            "A policy should be a Policy or its text form such as 'mixed_bfloat16' or "
            f"'p=f32,c=bf16,o=f32', but got {policy!r} of type {type(policy).__name__}.{hint}"
        )
    text = policy.replace(" ", "")
    made = _of_text(text)  # "half" depends on the device
    return _made.setdefault((text, made), made)


_made: dict[tuple[str, Policy], Policy] = {}  # one object for one text


def _of_text(text: str) -> Policy:
    if text in _MIXED:
        compute, matmul = _MIXED[text]
        return Policy(jnp.float32, compute, jnp.float32, matmul=matmul)
    if text in _INSIDE:
        return Policy(jnp.float32, jnp.float32, CALLER)
    if "=" not in text:
        try:
            dtype = parse_dtype(text)
        except ValueError as error:
            raise ValueError(
                f"{error} A policy's text is one of these dtypes, a preset "
                f"({', '.join((*_MIXED, _INSIDE[0]))}), or "
                "'params=DTYPE,compute=DTYPE,output=DTYPE'."
            ) from None
        return Policy(dtype, dtype, dtype)
    return Policy(**_parse_fields(text))


def _parse_fields(text: str) -> dict[str, Any]:
    """Returns Policy's keyword arguments for a ``key=value,...`` text."""
    fields: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in _KEYS:
            raise ValueError(
                f"Unknown key '{key}' in '{text}': it should be params, compute, output, "
                "reduction, matmul, precision, cache or inputs (short p, c, o, r, m, x, k)."
            )
        field = _KEYS[key]
        if field in fields:
            raise ValueError(f"Key '{key}' in '{text}' sets {field} a second time.")
        if field == "cast_inputs":
            if value not in ("keep", "cast"):
                known = "it should be 'keep' or 'cast'"
                raise ValueError(f"Unknown value '{value}' for inputs in '{text}': {known}.")
            fields[field] = value == "cast"
        elif field == "param_dtype" and format_of(value) is not None:
            fields[field] = format_of(value)
        elif field in ("matmul", "precision", "cache_dtype") or value == CALLER:
            fields[field] = value
        else:
            fields[field] = parse_dtype(value)
    fields.setdefault("param_dtype", jnp.dtype(jnp.float32))
    is_format = isinstance(fields["param_dtype"], ParamFormat)
    fields.setdefault("compute_dtype", jnp.bfloat16 if is_format else fields["param_dtype"])
    fields.setdefault("output_dtype", fields["compute_dtype"])
    return fields

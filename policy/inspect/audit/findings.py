"""Findings, and their kinds, the gravest first."""

from __future__ import annotations

import dataclasses

from policy.inspect.traced.authors import source_of_site
from policy.programs.dtypes import is_inexact_name
from policy.programs.paths import spelled
from policy.programs.reading.graph import Node, Value

REDUCTION = "low-precision-reduction"
FUNCTION = "low-precision-function"
CONSTANT = "constant-out-of-range"
INTEGER = "rounded-integer"
CHOICE = "rounded-choice"
UNSCALED = "unscaled-cast"
ACCUMULATOR = "narrow-accumulator"
CARRY = "narrowed-carry"
MIXED = "mixed-matmul"
PROMOTION = "silent-promotion"
LEAK = "float32-leak"
MATMUL = "float32-matmul"
PRECISION = "default-precision"
RESIDUAL = "float32-residual"

FINDING_KINDS = {
    REDUCTION: "A sum or scatter-add runs in less than float32.",
    FUNCTION: "An exponential, logarithm, root or square in half, whose error or range matters.",
    CONSTANT: "A constant overflows or vanishes in the dtype that it is cast to.",
    INTEGER: "Integers in half, larger than all that it holds exactly: positions, counts, indices.",
    CHOICE: "A choice of the largest among numbers that were rounded to half precision before it.",
    UNSCALED: "A cast to float8 or int8 with neither a scale computed from its operand nor limits.",
    ACCUMULATOR: "A matmul of 8-bit operands returns less than its accumulator, int32 or float32.",
    CARRY: "A running sum in half, over a loop or calls: small terms no longer change it.",
    MIXED: "A matmul of a half-precision and a float32 operand, as slow as one of float32.",
    PROMOTION: "Half precision meets float32 or complex numbers without a cast, and stays wide.",
    LEAK: "A half-precision value is widened, and then enters a matmul in float32.",
    MATMUL: "A matmul runs in float32 in a program that otherwise multiplies in half precision.",
    PRECISION: "A matmul that was asked for in float32 runs at a TPU's or GPU's lower precision.",
    RESIDUAL: "A float32 array is saved for the backward pass where half precision would do.",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A likely unintended loss of accuracy or speed.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> fn = lambda x: jnp.exp(x.astype(jnp.float16))
    >>> [finding.kind for finding in policy.audit(fn, jnp.ones(2)).findings]
    ['low-precision-function']

    Attributes:
      kind: one of `policy.inspect.audit.findings.FINDING_KINDS`.
      path: the module path, as in rules; "" outside of any module.
      primitive: the name of the operation concerned.
      dtypes: the dtypes involved, in the order of the message.
      message: the problem and its remedy, in a sentence or two.
      source: the line of the user's code, or the module, as `Operation.source`.
      is_backward: whether it belongs to a backward pass.
      count: the number of occurrences, with scan lengths multiplied.
    """

    kind: str
    path: str
    primitive: str
    dtypes: tuple[str, ...]
    message: str
    source: str
    is_backward: bool
    count: int


def finding(
    kind: str, node: Node, message: str, dtypes: tuple[str, ...] = (), primitive: str = ""
) -> Finding:
    """Returns a finding about a node.

    Its dtypes are those of the node's floating operands, each once, and of its result by default.
    """
    site, values = node.site, (*node.inputs, *node.outputs[:1])
    named = dict.fromkeys(value.dtype for value in values if is_inexact_name(value.dtype))
    what = (kind, spelled(site.path), primitive or site.name, dtypes or tuple(named), message)
    return Finding(*what, source_of_site(site), site.is_backward, site.count)


def shape_of(value: Value) -> str:
    """Returns a value's type as JAX writes it: ``bfloat16[8,128]``."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def sum_limit(dtype: str) -> str:
    """Returns the reason not to sum in a half dtype, in words."""
    return "overflows above 65504" if dtype == "float16" else "has 8 significant bits"

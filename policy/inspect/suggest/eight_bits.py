"""The matmuls that a suggestion may run in 8 bits: which they are, their emulation and evidence."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from policy.core.dtypes import ScaledMatmul
from policy.core.policy import Policy
from policy.eight_bits.blocks import rounded_in_blocks
from policy.eight_bits.quantisation import quantise
from policy.inspect.suggest.patterns import reached_path
from policy.inspect.traced.call import Call, Program
from policy.programs.dtypes import is_eight_bits
from policy.programs.jaxprs import Equation
from policy.programs.operations import contracted_axes, flops_of, size
from policy.programs.paths import Path
from policy.programs.primitives import CONVOLUTIONS, MATMULS, SCALED_DOTS
from policy.programs.reading.graph import Graph, Node
from policy.programs.reading.matmul_operands import COTANGENT, dependences, weight_matmuls
from policy.programs.reading.walk import Site, walk
from policy.programs.rewriting.upcast import lost_prefixes, module_path

SMALLEST = 2048
"""The least contraction and number of outputs of a layer that gains by 8 bits: below it they take
more cycles on every chip of the table in docs/eight_bits.md (`benchmarks/accel/eight_bits.py`).
"""
Why = Literal["", "budget", "too small to gain", "in float32"]
_MATMUL = "dot_general"
_DOTS = (_MATMUL, *SCALED_DOTS)
_Axes = tuple[Sequence[int], Sequence[int]]


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


def lines_of(evidence: Sequence[LayerEvidence], by: str, smallest: int) -> list[str]:
    """Returns the table of layers, as comments."""
    if not by:
        return []
    head = (
        f"# {'m=' + by:<50} {'error, alone in 8 bits':>20} {'cost':>8} {'size':>12}  "
        f"(too small: below {smallest})"
    )
    return ["", head, *(f"# {one}" for one in evidence)]


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


# --------------------------------------------------------------------------------------------------
# Emulation
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ScaledLayer:
    """A path whose matmuls of parameters may run in 8 bits.

    Attributes:
      flops: of these matmuls, forward and backward.
      contraction, outputs: the sizes of the largest forward one: of what is contracted, and of what
        the parameters alone have.
    """

    flops: int = 0
    contraction: int = 0
    outputs: int = 0


@dataclasses.dataclass(frozen=True)
class ScaledDots:
    """The matmuls of a program that run in 8 bits under a policy with ``m=``.

    Attributes:
      by: the dtypes and scales.
      layers: the paths of the matmuls, in program order.
      cotangents: for each matmul, by its equation's `id`, the operand that is the cotangent: 0 is
        the left one; None forward.
      total: the FLOPs of all matmuls of the program.
      kept_out: the paths of convolutions and ragged matmuls that would run in 8 bits.
    """

    by: ScaledMatmul
    layers: Mapping[Path, ScaledLayer]
    cotangents: Mapping[int, int | None]
    total: int
    kept_out: frozenset[Path]

    def product(self, equation: Equation, arrays: Sequence[Any]) -> Any:
        """Returns the product of float32 arrays as 8 bits give it, in float32."""
        numbers = equation.params["dimension_numbers"]
        cotangent = self.cotangents[id(equation)]
        if self.by.blocks is not None:
            lhs, rhs = (
                _in_blocks(x, numbers, side, self.by, is_cotangent=side == cotangent)
                for side, x in enumerate(arrays)
            )
        elif cotangent is None:
            pairs = zip(arrays, numbers[0], strict=True)
            lhs, rhs = (_dequantised(x, axes, self.by.operands, self.by) for x, axes in pairs)
        else:
            lhs, rhs = _backward(arrays, numbers, cotangent, self.by)
        exact: Any = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
        return lax.dot_general(lhs, rhs, numbers, **exact)


def _dequantised(x: Any, axes: Sequence[int], dtype: np.dtype, by: ScaledMatmul) -> jax.Array:
    found = quantise(x, axes, dtype, by.scaling)
    return found.codes.astype(jnp.float32) * found.scale


def _in_blocks(
    x: Any, numbers: tuple[_Axes, _Axes], side: int, by: ScaledMatmul, *, is_cotangent: bool
) -> jax.Array:
    contracted, batch = (tuple(axes[side]) for axes in numbers)
    rows = tuple(axis for axis in range(x.ndim) if axis not in (*contracted, *batch))
    dtype, blocks = by.gradients if is_cotangent else by.operands, by.blocks
    assert blocks is not None
    return rounded_in_blocks(x, (batch, rows, contracted), dtype, blocks)


def _backward(
    arrays: Sequence[Any], numbers: tuple[_Axes, _Axes], side: int, by: ScaledMatmul
) -> Any:
    """Returns a cotangent and the saved operand as they are multiplied.

    The saved one has the codes of the forward pass, whose contraction is what is free here. Its
    scale is folded into the cotangent, which is quantised along this contraction.
    """
    other = 1 - side
    contracted, batch = numbers
    taken = (*contracted[other], *batch[other])
    free = [axis for axis in range(arrays[other].ndim) if axis not in taken]
    saved = quantise(arrays[other], free, by.operands, by.scaling)
    places = (*contracted[side], *batch[side])
    scale = jnp.transpose(saved.scale, (*taken, *free))
    rows = lax.squeeze(scale, range(len(taken), scale.ndim))
    rows = jnp.transpose(rows, np.argsort(places).tolist())
    kept = [axis for axis in range(arrays[side].ndim) if axis not in places]
    folded = arrays[side] * lax.expand_dims(rows, kept)
    given = _dequantised(folded, contracted[side], by.gradients, by)
    codes = saved.codes.astype(jnp.float32)
    return (given, codes) if side == 0 else (codes, given)


# --------------------------------------------------------------------------------------------------
# Which matmuls
# --------------------------------------------------------------------------------------------------


def scaled_of(
    call: Call, policy: Policy, by: ScaledMatmul, program: Program, modules: set[str] | None
) -> ScaledDots:
    """Returns the matmuls of a call's program that run in 8 bits under a policy with ``m=``.

    Args:
      call: the call.
      policy: the policy without ``m=``.
      by: the dtypes and scales.
      program: of the call in half precision.
      modules: the paths that rules can name; None for all.

    Raises:
      ValueError: there are none.
    """
    program_in_8_bits = call.under(policy.replace(matmul=by), None, program.route).jaxpr
    eight = [site for site in walk(program_in_8_bits) if _multiplies_codes(site.equation)]
    runs = {
        _key(site, reached_path(_path(site), modules), by) for site in eight if site.name in _DOTS
    }
    graph, params = Graph(program.jaxpr), call.differentiated()
    lost = lost_prefixes(_path(node.site) for node in graph.nodes)
    made_of = dependences(graph, params)
    layers: dict[Path, ScaledLayer] = {}
    cotangents: dict[int, int | None] = {}
    for one in weight_matmuls(graph, params):
        node, site = one.node, one.node.site
        own = _path(site)
        path, whole = (reached_path(p, modules) for p in (own, lost.get(own, own)))
        is_plain = node.name == _MATMUL and len(node.inputs) == 2
        is_kept = one.weight is None and by.weight_gradient == "compute"
        if not is_plain or is_kept or runs.isdisjoint(_key(site, at, by) for at in (path, whole)):
            continue
        sides = [side for side in (0, 1) if made_of[id(node.inputs[side])] & COTANGENT]
        cotangents[id(site.equation)] = sides[0] if sides else None
        layer = layers.setdefault(whole, ScaledLayer())
        layer.flops += flops_of(site.equation) * site.count
        if not sides and one.weight is not None:
            _measure(layer, node, one.weight)
    named = {path: one for path, one in layers.items() if path}
    if not named:
        raise ValueError(
            f"m={by.text} applies to matmuls of a parameter inside a module, and this call has "
            "none. params= selects the arguments that are parameters."
        )
    dots = [site for site in walk(program.jaxpr) if site.name in MATMULS - CONVOLUTIONS]
    total = sum(flops_of(site.equation) * site.count for site in dots)
    others = (site for site in eight if site.name not in _DOTS)
    kept_out = frozenset(reached_path(_path(site), modules) for site in others)
    return ScaledDots(by, named, cotangents, total, kept_out)


def _multiplies_codes(equation: Equation) -> bool:
    name, operands = equation.primitive.name, equation.invars[:2]
    checked = operands[1:] if name in CONVOLUTIONS else operands
    return name in MATMULS | SCALED_DOTS and all(is_eight_bits(atom.aval.dtype) for atom in checked)


def _measure(layer: ScaledLayer, node: Node, weight: int) -> None:
    contracted, batch = node.params["dimension_numbers"]
    shape = node.inputs[weight].shape
    depth = size([shape[axis] for axis in contracted[weight]])
    batches = size([shape[axis] for axis in batch[weight]])
    outputs = size(shape) // max(depth * batches, 1)
    if depth * outputs > layer.contraction * layer.outputs:
        layer.contraction, layer.outputs = depth, outputs


def _path(site: Site) -> Path:
    return module_path(site.path, site.is_backward)


def _key(site: Site, path: Path, by: ScaledMatmul) -> tuple[Any, ...]:
    """Returns the facts that a matmul in 8 bits shares with the same one in half precision.

    In blocks several axes are one, and the contracted one is a whole number of blocks.
    """
    left = site.equation.invars[0].aval.shape
    depth = size([left[axis] for axis in contracted_axes(site.equation) or ()])
    block = 1 if by.blocks is None else by.blocks.size
    result = size(site.equation.outvars[0].aval.shape)
    return path, site.is_backward, -(-depth // block), result

"""Finds attention in a program by its arithmetic: softmax(cap(scale q k^T) + bias, masked) v.

`jax.nn.dot_product_attention`, `flax.linen.dot_product_attention` and attention by hand are read
alike. Nothing else may read the logits or the weights, and no other operation stands between them:
no dropout, no second bias, no rounding of the logits.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from policy.programs import primitives
from policy.programs.dtypes import F32, is_floating_dtype
from policy.programs.jaxprs import Equation, OpenJaxpr, equations_within
from policy.programs.reading.inlined import InlinedProgram, InlinedStep, is_literal

_LARGE = -1e4  # a masked logit is at most this: of a lower one float32's exponential is 0

# Of an axis: ("batch", 0), ("lhs", 1), ..., as the first matmul has it.
_Label = tuple[str, int]
_Labels = tuple[_Label | None, ...]  # None is an axis of size 1, or one that numbers repeat along
_WIDTH: _Label = ("width", 0)


@dataclasses.dataclass(frozen=True)
class Mask:
    """The pairs that an attention keeps.

    Attributes:
      leaves: the variables of the program that it is computed from.
      axes: its permutation to (batch..., heads..., queries, keys).
    """

    leaves: tuple[Any, ...]
    axes: tuple[int, ...]
    _value: Any
    _program: InlinedProgram
    _is_inverted: bool

    def array(self, read: Callable[[Any], Any]) -> Any:
        """Computes the mask from the arrays of its leaves, in their dtypes."""
        found = self._program.computed(self._value, read)
        return ~found if self._is_inverted else found


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand or the result of an attention, in the layout (batch..., positions, heads, width).

    Attributes:
      variable: that of the program.
      axes: its permutation to (batch..., positions, heads..., groups..., width).
      shape: (batch..., positions, all heads, width).
    """

    variable: Any
    axes: tuple[int, ...]
    shape: tuple[int, ...]

    def laid_out(self, x: Any) -> Any:
        return lax.reshape(lax.transpose(x, self.axes), self.shape)

    def restored(self, x: Any) -> Any:
        """Returns an array in this layout as one of the variable's shape."""
        sizes = [self.variable.aval.shape[axis] for axis in self.axes]
        return lax.transpose(lax.reshape(x, sizes), np.argsort(self.axes))


@dataclasses.dataclass(frozen=True)
class Attention:
    """An attention of a program, and its operands in the layout of this library's functions.

    Attributes:
      equations: its equations, in the order of the program; the last one returns the result.
      query, key, value, out: the operands and the result.
      pairs: (batch..., all heads, queries, keys).
      scale: multiplies q k^T.
      soft_cap: limits the logits, or None.
      bias: a variable that is added to the logits, and its permutation as that of a mask; or None.
      masks: all of them are true where a pair is kept.
      precision: that of the first matmul that has one, or None.
      is_given_masks: whether a mask depends on arguments of the program.
    """

    equations: tuple[Equation, ...]
    query: Operand
    key: Operand
    value: Operand
    out: Operand
    pairs: tuple[int, ...]
    scale: float
    soft_cap: float | None
    bias: tuple[Any, tuple[int, ...]] | None
    masks: tuple[Mask, ...]
    precision: Any
    is_given_masks: bool


def attentions(jaxpr: OpenJaxpr) -> list[Attention]:
    """Returns the attentions whose matmuls are equations of an open jaxpr itself.

    Its masks, softmax and other operations may stand in jitted functions.
    """
    if [each.primitive.name for each in jaxpr.eqns].count("dot_general") < 2:
        return []
    if not any(each.primitive.name == "exp" for each in equations_within(jaxpr, once=True)):
        return []
    program = InlinedProgram(jaxpr)
    found = (_match(program, step) for step in program.steps if step.name == "dot_general")
    return [attention for attention in found if attention is not None]


# --------------------------------------------------------------------------------------------------
# From the logits to the result
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Form:
    """The operations on logits so far.

    Attributes:
      scale, soft_cap, bias, masks: as in `Attention`; a bias and masks with the labels of their
        axes, and a mask with whether it is inverted.
      low: the masked logits, equal for all masks: a row without any key is then uniform.
      is_bounded: whether they are behind a tanh.
      keys: the axis of the softmax, once it is known.
    """

    scale: float = 1.0
    is_bounded: bool = False
    soft_cap: float | None = None
    bias: tuple[Any, _Labels] | None = None
    masks: tuple[tuple[Any, _Labels, bool], ...] = ()
    low: float | None = None
    keys: _Label | None = None

    @property
    def is_scaling(self) -> bool:
        return self.soft_cap is None and self.bias is None and not self.masks


@dataclasses.dataclass(frozen=True)
class _Role:
    """The part of a value in an attention, in the order "logits", "highest", "centred", "exp",
    "total", "weights"; the labels of its axes, and the form of its logits.
    """

    kind: str
    labels: _Labels
    form: _Form


_Next = _Role | None


def _moved(step: InlinedStep, role: _Role) -> _Next:
    """Returns the role of a value with other axes."""
    params, shape = step.params, step.outputs[0].aval.shape
    if step.name == "transpose":
        labels = [role.labels[axis] for axis in params["permutation"]]
    elif step.name == "broadcast_in_dim":
        labels: list[_Label | None] = [None] * len(shape)
        for axis, label in zip(params["broadcast_dimensions"], role.labels, strict=True):
            labels[int(axis)] = label
    else:  # axes of size 1 come and go
        old = [x for x in zip(step.inputs[0].aval.shape, role.labels, strict=True) if x[0] != 1]
        if [size for size, _ in old] != [size for size in shape if size != 1]:
            return None
        order = iter(old)
        labels = [None if size == 1 else next(order)[1] for size in shape]
    is_repeated = any(a is None and size != 1 for a, size in zip(labels, shape, strict=True))
    if is_repeated and role.kind not in ("highest", "total"):
        return None
    return dataclasses.replace(role, labels=tuple(labels))


def _converted(step: InlinedStep, role: _Role) -> _Next:
    """Returns the role of a cast: the weights alone may be rounded, as they are in a kernel."""
    dtype = step.params["new_dtype"]
    return role if dtype == F32 or (role.kind == "weights" and is_floating_dtype(dtype)) else None


def _stopped(step: InlinedStep, role: _Role) -> _Next:
    return role if role.kind == "highest" else None


def _bounded(step: InlinedStep, role: _Role) -> _Next:
    form = role.form
    if role.kind != "logits" or not form.is_scaling or form.is_bounded:
        return None
    return dataclasses.replace(role, form=dataclasses.replace(form, is_bounded=True))


def _scaled(role: _Role, by: float | None) -> _Next:
    form = role.form
    if role.kind != "logits" or by is None or not by > 0 or not form.is_scaling:
        return None
    if form.is_bounded:
        form = dataclasses.replace(form, soft_cap=by, scale=form.scale * by)
    else:
        form = dataclasses.replace(form, scale=form.scale * by)
    return dataclasses.replace(role, form=form)


def _biased(step: InlinedStep, role: _Role, other: Any) -> _Next:
    form = role.form
    if role.kind != "logits" or form.bias is not None or not step.is_outer:
        return None
    place = next(i for i, x in enumerate(step.inputs) if x is other)
    form = dataclasses.replace(form, bias=(step.equation.invars[place], role.labels))
    return dataclasses.replace(role, form=form)


def _reduced(step: InlinedStep, role: _Role, kinds: tuple[str, str]) -> _Next:
    """Returns the role of a reduction over the keys."""
    axes = [int(axis) for axis in step.params["axes"]]
    if role.kind != kinds[0] or len(axes) != 1:
        return None
    keys = role.labels[axes[0]]
    if keys is None or (role.form.keys is not None and role.form.keys != keys):
        return None
    labels = tuple(label for axis, label in enumerate(role.labels) if axis not in axes)
    form = role.form if role.form.keys else dataclasses.replace(role.form, keys=keys)
    return _Role(kinds[1], labels, form)


def _combined(x: _Role, row: _Role, kinds: tuple[str, str, str]) -> _Next:
    """Returns the role of an operation on logits and on numbers of their rows."""
    if (x.kind, row.kind) != kinds[:2] or len(x.labels) != len(row.labels):
        return None
    expected = tuple(None if label == row.form.keys else label for label in x.labels)
    is_same = dataclasses.replace(x.form, keys=row.form.keys) == row.form
    fits = row.labels == expected
    return _Role(kinds[2], x.labels, row.form) if is_same and fits else None


def _chosen(program: InlinedProgram, step: InlinedStep, roles: dict[Any, _Role]) -> _Next:
    """Returns the role of masked logits: a select of logits or of a large negative number."""
    which, *cases = step.inputs
    places = [i for i, x in enumerate(cases) if not is_literal(x) and x in roles]
    if len(cases) != 2 or len(places) != 1:
        return None
    role, low = roles[cases[places[0]]], program.number(cases[1 - places[0]])
    if role.kind != "logits" or low is None or not low <= _LARGE or which.aval.dtype != bool:
        return None
    if not _repeats(which, step, cases[places[0]]) or program.leaves(which) is None:
        return None
    if role.form.low not in (None, low):
        return None
    masks = (*role.form.masks, (which, role.labels, places[0] == 0))
    return dataclasses.replace(role, form=dataclasses.replace(role.form, masks=masks, low=low))


_ALONE: dict[str, Callable[[InlinedStep, _Role], _Next]] = {
    **dict.fromkeys(primitives.REARRANGES, _moved),
    "convert_element_type": _converted,
    "stop_gradient": _stopped,
    "tanh": _bounded,
    "reduce_max": lambda step, role: _reduced(step, role, ("logits", "highest")),
    "reduce_sum": lambda step, role: _reduced(step, role, ("exp", "total")),
    "exp": lambda _, role: (
        dataclasses.replace(role, kind="exp") if role.kind == "centred" else None
    ),
}
_PAIRS = {"sub": ("logits", "highest", "centred"), "div": ("exp", "total", "weights")}


def _role_of(program: InlinedProgram, step: InlinedStep, roles: dict[Any, _Role]) -> _Next:
    """Returns the role of a step's result, or None for a step that is no part of attention."""
    if len(step.outputs) != 1:
        return None
    given = [None if is_literal(x) else roles.get(x) for x in step.inputs]
    name, known = step.name, [role for role in given if role is not None]
    if name == "select_n":
        return _chosen(program, step, roles)
    if len(step.inputs) == 1:
        rule = _ALONE.get(name)
        return None if rule is None else rule(step, known[0])
    if len(step.inputs) != 2:
        return None
    if len(known) == 2:
        return _combined(known[0], known[1], _PAIRS[name]) if name in _PAIRS else None
    (role,), is_first = known, given[0] is not None
    x, other = step.inputs if is_first else step.inputs[::-1]
    number = program.number(other)
    if name == "max" and role.kind == "highest":
        return role if number is not None and number <= _LOWEST else None
    if name == "mul" or (name == "div" and is_first and number):
        return _scaled(role, number if name == "mul" or number is None else 1 / number)
    return _biased(step, role, other) if name == "add" and _repeats(other, step, x) else None


def _repeats(other: Any, step: InlinedStep, x: Any) -> bool:
    """Returns whether an operand beside logits has their shape, or repeats along some axes."""
    shape = step.outputs[0].aval.shape
    if is_literal(other) or x.aval.shape != shape or len(other.aval.shape) != len(shape):
        return False
    return all(size in (1, whole) for size, whole in zip(other.aval.shape, shape, strict=True))


_LOWEST = float(np.finfo(np.float32).min)


# --------------------------------------------------------------------------------------------------
# The two matmuls, and the layout of their operands
# --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Dot:
    """A matmul of two operands, with labels of their axes and of those of the result."""

    step: InlinedStep
    sides: tuple[_Labels, _Labels]
    out: _Labels


def _labelled(step: InlinedStep) -> _Dot | None:
    """Labels the axes of the first matmul, of one contraction."""
    contracted, batch = step.params["dimension_numbers"]
    if any(len(axes) != 1 for axes in contracted) or step.params.get("out_sharding") is not None:
        return None
    if not all(isinstance(n, int) for x in step.inputs for n in x.aval.shape):  # of `jax.export`
        return None
    sides, free = [], []
    for name, atom, over, shared in zip(
        ("lhs", "rhs"), step.equation.invars, contracted, batch, strict=True
    ):
        labels: list[_Label | None] = [None] * atom.aval.ndim
        labels[over[0]] = _WIDTH
        for i, axis in enumerate(shared):
            labels[axis] = ("batch", i)
        own = [axis for axis, label in enumerate(labels) if label is None]
        for i, axis in enumerate(own):
            labels[axis] = (name, i)
        sides.append(tuple(labels))
        free += [(name, i) for i in range(len(own))]
    shared = [("batch", i) for i in range(len(batch[0]))]
    return _Dot(step, (sides[0], sides[1]), (*shared, *free))


def _weighted(step: InlinedStep, side: int, weights: _Role) -> _Dot | None:
    """Labels the axes of the second matmul, whose operand `side` is the weights."""
    contracted, batch = step.params["dimension_numbers"]
    value = step.equation.invars[1 - side]
    over, shared = contracted[side], batch[side]
    if [weights.labels[axis] for axis in over] != [weights.form.keys]:
        return None
    labels: list[_Label | None] = [None] * value.aval.ndim
    labels[contracted[1 - side][0]] = weights.form.keys
    for axis, of_weights in zip(batch[1 - side], shared, strict=True):
        labels[axis] = weights.labels[of_weights]
    if labels.count(None) != 1 or step.params.get("out_sharding") is not None:
        return None
    labels[labels.index(None)] = _WIDTH
    free = (
        [label for axis, label in enumerate(weights.labels) if axis not in (*over, *shared)],
        [_WIDTH],
    )
    order = free if side == 0 else free[::-1]
    out = (*(weights.labels[axis] for axis in shared), *order[0], *order[1])
    sides = (weights.labels, tuple(labels)) if side == 0 else (tuple(labels), weights.labels)
    return _Dot(step, sides, out)


def _match(program: InlinedProgram, start: InlinedStep) -> Attention | None:
    """Returns the attention whose logits a matmul computes, or None."""
    first = _labelled(start) if start.is_outer and start.outputs[0].aval.dtype == F32 else None
    if first is None:
        return None
    roles = {start.outputs[0]: _Role("logits", first.out, _Form())}
    steps, waiting = [start], sorted(set(program.readers.get(start.outputs[0], ())))
    second, form = None, _Form()
    while waiting:
        place = heapq.heappop(waiting)
        step = program.steps[place]
        if step is steps[-1]:
            continue
        steps.append(step)
        if step.name == "dot_general":
            sides = [i for i, x in enumerate(step.inputs) if not is_literal(x) and x in roles]
            weights = roles[step.inputs[sides[0]]]
            is_last = second is None and len(sides) == 1 and step.is_outer
            second = _weighted(step, sides[0], weights) if is_last else None
            if second is None or weights.kind != "weights":
                return None
            form = weights.form
            continue
        role = _role_of(program, step, roles)
        if role is None:
            return None
        roles[step.outputs[0]] = role
        for reader in program.readers.get(step.outputs[0], ()):
            heapq.heappush(waiting, reader)
    return None if second is None else _attention(program, first, second, form, steps)


def _attention(
    program: InlinedProgram, first: _Dot, second: _Dot, form: _Form, steps: Sequence[InlinedStep]
) -> Attention | None:
    """Returns the attention of two matmuls, unless something else reads what is between them."""
    is_rhs = form.keys is not None and form.keys[0] == "rhs"
    of_query, of_key = first.sides if is_rhs else first.sides[::-1]
    of_value = next(labels for labels in second.sides if _WIDTH in labels)
    layout = _Layout.of(of_query, of_key, of_value, second.out, form.keys, _sizes(first))
    labels = [labels for _, labels, *_ in (*form.masks, *([form.bias] if form.bias else []))]
    if layout is None or any({*each} != {*first.out} for each in labels):
        return None
    scale, operands = form.scale, []
    inner = [step.around for step in steps]
    for side in (0, 1):
        atom, by, before = _unscaled(program, first.step, side)
        operands.append(atom)
        scale, inner = scale * by, [*before, *inner]
    query, key = operands if is_rhs else operands[::-1]
    value = second.step.equation.invars[second.sides.index(of_value)]
    if any(map(is_literal, (query, key, value))):
        return None
    equations = _closed(program, inner, second.step.equation)
    if equations is None:
        return None
    soft_cap = 1.0 if form.is_bounded and form.soft_cap is None else form.soft_cap
    masks = tuple(
        Mask(tuple(program.leaves(x) or ()), layout.pairs(labels), x, program, is_inverted)
        for x, labels, is_inverted in form.masks
    )
    given = (step.params.get("precision") for step in (first.step, second.step))
    return Attention(
        equations,
        layout.operand(query, of_query, layout.queries),
        layout.operand(key, of_key, layout.keys),
        layout.operand(value, of_value, layout.keys),
        layout.operand(second.step.equation.outvars[0], second.out, layout.queries),
        layout.pairs_shape,
        scale,
        soft_cap,
        None if form.bias is None else (form.bias[0], layout.pairs(form.bias[1])),
        masks,
        next((precision for precision in given if precision is not None), None),
        any(program.depends_on_arguments(x) for x, *_ in form.masks),
    )


def _unscaled(
    program: InlinedProgram, dot: InlinedStep, side: int
) -> tuple[Any, float, list[Equation]]:
    """Returns an operand of the first matmul before it was multiplied by a number, the number, and
    the equations in between that the matmul alone reads.
    """
    atom, by, between, is_alone = dot.equation.invars[side], 1.0, [], True
    while not is_literal(atom) and (maker := program.makers.get(atom)) is not None:
        if not (maker.name in primitives.PRODUCTS and maker.is_outer):
            break
        numbers = [program.number(x) for x in maker.inputs]
        at = int(numbers[0] is not None)
        number = numbers[1 - at]
        if numbers[at] is not None or not number or number < 0 or (maker.name == "div" and at):
            break
        is_alone = is_alone and len(program.readers[atom]) == 1
        between += [maker.equation] if is_alone else []
        by = by * number if maker.name == "mul" else by / number
        atom = maker.equation.invars[at]
    return atom, by, between


def _closed(
    program: InlinedProgram, equations: Sequence[Equation], last: Equation
) -> tuple[Equation, ...] | None:
    """Returns equations in the order of the program, or None where others read their results."""
    chosen = {id(equation) for equation in equations}
    made = {v for one in equations if one is not last for v in one.outvars}
    others = [one for one in program.jaxpr.eqns if id(one) not in chosen]
    read = {v for one in others for v in one.invars if not is_literal(v)}
    read |= {v for v in program.jaxpr.outvars if not is_literal(v)}
    if made & read or any(equation.effects for equation in equations):
        return None
    return tuple(one for one in program.jaxpr.eqns if id(one) in chosen)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The axes of an attention, sorted.

    Attributes:
      batch, heads, groups: labels of the batch, of the key heads, and of the queries of one key
        head at one position; the sizes of all are in `sizes`.
      queries, keys: labels of positions.
    """

    batch: tuple[_Label, ...]
    heads: tuple[_Label, ...]
    groups: tuple[_Label, ...]
    queries: _Label
    keys: _Label
    sizes: dict[_Label, int]

    @classmethod
    def of(
        cls,
        of_query: _Labels,
        of_key: _Labels,
        of_value: _Labels,
        out: _Labels,
        keys: Any,
        sizes: dict[_Label, int],
    ) -> _Layout | None:
        """Sorts the axes of the queries. Returns None where keys, values or the result have others.

        The last batch axis is that of heads, unless it is the only one and stands before the
        queries' positions, as in `jnp.einsum("bqd,bkd->bqk", ...)`.
        """
        batch = [label for label in of_query if label is not None and label[0] == "batch"]
        free = [x for x in of_query if x is not None and x not in batch and x != _WIDTH]
        expected = {*batch, keys, _WIDTH}
        if not free or set(of_key) != expected or set(of_value) != expected:
            return None
        if set(out) != {*batch, *free, _WIDTH} or len(out) != len(batch) + len(free) + 1:
            return None
        queries = max(free, key=lambda label: sizes[label])
        order = of_query.index
        has_heads = len(batch) > 1 or (batch and order(batch[-1]) > order(queries))
        heads = batch[-1:] if has_heads else []
        groups = tuple(label for label in free if label != queries)
        rest = tuple(batch[: len(batch) - len(heads)])
        return cls(rest, tuple(heads), groups, queries, keys, sizes)

    @property
    def pairs_shape(self) -> tuple[int, ...]:
        """(batch..., all heads, queries, keys)."""
        all_heads = math.prod(self.sizes[label] for label in (*self.heads, *self.groups))
        batch = [self.sizes[label] for label in self.batch]
        return (*batch, all_heads, self.sizes[self.queries], self.sizes[self.keys])

    def pairs(self, labels: _Labels) -> tuple[int, ...]:
        """Returns the permutation of logits with some labels to the order of a mask's axes."""
        order = (*self.batch, *self.heads, *self.groups, self.queries, self.keys)
        return tuple(labels.index(label) for label in order)

    def operand(self, variable: Any, labels: _Labels, positions: _Label) -> Operand:
        order = (*self.batch, positions, *self.heads, *self.groups, _WIDTH)
        axes = tuple(labels.index(label) for label in order if label in labels)
        sizes = variable.aval.shape
        batch, rest = axes[: len(self.batch) + 1], axes[len(self.batch) + 1 : -1]
        all_heads = math.prod(sizes[axis] for axis in rest)
        return Operand(variable, axes, (*(sizes[a] for a in batch), all_heads, sizes[axes[-1]]))


def _sizes(dot: _Dot) -> dict[_Label, int]:
    """Returns the sizes of the axes of the logits."""
    shape = dot.step.outputs[0].aval.shape
    return {label: size for label, size in zip(dot.out, shape, strict=True) if label is not None}

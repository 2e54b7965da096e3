"""Exponentials, logarithms, roots and squares of half numbers, where their error or their range matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policy.amp.categories import names_of
from policy.inspection.flow import LAYOUT, Flow, is_cotangent, is_matmul, is_narrow, made_of
from policy.inspection.graph import Node, Value, is_joint
from policy.inspection.kinds import FUNCTION, finding
from policy.inspection.operations import is_steep, kind_of, sums
from policy.inspection.report import Finding

_STEEPNESS = (
    "an argument near 10 is rounded by 0.03, which is 3% of its exponential",
    "exponentials overflow above 11, and logarithms are off by their argument's last digit",
)
_SHAPES = frozenset(("reshape", "transpose", "squeeze", "broadcast_in_dim", "expand_dims", "copy"))
_PERIODIC = frozenset(names_of("fp32", "trig"))
_SHIFTS = frozenset(("add", "sub", "max", "abs", "convert_element_type", "mul", "div", "select_n"))


def low_precision_functions(flow: Flow) -> Iterator[Finding]:
    """Functions of half numbers whose rounding is more than that of an activation."""
    for node in flow.graph.nodes:
        if not node.inputs or not is_narrow(node.inputs[0].dtype) or is_cotangent(node) or is_joint(node):
            continue
        reason = _reason(node)
        if reason:
            yield finding(FUNCTION, node, f"{node.name} of {node.inputs[0].dtype}: {reason}")


def _reason(node: Node) -> str:
    """Why a function should not be computed in half, or ""."""
    name, dtype = node.name, node.inputs[0].dtype
    if node.inputs[0].is_literal:
        return ""
    if is_steep(name) and _matters(node):
        steepness = _STEEPNESS[dtype == "float16"]
        return f"{steepness}, and it is summed, divided by or returned. Widen the argument to float32."
    if name in _PERIODIC:
        return "the argument's last digit is a good part of a turn. Compute the angles, and this, in float32."
    if name == "rsqrt" or (name == "sqrt" and _is_statistic(node.inputs[0])):
        limit = "overflows above 65504" if dtype == "float16" else "has 8 significant bits"
        return f"a variance or norm in {dtype} {limit}. Keep statistics in float32, and narrow what they normalise."
    if name == "div" and _is_statistic(node.inputs[1], through_root=True):
        return f"it normalises in {dtype}, by a rounded deviation or norm. Normalise in float32, and narrow the result."
    if _divides_by_dot(node):
        return "a variance or norm of squares that a dot sums in float16 overflows above 65504. Sum squares in float32."
    if _squares(node) and _is_summed(node.out):
        limit = "overflow above 255" if dtype == "float16" else "lose all but 8 bits"
        return f"squares in {dtype} {limit}, and these are summed. Widen to float32 before squaring."
    return ""


def _divides_by_dot(node: Node) -> bool:
    """Whether a node takes a root, a reciprocal or a logarithm of what a dot sums squares to in float16."""
    if node.inputs[0].dtype != "float16":
        return False
    if node.name == "div":
        return _is_statistic(node.inputs[1], through_root=True, of=_is_dot_of_squares) or _is_statistic(
            node.inputs[1], of=_is_dot_of_squares
        )
    exponent = node.params.get("y")
    is_root = node.name in ("sqrt", "cbrt", "pow") or node.name.startswith("log")
    is_reciprocal = node.name == "integer_pow" and isinstance(exponent, int) and exponent < 0
    return (is_root or is_reciprocal) and _is_statistic(node.inputs[0], of=_is_dot_of_squares)


def _is_dot_of_squares(node: Node) -> bool:
    """Whether a node is a matmul of half values with themselves, or of squares with anything."""
    if not is_matmul(node) or not all(is_narrow(value.dtype) for value in node.inputs[:2]):
        return False
    makers = [made_of(value).maker for value in node.inputs[:2]]
    return _are_equal(node.inputs[0], node.inputs[1]) or any(maker is not None and _squares(maker) for maker in makers)


def _are_equal(one: Value, other: Value, depth: int = 12) -> bool:
    """Whether two values are one in whatever shape, or are made of one by the same operations."""
    one, other = _in_any_shape(one), _in_any_shape(other)
    if one is other:
        return True
    first, second = one.maker, other.maker
    if first is None or second is None or not depth or is_joint(first) or is_joint(second):
        return one.is_literal and other.is_literal and bool(one.array == other.array)
    if first.name != second.name or len(first.inputs) != len(second.inputs) or not first.inputs:
        return False
    if str(first.params) != str(second.params) or _index(one) != _index(other):
        return False
    return all(_are_equal(a, b, depth - 1) for a, b in zip(first.inputs, second.inputs, strict=True))


def _in_any_shape(value: Value) -> Value:
    while value.maker is not None and value.maker.name in _SHAPES:
        value = value.maker.inputs[0]
    return value


def _index(value: Value) -> int:
    """The place of a value among the results of the operation that makes it."""
    return 0 if value.maker is None else [out is value for out in value.maker.outputs].index(True)


def _is_reduction(node: Node) -> bool:
    return kind_of(node.name) == "reduction"


def _squares(node: Node) -> bool:
    if node.name == "mul":
        return _are_equal(node.inputs[0], node.inputs[1])
    return node.name == "square" or (node.name == "integer_pow" and node.params.get("y") == 2)


def _is_summed(value: Value) -> bool:
    """Whether a value is summed, be it cast, scaled or selected from before."""
    waiting, seen = [value], {id(value)}
    while waiting:
        for reader in waiting.pop().readers:
            if not is_joint(reader) and sums(reader.site.equation):
                return True
            if not is_cotangent(reader) and _passes(reader, adds=False):
                fresh = [out for out in reader.outputs if id(out) not in seen]
                seen.update(map(id, fresh))
                waiting.extend(fresh)
    return False


def _is_statistic(value: Value, through_root: bool = False, of: Callable[[Node], bool] = _is_reduction) -> bool:
    """Whether a value is a sum, shifted and scaled; `through_root`: the square root of one. `of`: tells what sums."""
    waiting, seen = [(value, False)], {id(value)}
    while waiting:
        value, has_root = waiting.pop()
        maker = value.maker
        if maker is None:
            continue
        if not is_joint(maker) and of(maker):
            if has_root or not through_root:
                return True
            continue
        is_root = through_root and maker.name == "sqrt"
        for operand in maker.inputs if is_root or maker.name in LAYOUT or maker.name in _SHIFTS else ():
            if id(operand) not in seen:
                seen.add(id(operand))
                waiting.append((operand, has_root or is_root))
    return False


def _matters(node: Node) -> bool:
    """Whether a result is more than an activation: it is summed, divided by, returned, or a logarithm is taken of it.

    An exponential is followed as long as it is scaled and selected from; a logarithm where it is added to, too.
    """
    if node.name == "expm1" and _is_guarded(node.inputs[0]):
        return False
    is_logarithm = node.name.startswith("log")
    is_softplus = node.name == "exp" and _is_never_positive(node.inputs[0])
    waiting, seen = list(node.outputs), {id(out) for out in node.outputs}
    while waiting:
        value = waiting.pop()
        if value.is_output:
            return True
        for reader in value.readers:
            if is_matmul(reader) or is_cotangent(reader):
                continue
            if not is_joint(reader) and sums(reader.site.equation):
                return True
            if _is_kept_only(reader) or (is_softplus and reader.name == "log1p" and not _matters(reader)):
                continue
            if is_steep(reader.name) or (reader.name == "div" and reader.inputs[1] is value):
                return True
            if is_joint(reader) or _passes(reader, is_logarithm):
                fresh = [out for out in reader.outputs if id(out) not in seen]
                seen.update(map(id, fresh))
                waiting.extend(fresh)
    return False


def _is_never_positive(value: Value) -> bool:
    """Whether a value is the negative of an absolute one, as in the stable form of ``log(1 + exp(x))``."""
    value = made_of(value)
    if value.maker is None or value.maker.name != "neg":
        return False
    inner = made_of(value.maker.inputs[0])
    return inner.maker is not None and inner.maker.name == "abs"


def _is_kept_only(node: Node) -> bool:
    """Whether what a node makes is read in the backward pass alone: a derivative that the forward pass saves."""
    waiting, seen = list(node.outputs), {id(out) for out in node.outputs}
    is_read = False
    while waiting:
        value = waiting.pop()
        if value.is_output:
            return False
        for reader in value.readers:
            is_read = True
            if is_cotangent(reader):
                continue
            if reader.name not in LAYOUT and reader.name not in ("mul", "neg", "select_n") and not is_joint(reader):
                return False
            fresh = [out for out in reader.outputs if id(out) not in seen]
            seen.update(map(id, fresh))
            waiting.extend(fresh)
    return is_read


def _passes(reader: Node, adds: bool) -> bool:
    """Whether what a node makes of a value is that value still, moved, scaled or selected from."""
    if reader.name in LAYOUT or reader.name in ("convert_element_type", "select_n", "mul", "neg", "max", "min", "div"):
        return True
    is_sum = reader.name in ("add", "sub", "add_any")
    return is_sum and (adds or any(value.is_literal for value in reader.inputs))


def _is_guarded(value: Value) -> bool:
    """Whether a value was kept from being large by a `where` or a `minimum`, as elu does it."""
    while value.maker is not None and (value.maker.name in LAYOUT or value.maker.name in ("mul", "div", "neg")):
        value = value.maker.inputs[0]
    return value.maker is not None and value.maker.name in ("select_n", "min", "clamp")

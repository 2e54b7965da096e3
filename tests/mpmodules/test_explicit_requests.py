"""What a line says explicitly about dtypes is obeyed, or its loss is told: by each way of applying
a policy, judged by traced programs. Most of the cells are in the slow part.
"""

import dataclasses
import functools
import gc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import DtypePolicyWarning, autocast
from tests.mpmodules.explicit_requests import (
    COLUMNS,
    FIELDS,
    MISTAKES,
    REQUESTS,
    Request,
    X,
    at,
    in_float32,
    plain,
    program,
)

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")
MOVES = ("reshape", "broadcast_in_dim", "squeeze", "transpose", "slice", "concatenate", "tile")
CASTS = ("convert_element_type", "reduce_precision")
HALF = ("bfloat16", "float16")


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program whose calls are inlined, and the operation that made it, or None."""

    aval: Any
    made: "Op | None" = None

    @property
    def dtype(self) -> str:
        return str(getattr(self.aval, "dtype", ""))


@dataclasses.dataclass(eq=False)
class Op:
    name: str
    params: Any
    inputs: list[Value]

    def is_matmul(self, *sizes: int) -> bool:
        """Whether it is a matmul with an axis of one of the sizes."""
        found = {size for value in self.inputs for size in value.aval.shape}
        return self.name in MATMULS and bool(found.intersection(sizes))

    @property
    def narrows(self) -> bool:
        return self.name == "reduce_precision" and self.params["mantissa_bits"] <= 10

    @property
    def said(self) -> tuple[str, str, str]:
        """The dtypes of a matmul's operands, and its precision."""
        given = self.params["precision"]
        pair = given if isinstance(given, tuple) else (given,)
        names = sorted({getattr(each, "name", str(each)) for each in pair})
        return self.inputs[0].dtype, self.inputs[1].dtype, ",".join(names)


def bodies(eqn: Any) -> list[tuple[Any, int]]:
    """Returns the jaxprs that an equation runs, and how many of its inputs they don't take."""
    params = eqn.params
    if eqn.primitive.name == "cond":
        return [(branch, 1) for branch in params["branches"]]
    if eqn.primitive.name == "while":
        return [(params["body_jaxpr"], params["cond_nconsts"])]
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    return [(params[name], 0) for name in names if hasattr(params.get(name), "eqns")]


def inline(jaxpr: Any, arguments: list[Value], ops: list[Op]) -> list[Value]:
    """Appends the operations of a jaxpr, and returns its results. Loops run once."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env = {var: Value(var.aval) for var in jaxpr.constvars}
    env |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(var: Any) -> Value:
        return Value(var.aval) if isinstance(var, jax.extend.core.Literal) else env[var]

    for eqn in jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        inner = bodies(eqn)
        for body, skipped in inner:
            results = inline(body, inputs[skipped:], ops)
            env |= dict(zip(eqn.outvars, results, strict=True))
        if not inner:
            ops.append(Op(eqn.primitive.name, eqn.params, inputs))
            env |= {var: Value(var.aval, ops[-1]) for var in eqn.outvars}
    return list(map(read, jaxpr.outvars))


@dataclasses.dataclass
class Facts:
    """A model's program with its gradients: y, the matmul after it, and the request's operations.

    Attributes:
      ops: all operations; y: the request's result.
      more, params: dtypes of further results, and of parameters by path.
    """

    ops: list[Op]
    y: Value
    more: set[str]
    params: dict[str, str]

    def __post_init__(self) -> None:
        self.of_y = list(self.slice(self.y))
        mine = [op for op in self.ops if op.name in MATMULS and not op.is_matmul(7, 13)]
        ahead = [op for op in self.of_y if op in mine]
        self.forward = {op.said for op in ahead}
        self.backward = {op.said for op in mine if op not in ahead}
        self.last = ahead[0].said if ahead else None
        self.first, self.following = (
            next(op.said[:2] for op in self.ops if op.is_matmul(size)) for size in (7, 13)
        )
        self.rounded = self.is_rounded_since(ahead) if ahead else is_rounded(self.y)
        self.sharded = any(op.params.get("out_sharding") is not None for op in ahead)

    def slice(self, value: Value, seen: set[int] | None = None) -> Iterator[Op]:
        """Yields what a value is computed by, the last operation first, up to the first matmul."""
        seen = set() if seen is None else seen
        op = value.made
        if op is not None and id(op) not in seen and not op.is_matmul(7):
            seen.add(id(op))
            yield op
            for each in op.inputs:
                yield from self.slice(each, seen)

    def is_rounded_since(self, matmuls: list[Op]) -> bool:
        """Whether y holds 16 bits of what its last matmuls accumulated."""

        @functools.cache
        def depends(value: Value) -> bool:
            op = value.made
            return op is not None and (op in matmuls or any(map(depends, op.inputs)))

        @functools.cache
        def rounds(value: Value) -> bool:
            op = value.made
            if op is None or not depends(value):
                return False
            is_own = value.dtype in HALF or op.narrows
            return is_own or (op not in matmuls and any(map(rounds, op.inputs)))

        return rounds(self.y)

    @property
    def own(self) -> dict[str, set[str]]:
        """The dtypes of the floating operands of the request's operations, by name."""
        found: dict[str, set[str]] = {}
        for op in self.of_y:
            floats = {value.dtype for value in op.inputs if "float" in value.dtype}
            found.setdefault(op.name, set()).update(floats)
        return found

    @property
    def reduced(self) -> set[tuple[int, int]]:
        """The bits of exponents and mantissas that operations leave."""
        ops = [op for op in self.of_y if op.name == "reduce_precision"]
        return {(op.params["exponent_bits"], op.params["mantissa_bits"]) for op in ops}

    @property
    def backward_sums(self) -> set[str]:
        """The dtypes of backward's sums over the 8 features."""
        sums = [op for op in self.ops if op.name == "reduce_sum" and op not in self.of_y]
        facts = [(op.inputs[0].aval.shape, op.params["axes"], op.inputs[0].dtype) for op in sums]
        return {dtype for shape, axes, dtype in facts if {shape[axis] for axis in axes} == {8}}

    @property
    def sums_differences(self) -> bool:
        """Whether a sum is of what a difference went into, as of a variance in two passes."""
        sums = [op.inputs[0] for op in self.of_y if op.name == "reduce_sum"]
        return any(op.name == "sub" for value in sums for op in self.slice(value))


def is_rounded(value: Value) -> bool:
    """Whether a value is a cast of 16 bits, up to moves."""
    op = value.made
    if value.dtype in HALF or (op and op.narrows):
        return True
    return op is not None and op.name in MOVES + CASTS and any(map(is_rounded, op.inputs))


def facts_of(fn: Callable[..., Any], params: Any, *extra: Any) -> Facts:
    """Returns the facts of a function of parameters and inputs, with its gradients."""

    def both(params: Any, x: Any, *extra: Any) -> Any:
        def results(params: Any, x: Any) -> Any:
            y, z, more = fn(params, x, *extra)
            return (y, z), more

        out, pull, more = jax.vjp(results, params, x, has_aux=True)
        return out[0], more, pull(jax.tree.map(jnp.ones_like, out))

    closed, shapes = jax.make_jaxpr(both, return_shape=True)(params, X, *extra)
    ops: list[Op] = []
    y, *_ = inline(closed, [Value(var.aval) for var in closed.jaxpr.invars], ops)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    stored = {jax.tree_util.keystr(path): str(leaf.dtype) for path, leaf in leaves}
    return Facts(ops, y, {str(leaf.dtype) for leaf in jax.tree.leaves(shapes[1])}, stored)


def outcome(request: Request, column: str) -> str:
    """Returns "obeyed", "obeyed, told", "told", "silent", or an error."""
    as_users = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with as_users[0], as_users[1], request.around(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            facts = facts_of(*program(request, column), *request.extra)
        except (TypeError, ValueError) as error:
            return f"rejected: {error}"
    told = any(issubclass(each.category, DtypePolicyWarning) for each in caught)
    return ", ".join(["obeyed"] * request.check(facts) + ["told"] * told) or "silent"


def outcome_of_mistake(run: Callable[[], Any], words: str) -> str:
    """Returns "told" for one warning of these words, "rejected", "silent", or the other words."""
    with jax.numpy_dtype_promotion("standard"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
            gc.collect()
        except (TypeError, ValueError, AttributeError) as error:
            return "rejected" if re.search(words, str(error)) else f"error: {error}"
    found = [str(each.message) for each in caught if issubclass(each.category, UserWarning)]
    if not found:
        return "silent"
    return "told" if len(found) == 1 and re.search(words, found[0]) else f"other words: {found}"


@jax.custom_vjp
def wide_dot(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(h, w, precision="highest", preferred_element_type=jnp.float32)


def half_gradients(operands: Any, g: jax.Array) -> Any:
    return jax.vjp(jnp.matmul, *operands)[1](g.astype(jnp.bfloat16))


WIDE = at("HIGHEST")
wide_dot.defvjp(lambda h, w: (wide_dot(h, w), (h, w)), half_gradients)


@pytest.mark.parametrize(
    ("request_by_hand", "checks"),
    {
        wide_dot: [WIDE],
        lambda h, w: wide_dot(h, w).astype(h.dtype): [plain],
        lambda h, w: jnp.dot(*(v.astype(jnp.float32) for v in (h, w)), precision="highest"): [
            in_float32
        ],
        lambda h, w: h.astype(jnp.float32) @ w.astype(jnp.float32): [],
        jnp.matmul: [plain],
    }.items(),
)
def test_checks_tell_programs_by_hand_apart(request_by_hand, checks):
    def model(params: Any, x: Any) -> Any:
        a, w, b, x = (value.astype(jnp.bfloat16) for value in (*params, x))
        y = request_by_hand(x @ a, w)
        return y.astype(jnp.float32), (y.astype(jnp.bfloat16) @ b).astype(jnp.float32), ()

    facts = facts_of(model, [jnp.ones(shape) for shape in ((7, 8), (8, 10), (10, 13))])
    assert [check for check in (WIDE, plain, in_float32) if check(facts)] == checks


def cells() -> Iterator[Any]:
    """Yields each request by each way. A fifth of them is in the fast part: each request once."""
    for place, request in enumerate(REQUESTS.values()):
        for column in request.columns:
            is_fast = COLUMNS[place % 5] == column or len(request.columns) < 3
            marks = [] if is_fast else [pytest.mark.slow]
            yield pytest.param(request, column, id=f"{request.name}-{column}", marks=marks)


@pytest.mark.parametrize(("request_", "column"), list(cells()))
def test_a_request_is_obeyed_or_told(request_, column):
    found = outcome(request_, column)
    assert found.partition(":")[0] in request_.expect.get(column, "obeyed").split("|"), found


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_or_rejected(name):
    run, wanted, words = MISTAKES[name]
    assert outcome_of_mistake(run, words) == wanted


def casting(h: jax.Array, w: jax.Array) -> jax.Array:
    return h.astype(jnp.float32) @ w.astype(jnp.float32)


def test_a_function_with_a_custom_vjp_obeys_casts_while_it_is_differentiated():
    function = jax.custom_vjp(casting)
    function.defvjp(lambda h, w: (casting(h, w), (h, w)), lambda kept, g: (g @ kept[1].T, None))

    def differentiated(h: jax.Array, w: jax.Array) -> Any:
        return jax.vjp(autocast(lambda h, w: function(h, w), "mixed_bfloat16"), h, w)[0]

    closed = jax.make_jaxpr(differentiated)(jnp.ones((2, 3)), jnp.ones((3, 4)))
    ops: list[Op] = []
    inline(closed, [Value(var.aval) for var in closed.jaxpr.invars], ops)
    assert {op.said for op in ops if op.name in MATMULS} == {("float32", "float32", "HIGHEST")}


def test_a_cast_in_a_function_that_does_not_run_in_compute_dtype_is_told():
    def function(h: jax.Array, w: jax.Array) -> jax.Array:
        assert h.dtype == jnp.float32
        return h.astype(jnp.float32) @ w.astype(jnp.float32)

    with pytest.warns(DtypePolicyWarning, match=r"function, at .*can't be traced in bfloat16"):
        jax.eval_shape(autocast(function, "mixed_bfloat16"), jnp.ones((2, 3)), jnp.ones((3, 4)))


class Model(flax_linen.Module):
    dtype: Any = jnp.float32
    head_dtype: Any = jnp.float32

    @flax_linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = flax_linen.Embed(8, 8, dtype=self.dtype)(x)
        x = flax_linen.LayerNorm(dtype=self.dtype)(flax_linen.Dense(8, dtype=self.dtype)(x))
        return flax_linen.Dense(8, dtype=self.head_dtype)(x)


@pytest.mark.parametrize("dtype", [jnp.float32, None])
def test_autocast_tells_a_float32_layer_only_beside_others(dtype):
    model, tokens = Model(dtype), jnp.ones(3, int)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(autocast(model.apply, "mixed_bfloat16"), variables, tokens)
    told = [str(each.message) for each in caught if each.category is DtypePolicyWarning]
    assert len(told) == (dtype is None), told


@pytest.mark.parametrize(
    ("line", "dtype"),
    {
        "h.astype(jnp.float32) @ w.astype(jnp.float32)": "float32",
        "jnp.asarray(h, 'float32') @ jnp.asarray(w, dtype=np.float32)": "float32",
        "jnp.float32(h) @ jnp.float32(w)": "float32",
        "h.astype(dtype) @ w.astype(dtype)": "bfloat16",
        "jnp.asarray(h, self.dtype) @ jnp.asarray(w, dtype=self.dtype)": "bfloat16",
        "jnp.sin(h.astype(jnp.bfloat16)).astype(dtype) @ jnp.cos(w).astype(dtype)": "bfloat16",
        "lax.convert_element_type(h, dtype) @ lax.convert_element_type(w, dtype)": "bfloat16",
    }.items(),
)
def test_a_literal_is_obeyed_and_a_variable_left_to_the_policy_in_code_without_source(line, dtype):
    names = {"jnp": jnp, "np": np, "lax": jax.lax, "fields": FIELDS}
    exec(f"def request(h, w, dtype=jnp.float32, self=fields):\n    return {line}", names)
    closed = jax.make_jaxpr(autocast(lambda h, w: names["request"](h, w), "mixed_bfloat16"))(
        jnp.ones((2, 3)), jnp.ones((3, 4))
    )
    ops: list[Op] = []
    inline(closed, [Value(var.aval) for var in closed.jaxpr.invars], ops)
    assert {op.said[:2] for op in ops if op.name in MATMULS} == {(dtype, dtype)}


@pytest.mark.parametrize("name", ["linen", "nnx", "ported linen", "ported nnx"])
def test_a_layer_that_is_given_a_cast_input_is_told_and_a_normalization_not(name):
    of_ports, api = name.startswith("ported"), name.split()[-1]
    x = jnp.ones((2, 8))

    def module(is_normed: bool) -> Any:
        if api == "nnx":
            wide = nnx_router(flax_nnx if of_ports else nnx, is_normed)
            return nnx.apply_policy(wide, "mixed_bfloat16")
        wide = linen_router(flax_linen if of_ports else linen)(is_normed)
        variables = wide.init(jax.random.key(0), x)
        ported = linen.apply_policy(wide, "mixed_bfloat16")
        return lambda x: ported.apply(variables, x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(module(True), x)
    with pytest.warns(DtypePolicyWarning, match="A layer, called at .*full_precision"):
        jax.eval_shape(module(False), x)


def linen_router(api: Any) -> Any:
    class Router(api.Module):
        is_normed: bool

        @api.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32)
            return api.Dense(3)(api.LayerNorm()(x) if self.is_normed else x)

    return Router


def nnx_router(api: Any, is_normed: bool) -> Any:
    class Router(api.Module):
        def __init__(self) -> None:
            self.gate, self.norm = (
                api.Linear(8, 3, rngs=api.Rngs(0)),
                api.LayerNorm(8, rngs=api.Rngs(0)),
            )

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32)
            return self.gate(self.norm(x) if is_normed else x)

    return Router()

"""What lines of a model say explicitly about dtypes, as data: `REQUESTS` and `MISTAKES`.

A request stands between two plain matmuls, of 7 and of 13 features: `h = x @ a`, `y = request(h)`,
`y @ b`. Matmuls without these two sizes are the request's own. Its outcome is to be "obeyed" (and
no warning), "obeyed, told", "told" or "rejected", or one of several of these, joined by ``|``.
"""

# Classes are made of each of Flax's APIs, and wrong calls are among the requests.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace as Namespace
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import policy
from mpmodules import linen, nnx
from policy import autocast, full_precision, set_policy, use_policy
from tests.mpmodules.apis import ONES, Part, Text, dense, layer, layer_norm, weight

Check = Callable[[Any], bool]
f32, bf16, f16, HIGHEST = jnp.float32, jnp.bfloat16, jnp.float16, lax.Precision.HIGHEST
MIXED, WIDER, LOUD = "mixed_bfloat16", "p=f32,c=bf16,o=f32", "obeyed|obeyed, told|told|rejected"
COLUMNS = ("linen", "nnx", "port_linen", "port_nnx", "autocast")
OURS, PORTS = COLUMNS[:2], COLUMNS[2:4]
LINEN, NNX = COLUMNS[::2], (*COLUMNS[1::2], "autocast")
FIELDS = Namespace(dtype=f32)  # of a model, for the policy to replace
KEY, X, SHAPES = jax.random.key(0), jnp.ones((2, 5, 7)), {"a": (7, 8), "w": (8, 10), "b": (10, 13)}


@dataclasses.dataclass(frozen=True)
class Request:
    """A line.

    Attributes:
      name: the line, about.
      check: whether the facts of a program show that it is obeyed.
      body: own code, of `h`, a weight and `extra` arrays.
      layer: what is called instead, by `call`: of nnx or jnp, the layer, `h` and `extra`.
      expect: the outcome, by column; else "obeyed".
      columns: the ways of applying a policy that have it.
      attributes, weight: of the model's class, and options of the weight.
      around: is entered around everything.
    """

    name: str
    check: Check
    body: Callable[..., Any] = jnp.matmul
    layer: Any = None
    call: Callable[..., Any] = lambda ns, layer, h: layer(h)
    policy: str = MIXED
    rules: Mapping[str, str] | None = None
    expect: Mapping[str, str] = dataclasses.field(default_factory=dict)
    columns: tuple[str, ...] = COLUMNS
    attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: tuple[Any, ...] = ()
    around: Callable[[], Any] = contextlib.nullcontext

    def text(self, ns: Any) -> Text:
        """The model: returns y, the plain matmul of it, and further results."""

        def call(model: Any, x: Any, *extra: Any) -> Any:
            a, w, b = map(array, (model.a, model.w, model.b))
            h = x @ a
            y = self.call(ns, model.layer, h, *extra) if self.layer else self.body(h, w, *extra)
            y, *more = y if isinstance(y, tuple) else (y,)
            return y, y @ b, more

        options = {"w": self.weight}
        parts: Any = {"layer": self.layer} if self.layer else {}
        for name, shape in SHAPES.items():
            parts[name] = weight(*shape, init=ONES, **options.get(name, {}))
        return Text(call, attributes=self.attributes, **parts)


def array(value: Any) -> Any:
    return value[...] if isinstance(value, flax.nnx.Variable) else value


def program(request: Request, column: str) -> tuple[Callable[..., Any], Any]:
    """Returns a function of parameters, inputs and `extra`, and parameters."""
    transform = partial(autocast, policy=request.policy, rules=request.rules)
    if column == "autocast" and not request.layer:
        weights = {name: jnp.ones(shape, f32) for name, shape in SHAPES.items()}
        call = request.text(jnp).call
        return transform(lambda weights, *args: call(Namespace(**weights), *args)), weights
    if column.endswith("nnx") or request.columns == NNX:
        return nnx_program(request, column, transform)
    net = request.text(linen).linen_class(linen if column == "linen" else flax.linen)()
    if column == "port_linen":
        net = linen.apply_policy(net, request.policy, request.rules)
    scope = use_policy(request.policy, request.rules) if column == "linen" else use_policy(None)
    variables = scope(partial(jax.eval_shape, net.init))(KEY, X, *request.extra)
    return (transform(net.apply) if column == "autocast" else scope(net.apply)), variables


def nnx_program(request: Request, column: str, transform: Any) -> tuple[Callable[..., Any], Any]:
    ns = nnx if column == "nnx" else flax.nnx
    is_built = column == "nnx" and request.rules is None  # a rule's path exists in a made model
    options: Any = {"dtype_policy": request.policy} if is_built else {}
    model = request.text(ns).nnx_class(ns)(rngs=flax.nnx.Rngs(0), **options)
    if column != "autocast" and not is_built:
        model = nnx.apply_policy(model, request.policy, request.rules)
    graph, params, rest = flax.nnx.split(model, flax.nnx.Param, ...)

    def call(params: Any, *args: Any) -> Any:
        merged = flax.nnx.merge(graph, params, rest, copy=True)
        return (transform(merged) if column == "autocast" else merged)(*args)

    return call, params


# ------------------------------------------------------------------------------ checks of programs


def wide(facts: Any, precision: str = "None") -> bool:
    """16-bit operands, forward and backward, at a precision, and an unrounded float32 result."""
    dots, is_at = facts.forward | facts.backward, {dot[2] for dot in facts.forward} == {precision}
    operands = {dtype for dot in dots for dtype in dot[:2]} | set(facts.following)
    return operands == {"bfloat16"} and is_at and not facts.rounded


def at(precision: str) -> Check:
    return lambda facts: wide(facts, precision)


def at_as_jax(precision: str) -> Check:
    """16-bit operands at a precision, and the result that JAX gives for them."""
    return lambda facts: in_bf16(facts) and {dot[2] for dot in facts.forward} == {precision}


def never(facts: Any) -> bool:
    return False


def only_in_float32(facts: Any) -> bool:
    """The request's matmuls, forward and backward, and no others."""
    dots, highest = facts.forward | facts.backward, ("float32", "float32", "HIGHEST")
    return dots == {highest} and facts.following == ("bfloat16", "bfloat16")


def in_float32(facts: Any) -> bool:
    return only_in_float32(facts) and unrounded(facts)


def multiplies(facts: Any, dtype: str) -> bool:
    return {dot[:2] for dot in facts.forward} == {(dtype, dtype)}


def in_bf16(facts: Any) -> bool:
    return multiplies(facts, "bfloat16")


def plain(facts: Any) -> bool:
    """As where nothing is said."""
    return in_bf16(facts) and facts.rounded


def as_met(facts: Any) -> bool:
    return multiplies(facts, "float32") and unrounded(facts)


def unrounded(facts: Any) -> bool:
    return not facts.rounded


def rounded(facts: Any) -> bool:
    return facts.rounded


def has(name: str, dtype: str = "float32") -> Check:
    """All operations of the request that have a name run in a dtype."""
    return lambda facts: facts.own.get(name) == {dtype}


def stores(dtype: str, name: str) -> Check:
    return lambda facts: {kept for path, kept in facts.params.items() if name in path} == {dtype}


def returns_bf16(facts: Any) -> bool:
    return facts.more == {"bfloat16"}


# ---------------------------------------------------------------------------------------- own code


def conv(h: Any, w: Any, **options: Any) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(h, w[None], (1,), "SAME", dimension_numbers=numbers, **options)


def dot_general(h: Any, w: Any, **options: Any) -> Any:
    return lax.dot_general(h, w, (((h.ndim - 1,), (0,)), ((), ())), **options)


def within(context: Callable[[], Any], call: Any = lambda ns, layer, h: layer(h)) -> Any:
    def inside(*args: Any) -> Any:
        with context():
            return call(*args)

    return inside


def cast(*operands: Any) -> Any:
    return [operand.astype(f32) for operand in operands]


def cast_both(h: Any, w: Any) -> Any:
    return h.astype(f32) @ w.astype(f32)


def promote(h: Any, w: Any) -> Any:
    dtype = jnp.promote_types(h.dtype, f32)
    return h.astype(dtype) @ w.astype(dtype)


def promote_operands(h: Any, w: Any, dtype: Any = None) -> Any:
    dtype = jnp.promote_types(h.dtype, w.dtype) if dtype is None else dtype
    return h.astype(dtype) @ w.astype(dtype)


def closure(h: Any, w: Any) -> Any:
    w = w.astype(f32)
    return jax.jit(lambda h: h.astype(f32) @ w)(h)


def local_constant(h: Any, w: Any) -> Any:
    wanted = f32
    return h.astype(wanted) @ w.astype(wanted)


def choice(h: Any, w: Any, dtype: Any = None) -> Any:
    dtype = dtype or f32
    return h.astype(dtype) @ w.astype(dtype)


@partial(jax.jit, static_argnames="dtype")
def jitted_in(h: Any, w: Any, dtype: Any) -> Any:
    return h.astype(dtype) @ w.astype(dtype)


def rows(h: Any, w: Any) -> Any:
    rows = jnp.take(w.astype(f32), np.arange(8)[::-1], axis=0)
    return h.astype(f32) @ rows


def rotated(x: Any) -> Any:
    angle = jnp.arange(x.shape[-1] / 2, dtype=f32)
    a, b = jnp.split(x.astype(f32), 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a], -1)


def scan_of_matrices(h: Any, w: Any) -> Any:
    matrices = jnp.einsum("td,ij->tij", h[0].astype(f32), w.astype(f32)[:, :8])
    return h @ lax.associative_scan(jnp.matmul, matrices)[-1, :, :1] * jnp.ones(10)


def one_branch(h: Any, w: Any) -> Any:
    dot = partial(jnp.dot, preferred_element_type=f32)
    return lax.cond(h[0, 0, 0] > 0, dot, lambda h, w: ten(h), h, w)


def without_policy(h: Any, w: Any) -> Any:
    with use_policy(None):
        return h @ w


def in_float32_block(h: Any, w: Any) -> Any:
    with use_policy("float32"):
        return h @ w


def angles(h: Any, w: Any) -> Any:
    positions, frequencies = jnp.arange(5)[:, None], 100.0 ** -jnp.arange(10.0)[None]
    return ten(h) + jnp.sin(jnp.matmul(positions.astype(f32), frequencies, precision="highest"))


def top_cast(h: Any, w: Any) -> Any:
    h = h.astype(f32)
    return (jnp.sin(h) + h) @ w


def times(h: Any, w: Any, reduce: Any = jnp.sum, **options: Any) -> Any:
    return reduce(h[..., None] * w, 2, **options)


def ten(h: Any) -> Any:
    return jnp.tile(h, (1, 1, 2))[..., :10]


def preferring(f: Any) -> Any:
    return lambda h, w: f(h, w, preferred_element_type=f32)


def carried(h: Any, w: Any, carry: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        carry = (carry + row @ w).astype(carry.dtype)
        return carry, carry

    carry, y = lax.scan(step, carry, h[0])
    return y, carry


def cached(h: Any, w: Any, cache: Any) -> Any:
    cache = cache.at[:, :5].set((h @ w).astype(cache.dtype))
    return cache[:, :5].astype(h.dtype), cache


def custom_jvp(f: Any) -> Any:
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return wrapped


@jax.custom_vjp
def casts_backward(h: Any, w: Any) -> Any:
    return h @ w


def backward_of_casts(operands: Any, g: Any) -> Any:
    h, w = operands
    of_h = g.astype(f32) @ w.astype(f32).T
    of_w = jnp.einsum("btd,btf->df", h.astype(f32), g.astype(f32))
    return of_h.astype(h.dtype), of_w.astype(w.dtype)


casts_backward.defvjp(lambda h, w: (h @ w, (h, w)), backward_of_casts)


def one_in_float32_backward(facts: Any) -> bool:
    return in_bf16(facts) and {dot[:2] for dot in facts.backward} == {("float32", "float32")}


def mesh() -> Any:
    return jax.set_mesh(jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,)))


def at_highest() -> Any:
    return jax.default_matmul_precision("highest")


# fmt: off
highest, preferred = {"precision": "highest"}, {"preferred_element_type": f32}
OPERATIONS: dict[str, Callable[..., Any]] = {  # of h, w and options
    "jnp.dot": jnp.dot, "jnp.matmul": jnp.matmul, "lax.dot_general": dot_general, "lax.conv": conv,
    "einsum": partial(jnp.einsum, "btd,df->btf"), "tensordot": partial(jnp.tensordot, axes=1),
    "inner": lambda h, w, **options: jnp.inner(h, w.T, **options),
    "ragged_dot": lambda h, w, **options: lax.ragged_dot(h[0], w[None], np.array([5]), **options),
}
SAID: dict[str, tuple[Callable[..., Any], Check]] = {
    "casts": (cast_both, in_float32), "full_precision(f)": (full_precision(jnp.matmul), in_float32),
    "precision=": (partial(jnp.dot, **highest), at("HIGHEST")),
    "preferred=": (lambda h, w: jnp.dot(h, w, preferred_element_type=f32), wide),
}
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jax.jit": jax.jit, "jax.checkpoint": jax.checkpoint, "jax.custom_jvp": custom_jvp,
    "jax.vmap": lambda f: jax.vmap(f, (0, None)),
    "lax.scan": lambda f: lambda h, w: lax.scan(lambda c, row: (c, f(row, w)), 0, h)[1],
    "lax.cond": lambda f: lambda h, w: lax.cond(h[0, 0, 0] > 0, f, f, h, w),
}
BODIES: dict[str, tuple[Check, Callable[..., Any]]] = {
    "x.astype(f32) @ w.astype(f32)": (in_float32, cast_both),
    "jnp.asarray(x, f32)": (in_float32, lambda h, w: jnp.asarray(h, f32) @ jnp.asarray(w, f32)),
    "jnp.float32(x)": (in_float32, lambda h, w: f32(h) @ f32(w)),
    "convert_element_type": (
        in_float32, lambda h, w: jnp.matmul(*(lax.convert_element_type(v, f32) for v in (h, w)))),
    "casts of a helper": (in_float32, lambda h, w: jnp.matmul(*cast(h, w))),
    "casts by tree.map": (in_float32, lambda h, w: jnp.dot(*jax.tree.map(f32, (h, w)))),
    "a cast of a closure": (in_float32, closure),
    "casts in einsum": (in_float32, lambda h, w: jnp.einsum("btd,df->btf", *cast(h, w))),
    "casts in a convolution": (in_float32, lambda h, w: conv(*cast(h, w))),
    "casts to promote_types": (in_float32, promote),
    "casts to a field": (
        plain,
        lambda h, w, fields=FIELDS: h.astype(fields.dtype) @ w.astype(fields.dtype),
    ),
    "casts to a local variable": (in_float32, local_constant),
    "casts to an argument or float32": (plain, choice),
    "casts of a jitted function to its argument": (
        in_float32, lambda h, w: jitted_in(h, w, dtype=f32)),
    "promote_dtype": (
        in_float32, lambda h, w: jnp.matmul(*flax.linen.dtypes.promote_dtype(h, w, dtype=f32))),
    "optax.tree.cast": (in_float32, lambda h, w: jnp.matmul(*optax.tree.cast((h, w), f32))),
    "casts and rows of a weight": (in_float32, rows),
    "use_policy(None)": (in_float32, without_policy),
    "use_policy('float32')": (in_float32, in_float32_block),
    "autocast(f, 'float32')": (in_float32, lambda h, w: autocast(jnp.matmul, "float32")(h, w)),
    "jnp.linalg.pinv": (only_in_float32, lambda h, w: ten(h) * jnp.linalg.pinv(w).sum()),
    "positions times frequencies": (lambda facts: not facts.forward, angles),
    "casts, and back": (only_in_float32, lambda h, w: cast_both(h, w).astype(h.dtype)),
    "x.astype(x.dtype)": (plain, lambda h, w: h.astype(h.dtype) @ w.astype(h.dtype)),
    "astype(float)": (in_float32, lambda h, w: h.astype(float) @ w.astype("f4")),
    "casts to promote_types of the operands": (plain, promote_operands),
    "casts of a jitted matmul": (
        in_float32, lambda h, w: jax.jit(jnp.matmul)(h.astype(f32), w.astype(f32))),
    "preferred of a jitted dot": (
        wide, lambda h, w: jax.jit(partial(jnp.dot, preferred_element_type=f32))(h, w)),
    "silu(x.astype(f32))": (has("logistic"), lambda h, w: ten(jax.nn.silu(h.astype(f32)))),
    "casts in a custom_vjp's backward": (one_in_float32_backward, casts_backward),
    "jnp.var(dtype=f32)": (unrounded, partial(times, reduce=jnp.var, dtype=f32)),
    "jnp.nanmean(dtype=bf16)": (rounded, partial(times, reduce=jnp.nanmean, dtype=bf16)),
    "casts to f16": (
        partial(multiplies, dtype="float16"), lambda h, w: h.astype(f16) @ w.astype(f16)),
    "casts to bf16": (in_bf16, lambda h, w: h.astype(bf16) @ w.astype(bf16)),
    "sin(x.astype(f32))": (has("sin"), lambda h, w: ten(jnp.sin(h.astype(f32)))),
    "x.astype(bf16)": (rounded, lambda h, w: times(h, w).astype(bf16)),
    "jnp.sum(dtype=f32)": (unrounded, partial(times, dtype=f32)),
    "jnp.mean(dtype=f32)": (unrounded, partial(times, reduce=jnp.mean, dtype=f32)),
    "jnp.sum(dtype=bf16)": (rounded, partial(times, dtype=bf16)),
    "jnp.cumsum(dtype=f32)": (has("cumsum"), lambda h, w: ten(jnp.cumsum(h, -1, dtype=f32))),
    "jnp.cumsum(dtype=bf16)": (has("cumsum", "bfloat16"), lambda h, w: ten(h.cumsum(2, bf16))),
    "lax.reduce_precision": (
        lambda facts: (5, 2) in facts.reduced, lambda h, w: lax.reduce_precision(h, 5, 2) @ w),
    "Precision.HIGHEST": (at("HIGHEST"), partial(jnp.matmul, precision=HIGHEST)),
    'precision="high"': (at("HIGH"), partial(jnp.dot, precision="high")),
    "precision of two": (at("DEFAULT,HIGHEST"), partial(jnp.dot, precision=("default", "highest"))),
    "DotAlgorithmPreset": (
        at("BF16_BF16_F32"), partial(dot_general, **preferred, precision="BF16_BF16_F32")),
    "precision= and preferred=": (
        at("HIGHEST"), lambda h, w: jnp.dot(h, w, precision="highest", preferred_element_type=f32)),
    "preferred=bf16": (
        plain, lambda h, w: jnp.dot(h.astype(bf16), w.astype(bf16), preferred_element_type=bf16)),
    "default_matmul_precision": (at("HIGHEST"), within(at_highest, jnp.matmul)),
    "with full_precision():": (in_float32, within(full_precision, jnp.matmul)),
    "@full_precision()": (in_float32, full_precision()(lambda h, w: h @ w)),
    "q / np.sqrt(8)": (plain, lambda h, w: h / np.sqrt(8) @ w),
    "q * np.array(8.)": (plain, lambda h, w: h * np.array(8.0) @ w),
    "h * g[:, None]": (
        lambda facts: facts.backward_sums == {"float32"},
        lambda h, w: ten(h * (h @ w[:, 0])[..., None])),
}
R = Request
TOLD, EITHER = dict.fromkeys(COLUMNS, "told"), dict.fromkeys(COLUMNS, LOUD)
KEEP: Any = {"columns": OURS, "attributes": {"own_code": "keep"}}
X64: Any = {"around": lambda: jax.enable_x64(True)}
OWN_CODE = [
    *(R(name, *request) for name, request in BODIES.items()),
    *(R(f"{n}(precision=)", at("HIGHEST"), partial(f, **highest)) for n, f in OPERATIONS.items()),
    *(R(f"{n}(preferred=)", wide, preferring(f)) for n, f in OPERATIONS.items()),
    *(R(f"{said} in {name}", check, transform(body))
      for name, transform in TRANSFORMS.items() for said, (body, check) in SAID.items()),
    R("x.astype(f32) @ w", in_float32, lambda h, w: h.astype(f32) @ w, expect=EITHER),
    R("x @ w.astype(f32)", in_float32, lambda h, w: h @ w.astype(f32), expect=EITHER),
    R("x.astype(f32) * x.astype(f32)", has("mul"), lambda h, w: ten(h.astype(f32) * h.astype(f32)),
      expect=EITHER),
    R("x.astype(f32) at the top", in_float32, top_cast, expect=TOLD),
    R("casts of two in three", wide, expect=TOLD, body=lambda h, w: jnp.einsum(
        "btd,df,fg->btg", h.astype(f32), w.astype(f32), w.T @ w)),
    R("rope in float32", in_float32, expect=TOLD,
      body=lambda h, w: rotated(h) @ rotated(w.T).T),
    R("associative_scan of casts", in_float32, scan_of_matrices, expect=TOLD),
    R("preferred= in a branch", wide, one_branch, expect=TOLD),
    *(R(f"{name} in float32", *BODIES[name], policy="float32")
      for name in ("casts to bf16", "x.astype(bf16)", "jnp.sum(dtype=bf16)")),
    *(R(f"{name} in x64", *BODIES[name], **X64) for name in ("q / np.sqrt(8)", "q * np.array(8.)")),
    R("default_matmul_precision around", plain, around=at_highest),
    R("precision= as around", plain, partial(jnp.dot, **highest), around=at_highest),
    R("jnp.dot(out_sharding=)", lambda facts: facts.sharded,
      lambda h, w: jnp.dot(h, w, out_sharding=PartitionSpec("d", None, None)), around=mesh),
    R("carry in bf16", returns_bf16, carried, extra=(jnp.zeros(10, bf16),)),
    R("cache in bf16", returns_bf16, cached, extra=(jnp.zeros((2, 9, 10), bf16),)),
    R("own_code='keep', casts", as_met, cast_both, **KEEP),
    R("own_code='keep', preferred", unrounded,
      lambda h, w: jnp.dot(h, w.astype(h.dtype), **preferred), **KEEP),
    R("keep_inputs", lambda facts: facts.first == ("float32", "float32"), columns=OURS,
      attributes={"own_code": "keep", "keep_inputs": ("x",)}),
    R("keep_params", stores("float32", "w"), columns=OURS, policy="bfloat16",
      attributes={"keep_params": ("w",)}),
    R("param(compute_dtype=f32)", has("mul"), lambda h, w: ten(h * w[:, 0]), columns=OURS,
      policy="bfloat16", weight={"compute_dtype": f32}),
]
# fmt: on


# ------------------------------------------------------------------------------------------ layers


def made(linen: Any, nnx: Any) -> Callable[..., Part]:
    """Returns a function that makes a layer of options."""
    return lambda **given: layer(
        lambda nn: linen(nn, **given), lambda ns, rngs: nnx(ns, rngs=rngs, **given)
    )


# fmt: off
MAKERS: dict[str, Any] = {
    "Dense": partial(dense, 8, 10),
    "DenseGeneral": made(lambda nn, **o: nn.DenseGeneral(10, **o),
                         lambda ns, **o: ns.LinearGeneral(8, 10, **o)),
    "Conv": made(lambda nn, **o: nn.Conv(10, (3,), **o), lambda ns, **o: ns.Conv(8, 10, (3,), **o)),
    "ConvTranspose": made(lambda nn, **o: nn.ConvTranspose(10, (3,), **o),
                          lambda ns, **o: ns.ConvTranspose(8, 10, (3,), **o)),
    "Einsum": made(lambda nn, **o: nn.Einsum((8, 10), "btd,df->btf", **o),
                   lambda ns, **o: ns.Einsum("btd,df->btf", (8, 10), **o)),
    "attention": made(lambda nn, **o: nn.MultiHeadDotProductAttention(2, out_features=10, **o),
                      lambda ns, **o: ns.MultiHeadAttention(2, 8, None, 10, decode=False, **o)),
}
embed = made(lambda nn, **o: nn.Embed(10, 8, **o), lambda ns, **o: ns.Embed(10, 8, **o))
# fmt: on


def rnn(cell: str, **options: Any) -> Part:
    return layer(
        lambda nn: nn.RNN(getattr(nn, cell)(10, **options)),
        lambda ns, rngs: ns.RNN(getattr(ns, cell)(8, 10, rngs=rngs, **options), rngs=rngs),
    )


def own_module(text: Callable[..., Any]) -> Text:
    """A module of own code, inside of the model."""
    return Text(lambda self, h: text(h, array(self.w)), "Inner", w=weight(8, 10, init=ONES))


def beside(made: Part, call: Any = lambda layer, h: layer(h)) -> Text:
    """A layer after a dense one."""
    return Text(
        lambda self, h: call(self.inner, self.plain(h)), "Two", plain=dense(8, 8), inner=made
    )


def lifted(name: str, inner: Any = None, **options: Any) -> Any:
    """A part, or a dense layer of options, in a lifted transformation, and its call."""
    is_scan, inner = name == "scan", inner or dense(8, 10, **options)

    def linen_module(nn: Any) -> Any:
        step = Text(lambda self, carry, h: (carry, self.d(h)), d=inner)
        axes = {"variable_broadcast": "params", "split_rngs": {"params": False}} if is_scan else {}
        return getattr(nn, name)(step.linen_class(nn), **axes)()

    def call(ns: Any, layer: Any, h: Any) -> Any:
        if not isinstance(layer, flax.nnx.Module):
            return layer((), h)[1]
        axes = {"in_axes": (None, 0), "out_axes": 0} if is_scan else {}
        return getattr(ns, name)(lambda layer, h: layer(h), **axes)(layer, h)

    return {"layer": layer(linen_module, inner.nnx), "call": call}


def with_option(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda *args, **given: function(*args, **(given | options))


def f32_operands(*operands: Any, **_: Any) -> Any:
    given = operands[0] if isinstance(operands[0], tuple) else operands
    return [None if each is None else jnp.asarray(each, f32) for each in given]


def attend(ns: Any, layer: Any, h: Any) -> Any:
    return layer.attend(h)


def tied(ns: Any, layer: Any, h: Any, multiply: Any = SAID["preferred="][0]) -> Any:
    table = layer.embedding
    table = table[...] if isinstance(table, flax.nnx.Variable) else table
    return multiply(h, table.T)


def of_ten(ns: Any, layer: Any, h: Any) -> Any:
    return layer(ten(h))


def with_carry(ns: Any, layer: Any, h: Any, carry: Any) -> Any:
    return layer(h, initial_carry=carry, return_carry=True)[::-1]


def softmax_of_mine(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(f32))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


# fmt: off
DIFFERS = dict.fromkeys(OURS, "obeyed, told") | {"autocast": LOUD}
CELLS = {name: partial(rnn, name) for name in ("SimpleCell", "LSTMCell", "GRUCell")}
PREFERRED = dict.fromkeys(MAKERS, NNX) | {"ConvTranspose": LINEN, "Einsum": COLUMNS}
del PREFERRED["attention"]
highest_dot = with_option(lax.dot_general, precision=HIGHEST)
Dense, DenseGeneral, Conv, *_, Attention = MAKERS.values()
OPERATIONS_OF_LAYERS: dict[str, tuple[Check, Any]] = {
    "Dense(dot_general=, precision)": (at_as_jax("HIGHEST"), Dense(dot_general=highest_dot)),
    "Dense(dot_general=, preferred)": (  # backward is the operation's own
        lambda facts: in_bf16(facts) and unrounded(facts),
        Dense(dot_general=with_option(lax.dot_general, **preferred))),
    "DenseGeneral(dot_general_cls=)": (
        at_as_jax("HIGHEST"), DenseGeneral(dot_general_cls=lambda: highest_dot)),
    "Conv(conv_general_dilated=)": (at_as_jax("HIGHEST"), Conv(
        conv_general_dilated=with_option(lax.conv_general_dilated, precision=HIGHEST))),
}
NO_PORT = (*OURS, "autocast")
LAYERS = [
    *(R(f"{name}(dtype=f32)", in_float32, layer=make(dtype=f32), expect=DIFFERS, columns=NO_PORT)
      for name, make in (MAKERS | CELLS).items()),
    # A port gives all layers the policy's dtypes; a layer that differs from others is told.
    *(R(f"{name}(dtype=f32) beside Dense", in_float32, layer=beside(make(dtype=f32)),
        expect=dict.fromkeys(PORTS, "told"), columns=PORTS)
      for name, make in (MAKERS | CELLS).items()),
    *(R(f"{n}(precision=)", at_as_jax("HIGHEST"), layer=make(**highest))
      for n, make in MAKERS.items()),
    *(R(f"{n}(preferred=)", wide, layer=MAKERS[n](**preferred), columns=PREFERRED[n])
      for n in PREFERRED),
    *(R(name, check, layer=made) for name, (check, made) in OPERATIONS_OF_LAYERS.items()),
    *(R(f"nn.{n}(precision=)", at_as_jax("HIGHEST"), **lifted(n, **highest))
      for n in ("remat", "jit", "scan")),
    *(R(f"{said} in nn.{n}", check, **lifted(n, own_module(body)))
      for n in ("remat", "scan") for said, (body, check) in SAID.items()),
    R("Embed(dtype=f32).attend", in_float32, layer=embed(dtype=f32), call=attend, expect=DIFFERS,
      columns=NO_PORT),
    R("Dense(dtype=bf16) in float32", in_bf16, layer=Dense(dtype=bf16), policy="float32",
      expect=DIFFERS | {"autocast": "obeyed"}, columns=NO_PORT),
    R("Dense(param_dtype=bf16)", stores("bfloat16", "layer"), layer=Dense(param_dtype=bf16),
      expect=DIFFERS | {"autocast": "obeyed"}, columns=NO_PORT),
    R("Embed(dtype=f32).attend beside Dense", never, expect={"port_linen": "told"},
      layer=beside(embed(dtype=f32), lambda layer, h: layer.attend(h)),
      columns=("port_linen",)),  # nnx.Embed fills in its table's dtype
    *(R(f"{name} beside Dense", never, layer=beside(made, *call), columns=PORTS, policy=held,
        expect=dict.fromkeys(PORTS, "told")) for name, made, held, *call in (
      ("Dense(dtype=bf16) in float32", Dense(dtype=bf16), "float32"),
      ("Dense(param_dtype=bf16)", Dense(param_dtype=bf16), MIXED),
      ("LayerNorm(dtype=f32)", layer_norm(8, dtype=f32), MIXED, lambda layer, h: ten(layer(h))))),
    R("Dense(promote_dtype=)", as_met, layer=Dense(promote_dtype=f32_operands), expect=EITHER),
    R("attention(attention_fn=)", has("exp"), layer=Attention(attention_fn=softmax_of_mine)),
    R("attention(out_dot_general=)",
      lambda facts: facts.last == ("bfloat16", "bfloat16", "HIGHEST"),
      layer=Attention(out_dot_general=highest_dot)),
    R("attention(force_fp32_for_softmax=)", has("exp"), columns=LINEN,
      layer=Attention(force_fp32_for_softmax=True)),
    R("tied head, preferred", wide, layer=embed(), call=tied),
    R("tied head, casts", in_float32, layer=embed(), call=partial(tied, multiply=cast_both)),
    R("attend by a rule with o=f32", wide, layer=embed(), call=attend, rules={"layer": WIDER}),
    R("attend in full_precision()", in_float32, layer=embed(), call=within(full_precision, attend)),
    R("LayerNorm(dtype=f32)", unrounded, layer=layer_norm(10, dtype=f32), call=of_ten,
      expect=DIFFERS, columns=NO_PORT),
    R("LayerNorm(use_fast_variance=False)", lambda facts: facts.sums_differences,
      layer=layer_norm(10, use_fast_variance=False), call=of_ten),
    R("LayerNorm(force_float32_reductions=False)", has("reduce_sum", "bfloat16"), columns=LINEN,
      layer=layer_norm(10, force_float32_reductions=False), call=of_ten, expect=EITHER),
    R("RNN's carry in bf16", returns_bf16, layer=rnn("GRUCell"), call=with_carry,
      extra=(jnp.zeros((2, 10), bf16),), expect={"autocast": "rejected"}),  # as Flax rejects it
    *(R(f"rule {said} of a {kind}", check, layer=made, rules={"layer": rule})
      for kind, made in {"layer": Dense(), "module": own_module(jnp.matmul)}.items()
      for said, check, rule in (("o=f32", wide, WIDER), ("float32", in_float32, "float32"),
                                ("f32_inside", only_in_float32, "f32_inside"),
                                ("x=highest", at("HIGHEST"), f"{WIDER},x=highest"))),
    R("rule o=f32 of 16-bit params", wide, layer=Dense(), rules={"layer": "p=bf16,c=bf16,o=f32"}),
    R("dtype_policy= with o=f32", wide, layer=Dense(dtype_policy=WIDER), columns=OURS),
    R("dtype_policy=float32", in_float32, layer=Dense(dtype_policy="float32"), columns=OURS),
    R("nn.remat, dtype_policy", in_float32, columns=OURS,
      **lifted("remat", dtype_policy="float32")),
    *(R(f"{n} in a module", check, layer=own_module(body)) for n, (body, check) in SAID.items()),
    R("full_precision() around a layer", in_float32, layer=Dense(), call=within(full_precision)),
    R("default_matmul_precision of a layer", at_as_jax("HIGHEST"), layer=Dense(),
      call=within(at_highest)),
]
# fmt: on
REQUESTS = {request.name: request for request in [*OWN_CODE, *LAYERS]}


# ---------------------------------------------------------------------------------------- mistakes

ROWS = jnp.ones((2, 8))


def traced(model: Any, **transform: Any) -> None:
    """Traces a model's call."""
    run = partial(autocast, **transform) if transform else lambda call: call
    if isinstance(model, flax.nnx.Module):
        jax.eval_shape(run(model), ROWS)
    else:
        jax.eval_shape(run(model.apply), jax.eval_shape(model.init, KEY, ROWS), ROWS)


def linear(ns: Any = flax.nnx, **options: Any) -> Any:
    return ns.Linear(8, 8, rngs=flax.nnx.Rngs(0), **options)


def two(ns: Any, head: Any) -> Any:
    """A model of an API with a layer of ours, and a head of ours or of Flax's."""
    if "nnx" in ns.__name__:
        parts = (Part(lambda *_: None, lambda _, rngs, api=api: linear(api)) for api in (nnx, head))
    else:
        parts = (Part(lambda *_, api=api: api.Dense(8), lambda *_: None) for api in (linen, head))
    text = Text(
        lambda self, x: self.head(self.up(x)), **dict(zip(("up", "head"), parts, strict=True))
    )
    return text.nnx_class(ns)(rngs=None) if "nnx" in ns.__name__ else text.linen_class(ns)()


def assigns_a_layer() -> None:
    with use_policy(MIXED):
        model = two(nnx, nnx)
    model.head = linear(nnx)
    traced(model)


def applies_a_new_instance() -> None:
    with use_policy(MIXED):
        variables = jax.eval_shape(linen.Dense(8).init, KEY, ROWS)
    jax.eval_shape(linen.Dense(8).apply, variables, ROWS)


def enters_set_policy() -> None:
    with set_policy(MIXED):
        pass


def jits_in_a_scope() -> None:
    model = linen.Dense(8)
    with use_policy("p=f32,c=bf16,o=f16"):  # which nothing else obeys
        jitted = jax.jit(model.apply)
    jax.eval_shape(jitted, jax.eval_shape(model.init, KEY, ROWS), ROWS)


def takes_a_loss_outside() -> None:
    model = linen.Dense(8, dtype_policy="bfloat16")

    def loss(params: Any) -> Any:
        logits = model.apply(params, ROWS)
        return optax.softmax_cross_entropy_with_integer_labels(logits, np.zeros(2, int)).mean()

    jax.eval_shape(policy.value_and_grad(loss), jax.eval_shape(model.init, KEY, ROWS))


def in_scope(make: Callable[[], Any]) -> Callable[[], None]:
    """A block in which a model is made and called, after one with a model of ours."""

    def run() -> None:
        for each in (lambda: linen.Dense(8), make):
            with use_policy(MIXED):
                traced(each())

    return run


# By name: what is done, "told" or "rejected", and words of it.
# fmt: off
MISTAKES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "flax.linen in use_policy": (in_scope(lambda: flax.linen.Dense(8)), "told", "flax.linen"),
    "flax.nnx in use_policy": (in_scope(linear), "told", "flax.nnx"),
    "ours in flax.linen": (in_scope(lambda: two(flax.linen, flax.linen)), "told", "flax.linen"),
    "ours in flax.nnx": (in_scope(lambda: two(flax.nnx, flax.nnx)), "told", "flax.nnx"),
    "a layer is assigned": (assigns_a_layer, "told", "Linear"),
    "autocast of a linen policy": (lambda: traced(
        linen.Dense(8, dtype_policy=MIXED), policy="mixed_float16"), "told", "float16"),
    "autocast of an nnx policy": (lambda: traced(
        linear(nnx, dtype_policy=MIXED), policy="mixed_float16"), "told", "float16"),
    "a new instance outside": (applies_a_new_instance, "told", "Dense"),
    "a scope around jax.jit": (jits_in_a_scope, "told", "policy"),
    "a loss of bf16 logits": (takes_a_loss_outside, "told", "bfloat16"),
    "full_precision() alone": (lambda: full_precision() and None, "told", "with full_precision"),
    "with autocast(policy):": (within(lambda: autocast(MIXED), int), "rejected", "use_policy"),
    "with set_policy(policy):": (enters_set_policy, "rejected", "use_policy"),
}
# fmt: on

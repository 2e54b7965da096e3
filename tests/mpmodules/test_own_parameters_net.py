"""A language model of hand-written layers runs in half, in both APIs, with the gradients of a
careful author: attention, experts and RMSNorm.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policy
from mpmodules import full_precision
from tests.mpmodules.apis import APIS, BOTH, MIXED, ONES, Text, weight
from tests.programs import named, operations

WIDTH, HIDDEN, HEADS, EXPERTS, WORDS, LENGTH = 16, 32, 2, 4, 32, 8
IDS = jax.random.randint(jax.random.key(1), (4, LENGTH), 0, WORDS)
SHAPES = {
    "attention": {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH)},
    "experts": {
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
    },
}


def attention(x: jax.Array, qkv: Any, out: Any) -> jax.Array:
    heads = (x @ qkv).reshape(*x.shape[:-1], HEADS, -1)
    q, k, v = jnp.split(heads, 3, -1)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    mixed = jnp.einsum("bnts,bsnh->btnh", policy.reductions.softmax(logits), v)
    return mixed.reshape(x.shape) @ out


def experts(x: jax.Array, router: Any, up: Any, down: Any) -> jax.Array:
    weights = policy.reductions.softmax(x @ router)
    hidden = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, jnp.asarray(up)))
    return jnp.einsum("btef,efd,bte->btd", hidden, jnp.asarray(down), weights)


def normalized(x: jax.Array, scale: Any) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale[None, None]


FUNCTIONS = {"attention": attention, "experts": experts}


def forward(self: Any, ids: jax.Array) -> jax.Array:
    x = jnp.asarray(self.table)[ids] + jnp.asarray(self.position)[None]
    for name in FUNCTIONS:
        x = x + getattr(self, name)(getattr(self, f"norm_{name}")(x))
    return x @ jnp.asarray(self.table).T


def part(name: str) -> Text:
    def call(self: Any, x: jax.Array) -> jax.Array:
        return FUNCTIONS[name](x, **{each: getattr(self, each) for each in SHAPES[name]})

    init = jax.nn.initializers.lecun_normal()
    parts: Any = {each: weight(*shape, init=init) for each, shape in SHAPES[name].items()}
    return Text(call, name.title(), **parts)


NORM = Text(
    lambda self, x: full_precision(normalized)(x, jnp.asarray(self.scale)),
    "Norm",
    scale=weight(WIDTH, init=ONES),
)
SMALL = jax.nn.initializers.normal(0.25)
PARTS: dict[str, Any] = {
    "table": weight(WORDS, WIDTH, init=SMALL),
    "position": weight(LENGTH, WIDTH, init=SMALL),
    **{name: part(name) for name in FUNCTIONS},
    **{f"norm_{name}": NORM for name in FUNCTIONS},
}
TEXT = Text(forward, **PARTS)


def by_hand(params: Any, ids: jax.Array, dtype: Any) -> jax.Array:
    """The same model with its dtypes threaded by hand: parameters are cast at their uses, norms run
    in float32.
    """
    cast = functools.partial(jax.tree.map, lambda array: array.astype(dtype))
    x = cast(params["table"])[ids] + cast(params["position"])[None]
    for name, function in FUNCTIONS.items():
        scale = params[f"norm_{name}"]["scale"]
        y = normalized(x.astype(jnp.float32), scale.astype(jnp.float32)).astype(dtype)
        x = x + function(y, **cast(params[name]))
    return (x @ cast(params["table"]).T).astype(jnp.float32)


def loss_of(logits: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits.astype(jnp.float32))[..., 3].mean()


PARAMS = APIS["linen"].theirs(TEXT, IDS).params


def losses(api: Any, text: str | None = MIXED) -> tuple[Any, Any]:
    """Returns the loss, and that of the model by hand: of parameters of the api."""
    model = api.ours(TEXT, text, IDS)
    structure = jax.tree.structure(model.params)

    def ours(params: Any) -> jax.Array:
        placed = jax.tree.unflatten(structure, jax.tree.leaves(params))
        return loss_of(model.pure(placed, IDS))

    return ours, lambda params, dtype: loss_of(by_hand(params, IDS, dtype))


def distance(a: Any, b: Any) -> float:
    parts = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(np.sqrt(sum(np.sum(np.square(np.float64(x) - np.float64(y))) for x, y in parts)))


@pytest.mark.cases(slow=1)
@BOTH
def test_matmuls_and_the_residual_stream_are_half_and_gradients_those_of_a_careful_author(api):
    ours, hand = losses(api)
    ops = operations(jax.grad(ours), PARAMS)
    dots = named(ops, "dot_general")
    assert len(dots) > 15
    assert {(*op.inputs, *op.outputs) for op in dots} == {("bfloat16",) * 3}
    sums = [op for op in named(ops, "add") if not op.is_backward and op.outputs == ("float32",)]
    assert not [op for op in sums if "bfloat16" in op.inputs]
    truth, author = (
        jax.jit(jax.grad(functools.partial(hand, dtype=dtype)))(PARAMS)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    found = jax.jit(jax.grad(ours))(PARAMS)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    assert distance(found, truth) <= 1.1 * distance(author, truth)


@pytest.mark.cases(slow=1)
@BOTH
def test_backward_keeps_no_more_than_by_hand(api):
    def kept(function: Any) -> int:
        _, pullback = jax.eval_shape(lambda p: jax.vjp(function, p), PARAMS)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    ours, hand = losses(api)
    # Softmax's probabilities are float32.
    assert kept(ours) <= 1.02 * kept(lambda p: hand(p, jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, "p=f32,c=bf16,o=f16"])
def test_accessors_tell_the_dtypes_in_force(text):
    fields = ("param_dtype", "compute_dtype", "output_dtype", "reduction_dtype")
    with policy.use_policy(text):
        told = [getattr(policy, field)() for field in fields]
    assert told == ([None] * 4 if text is None else ["float32", "bfloat16", "float16", "float32"])

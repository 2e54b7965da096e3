"""The operations of random programs, as source text.

A line of the table is a name, a kind, and parts between ``::``. The first is an expression: ``{0}``
and ``{1}`` are values, names are arguments. Others are

    ? what is discrete: programs whose choices hang on rounding are drawn anew
    ! what the numbers of {0} must be
    1= the shape of a parameter that may be made for {1}, of the shape s of {0}

Kinds: ``dot`` where a policy rounds operands, ``half`` where it may round operands and result,
``move`` where that adds no error to rounded numbers, ``full`` where float32 is promised, ``body``
where a body of operations is run.
"""

import dataclasses
from typing import Any

import numpy as np

Shape = tuple[int, ...]
TABLE = """
matmul dot :: {0} @ {1} :: 1=s[-1], 12 - s[-1] % 8
square_matmul dot :: {0} @ {1} :: 1=s[-1], s[-1]
einsum dot :: jnp.einsum('ij,kj->ik', {0}, {1}) :: 1=8, s[-1]
scores dot :: jnp.einsum('bij,bkj->bik', {0}, {1})
dot dot :: {0} @ {1} :: 1=s[-1],
outer dot :: jnp.einsum('i,j->ij', {0}, {1})
vdot dot :: jnp.vdot({0}, {1})
gram dot :: {0} @ {0}.mT
conv dot :: conv({0}, {1}) :: 1=3, s[-1], 4
Dense dot :: {0} @ {1} + {2} :: 1=s[-1], 8 :: 2=8,
LayerNorm dot :: layer_norm({0}, {1}, {2}) :: 1=s[-1], :: 2=s[-1],
add half :: {0} + {1}
sub half :: {0} - {1}
mul half :: {0} * {1}
div half :: {0} / (1.5 + jnp.abs({1})) :: ?{1} > 0
plain_div half :: {1} / {0} :: !positive
shift half :: {0} + {c}
scale half :: {0} * {c}
rsub half :: 1 - {0}
bias half :: {0} + jnp.expand_dims({1}, tuple(range({0}.ndim - 1))) :: 1=s[-1],
gain half :: {0} * jnp.expand_dims({1}, tuple(range({0}.ndim - 1))) :: 1=s[-1],
by_row half :: {0} * {1}[:, None] :: 1=s[0],
tanh half :: tanh({0})
sigmoid half :: sigmoid({0})
gelu half :: jax.nn.gelu({0})
silu half :: jax.nn.silu({0})
sin half :: jnp.sin({0})
erf half :: jax.scipy.special.erf({0})
square half :: jnp.square({0})
power half :: {0} ** {n}
clip half :: jnp.clip({0}, -{p}, {p}) :: ?jnp.abs({0}) > {p}
hinge half :: jnp.maximum(0, 1 - {0}) :: ?{0} < 1
at_max half :: jnp.where({0} == jnp.max({0}), {0}, 0.1 * {0}) :: ?{0} == jnp.max({0})
stop half :: {0} + lax.stop_gradient(jnp.tanh({0}))
custom_tanh half :: custom_tanh({0})
swiglu half :: swiglu(*jnp.split({0}, 2, axis=-1))
median half :: jnp.median({0}, axis=-1) :: ?order({0})
quantile half :: jnp.quantile({0}, 0.3, axis=-1) :: ?order({0})
scatter_add half :: {0}.at[jnp.array([0, 1, 0])].add({0}[:3])
scatter_mul half :: {0}.at[jnp.array([2, 0])].multiply({0}[:2], unique_indices=True)
relu move :: jax.nn.relu({0}) :: ?{0} > 0
abs move :: jnp.abs({0}) :: ?{0} > 0
maximum move :: jnp.maximum({0}, {1}) :: ?{0} > {1}, {0} == {1}
minimum move :: jnp.minimum({0}, {1}) :: ?{0} > {1}, {0} == {1}
where move :: jnp.where({0} > 0.2, {0}, {1}) :: ?{0} > 0.2
where_zero move :: jnp.where({0} > 0.2, {0}, 0) :: ?{0} > 0.2
sort move :: jnp.sort({0}, axis=-1) :: ?order({0})
top_k move :: lax.top_k({0}, 2)[0] :: ?order({0})
cummax move :: lax.cummax({0}, axis={axis0}) :: ?lax.cummax({0}, axis={axis0}) == {0}
argmax_pick move :: argmax_pick({0}) :: ?order({0})
gather move :: jnp.take({0}, jnp.array([0, 2, 1, 0]), axis={axis})
slice move :: {0}[..., ::2]
scatter_set move :: {0}.at[..., 1].set({0}[..., 0] * 2)
concat move :: jnp.concatenate([{0}, {1}], axis={axis})
stack move :: jnp.stack([{0}, {1}])
split move :: jnp.split({0}, 2, axis={axis})[{i}]
flat move :: {0}.reshape(-1)
reshape move :: {0}.reshape({0}.shape[0] * 2, -1)
transpose move :: jnp.swapaxes({0}, 0, -1)
roll move :: jnp.roll({0}, {k}, axis={axis})
flip move :: jnp.flip({0}, axis={axis})
pad move :: jnp.pad({0}, 1)
exp full :: jnp.exp({0})
expm1 full :: jnp.expm1({0})
log full :: jnp.log({0}) :: !positive
log1p full :: jnp.log1p({0}) :: !above -1
sqrt full :: jnp.sqrt({0}) :: !positive
rsqrt full :: lax.rsqrt({0} + 1e-3) :: !positive
root full :: jnp.sqrt(jnp.square({0}) + 0.1)
frac_power full :: {0} ** 1.5 :: !positive
softplus full :: jax.nn.softplus({0})
log_sigmoid full :: jax.nn.log_sigmoid({0})
log1m_sigmoid full :: jnp.log(1 - jax.nn.sigmoid({0}))
log_cosh full :: log_cosh({0})
logaddexp full :: jnp.logaddexp({0}, {1})
sum full :: jnp.sum({0}, axis={axes}, keepdims={keep})
mean full :: jnp.mean({0}, axis={axes}, keepdims={keep})
var full :: jnp.var({0}, axis={axes}, keepdims={keep})
std full :: jnp.std({0}, axis={axis}) + 0.1
max full :: jnp.max({0}, axis={axes}, keepdims={keep}) :: ?order({0}, {axes})
min full :: jnp.min({0}, axis={axes}, keepdims={keep}) :: ?order({0}, {axes})
ptp full :: jnp.ptp({0}, axis={axis}) :: ?order({0}, {axis})
prod full :: jnp.prod({0}, axis={axis})
logsumexp full :: jax.nn.logsumexp({0}, axis={axes}, keepdims={keep})
norm full :: jnp.linalg.norm({0}, axis={axis}, keepdims={keep})
softmax full :: jax.nn.softmax({0}, axis={axis})
log_softmax full :: jax.nn.log_softmax({0}, axis={axis})
unit full :: {0} / jnp.linalg.norm({0}, axis=-1, keepdims=True)
rms full :: {0} * lax.rsqrt(jnp.mean({0} * {0}, -1, keepdims=True) + 1e-6)
standardize full :: jax.nn.standardize({0}, axis={axis})
center full :: {0} - jnp.mean({0}, axis={axis}, keepdims=True)
cumsum full :: jnp.cumsum({0}, axis={axis})
cumprod full :: jnp.cumprod({0}, axis={axis})
logcumsumexp full :: lax.cumlogsumexp({0}, axis={axis0})
segment_sum full :: jax.ops.segment_sum({0}, jnp.arange({0}.shape[0]) % 2, 2)
mse full :: jnp.mean(jnp.square({0} - {1}))
huber full :: optax.huber_loss({0}, {1}).mean() :: ?jnp.abs({0} - {1}) > 1
cross_entropy full :: cross_entropy({0}, jnp.arange({0}.shape[0]) % 3)
binary full :: optax.sigmoid_binary_cross_entropy({0}, sigmoid({1}))
cosine full :: optax.cosine_similarity({0}, {1}, epsilon=1e-3)
nll full :: -jnp.mean(jnp.log(jax.nn.softmax({0}, -1)[..., 0]))
inv full :: jnp.linalg.inv(positive_definite({0})) :: !symmetric
cholesky full :: jnp.linalg.cholesky(positive_definite({0})) :: !symmetric
slogdet full :: jnp.linalg.slogdet(positive_definite({0}))[1] :: !symmetric
solve full :: jnp.linalg.solve(positive_definite({0}), {1}) :: !symmetric :: 1=s[-1],
scan body :: scan(lambda c, r: ({body}(c, r, {2}),) * 2, {1}, {0})[{i}] :: 1=s[1:] :: 2=s[-1],
map body :: lax_map(lambda r: {body}(r, {1}), {0}) :: 1=s[-1],
vmap body :: vmap(lambda r: {body}(r, {1}), out_axes={oi})({0}) :: 1=s[-1],
fori body :: fori_loop(0, 3, lambda i, c: {body}(c, {1}), {0}) :: 1=s[-1],
while body :: {0} * twice({body}, *map(lax.stop_gradient, ({0}, {1}))) :: 1=s[-1],
cond body :: cond(jnp.sum({0}) > {c}, {body}, keep, {0}, {1}) :: ?jnp.sum({0}) > {c} :: 1=s[-1],
switch body :: switch(first({0}) % 2, [keep, {body}], {0}, {1}) :: ?first({0}) :: 1=s[-1],
checkpoint body :: checkpoint({body})({0}, {1}) :: 1=s[-1],
jit body :: jit({body})({0}, {1}) :: 1=s[-1],
jit_twice body :: (lambda g: g(g({0}, {1}), {1}))(jit({body})) :: 1=s[-1],
"""


@dataclasses.dataclass(frozen=True)
class Spec:
    """A line of the table."""

    kind: str
    code: str
    choice: str
    need: str
    fresh: dict[int, str]


def _read(line: str) -> tuple[str, Spec]:
    (name, kind), code, *parts = (line.split(" :: ")[0].split(), *line.split(" :: ")[1:])
    marked = {part[0]: part[1:] for part in parts}
    fresh = {place: marked[str(place)].lstrip("=") for place in (1, 2) if str(place) in marked}
    return name, Spec(kind, code, marked.get("?", ""), marked.get("!", ""), fresh)


OPS = dict(map(_read, TABLE.strip().splitlines()))
SPD = ("gram", "inv", "cholesky", "slogdet", "solve")
MATMULS = (*(name for name, spec in OPS.items() if spec.kind == "dot"), "Dense")
FLOW_OPS = tuple(name for name, spec in OPS.items() if spec.kind == "body")
OTHERS = tuple(name for name in OPS if name not in (*MATMULS, *FLOW_OPS))
GROUPS = {MATMULS: 0.22, FLOW_OPS: 0.12, SPD: 0.05, OTHERS: 0.61}
CONSTANTS = (0.1, 0.5, 0.7, 2.0, 3.0, 10.0, -1.0, 1e-2, 1e-3, 100.0, 1e-7, 1e4)

# What programs call. In references control flow is Python's, and `half` rounds, as do tanh and
# sigmoid what their derivatives read: their results, of which 1 - y is small where y is near 1.
PRELUDE = """
cross_entropy = optax.softmax_cross_entropy_with_integer_labels

keep = lambda a, b: a

first = lambda x: jnp.argmax(jnp.ravel(x))

tanh, sigmoid = jnp.tanh, jax.nn.sigmoid

swiglu = lambda a, b: a * jax.nn.sigmoid(b)

positive_definite = lambda a: a + 4 * jnp.eye(len(a)).astype(a.dtype)

argmax_pick = lambda x: jnp.take_along_axis(x, jnp.argmax(x, -1, keepdims=True), -1)[..., 0]

twice = lambda f, a, b: while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, f(s[1], b)), (0, a))[1]

scan = lambda f, carry, xs: lax.scan(f, carry, xs)

def conv(x, w):
    names = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=names)

@jax.custom_jvp
def log_cosh(x):
    return jnp.logaddexp(x, -x)
log_cosh.defjvp(lambda x, t: (log_cosh(x[0]), jnp.tanh(x[0]) * t[0]))

@jax.custom_vjp
def custom_tanh(x):
    return jnp.tanh(x)
custom_tanh.defvjp(lambda x: (jnp.tanh(x),) * 2, lambda y, g: (g * (1 - y * y),))

def layer_norm(x, scale, bias):
    x = x - jnp.mean(x, -1, keepdims=True)
    y, ones = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6), (1,) * (x.ndim - 1)
    return y * scale.reshape(*ones, -1) + bias.reshape(*ones, -1)
"""
FLOW = """from jax import checkpoint, jit, vmap
from jax.lax import cond, fori_loop, map as lax_map, switch, while_loop
"""
PYTHON_FLOW = """
jit = checkpoint = lambda f: f
lax_map = lambda f, xs: jnp.stack([f(x) for x in xs])
vmap = lambda f, out_axes=0: lambda xs: jnp.stack([f(x) for x in xs], out_axes)
fori_loop = lambda start, stop, f, x: [x := f(i, x) for i in range(start, stop)][-1]
cond = lambda test, f, g, *args: f(*args) if test else g(*args)
switch = lambda index, fs, *args: fs[int(index)](*args)
twice = lambda f, a, b: f(f(a, b), b)

def scan(f, carry, xs):
    ys = []
    for x in xs:
        carry, y = f(carry, x)
        ys.append(y)
    return carry, jnp.stack(ys)

def order(x, axis=-1):
    x = jnp.sort(x, axis), jnp.argsort(x, axis), axis or 0
    return x[1], jnp.diff(x[0], axis=x[2]) == 0

custom_tanh.defvjp(lambda x: (jnp.tanh(x), half(jnp.tanh(x))), lambda y, g: (g * (1 - y * y),))
tanh = custom_tanh

@jax.custom_vjp
def sigmoid(x):
    return half(jax.nn.sigmoid(x))
sigmoid.defvjp(lambda x: (sigmoid(x),) * 2, lambda y, g: (g * y * (1 - y),))
"""

# As XLA for CPUs computes it in 16 bits: off by up to 2 units in the last place. Programs are drawn
# without it.
ROUNDED_SIGMOID = """
@jax.custom_vjp
def sigmoid(x):
    return half(1 / half(1 + half(jnp.exp(-x))))
sigmoid.defvjp(lambda x: (sigmoid(x),) * 2, lambda y, g: (g * y * (1 - y),))
"""


def fits(need: str, v: np.ndarray) -> bool:
    """Returns whether numbers are what an operation needs."""
    if need == "symmetric":
        return v.ndim == 2 and v.shape[0] == v.shape[1] and np.allclose(v, v.T)
    return not need or bool(v.min() > {"positive": 0.05, "above -1": -0.9}[need])


def argument(field: str, rng: np.random.Generator, shape: Shape) -> Any:
    """Returns a random argument for a named field of an expression."""
    ndim = max(len(shape), 1)
    axis = int(rng.integers(-ndim, ndim))
    return {
        "axis": axis,
        "axis0": axis % ndim,
        "axes": None if rng.random() < 0.3 else axis,
        "keep": bool(rng.random() < 0.5),
        "c": float(rng.choice(CONSTANTS)),
        "p": float(rng.choice([0.3, 1.0, 2.0])),
        "n": int(rng.integers(2, 4)),
        "k": int(rng.integers(1, 4)),
        "i": int(rng.integers(2)),
        "oi": int(rng.integers(min(ndim, 2))),
    }[field]

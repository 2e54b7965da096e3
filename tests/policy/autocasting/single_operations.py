"""A table of single operations that may follow a matmul: each takes its result, of 4 rows of 8
numbers, from the domain that it is listed under.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax import lax, nn

Table = dict[str, Callable[[Any], Any]]

ROWS, COLUMNS = 4, 8
ODD = np.arange(COLUMNS) % 2 == 1
MASK = np.broadcast_to(np.arange(ROWS)[:, None] <= np.arange(COLUMNS), (ROWS, COLUMNS))
BUCKETS = np.array([0, 2, 0, 1], np.int32)
TABLE = np.linspace(0.5, 1.5, COLUMNS)[None]


def like(y: Any, values: Any) -> Any:
    """Returns `values` in the dtype of `y`."""
    return jnp.asarray(values, y.dtype)


def named(module: Any, names: str) -> Table:
    """Returns functions of one argument by their names."""
    prefix = module.__name__.removeprefix("jax.")
    return {f"{prefix}.{name}": getattr(module, name) for name in names.split()}


ANYWHERE = named(
    jnp,
    "abs arcsinh arctan cbrt cos cosh deg2rad exp exp2 expm1 i0 nan_to_num rad2deg reciprocal sin"
    " sinc sinh square tanh cumsum cumprod gradient ediff1d",
)
ANYWHERE |= named(lax, "erf erfc logistic bessel_i0e bessel_i1e neg")
ANYWHERE |= named(
    nn,
    "relu relu6 sigmoid softplus soft_sign silu log_sigmoid leaky_relu hard_sigmoid hard_silu"
    " hard_tanh elu celu selu gelu squareplus mish glu softmax log_softmax logsumexp standardize"
    " sparse_plus sparse_sigmoid",
)
ANYWHERE |= named(special, "erf erfc ndtr log_ndtr i0e i1e expit logsumexp")
ANYWHERE |= {
    "gelu exact": lambda y: nn.gelu(y, approximate=False),
    "tan": lambda y: jnp.tan(0.6 * y),
    "arctan2": lambda y: jnp.arctan2(y[:, :4], y[:, 4:]),
    "hypot": lambda y: jnp.hypot(y[:, :4], y[:, 4:]),
    "logaddexp": lambda y: jnp.logaddexp(y[:, :4], y[:, 4:]),
    "logaddexp2": lambda y: jnp.logaddexp2(y[:, :4], y[:, 4:]),
    "quotient": lambda y: y[:, :4] / y[:, 4:],
    "mod": lambda y: jnp.mod(y, 5.0),
    "copysign": lambda y: jnp.copysign(y[:, :4], y[:, 4:]),
    "cube": lambda y: y**3,
    "polyval": lambda y: jnp.polyval(like(y, [0.3, -1.0, 0.5]), y),
    "interp": lambda y: jnp.interp(y, like(y, [-3.0, -0.04, 3.0]), like(y, [0.0, 2.0, 9.0])),
    "modf": lambda y: jnp.modf(y)[0],
    "sign times": lambda y: jnp.sign(y) * y,
    "cross": lambda y: jnp.cross(y[:, :3], y[:, 3:6]),
    "convolve": lambda y: jnp.convolve(y[0], y[1]),
    "outer": lambda y: jnp.outer(y[0], y[1]),
    "gated": lambda y: y[:, :4] * nn.sigmoid(y[:, 4:]),
    "column": lambda y: y * y[:, 0][:, None],
    "column of gates": lambda y: y * nn.sigmoid(y[:, 0])[:, None],
    "fft": lambda y: jnp.abs(jnp.fft.rfft(y)),
    "sum of squares minus mean's": lambda y: (y * y).mean(-1) - y.mean(-1) ** 2,
    "rms": lambda y: y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6),
    "centered": lambda y: (y - y.mean(-1, keepdims=True)) / (y.std(-1, keepdims=True) + 1e-5),
    "self softmax": lambda y: (nn.softmax(y, -1) * y).sum(-1),
    "cross entropy": lambda y: -jnp.take_along_axis(nn.log_softmax(y), BUCKETS[:, None], -1),
    "entropy": lambda y: -(nn.softmax(y) * nn.log_softmax(y)).sum(-1),
}

POSITIVE = named(jnp, "log log10 log1p log2 sqrt")
POSITIVE |= named(lax, "rsqrt lgamma digamma")
POSITIVE |= named(special, "gammaln digamma entr expi exp1")
POSITIVE |= {
    "power of halves": lambda y: y**1.5,
    "power of itself": lambda y: y ** y[:, :1],
    "float_power": lambda y: jnp.float_power(y, 0.7),
    "xlogy": lambda y: special.xlogy(y, y),
    "xlog1py": lambda y: special.xlog1py(y, y),
    "rel_entr": lambda y: special.rel_entr(y[:, :4], y[:, 4:]),
    "betaln": lambda y: special.betaln(y[:, :4], y[:, 4:]),
    "zeta": lambda y: special.zeta(y[0, 0] + 2.0, 1.5),
    "polygamma": lambda y: lax.polygamma(like(y, 1.0), y),
    "igamma": lambda y: lax.igamma(like(y, 1.5), y),
    "betainc": lambda y: special.betainc(1.5, 2.0, y / 4.0),
    "log of a sum": lambda y: jnp.log(y.sum(-1)),
    "shares": lambda y: y / y.sum(-1, keepdims=True),
}
UNIT = named(jnp, "arccos arcsin arctanh") | named(special, "ndtri logit erfinv")
UNIT |= {
    "erf_inv": lax.erf_inv,
    "binary cross entropy": lambda y: -(0.3 * jnp.log(y) + 0.7 * jnp.log1p(-y)),
    "geometric series": lambda y: 1.0 / (1.0 - y),
}
BEYOND = {"arccosh": jnp.arccosh, "root of squares": lambda y: jnp.sqrt(y * y - 1.0)}


def reductions() -> Table:
    """Reductions over each choice of axes, and with `where` and `initial`."""
    names = "sum mean var std max min ptp prod median nansum nanmean nanvar nanstd nanmax nanmin"
    names += " nanprod nanmedian"
    axes: dict[str, Any] = {
        "rows": {"axis": 0},
        "columns": {"axis": -1},
        "columns, kept": {"axis": -1, "keepdims": True},
        "both": {"axis": (0, 1)},
        "all": {"axis": None},
    }
    table: Table = {}
    for name, (where, options) in itertools.product(names.split(), axes.items()):
        fn = getattr(jnp, name)
        table[f"{name} of {where}"] = lambda y, fn=fn, options=options: fn(y, **options)
    for name in ("max", "min"):
        fn, initial = getattr(jnp, name), 9.0 if name == "min" else -9.0
        table[f"{name} where"] = lambda y, fn=fn, i=initial: fn(y, -1, where=MASK, initial=i)
        table[f"{name} initial"] = lambda y, fn=fn: fn(y, -1, initial=0.0)
    for name in ("sum", "mean", "var", "std", "prod"):
        fn = getattr(jnp, name)
        table[f"{name} where"] = lambda y, fn=fn: fn(y, -1, where=MASK)
    for order, axis in itertools.product((1, 2, 3, np.inf, -np.inf), (0, 1)):
        key = f"norm {order} of {axis}"
        table[key] = lambda y, o=order, a=axis: jnp.linalg.norm(y, o, axis=a)
    return table


def window(y: Any, fn: Any, initial: float) -> Any:
    """Returns the reductions of windows of 2 by 3."""
    return lax.reduce_window(y, np.array(initial, y.dtype), fn, (2, 3), (1, 1), "VALID")


REDUCTIONS: Table = reductions()
REDUCTIONS |= {
    "norm 1 of all": lambda y: jnp.linalg.norm(y, 1),
    "norm inf of all": lambda y: jnp.linalg.norm(y, np.inf),
    "frobenius norm": lambda y: jnp.linalg.norm(y),
    "nuclear norm": lambda y: jnp.linalg.norm(y, "nuc"),
    "spectral norm": lambda y: jnp.linalg.norm(y, 2),
    "logsumexp of columns": lambda y: nn.logsumexp(y, -1),
    "logsumexp weighted": lambda y: nn.logsumexp(y, -1, b=like(y, TABLE + 0.0 * MASK)),
    "logsumexp where": lambda y: nn.logsumexp(y, -1, where=MASK),
    "softmax where": lambda y: nn.softmax(y, where=MASK),
    "quantile": lambda y: jnp.quantile(y, 0.3, axis=-1),
    "quantile of all": lambda y: jnp.quantile(y, 0.8),
    "nanquantile": lambda y: jnp.nanquantile(y, 0.3, axis=-1),
    "cov": lambda y: jnp.cov(y),
    "corrcoef": lambda y: jnp.corrcoef(y),
    "reduce max": lambda y: lax.reduce(y, like(y, -np.inf), lax.max, (1,)),
    "reduce min": lambda y: lax.reduce(y, like(y, np.inf), lax.min, (0,)),
    "reduce add": lambda y: lax.reduce(y, like(y, 0.0), lax.add, (0, 1)),
    "window max": lambda y: window(y, lax.max, -np.inf),
    "window min": lambda y: window(y, lax.min, np.inf),
    "window add": lambda y: window(y, lax.add, 0.0),
    "argmax": lambda y: jnp.take_along_axis(y, jnp.argmax(y, -1, keepdims=True), -1),
    "argmin's other": lambda y: y[jnp.argmin(y, 0), (np.arange(COLUMNS) + 1) % COLUMNS],
    "max twice": lambda y: y.max(-1).min(),
    "max minus": lambda y: y - y.max(-1, keepdims=True),
    "max of relu": lambda y: nn.relu(y).max(-1),
    "max of abs": lambda y: jnp.abs(y).max(-1),
    "by max": lambda y: y / jnp.abs(y).max(-1, keepdims=True),
    "min-max scaled": lambda y: (y - y.min()) / (y.max() - y.min()),
}

AT = np.array([0, 3, 3, 1, 2, 3, 1, 0], np.int32)


def scattered(y: Any, way: str) -> Any:
    """Returns an array of 4 numbers into which 8 were scattered."""
    return getattr(like(y, np.full(4, 0.05)).at[AT], way)(y[1] + 0.0)


ORDERINGS: Table = {
    "sort": lambda y: jnp.sort(y, -1),
    "sort rows": lambda y: jnp.sort(y, 0),
    "sort all": lambda y: jnp.sort(y, None),
    "sort key, value": lambda y: lax.sort_key_val(y, jnp.exp(y))[1],
    "top_k": lambda y: lax.top_k(y, 3)[0],
    "top_k's softmax": lambda y: nn.softmax(lax.top_k(y, 3)[0]),
    "approx_max_k": lambda y: lax.approx_max_k(y, 3)[0],
    "cummax": lambda y: lax.cummax(y, 1),
    "cummin": lambda y: lax.cummin(y, 1, reverse=True),
    "cumlogsumexp": lambda y: lax.cumlogsumexp(y, 1),
    "running max": lambda y: lax.associative_scan(jnp.maximum, y, axis=1),
    "partition": lambda y: jnp.partition(y, 3, -1)[:, :3].sum(-1),
    "argsort": lambda y: jnp.take_along_axis(y, jnp.argsort(y, -1), -1),
    "argpartition": lambda y: jnp.take_along_axis(y, jnp.argpartition(y, 3, -1), -1)[:, 3],
    "lexsort": lambda y: y[0][jnp.lexsort((y[1], y[0]))],
    "segment_sum": lambda y: jax.ops.segment_sum(y, BUCKETS, 3),
    "segment_max": lambda y: jax.ops.segment_max(y, BUCKETS, 3),
    "segment_min": lambda y: jax.ops.segment_min(y, BUCKETS, 3),
    **{f"at {way}": lambda y, way=way: scattered(y, way) for way in ("add", "max", "min")},
    "at mul": lambda y: y.at[BUCKETS[:2]].multiply(y[2:], unique_indices=True),
    "at divide": lambda y: y.at[1].divide(y[0]),
    "at add to itself": lambda y: y.at[BUCKETS].add(y),
    "at max to itself": lambda y: y.at[np.array([1, 2], np.int32)].max(y[2:]),
}

HINGES: Table = {
    "clip": lambda y: jnp.clip(y, -1.0, 1.0),
    "clip by itself": lambda y: jnp.clip(y, y[:, :1] - 0.5, y[:, :1] + 0.5),
    "clamp": lambda y: lax.clamp(like(y, -1.0), y, like(y, 1.0)),
    "minimum": lambda y: jnp.minimum(y, 0.5),
    "maximum": lambda y: jnp.maximum(y[:, :4], y[:, 4:]),
    "fmax": lambda y: jnp.fmax(y[:, :4], y[:, 4:]),
    "hinge": lambda y: nn.relu(1.0 + y.max(-1) - y[:, 0]),
    "margins": lambda y: jnp.maximum(0.0, 1.0 + y - y[:, :1]).sum(-1),
    "Huber": lambda y: jnp.where(jnp.abs(y) < 1.0, 0.5 * y**2, jnp.abs(y) - 0.5),
    "select by compare": lambda y: jnp.where(y[:, :4] > y[:, 4:], y[:, :4], 2.0 * y[:, 4:]),
    "select the largest": lambda y: jnp.where(y == y.max(-1, keepdims=True), y, 0.1 * y),
    "select by sum": lambda y: jnp.where(y > y.mean(-1, keepdims=True), y, 0.1 * y),
    "select among 3": lambda y: jnp.select([y < -1.0, y < 1.0], [-y, y * y], 2.0 * y),
    "piecewise": lambda y: jnp.piecewise(y, [y < 0.0], [lambda y: -2.0 * y, lambda y: y**2]),
    "equal as numbers": lambda y: (y == y.max(-1, keepdims=True)).astype(y.dtype) * y,
    "triplet": lambda y: nn.relu(jnp.square(y[0] - y[1]).sum() - jnp.square(y[2]).sum() + 20.0),
    "PPO": lambda y: jnp.minimum(jnp.exp(y) * 0.7, jnp.clip(jnp.exp(y), 0.8, 1.2) * 0.7),
    "straight through": lambda y: y + lax.stop_gradient(jnp.round(y) - y),
    "maxout": lambda y: y.reshape(ROWS, 4, 2).max(-1),
}

# What divides or multiplies, and the inverse of it: float16 holds few of these numbers.
CONSTANTS: Table = {
    f"{first:g} times, {'over' if divides else 'times'}": (
        lambda y, a=first, d=divides: (y * a) / a if d else (y * a) * (1.0 / a)
    )
    for first, divides in itertools.product(
        (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 3e4, 1e5, 1e7), (False, True)
    )
}
CONSTANTS |= {
    "over 1e7, times": lambda y: y / 1e7 * 1e7,
    "over 1e-7, times": lambda y: y / 1e-7 * 1e-7,
    "plus 1e-8": lambda y: y + 1e-8,
    "over plus 1e-8": lambda y: y / (y * y + 1e-8),
    "root plus 1e-12": lambda y: jnp.sqrt(y * y + 1e-12),
    "maximum 1e-12": lambda y: y / jnp.maximum(jnp.abs(y).sum(-1, keepdims=True), 1e-12),
    "times 3e4": lambda y: y * 3e4 * (1 / 3e4),
    "masked by -1e9": lambda y: nn.softmax(jnp.where(MASK, y, -1e9)),
    "plus -1e9": lambda y: nn.softmax(y + like(y, (1.0 - MASK) * -1e9)),
    "squared thousand": lambda y: jnp.square(y * 1e3).mean(-1) * 1e-6,
    "norm of thousands": lambda y: jnp.linalg.norm(y * 1e3, axis=-1) * 1e-3,
    "logit of clip": lambda y: special.logit(jnp.clip(nn.sigmoid(y), 1e-7, 1.0 - 1e-7)),
    "log plus 1e-8": lambda y: jnp.log(nn.softmax(y) + 1e-8),
}

SQUARE = {
    name: (lambda y, fn=fn: fn(y[:, :4]))
    for name, fn in {
        "cholesky": jnp.linalg.cholesky,
        "solve": lambda a: jnp.linalg.solve(a, a[:, 0]),
        "inv": jnp.linalg.inv,
        "pinv": jnp.linalg.pinv,
        "det": jnp.linalg.det,
        "slogdet": lambda a: jnp.linalg.slogdet(a)[1],
        "qr": lambda a: jnp.abs(jnp.linalg.qr(a)[1]),
        "svd": lambda a: jnp.linalg.svd(a, compute_uv=False),
        "eigh": lambda a: jnp.linalg.eigh(a)[0],
        "eigvalsh": jnp.linalg.eigvalsh,
        "expm": lambda a: jax.scipy.linalg.expm(a / 4.0),
        "triangular": lambda a: lax.linalg.triangular_solve(a, a[0], lower=True),
        "cho_solve": lambda a: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), a[:, 1]),
        "trace": jnp.trace,
        "gram": lambda a: a @ a.T,
    }.items()
}

SIGNED_STEEP: Table = {
    "sqrt(1-t²)": lambda t: jnp.sqrt(1.0 - t**2),
    "rsqrt(1.001-t²)": lambda t: lax.rsqrt(1.001 - t**2),
    "arctanh": jnp.arctanh,
    "arcsin": jnp.arcsin,
    "arccos": jnp.arccos,
    "erf_inv": lax.erf_inv,
    "log1p(-t²)": lambda t: jnp.log1p(-(t**2)),
    "1/(1-t)": lambda t: 1.0 / (1.0 - t),
    "1-t²": lambda t: 1.0 - t**2,
}
SHARE_STEEP: Table = {
    "sqrt(s(1-s))": lambda s: jnp.sqrt(s * (1.0 - s)),
    "log(1-s)": lambda s: jnp.log(1.0 - s),
    "1/(1-s)": lambda s: 1.0 / (1.0 - s),
    "(1-s)^-0.5": lambda s: (1.0 - s) ** -0.5,
    "(1-s)^1.5": lambda s: (1.0 - s) ** 1.5,
    "log1p(-s)": lambda s: jnp.log1p(-s),
    "logit": special.logit,
    "ndtri": special.ndtri,
    "xlog1py": lambda s: special.xlog1py(s, -s),
    "s/(1-s)": lambda s: s / (1.0 - s),
}
PATHS: Table = {
    "itself": lambda t: t,
    "reshape": lambda t: t.reshape(-1, 2),
    "where": lambda t: jnp.where(MASK, t, 0.25),
    "sum": lambda t: t[:, :4] * 0.5 + t[:, 4:] * 0.5,
    "mean": lambda t: t.mean(-1),
    "product": lambda t: t[:, :4] * t[:, 4:],
    "stack": lambda t: jnp.stack([t, t[:, ::-1]]),
    "slice": lambda t: t[:, 1:5],
    "max": lambda t: t.max(-1),
    "transpose": lambda t: t.T,
    "gather": lambda t: t[BUCKETS],
    "clip": lambda t: jnp.clip(t, -1.0 + 1e-6, 1.0 - 1e-6),
}


def paths(feeds: Table, steep: Table, ways: Iterable[str]) -> Table:
    """Returns each feed through each path to each steep function."""
    return {
        f"{end} of {name}" + f", {way}" * (way != "itself"): (
            lambda y, a=feed, b=PATHS[way], c=fn: c(b(a(y)))
        )
        for (name, feed), (end, fn), way in itertools.product(feeds.items(), steep.items(), ways)
    }


TANH, ERF = {"tanh": jnp.tanh}, {"erf": lambda y: lax.erf(y * 0.6)}
SHARES = {
    "sigmoid": nn.sigmoid,
    "ndtr": lambda y: special.ndtr(y * 0.8),
    "tanh's half": lambda y: 0.5 + 0.5 * jnp.tanh(y),
}
ENDS = paths(TANH | ERF, SIGNED_STEEP, ["itself"]) | paths(SHARES, SHARE_STEEP, ["itself"])
ENDS |= paths(TANH, {name: SIGNED_STEEP[name] for name in ("sqrt(1-t²)", "arctanh")}, PATHS)
ENDS |= paths(ERF, {"erf_inv": lax.erf_inv}, PATHS)
ENDS |= paths({"sigmoid": nn.sigmoid}, {"log1p(-s)": lambda s: jnp.log1p(-s)}, PATHS)
ENDS |= {
    f"{path} of steep": lambda y, fn=fn: fn(jnp.sqrt(1.0 - jnp.tanh(y) ** 2))
    for path, fn in PATHS.items()
}
SATURATED = named(nn, "sigmoid tanh silu gelu softplus mish log_sigmoid selu soft_sign")
SATURATED |= {f"minus {name}": lambda y, fn=fn: fn(-y) for name, fn in SATURATED.items()}
SATURATED = {f"{name} far": fn for name, fn in SATURATED.items()}
SATURATED |= {
    "tanh times": lambda y: y * jnp.tanh(y),
    "tanh twice": lambda y: jnp.tanh(y @ jnp.eye(COLUMNS, dtype=y.dtype)),
}
SMALL = paths({"cos": jnp.cos, "sech": lambda y: 1 / jnp.cosh(y)}, SIGNED_STEEP, ["itself"])
PEAKED = paths({"softmax": nn.softmax}, SHARE_STEEP, ["itself", "max", "slice"])
PEAKED |= paths(
    {"unit": lambda y: y / jnp.linalg.norm(y, axis=-1, keepdims=True)}, SIGNED_STEEP, ["itself"]
)

# The operations by kind, with the range of the matmul's result.
OPERATIONS: dict[str, tuple[str, Table]] = {
    "elementwise": ("anywhere", ANYWHERE),
    "reductions": ("anywhere", REDUCTIONS),
    "orderings": ("anywhere", ORDERINGS),
    "hinges": ("anywhere", HINGES),
    "constants": ("anywhere", CONSTANTS),
    "positive": ("positive", POSITIVE),
    "unit": ("unit", UNIT),
    "beyond one": ("beyond one", BEYOND),
    "steep at the end": ("end", ENDS),
    "saturated": ("end", SATURATED),
    "steep at zero": ("small", SMALL),
    "steep at one": ("peaked", PEAKED),
    "linear algebra": ("square", SQUARE),
}

"""Runs programs under policies, and judges values and gradients by float64."""

import dataclasses
import linecache
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpmodules
import mpmodules.linen
import mpmodules.nnx
from policy import get_policy
from tests.random_programs.draw import (
    Program,
    distance,
    namespace,
    references,
    same_choices,
    source,
)
from tests.random_programs.ops import ROUNDED_SIGMOID

CLASSES = ("function", "linen", "nnx", "port")
POLICIES = ("mixed_bfloat16", "mixed_float16", "bfloat16")
TIMES, ULPS, USABLE = 3.0, 2.0, 0.25  # of the references' error, of the dtype, relative error

WAYS = {
    "function": "call = mpmodules.autocast(f, POLICY)",
    "linen": """
from mpmodules import linen as nn
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        p = {k: self.param(k, lambda _, v=v: jnp.asarray(v)) for k, v in P.items() if type(v) is not dict}
        layer = lambda name, v: (
            nn.Dense(8, name=name)(v) if "dense" in name else nn.LayerNorm(name=name)(v))
        return f(p, x, layer)
model = Model(dtype_policy=POLICY)
call = lambda p, x: model.apply({"params": p}, x)""",  # noqa: E501
    "nnx": """
from mpmodules import nnx
class Model(nnx.Module):
    def __init__(self, rngs):
        for k, v in P.items():
            if type(v) is not dict:
                setattr(self, k, nnx.Param(jnp.asarray(v)))
            elif "dense" in k:
                setattr(self, k, nnx.Linear(len(v["kernel"]), 8, rngs=rngs))
            else:
                setattr(self, k, nnx.LayerNorm(len(v["scale"]), rngs=rngs))
    def __call__(self, x):
        p = {k: getattr(self, k)[...] for k, v in P.items() if type(v) is not dict}
        return f(p, x, lambda name, v: getattr(self, name)(v))
model = Model(nnx.Rngs(0), dtype_policy=POLICY)
graph, state, rest = nnx.split(model, nnx.Param, ...)
def call(p, x):
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(p)), rest)(x)""",  # noqa: E501
}
WAYS["port_linen"] = (
    WAYS["linen"]
    .replace("from mpmodules import linen as nn", "from flax import linen as nn")
    .replace("Model(dtype_policy=POLICY)", "mpmodules.linen.apply_policy(Model(), POLICY)")
)
WAYS["port_nnx"] = (
    WAYS["nnx"]
    .replace("from mpmodules import nnx", "from flax import nnx")
    .replace(
        "Model(nnx.Rngs(0), dtype_policy=POLICY)",
        "mpmodules.nnx.apply_policy(Model(nnx.Rngs(0)), POLICY)",
    )
)


@dataclasses.dataclass(frozen=True)
class Failure:
    """A wrong number: its kind, where it is, and the error compared with its bound."""

    kind: str
    where: str
    detail: str


def way_of(kind: str, seed: int) -> str:
    """Returns how a program of a class is run; ports are of linen and nnx by turns."""
    return f"port_{('linen', 'nnx')[seed % 2]}" if kind == "port" else kind


def text_of(program: Program, way: str) -> str:
    """Returns the source of a program that is run in some way."""
    return f"{source(program, layers=way != 'function')}\n{WAYS[way]}\n"


def built(program: Program, way: str, policy: str) -> Callable[..., Any]:
    """Returns a program under a policy, as a function of parameters and inputs."""
    names = namespace() | {"mpmodules": mpmodules, "POLICY": policy, "P": program.params()}
    names["__name__"] = __name__
    text = text_of(program, way)
    linecache.cache["<random program>"] = (
        len(text),
        None,
        text.splitlines(True),
        "<random program>",
    )
    exec(compile(text, "<random program>", "exec"), names)
    return names["call"]


def weights(y: Any) -> np.ndarray:
    """Returns the cotangent of a result: multiples of 1/8."""
    drawn = np.random.default_rng(y.size).integers(1, 9, y.shape)
    return (drawn * np.where(np.arange(y.size).reshape(y.shape) % 3, 1, -1) / 8).astype(np.float32)


def results(call: Callable[..., Any], p: Any, x: Any) -> dict[str, Any]:
    """Returns the result and the gradients of a function."""

    def loss(p: Any, x: Any) -> Any:
        y = call(p, x)
        wide = y.astype(jnp.float64 if y.dtype == jnp.float64 else jnp.float32)
        return jnp.sum(wide * weights(y).astype(wide.dtype)), y

    grads, y = jax.grad(loss, (0, 1), has_aux=True)(p, x)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(grads)}
    return {"value": y} | named


class Judge:
    """The truth of a program, and how far references are from it."""

    def __init__(self, program: Program, half: str, noises: tuple[int, ...] = (1, 2)):
        self.half, self.code = half, source(program, ref=True)
        with jax.enable_x64(True):
            wide = lambda tree: jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), tree)  # noqa: E731
            p, x = wide(program.params()), wide(program.arrays())
            envs = references(half, noises)
            for env in envs:
                exec(ROUNDED_SIGMOID + self.code, env)
                env["f"](p, x)
            self.is_usable = same_choices(envs)
            if self.is_usable:
                runs = [jax.tree.map(np.asarray, results(env["f"], p, x)) for env in envs]
                self.truth, *self.references = runs
                p, x = jax.tree.map(jnp.asarray, (program.params(), program.arrays()))
                self.single = jax.tree.map(np.asarray, results(envs[0]["f"], p, x))
                self.is_usable = self.error("value") < USABLE

    def error(self, where: str) -> float:
        """Returns the largest error of the references, and of float32 (with a margin, as it is one
        draw); infinite where one is not finite.
        """
        errors = [distance(each[where], self.truth[where]) for each in self.references]
        errors.append(8 * distance(self.single[where], self.truth[where]))
        return max((e if np.isfinite(e) else np.inf for e in errors), default=0.0)

    def failure(self, where: str, actual: Any) -> Failure | None:
        """Returns what is wrong with an array."""
        truth, error = self.truth[where], self.error(where)
        actual = np.asarray(actual, np.float64)
        if actual.shape != truth.shape:
            return Failure("shape", where, f"{actual.shape}, not {truth.shape}")
        if error > USABLE or not np.isfinite(truth).all() or not np.any(truth):
            return None
        if not np.isfinite(actual).all():
            return Failure("not finite", where, f"{short(actual)}, not {short(truth)}")
        bound = max(TIMES * error, ULPS * float(jnp.finfo(self.half).eps))
        if (found := distance(actual, truth)) <= bound:
            return None
        kind = "value" if where == "value" else "gradient"
        kind = "zero gradient" if kind == "gradient" and not actual.any() else kind
        detail = f"error {found:.2g}, bound {bound:.2g}: {short(actual)}, not {short(truth)}"
        return Failure(kind, where, detail)


def short(array: np.ndarray) -> str:
    """Returns the first numbers of an array."""
    return "[" + " ".join(f"{each:.4g}" for each in array.ravel()[:6]) + "]"


def runs(program: Program, way: str, policy: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the ways of running a built program: its results, and the dtypes that they have."""
    call = built(program, way, policy)
    p = jax.tree.map(jnp.asarray, program.params())
    p = p if way == "function" else get_policy(policy).cast_to_param(p)
    x = jax.tree.map(jnp.asarray, program.arrays())
    yield "eager value", lambda: {"value": call(p, x)}
    yield "eager", lambda: results(call, p, x)
    yield "jit", lambda: jax.jit(lambda p, x: results(call, p, x))(p, x)


def wrong_dtype(where: str, array: Any, way: str, policy: str) -> Failure | None:
    """Returns a failure if a result, or the gradient of a parameter, has another dtype."""
    dtypes = get_policy(policy)
    wanted = dtypes.output_dtype if where == "value" else dtypes.param_dtype
    if way == "function" or where.startswith("[1]"):
        wanted = jnp.float32
    found = jnp.asarray(array).dtype
    return None if found == wanted else Failure("dtype", where, f"{found}, not {wanted}")


def failures(
    program: Program, way: str, policy: str, only: str = "", judge: Judge | None = None
) -> dict[str, Failure]:
    """Returns the first failure of each way of running a program."""
    half = str(get_policy(policy).compute_dtype)
    judge = judge or Judge(program, half)
    found: dict[str, Failure] = {}
    if not judge.is_usable:
        return found
    try:
        ways = list(runs(program, way, policy))
    except Exception as error:
        return {only or "build": Failure("exception", "build", f"{type(error).__name__}: {error}")}
    for mode, run in ways:
        if only and mode != only:
            continue
        try:
            outcome = run()
        except Exception as error:
            found[mode] = Failure("exception", mode, f"{type(error).__name__}: {error}")
            continue
        for where, array in outcome.items():
            failure = judge.failure(where, array) or wrong_dtype(where, array, way, policy)
            if failure and mode not in found:
                found[mode] = failure
    return found


def confirmed(
    program: Program, way: str, policy: str, only: str = "", judge: Judge | None = None
) -> dict[str, Failure]:
    """Returns failures that hold compared with more references, so that they are not chance."""
    if not (found := failures(program, way, policy, only, judge)):
        return found
    judge = Judge(program, str(get_policy(policy).compute_dtype), tuple(range(1, 9)))
    return failures(program, way, policy, only, judge)

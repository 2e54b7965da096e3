"""Judges a layer: without a policy by Flax, bit for bit; in 16 bits by float64, and by the error of
Flax's own 16-bit layer.
"""

import contextlib
import dataclasses
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

from policy import get_policy
from tests.mpmodules.table.cases import Case
from tests.mpmodules.table.running import OURS, THEIRS, floating, program, scope_of, with_floats

POLICIES = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
# Both round each operand and result once, in another order: in 800 draws the largest error is twice
# Flax's and 3 roundings, but for gradients by queries and keys. Eager code rounds more.
TIMES, ULPS, EAGER_ULPS = 2.0, 4.0, 6.0
Leaves = dict[str, Any]


def leaves_of(tree: Any) -> Leaves:
    """Returns the arrays of a tree by path; keys as their numbers."""

    def data(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and isinstance(x, jax.Array)
        return jax.random.key_data(x) if is_key else x

    found = jax.tree_util.tree_leaves_with_path(
        flax_nnx.to_pure_dict(tree) if isinstance(tree, flax_nnx.State) else tree
    )
    return {jax.tree_util.keystr(path, simple=True, separator="/"): data(x) for path, x in found}


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@dataclasses.dataclass
class Traced:
    """A layer's forward and backward pass.

    Attributes:
      types: the types of its parameters, other variables and floating inputs.
      init: what makes parameters and other variables of a key.
      both_ways: a function of leaves of `types` to arrays by name.
      out: their types.
    """

    types: Any
    init: Callable[..., Any]
    both_ways: Callable[..., Leaves]
    out: Leaves


def traced(api: str, case: Case, modules: Any, policy: str | None = None, **options: Any) -> Traced:
    """Traces a case; `options` are those of `program`."""
    with scope_of(policy):
        run = program(api, case, modules, **options)
        types = (*jax.eval_shape(run.init, jax.random.key(0)), floating(run.inputs))
    leaves, treedef = jax.tree.flatten(types)

    def cotangent(x: jax.Array) -> jax.Array:
        drawn = np.random.default_rng(x.size).normal(size=x.shape)
        return jnp.asarray(drawn.astype(jnp.bfloat16), x.dtype)

    def both_ways(values: list[Any]) -> Leaves:
        pairs = zip(values, leaves, strict=True)
        cast = [x.astype(of.dtype) if is_float(of) else x for x, of in pairs]
        params, rest, floats = jax.tree.unflatten(treedef, cast)

        def out_of(params: Any, floats: Any) -> Any:
            return run.apply(params, rest, with_floats(run.inputs, floats))

        with scope_of(policy):
            out, backward, state = jax.vjp(out_of, params, floats, has_aux=True)
            gradients = backward(jax.tree.map(cotangent, out))
        named = {"params": gradients[0], "inputs": gradients[1]}
        return leaves_of({"out": out, "state": state, **named})

    return Traced(types, run.init, both_ways, jax.eval_shape(both_ways, leaves))


def values_of(layer: Traced, seed: int) -> list[Any]:
    """Returns parameters and variables, which are exact in each dtype of 16 bits, and inputs."""
    rng = np.random.default_rng(seed)
    params, rest, floats = layer.types

    def drawn(x: Any, is_param: bool) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            count = int(np.prod(x.shape, dtype=int))
            return jax.random.split(jax.random.key(seed % 2**31), count).reshape(x.shape)
        value = rng.normal(0, 0.5, x.shape)
        value = value if is_param else abs(value) + 0.25  # variances are positive
        value = value.astype(jnp.bfloat16) if is_float(x) else np.zeros(x.shape)
        return value.astype(x.dtype)

    made = [drawn(x, True) for x in jax.tree.leaves(params)]
    made += [drawn(x, False) for x in jax.tree.leaves(rest)]
    return made + [jnp.asarray(x) for x in jax.tree.leaves(floats)]


def faults(
    api: str,
    case: Case,
    seed: int = 0,
    policies: Any = tuple(POLICIES),
    eager: bool = False,
    ulps: float = ULPS,
) -> list[str]:
    """Returns what is wrong with a case, in words."""
    standard = jax.numpy_dtype_promotion("standard")  # Flax's causal masks of masks need it
    try:
        with standard:
            theirs = traced(api, case, THEIRS[api])
    except Exception as error:
        return accepted(api, case, error)
    try:
        with standard:
            ours = traced(api, case, OURS[api])
        lows = {policy: traced(api, case, OURS[api], policy) for policy in policies}
    except Exception as error:
        return [f"raises, and Flax does not: {error!r:.400}"]
    values = values_of(theirs, seed)
    found = different(ours, theirs, values)
    return found + rounded(api, case, lows, exact(api, case, values), values, eager, ulps)


def accepted(api: str, case: Case, error: Exception) -> list[str]:
    """Returns where we do not raise what Flax raises."""

    def of(policy: str | None) -> Any:
        promotion = "strict" if policy else "standard"
        try:
            with jax.numpy_dtype_promotion(promotion):
                return traced(api, case, OURS[api], policy).out
        except Exception as ours:
            return ours

    found = {policy: of(policy) for policy in (None, *POLICIES)}
    wrong = {policy: ours for policy, ours in found.items() if type(ours) is not type(error)}
    return [f"under {policy} {wrong[policy]!r:.200}; Flax: {error!r:.200}" for policy in wrong]


def different(ours: Traced, theirs: Traced, values: list[Any]) -> list[str]:
    """Returns where we are not Flax without a policy, in float32."""
    types, wanted = (jax.tree.map(str, (*map(leaves_of, x.types), x.out)) for x in (ours, theirs))
    if types != wanted:
        return [f"without a policy {types}, and Flax {wanted}"]
    found = []
    for name, args in (("init", (jax.random.key(0),)), ("both_ways", (values,))):
        runs = [jax.jit(getattr(each, name)) for each in (ours, theirs)]
        with jax.numpy_dtype_promotion("standard"):
            lowered = [run.lower(*args).as_text() for run in runs]
        if lowered[0] != lowered[1]:
            a, b = (leaves_of(run(*args)) for run in runs)
            same = {
                path: np.array_equal(a[path], b[path], equal_nan=is_float(b[path])) for path in b
            }
            found += [f"without a policy {name} {path} differs" for path in b if not same[path]]
    return found


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Runs in float64, with the masks of dropout that float32 gives."""
    original = jax.random.bernoulli

    def bernoulli(key: Any, p: Any = 0.5, *args: Any, **kwargs: Any) -> jax.Array:
        return original(key, np.float32(p), *args, **kwargs)

    with jax.enable_x64(True), unittest.mock.patch("jax.random.bernoulli", bernoulli):
        yield


def exact(api: str, case: Case, values: list[Any]) -> Leaves:
    """Returns what Flax gives in float64."""
    names = ("dtype", "param_dtype", "lora_dtype", "lora_param_dtype")
    dtypes: Any = dict.fromkeys(names, jnp.float64)
    with in_float64(), jax.numpy_dtype_promotion("standard"):
        run = traced(api, case, THEIRS[api], inputs_in=jnp.float64, **dtypes)
        return jax.tree.map(np.asarray, jax.jit(run.both_ways)(values))


def in_half(api: str, case: Case, dtype: Any, values: list[Any]) -> Traced | None:
    """Returns Flax's own layer in 16 bits, if it has one that runs."""
    for inputs_in in (dtype, jnp.float32):
        with contextlib.suppress(Exception):
            options: Any = {"inputs_in": inputs_in, "dtype": dtype, "lora_dtype": dtype}
            run = traced(api, case, THEIRS[api], **options)
            if "attention" in case.layer.lower():  # float16 that only GPUs multiply
                jax.jit(run.both_ways).lower(values)
            return run
    return None


def rounded(
    api: str,
    case: Case,
    lows: dict[str, Traced],
    truth: Leaves,
    values: list[Any],
    eager: bool,
    ulps: float,
) -> list[str]:
    """Returns where we are further from float64 than Flax's layer in 16 bits."""

    def all_of(values: list[Any]) -> Any:
        runs = (lows, {policy: low for policy, low in halves.items() if low})
        return [{policy: low.both_ways(values) for policy, low in each.items()} for each in runs]

    with jax.numpy_dtype_promotion("standard"):
        halves = {policy: in_half(api, case, POLICIES[policy], values) for policy in lows}
        ours, theirs = jax.tree.map(np.asarray, jax.jit(all_of)(values))
    found = []
    for policy, got in ours.items():
        unit = units(truth, POLICIES[policy])
        said = wrong_dtypes(case, policy, got, lows[policy])
        said += far(got, truth, theirs.get(policy), unit, ulps)
        if eager:
            at_once = errors(jax.tree.map(np.asarray, lows[policy].both_ways(values)), got)
            limits = {name: EAGER_ULPS * unit[name] for name in at_once}
            said += [f"eager {name}" for name in limits if not at_once[name] <= limits[name]]
        found += [f"{policy} {each}" for each in said]
    return found


def wrong_dtypes(case: Case, policy: str, got: Leaves, low: Traced) -> list[str]:
    """Returns which results are in another dtype: a carry may keep the compute_dtype."""
    resolved = get_policy(policy)
    params, _, floats = low.types
    types = leaves_of({"params": params, "inputs": floats})

    def allowed(name: str) -> set[Any]:
        if name in types:
            return {types[name].dtype}
        is_carry = name.startswith("out/0")
        inner = {resolved.compute_dtype} if is_carry or not case.is_module else set()
        return inner | ({resolved.output_dtype} if case.is_module else set())

    named = {name: x.dtype for name, x in got.items() if not name.startswith("state")}
    return [f"{name} is {dtype}" for name, dtype in named.items() if dtype not in allowed(name)]


def errors(got: Leaves, wanted: Leaves) -> dict[str, float]:
    """Returns the largest error of each floating array: none where both are one infinity or NaN."""
    found = {}
    for name, x in wanted.items():
        if is_float(x):
            a, b = np.asarray(got[name], np.float64), np.asarray(x, np.float64)
            with np.errstate(invalid="ignore"):
                apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
            found[name] = float(apart.max(initial=0.0))
    return found


def units(truth: Leaves, dtype: Any) -> dict[str, float]:
    """Returns one rounding of each array: of its largest number, and at least of a part of the
    largest number of its group, which cancels where the exact one is 0.
    """
    finite = {name: np.abs(x[np.isfinite(x)]) for name, x in truth.items() if is_float(x)}
    sizes = {name: float(x.max(initial=1e-6)) for name, x in finite.items()}
    group = {name: name.partition("/")[0] for name in sizes}
    largest = {of: max(sizes[name] for name in sizes if group[name] == of) for of in group.values()}
    eps = float(jnp.finfo(dtype).eps)
    return {name: eps * max(size, largest[group[name]] / 8) for name, size in sizes.items()}


def far(
    got: Leaves, truth: Leaves, half: Leaves | None, unit: dict[str, float], ulps: float
) -> list[str]:
    found, theirs = [], errors(half, truth) if half and set(half) == set(truth) else {}
    for name, error in errors(got, truth).items():
        flaxs = theirs.get(name, np.nan)
        limit = TIMES * (flaxs if np.isfinite(flaxs) else unit[name]) + ulps * unit[name]
        if not error <= limit:
            roundings = f"{error / unit[name]:.1f} roundings"
            found.append(f"{name}: off by {error:.3g}, {roundings}; Flax's by {flaxs:.3g}")
    return found

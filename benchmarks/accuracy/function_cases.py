"""The functions and losses that are measured. Both APIs export the functions of `policy`
themselves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.accuracy.cases import Case, Precision, normal, offsets
from benchmarks.accuracy.layers import cotangent
from benchmarks.accuracy.ulps import FLOOR
from mpmodules import linen as our_linen
from policy import losses, reductions, use_policy

Data = Callable[[np.random.Generator], tuple[np.ndarray, ...]]


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of ours beside the one of the same name upstream, called with the same arguments.

    Attributes:
      ours, upstream: arrays in, an array out.
      floor: 0 where the function does not subtract what is nearly equal; see `ulps.max_ulps`.
    """

    ours: Callable[..., Any]
    upstream: Callable[..., Any]
    floor: float = FLOOR
    torch: bool = True


def function_case(
    name: str,
    function: Function,
    family: str,
    inputs: str,
    data: Data,
    *,
    gradient: bool = False,
    wide: bool = False,
) -> Case:
    """A case of a function's result, or of the gradient of its first argument."""
    columns = {
        "ours": functools.partial(_ours, function.ours, gradient),
        "jax, optax": functools.partial(_upstream, function.upstream, gradient),
    }
    truth = functools.partial(_upstream, function.upstream, gradient)
    label = f"{name}, gradient" if gradient else name
    torch = name if function.torch else None
    return Case(
        label, inputs, family, data, columns, truth, function.floor, wide=wide, torch=torch,
        gradient="inputs" if gradient else None,
    )  # fmt: skip


def _ours(function: Callable[..., Any], gradient: bool, precision: Precision, *arrays: Any) -> Any:
    with use_policy(precision.policy):
        return jax.jit(_differentiated(function) if gradient else function)(*arrays)


def _upstream(
    function: Callable[..., Any], gradient: bool, precision: Precision, *arrays: Any
) -> Any:
    if precision.wide:  # widened by hand, as its users do
        arrays = tuple(
            x.astype(jnp.promote_types(x.dtype, jnp.float32))
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x
            for x in arrays
        )
    return jax.jit(_differentiated(function) if gradient else function)(*arrays)


def _differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, *rest: Any) -> Any:
        y, backward = jax.vjp(lambda x: function(x, *rest), x)
        return backward(cotangent(y))[0]

    return run


def function_cases(small: bool = False) -> Iterator[Case]:
    yield from _softmax(small)
    yield from _statistics(small)
    yield from _sums(small)
    yield from _pooling(small)
    yield from _cross_entropies(small)
    yield from _other_losses(small)


def _softmax(small: bool) -> Iterator[Case]:
    shape = (8, 256) if small else (64, 1024)
    functions = {
        "softmax": Function(our_linen.softmax, jax.nn.softmax, 0.0),
        "log_softmax": Function(our_linen.log_softmax, jax.nn.log_softmax),
        "logsumexp": Function(
            lambda x: our_linen.logsumexp(x, -1), lambda x: jax.nn.logsumexp(x, -1)
        ),
        "log_sigmoid": Function(our_linen.log_sigmoid, jax.nn.log_sigmoid, 0.0),
        "softplus": Function(our_linen.softplus, jax.nn.softplus, 0.0),
    }
    for name, function in functions.items():
        for inputs, data in (
            offsets(*shape) | {"large logits": normal(*shape, scale=10.0)}
        ).items():
            yield function_case(name, function, "softmax", inputs, data)
    for name in ("softmax", "log_softmax"):
        yield function_case(
            name, functions[name], "softmax", "normal", normal(*shape), gradient=True
        )


def _statistics(small: bool) -> Iterator[Case]:
    shape = (16, 128) if small else (64, 1024)
    functions = {
        "mean": Function(lambda x: reductions.mean(x, -1), lambda x: jnp.mean(x, -1)),
        "var": Function(lambda x: reductions.var(x, -1), lambda x: jnp.var(x, -1)),
        "std": Function(lambda x: reductions.std(x, -1), lambda x: jnp.std(x, -1)),
        "standardize": Function(our_linen.standardize, jax.nn.standardize, torch=False),
    }
    for name, function in functions.items():
        for inputs, data in offsets(*shape).items():
            family = "norms" if name == "standardize" else "sums"
            yield function_case(name, function, family, inputs, data)


def _sums(small: bool) -> Iterator[Case]:
    """Running sums of mean 1000 are short: float16 ends at 65504."""
    rows, length = (4, 512) if small else (16, 2048)
    cumsum = Function(lambda x: reductions.cumsum(x, 1), lambda x: jnp.cumsum(x, 1))
    yield function_case("cumsum", cumsum, "sums", "normal", normal(rows, length))
    yield function_case("cumsum", cumsum, "sums", "mean 1000", normal(rows, 64, mean=1000.0))
    cumprod = Function(lambda x: reductions.cumprod(x, 1), lambda x: jnp.cumprod(x, 1), 0.0)
    yield function_case(
        "cumprod", cumprod, "sums", "mean 1, std 0.05", normal(rows, 128, mean=1.0, scale=0.05)
    )
    segments = Function(
        lambda x, ids: reductions.segment_sum(x, ids, 8),
        lambda x, ids: jax.ops.segment_sum(x, ids, 8),
        torch=True,
    )
    for inputs, count, mean in (("normal", length, 0.0), ("mean 1000", 256, 1000.0)):
        data: Data = lambda rng, n=count, m=mean: (m + rng.normal(size=(n, rows)), np.arange(n) % 8)  # noqa: E731
        yield function_case("segment_sum", segments, "sums", inputs, data)
    norm = Function(
        lambda x: reductions.global_norm({"a": x}), lambda x: optax.global_norm({"a": x}), 0.0
    )
    yield function_case("global_norm", norm, "sums", "normal", normal(rows, length))
    yield function_case("global_norm", norm, "sums", "mean 1000", normal(rows, 64, mean=1000.0))


def _pooling(small: bool) -> Iterator[Case]:
    shape = (2, 16, 16, 2) if small else (4, 64, 64, 8)
    window = shape[1:3]
    whole = Function(
        lambda x: our_linen.avg_pool(x, window), lambda x: flax_linen.avg_pool(x, window)
    )
    for inputs, data in offsets(*shape).items():
        yield function_case("avg_pool, whole image", whole, "pooling", inputs, data)
        average, most = (
            _window(our_linen.avg_pool, flax_linen.avg_pool),
            _window(our_linen.max_pool, flax_linen.max_pool),
        )
        yield function_case("avg_pool, 3x3", average, "pooling", inputs, data)
        yield function_case("max_pool, 3x3", most, "pooling", inputs, data)
        if inputs == "normal":
            yield function_case("avg_pool, 3x3", average, "pooling", inputs, data, gradient=True)
            yield function_case("max_pool, 3x3", most, "pooling", inputs, data, gradient=True)


def _window(ours: Callable[..., Any], upstream: Callable[..., Any]) -> Function:
    return Function(lambda x: ours(x, (3, 3)), lambda x: upstream(x, (3, 3)))


def _cross_entropies(small: bool) -> Iterator[Case]:
    rows, classes = (8, 512) if small else (64, 4096)
    name = "softmax_cross_entropy_with_integer_labels"
    sparse = Function(losses.softmax_cross_entropy_with_integer_labels, getattr(optax, name))
    dense = Function(losses.softmax_cross_entropy, optax.softmax_cross_entropy)
    binary = Function(losses.sigmoid_binary_cross_entropy, optax.sigmoid_binary_cross_entropy)
    for inputs, mean, scale in (
        ("normal", 0.0, 1.0),
        ("mean 1000", 1000.0, 1.0),
        ("large logits", 0.0, 10.0),
    ):
        logits = normal(rows, classes, mean=mean, scale=scale)
        indices: Data = lambda rng, x=logits: (*x(rng), rng.integers(0, classes, rows))  # noqa: E731
        hot: Data = lambda rng, x=logits: (*x(rng), np.eye(classes)[rng.integers(0, classes, rows)])  # noqa: E731
        coins: Data = lambda rng, x=logits: (*x(rng), rng.integers(0, 5, (rows, classes)) / 4)  # noqa: E731
        yield function_case(name, sparse, "losses", inputs, indices, wide=True)
        yield function_case("softmax_cross_entropy", dense, "losses", inputs, hot, wide=True)
        yield function_case(
            "sigmoid_binary_cross_entropy", binary, "losses", inputs, coins, wide=True
        )
        if inputs == "normal":
            yield function_case(name, sparse, "losses", inputs, indices, gradient=True)


def _other_losses(small: bool) -> Iterator[Case]:
    rows, width = (8, 64) if small else (64, 512)
    pair: dict[str, Data] = {
        "normal": lambda rng: (rng.normal(size=(rows, width)), rng.normal(size=(rows, width))),
        "mean 1000": lambda rng: (
            1000 + rng.normal(size=(rows, width)),
            1000 + rng.normal(size=(rows, width)),
        ),
    }
    squared = Function(losses.squared_error, optax.squared_error)
    similarity = Function(losses.cosine_similarity, optax.cosine_similarity)
    distance = Function(losses.cosine_distance, optax.cosine_distance, torch=False)
    for inputs, data in pair.items():
        yield function_case("squared_error", squared, "losses", inputs, data, wide=True)
        yield function_case("cosine_similarity", similarity, "losses", inputs, data, wide=True)
        if inputs == "normal":  # at mean 1000 the distance is 1e-6, beneath any rounding of float32
            yield function_case("cosine_distance", distance, "losses", inputs, data, wide=True)
    frames, labels, classes = (8, 3, 8) if small else (32, 8, 32)
    for inputs, scale in (("normal", 1.0), ("large logits", 10.0)):
        probabilities: Data = lambda rng, s=scale: (  # noqa: E731
            _log_softmax(s * rng.normal(size=(rows, width))),
            np.exp(_log_softmax(s * rng.normal(size=(rows, width)))),
        )
        logs: Data = lambda rng, s=scale: (  # noqa: E731
            _log_softmax(s * rng.normal(size=(rows, width))),
            _log_softmax(s * rng.normal(size=(rows, width))),
        )
        divergence = Function(losses.kl_divergence, optax.kl_divergence)
        yield function_case("kl_divergence", divergence, "losses", inputs, probabilities, wide=True)
        log_targets = Function(
            losses.kl_divergence_with_log_targets, optax.losses.kl_divergence_with_log_targets
        )
        yield function_case(
            "kl_divergence_with_log_targets", log_targets, "losses", inputs, logs, wide=True
        )
        paths: Data = lambda rng, s=scale: (  # noqa: E731
            s * rng.normal(size=(4, frames, classes)), rng.integers(1, classes, (4, labels))
        )  # fmt: skip
        yield function_case(
            "ctc_loss", Function(_ctc(losses), _ctc(optax)), "losses", inputs, paths, wide=True
        )


def _ctc(module: Any) -> Callable[..., Any]:
    """Of logits (B, T, K) and labels (B, N), without padding."""
    return lambda logits, labels: module.ctc_loss(
        logits,
        jnp.zeros(logits.shape[:2], logits.dtype),
        labels,
        jnp.zeros(labels.shape, logits.dtype),
    )


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

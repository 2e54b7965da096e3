"""What the one rule costs: tracing the gradient of a decoder, and repeated calls without `jit`.

    python -m benchmarks.own_code.costs           # the tables: 3 minutes on two idle cores
    python -m benchmarks.own_code.costs --only repeated  # a quantity, by a part of its name
    python -m benchmarks.own_code.costs --check   # exits with 1 where a bound is missed
    python -m benchmarks.own_code.costs --write   # puts the table into docs/own_layers.md

tracing  CPU seconds to trace the gradient of 12 layers, divided by those of the same model in plain
         Flax: the best of several, taken in turns. The decoder is of provided layers, or written by
         hand around parameters.
calls    seconds of a repeated call without `jit`, divided by those in plain Flax: the best of
         many. The model is two provided layers with own code between them.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp

import mpmodules.linen
import mpmodules.nnx
from benchmarks.command import marked_parser, shown_table
from benchmarks.eight_bits.report import environment
from benchmarks.markdown import table as markdown_table
from benchmarks.models import cpu_seconds
from policy import DtypePolicyWarning, autocast, use_policy

PAGE = Path(__file__).parents[2] / "docs" / "own_layers.md"
REPEATS = 5
POLICY, LAYERS, WIDTH, HEADS = "mixed_bfloat16", 12, 32, 2
FLAX = "Flax"
BOUNDS = {
    "tracing, provided layers": {"use_policy": 1.35, "port": 1.35, "autocast": 1.5},
    "tracing, written by hand": {"use_policy": 1.6, "port": 1.6, "autocast": 1.5},
    "repeated call without jit": {"use_policy": 2.0, "port": 2.0},
}
X = jnp.ones((2, 8, WIDTH))


@dataclasses.dataclass(frozen=True)
class Row:
    """A ratio to plain Flax.

    Attributes:
      quantity: of `BOUNDS`.
      way: "use_policy", "port" or "autocast".
      api: "linen" or "nnx".
    """

    quantity: str
    way: str
    api: str
    ratio: float

    @property
    def bound(self) -> float:
        return BOUNDS[self.quantity][self.way]


def attention(x: Any, qkv: Any, out: Any) -> Any:
    """Returns the attention of a decoder, written by hand."""
    q, k, v = jnp.split(x @ qkv, 3, axis=-1)
    logits = q @ k.mT / jnp.sqrt(q.shape[-1])
    is_seen = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(is_seen, logits, -1e9)) @ v @ out


def normalized(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * scale


SHAPES = {
    "first": (1, 1, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "second": (1, 1, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}


def block_by_hand(p: Callable[[str], Any], x: Any) -> Any:
    x = x + attention(normalized(x, p("first")), p("qkv"), p("out"))
    return x + jax.nn.gelu(normalized(x, p("second")) @ p("up")) @ p("down")


def linen_model(nn: Any, kind: str) -> Any:
    """Returns a model over `mpmodules.linen` or `flax.linen`."""

    class Provided(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
            return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))

    class ByHand(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            init = nn.initializers.normal(0.02)
            return block_by_hand(lambda name: self.param(name, init, SHAPES[name]), x)

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(LAYERS):
                x = (Provided if kind == "provided layers" else ByHand)()(x)
            return nn.Dense(WIDTH)(x)

    class Small(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(WIDTH)(jax.nn.silu(nn.Dense(WIDTH)(x)))

    return Small() if kind == "small" else Decoder()


def nnx_model(nnx: Any, kind: str, **policy: Any) -> Any:
    """Returns a model over `mpmodules.nnx` or `flax.nnx`."""

    class Provided(nnx.Module):
        def __init__(self, rngs: Any):
            self.first, self.second = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
            self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs, decode=False)
            self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.first(x))
            return x + self.down(nnx.gelu(self.up(self.second(x))))

    class ByHand(nnx.Module):
        def __init__(self, rngs: Any):
            init = nnx.initializers.normal(0.02)
            self.weights = nnx.Dict(
                {name: nnx.Param(init(rngs.params(), shape)) for name, shape in SHAPES.items()}
            )

        def __call__(self, x: Any) -> Any:
            return block_by_hand(lambda name: self.weights[name][...], x)

    class Decoder(nnx.Module):
        def __init__(self, rngs: Any):
            block = Provided if kind == "provided layers" else ByHand
            self.blocks = nnx.List([block(rngs) for _ in range(LAYERS)])
            self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    class Small(nnx.Module):
        def __init__(self, rngs: Any):
            self.up, self.down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2))

        def __call__(self, x: Any) -> Any:
            return self.down(jax.nn.silu(self.up(x)))

    return (Small if kind == "small" else Decoder)(flax.nnx.Rngs(0), **policy)


def programs(api: str, kind: str) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Returns for each way a function of parameters, and the parameters."""
    if api == "linen":
        flaxs, ours = linen_model(flax.linen, kind), linen_model(mpmodules.linen, kind)
        ported = mpmodules.linen.apply_policy(flaxs, POLICY)
        variables = flaxs.init(jax.random.key(0), X)

        def under_policy(variables: Any) -> Any:
            with use_policy(POLICY):
                return ours.apply(variables, X)

        functions: dict[str, Callable[..., Any]] = {
            FLAX: lambda variables: flaxs.apply(variables, X),
            "use_policy": under_policy,
            "port": lambda variables: ported.apply(variables, X),
            "autocast": autocast(lambda variables: flaxs.apply(variables, X), POLICY, params=0),
        }
        return {way: (function, variables) for way, function in functions.items()}
    flaxs = nnx_model(flax.nnx, kind)
    models = {
        FLAX: flaxs,
        "use_policy": nnx_model(mpmodules.nnx, kind, dtype_policy=POLICY),
        "port": mpmodules.nnx.apply_policy(flaxs, POLICY),
    }
    if kind == "small":
        return {way: (model, X) for way, model in models.items()}
    found = {}
    for way, model in models.items():
        graph, state = flax.nnx.split(model)
        found[way] = functools.partial(_merged, graph), state
    graph, state = flax.nnx.split(flaxs)
    cast = autocast(lambda model: model(X), POLICY)
    found["autocast"] = lambda state: cast(flax.nnx.merge(graph, state)), state
    return found


def _merged(graph: Any, state: Any) -> Any:
    return flax.nnx.merge(graph, state)(X)


def traced(function: Callable[..., Any], params: Any) -> float:
    """Returns CPU seconds to trace a gradient anew."""
    loss = lambda params: jnp.mean(jnp.square(function(params)))  # noqa: E731
    return cpu_seconds(lambda: jax.make_jaxpr(jax.grad(loss))(params))


def called(function: Callable[..., Any], argument: Any, times: int = 40) -> float:
    """Returns the best of the seconds of a repeated call."""
    jax.block_until_ready(function(argument))
    found = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(function(argument))
        found.append(time.perf_counter() - start)
    return min(found)


def rows(only: Sequence[str] = ()) -> Iterator[Row]:
    """Measures the rows of the quantities that have a part of `only` in their names, or all."""
    for quantity, bounds in BOUNDS.items():
        if only and not any(part in quantity for part in only):
            continue
        is_call = quantity.startswith("repeated")
        for api in ("linen", "nnx"):
            found = programs(api, "small" if is_call else quantity.partition(", ")[2])
            ways = [FLAX, *bounds]
            measure = called if is_call else traced
            times: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(REPEATS + 1):  # the first fills JAX's own caches
                for way in ways:
                    times[way].append(measure(*found[way]))
            best = {way: min(each[1:]) for way, each in times.items()}
            for way in bounds:
                yield Row(quantity, way, api, best[way] / best[FLAX])


def table(found: Sequence[Row]) -> str:
    """Returns the rows as a table in Markdown."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in found:
        lines.setdefault((row.quantity, row.way), []).append(f"{row.ratio:.2f}")
    return markdown_table(
        ["beside plain Flax", "way", "linen", "nnx", "bound"],
        [[*key, *ratios, str(BOUNDS[key[0]][key[1]])] for key, ratios in lines.items()],
        left=2,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 1 where a bound is missed under ``--check``, else 0."""
    parser = marked_parser(__doc__, PAGE)
    options = parser.parse_args(arguments)
    if options.write and options.only:
        parser.error("--write replaces the whole table: leave out --only")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DtypePolicyWarning)
        found = list(rows(options.only))
    missed = [
        f"{row.quantity}, {row.way}, {row.api}: {row.ratio:.2f}"
        for row in found
        if row.ratio > row.bound
    ]
    how = f"Best of {REPEATS}, {environment()}:"
    return shown_table(options, PAGE, "costs", how, table(found), missed)


if __name__ == "__main__":
    sys.exit(main())

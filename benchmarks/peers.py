"""What a model under a policy costs beside the same one under jmp, and its Equinox twin under mpx.

    python -m benchmarks.peers          # the table: 2 minutes; nothing is run
    python -m benchmarks.peers --small  # shallower models, nothing is compiled: 20 seconds
    python -m benchmarks.peers --json FILE

jmp casts a whole tree: float32 params and inputs to bfloat16 before the call of a Flax model
without dtypes, and its outputs back; normalizations and softmax run in whatever that makes them.
mpx does the same to an Equinox model, whose LayerNorms are put in float32 by `force_full_precision`
as its README has it. `ours` is the linen model of `benchmarks.models` under mixed_bfloat16; what is
counted is as there. The rows report and have no bounds: the programs differ in what they keep in
float32. A peer that is not installed is left out, and named.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import (
    BF16,
    Case,
    Program,
    cases,
    compiled,
    dtype_free,
    loss_of,
    lowered,
    saved_bytes,
)
from benchmarks.table import Row, run

TWINS = ("Mlp", "Transformer")


def jmp_program(case: Case) -> Program:
    """The dtype-free Flax model, its params and inputs cast by jmp."""
    import jmp

    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    plain = dtype_free(case)

    def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
        return plain.loss(*policy.cast_to_compute((params, state, x)), y)

    return Program(loss, plain.arguments)


def mpx_program(case: Case) -> Program:
    """The model's Equinox twin, cast by mpx."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]
    import mpx  # pyright: ignore[reportMissingImports]

    mpx.set_half_precision_datatype(BF16)
    make = _mlp if case.model == "Mlp" else _transformer
    model = eqx.filter_eval_shape(make, dict(case.options), key=jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params: Any, state: Any, x: Any, y: Any) -> Any:
        half, x = mpx.cast_to_half_precision((params, x))
        return loss_of(jax.vmap(eqx.combine(half, static))(x), y), state

    return Program(loss, (params, {}, case.x, case.y))


def _mlp(options: dict[str, Any], *, key: Any) -> Any:
    import equinox as eqx  # pyright: ignore[reportMissingImports]

    width, use_bias = options["width"], options.get("use_bias", True)

    class Mlp(eqx.Module):
        layers: list[Any]

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers[:-1]:
                x = jax.nn.relu(layer(x))
            return self.layers[-1](x)

    return Mlp([eqx.nn.Linear(width, width, use_bias, key=k) for k in jax.random.split(key, 4)])


def _transformer(options: dict[str, Any], *, key: Any) -> Any:
    import equinox as eqx  # pyright: ignore[reportMissingImports]
    import mpx  # pyright: ignore[reportMissingImports]

    width, heads, vocabulary = options["width"], options["heads"], options["vocabulary"]
    norm = lambda layer, x: jax.vmap(mpx.force_full_precision(layer, x.dtype))(x)  # noqa: E731

    class Block(eqx.Module):
        norms: list[Any]
        attention: Any
        up: Any
        down: Any

        def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
            y = norm(self.norms[0], x)
            x = x + self.attention(y, y, y, mask=mask)
            y = jax.vmap(self.up)(norm(self.norms[1], x))
            return x + jax.vmap(self.down)(jax.nn.gelu(y))

    class Transformer(eqx.Module):
        embed: Any
        positions: Any
        blocks: list[Any]
        norm: Any
        logits: Any

        def __call__(self, tokens: jax.Array) -> jax.Array:
            n = tokens.shape[0]
            x = jax.vmap(self.embed)(tokens) + jax.vmap(self.positions)(jnp.arange(n))
            mask = jnp.tril(jnp.ones((n, n), bool)) if options.get("causal", True) else None
            for block in self.blocks:
                x = block(x, mask)
            return jax.vmap(self.logits)(norm(self.norm, x))

    def block(key: Any) -> Block:
        keys = jax.random.split(key, 3)
        biases = dict.fromkeys(
            ("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias"), True
        )
        return Block(
            [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)],
            eqx.nn.MultiheadAttention(heads, width, **biases, key=keys[0]),
            eqx.nn.Linear(width, 4 * width, key=keys[1]),
            eqx.nn.Linear(4 * width, width, key=keys[2]),
        )

    keys = jax.random.split(key, 3 + options["layers"])
    return Transformer(
        eqx.nn.Embedding(vocabulary, width, key=keys[0]),
        eqx.nn.Embedding(options["length"], width, key=keys[1]),
        [block(k) for k in keys[3:]],
        eqx.nn.LayerNorm(width),
        eqx.nn.Linear(width, vocabulary, key=keys[2]),
    )


def _figures(program: Program, small: bool) -> dict[str, float]:
    figures = lowered(program) | {"saved": saved_bytes(program)}
    if not small:
        figures |= {name: value for name, value in compiled(program).items() if name != "compiling"}
    return figures


def rows(small: bool = False) -> Iterator[Row]:
    """Every row, as it is measured; all are counts."""
    for case in cases(small):
        ours = functools.cache(lambda case=case: _figures(case.programs("linen")["ours"], small))
        peers: dict[str, Callable[[Case], Program]] = {"jmp": jmp_program}
        if case.model in TWINS:
            peers["mpx"] = mpx_program
        for peer, build in peers.items():
            try:
                program = build(case)
            except ImportError as error:
                print(f"{case.name}, {peer}: not measured, {error}", file=sys.stderr)
                continue
            for quantity, value in _figures(program, small).items():
                yield Row(quantity, f"{case.name}, beside {peer}", ours()[quantity], value)


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "peer"))

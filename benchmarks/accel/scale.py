"""A train step of 8 billion parameters over 256 chips of v5e and 64 of v5p, compiled from shapes
alone.

    python -m benchmarks.accel.scale          # every row: 20 minutes on two idle cores
    python -m benchmarks.accel.scale --check  # exits with 1 where a row misses its bound
    python -m benchmarks.accel.scale --on v5e --only remainders  # by hand and one variant, on one
                                                                 # chip: 5 minutes
    python -m benchmarks.accel.scale --small  # narrow layers over v5e:2x2: a minute and a half

Llama 3's shape with its layers scanned and rematerialized (`benchmarks.accel.scale_model`), 256
texts of 4096 tokens. Params, their moments and remainders are split over the `fsdp` axis of the
mesh, the batch over both axes; activations are constrained to be split by batch, params and state
are donated. Ours is mixed_bfloat16 with `value_and_grad` and `apply_gradients` of
`mixed_precision(optax.adamw)`, which skips steps that are not finite. Attention is JAX's splash
kernel; kept for backward are each layer's input and the results of attention. By hand is Flax's
linen with `dtype=bfloat16`, `jax.value_and_grad` and plain `optax.adamw`, which skips none.

memory      bytes of a chip that arguments, temporaries and new results take, beside those that it
            has;
temporary   bytes at their peak beside arguments and results;
cycles      the compiler's estimate of a chip's, exchanges left out;
seconds     of these cycles and of the exchanges at the published bandwidth of the links, one after
            the other;
bytes       moved to and from a chip's memory;
kernels     that run;
exchange    bytes that collectives leave on a chip, of a reduce-scatter its operands;
gathers     bytes of all-gathers that are wider than compute dtype, beside those of all;
sums        bytes of all-reduces and reduce-scatters that are wider than compute dtype, beside those
            of all;
asked       bytes summed in float32 where that is asked for, beside a float32 gradient for each
            param of a chip.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import optax
from flax import nnx as flax_nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import mpmodules.linen
import mpmodules.nnx
from benchmarks.accel.program import Figures, of_lowered
from benchmarks.accel.report import rows_of
from benchmarks.accel.scale_model import (
    Size,
    cross_entropy,
    decoder_of,
    nnx_decoder_of,
    param_spec,
)
from benchmarks.table import Row, run
from policy import (
    apply_gradients,
    loss_scale_of,
    mixed_precision,
    state_shardings,
    use_policy,
    value_and_grad,
)
from policy.inspect.estimate.targets import Target
from policy.sharding import all_reduce, vary

AXES = ("data", "fsdp")
KEPT = jax.checkpoint_policies.save_only_these_names("attention")
SUMS = ("all-reduce", "reduce-scatter")
BATCH = 256


@dataclasses.dataclass(frozen=True)
class Place:
    """A target and its mesh: the number of copies, and of the chips that each is split over.

    Where fsdp is the whole of a torus, XLA sums every gradient on all chips and then takes a slice,
    which sends twice as much as the reduce-scatter that it makes of a part of one.
    """

    target: str
    mesh: tuple[int, int]

    @property
    def kind(self) -> str:
        return self.target.split(":")[0]


V5E, V5P, SMALL = Place("v5e:16x16", (4, 64)), Place("v5p:4x4x4", (2, 32)), Place("v5e:2x2", (2, 2))
NARROW = Size(
    layers=2,
    width=256,
    heads=4,
    key_heads=2,
    head_width=128,
    mlp_width=1024,
    vocabulary=2048,
    length=256,
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to write the step.

    Attributes:
      policy: of the layers and the optimizer; None is by hand.
      api: "linen" or "nnx".
      all_reduce_dtype: the dtype of the gradients' sum over the data axis; None leaves both axes to
        XLA.
    """

    policy: str | None
    api: str = "linen"
    all_reduce_dtype: str | None = None


HAND = Variant(None)
STORED_NARROW = "params=bfloat16,compute=bfloat16,output=float32"
VARIANTS = {
    "float32": Variant("mixed_bfloat16"),
    "bfloat16 and remainders": Variant(STORED_NARROW),
    "float32, nnx": Variant("mixed_bfloat16", api="nnx"),
    "float32, sums in float32": Variant("mixed_bfloat16", all_reduce_dtype="float32"),
}
# Of each place, the variants that are compiled there: every program takes minutes.
TABLE = {V5E: tuple(VARIANTS), V5P: ("float32", "bfloat16 and remainders")}
BOUNDS = {"temporary": 1.05, "cycles": 1.05, "exchange": 1.02}
FEW = 0.01  # what norms and the loss add to the exchanges of kernels and tables


# --------------------------------------------------------------------------------------------------
# The step
# --------------------------------------------------------------------------------------------------


def model_of(variant: Variant, size: Size, tokens: Any) -> tuple[Any, Any]:
    """Returns a variant's params, as shapes, and its function from params and tokens to logits."""
    is_ours = variant.policy is not None
    threaded: dict[str, Any] = {"remat": KEPT} if is_ours else {"dtype": jnp.bfloat16}
    if variant.api == "linen":
        nn: Any = mpmodules.linen if is_ours else flax.linen  # a module, which hashes
        model = decoder_of(nn)(size, **threaded)
        params = jax.eval_shape(
            lambda tokens: model.init(jax.random.key(0), tokens)["params"], tokens
        )
        return params, lambda params, tokens: model.apply({"params": params}, tokens)
    nnx: Any = mpmodules.nnx if is_ours else flax_nnx
    options = {**threaded, "dtype_policy": variant.policy} if is_ours else threaded
    built = flax_nnx.eval_shape(lambda: nnx_decoder_of(nnx)(size, flax_nnx.Rngs(0), **options))
    graph, params = flax_nnx.split(built, flax_nnx.Param)
    return params, lambda params, tokens: flax_nnx.merge(graph, params)(tokens)


def lowered(place: Place, variant: Variant, size: Size, batch: int) -> Any:
    """Lowers a whole train step for the place's chips."""
    target = Target(place.target)
    mesh = target.mesh(dict(zip(AXES, place.mesh, strict=True)))
    scope = contextlib.nullcontext() if variant.policy is None else use_policy(variant.policy)
    with jax.set_mesh(mesh), scope:
        rows = NamedSharding(mesh, PartitionSpec(AXES))
        tokens = jax.ShapeDtypeStruct((batch, size.length), jnp.int32, sharding=rows)
        params, apply = model_of(variant, size, tokens)
        params = jax.tree.map(
            lambda x: _split(x, NamedSharding(mesh, param_spec(x.shape, size))), params
        )
        adamw = optax.adamw(1e-3)
        tx = adamw if variant.policy is None else mixed_precision(adamw, variant.policy)
        state = jax.tree.map(_split, jax.eval_shape(tx.init, params), state_shardings(tx, params))

        def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
            return cross_entropy(apply(params, tokens), tokens)

        step = (
            by_hand(loss_fn, tx)
            if variant.policy is None
            else ours(loss_fn, tx, variant.all_reduce_dtype)
        )
        where = jax.tree.map(lambda x: x.sharding, (params, state))
        whole = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*where, whole))
        return jitted.trace(params, state, tokens).lower(lowering_platforms=(target.chip.platform,))


def _split(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def by_hand(loss_fn: Any, tx: Any) -> Any:
    """Makes the step of plain JAX and optax."""

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def ours(loss_fn: Any, tx: Any, all_reduce_dtype: str | None) -> Any:
    """Makes the step of `mixed_precision`.

    With an `all_reduce_dtype` it is mapped over the data axis, and XLA partitions it over fsdp.
    """

    def gradients(params: Any, state: Any, tokens: jax.Array) -> Any:
        return value_and_grad(loss_fn, loss_scale=loss_scale_of(state), grads="compute")(
            params, tokens
        )

    def own(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = gradients(vary(params, "data"), state, tokens)
        return lax.pmean(loss, "data"), all_reduce(grads, "data", all_reduce_dtype or "float32")

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        mapped = jax.shard_map(
            own,
            axis_names={"data"},
            in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec("data")),
            out_specs=PartitionSpec(),
        )
        loss, grads = (gradients if all_reduce_dtype is None else mapped)(params, state, tokens)
        params, state, _ = apply_gradients(tx, params, state, grads)
        return params, state, loss

    return step


# --------------------------------------------------------------------------------------------------
# The table
# --------------------------------------------------------------------------------------------------


def figures(place: Place, variant: Variant, size: Size, batch: int) -> Figures:
    return of_lowered(Target(place.target), lowered(place, variant, size, batch))


def rows(small: bool = False, on: Sequence[str] = (), only: Sequence[str] = ()) -> Iterator[Row]:
    """Yields every row, as its programs are compiled.

    Args:
      on: chips, as in ``v5e``, or whole targets.
      only: parts of variants' names.

    Raises:
      ValueError: a chip or a variant that is none of the table's.
    """
    places = {SMALL: tuple(VARIANTS)} if small else TABLE
    chosen = {
        place: names
        for place, names in places.items()
        if not on or {place.target, place.kind} & set(on)
    }
    wanted = [name for name in VARIANTS if not only or any(part in name for part in only)]
    if not chosen or not wanted:
        known = ", ".join(place.target for place in places), "; ".join(VARIANTS)
        raise ValueError(
            f"No row is of {' '.join((*on, *only))}. Targets: {known[0]}. Variants: {known[1]}."
        )
    size, batch = (NARROW, 8) if small else (Size(), BATCH)
    for place, names in chosen.items():
        hand = figures(place, HAND, size, batch)
        yield _memory("by hand", place, hand)
        for name in (name for name in names if name in wanted):
            yield from variant_rows(
                name, place, figures(place, VARIANTS[name], size, batch), hand, size, small
            )


def variant_rows(
    name: str, place: Place, ours: Figures, hand: Figures, size: Size, small: bool = False
) -> Iterator[Row]:
    """Yields the rows of one program.

    Of narrow layers only dtypes and memory have bounds: exchanges and small kernels are most of
    their cost.
    """
    asked = VARIANTS[name].all_reduce_dtype
    yield _memory(name, place, ours)
    bounds = (
        {}
        if small
        else {key: bound for key, bound in BOUNDS.items() if not (asked and key == "exchange")}
    )
    yield from rows_of(name, Target(place.target), ours, hand, bounds)
    yield _wider("gathers", name, place, ours, ("all-gather",))
    if asked is None:
        yield _wider("sums", name, place, ours, SUMS)
    else:
        summed = _bytes(ours, ("all-reduce",), {"float32": "f32", "bfloat16": "bf16"}[asked])
        wanted = param_count(size) * jnp.dtype(asked).itemsize / place.mesh[1]
        # Norms sum their gradients in float32 over every axis, unasked: a hundredth more.
        yield Row("asked", name, summed, wanted, 1.0 + 2 * FEW, 1.0 - FEW, target=place.target)


def _memory(name: str, place: Place, figures: Figures) -> Row:
    return Row(
        "memory", name, figures.memory, Target(place.target).chip.memory, 1.0, target=place.target
    )


def _wider(
    quantity: str, name: str, place: Place, figures: Figures, operations: Sequence[str]
) -> Row:
    """Returns a row of the bytes of floating numbers wider than bfloat16, beside all. Integers are
    tokens.
    """
    wide = sum(_bytes(figures, operations, dtype) for dtype in ("f32", "f64"))
    return Row(
        quantity, name, wide, wide + _bytes(figures, operations, "bf16"), FEW, target=place.target
    )


def _bytes(figures: Figures, operations: Sequence[str], dtype: str) -> float:
    return sum(figures.collectives.get((operation, dtype), 0.0) for operation in operations)


def param_count(size: Size) -> int:
    """Returns the number of elements of all params."""
    attention = 2 * size.width * (size.heads + size.key_heads) * size.head_width
    layer = attention + 3 * size.width * size.mlp_width + 2 * size.width
    return size.layers * layer + 2 * size.vocabulary * size.width + size.width


if __name__ == "__main__":
    sys.exit(run(__doc__, rows, "reference"))

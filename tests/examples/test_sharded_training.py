"""The language model on meshes: losses, exchanges, checkpoints, and processes that end together.

Most of it runs in processes of their own: one of eight devices (`sharded_runs.py`), and twice two
of four.
"""

import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tests.eight_devices import ROOT, run_python
from tests.examples.helpers import assert_rejected

pytest.importorskip("orbax.checkpoint")

import sharded_training
from sharded_training import param_spec, run_together

pytestmark = pytest.mark.slow  # the runs that most of these tests read take a minute

STEPS, DIES = 8, 5  # a checkpoint every second step
MIX = "data=2,fsdp=2,tensor=2"
WORDS = ("in", "the", "beginning", "god", "created", "heaven", "and", "earth", "void")
SIZES = "--layers 1 --width 32 --heads 4 --mlp-width 64 --length 16 --batch-size 16"
TINY = f"--no-exchanges {SIZES} --steps {STEPS}"
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PATHS = os.pathsep.join(map(str, (ROOT, ROOT / "examples")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    (folder / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 1500)))
    return folder


@pytest.fixture(scope="module")
def tiny(folder):
    """Arguments of a tiny run."""
    return [*TINY.split(), "--text", str(folder / "text.txt"), "--plot", str(folder / "loss.png")]


def two_processes(arguments):
    """The script itself, in two processes of four devices."""
    variables = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": PATHS, "XLA_FLAGS": FAST}
    script = [ROOT / "examples/sharded_training.py", "--policy", "f32", "--all-reduce-dtype", "f32"]
    return subprocess.run(
        [sys.executable, *script, "--spawn", "2", "--devices", "4", *arguments],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.fixture(scope="module")
def killed(folder, tiny):
    """What two processes printed, of which the second died, and their checkpoints."""
    saved = ["--checkpoint", str(folder / "killed"), "--checkpoint-every", "2"]
    ended = two_processes([*tiny, *saved, "--die-at-step", str(DIES)])
    shutil.copytree(folder / "killed", folder / "copy")
    return ended


@pytest.fixture(scope="module")
def resumed(folder, tiny, killed):
    """What two such processes printed and measured that went on from there to the end."""
    path = folder / "resumed.json"
    saved = ["--checkpoint", str(folder / "killed"), "--resume"]
    ended = two_processes([*tiny, *saved, "--json", str(path)])
    assert ended.returncode == 0, ended.stderr
    return ended, json.loads(path.read_text())


@pytest.fixture(scope="module")
def runs(folder, tiny, killed):
    """Name to result of the runs in one process."""
    asked = {
        "f32 on 1": (1, "--policy f32"),
        "f32 mix": (8, f"--policy f32 --mesh {MIX}"),
        "f32 resumed": (8, f"--policy f32 --fsdp 8 --checkpoint {folder}/copy --resume"),
        "bf16 mix": (8, f"--mesh {MIX} --all-reduce-dtype bf16 --exchanges"),
    }
    given = [(name, devices, [*tiny, *more.split()]) for name, (devices, more) in asked.items()]
    (folder / "runs.json").write_text(json.dumps(given))
    run_python(
        ROOT / "tests/examples/sharded_runs.py",
        folder / "runs.json",
        folder / "results.json",
        XLA_FLAGS=f"{FAST} --xla_force_host_platform_device_count=8",
        PYTHONPATH=PATHS,
        NPROC="256",  # as --devices 8 sets it
    )
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
def test_eight_devices_and_two_processes_of_four_learn_what_one_does(runs, resumed):
    truth = runs["f32 on 1"]
    first, *_, last = truth["losses"]
    assert len(truth["losses"]) == STEPS and max(last, truth["held_out"]) < first - 0.4
    for other in (runs["f32 mix"], resumed[1]):
        np.testing.assert_allclose(other["losses"], truth["losses"], rtol=3e-6)
        np.testing.assert_allclose(other["held_out"], truth["held_out"], rtol=3e-6)
    assert resumed[1]["processes"] == 2
    assert resumed[1]["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1}


def test_a_run_killed_on_two_processes_goes_on_with_the_same_losses_on_another_mesh(runs, resumed):
    truth, other = runs["f32 on 1"], runs["f32 resumed"]
    assert other["start"] == resumed[1]["start"] in (2, 4)  # the last complete one
    assert other["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    np.testing.assert_allclose(other["losses"], truth["losses"], rtol=3e-6)


def test_bfloat16_matmuls_and_sums_agree_with_float32_within_their_own_rounding(runs):
    truth, other = runs["f32 on 1"], runs["bf16 mix"]
    # A quarter of bfloat16's epsilon (4e-3).
    np.testing.assert_allclose(other["losses"], truth["losses"], rtol=1e-3)
    np.testing.assert_allclose(other["held_out"], truth["held_out"], rtol=1e-3)
    assert np.abs(np.subtract(other["losses"], truth["losses"])).max() > 1e-4  # it was done


def test_gradients_cross_in_the_dtype_that_was_asked_for_on_a_mesh_of_all_three(runs):
    exchanges = runs["bf16 mix"]["exchanges"]
    found = {(e["operation"], e["dtype"], e["axes"]): e["bytes"] for e in exchanges}
    summed = ("all-reduce", "data,fsdp")
    sums = {key: size for key, size in found.items() if key[::2] == summed}
    assert sums.pop(("all-reduce", "float32", "data,fsdp")) == 4  # the loss
    (((operation, dtype, _), size),) = sums.items()
    assert (operation, dtype) == ("all-reduce", "bfloat16")
    # Every gradient once, split over tensor like its param; params are gathered in float32.
    assert runs["bf16 mix"]["parameter_bytes"] / 2 <= size < runs["f32 on 1"]["parameter_bytes"] / 2
    assert {key[1:] for key in found if key[0] == "all-gather"} == {("float32", "fsdp")}


def test_the_process_that_died_is_named_and_the_other_was_stopped(killed):
    assert killed.returncode == 1
    last = killed.stderr.splitlines()[-1]
    assert last.startswith("sharded_training: of 2 processes ended ")
    assert "process 1 with exit code 13" in last
    assert killed.stdout.startswith("mesh data=8,fsdp=1,tensor=1: 8 devices (cpu), processes: 2\n")


def test_only_the_first_process_reports(resumed, folder):
    ended, result = resumed
    starts = ("mesh data=8", "params: ", "optimizer: ", "mesh  ", "-----", "data=8,", "loss curv")
    lines = ended.stdout.splitlines()
    assert len(lines) == 7 and all(map(str.startswith, lines, starts))
    assert "100%" in ended.stderr and f"{np.mean(result['losses']):.4f}" in ended.stdout
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def ends(process_id):
    """Whether a process ends, within 10 seconds."""
    for _ in range(200):
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_fails_ends_the_others(tmp_path):
    sleeps_through_a_sigterm = f"""
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path({str(tmp_path / "id")!r}).write_text(str(os.getpid()))
time.sleep(60)
"""
    ends_last = f"""
import os, time
while not os.path.exists({str(tmp_path / "id")!r}): time.sleep(0.02)
time.sleep(0.2)
raise SystemExit(7)
"""
    commands = [[sys.executable, "-c", code] for code in (sleeps_through_a_sigterm, ends_last)]
    message = r"^sharded_training: of 2 processes ended process 1 with exit code 7\. The o"
    with pytest.raises(SystemExit, match=message):
        run_together(commands)
    assert ends(int((tmp_path / "id").read_text()))


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("layer_0/attention/query/kernel", (32, 4, 8), ("fsdp", "tensor", None)),
        ("layer_0/attention/out/kernel", (4, 8, 32), ("tensor", None, "fsdp")),
        ("layer_1/mlp/up/kernel", (32, 64), ("fsdp", "tensor")),
        ("layer_1/mlp/up/bias", (64,), ("tensor",)),
        ("layer_1/mlp/down/kernel", (64, 32), ("tensor", "fsdp")),
        ("layer_1/mlp/down/bias", (32,), ("fsdp",)),
        ("head/kernel", (32, 65), ("fsdp", None)),  # 65 doesn't split
        ("embed/embedding", (66, 32), ("fsdp", None)),
        ("norm/scale", (31,), (None,)),
    ],
)
def test_params_are_split_by_their_path_and_along_their_largest_axis(path, shape, spec):
    assert param_spec(path, shape, {"data": 2, "fsdp": 2, "tensor": 2}) == PartitionSpec(*spec)
    whole = PartitionSpec(*[None] * len(shape))
    assert param_spec(path, shape, {"data": 8, "fsdp": 1, "tensor": 1}) == whole


@pytest.mark.cases(fast=4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--spawn 2 --data 3", "The mesh data=3,fsdp=1,tensor=1 should have a place for each of 2"),
        ("--mesh dta=1", "--mesh should be like data=4,tensor=2, of data, fsdp, tensor, but got "),
        ("--spawn 3", "--batch-size should split into data x fsdp = 3 x 1 parts, but got 16."),
        ("--all-reduce-dtype f33", "--all-reduce-dtype should be one of bf16, f16, f32, but got "),
        ("--spawn 2 --rule haed=f32", "Rule 'haed' matched no module. Modules seen: "),
        ("--resume", "--resume needs --checkpoint FOLDER."),
        ("--length 200", "A batch is 3200 characters, more than the "),
    ],
)
def test_what_cannot_be_run_is_one_line_and_starts_nothing(tiny, arguments, message, monkeypatch):
    monkeypatch.setattr(sharded_training, "spawn", lambda *_: pytest.fail("started"))
    assert_rejected(sharded_training, [*tiny, *arguments.split()], message)

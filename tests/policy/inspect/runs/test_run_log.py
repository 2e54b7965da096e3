"""The log of a run: written without waiting, resumed, read; and TensorBoard."""

import dataclasses
import json
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policy
from policy.inspect.runs.run_log import read_records
from tests.policy.inspect.runs.hand_made import record, row, run_of, written


class Pending:
    """An array that is not ready before it is told to be."""

    def __init__(self):
        self.ready = False

    def is_ready(self):
        return self.ready


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Snapshot:
    """A snapshot of records that are known."""

    array: Any
    found: Any = dataclasses.field(metadata={"static": True}, default=())

    def records(self):
        return list(self.found)


def snapshot(*records):
    return Snapshot(jnp.zeros(()), records)


def steps(log):
    return [one["step"] for one in log.records()]


def test_each_line_is_a_record(tmp_path):
    with policy.inspect.RunLog(tmp_path / "run.jsonl") as log:
        log.write(snapshot(record(0, row("a")), record(1)))
        log.write(snapshot())  # not taken
        log.write(snapshot(record(2, row("a", largest="inf", nan=0.5))))
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == steps(log) == [0, 1, 2]
    assert log.records()[2]["rows"][0]["numbers"]["largest"] == "inf"


def test_a_snapshot_that_is_not_ready_waits_and_the_next_ones_behind_it(tmp_path):
    log, slow = policy.inspect.RunLog(tmp_path / "run.jsonl"), Pending()
    log.write(Snapshot(slow, (record(0),)))
    log.write(snapshot(record(1)))
    assert not (tmp_path / "run.jsonl").exists()
    slow.ready = True
    log.write(snapshot(record(2)))
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 3
    log.write(Snapshot(Pending(), (record(3),)))
    log.close()  # waits
    assert steps(log) == [0, 1, 2, 3]


def test_a_file_is_continued_and_later_steps_are_replaced(tmp_path):
    file = written(tmp_path, run_of(steps=5))
    with file.open("a") as unfinished:
        unfinished.write('{"version":1,"step":5')  # the run was killed here
    assert [one["step"] for one in read_records(file)] == [0, 1, 2, 3, 4]
    with policy.inspect.RunLog(file) as log:
        log.write(snapshot(record(3, row("new"))))
        assert steps(log) == [0, 1, 2, 3] and log.records()[3]["rows"]
    with policy.inspect.RunLog(file, step=2) as log:
        assert steps(log) == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# Title\n", r"line 1 is not a record of a run, but '# Title'"),
        ('{"version":1,"step":0}\n{"version":1}\n', "line 2 is not a record of a run"),
        ('{"version":9,"step":0}\n', "line 1 has version 9, and this policy reads 1"),
    ],
)
def test_another_file_is_refused_by_its_line(tmp_path, text, message):
    (tmp_path / "other").write_text(text)
    with pytest.raises(ValueError, match=message):
        policy.inspect.RunLog(tmp_path / "other")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*missing"):
        policy.inspect.RunLog(tmp_path / "missing" / "run.jsonl")
    with pytest.raises(ValueError, match=r"saved as \.html, but got 'run\.txt'"):
        policy.inspect.RunLog(tmp_path / "run.jsonl").save("run.txt")


class Writer:
    """Writes for TensorBoard as tensorboardX does; `Batch` as clu does."""

    def __init__(self, folder):
        self.folder, self.found = folder, {}
        Writer.last = self

    def add_scalar(self, name, value, step):
        self.found[name, step] = value

    def flush(self):
        pass


class Batch(Writer):
    def write_scalars(self, step, scalars):
        self.found |= {(name, step): value for name, value in scalars.items()}


@pytest.mark.parametrize(("name", "writer"), [("tensorboardX", Writer), ("clu", Batch)])
def test_tensorboard_gets_a_scalar_of_each_number(tmp_path, monkeypatch, name, writer):
    for package in ("tensorboardX", "clu", "clu.metric_writers"):
        monkeypatch.setitem(sys.modules, package, None)
    for package in (name, f"{name}.metric_writers"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
        monkeypatch.setattr(sys.modules[package], "SummaryWriter", writer, raising=False)
    with policy.inspect.RunLog(tmp_path / "run.jsonl", tensorboard=tmp_path / "board") as log:
        log.write(snapshot(record(7, row("a", largest=[1.0, "inf"]), scale=8.0)))
    found = Writer.last.found
    assert found["loss_scale", 7] == 8 and found["activation/a/zeros", 7] == 0
    assert found["activation/a/largest/1", 7] == float("inf")


def test_tensorboard_without_a_package_is_refused(tmp_path, monkeypatch):
    for package in ("tensorboardX", "clu", "clu.metric_writers"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        policy.inspect.RunLog(tmp_path / "run.jsonl", tensorboard=tmp_path)

"""The log of a run: written without waiting, resumed and read."""

import dataclasses
import json
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
        unfinished.write('{"version":3,"step":5')  # the run was killed here
    assert [one["step"] for one in read_records(file)] == [0, 1, 2, 3, 4]
    with policy.inspect.RunLog(file, step=3) as log:
        log.write(snapshot(record(3, row("new"))))
        assert steps(log) == [0, 1, 2, 3] and log.records()[3]["rows"]
    with policy.inspect.RunLog(file, step=2) as log:
        assert steps(log) == [0, 1]


@pytest.mark.parametrize("text", ["# Title\n", '{"version":9,"step":0}\n', "\xff\x00\n"])
def test_a_file_without_a_record_is_rejected(tmp_path, text):
    (tmp_path / "other").write_text(text)
    with pytest.raises(ValueError, match="has no record of a run in version 3, but"):
        policy.inspect.RunLog(tmp_path / "other")


def test_a_bad_line_does_not_lose_the_log(tmp_path):
    file = written(tmp_path, run_of(steps=5))
    lines = file.read_text().splitlines()
    bad = ["{", "null", '{"version":3,"step":"x"}', "\x00\xff"]
    file.write_text("\n".join([*lines[:2], *bad, *lines[2:]]) + "\n")
    assert [one["step"] for one in read_records(file)] == [0, 1, 2, 3, 4]


def test_two_processes_lose_no_record(tmp_path):
    one, other = (policy.inspect.RunLog(tmp_path / "run.jsonl") for _ in range(2))
    for step in range(3):
        one.write(snapshot(record(step, row("one"))))
        other.write(snapshot(record(step, row("other"))))
    assert steps(one) == [0, 0, 1, 1, 2, 2]
    assert {each["rows"][0]["path"] for each in one.records()} == {"one", "other"}


def test_a_full_disk_does_not_end_training(tmp_path, monkeypatch):
    log = policy.inspect.RunLog(tmp_path / "run.jsonl")
    log.write(snapshot(record(0)))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(log.path), "open", full)
        with pytest.warns(policy.DtypePolicyWarning, match="No space left on device"):
            log.write(snapshot(record(1)))
    log.write(snapshot(record(2)))
    assert steps(log) == [0, 2]


def test_a_folder_that_is_not_there_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*missing"):
        policy.inspect.RunLog(tmp_path / "missing" / "run.jsonl")

"""Ports of trainers' code: their edits, and the comparison of both versions."""

import dataclasses
import hashlib
import json
import shutil
import subprocess

import numpy as np
import pytest

from benchmarks.trainers import sources, tables
from benchmarks.trainers.__main__ import compared, names
from benchmarks.trainers.run import trainer_of

OLD = "one\ntwo\nthree\nfour\nfive\n"


@pytest.mark.skipif(shutil.which("diff") is None, reason="diff makes the scripts")
@pytest.mark.parametrize(
    "new", ["two\nthree\nfour\nfive\n", "one\nTWO\nthree\nthree.5\nfour\nsix\nseven\n", OLD + "."]
)
def test_a_script_of_diff_makes_the_new_file(tmp_path, new):
    new = new.replace("\n.", "\nsix\n")
    (tmp_path / "old").write_text(OLD)
    (tmp_path / "new").write_text(new)
    command = ["diff", "-e", str(tmp_path / "old"), str(tmp_path / "new")]
    script = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert sources.edited(OLD.splitlines(), script) == new.splitlines()


def test_other_commands_of_ed_are_rejected():
    with pytest.raises(ValueError, match=r"'s/a/b/' should be a command of ed: a, c or d\."):
        sources.edited(["a"], "s/a/b/\n")


def _trainer(**files):
    digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
    return sources.Trainer("own", "https://example.org", "1", digests, lambda: ())


def test_a_port_is_the_sources_with_their_edits(tmp_path, monkeypatch):
    trainer, checkouts = _trainer(model=OLD), tmp_path / "checkouts"
    (checkouts / "own").mkdir(parents=True)
    (checkouts / "own" / "model").write_text(OLD)
    (tmp_path / "edits" / "own").mkdir(parents=True)
    (tmp_path / "edits" / "own" / "model.ed").write_text("4,5c\nFOUR\n.\n1d\n")
    monkeypatch.setattr(sources, "EDITS", tmp_path / "edits")
    upstream = sources.fetch(trainer, checkouts, tmp_path / "upstream")
    assert sources.port(trainer, upstream, tmp_path / "port") == sources.Lines(3, 1)
    assert (tmp_path / "port" / "model").read_text() == "two\nthree\nFOUR\n"
    with pytest.raises(ValueError, match=r"git clone https://example\.org, commit 1"):
        sources.fetch(trainer, None, tmp_path / "none")
    other = dataclasses.replace(trainer, files={"model": "0"})
    with pytest.raises(ValueError, match="model of own should have sha256 0, but has"):
        sources.fetch(other, checkouts, tmp_path / "other")


def _found(way, value, digest="a"):
    exact = ([np.ones(2)], [np.ones(2)], 1.0)
    half = ([np.full(2, value)], [np.ones(2)], 0.0)
    return {
        "ways": {"float32": exact, way: half},
        "findings": {},
        "programs": {},
        "tree": "*",
        "digests": [digest],
    }


def test_a_port_is_compared_with_upstream_in_float32_and_in_bfloat16():
    record = compared(_found("own dtype", 1.5), _found("port", 1.25))
    assert record["identical"] == "identical"
    assert record["ways"]["port"] == {"share": 0.0, "outputs": 0.25, "gradients": 0.0}
    assert list(tables.missed("model", record)) == []
    worse = compared(_found("own dtype", 1.25), _found("port", 1.5, digest="b"))
    assert worse["identical"] == "differs in arrays [0]"
    assert list(tables.missed("model", worse)) == ["model: outputs", "model: import swap"]


@pytest.mark.cases(fast=2)
@pytest.mark.parametrize("name", names())
def test_each_trainer_has_edits_results_and_a_page(name):
    trainer = trainer_of(name)
    scripts = {
        str(file.relative_to(sources.EDITS / name).with_suffix(""))
        for file in (sources.EDITS / name).rglob("*.ed")
    }
    assert trainer.name == name and scripts and scripts <= trainer.files.keys()
    found = json.loads((tables.RESULTS / f"{name}.json").read_text())
    page = (tables.ROOT / "docs" / "trainers" / f"{name}.md").read_text()
    assert tables.page_table(found) in page
    assert all(each["revision"] == trainer.revision for each in found.values())
    overview = (tables.ROOT / "docs" / "ports.md").read_text()
    assert all(f"[{model}](trainers/{name}.md)" in overview for model in found)

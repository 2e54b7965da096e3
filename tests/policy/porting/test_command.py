"""``python -m policy port`` from the shell: what it prints and writes, and its errors."""

import importlib.util

import pytest

from policy.command_line.command import main

NET = """
import jax.numpy as jnp
from flax import linen as nn

class Net(nn.Module):
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, dtype=self.dtype)(x)
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "other.py"):
        (tmp_path / name).write_text(NET.replace("Net", name[:-3]))
    return tmp_path


def test_a_diff_is_printed_and_nothing_is_written(files, capsys):
    assert main(["port", "net.py", "other.py"]) == 0
    out = capsys.readouterr().out
    assert "--- a/net.py\n+++ b/net.py\n" in out and "-    dtype: object = jnp.float32\n" in out
    assert out.endswith("2 of 2 files to write with --write; 8 lines deleted or changed\n")
    assert "dtype" in (files / "net.py").read_text()


def test_write_replaces_the_files_and_a_second_run_has_nothing_to_do(files, capsys):
    assert main(["port", "net.py", "other.py", "--write"]) == 0
    assert "dtype" not in (files / "net.py").read_text() + (files / "other.py").read_text()
    assert sorted(file.name for file in files.iterdir()) == ["net.py", "other.py"]
    capsys.readouterr()
    assert main(["port", "net.py", "--write"]) == 0
    assert capsys.readouterr().out == "nothing to port in net.py\n"


def test_no_file_is_written_if_one_is_wrong(files, capsys):
    (files / "wrong.py").write_text("def f(:\n")
    assert main(["port", "net.py", "wrong.py", "--write"]) == 2
    assert "error: wrong.py:1: not Python" in capsys.readouterr().err
    assert (files / "net.py").read_text() == NET.replace("Net", "net")


def test_no_file_is_written_if_one_can_t_be(files, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "other.py")
    assert main(["port", "net.py", "other.py", "--write"]) == 2
    assert "'other.py' can't be written: it is read-only" in capsys.readouterr().err
    assert (files / "net.py").read_text() == NET.replace("Net", "net")
    assert sorted(file.name for file in files.iterdir()) == ["net.py", "other.py"]


def test_line_endings_are_kept(files):
    (files / "net.py").write_bytes(NET.replace("\n", "\r\n").encode())
    assert main(["port", "net.py", "--write"]) == 0
    written = (files / "net.py").read_bytes()
    assert written.count(b"\n") == written.count(b"\r\n") > 5


def test_without_libcst_the_way_out_is_named(files, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *more: None if name == "libcst" else found(name)
    )
    assert main(["port", "net.py"]) == 2
    assert "pip install 'mpmodules[port]'" in capsys.readouterr().err


def test_a_missing_file_is_refused(files, capsys):
    assert main(["port", "net.py", "nte.py"]) == 2
    assert "'nte.py' does not exist" in capsys.readouterr().err

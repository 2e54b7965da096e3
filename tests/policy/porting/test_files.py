"""Files of ``python -m policy port``: what is read, written and skipped, and what is printed."""

import os

import pytest

from policy.command_line.command import main

NET = """from flax import linen as nn

class Net(nn.Module):
    dtype: object = None

    def setup(self):
        self.layer = nn.Dense(3, dtype=self.dtype)
"""
AFTER = NET.replace("from flax", "from mpmodules").replace(", dtype=self.dtype", "")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def test_a_diff_and_what_is_left_are_printed_and_nothing_is_written(folder, capsys):
    (folder / "other.py").write_text("import jax\n")
    assert main(["port", "net.py", "other.py"]) == 0
    out = capsys.readouterr().out
    assert "--- a/net.py\n+++ b/net.py\n" in out
    assert "-        self.layer = nn.Dense(3, dtype=self.dtype)\n" in out
    assert "holds a dtype that may go" in out and "  net.py:4\n" in out
    assert "neither flax.linen nor flax.nnx:\n  other.py\n" in out
    assert "1 of 2 files to write with --write.\n1 dtype arguments of layers would go." in out
    assert "python -m policy audit" in out and (folder / "net.py").read_text() == NET


def test_write_replaces_files_and_a_second_run_has_nothing_to_do(folder, capsys):
    assert main(["port", ".", "--write"]) == 0
    assert (folder / "net.py").read_text() == AFTER
    capsys.readouterr()
    assert main(["port", "net.py", "--write"]) == 0
    assert capsys.readouterr().out.endswith("nothing to port in 1 files\n")
    assert [file.name for file in folder.iterdir()] == ["net.py"]


def test_a_file_that_is_no_python_is_skipped_and_others_are_ported(folder, capsys):
    nested = f"from flax import nnx\nx = {'(' * 500}1{')' * 500}\n"
    (folder / "nested.py").write_text(nested)
    (folder / "wrong.py").write_text("x = 1\ndef f(:\n")
    (folder / "nulls.py").write_bytes(b"x = 1\0\n")
    (folder / "latin.py").write_bytes(b"x = '\xe9'\n")
    (folder / "other.py").write_bytes(b"# coding: klingon\n")
    (folder / "book.ipynb").write_text("{}")
    (folder / "folder.py").mkdir()
    (folder / "link.py").symlink_to("gone.py")
    (folder / "loop").symlink_to(".")
    os.mkfifo(folder / "pipe.py")
    assert main(["port", ".", "nte.py", "book.ipynb", "--write"]) == 1
    skipped = capsys.readouterr().out.partition("skipped:\n")[2]
    for text in (
        "wrong.py:2: not Python: ",
        "nulls.py: not Python: ",
        "latin.py:1: its encoding can't be read: ",
        "other.py:1: its encoding can't be read: ",
        "book.ipynb: a notebook: save it as a .py file",
        "link.py: a link to a file that does not exist",
        "pipe.py: not a regular file",
        "nte.py: no such file or directory",
        "nested.py",
    ):
        assert text in skipped, text
    assert (folder / "net.py").read_text() == AFTER
    assert (folder / "nested.py").read_text() == nested


def test_deep_expressions_are_skipped_or_ported(folder, capsys):
    (folder / "sum.py").write_text(f"from flax import nnx\nx = {'1 + ' * 20000}1\n")
    (folder / "dots.py").write_text(f"from flax import nnx\nx = a{'.a' * 5000}\n")
    main(["port", "sum.py", "dots.py", "net.py"])
    assert "+++ b/net.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("encoding", "end"),
    [("utf-8-sig", "\n"), ("latin-1", "\r\n"), ("utf-8", "\r\n"), ("utf-8", "\r")],
)
def test_encodings_and_line_ends_are_kept(folder, encoding, end):
    head = "# coding: latin-1\nx = 'é'; " if encoding == "latin-1" else "x = 'é'; "
    before, after = (f"{head}{text}".replace("\n", end).encode(encoding) for text in (NET, AFTER))
    (folder / "net.py").write_bytes(before)
    assert main(["port", "net.py", "--write"]) == 0
    assert (folder / "net.py").read_bytes() == after


def test_the_target_of_a_link_is_written_once_with_its_mode(folder):
    (folder / "link.py").symlink_to("net.py")
    (folder / "net.py").chmod(0o640)
    assert main(["port", "link.py", "net.py", "--write"]) == 0
    assert (folder / "link.py").is_symlink() and (folder / "net.py").read_text() == AFTER
    assert (folder / "net.py").stat().st_mode & 0o777 == 0o640


def test_a_file_that_can_t_be_written_is_skipped(folder, capsys, monkeypatch):
    (folder / "other.py").write_text(NET)
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "other.py")
    assert main(["port", "net.py", "other.py", "--write"]) == 1
    assert "skipped:\n  other.py: it is read-only" in capsys.readouterr().out
    assert (folder / "net.py").read_text() == AFTER and (folder / "other.py").read_text() == NET
    assert sorted(file.name for file in folder.iterdir()) == ["net.py", "other.py"]

"""``python -m policy``, as part of a pipeline of the shell."""

import os
import subprocess
import sys

import pytest

from policy.command_line.command import main
from tests.eight_devices import ROOT


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(tmp_path):
    (tmp_path / "code.py").write_text("def double(x):\n    return x + x\n")
    reading, writing = os.pipe()
    os.close(reading)
    target = f"{tmp_path}/code.py:double"
    command = [sys.executable, "-m", "policy", "audit", target, "--arg", "f32[2]"]
    ended = subprocess.run(
        command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert ended.returncode == 141, ended.stderr
    assert "Traceback" not in ended.stderr and "BrokenPipe" not in ended.stderr


def test_a_target_that_there_is_not_is_rejected_before_the_users_code_is_loaded(tmp_path, capsys):
    (tmp_path / "code.py").write_text("raise SystemExit('loaded')\n")
    arguments = ("--arg", "f32[2]", "--policy", "mixed_bfloat16", "--on", "v5f")
    for command in ("suggest", "estimate"):
        given = arguments if command == "suggest" else arguments[:2] + arguments[4:]
        assert main([command, f"{tmp_path}/code.py:double", *given]) == 2
        assert "--on: There is no target 'v5f'" in capsys.readouterr().err

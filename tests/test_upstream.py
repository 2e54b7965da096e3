"""docs/upstream.md: the changes that it suggests, applied to copies of Flax and Optax, repair what
its reproductions show.
"""

import re
import shutil
from pathlib import Path

import flax
import numpy as np
import optax
import pytest

from tests.eight_devices import ROOT, run_python

PAGE = (ROOT / "docs/upstream.md").read_text()
REPORTS: dict[str, str] = dict(
    re.findall(r"^## ((?:Flax|Optax): [^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
)
# A part of the title, the numbers that the reproduction prints after the change, and how far off
# they may be.
REPAIRED = {
    "avg_pool": ([1, 8], 0),
    "Embed": ([4096], 0),
    "bias": ([70000, 70000, 4097, 4097], 0),
    "nnx norms": ([0.01, 0.01], 0.01),
    "use_fast_variance": ([2e-4, 2e-4], 3e-4),
    "softmax": ([0, 0.012, 0.1, 0.012, 0.064], 0.008),  # the last one is linen's, unchanged
    "squares": ([0.005, -0.001, 0.005, -0.001, 300, -0.001, 300, -0.001], 1e-5),
    "second moment": ([3.7e-4, 3.7e-4], 1e-5),
    "global norm": ([19200, 1 / 64], 1e-5),
}


def changed(diff: str, site: Path) -> None:
    """Applies a diff of the page to the packages in `site`. A hunk starts with a line ``@@
    CONTEXT``; its lines are those after the context's first occurrence.
    """
    for file, hunks in re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", diff, re.DOTALL | re.MULTILINE):
        text = (site / file).read_text()
        for context, lines in re.findall(
            r"^@@ ([^\n]*)\n(.*?)(?=^@@ |\Z)", hunks, re.DOTALL | re.MULTILINE
        ):
            old, new = (
                "".join(line[1:] for line in lines.splitlines(True) if line[0] in (" ", sign))
                for sign in "-+"
            )
            before, _, after = text.partition(context)
            if old not in after:
                pytest.skip(f"this release has other code in {file}, {context}")
            text = before + context + after.replace(old, new, 1)
        (site / file).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPAIRED)
def test_the_suggested_change_repairs_the_reproduction(name, tmp_path):
    (body,) = (body for title, body in REPORTS.items() if name in title)
    unused = shutil.ignore_patterns("__pycache__", "*_test.py")
    for package in (flax, optax):
        assert package.__file__ is not None
        folder = Path(package.__file__).parent
        shutil.copytree(folder, tmp_path / folder.name, ignore=unused)
    (diff,) = re.findall(r"```diff\n(.*?)```", body, re.DOTALL)
    changed(diff, tmp_path)
    program = tmp_path / "reproduction.py"
    (code,) = re.findall(r"```python\n(.*?)```", body, re.DOTALL)
    program.write_text(code)
    printed = run_python("-W", "error", program, PYTHONPATH=str(tmp_path))
    numbers = [float(n) for n in re.findall(r"(?<![\w.])-?\d+\.?\d*(?:e-?\d+)?", printed)]
    wanted, room = REPAIRED[name]
    np.testing.assert_allclose(numbers, wanted, rtol=0, atol=room)


@pytest.mark.slow
def test_every_report_has_its_parts():
    assert len(REPORTS) == len(REPAIRED)
    for title, body in REPORTS.items():
        parts = re.findall(r"^\*\*([\w ]+)\.\*\*", body, re.MULTILINE)
        wanted = ["Result", "Expected", "Cause", "Change"]
        assert parts == wanted, title

"""Another module called `policy` is told: a file next to the script, another distribution."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
SCRIPT = "import mpmodules; print(mpmodules.get_policy('bf16').short)"
WAY_OUT = "reinstall ours: pip install --force-reinstall --no-deps mpmodules."


def last_line(folder: Path, *options: str, path: Sequence[Path] = (ROOT,)) -> str:
    """Returns the last line that the script prints, or that its error has."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(SCRIPT)
    variables = {"PYTHONPATH": os.pathsep.join(map(str, path)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *options, script],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | variables,
        check=False,
    )
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def test_a_file_next_to_the_script_is_named(tmp_path):
    other = tmp_path / "policy.py"
    other.write_text("limit = 3")
    last = last_line(tmp_path)
    assert f"'import policy' finds {other}. Rename that file" in last and WAY_OUT in last
    assert last_line(tmp_path, "-P") == "p=bf16,c=bf16,o=bf16"


def test_a_distribution_that_wrote_over_our_files_is_named(tmp_path):
    (tmp_path / "site" / "policy").mkdir(parents=True)
    other = tmp_path / "site" / "policy" / "__init__.py"
    other.write_text("")
    (tmp_path / "site" / "mpmodules").symlink_to(ROOT / "mpmodules")
    for file in (ROOT / "policy").iterdir():
        if file.name != "__init__.py":
            (tmp_path / "site" / "policy" / file.name).symlink_to(file)
    last = last_line(tmp_path / "work", path=(tmp_path / "site",))
    assert f"'import policy' finds {other}." in last and WAY_OUT in last


def test_an_installation_without_policy_is_told(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "mpmodules").symlink_to(ROOT / "mpmodules")
    for installed in Path(jax.__file__).parents[1].iterdir():
        if installed.name not in ("policy", "mpmodules"):  # as which we may be installed
            (site / installed.name).symlink_to(installed)
    last = last_line(tmp_path / "work", "-S", path=(site,))
    assert "'import policy' finds nothing." in last and WAY_OUT in last

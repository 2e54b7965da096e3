"""Others called `policy` are told apart: a file beside the script, one on PYTHONPATH, another
distribution.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
RUN_ANYWAY = "raise SystemExit('the other policy was run')"


def run(script: Path, *options: str, path: tuple[Path, ...] = (ROOT,)) -> str:
    """Runs a script that imports mpmodules; returns the last line of what it printed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, *options, str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=script.parent, env=environment, check=False
    )
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def script_in(
    folder: Path, text: str = "import mpmodules; print(mpmodules.get_policy('bf16').short)"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(text)
    return folder / "train.py"


def distribution_in(folder: Path) -> Path:
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "__init__.py").write_text(RUN_ANYWAY)
    (folder / "policies-2.0.dist-info").mkdir()
    (folder / "policies-2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: policies\nVersion: 2.0\n"
    )
    (folder / "policies-2.0.dist-info" / "RECORD").write_text("policy/__init__.py,,\n")
    return folder


def test_a_file_beside_the_script_is_to_be_renamed_or_passed_over(tmp_path):
    (tmp_path / "policy.py").write_text(RUN_ANYWAY)
    script = script_in(tmp_path)
    last = run(script)
    assert last.startswith(
        "ImportError: mpmodules needs its own package 'policy', but 'import policy' finds "
    )
    assert (
        f"{tmp_path.resolve() / 'policy.py'}: policy.py beside your script shadows it. Rename "
        "policy.py, or" in last
    )
    assert last.endswith("or run `python -P`, which does not look there.")
    assert run(script, "-P") == "p=bf16,c=bf16,o=bf16"  # the advice works


def test_a_package_beside_the_script_is_told_by_its_folder(tmp_path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "__init__.py").write_text(RUN_ANYWAY)
    assert "policy/ beside your script shadows it. Rename policy/, or run `python -P`" in run(
        script_in(tmp_path)
    )


def test_a_script_of_that_name_is_not_run_a_second_time(tmp_path):
    (tmp_path / "policy.py").write_text("print('run'); import mpmodules; print('done')")
    assert "policy.py beside your script shadows it" in run(tmp_path / "policy.py")


def test_a_file_that_was_imported_as_policy_before_is_told_too(tmp_path):
    (tmp_path / "policy.py").write_text("limit = 3")
    script = script_in(tmp_path, "import sys, policy; policy.__spec__ = None; import mpmodules")
    assert "policy.py beside your script shadows it" in run(script)


def test_a_file_elsewhere_on_the_path_is_to_be_renamed_or_taken_off_it(tmp_path):
    other = tmp_path / "shared_code"
    other.mkdir()
    (other / "policy.py").write_text(RUN_ANYWAY)
    last = run(script_in(tmp_path / "work"), path=(other, ROOT))
    assert (
        "policy.py in a folder of sys.path shadows it. Rename policy.py, or take "
        f"{other.resolve()} out of " in last
    )


def test_another_distribution_is_told_by_its_name_with_both_ways_out(tmp_path):
    other = distribution_in(tmp_path / "site")
    last = run(script_in(tmp_path / "work"), path=(other, ROOT))
    assert (
        "policies installs a top-level 'policy' too and shadows it. pip uninstall policies, then "
        "reinstall ours" in last
    )
    assert (
        "pip install --force-reinstall --no-deps mpmodules. To keep both, give mpmodules a virtual "
        "env" in last
    )


def test_a_distribution_that_wrote_over_our_files_is_told(tmp_path):
    site = distribution_in(tmp_path / "site")
    (site / "mpmodules").symlink_to(ROOT / "mpmodules")
    for file in (ROOT / "policy").glob("*.py"):
        if file.name != "__init__.py":
            (site / "policy" / file.name).symlink_to(file)
    assert "policies installs a top-level 'policy' too" in run(
        script_in(tmp_path / "work"), path=(site,)
    )


def test_an_installation_without_policy_is_called_broken(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "mpmodules").symlink_to(ROOT / "mpmodules")
    for installed in (
        Path(jax.__file__).parents[1].iterdir()
    ):  # all but us: in an environment we may be installed
        if installed.name not in ("policy", "mpmodules"):
            (site / installed.name).symlink_to(installed)
    last = run(script_in(tmp_path / "work"), "-S", path=(site,))
    assert (
        "'import policy' finds nothing: the installation is broken. Reinstall it: pip install"
        in last
    )

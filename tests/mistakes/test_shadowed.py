"""Others called `policy` are told apart: a file beside the script, one on PYTHONPATH, another
distribution.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
RUN_ANYWAY = "raise SystemExit('the other policy was run')"
SCRIPT = "import mpmodules; print(mpmodules.get_policy('bf16').short)"
BESIDE = "policy.py beside your script shadows it. Rename policy.py, or run `python -P`, which"


def run(folder: Path, text: str, *options: str, path: Sequence[Path] = (ROOT,)) -> str:
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(text)
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


def written(files: dict[str, str], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


OF_A_DISTRIBUTION = {
    "policy/__init__.py": RUN_ANYWAY,
    "policies-2.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: policies\nVersion: 2.0\n",
    "policies-2.0.dist-info/RECORD": "policy/__init__.py,,\n",
}
SPECLESS = "import sys, policy; policy.__spec__ = None; import mpmodules"


@pytest.mark.parametrize(
    ("files", "text", "message"),
    [
        ({"policy.py": RUN_ANYWAY}, SCRIPT, BESIDE),
        ({"policy.py": "limit = 3"}, SPECLESS, BESIDE),  # it was imported before
        ({"policy/__init__.py": RUN_ANYWAY}, SCRIPT, BESIDE.replace("policy.py", "policy/")),
    ],
)
def test_a_file_beside_the_script_is_to_be_renamed_or_passed_over(tmp_path, files, text, message):
    last = run(written(files, tmp_path), text)
    beginning = "ImportError: mpmodules needs its own package 'policy', but 'import policy' finds "
    assert last.startswith(f"{beginning}{tmp_path.resolve()}") and message in last
    if text == SCRIPT:
        assert run(tmp_path, SCRIPT, "-P") == "p=bf16,c=bf16,o=bf16"  # the advice works


def test_a_script_of_that_name_is_not_run_a_second_time(tmp_path):
    program = "print('run'); import mpmodules; print('done')"
    (tmp_path / "train.py").symlink_to(tmp_path / "policy.py")
    assert BESIDE in run(tmp_path, program)


def test_a_file_elsewhere_on_the_path_is_to_be_renamed_or_taken_off_it(tmp_path):
    other = written({"policy.py": RUN_ANYWAY}, tmp_path / "shared_code")
    told = "policy.py in a folder of sys.path shadows it. Rename policy.py, or take "
    last = run(tmp_path / "work", SCRIPT, path=(other, ROOT))
    assert f"{told}{other.resolve()} out of " in last


def test_another_distribution_is_told_by_its_name_with_both_ways_out(tmp_path):
    other = written(OF_A_DISTRIBUTION, tmp_path / "site")
    last = run(tmp_path / "work", SCRIPT, path=(other, ROOT))
    for part in (
        "policies installs a top-level 'policy' too and shadows it. pip uninstall policies, then ",
        "pip install --force-reinstall --no-deps mpmodules. To keep both, give mpmodules a virtual",
    ):
        assert part in last


def test_a_distribution_that_wrote_over_our_files_is_told(tmp_path):
    site = written(OF_A_DISTRIBUTION, tmp_path / "site")
    (site / "mpmodules").symlink_to(ROOT / "mpmodules")
    for file in (ROOT / "policy").glob("*.py"):
        if file.name != "__init__.py":
            (site / "policy" / file.name).symlink_to(file)
    last = run(tmp_path / "work", SCRIPT, path=(site,))
    assert "policies installs a top-level 'policy' too" in last


def test_an_installation_without_policy_is_called_broken(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "mpmodules").symlink_to(ROOT / "mpmodules")
    for installed in Path(jax.__file__).parents[1].iterdir():
        if installed.name not in ("policy", "mpmodules"):  # as which we may be installed
            (site / installed.name).symlink_to(installed)
    last = run(tmp_path / "work", SCRIPT, "-S", path=(site,))
    broken = "finds nothing: the installation is broken. Reinstall it: pip install"
    assert f"'import policy' {broken}" in last

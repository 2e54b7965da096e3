"""Everything that the README shows runs, and its figures' commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(
    "block", BLOCKS, ids=[f"line {README[: README.index(b)].count(chr(10))}" for b in BLOCKS]
)
def test_each_block_of_the_readme_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_readme_gives_one_command_for_the_main_job_and_one_for_the_tests():
    commands = dict(re.findall(r"<!-- (main job|tests) -->\n```bash\n(.*)\n```", README))
    assert commands["main job"].endswith("python examples/train_digits.py")
    assert commands["tests"].endswith("python -m pytest -n 2")
    assert (ROOT / "examples/train_digits.py").exists()


def test_the_readme_lists_every_example():
    listed = re.findall(r"^\| `(\w+\.py)` \|", README, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_one_import_is_enough_for_a_model_author():
    import mpmodules
    import policy

    for name in ("Policy", "PolicyRules", "use_policy", "set_policy", "current_policy"):
        assert getattr(mpmodules, name) is getattr(policy, name)


def test_policy_imports_neither_flax_nor_mpmodules():
    code = (
        "import sys, policy; "
        "print([m for m in sys.modules if m.split('.')[0] in ('flax', 'mpmodules')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.strip() == "[]"

"""Published packages and files of repositories, imported with our modules."""

import ast
import importlib
import shutil
import subprocess
import sys

import pytest
from flax import linen as nn

from benchmarks.packages import environment, imports

SWAPPED = [
    ("from flax import linen, struct", "from mpmodules import linen\nfrom flax import struct"),
    ("import flax.linen as nn", "import mpmodules.linen as nn"),
    ("from flax.nnx import Linear", "from mpmodules.nnx import Linear"),
    (
        "from flax.linen.linear import Dense as D, _not_ours",
        "from mpmodules.linen import Dense as D\nfrom flax.linen.linear import _not_ours",
    ),
    ("from .flax import linen", "from .flax import linen"),
    ("import flax", "import flax"),
    (
        "from __future__ import annotations\nimport flax\nnet = flax.linen.Dense",
        "from __future__ import annotations\nimport mpmodules.linen, mpmodules.nnx\nimport flax\n"
        "net = mpmodules.linen.Dense",
    ),
]


@pytest.mark.parametrize(("source", "expected"), SWAPPED)
def test_imports_of_flax_are_replaced_by_ours(source, expected):
    assert ast.unparse(imports.swapped(ast.parse(source))) == expected


def test_a_package_is_imported_with_our_modules_and_others_are_not(tmp_path, monkeypatch):
    for name in ("swapped_package", "other_package"):
        (tmp_path / f"{name}.py").write_text("from flax import linen as nn\nlayer = nn.Dense\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    replaced = imports.install(["swapped_package"])
    package, other = map(importlib.import_module, ("swapped_package", "other_package"))
    assert package.layer.__module__.startswith("mpmodules") and other.layer is nn.Dense
    assert replaced == {"swapped_package"}
    with pytest.raises(ValueError, match="swapped_package can't be imported with our modules: im"):
        imports.install(["swapped_package"])


@pytest.mark.skipif(shutil.which("git") is None, reason="git checks files out")
def test_the_files_of_a_repository_are_those_of_their_commits(tmp_path):
    clone = tmp_path / "clones" / "models"
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    commits = []
    clone.mkdir(parents=True)
    subprocess.run([*git, "init", "--quiet"], check=True)
    for text in ("first\n", "second\n"):
        (clone / "vit.py").write_text(text)
        subprocess.run([*git, "add", "vit.py"], check=True)
        subprocess.run([*git, "commit", "--quiet", "--message", text], check=True)
        found = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True)
        commits.append(found.stdout.decode().strip())
    checkout = environment.Checkout("https://example.org/models", {commits[0]: ("vit.py",)})
    environment.check_out(checkout, tmp_path / "clones", tmp_path / "sources")
    assert (tmp_path / "sources" / "vit.py").read_text() == "first\n"
    missing = environment.Checkout("https://example.org/models", {commits[0]: ("resnet.py",)})
    with pytest.raises(subprocess.CalledProcessError):
        environment.check_out(missing, tmp_path / "clones", tmp_path / "sources")

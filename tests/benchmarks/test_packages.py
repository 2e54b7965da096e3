"""Published packages, imported with our modules."""

import ast
import importlib
import sys

import pytest
from flax import linen as nn

from benchmarks.packages import imports

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

"""The table of published packages: what is counted and measured, on models written here, and how it
is written.
"""

from __future__ import annotations

import ast
import importlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from benchmarks.packages import imports
from benchmarks.packages.cases import AUTOCAST, OWN, PORT, Case
from benchmarks.packages.measure import Figures, float32_share, measure
from benchmarks.packages.rows import IDENTICAL, Row

BF16 = jnp.bfloat16


# --------------------------------------------------------------------------------------------------
# What is counted and measured
# --------------------------------------------------------------------------------------------------


def test_the_share_of_float32_counts_loop_bodies_as_often_as_they_run_and_no_complex_numbers():
    w, half = jnp.ones((4, 4)), jnp.ones((4, 4), BF16)

    def looped(x: Any) -> Any:
        y, _ = jax.lax.scan(lambda carry, _: (carry @ half, None), x.astype(BF16), length=3)
        return y.astype(jnp.float32) @ w

    def mixed(x: Any) -> Any:
        return jax.lax.dot(x.astype(BF16), x, preferred_element_type=jnp.float32)

    def of_complex(x: Any) -> Any:
        return half @ half, x.astype(jnp.complex64) @ w.astype(jnp.complex64)

    assert float32_share(looped, w) == pytest.approx(1 / 4)
    assert float32_share(jax.grad(lambda x: looped(x).sum()), w) == pytest.approx(2 / 8)
    assert float32_share(mixed, w) == 1.0
    assert float32_share(of_complex, w) == float32_share(jnp.sin, w) == 0.0


class Linen(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(
            nn.BatchNorm(use_running_average=True, dtype=self.dtype)(
                nn.Dense(8, dtype=self.dtype)(x)
            )
        )
        return nn.Dense(2, dtype=self.dtype)(x)


class Nnx(nnx.Module):
    def __init__(self, dtype: Any):
        self.layer = nnx.Linear(4, 2, dtype=dtype, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


def _inputs(generator: np.random.Generator) -> tuple[Any, ...]:
    return (generator.normal(size=(3, 4)).astype(np.float32),)


@pytest.mark.parametrize("model", [Linen, Nnx])
def test_the_ways_to_run_a_model_are_measured_beside_float32(model):
    with jax.numpy_dtype_promotion("standard"):  # Flax's BatchNorm mixes dtypes
        case = Case(model.__name__, model, _inputs, has_option=True)
        found: dict[str, Any] = measure(case, range(3)).ways
    assert set(found) == {PORT, AUTOCAST, OWN}
    for way, figures in found.items():
        assert isinstance(figures, Figures), f"{way}: {figures}"
        assert figures.share == 0.0 and 1e-4 < figures.outputs < 0.02
        assert 1e-4 < figures.gradients < 0.05


# --------------------------------------------------------------------------------------------------
# How it is written
# --------------------------------------------------------------------------------------------------

GOOD, BAD = Figures(0.0, 0.004, 0.008), Figures(0.02, 0.006, 0.008)


def test_a_port_has_bounds_beside_the_models_own_option_or_autocast():
    assert not list(Row("a", {PORT: GOOD, AUTOCAST: BAD, OWN: GOOD}, IDENTICAL).missed())
    assert list(Row("a", {PORT: BAD, AUTOCAST: BAD, OWN: GOOD}).missed()) == ["share", "outputs"]
    assert list(Row("a", {PORT: BAD, AUTOCAST: GOOD}).missed()) == ["share", "outputs"]
    half_an_option = Figures(0.5, 0.001, 0.001)
    assert not list(Row("a", {PORT: GOOD, AUTOCAST: GOOD, OWN: half_an_option}).missed())
    assert list(Row("a", {PORT: GOOD, AUTOCAST: "TypeError: x"}, "differs").missed()) == [
        AUTOCAST,
        "import swap",
    ]
    assert not list(Row("a", {PORT: GOOD, AUTOCAST: GOOD, OWN: "TypeError: x"}).missed())
    assert list(Row("a", {PORT: Figures(float("nan"), 0, 0), AUTOCAST: GOOD}).missed()) == ["share"]


# --------------------------------------------------------------------------------------------------
# Packages as they are imported
# --------------------------------------------------------------------------------------------------


SWAPPED = [
    (
        "from flax import linen as nn, struct",
        "from mpmodules import linen as nn\nfrom flax import struct",
    ),
    ("import flax.linen as nn", "import mpmodules.linen as nn"),
    ("from flax.nnx import Linear", "from mpmodules.nnx import Linear"),
    (
        "from flax.linen.linear import Dense as D, _not_ours",
        "from mpmodules.linen import Dense as D\nfrom flax.linen.linear import _not_ours",
    ),
    ("from .flax import linen", "from .flax import linen"),
    ("import flax", "import flax"),
    (
        '"""Says."""\nfrom __future__ import annotations\nimport flax\nnet = flax.linen.Dense',
        '"""Says."""\nfrom __future__ import annotations\n'
        "import mpmodules.linen, mpmodules.nnx\nimport flax\nnet = mpmodules.linen.Dense",
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
    with pytest.raises(
        ValueError, match="swapped_package can't be imported with our modules: imported already"
    ):
        imports.install(["swapped_package"])

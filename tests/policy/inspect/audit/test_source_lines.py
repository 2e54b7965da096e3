"""Reports name lines of the user's code: none of JAX, Flax, Optax or this library."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import flax.linen as flax_linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from mpmodules import linen, nnx
from policy import audit, compare, use_policy

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
HERE = re.compile(r"test_source_lines\.py:\d+ \(.+\)")
APIS = pytest.mark.parametrize("api", ["Flax's linen", "linen", "Flax's nnx", "nnx"])


def model_of(api: str) -> tuple[Any, tuple[Any, ...]]:
    if api.endswith("linen"):
        nn: Any = linen if api == "linen" else flax_linen

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.LayerNorm(name="norm")(nn.Dense(8, name="up")(x))
                x = x * 6e4  # overflows
                return nn.Dense(3, name="head")(x)

        model = Net()
        return model.apply, (model.init(jax.random.key(0), X), X)
    mod: Any = nnx if api == "nnx" else flax_nnx
    rngs = flax_nnx.Rngs(0)

    class NnxNet(mod.Module):
        def __init__(self):
            self.up, self.norm = mod.Linear(8, 8, rngs=rngs), mod.LayerNorm(8, rngs=rngs)
            self.head = mod.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            x = self.norm(self.up(x))
            x = x * 6e4  # overflows
            return self.head(x)

    with use_policy("mixed_float16"):
        return NnxNet(), (X,)


def line(text: str) -> list[int]:
    lines = Path(__file__).read_text().splitlines()
    return [i for i, each in enumerate(lines, 1) if each.endswith(text)]


@pytest.mark.cases(fast=1)
@APIS
def test_every_operation_and_finding_is_of_a_line_of_the_model(api):
    fn, args = model_of(api)
    report = audit(fn, *args, policy="mixed_float16", backward=True)
    inside = [op for op in report.operations if op.path and op.kind != "other"]
    # No code of the model's calls the casts at its boundary.
    boundary = type(getattr(fn, "__self__", fn)).__name__
    sources = {op.source for op in inside if op.kind != "cast" or op.source != boundary}
    assert sources and all(HERE.fullmatch(source) for source in sources), sources
    report = audit(lambda *args: fn(*args).astype(jnp.bfloat16).sum(dtype=jnp.bfloat16), *args)
    assert all(HERE.fullmatch(finding.source) for finding in report.findings), report


@pytest.mark.cases(slow=2)
@APIS
def test_compare_names_the_line_and_operation_that_made_an_error_and_no_cast_of_a_boundary(api):
    fn, args = model_of(api)
    comparison = compare(fn, *args, policy="mixed_float16")
    assert all(HERE.fullmatch(row.source) for row in comparison.rows), comparison
    assert not {row.primitive for row in comparison.rows} & {"convert_element_type"}
    jump = comparison[comparison.first_jump or ""]
    overflowing = [number for number in line("# overflows") if f".py:{number} " in jump.source]
    assert jump.primitive == "mul" and overflowing and jump.source in str(comparison)


@pytest.mark.slow
def test_a_scan_of_a_model_names_the_line_in_the_body():
    class Step(flax_linen.Module):
        @flax_linen.compact
        def __call__(self, x, _):
            up = flax_linen.Dense(8, dtype=jnp.bfloat16, name="up")
            return up(x).astype(x.dtype), None  # in the body

    class Net(flax_linen.Module):
        @flax_linen.compact
        def __call__(self, x):
            options: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            return flax_linen.scan(Step, length=2, **options)(name="steps")(x, None)[0]

    model = Net()
    report = audit(model.apply, model.init(jax.random.key(0), X), X, backward=True)
    dots = {op.source for op in report.operations if op.kind == "dot"}
    (number,) = line("# in the body")
    assert dots == {f"test_source_lines.py:{number} (Step.__call__)"}


@pytest.mark.slow
@pytest.mark.parametrize("nn", [flax_linen, linen])
def test_a_layer_that_no_code_of_a_users_calls_is_named_by_its_path_and_class(nn):
    model = nn.Sequential([nn.Dense(8, dtype=jnp.bfloat16), nn.Dense(3, dtype=jnp.bfloat16)])
    report = audit(model.apply, model.init(jax.random.key(0), X), X, backward=True)
    sources = {op.source for op in report.operations if op.kind == "dot"}
    assert sources == {"layers_0 (Dense)", "layers_1 (Dense)"}
    attention = nn.MultiHeadDotProductAttention(2, dtype=jnp.bfloat16)
    variables = attention.init(jax.random.key(0), X[None])
    report = audit(attention.apply, variables, X[None].astype(jnp.bfloat16))
    sources = {op.source for op in report.operations if op.kind == "dot"}
    assert "MultiHeadDotProductAttention" in sources and "query (DenseGeneral)" in sources


@pytest.mark.slow
def test_a_library_of_a_third_party_counts_as_the_users_code(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "their_models"
    package.mkdir(parents=True)
    text = "import flax.linen as nn\n\ndef model(x):\n    return nn.relu(x).astype('bfloat16')\n"
    (package / "__init__.py").write_text(text)
    spec = importlib.util.spec_from_file_location("their_models", package / "__init__.py")
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "their_models", theirs)
    spec.loader.exec_module(theirs)
    report = audit(theirs.model, X)
    assert {op.source for op in report.operations if op.kind == "cast"} == {"__init__.py:4 (model)"}


def doubled(x):
    y = jnp.tanh(x)
    y = y * jnp.cos(y) + x
    y = jnp.sin(y) * jnp.tanh(y) - x
    return jnp.exp(y) + jnp.tanh(y)  # where the exponential is


class Doubles(linen.Module):
    @linen.compact
    def __call__(self, x):
        return doubled(x)


class NnxDoubles(nnx.Module):
    def __call__(self, x):
        return doubled(x)


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_equal_modules_have_the_lines_of_their_own_code(api):
    if api == "linen":
        model: Any = linen.Sequential([Doubles() for _ in range(3)], dtype_policy="mixed_bfloat16")
        call, args = model.apply, ({}, X)
    else:
        with use_policy("mixed_bfloat16"):
            call, args = nnx.Sequential(*(NnxDoubles() for _ in range(3))), (X,)
    report = audit(call, *args)
    found = {op.source for op in report.operations if op.primitive == "exp"}
    (exponential,) = line("# where the exponential is")
    assert found == {f"test_source_lines.py:{exponential} (doubled)"}

"""Suggestions from the shell."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.command_line.command import main

pytestmark = pytest.mark.filterwarnings("ignore::policy.DtypePolicyWarning")

NET = """
import jax, jax.numpy as jnp
from mpmodules import linen as nn


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(nn.Dense(32, name="up")(x))


def example():
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    return Net().apply, (jax.eval_shape(Net().init, jax.random.key(0), x), x)


def plain(x, i):
    with jax.named_scope("up"):
        return jnp.tanh(x) * i.astype(x.dtype)
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    path = tmp_path / "net_to_suggest_for.py"
    path.write_text(NET)
    return str(path)


@pytest.mark.slow
def test_layers_in_8_bits_are_suggested_for_shapes(net, capsys):
    options = ["--policy", "mixed_bfloat16", "--matmul", "f8", "--smallest", "16"]
    assert main(["suggest", f"{net}:example", "--error", "0.06", *options]) == 0
    printed = capsys.readouterr().out
    assert 'use_policy("mixed_float8", rules)' in printed
    assert "16x32  8 bits" in printed and "32x8  kept: too small to gain" in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--error", "1e-9", "--policy", "bf16"], "No part of this call runs in half precision"),
        (["--error", "1", "--policy", "f9"], "--policy f9: Unknown dtype 'f9'"),
        (["--error", "1", "--params", "0"], "give --backward too"),
    ],
)
def test_what_can_not_be_suggested_is_told_in_a_line(net, capsys, options, text):
    target = [f"{net}:plain", "--arg", "f32[4]", "--arg", "i32[4]"]
    assert main(["suggest", *target, *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and text in told

"""suggest: what is sensitive is kept in float32, and nothing else; the rules do what was foreseen."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

import mpmodules.nnx as mp_nnx
import policy
from mpmodules import linen as nn
from policy import PolicyRules, autocast, use_policy
from policy.inspection.suggest import suggest
from tests.programs import apply

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> Any:
    return jnp.asarray(scale * RNG.normal(size=shape), F32)


def relative(value: Any, truth: Any) -> float:
    value, truth = np.asarray(value, np.float64), np.asarray(truth, np.float64)
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


def cancelling(planted: tuple[int, ...], layers: int = 6) -> Any:
    """Residual layers of which some lose what they return in an offset."""

    def model(ws: Any, x: Any) -> Any:
        with jax.named_scope("Net"):
            for i in range(layers):
                with jax.named_scope(f"layer_{i}"):
                    with jax.named_scope("dense"):
                        y = jnp.tanh(x @ ws["w"][i])
                    with jax.named_scope("out"):
                        y = y @ ws["w"][i]
                        y = (y + F32(1000)) - F32(1000) if i in planted else y
                x = x + y
        return x

    return model


@pytest.fixture(scope="module")
def residual() -> tuple[Any, Any]:
    generator = np.random.default_rng(1)
    return {"w": jnp.asarray(generator.normal(size=(6, 8, 8)) / 3, F32)}, jnp.asarray(
        generator.normal(size=(4, 8)), F32
    )


def compilations(caplog: pytest.LogCaptureFixture) -> int:
    return sum("Finished XLA compilation" in record.getMessage() for record in caplog.records)


def test_exactly_the_planted_layers_of_a_plain_function_are_kept(
    residual: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = cancelling((2, 4))
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        found = suggest(model, *residual, error=0.03, policy="mixed_bfloat16")
    assert compilations(caplog) == 2 == found.compilations
    assert found.runs <= 2 * len(found.evidence) and found.route == "autocast"
    assert sorted(found.paths) == ["Net/layer_2/out", "Net/layer_4/out"]
    assert found.rules == PolicyRules([("Net/layer_2/out", "float32"), ("Net/layer_4/out", "float32")])
    assert found.without > 0.1 and found.error <= 0.03 and found.emulated <= 0.03
    ruled = jax.jit(
        autocast(model, "mixed_bfloat16", rules=found.rules), compiler_options={"xla_allow_excess_precision": False}
    )
    assert relative(ruled(*residual), jax.jit(model)(*residual)) == pytest.approx(found.error, rel=1e-2)


def test_what_is_printed_is_code_that_makes_the_rules(residual: Any) -> None:
    found = suggest(cancelling((1, 2, 3)), *residual, error=0.03, policy="mixed_bfloat16")
    scope: dict[str, Any] = {}
    exec(str(found), scope)
    assert scope["rules"] == found.rules == PolicyRules([("Net/layer_(?:1|2|3)/out", "float32")])
    assert 'autocast(fn, "mixed_bfloat16", rules=rules)' in str(found)
    assert "Net/layer_5/dense" in str(found) and "kept in float32" in str(found)

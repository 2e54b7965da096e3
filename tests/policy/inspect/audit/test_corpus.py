"""Faults of the corpus are seen wherever users write them, and clean programs have no findings.

Findings in Flax's own layers in bfloat16. Nothing runs: programs are traced.
"""

from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mpmodules
from policy import audit
from policy.inspect.audit.findings import (
    CARRY,
    FINDING_KINDS,
    FUNCTION,
    LEAK,
    MIXED,
    PRECISION,
    PROMOTION,
    REDUCTION,
)
from tests.policy.inspect.audit.corpus import carries, discrete, functions, sums
from tests.policy.inspect.audit.corpus.planting import (
    BF16,
    CLEAN,
    F16,
    FAULTS,
    Program,
    places_of,
    shape,
)

assert mpmodules  # names the modules of nnx
assert carries and discrete and functions and sums  # add to the corpus

NOT_SEEN = {
    "a place in a sorted array",
    "an index of two small ones",
    "steps of Euler's by a function of the state",
}
"""Faults of the corpus that an audit misses, by their names."""

FLAGGED: set[str] = set()
"""Clean programs of the corpus that an audit reports."""


def audited(run: Any, program: Program, backward: bool) -> Any:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return audit(run, *program.args, backward=backward)


def is_seen(program: Program, run: Any) -> bool:
    findings = audited(run, program, program.backward).findings
    if program.states is not None:
        found = [one for one in findings if one.kind == CARRY]
        by_state = {one.message.partition(",")[0]: one.primitive for one in found}
        return by_state == program.states and {one.path for one in found} == {"inner"}
    return any(
        (one.kind, one.path) == (program.kind, "inner")
        and program.primitive in ("any", one.primitive)
        for one in findings
    )


@pytest.mark.cases(fast=2, slow=16)
@pytest.mark.parametrize("place", range(len(FAULTS)), ids=[one.name for one in FAULTS])
def test_a_fault_is_seen_in_all_its_places(place):
    fault = FAULTS[place]
    missed = [name for name, run in places_of(fault, place).items() if not is_seen(fault, run)]
    assert bool(missed) == (fault.name in NOT_SEEN), missed


@pytest.mark.cases(fast=2, slow=16)
@pytest.mark.parametrize("place", range(len(CLEAN)), ids=[one.name for one in CLEAN])
def test_a_clean_program_has_no_finding_in_any_place(place):
    program = CLEAN[place]
    runs = places_of(program, place)
    found = {name: audited(run, program, False).findings for name, run in runs.items()}
    if program.backward:
        found["gradients"] = audited(program.run, program, True).findings
    assert any(found.values()) == (program.name in FLAGGED), found


def test_the_share_that_is_seen_and_flagged():
    planted = Counter(fault.kind for fault in FAULTS)
    assert set(FINDING_KINDS) - set(planted) == {PRECISION}  # test_asked.py
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 275
    assert len(CLEAN) == len({program.name for program in CLEAN}) == 195
    assert len(NOT_SEEN) / len(FAULTS) <= 5 / 155 and len(FLAGGED) <= 1


# --- Flax's own layers --------------------------------------------------------------------------

Found = set[tuple[str, str, str, bool]]
X, TOKENS = shape(2, 5, 8), jnp.zeros((2, 3), jnp.int32)
DOT = "MultiHeadDotProductAttention:"


def found_in(make: Any, x: Any = X, backward: bool = False) -> Found:
    model = nnx.eval_shape(make) if not isinstance(make, nn.Module) else make
    with jax.numpy_dtype_promotion("standard"):
        if isinstance(model, nn.Module):
            variables = jax.eval_shape(model.init, jax.random.key(0), x)
            report = audit(model.apply, variables, x, backward=backward)
        else:
            report = audit(model, x, backward=backward)
    return {(f.kind, f.path, f.primitive, f.is_backward) for f in report.findings}


def normed():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs))


@pytest.mark.parametrize(
    ("make", "x", "primitive"),
    (
        (nn.Embed(9, 4, dtype=BF16), TOKENS, "scatter-add"),
        (lambda: nnx.Embed(9, 4, dtype=BF16, rngs=nnx.Rngs(0)), TOKENS, "scatter-add"),
        (nn.Dense(3, dtype=BF16), X, "reduce_sum"),
        (lambda: nnx.Linear(8, 3, dtype=BF16, rngs=nnx.Rngs(0)), X, "reduce_sum"),
    ),
)
def test_the_gradients_of_embeddings_and_biases_are_summed_in_half(make, x, primitive):
    found = found_in(make, x, backward=True)
    assert {(kind, *rest) for kind, _, *rest in found} == {(REDUCTION, primitive, True)}


@pytest.mark.parametrize(
    ("make", "found"),
    (
        (nn.Sequential([nn.LayerNorm(), nn.Dense(8)]), (LEAK, "layers_0", "dot_general", False)),
        (normed, (LEAK, "layers/0", "dot_general", False)),
        (
            lambda: nnx.BatchNorm(8, dtype=F16, use_running_average=True, rngs=nnx.Rngs(0)),
            (FUNCTION, "BatchNorm:", "rsqrt", False),
        ),
    ),
)
def test_norms_leak_float32_into_the_next_layer_or_evaluate_in_half_in_nnx(make, found):
    assert found in found_in(make)


def test_a_dense_layer_promotes_and_attention_is_half_or_leaves_a_mixed_matmul_if_forced():
    assert found_in(nn.Dense(3)) == {(PROMOTION, "Dense:", "dot_general", False)}
    attention = nn.MultiHeadDotProductAttention(2, dtype=BF16)
    assert found_in(attention) == {(FUNCTION, DOT, "exp", False)}
    forced = found_in(attention.clone(force_fp32_for_softmax=True))
    assert forced == {(MIXED, DOT, "dot_general", False), (LEAK, DOT, "dot_general", False)}


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("layer", (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm))
def test_normalizations_of_linen_are_right_but_return_float32_where_no_dtype_is_given(layer):
    options: Any = {"use_running_average": True} if layer is nn.BatchNorm else {}
    assert found_in(layer(dtype=BF16, **options)) == set()
    promoted = found_in(layer(**options))
    assert {(kind, path) for kind, path, *_ in promoted} == {(PROMOTION, f"{layer.__name__}:")}

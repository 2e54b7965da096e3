"""Every layer of both APIs under every policy: what is stored, multiplied, summed, returned and
differentiated.

Nothing here is run: each case is traced once for each policy, its gradients by parameters and by
floating inputs included, and the contracts are read from that. The suite traces under strict dtype
and rank promotion."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from policy import Policy, get_policy, use_policy
from tests.mpmodules.table.cases import CASES, Case
from tests.mpmodules.table.running import DEPRECATIONS, THEIRS, Trace, dtypes_of, program, traced
from tests.programs import Operation
from tests.scripts import docs_script

# What runs in less than reduction_dtype and may, with the reason. One that is not needed fails.
_GATES = "a gate: elementwise, in compute_dtype as in Flax"
_RATE = "dropout divides each number that is left by a constant"
_LSTM = {"tanh": _GATES, "logistic": _GATES}
_ATTENTION = {"div": f"{_RATE}: what it divides are rounded weights"}

# By layer and primitive: functions of single numbers, of which no statistic or softmax is made.
ELEMENTWISE: dict[str, dict[str, str]] = {
    "Dropout": {"div": _RATE},
    "MultiHeadDotProductAttention": _ATTENTION,
    "MultiHeadAttention": _ATTENTION,
    "SimpleCell": {"tanh": _GATES},
    **dict.fromkeys(("GRUCell", "MGUCell", "LSTMCell", "OptimizedLSTMCell", "ConvLSTMCell"), _LSTM),
    **dict.fromkeys(("RNN", "Bidirectional"), _LSTM),
}

_FLIP = {
    "scatter-add": "the transpose of reversing a sequence: a permutation, each place added to once"
}

# By API, case and primitive: sums that round nothing.
UNROUNDED_SUMS: dict[tuple[str, str], dict[str, str]] = {
    ("linen", "RNN of lengths"): _FLIP,
    ("nnx", "RNN of lengths"): _FLIP,
}

pytestmark = DEPRECATIONS
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
INSIDE = ("mixed_bfloat16", "bfloat16")  # under these, inside a model too
MATMULS = ("dot_general", "conv_general_dilated")
# reduce_max, reduce_min, argmax, sort and their like are exact in any dtype.
_SUMS = "reduce_sum reduce_prod reduce_window reduce_window_sum cumsum cumprod cumlogsumexp"
SUMS = frozenset([*_SUMS.split(), "scatter-add", "scatter-mul", "select_and_scatter_add"])
_FUNCTIONS = "exp exp2 expm1 log log1p rsqrt sqrt tanh logistic erf pow integer_pow square div sin"
FUNCTIONS = frozenset([*_FUNCTIONS.split(), "cos"])
CALLS = frozenset(
    ["jit", "pjit", "scan", "while", "cond", "checkpoint", "custom_jvp_call", "custom_vjp_call"]
)
HALVES = frozenset(["bfloat16", "float16"])


def each(cases: list[tuple[str, Case]]) -> pytest.MarkDecorator:
    ids = [f"{api}-{case}" for api, case in cases]
    return pytest.mark.parametrize(("api", "case"), cases, ids=ids)


EACH_CASE = each(CASES)


_traces: dict[Any, Trace] = {}


def trace_of(api: str, case: Case, policy: str | None, composite: bool = False) -> Trace:
    key = (api, str(case), policy, composite)
    if key not in _traces:
        _traces[key] = traced(api, case, policy, composite=composite)
    return _traces[key]


def both(api: str, case: Case, policy: str) -> Iterator[Operation]:
    """The operations of a case as the root, and inside a model, whose boundary hands it
    compute_dtype.
    """
    yield from trace_of(api, case, policy).ops
    if policy in INSIDE:
        yield from trace_of(api, case, policy, composite=True).ops


def narrow(ops: Iterable[Operation], names: frozenset[str], policy: Policy) -> set[str]:
    """Which of `names` run on something narrower than reduction_dtype, plain sums of one term each
    left out.
    """
    found = (op for op in ops if op.name in names and op.terms != 1)
    return {
        op.name
        for op in found
        for dtype in op.inputs
        if dtype in HALVES and policy.reduction_dtype.name != dtype
    }


@pytest.mark.parametrize("api", ("linen", "nnx"))
def test_the_table_holds_every_layer_of_the_catalog(api):
    rows = [row for row in docs_script("make_layers").LAYERS if api in row.tests]
    listed = {row.name for row in rows if hasattr(THEIRS[api], row.name)}
    names = [str(case) for at, case in CASES if at == api]
    assert {case.layer for at, case in CASES if at == api} == listed
    assert len(set(names)) == len(names)


def parameters_are_stored_in_param_dtype_and_statistics_in_float32(api, case, policy):
    trace, policy = trace_of(api, case, policy), get_policy(policy)
    assert dtypes_of(trace.params) <= {policy.param_dtype.name}
    kept = policy.compute_dtype.name if case.setting == "decoding" else "float32"
    if (api, case.layer) == ("nnx", "WeightNorm"):
        kept = policy.param_dtype.name  # its scales are parameters, in a Variable of their own type
    assert dtypes_of(trace.rest) <= {kept}
    sown = {policy.compute_dtype.name} if case.call.get("sow_weights") else set()
    assert dtypes_of(trace.state) <= {kept} | sown


def every_matmul_multiplies_compute_dtype(api, case, policy):
    found = [op for op in both(api, case, policy) if op.name in MATMULS]
    compute = get_policy(policy).compute_dtype.name
    if case.layer == "SpectralNorm":  # its power iteration multiplies weights, in reduction_dtype
        found = [op for op in found if set(op.inputs) != {"float32"}]
    assert {dtype for op in found for dtype in op.inputs} <= {compute}
    wide = {op.outputs for op in found} - {(compute,)}
    # the logits of attention are the matmul's accumulator: they go into a float32 softmax
    assert wide <= ({("float32",)} if "Attention" in case.layer else set())


def every_sum_runs_in_reduction_dtype_forward_and_backward(api, case, policy):
    exempt = UNROUNDED_SUMS.get((api, str(case)), {})
    assert narrow(both(api, case, policy), SUMS, get_policy(policy)) <= set(exempt)


def every_sum_and_matmul_of_init_runs_in_the_dtypes_of_a_call(api, case, policy):
    ops, resolved = trace_of(api, case, policy).init, get_policy(policy)
    exempt = UNROUNDED_SUMS.get((api, str(case)), {})
    assert narrow(ops, SUMS, resolved) <= set(exempt)
    # initializers and SpectralNorm's power iteration multiply in float32
    multiplied = {dtype for op in ops if op.name in MATMULS for dtype in op.inputs}
    assert multiplied <= {resolved.compute_dtype.name, "float32"}


def every_function_of_statistics_runs_in_reduction_dtype_forward_and_backward(api, case, policy):
    exempt = ELEMENTWISE.get(case.layer, {})
    assert narrow(both(api, case, policy), FUNCTIONS, get_policy(policy)) <= set(exempt)


@pytest.mark.slow
def test_no_exception_is_out_of_use():
    """Layers without exceptions have none in use: every contract says so of them."""
    policy = get_policy("mixed_bfloat16")
    sums, functions = {}, {}
    for api, case in CASES:
        if case.layer not in ELEMENTWISE and (api, str(case)) not in UNROUNDED_SUMS:
            continue
        ops = list(both(api, case, str(policy)))
        sums[api, str(case)] = narrow(ops, SUMS, policy)
        functions.setdefault(case.layer, set()).update(narrow(ops, FUNCTIONS, policy))
    for listed, found in ((UNROUNDED_SUMS, sums), (ELEMENTWISE, functions)):
        in_use = {key: names for key, names in found.items() if names}
        assert {key: set(names) for key, names in listed.items()} == in_use


def a_root_returns_what_it_is_and_a_model_around_it_returns_output_dtype(api, case, policy):
    resolved = get_policy(policy)
    root = resolved.output_dtype if case.is_module else resolved.compute_dtype
    assert dtypes_of(trace_of(api, case, policy).out) == {root.name}
    if policy in INSIDE:
        inside = trace_of(api, case, policy, composite=True)
        assert dtypes_of(inside.out) == {resolved.output_dtype.name}


def gradients_come_back_in_the_dtypes_of_parameters_and_inputs(api, case, policy):
    trace = trace_of(api, case, policy)

    def same(gradient: Any, value: Any) -> None:
        assert (gradient.shape, gradient.dtype) == (value.shape, value.dtype)

    jax.tree.map(same, trace.param_gradients, trace.params)
    jax.tree.map(same, trace.input_gradients, trace.inputs)


def an_audit_finds_nothing_forward_and_backward(api, case, policy):
    """Under a policy of half storage too, whose statistics are float32."""
    found = [*trace_of(api, case, policy).findings]
    if policy in INSIDE:
        found += trace_of(api, case, policy, composite=True).findings
    assert not found


CONTRACTS = (
    parameters_are_stored_in_param_dtype_and_statistics_in_float32,
    every_matmul_multiplies_compute_dtype,
    every_sum_runs_in_reduction_dtype_forward_and_backward,
    every_sum_and_matmul_of_init_runs_in_the_dtypes_of_a_call,
    every_function_of_statistics_runs_in_reduction_dtype_forward_and_backward,
    a_root_returns_what_it_is_and_a_model_around_it_returns_output_dtype,
    gradients_come_back_in_the_dtypes_of_parameters_and_inputs,
    an_audit_finds_nothing_forward_and_backward,
)


@pytest.mark.cases(fast=1, slow=5)
@EACH_CASE
def test_every_contract_holds_under_every_policy(api, case):
    """One test, as all contracts are read from the same traces."""
    for policy in POLICIES:
        for contract in CONTRACTS:
            contract(api, case, policy)


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.parametrize("inputs_in", (jnp.bfloat16, jnp.float16), ids=("bf16", "f16"))
@EACH_CASE
def test_half_inputs_have_the_dtypes_of_the_policy_forward_and_backward(api, case, inputs_in):
    if case.is_cell:
        return  # a carry in half precision stays in it
    for policy in ("mixed_bfloat16", "p=bf16,c=f32,o=bf16"):
        trace, resolved = traced(api, case, policy, inputs_in=inputs_in), get_policy(policy)
        returned = resolved.output_dtype if case.is_module else resolved.compute_dtype
        assert dtypes_of(trace.out) == {returned.name}
        assert dtypes_of(trace.params) == dtypes_of(trace.param_gradients)
        assert dtypes_of(trace.input_gradients) <= {jnp.dtype(inputs_in).name}


def is_repaired(api: str, case: Case) -> bool:
    """Whether Flax's result is float32 from ``dtype=bfloat16``, or an error, and ours follows
    `dtype`.
    """
    repaired = case.is_cell or case.layer in ("RNN", "Bidirectional")
    return repaired or (api, case.layer, case.setting) == ("nnx", "MultiHeadAttention", "decoding")


@pytest.mark.cases(fast=2, slow=16)
@pytest.mark.parametrize("given", ({}, {"dtype": jnp.bfloat16}), ids=("inferred", "bfloat16"))
@pytest.mark.parametrize(
    "inputs_in", (jnp.float32, jnp.bfloat16), ids=("f32 inputs", "bf16 inputs")
)
@EACH_CASE
def test_with_no_policy_outputs_have_the_dtypes_that_flax_gives_them(api, case, inputs_in, given):
    with jax.numpy_dtype_promotion("standard"):
        ours = shapes_of(api, case, None, inputs_in, given)
        rotates_half = case.layer == "RoPE" and inputs_in == jnp.bfloat16  # Flax's returns float32
        if rotates_half or (given and is_repaired(api, case)):
            assert dtypes_of(ours) == {"bfloat16"}
        else:
            theirs = shapes_of(api, case, THEIRS[api], inputs_in, given)
            assert jax.tree.map(str, ours) == jax.tree.map(str, theirs)


def shapes_of(api: str, case: Case, modules: Any, inputs_in: Any, given: dict[str, Any]) -> Any:
    run = program(api, case, modules, inputs_in=inputs_in, **given)
    params, rest = jax.eval_shape(run.init, jax.random.key(0))
    return jax.eval_shape(lambda params, rest: run.apply(params, rest, run.inputs)[0], params, rest)


@pytest.mark.cases(fast=1, slow=12)
@EACH_CASE
def test_with_no_policy_an_explicit_half_dtype_sums_in_float32(api, case):
    # Flax multiplies float32 weights by half values there, and adds a float32 low-rank part to a
    # half one
    mixes = case.setting == "forced" or case.layer == "LoRALinear"
    with jax.numpy_dtype_promotion("standard" if mixes else "strict"):
        ops = traced(api, case, None, dtype=jnp.bfloat16).ops
    exempt = UNROUNDED_SUMS.get((api, str(case)), {})
    assert narrow(ops, SUMS, get_policy("mixed_bfloat16")) <= set(exempt)


REJECTED = (TypeError, ValueError, FutureWarning, np.exceptions.ComplexWarning)
OF_NUMBERS = [
    (api, case)
    for api, case in CASES  # a cell's carry is real
    if not (case.is_cell or case.layer == "RNN")
    and all(x.dtype == np.float32 for x in case.called_with)
]


@pytest.mark.cases(fast=1, slow=12)
@each(OF_NUMBERS)
def test_complex_inputs_give_under_a_policy_what_they_give_without(api, case):
    with jax.numpy_dtype_promotion("standard"):
        try:
            theirs = shapes_of(api, case, THEIRS[api], jnp.complex64, {})
        except REJECTED:  # no softmax, no gate, no running average of Flax's takes complex numbers
            return
        with use_policy("mixed_bfloat16"):
            ours = shapes_of(api, case, None, jnp.complex64, {})
    assert jax.tree.map(str, ours) == jax.tree.map(str, theirs)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.cases(fast=1, slow=12)
@EACH_CASE
def test_with_x64_a_half_policy_makes_no_float64(x64, api, case):
    trace = traced(api, case, "mixed_bfloat16")
    found = {op.name for op in trace.ops if "float64" in (*op.inputs, *op.outputs)} - CALLS
    draws = case.layer == "Dropout" or case.setting in ("with dropout", "all at once")
    if draws or case.layer == "RoPE":  # JAX draws masks, and Flax computes angles, in float64
        found &= SUMS | set(MATMULS)
    assert not found
    tables = () if case.layer == "RoPE" else (trace.rest, trace.state)
    assert "float64" not in dtypes_of((trace.params, trace.out, tables))


# `forced` asks for a softmax in float32
IN_FLOAT64 = [(api, case) for api, case in CASES if (api, case.setting) != ("linen", "forced")]


@pytest.mark.cases(fast=1, slow=12)
@each(IN_FLOAT64)
def test_with_x64_a_float64_policy_is_obeyed_everywhere(x64, api, case):
    trace = traced(api, case, "float64", inputs_in=jnp.float64)
    stored = trace.params, trace.rest, trace.state
    assert dtypes_of((*stored, trace.out, trace.param_gradients)) == {"float64"}
    found = [op for op in trace.ops if op.name in SUMS | set(MATMULS)]
    seen = {dtype for op in found for dtype in (*op.inputs, *op.outputs)}
    assert not seen & (HALVES | {"float32"})


@pytest.mark.cases(fast=1, slow=8)
@pytest.mark.filterwarnings(
    "ignore:scatter inputs have incompatible types:FutureWarning"
)  # nnx BatchNorm's statistics
@EACH_CASE
def test_with_x64_and_no_policy_float64_inputs_give_what_flax_gives(x64, api, case):
    with jax.numpy_dtype_promotion("standard"):
        try:
            theirs = shapes_of(api, case, THEIRS[api], jnp.float64, {})
        except TypeError as error:  # a float32 carry does not stay one over float64 inputs
            assert "carry" in str(error) or case.setting == "decoding"
            return
        ours = shapes_of(api, case, None, jnp.float64, {})
    assert jax.tree.map(str, ours) == jax.tree.map(str, theirs)

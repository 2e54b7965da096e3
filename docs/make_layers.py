"""Writes docs/layers.md, the catalog of layers, from the tables below.

    python docs/make_layers.py

Checks first that every layer that the installed Flax exports is listed or exempt, and writes
nothing otherwise. tests/test_catalog.py makes the same check, so a new layer of Flax's fails a
test.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import sys
import textwrap
import types

import flax.linen
import flax.nnx

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "layers.md"
APIS: tuple[str, ...] = ("linen", "nnx")


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer or function.

    Attributes:
      name: the name that Flax exports.
      wide: the computations in reduction_dtype.
      upstream: Flax's behavior in 16 bits.
      tests: a test, ``file::name`` below tests/, for each API that has the layer or function.
    """

    name: str
    wide: str
    upstream: str
    tests: dict[str, str]


def both(test: str) -> dict[str, str]:
    """One test of a layer for both apis."""
    return dict.fromkeys(APIS, f"mpmodules/{test}")


_SAME = both(
    "test_same_as_upstream.py::test_a_layer_has_flaxs_tree_values_outputs_gradients_and_state"
)
_CELLS = both("table/test_every_layer.py::test_every_contract_holds_under_every_policy")
_RNN = both("test_recurrent.py::test_an_rnn_returns_output_dtype_and_a_carry_in_compute_dtype")
_BOTH_WAYS = both(
    "test_recurrent.py::test_a_bidirectional_rnn_returns_output_dtype_and_carries_in_compute_dtype"
)
_MATMUL = both("test_bias_gradients.py::test_a_bias_gradient_is_summed_in_float32")
_NORMS = both("test_norms.py::test_norms_are_within_one_ulp_of_the_output_dtype_far_from_zero")
_ATTENTION = both("table/test_every_layer.py::test_every_contract_holds_under_every_policy")
_DECODE = both("test_decode.py::test_a_decode_loop_is_the_full_forward_and_scans")
_EMBED = both("test_facts.py::test_our_embedding_gradient_counts_every_occurrence")
_WEIGHTS = both(
    "test_weight_norms.py::test_gradients_of_normalized_half_weights_are_finite_and_half"
)
_PRELU = both("test_activations.py::test_prelu_keeps_its_slope_in_param_dtype")
_LORA = {"nnx": "mpmodules/nnx/test_layers.py::test_dtypes_of_a_ported_lora_are_the_policys"}
_ROTARY = {"nnx": "mpmodules/nnx/test_layers.py::test_rope_in_half_is_rounded_once"}
_POOL = both("test_pooling.py::test_half_is_float32_rounded_once")
_MAX_POOL = both(
    "test_pooling.py::"
    "test_gradients_of_maxima_are_summed_in_float32_where_more_than_four_windows_overlap"
)
_ACTIVATION = both(
    "test_activations.py::"
    "test_float32_without_a_policy_is_upstreams_bit_for_bit_and_half_that_of_reductions"
)


def one(tests: dict[str, str], api: str) -> dict[str, str]:
    return {api: tests[api]}


_BIAS = "the gradient of the bias; the accumulators of matmuls are the backend's"
_BIAS_UP = "sums the gradient of the bias in 16 bits"
_NORM = "statistics, scale, bias and their gradients; the result is rounded once"
_CELL = "initializers and the gradients of biases; gates are summed in compute_dtype, as in Flax"
_CELL_UP = "returns float32 from 16-bit inputs, or raises"

LAYERS = (
    Row("Dense", _BIAS, _BIAS_UP, one(_MATMUL, "linen")),
    Row("DenseGeneral", _BIAS, _BIAS_UP, one(_MATMUL, "linen")),
    Row("Linear", _BIAS, _BIAS_UP, one(_MATMUL, "nnx")),
    Row("LinearGeneral", _BIAS, _BIAS_UP, one(_MATMUL, "nnx")),
    Row("Einsum", _BIAS, _BIAS_UP, _MATMUL),
    Row("Conv", _BIAS, _BIAS_UP, _MATMUL),
    Row("ConvLocal", _BIAS, _BIAS_UP, one(_MATMUL, "linen")),
    Row("ConvTranspose", _BIAS, _BIAS_UP, _MATMUL),
    Row(
        "Embed",
        "the gradient of the table",
        "sums the gradient in 16 bits: 4096 uses of a row count as 256",
        _EMBED,
    ),
    Row(
        "LayerNorm",
        _NORM,
        "loses digits if the mean is large; nnx rounds the input before the statistics",
        _NORMS,
    ),
    Row("RMSNorm", _NORM, "nnx rounds the input before the statistics", _NORMS),
    Row(
        "GroupNorm",
        _NORM,
        "loses digits if the mean is large; nnx rounds the input before the statistics",
        _NORMS,
    ),
    Row(
        "BatchNorm",
        _NORM,
        "loses digits if the mean is large; nnx evaluates in 16 bits",
        _NORMS,
    ),
    Row(
        "InstanceNorm",
        _NORM,
        "loses digits if the mean is large; nnx rounds the input before the statistics",
        _NORMS,
    ),
    Row(
        "WeightNorm",
        "the norms of the weights",
        "stores the normalized weights in 16 bits, against param_dtype",
        _WEIGHTS,
    ),
    Row(
        "SpectralNorm",
        "the power iteration and its statistics",
        "linen stores the normalized weights in 16 bits, against param_dtype",
        _WEIGHTS,
    ),
    Row(
        "MultiHeadAttention",
        "logits and softmax; the decode cache is in [cache_dtype](eight_bits.md#caches)",
        "softmax in 16 bits, in nnx only with dropout or sown weights; nnx's float32 cache "
        "makes decoding raise",
        _ATTENTION,
    ),
    Row(
        "MultiHeadDotProductAttention",
        "logits and softmax; the decode cache is in [cache_dtype](eight_bits.md#caches)",
        "softmax in 16 bits",
        one(_DECODE, "linen"),
    ),
    Row(
        "SelfAttention",
        "logits and softmax; the decode cache is in [cache_dtype](eight_bits.md#caches)",
        "softmax in 16 bits",
        one(_DECODE, "linen"),
    ),
    Row(
        "RoPE",
        "positions, angles, sines, cosines and the rotation",
        "returns float32 from 16-bit inputs",
        _ROTARY,
    ),
    Row("SimpleCell", _CELL, _CELL_UP, _CELLS),
    Row("GRUCell", _CELL, _CELL_UP, _CELLS),
    Row("MGUCell", _CELL, _CELL_UP, one(_CELLS, "linen")),
    Row("LSTMCell", _CELL, _CELL_UP, _CELLS),
    Row("OptimizedLSTMCell", _CELL, _CELL_UP, _CELLS),
    Row("ConvLSTMCell", _CELL, _CELL_UP, one(_CELLS, "linen")),
    Row(
        "RNN",
        "the sums of gradients over the steps; the carry keeps its dtype",
        "raises if the cell changes the carry's dtype",
        _RNN,
    ),
    Row("Bidirectional", "nothing of its own", "as for RNN", _BOTH_WAYS),
    Row("Dropout", "nothing: masking and scaling in compute_dtype are accurate", "the same", _SAME),
    Row("Sequential", "nothing of its own; it casts as any module does", "no casts", _SAME),
    Row(
        "PReLU",
        "slope times input, and the gradient of the slope",
        "multiplies and sums the gradient in 16 bits",
        _PRELU,
    ),
    Row(
        "LoRA",
        "nothing; the accumulators of its two matmuls are the backend's",
        "returns float32 if its base module does",
        _LORA,
    ),
    Row(
        "LoRALinear",
        "as for Linear; the low-rank part follows the policy",
        "returns float32 under dtype=bfloat16",
        _LORA,
    ),
)

FUNCTIONS = (
    Row(
        "avg_pool",
        "the sums of windows, forward and backward",
        "the mean of 128 x 128 ones in bfloat16 is 0.25",
        _POOL,
    ),
    Row("pool", "the reduction of windows", "reduces in 16 bits", _POOL),
    Row(
        "max_pool",
        "the gradient, if more than four windows overlap, and on GPUs",
        "sums the gradient in 16 bits",
        _MAX_POOL,
    ),
    Row(
        "min_pool",
        "the gradient, if more than four windows overlap, and on GPUs",
        "sums the gradient in 16 bits",
        one(_MAX_POOL, "nnx"),
    ),
    Row("softmax", "everything", "exponential, sum and division in 16 bits", _ACTIVATION),
    Row("log_softmax", "everything", "exponential and logarithm in 16 bits", _ACTIVATION),
    Row("logsumexp", "everything", "exponential and logarithm in 16 bits", _ACTIVATION),
    Row("log_sigmoid", "everything", "exponential and logarithm in 16 bits", _ACTIVATION),
    Row("softplus", "everything", "exponential and logarithm in 16 bits", _ACTIVATION),
    Row(
        "standardize",
        "everything",
        "squares in 16 bits; loses digits if the mean is large",
        _ACTIVATION,
    ),
    Row(
        "normalize",
        "everything: the deprecated name of `standardize`",
        "as for `standardize`",
        one(_ACTIVATION, "linen"),
    ),
    Row("dot_product_attention", "logits and softmax", "softmax in 16 bits", _ATTENTION),
    Row(
        "dot_product_attention_weights",
        "logits and softmax",
        "softmax in 16 bits",
        one(_ATTENTION, "linen"),
    ),
    Row(
        "dot_product_attention_with_rope",
        "rotation, logits and softmax",
        "makes 16-bit queries and keys float32",
        _ROTARY,
    ),
)

_EIGHT_BIT = "an 8-bit matmul, given to a layer as an argument; the layer follows the policy"
EXEMPT = {
    "linen": {
        "Module": "the base class; ours carries the policy",
        "RNNCellBase": "a base class without parameters; ours carries the policy",
        "BatchApply": "reshapes the inputs and outputs of a module, which follows the policy",
        "tabulate": "ours also shows the policy of each module, and what gave it",
        "Fp8DotGeneral": _EIGHT_BIT,
        "Fp8DotGeneralOp": _EIGHT_BIT,
        "Fp8DirectDotGeneralOp": _EIGHT_BIT,
        "NANOOFp8DotGeneralOp": _EIGHT_BIT,
        "Fp8Einsum": _EIGHT_BIT,
    },
    "nnx": {
        "Module": "the base class; ours carries the policy",
        "RNNCellBase": "a base class without parameters; ours carries the policy",
        "Object": "another name for Pytree",
        "tabulate": "ours also shows the policy of each module, and what gave it",
        "Pytree": "the base class of objects with state; it has no call",
        "Dict": "holds modules; it has no call",
        "List": "holds modules; it has no call",
        "Rngs": "holds random keys",
        "RngStream": "holds a random key",
        "Optimizer": (
            "takes any optax transform, `policy.mixed_precision` included, and ScaledGradients"
        ),
        "ModelAndOptimizer": (
            "takes any optax transform, `policy.mixed_precision` included, and ScaledGradients"
        ),
        "EMA": "averages variables in their stored dtype: store them in float32",
        "Metric": "a base class; Flax's metrics sum in float32",
        "MultiMetric": "holds metrics; Flax's metrics sum in float32",
    },
}


def upstream(api: str) -> types.ModuleType:
    return flax.linen if api == "linen" else flax.nnx


def stateful_classes(module: types.ModuleType) -> dict[str, type]:
    """Returns the classes that `module` exports and that hold parameters or state, or reduce."""
    bases = (flax.linen.Module, flax.linen.BatchApply, flax.nnx.Pytree)
    exported = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name: cls
        for name, cls in exported.items()
        if inspect.isclass(cls) and issubclass(cls, bases)
    }


def gaps(api: str, module: types.ModuleType | None = None) -> list[str]:
    """Returns the names of Flax's classes that are neither in the catalog nor exempt."""
    known = {row.name for row in LAYERS if api in row.tests} | set(EXEMPT[api])
    return sorted(set(stateful_classes(upstream(api) if module is None else module)) - known)


def require_complete(api: str, module: types.ModuleType | None = None) -> None:
    """Raises a LookupError that names every layer of Flax's that is missing in the catalog."""
    missing = gaps(api, module)
    if missing:
        raise LookupError(
            f"flax.{api} exports {', '.join(missing)}, which docs/make_layers.py neither lists in "
            "LAYERS nor exempts "
            f"in EXEMPT['{api}'] with a reason. Cover it in mpmodules/{api}, list it with its "
            "test, and run "
            "python docs/make_layers.py."
        )


PROSE = """
Every layer and function of Flax whose results depend on a dtype, the part that runs in
reduction_dtype (float32 under a 16-bit policy), and Flax's behavior in 16 bits. A name that is not
followed by linen or nnx is in both. Everything else is exported unchanged.

Every layer stores its parameters in param_dtype, multiplies in compute_dtype and returns
compute_dtype, or output_dtype at the [boundary](concepts.md#the-boundary) of a model. The gradient
of a parameter has the dtype of the parameter. Running statistics are float32. For the backward pass
a norm, softmax or loss saves the 16-bit activation, and no float32 copy of it.

`python docs/make_layers.py` writes the page.
"""


def filled(text: str, indent: str = "") -> list[str]:
    """Returns the lines of a paragraph, wrapped at 120 columns."""
    return textwrap.wrap(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def wrapped(text: str) -> list[str]:
    """Returns the lines of paragraphs, each followed by an empty line."""
    return [line for each in text.strip().split("\n\n") for line in (*filled(each), "")]


def named(row: Row) -> str:
    """Returns the name of a layer or function, with its API if only one has it."""
    return f"`{row.name}`" + ("" if len(row.tests) == len(APIS) else f" ({', '.join(row.tests)})")


def grouped(rows: tuple[Row, ...]) -> dict[tuple[str, str], list[Row]]:
    """Returns the rows that have the same texts, by these."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.wide, row.upstream), []).append(row)
    return found


def page() -> str:
    """Returns the text of docs/layers.md."""
    lines = ["# Layers and functions", "", *wrapped(PROSE)]
    for title, rows in (("Layers", LAYERS), ("Functions", FUNCTIONS)):
        lines += [
            f"## {title}",
            "",
            f"| {title.lower()} | in reduction_dtype | Flax in 16 bits |",
        ]
        lines += ["|---|---|---|"]
        lines += [
            f"| {', '.join(map(named, group))} | {wide} | {upstream} |"
            for (wide, upstream), group in grouped(rows).items()
        ]
        lines.append("")
    lines.pop()
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        for each in APIS:
            require_complete(each)
    except LookupError as error:
        sys.exit(str(error))
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")

"""Writes docs/layers.md, the catalogue of layers, from the tables below.

    python docs/make_layers.py

It first holds the tables against what the installed Flax exports, and writes nothing where a layer
of Flax's is neither in the catalogue nor exempt. tests/test_catalogue.py does the same, so that a
new layer shows up as a gap.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import sys
import types

import flax.linen
import flax.nnx

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "layers.md"
WINGS: tuple[str, ...] = ("linen", "nnx")


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer or function.

    Attributes:
      name: as Flax exports it.
      wide: what runs in reduction_dtype.
      upstream: what Flax does in half precision.
      tests: a test of it, ``file::name`` below tests/, for each wing that has it.
    """

    name: str
    wide: str
    upstream: str
    tests: dict[str, str]


def both(linen: str, nnx: str) -> dict[str, str]:
    return {"linen": f"mpmodules/linen/{linen}", "nnx": f"mpmodules/nnx/{nnx}"}


_SAME = {
    "linen": (
        "mpmodules/test_same_as_upstream.py::"
        "test_a_linen_layer_has_flaxs_tree_values_outputs_gradients_and_state"
    ),
    "nnx": (
        "mpmodules/test_same_as_upstream.py::"
        "test_an_nnx_layer_has_flaxs_tree_values_outputs_gradients_and_state"
    ),
}
_CELLS = both(
    "test_recurrent.py::test_a_policy_decides_every_dtype_of_a_cell_forward_and_backward",
    "test_recurrent.py::test_a_policy_decides_every_dtype_of_a_cell_forward_and_backward",
)
_RNN = both(
    "test_recurrent.py::test_an_rnn_returns_output_dtype_and_a_carry_in_compute_dtype",
    "test_recurrent.py::test_an_rnn_returns_output_dtype_and_a_carry_in_compute_dtype",
)
_BOTH_WAYS = both(
    "test_recurrent.py::test_a_bidirectional_rnn_returns_output_dtype_and_carries_in_compute_dtype",
    "test_recurrent.py::test_a_bidirectional_rnn_returns_output_dtype_and_carries_in_compute_dtype",
)
_MATMUL = {
    "linen": "mpmodules/linen/test_bias_gradients.py::test_a_bias_gradient_is_summed_in_float32",
    "nnx": "mpmodules/nnx/test_bias_gradients.py::test_a_bias_gradient_is_summed_in_float32",
}
_NORMS = both(
    "test_facts.py::test_our_norms_are_within_one_ulp_of_the_output_dtype_at_a_large_offset",
    "test_facts.py::test_our_norms_are_within_an_ulp_of_the_output_dtype_on_an_offset_input",
)
_ATTENTION = both(
    "test_facts.py::test_every_attention_layer_keeps_exp_in_float32_and_matmuls_on_half_operands",
    "test_facts.py::test_every_softmax_of_the_attention_layer_is_float32_and_every_matmul_half",
)
_DECODE = both(
    "test_decode.py::test_a_decode_loop_is_the_full_forward",
    "test_decode.py::test_a_decode_loop_is_the_full_forward",
)
_EMBED = both(
    "test_facts.py::test_our_embedding_gradient_counts_every_occurrence",
    "test_facts.py::test_our_embedding_gradient_counts_every_occurrence",
)
_WEIGHTS = both(
    "test_weight_norms.py::test_parameters_and_gradients_keep_param_dtype",
    "test_weight_norms.py::test_parameters_and_gradients_keep_param_dtype",
)
_INSTANCE = both(
    "test_weight_norms.py::test_instance_norm_keeps_an_offset_input_accurate",
    "test_weight_norms.py::test_instance_norm_keeps_an_offset_input_accurate",
)
_PRELU = both(
    "test_activations.py::test_prelu_keeps_its_slope_in_param_dtype",
    "test_activations.py::test_prelu_keeps_its_slope_in_param_dtype",
)
_LORA = {"nnx": "mpmodules/nnx/test_lora.py::test_dtypes_are_the_policys"}
_ROTARY = {"nnx": "mpmodules/nnx/test_rotary.py::test_half_is_rounded_once"}
_POOL: dict[str, str] = dict.fromkeys(
    WINGS, "mpmodules/linen/test_pooling.py::test_half_is_float32_rounded_once"
)
_MAX_POOL: dict[str, str] = dict.fromkeys(
    WINGS,
    "mpmodules/linen/test_pooling.py::test_the_gradient_of_overlapping_maxima_is_summed_in_float32",
)
_ACTIVATION: dict[str, str] = dict.fromkeys(
    WINGS, "mpmodules/linen/test_activations.py::test_half_is_within_one_ulp"
)


def one(tests: dict[str, str], wing: str) -> dict[str, str]:
    return {wing: tests[wing]}


_BIAS = "the gradient of the bias; the accumulators of matmuls, as XLA has them"
_BIAS_UP = "sums the gradient of the bias to half precision"
_NORM = "statistics, scale and bias, and their gradients; one rounding at the end"
_CELL = "initialisers, the gradients of biases; gates are summed in compute_dtype as in Flax"
_CELL_UP = "returns float32 from half inputs, or fails"

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
        "sums the gradient in half precision: 4096 occurrences count 256",
        _EMBED,
    ),
    Row(
        "LayerNorm",
        _NORM,
        "cancels where the mean is large; nnx rounds before the statistics",
        _NORMS,
    ),
    Row("RMSNorm", _NORM, "nnx rounds before the statistics", _NORMS),
    Row(
        "GroupNorm",
        _NORM,
        "cancels where the mean is large; nnx rounds before the statistics",
        _NORMS,
    ),
    Row(
        "BatchNorm",
        _NORM,
        "cancels where the mean is large; nnx runs in half precision in evaluation",
        _NORMS,
    ),
    Row(
        "InstanceNorm",
        _NORM,
        "cancels where the mean is large; nnx rounds before the statistics",
        _INSTANCE,
    ),
    Row(
        "WeightNorm",
        "norms of weights",
        "stores the normalised weights in half precision, whatever param_dtype is",
        _WEIGHTS,
    ),
    Row(
        "SpectralNorm",
        "the power iteration and its statistics",
        "linen stores the normalised weights in half precision, whatever param_dtype is",
        _WEIGHTS,
    ),
    Row(
        "MultiHeadAttention",
        "logits and softmax; the decode cache is in compute_dtype",
        "softmax in half precision; nnx only with dropout or sown weights, and its float32 cache "
        "fails to decode",
        _ATTENTION,
    ),
    Row(
        "MultiHeadDotProductAttention",
        "logits and softmax; the decode cache is in compute_dtype",
        "softmax in half precision",
        one(_DECODE, "linen"),
    ),
    Row(
        "SelfAttention",
        "logits and softmax; the decode cache is in compute_dtype",
        "softmax in half precision",
        one(_DECODE, "linen"),
    ),
    Row(
        "RoPE",
        "positions, angles, sines and cosines, the rotation",
        "returns float32 from half inputs",
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
        "the gradients of half weights, over the steps; a loop over its cell, whose carry keeps "
        "its type",
        "fails where the cell's carry changes type",
        _RNN,
    ),
    Row("Bidirectional", "nothing of its own", "as RNN", _BOTH_WAYS),
    Row(
        "Dropout", "nothing: masks and scaling are exact enough in compute_dtype", "as ours", _SAME
    ),
    Row("Sequential", "nothing of its own: a boundary, as any module is", "knows no policy", _SAME),
    Row(
        "PReLU",
        "slope times input, and the gradient of the slope",
        "multiplies and sums the gradient in half precision",
        _PRELU,
    ),
    Row(
        "LoRA",
        "the accumulators of its two matmuls, as XLA has them",
        "returns float32 over a float32 base module",
        _LORA,
    ),
    Row(
        "LoRALinear",
        "as Linear; its low-rank part follows the policy",
        "returns float32 from dtype=bfloat16",
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
    Row("pool", "the reduction of windows", "reduces in half precision", _POOL),
    Row(
        "max_pool",
        "the gradient, where more than four windows overlap",
        "sums the gradient in half precision",
        _MAX_POOL,
    ),
    Row(
        "min_pool",
        "the gradient, where more than four windows overlap",
        "sums the gradient in half precision",
        one(_MAX_POOL, "nnx"),
    ),
    Row("softmax", "all of it", "exp, sum and division in half precision", _ACTIVATION),
    Row("log_softmax", "all of it", "exp and log in half precision", _ACTIVATION),
    Row("logsumexp", "all of it", "exp and log in half precision", _ACTIVATION),
    Row("log_sigmoid", "all of it", "exp and log in half precision", _ACTIVATION),
    Row("softplus", "all of it", "exp and log in half precision", _ACTIVATION),
    Row(
        "standardize",
        "all of it",
        "squares in half precision; cancels where the mean is large",
        _ACTIVATION,
    ),
    Row(
        "normalize",
        "`standardize` under its deprecated name",
        "as standardize",
        one(_ACTIVATION, "linen"),
    ),
    Row("dot_product_attention", "logits and softmax", "softmax in half precision", _ATTENTION),
    Row(
        "dot_product_attention_weights",
        "logits and softmax",
        "softmax in half precision",
        one(_ATTENTION, "linen"),
    ),
    Row(
        "dot_product_attention_with_rope",
        "rotation, logits and softmax",
        "float32 queries and keys from half ones",
        _ROTARY,
    ),
)

_EIGHT_BIT = "an operation of 8-bit matmuls that a layer is given; the layer around it obeys"
EXEMPT = {
    "linen": {
        "Module": "the base class: ours carries the policy",
        "RNNCellBase": "a base class without parameters: ours carries the policy",
        "BatchApply": "reshapes what a module takes and returns; the module inside obeys",
        "tabulate": "shows the policy of each module, and what gave it",
        "Fp8DotGeneral": _EIGHT_BIT,
        "Fp8DotGeneralOp": _EIGHT_BIT,
        "Fp8DirectDotGeneralOp": _EIGHT_BIT,
        "NANOOFp8DotGeneralOp": _EIGHT_BIT,
        "Fp8Einsum": _EIGHT_BIT,
    },
    "nnx": {
        "Module": "the base class: ours carries the policy",
        "RNNCellBase": "a base class without parameters: ours carries the policy",
        "Object": "another name for Pytree",
        "tabulate": "shows the policy of each module, and what gave it",
        "Pytree": "the base of what holds state: no call, no dtype",
        "Dict": "holds modules and is never called",
        "List": "holds modules and is never called",
        "Rngs": "holds random keys",
        "RngStream": "holds a random key",
        "Optimizer": (
            "runs policy.mixed_precision(...), or any optax transform; takes ScaledGradients"
        ),
        "ModelAndOptimizer": (
            "runs policy.mixed_precision(...), or any optax transform; takes ScaledGradients"
        ),
        "EMA": "averages variables in the dtype that they are stored in: keep those in float32",
        "Metric": "a base class; Flax's metrics sum in float32",
        "MultiMetric": "holds metrics; Flax's metrics sum in float32",
    },
}


def upstream(wing: str) -> types.ModuleType:
    return flax.linen if wing == "linen" else flax.nnx


def stateful_classes(module: types.ModuleType) -> dict[str, type]:
    """The classes that `module` exports and that hold parameters, carry state or reduce."""
    bases = (flax.linen.Module, flax.linen.BatchApply, flax.nnx.Pytree)
    exported = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {
        name: cls
        for name, cls in exported.items()
        if inspect.isclass(cls) and issubclass(cls, bases)
    }


def gaps(wing: str, module: types.ModuleType | None = None) -> list[str]:
    """The classes of Flax's that are neither in the catalogue nor exempt, by name."""
    known = {row.name for row in LAYERS if wing in row.tests} | set(EXEMPT[wing])
    return sorted(set(stateful_classes(upstream(wing) if module is None else module)) - known)


def require_complete(wing: str, module: types.ModuleType | None = None) -> None:
    """Raises a LookupError that names every layer of Flax's that the catalogue lacks."""
    missing = gaps(wing, module)
    if missing:
        raise LookupError(
            f"flax.{wing} exports {', '.join(missing)}, which docs/make_layers.py neither lists in "
            "LAYERS nor exempts "
            f"in EXEMPT['{wing}'] with a reason. Cover it in mpmodules/{wing}, list it with its "
            "test, and run "
            "python docs/make_layers.py."
        )


def page() -> str:
    """The text of docs/layers.md."""
    lines = [
        "# Layers and functions",
        "",
        "Made by `python docs/make_layers.py`; a test holds it against what the installed Flax "
        "exports.",
        "",
        "Every layer keeps its parameters in param_dtype, multiplies in compute_dtype and returns "
        "what the policy "
        "says. The tables say what else runs in reduction_dtype, what Flax does in half precision "
        "without us, and the "
        "test (below `tests/`). Each layer is moreover a row of `mpmodules/table`, which reads the "
        "dtype of every "
        "matmul and every sum, forward and backward, under every policy.",
        "",
    ]
    for title, rows in (("Layers", LAYERS), ("Functions", FUNCTIONS)):
        lines += [
            f"## {title}",
            "",
            "| name | wing | in reduction_dtype | upstream | test |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            tests = "<br>".join(f"`{test}`" for test in dict.fromkeys(row.tests.values()))
            lines.append(
                f"| `{row.name}` | {', '.join(row.tests)} | {row.wide} | {row.upstream} | {tests} |"
            )
        lines.append("")
    lines += ["## Exempt", "", "| name | wing | why |", "|---|---|---|"]
    for wing in WINGS:
        lines += [f"| `{name}` | {wing} | {reason} |" for name, reason in EXEMPT[wing].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    try:
        for each in WINGS:
            require_complete(each)
    except LookupError as error:
        sys.exit(str(error))
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")

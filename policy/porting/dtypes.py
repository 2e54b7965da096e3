"""Names and functions that have to do with dtypes, and the policy in their place."""

from __future__ import annotations

import re

# A place that holds a dtype: its kind ("field", "argument", "local"), its owner and its name.
Slot = tuple[str, str, str]
DATA: Slot = ("data", "", "")  # the dtype of an array
EXTERNAL: Slot = ("external", "", "")  # an attribute of a configuration that is not given

DTYPE_NAME = r"(^|_)([a-z]?dtype|DTYPE)(_(?!policy)|$)"
SCALE_NAME = r"(^|_)dynamic_scale$"
CONFIGS = re.compile(r"(^|_)(cfg|config|conf|hps|hparams|args|flags|model|module|options)$", re.I)


def is_model(name: str) -> bool:
    """Returns whether a variable is named like a model."""
    return name.lower().endswith(("model", "module"))


HALF_FLOATS = {"bfloat16", "float16"}
FLOATS = {"float32", *HALF_FLOATS}
_OTHER = re.compile(r"u?int\d*_?|bool_?|complex\d+|float64|float8\w*|float4\w*|key<\w+>")


def constant(name: str) -> str | None:
    """Returns the dtype's name of ``jax.numpy.float32``, ``numpy.int32``, ``"bfloat16"``, or None.

    Args:
      name: of an import, or a text.
    """
    module, _, last = name.rpartition(".")
    known = not module or module.split(".")[0] in ("jax", "numpy", "ml_dtypes", "tensorflow")
    if name == "jax.numpy.float_":
        return "float32"
    return last if known and (last in FLOATS or _OTHER.fullmatch(last)) else None


# words of names that choose a dtype for one stage, which stay: what a policy does there
_STAGES = {
    "softmax.*": "softmaxes run in float32 under a policy",
    "logits.*": "matmuls add up in float32, and losses run in float32 under a policy",
    "router.*": 'a rule {"router": "float32"} keeps a router in float32',
    "gates?": 'a rule {"gate": "float32"} keeps a gate in float32',
    "loss": "losses run in float32 under a policy",
    "reduce.*": "sums run in float32 under a policy",
    "accum.*": "matmuls add up in float32 under a policy",
    "grads?": "gradients are summed in float32; all_reduce_dtype is the dtype of their exchange",
    "cache.*|kv": "a cache is made in policy.compute_dtype(), or stored by cache_dtype of a policy",
    "mus?|momentum.*": "policy.mixed_precision stores the moments of an optimizer",
    "optimizer.*": "policy.mixed_precision stores the state of an optimizer",
    "quant.*": "a policy's params=int8 stores weights in codes",
    "output.*": "output_dtype of a policy is the dtype of a model's outputs",
    "attend.*": "the logits of a shared embedding run by the embedding's rule",
    "fprop.*": "a cast that is chosen apart",
    "input.*": "inputs are cast to compute_dtype at the model's boundary",
}


def stage(name: str) -> str | None:
    """Returns a policy's rule for a stage that has a dtype of its own, as in `softmax_dtype`."""
    words = name.lower().split("_")
    found = (text for stage, text in _STAGES.items() if any(re.fullmatch(stage, w) for w in words))
    return next(found, None)


# functions of arrays whose dtype is float32 if none is given: the positions of their dtype
CREATORS = {"zeros": 1, "ones": 1, "empty": 1, "identity": 1, "eye": 3}
CREATORS |= {"normal": 2, "uniform": 2, "truncated_normal": 4, "one_hot": 2}
# functions whose dtype needs a float32 in its place: the positions of their dtype
TYPED = {"finfo": 0, "full": 2, "ShapeDtypeStruct": 1, "arange": 3, "linspace": 5, "tile": 9}
CAST_FUNCTIONS = {"asarray": 1, "array": 1, "astype": 1, "convert_element_type": 1}
# keywords without effect on float32 operands
RESULT_OPTIONS = {"preferred_element_type", "promote_dtype"}
TRANSFORMS = r"""(?x)
    partial | isinstance | issubclass | remat | checkpoint | scan | vmap | jit | pmap |
    map_variables | add_metadata_axis | remat_scan | shard_map | grad | value_and_grad |
    custom_vjp | custom_jvp | split_rngs
"""
NORMS = re.compile(r"(Layer|RMS|Group|Batch|Instance|Weight|Spectral)Norm")

# functions of JAX and NumPy that return floating-point numbers for any array
MAKES_FLOATS = r"""(?x)
    mean | var | std | sqrt | rsqrt | exp | log | log1p | expm1 | tanh | sin | cos | einsum | dot |
    matmul | softmax | log_softmax | gelu | silu | swish | sigmoid | softplus | normal | uniform |
    truncated_normal | linspace | power | divide | erf | reciprocal | dot_general |
    conv_general_dilated | dot_product_attention | dot_product_attention_weights | one_hot |
    logsumexp
"""
# functions and methods that return numbers of their operand's dtype
KEEPS_FLOATS = r"""(?x)
    reshape | transpose | swapaxes | moveaxis | squeeze | expand_dims | concatenate | concat |
    stack | split | where | pad | sum | max | min | maximum | minimum | square | abs | clip | roll |
    flip | repeat | tile | broadcast_to | take | take_along_axis | cumsum | add | subtract |
    multiply | relu | astype | ravel | tril | triu | array_split | mT | T | value | at | set |
    rearrange | with_sharding_constraint | with_logical_constraint | asarray | array | copy |
    outer | dynamic_slice | dynamic_update_slice
"""
FLOAT_PARAMETERS = re.compile(
    r"(query|key|value|q|k|v|[qkv]_proj|(\w+_)?logits|probs|kernel|bias|scale|shift|gamma|beta|weights?|w|hidden_states|residual|encoded|"
    r"inputs_(q|kv)|embeddings?|normed\w*|lora_weights|sin|cos)"
)

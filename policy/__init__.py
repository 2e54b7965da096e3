"""Dtype policies for JAX: where numbers are stored, multiplied, summed and returned.

The names of a training script are here, and so are jmp's: ``import policy as jmp`` ports a script.
Others are in `policy.optim`, `policy.grads`, `policy.sharding`, `policy.losses`,
`policy.reductions` and `policy.testing`.
"""

from policy import grads, losses, optim, reductions, sharding, testing
from policy._version import __version__ as __version__
from policy.inspect.audit.audit import audit
from policy.inspect.audit.report import Audit, Finding
from policy.autocasting.transform import autocast
from policy.core.arrays import cast_floating
from policy.inspect.compare.compare import compare
from policy.inspect.compare.comparison import Comparison
from policy.core.scope import (
    compute_dtype,
    current_policy,
    full_precision,
    output_dtype,
    param_dtype,
    reduction_dtype,
    set_policy,
    use_policy,
)
from policy.inspect.estimate.estimate import estimate
from policy.inspect.estimate.report import Estimate
from policy.inspect.estimate.rows import PolicyCost
from policy.inspect.runs.run_log import RunLog
from policy.grads.finiteness import all_finite, select_tree
from policy.grads.loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from policy.grads.loss_scale import ScaledGradients
from policy.grads.value_and_grad import grad, value_and_grad
from policy.core.dtypes import ScaledMatmul, cast_to_full, cast_to_half, half_dtype
from policy.eight_bits.caches import quantize_cache
from policy.optim.master_weights import master_params
from policy.optim.state import MixedPrecisionState, loss_scale_of
from policy.optim.wrapper import MixedPrecision, apply_gradients, mixed_precision
from policy.core.policy import Policy, get_policy
from policy.core.messages import DtypePolicyWarning
from policy.core.rules import PolicyRules
from policy.inspect.monitor.monitor import monitor
from policy.inspect.monitor.snapshot import Snapshot
from policy.quantized.array import QuantizedArray
from policy.quantized.packing import pack_params, unpack_params
from policy.quantized.params import (
    dequantize_params,
    merge_frozen,
    quantize_params,
    split_frozen,
)
from policy.inspect.suggest.suggest import suggest
from policy.inspect.suggest.suggestion import Suggestion

__all__ = [
    "Audit",
    "Comparison",
    "DtypePolicyWarning",
    "DynamicLossScale",
    "Estimate",
    "Finding",
    "LossScale",
    "MixedPrecision",
    "MixedPrecisionState",
    "NoOpLossScale",
    "Policy",
    "PolicyCost",
    "PolicyRules",
    "QuantizedArray",
    "RunLog",
    "ScaledGradients",
    "ScaledMatmul",
    "Snapshot",
    "StaticLossScale",
    "Suggestion",
    "all_finite",
    "apply_gradients",
    "audit",
    "autocast",
    "cast_floating",
    "cast_to_full",
    "cast_to_half",
    "compare",
    "compute_dtype",
    "current_policy",
    "dequantize_params",
    "estimate",
    "full_precision",
    "get_policy",
    "grad",
    "grads",
    "half_dtype",
    "loss_scale_of",
    "losses",
    "master_params",
    "merge_frozen",
    "mixed_precision",
    "monitor",
    "optim",
    "output_dtype",
    "pack_params",
    "param_dtype",
    "quantize_cache",
    "quantize_params",
    "reduction_dtype",
    "reductions",
    "select_tree",
    "set_policy",
    "sharding",
    "split_frozen",
    "suggest",
    "testing",
    "unpack_params",
    "use_policy",
    "value_and_grad",
]


def __dir__() -> list[str]:
    return list(__all__)

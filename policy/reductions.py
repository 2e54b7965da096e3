"""Reductions and fragile functions, computed in reduction_dtype and returned in the input's dtype.

Each function widens its input to reduction_dtype (the policy's in force, otherwise float32; never
narrower than the input), computes there, and rounds once to `dtype`, by default the input's own.
The residuals of a half-precision input are that input and values as small as a sum, but no float32
copy. Everything else is rematerialised (`policy.functions.checkpointing`), and XLA fuses it into
its readers. In float32 and wider each function is JAX's own.
"""

from policy.functions.accumulators import einsum as einsum
from policy.functions.softmaxes import log_sigmoid as log_sigmoid
from policy.functions.softmaxes import log_softmax as log_softmax
from policy.functions.softmaxes import logsumexp as logsumexp
from policy.functions.softmaxes import softmax as softmax
from policy.functions.softmaxes import softplus as softplus
from policy.functions.statistics import cumprod as cumprod
from policy.functions.statistics import cumsum as cumsum
from policy.functions.statistics import global_norm as global_norm
from policy.functions.statistics import mean as mean
from policy.functions.statistics import segment_sum as segment_sum
from policy.functions.statistics import standardize as standardize
from policy.functions.statistics import std as std
from policy.functions.statistics import var as var
from policy.functions.widening import in_reduction_dtype as in_reduction_dtype
from policy.functions.widening import reduction_dtype_of as reduction_dtype_of

__all__ = [
    "cumprod",
    "cumsum",
    "einsum",
    "global_norm",
    "in_reduction_dtype",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "mean",
    "reduction_dtype_of",
    "segment_sum",
    "softmax",
    "softplus",
    "standardize",
    "std",
    "var",
]


def __dir__() -> list[str]:
    return list(__all__)

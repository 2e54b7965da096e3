"""Reductions and fragile functions, computed in reduction_dtype and returned in the input's dtype.

Each function widens its input to reduction_dtype (the policy's in force, otherwise float32; never
narrower than the input), computes there, and rounds once to `dtype`, by default the input's own.
The residuals of a half-precision input are that input and values as small as a sum, but no float32
copy. Everything else is rematerialized (`policy.functions.checkpointing`), and XLA fuses it into
its readers. In float32 and wider each function is JAX's own.
"""

from policy.functions.reductions import *  # noqa: F403
from policy.functions.reductions import __all__ as __all__


def __dir__() -> list[str]:
    return list(__all__)

"""Mixed precision around optax: float32 steps, master weights, loss scales, skipped steps."""

from policy.optim.conversion import convert, init_from_master
from policy.optim.master_weights import master_params, resync
from policy.optim.shardings import state_shardings
from policy.optim.state import MixedPrecisionState, finite_of, loss_scale_of
from policy.optim.update import apply_gradients
from policy.optim.update_dtypes import match_updates
from policy.optim.wrapper import MixedPrecision, mixed_precision

__all__ = [
    "MixedPrecision",
    "MixedPrecisionState",
    "apply_gradients",
    "convert",
    "finite_of",
    "init_from_master",
    "loss_scale_of",
    "master_params",
    "match_updates",
    "mixed_precision",
    "resync",
    "state_shardings",
]


def __dir__() -> list[str]:
    return list(__all__)

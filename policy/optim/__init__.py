"""Mixed precision around optax: the states of `policy.mixed_precision`, beside its steps.

`mixed_precision`, `apply_gradients`, `master_params`, `loss_scale_of` and the types of a transform
and its state are names of `policy` itself; importing them from here works too.
"""

from policy.optim.master_weights import convert, init_from_master, resync
from policy.optim.master_weights import master_params as master_params
from policy.optim.state import MixedPrecisionState as MixedPrecisionState
from policy.optim.state import finite_of, state_shardings
from policy.optim.state import loss_scale_of as loss_scale_of
from policy.optim.wrapper import MixedPrecision as MixedPrecision
from policy.optim.wrapper import apply_gradients as apply_gradients
from policy.optim.wrapper import match_updates
from policy.optim.wrapper import mixed_precision as mixed_precision

__all__ = ["convert", "finite_of", "init_from_master", "match_updates", "resync", "state_shardings"]


def __dir__() -> list[str]:
    return list(__all__)

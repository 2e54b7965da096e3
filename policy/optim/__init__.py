"""The optax side: float32 steps, master weights, skipped steps."""

from policy.optim.apply import apply_gradients as apply_gradients
from policy.optim.apply import init_from_master as init_from_master
from policy.optim.convert import convert as convert
from policy.optim.masters import master_params as master_params
from policy.optim.masters import resync as resync
from policy.optim.match import match_updates as match_updates
from policy.optim.shardings import state_shardings as state_shardings
from policy.optim.state import MixedPrecisionState as MixedPrecisionState
from policy.optim.state import finite_of as finite_of
from policy.optim.state import loss_scale_of as loss_scale_of
from policy.optim.wrapper import MixedPrecision as MixedPrecision
from policy.optim.wrapper import mixed_precision as mixed_precision

"""Mixed precision around optax: the types of `policy.mixed_precision`, and what few loops need."""

from policy.optim.master_weights import convert as convert
from policy.optim.master_weights import resync as resync
from policy.optim.state import MixedPrecisionState as MixedPrecisionState
from policy.optim.wrapper import MixedPrecision as MixedPrecision
from policy.optim.wrapper import match_updates as match_updates

__all__ = ["MixedPrecision", "MixedPrecisionState", "convert", "match_updates", "resync"]


def __dir__() -> list[str]:
    return list(__all__)

"""Dtype policies for JAX: where numbers are stored, multiplied, summed and returned.

The names of a training script are here, and so are jmp's: ``import policy as jmp`` ports a script.
Others are in `policy.losses`, `policy.optim`, `policy.quantized`, `policy.reductions`,
`policy.sharding` and `policy.testing`; the classes of reports are in `policy.inspect`.

Each name is imported when it is first used, so that a program loads the tools that it calls alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

from policy._version import __version__ as __version__

if TYPE_CHECKING:
    from policy import losses as losses
    from policy import optim as optim
    from policy import quantized as quantized
    from policy import reductions as reductions
    from policy import sharding as sharding
    from policy import testing as testing
    from policy.autocasting.transform import autocast as autocast
    from policy.core.arrays import cast_floating as cast_floating
    from policy.core.dtypes import cast_to_full as cast_to_full
    from policy.core.dtypes import cast_to_half as cast_to_half
    from policy.core.dtypes import half_dtype as half_dtype
    from policy.core.messages import DtypePolicyWarning as DtypePolicyWarning
    from policy.core.policy import Policy as Policy
    from policy.core.policy import get_policy as get_policy
    from policy.core.rules import PolicyRules as PolicyRules
    from policy.core.scope import compute_dtype as compute_dtype
    from policy.core.scope import current_policy as current_policy
    from policy.core.scope import full_precision as full_precision
    from policy.core.scope import output_dtype as output_dtype
    from policy.core.scope import param_dtype as param_dtype
    from policy.core.scope import reduction_dtype as reduction_dtype
    from policy.core.scope import set_policy as set_policy
    from policy.core.scope import use_policy as use_policy
    from policy.grads.finiteness import all_finite as all_finite
    from policy.grads.finiteness import select_tree as select_tree
    from policy.grads.loss_scale import DynamicLossScale as DynamicLossScale
    from policy.grads.loss_scale import LossScale as LossScale
    from policy.grads.loss_scale import NoOpLossScale as NoOpLossScale
    from policy.grads.loss_scale import StaticLossScale as StaticLossScale
    from policy.grads.microbatching import accumulate_gradients as accumulate_gradients
    from policy.grads.microbatching import split_batch as split_batch
    from policy.grads.value_and_grad import grad as grad
    from policy.grads.value_and_grad import value_and_grad as value_and_grad
    from policy.inspect.audit.audit import audit as audit
    from policy.inspect.compare.compare import compare as compare
    from policy.inspect.estimate.estimate import estimate as estimate
    from policy.inspect.monitor.monitor import monitor as monitor
    from policy.inspect.suggest.suggest import suggest as suggest
    from policy.optim.master_weights import init_from_master as init_from_master
    from policy.optim.master_weights import master_params as master_params
    from policy.optim.state import finite_of as finite_of
    from policy.optim.state import loss_scale_of as loss_scale_of
    from policy.optim.state import state_shardings as state_shardings
    from policy.optim.wrapper import apply_gradients as apply_gradients
    from policy.optim.wrapper import mixed_precision as mixed_precision

# The modules that define the public names.
_MODULES = {
    # Policies, rules and scopes
    "DtypePolicyWarning": "policy.core.messages",
    "Policy": "policy.core.policy",
    "PolicyRules": "policy.core.rules",
    "current_policy": "policy.core.scope",
    "full_precision": "policy.core.scope",
    "get_policy": "policy.core.policy",
    "set_policy": "policy.core.scope",
    "use_policy": "policy.core.scope",
    # Dtypes and casts
    "cast_floating": "policy.core.arrays",
    "cast_to_full": "policy.core.dtypes",
    "cast_to_half": "policy.core.dtypes",
    "compute_dtype": "policy.core.scope",
    "half_dtype": "policy.core.dtypes",
    "output_dtype": "policy.core.scope",
    "param_dtype": "policy.core.scope",
    "reduction_dtype": "policy.core.scope",
    # Functions and their gradients
    "accumulate_gradients": "policy.grads.microbatching",
    "all_finite": "policy.grads.finiteness",
    "autocast": "policy.autocasting.transform",
    "grad": "policy.grads.value_and_grad",
    "select_tree": "policy.grads.finiteness",
    "split_batch": "policy.grads.microbatching",
    "value_and_grad": "policy.grads.value_and_grad",
    # Loss scales
    "DynamicLossScale": "policy.grads.loss_scale",
    "LossScale": "policy.grads.loss_scale",
    "NoOpLossScale": "policy.grads.loss_scale",
    "StaticLossScale": "policy.grads.loss_scale",
    # The optimizer
    "apply_gradients": "policy.optim.wrapper",
    "finite_of": "policy.optim.state",
    "init_from_master": "policy.optim.master_weights",
    "loss_scale_of": "policy.optim.state",
    "master_params": "policy.optim.master_weights",
    "mixed_precision": "policy.optim.wrapper",
    "state_shardings": "policy.optim.state",
    # Tools
    "audit": "policy.inspect.audit.audit",
    "compare": "policy.inspect.compare.compare",
    "estimate": "policy.inspect.estimate.estimate",
    "monitor": "policy.inspect.monitor.monitor",
    "suggest": "policy.inspect.suggest.suggest",
}
_NAMESPACES = ("losses", "optim", "quantized", "reductions", "sharding", "testing")

__all__ = [*_MODULES, *_NAMESPACES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES or name == "inspect":  # classes of results, which are no public names
        return importlib.import_module(f"policy.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'policy' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

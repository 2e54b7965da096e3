"""Dtype policies for JAX: where numbers are stored, multiplied, summed and returned."""

from policy.casting import cast_floating as cast_floating
from policy.casting import cast_to_full as cast_to_full
from policy.casting import cast_to_half as cast_to_half
from policy.policy import Policy as Policy
from policy.policy import dtype_to_names as dtype_to_names
from policy.policy import get_policy as get_policy
from policy.policy import half_dtype as half_dtype
from policy.precedence import DtypePolicyWarning as DtypePolicyWarning
from policy.rules import PolicyRules as PolicyRules
from policy.scope import current_policy as current_policy
from policy.scope import set_policy as set_policy
from policy.scope import use_policy as use_policy

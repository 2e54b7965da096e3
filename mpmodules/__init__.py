"""Flax modules with explicit dtype policies. The layers are in `mpmodules.linen` and `mpmodules.nnx`."""

# First, before another file of the name `policy` is run in place of ours.
from mpmodules import _shadowed as _shadowed

# isort: split
from policy import Policy as Policy
from policy import PolicyRules as PolicyRules
from policy import autocast as autocast
from policy import current_policy as current_policy
from policy import full_precision as full_precision
from policy import get_policy as get_policy
from policy import set_policy as set_policy
from policy import use_policy as use_policy

# Imported for what they register: what modules are called, how states are saved, and how nnx modules go in and out of
# autocast.
from mpmodules import _module_names as _module_names
from mpmodules import _serialization as _serialization
from mpmodules.nnx import _tracing as _tracing

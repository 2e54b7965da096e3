"""Flax modules with explicit dtype policies, in `mpmodules.linen` and `mpmodules.nnx`."""

# ruff: noqa: E402  (our `policy` is looked for before it is imported)

from mpmodules.shadowed import require_own_policy

require_own_policy()  # before another file of the name `policy` is run in place of ours

# isort: split
from policy import Policy as Policy
from policy import PolicyRules as PolicyRules
from policy import autocast as autocast
from policy import current_policy as current_policy
from policy import full_precision as full_precision
from policy import get_policy as get_policy
from policy import set_policy as set_policy
from policy import use_policy as use_policy
from policy._version import __version__ as __version__

# isort: split
from mpmodules.registration import register

register()
del register, require_own_policy

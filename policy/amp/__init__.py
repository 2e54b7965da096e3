"""Mixed precision for functions as they are: `autocast` and `full_precision`."""

from policy.amp.autocast import autocast as autocast
from policy.amp.autocast import full_precision as full_precision

"""Mixed precision for functions as they are: `autocast` and `full_precision`."""

from policy.amp.transformation import autocast as autocast
from policy.amp.transformation import full_precision as full_precision

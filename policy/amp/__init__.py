"""Mixed precision for functions as they are: `autocast`."""

from policy.amp.transformation import autocast as autocast

"""The layers of linen under a policy."""

"""The layers of nnx under a policy."""

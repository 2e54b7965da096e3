"""Names that this library puts on JAX's name stack, to tell its own casts and marks."""

BOUNDARY = "policy_boundary"
"""The scope of the casts where a call crosses from one policy to another."""

ISLAND = "policy_full_precision"
"""The scope that `policy.full_precision` keeps in float32."""

AUTOCAST = "policy_autocast"
"""The scope of the casts that autocast puts in."""

REGION = "policy_region_"
"""The prefix of the marks of `policy.autocast.marks`, and of reads of parameters."""

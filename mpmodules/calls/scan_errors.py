"""The way out of JAX's error for a scan whose carry changes its dtype."""

from __future__ import annotations

_ADVICE = (
    "If a module inside has a policy of its own, it casts its outputs, and may so change a carry's "
    "dtype. For float32 inside one layer only, use the policy 'f32_inside', which returns the "
    "dtype that the surrounding code computes in. If such a module is the body of a scan, give it "
    "its caller's policy, lift its class (nn.scan(Block) in linen) instead of a function, or cast "
    "the carry to its output_dtype before the scan."
)


def explain_scan(error: TypeError) -> None:
    """Adds to the error of a module's call the way out, once, if it is JAX's for such a scan."""
    told = _ADVICE in getattr(error, "__notes__", ())
    if "scan body" in str(error) and "dtypes do not match" in str(error) and not told:
        error.add_note(_ADVICE)

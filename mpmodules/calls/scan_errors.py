"""Notes on JAX's errors for scans whose carries change their dtypes, with the boundaries that
change them.
"""

from __future__ import annotations

from collections.abc import Mapping

from policy.core.precedence import Effective

_ADVICE = "Modules inside have a policy of their own and cast their outputs"


def explain_scan(
    error: TypeError, crossed: Mapping[str, Effective], at: str | None = None, *, lifting: str = ""
) -> None:
    """Adds, to JAX's error for a scan whose carry changes its dtype, the boundaries inside that
    change dtypes.

    Args:
      error: the error of a call.
      crossed: the boundaries crossed, by path or class.
      at: the path of the boundary whose call this is: those below it are named. None names all.
      lifting: for the message, another remedy that the wing has.
    """
    below = f"{at}/" if at else ""
    inside = {
        name: effective
        for name, effective in crossed.items()
        if name != at and name.startswith(below)
    }
    explained = any(note.startswith(_ADVICE) for note in getattr(error, "__notes__", ()))
    if inside and "carry" in str(error) and not explained:
        listed = ", ".join(f"'{name}' ({_described(inside[name])})" for name in sorted(inside))
        error.add_note(
            f"{_ADVICE}: {listed}. For float32 inside one layer only, use the policy "
            "'f32_inside', which returns the dtype that the surrounding code computes in. If "
            f"such a module is the body of a scan, give it its caller's policy, {lifting}or "
            "cast the carry to its output_dtype before the scan."
        )


def _described(effective: Effective) -> str:
    policy, source = effective.policy, effective.source
    returned = "its outputs uncast" if policy is None else policy.output_dtype.name
    by = f" by {source.kind} {source.detail}".rstrip() if source.own else ""
    return f"returns {returned}{by}"

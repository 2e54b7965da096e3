"""Layers of Flax's that run where a policy is in force which they don't obey, found in the programs
that JAX traces there. A program that is cached costs nothing and is told once.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import flax
import jax
import jax.extend.core as jex_core

import policy as policy_package
from policy.core.messages import warn_once
from policy.core.scope import current_scope, is_lost_in_own_code
from policy.programs.jaxprs import programs_of
from policy.programs.marks import NO_POLICY

_LAYERS = ("linear.py", "attention.py", "recurrent.py", "normalization.py")
_UNNAMED = ("<unnamed function>", "<unknown>")
_MPMODULES, _POLICY, _, _FLAX = LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(path))) + os.sep
    for path in (os.path.dirname(__file__), policy_package.__file__, jax.__file__, flax.__file__)
)
"""The folders of the code that is no user's, ours first."""
# Where code runs that obeys a policy: calls of modules of ours and of ports, and autocast.
_OBEYING = (
    _MPMODULES,
    os.path.join(_POLICY, "autocasting", ""),
    os.path.join(_POLICY, "programs", "tracing", ""),
)


def after_event(event: str, duration_secs: float, **facts: Any) -> None:
    """Listens to JAX's events: warns of layers of Flax's in a program that JAX has just traced,
    unless they run inside a module of ours, a port or an autocast.

    A model of Flax's that has layers of ours, too, is told where these are called or built.
    """
    if not event.endswith("/jaxpr_trace_duration"):
        return
    around = [frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1))]
    if any(_writer(code.co_filename) == "ours" for code in around) or not is_lost_in_own_code():
        return
    plain: dict[Any, str] = {}  # by the code that calls the layer
    obeying: set[Any] = set()
    for body in _last_traced(facts.get("fun_name", "")):
        _note(body, around, plain, obeying)
    names = sorted({name for caller, name in plain.items() if caller not in obeying})
    if names:
        api = names[0].split(".")[1]
        warn_once(
            f"{', '.join(names)} ran where '{current_scope().policy}' is in force, and obeys no "
            f"policy: import {api} from mpmodules in its place, or call "
            f"mpmodules.{api}.apply_policy on the model, or policy.autocast on the function. If no "
            "policy is intended for it, call it inside use_policy(None)."
        )


def _last_traced(function: str) -> list[Any]:
    """Returns the newest program, if it is of a function of that name: the garbage collector lists
    the objects of a generation by their age.
    """
    for generation in (0, 1):
        young: list[Any] = [x for x in gc.get_objects(generation) if type(x) is jex_core.Jaxpr]
        if young:
            names = {young[-1].debug_info.func_name, function}
            return young[-1:] if len(names - set(_UNNAMED)) < 2 else []
    return []


def _note(body: Any, around: Sequence[Any], plain: dict[Any, str], obeying: set[Any]) -> None:
    """Notes the layers of Flax's of a program that `around` runs, and who calls layers of ours."""
    for equation in body.eqns:
        if NO_POLICY in str(equation.source_info.name_stack):
            continue
        frames = equation.source_info.traceback
        codes = [*(() if frames is None else frames.raw_frames()[0]), *around]
        writers = [_writer(code.co_filename) for code in codes]
        ours = [i for i, writer in enumerate(writers) if writer == "ours"]
        users = [i for i, writer in enumerate(writers) if writer == "user"]
        caller = next((codes[i] for i in users if not ours or i > ours[-1]), None)
        if ours:
            obeying.add(caller)
            continue
        inside = zip(codes[: users[0] if users else None], writers, strict=False)
        layers = [code for code, writer in inside if writer == "layers" and "." in code.co_qualname]
        if layers and layers[-1].co_name != "__init__":
            api = "linen" if f"{os.sep}linen{os.sep}" in layers[-1].co_filename else "nnx"
            plain[caller] = f"flax.{api}.{layers[-1].co_qualname.split('.')[0]}"
        for program in programs_of(equation):
            _note(program, codes, plain, obeying)


@functools.cache
def _writer(file: str) -> str:
    """Returns whose code a file holds: "ours" where it obeys the policy, that of Flax's "layers",
    another "library"'s, or a "user"'s.
    """
    if not file.startswith(LIBRARIES):
        return "user"
    if file.startswith(_OBEYING) and not file.endswith("_training.py"):
        return "ours"
    return "layers" if file.startswith(_FLAX) and os.path.basename(file) in _LAYERS else "library"

"""Layers of Flax's that run where a policy is in force which they don't obey, found in the programs
that JAX traces there. A program that is cached costs nothing and is told once.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core

from policy.autocasting.source_lines import class_of, frames, is_file_of_flax, is_library
from policy.core.messages import warn_once
from policy.core.scope import current_scope
from policy.programs import marks
from policy.programs.jaxprs import OpenJaxpr, equations_of, programs_of

_LAYERS = ("linear.py", "attention.py", "recurrent.py", "normalization.py")
_UNNAMED = ("<unnamed function>", "<unknown>")
_MPMODULES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Where code runs that obeys a policy: calls of modules of ours and of ports, and autocast.
_OBEYING = tuple(
    os.sep.join(("", *path, ""))
    for path in (("policy", "autocasting"), ("policy", "programs", "tracing"))
)


def tell_plain_layers(function: str) -> None:
    """Warns of layers of Flax's in the program that JAX has just traced, of a function by its name,
    unless they run inside a module of ours, a port or an autocast.

    A model of Flax's that has layers of ours, too, is told where these are called or built.
    """
    plain: dict[Any, str] = {}  # by the code that calls the layer
    obeying: set[Any] = set()
    for body in _last_traced(function):
        _note(body, _codes_under_way(), plain, obeying)
    names = sorted({name for caller, name in plain.items() if caller not in obeying})
    if names:
        api = names[0].split(".")[1]
        warn_once(
            f"{', '.join(names)} ran where '{current_scope().policy}' is in force, and obeys no "
            f"policy: import {api} from mpmodules in its place, or call "
            f"mpmodules.{api}.apply_policy on the model, or policy.autocast on the function. If no "
            "policy is intended for it, call it inside use_policy(None)."
        )


def _last_traced(function: str) -> list[OpenJaxpr]:
    """Returns the newest program, if it is of a function of that name: the garbage collector lists
    the objects of a generation by their age.
    """
    for generation in (0, 1):
        young: list[Any] = [x for x in gc.get_objects(generation) if type(x) is jex_core.Jaxpr]
        if young:
            names = {young[-1].debug_info.func_name, function}
            return young[-1:] if len(names - set(_UNNAMED)) < 2 else []
    return []


def _codes_under_way() -> list[Any]:
    """Returns the code of JAX's call of the listener, and of the frames around it."""
    codes, frame = [], sys._getframe()
    while frame := frame.f_back:
        codes.append(frame.f_code)
    return list(itertools.dropwhile(lambda code: _is_obeying(code.co_filename), codes))


def _note(body: OpenJaxpr, around: Sequence[Any], plain: dict[Any, str], obeying: set[Any]) -> None:
    """Notes the layers of Flax's of a program that `around` runs, and who calls layers of ours."""
    for equation in equations_of(body):
        if marks.NO_POLICY in str(equation.source_info.name_stack):
            continue
        codes = [*frames(equation)[0], *around]
        ours = [i for i, code in enumerate(codes) if _is_obeying(code.co_filename)]
        caller = next((code for code in codes[ours[-1] if ours else 0 :] if _is_users(code)), None)
        if ours:
            obeying.add(caller)
            continue
        if name := _plain_layer(codes):
            plain[caller] = name
        for program in programs_of(equation):
            _note(program, codes, plain, obeying)


def _is_users(code: Any) -> bool:
    return not is_library(code.co_filename)


@functools.cache
def _is_obeying(file: str) -> bool:
    is_ours = file.startswith(_MPMODULES) and not file.endswith("_training.py")
    return is_ours or any(part in file for part in _OBEYING)


def _plain_layer(codes: Sequence[Any]) -> str:
    """Returns the name of the layer of Flax's that an equation is part of a call of, or ""."""
    of_library = itertools.takewhile(lambda code: not _is_users(code), codes)
    layers = [code for code in of_library if _is_layers(code.co_filename)]
    if not layers or layers[-1].co_name == "__init__":
        return ""
    api = "linen" if f"{os.sep}linen{os.sep}" in layers[-1].co_filename else "nnx"
    return f"flax.{api}.{class_of(layers[-1])}"


@functools.cache
def _is_layers(file: str) -> bool:
    return is_file_of_flax(file) and os.path.basename(file) in _LAYERS

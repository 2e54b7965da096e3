"""Module names that are no identifiers, noted where a call is traced: reports and rules of `policy` tell them apart."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import flax.linen as flax_nn

from policy.names import NOTING, note


def _note_module(next_fun: Any, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
    if context.module.name is not None:
        note(context.module.name)
    return next_fun(*args, **kwargs)


def noting_modules() -> AbstractContextManager[None]:
    """Notes the names of the linen modules that are called in a block."""
    return flax_nn.intercept_methods(_note_module)


NOTING.append(noting_modules)

"""Classes of linen modules with one method, from a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpmodules import linen


def compact(body: Callable[..., Any], nn: Any = linen) -> Any:
    """Returns a class of `nn` whose compact `__call__` is `body`."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, *args):
            return body(*args)

    return Model

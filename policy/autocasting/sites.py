"""Sites of NumPyro models, which a compiled call would hide from inference."""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any


def rejecting_sites(name: str) -> AbstractContextManager[Any]:
    """Rejects NumPyro's sites in a block, where an inference or another handler wants them.

    A call that is traced once reaches the handlers once: guides would then be fitted to nothing.

    Args:
      name: of the traced function, for the message.

    Raises:
      TypeError: in the block, `numpyro.sample` or another primitive was called.
    """
    numpyro: Any = sys.modules.get("numpyro.primitives")
    # NumPyro has no public way to ask whether a handler is open; where this list is gone, nothing
    # is rejected.
    if numpyro is None or not getattr(numpyro, "_PYRO_STACK", ()):
        return contextlib.nullcontext()

    class Rejection(numpyro.Messenger):
        def process_message(self, msg: dict[str, Any]) -> None:
            raise TypeError(
                f"autocast compiles {name}, so inference would see its NumPyro site "
                f"{msg.get('name')!r} in the first call alone. Apply autocast to the function of "
                "arrays that computes between the sites, such as the network."
            )

    return Rejection()

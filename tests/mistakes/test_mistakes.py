"""The tables of mistakes: none is silent, and each message names the argument, the value and the
way out.

A table's rows are grouped by the exception or the warning that a mistake gives. A row has the
mistake in a few words, a function that makes it, and texts that the message holds.
"""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest

from tests.mistakes import layers, policies, programs, training

TABLES = {
    "policies": policies.MISTAKES,
    "linen": layers.LINEN,
    "nnx": layers.NNX,
    "gradients": training.GRADIENTS,
    "scaled gradients": training.SCALED,
    "order": training.ORDERS,
    "step": training.STEPS,
    "wrapper": training.WRAPPER,
    "devices": training.DEVICES,
    "autocast": programs.AUTOCAST,
    "inspection": programs.INSPECTION,
    "losses": programs.LOSSES,
    "command": programs.COMMANDS,
}
ROWS = [
    pytest.param(kind, make, names, id=f"{topic}: {what}")
    for topic, table in TABLES.items()
    for kind, rows in table.items()
    for what, (make, *names) in rows.items()
]


def told(kind: type[BaseException], make: Any) -> str:
    """Makes a mistake; returns what is said, in warnings or in the error of this kind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if issubclass(kind, Warning):
            make()
            gc.collect()
        else:
            with pytest.raises(kind) as error:
                make()
            return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    return "\n".join(
        str(warning.message) for warning in caught if issubclass(warning.category, kind)
    )


@pytest.mark.parametrize(("kind", "make", "names"), ROWS)
def test_a_mistake_is_told_with_what_it_takes_to_mend_it(kind, make, names):
    message = told(kind, make)
    missing = [name for name in names if name not in message]
    assert names and all(names) and not missing, message or "nothing was said"

"""The tables of mistakes: none is silent, and each message names the argument, the value and the
way out.

A table's rows are grouped by the exception or the warning that a mistake gives. A row has the
parts of the message, with … between them, and a function that makes the mistake, or several.
"""

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
    "monitor": training.MONITORS,
    "autocast": programs.AUTOCAST,
    "inspection": programs.INSPECTION,
    "losses": programs.LOSSES,
}
ROWS = [
    pytest.param(kind, make, parts.split(" … "), id=f"{topic}: {parts}")
    for topic, table in TABLES.items()
    for kind, rows in table.items()
    for parts, makes in rows.items()
    for make in (makes if isinstance(makes, list) else [makes])
]


def told(kind: type[BaseException], make: Any) -> str:
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


@pytest.mark.cases(fast=1, slow=35)
@pytest.mark.parametrize(("kind", "make", "parts"), ROWS)
def test_a_mistake_is_told_with_what_it_takes_to_mend_it(kind, make, parts):
    message = told(kind, make)
    missing = [part for part in parts if part not in message]
    assert all(parts) and not missing, message or "nothing was said"

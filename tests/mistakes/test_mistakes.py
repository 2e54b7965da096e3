"""The table of mistakes: none is silent, and each message names the argument, the value and the way
out.
"""

from __future__ import annotations

import gc
import warnings

import pytest

from tests.mistakes import layers, policies, programs, training
from tests.mistakes.table import Mistake

TABLE = {
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
ROWS = {f"{topic}: {row.what}": row for topic, rows in TABLE.items() for row in rows}


def told(row: Mistake) -> str:
    """Makes a mistake; returns what is said, in warnings or in the error of the row's type."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if issubclass(row.told, Warning):
            row.make()
        else:
            with pytest.raises(row.told) as error:
                row.make()
            return "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
        gc.collect()
    return "\n".join(
        str(warning.message) for warning in caught if issubclass(warning.category, row.told)
    )


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_mistake_is_told_with_what_it_takes_to_mend_it(row):
    message = told(row)
    missing = [name for name in row.names if name not in message]
    assert not missing, message or "nothing was said"


def test_the_table_names_each_mistake_once():
    assert len(ROWS) == sum(map(len, TABLE.values())) >= 46
    assert all(row.names and all(row.names) for row in ROWS.values())

"""The chips that programs are compiled for in these tables."""

from __future__ import annotations

from collections.abc import Sequence

from policy.inspect.estimate.targets import Target

CHIPS = ("v5e", "v5p", "v6e", "tpu7x", "h100", "a100", "b200")


def chosen(on: Sequence[str], default: Sequence[str], others: Sequence[str] = ()) -> list[Target]:
    """Returns the targets of a table: its default ones, or those that `on` names.

    Args:
      on: chips, as in ``v5e``, each of which is the topology of that chip among `default` and
        `others`; or targets.

    Raises:
      ValueError: a chip that there is not.
    """
    known = {name.split(":")[0]: name for name in (*default, *others)}
    return [Target(known.get(name, name)) for name in on or default]

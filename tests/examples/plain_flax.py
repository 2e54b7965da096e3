"""Examples with Flax's own layers in place of ours: of their text, the import line changes."""

import functools
import types

from tests.eight_devices import ROOT
from tests.porting import recipe


@functools.cache
def in_plain_flax(example: str) -> types.ModuleType:
    """Returns an example as a module that imports Flax's layers."""
    text = (ROOT / f"examples/{example}.py").read_text()
    for theirs, ours in recipe.IMPORTS:
        text = text.replace(ours, theirs)
    return recipe.load(text, f"{example}_in_plain_flax")

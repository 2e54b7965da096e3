"""Applies the recipe of docs/porting.md, line by line, to models in the style of Flax's examples.

The models `before_NAME.py` are Flax's own, their dtypes threaded by hand as upstream threads them.
What a port does is marked in them: a line that ends in ``# goes`` is deleted, one that begins with
``# +`` is written; and the import line changes.
"""

import re
import sys
import types
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("imagenet", "lm1b", "wmt", "gemma")
IMPORTS = (
    ("from flax import linen as nn\n", "from mpmodules import linen as nn\n"),
    ("from flax import nnx\n", "from mpmodules import nnx\n"),
)

SHARED = re.compile(r"^from tests\.porting\.before_transformer import \([^)]*\)\n", re.MULTILINE)
GOES = re.compile(r"  # goes$")
WRITTEN = re.compile(r"^( *)# \+ ?(.*)$")
STAYS = re.compile(r"  # stays$")
# What no line may speak of after a port, but for those that say that they stay.
DTYPES = re.compile(
    r"dtype\b(?!_policy)|astype\((?!.int32)|float32|bfloat16|float16|half_precision|platform|dynamic_scale"
)


def before(name: str) -> str:
    """The text of a model as it was, with what it shares with another in the import's place."""
    shared = (HERE / "before_transformer.py").read_text().partition("annotations\n")[2]
    return SHARED.sub(lambda _: shared, (HERE / f"before_{name}.py").read_text())


def without_marks(text: str) -> str:
    """The text as its author would have it, without the lines to write and without marks."""
    kept = [line for line in text.splitlines() if not WRITTEN.match(line)]
    return "\n".join(STAYS.sub("", GOES.sub("", line)) for line in kept) + "\n"


def ported(text: str) -> str:
    """The text after the port. Its lines that stay keep their mark."""
    for old, new in IMPORTS:
        text = text.replace(old, new)
    kept = [line for line in text.splitlines() if not GOES.search(line)]
    return "\n".join(WRITTEN.sub(r"\1\2", line).rstrip() for line in kept) + "\n"


def lines_that_go(text: str) -> list[str]:
    return [GOES.sub("", line).strip() for line in text.splitlines() if GOES.search(line)]


def lines_written(text: str) -> list[str]:
    found = (WRITTEN.match(line) for line in text.splitlines())
    return [match[2].strip() for match in found if match]


def lines_that_stay(text: str) -> list[str]:
    return [STAYS.sub("", line).strip() for line in ported(text).splitlines() if STAYS.search(line)]


def lines_left_over(text: str) -> list[str]:
    """Lines of the ported text that speak of dtypes and do not say that they stay."""
    code = re.sub(r'^(""".*?""")$', "", ported(text), count=1, flags=re.DOTALL | re.MULTILINE)
    speaking = [line for line in code.splitlines() if DTYPES.search(line)]
    return [line.strip() for line in speaking if not STAYS.search(line)]


def load(text: str, name: str) -> types.ModuleType:
    """Runs a text as a module in `sys.modules`, where dataclasses look their annotations up."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module

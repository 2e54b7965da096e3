"""Models in the style of Flax's examples, as texts: their dtypes passed along by hand."""

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


def before(name: str) -> str:
    """Returns the text of a model, with what it shares with another in the place of the import."""
    shared = (HERE / "before_transformer.py").read_text().partition("annotations\n")[2]
    return SHARED.sub(lambda _: shared, (HERE / f"before_{name}.py").read_text())


def load(text: str, name: str) -> types.ModuleType:
    """Runs a text as a module in `sys.modules`, where dataclasses look their annotations up."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module

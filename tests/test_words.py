"""Docstrings read as in JAX and Optax: few riddles around "what", and verbs or nouns first."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.eight_devices import ROOT

FILES = [path for name in ("policy", "mpmodules") for path in ROOT.glob(f"{name}/**/*.py")]
PACKAGES = sorted({path.parent.relative_to(ROOT).as_posix() for path in FILES})
MOST_PER_THOUSAND = 3
MOST_OPENERS = 0.05

WHAT = re.compile(r"\b(what|whatever|that which)\b", re.IGNORECASE)
OPENERS = re.compile(r"\W*(what|whether|where|how|whatever)\b", re.IGNORECASE)


def docstrings(package: str) -> Iterator[tuple[str, str]]:
    """Yields the place and text of every docstring of a package, without its subpackages."""
    for path in sorted((ROOT / package).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text:
                    yield f"{path.name}:{getattr(node, 'name', 'module')}", text


@pytest.mark.cases(fast=1, slow=20)
@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_seldom_say_what_and_open_with_a_verb_or_a_noun(package):
    found = list(docstrings(package))
    words = sum(len(text.split()) for _, text in found)
    told = {place: count for place, text in found if (count := len(WHAT.findall(text)))}
    assert sum(told.values()) <= max(MOST_PER_THOUSAND * words / 1000, 1), told
    opened = [place for place, text in found if OPENERS.match(text)]
    assert len(opened) <= MOST_OPENERS * len(found), opened

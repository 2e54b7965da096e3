"""What tests of several examples need."""

import functools
import types
from typing import Any

import jax
import pytest

from tests.eight_devices import ROOT
from tests.porting import sources


@functools.cache
def in_plain_flax(example: str) -> types.ModuleType:
    """Returns an example as a module that imports Flax's layers: its import line is another."""
    text = (ROOT / f"examples/{example}.py").read_text()
    for theirs, ours in sources.IMPORTS:
        text = text.replace(ours, theirs)
    return sources.load(text, f"{example}_in_plain_flax")


def assert_rejected(example: types.ModuleType, arguments: list[str], message: str) -> None:
    """Asserts that an example ends with one line, which begins with a text."""
    with pytest.raises(SystemExit) as stopped:
        example.main(arguments)
    assert str(stopped.value).startswith(f"{example.__name__}: {message}")
    assert "\n" not in str(stopped.value)


def assert_reported(capsys: Any, plot: Any, *texts: str) -> None:
    """Asserts that an example printed these texts, ended its progress bar, and drew its plot."""
    printed = capsys.readouterr()
    assert [text for text in texts if text not in printed.out] == []
    assert "100%" in printed.err and plot.read_bytes().startswith(b"\x89PNG")


def few_digits(data: Any) -> Any:
    """Returns the first images of a data set of digits."""
    train, test = slice(128), slice(32)
    images, labels = data.train_images[train], data.train_labels[train]
    return type(data)(images, labels, data.test_images[test], data.test_labels[test])


def shapes_of(tree: Any) -> Any:
    """Returns a tree of shapes and dtypes."""
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

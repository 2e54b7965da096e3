"""Texts of compiled programs, as compilers print them, cut down."""

from pathlib import Path

FOLDER = Path(__file__).parent


def text_of(name: str) -> str:
    """Returns the text of a program in `programs`."""
    return (FOLDER / "programs" / f"{name}.txt").read_text()

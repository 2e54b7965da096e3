"""The pictures of the docs: each is shown with a text, is small, and is drawn by a script."""

import re

import pytest

from tests.eight_devices import ROOT
from tests.scripts import docs_script

IMAGE = re.compile(r"!\[(.*?)\]\((?!https?:)([^)\s]+)\)", re.DOTALL)
SHOWN = {
    (page.parent / name).resolve(): text
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    for text, name in IMAGE.findall(page.read_text("utf-8"))
}


@pytest.fixture(scope="module")
def made():
    """docs/make_pictures.py, which imports docs/make_audit_page.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield docs_script("make_pictures")


@pytest.mark.parametrize("picture", SHOWN, ids=lambda picture: picture.name)
def test_a_picture_is_there_and_small_and_its_text_says_what_it_shows(picture):
    assert picture.is_file()
    assert picture.stat().st_size < 150_000
    assert len(SHOWN[picture].split()) >= 6


def test_every_drawn_picture_is_shown(made):
    assert {file.name for file in SHOWN} >= set(made.DRAWN)

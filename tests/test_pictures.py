"""The pictures of the docs: each is shown with a text, is small, and is drawn by a script."""

import json
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


def test_a_stored_estimate_is_read_whole(made):
    record = json.loads(made.STORED.read_text("utf-8"))
    found = made.stored_estimate()
    assert [row.name for row in found.rows] == [row["name"] for row in record["rows"]]
    written = json.loads(found.to_json())
    for row, was in zip(written["rows"], record["rows"], strict=True):
        assert {name: row[name] for name in was} == was


@pytest.mark.slow
def test_the_picture_of_compare_has_the_modules_of_its_page(made):
    drawn = (made.PICTURES / "compare.svg").read_text("utf-8")
    paths = re.findall(r'text-anchor="end"[^>]*>([^<]+)<', drawn)
    assert paths == [row.path for row in made.names_of("compare.md")["comparison"].activations]


def test_an_unknown_picture_is_an_error_that_lists_them(made, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["make_pictures.py", "contrast"])
    with pytest.raises(SystemExit):
        made.main()
    assert "no picture 'contrast'. Pictures: compare, suggest" in capsys.readouterr().err

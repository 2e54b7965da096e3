"""A table as text and as JSON."""

import json

from policy.inspect.render.table import Column, Table
from policy.inspect.render.text import duration


def test_columns_that_exceed_the_width_are_below_under_the_names_again():
    columns = [Column(f"figure {i}", [i, 10 * i]) for i in range(4)]
    text = str(Table("row", ["a", "b"], columns, width=40))
    assert text.splitlines() == [
        "  row  figure 0  figure 1  figure 2",
        "  a           0         1         2",
        "  b           0        10        20",
        "",
        "  row  figure 3",
        "  a           3",
        "  b          30",
    ]


def test_a_ratio_compares_with_the_first_row_and_unknown_values_have_none():
    seconds = Column("seconds", [2.0, 1.0, None], duration, is_compared=True, marks=["≥", "", ""])
    assert seconds.texts == ["≥ 2 s", "1 s", "—"] and seconds.ratios == ["", "x0.50", ""]
    same = Column("bytes", [3, 3], is_compared=True)
    assert same.ratios == ["", ""]


def test_json_has_the_values_by_heading():
    table = Table("row", ["a"], [Column("seconds", [0.5], duration), Column("fits", [None])])
    assert json.loads(json.dumps(table.to_json())) == [{"row": "a", "seconds": 0.5, "fits": None}]


def test_a_long_name_is_above_its_row_and_control_characters_are_escaped():
    table = Table("row", ["\x1b[31m", "n" * 50], [Column("x", [1, 2])], width=40)
    head, first, *name, second = str(table).splitlines()
    assert "\\x1b[31m" in first and "".join(map(str.strip, name)) == "n" * 50
    assert second.strip() == "2" and len(second) == len(head)


def test_a_color_surrounds_cells_and_changes_no_width():
    table = Table("row", ["a", "b"], [Column("fits", ["yes", "no"], styles=["good", "bad"])])
    colored = table.text(color=True)
    assert "\x1b[32m yes\x1b[0m" in colored and "\x1b[31m  no\x1b[0m" in colored
    for code in ("\x1b[32m", "\x1b[31m", "\x1b[1m", "\x1b[0m"):
        colored = colored.replace(code, "")
    assert colored == str(table)

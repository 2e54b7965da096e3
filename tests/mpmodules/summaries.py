"""Reads the tables that `tabulate` draws."""

from __future__ import annotations

CONSOLE = {"width": 240, "no_color": True, "force_terminal": False}
MIXED = "mixed_bfloat16"
SHORT, FULL, HALF, F16 = (
    "p=f32,c=bf16,o=f32",
    "p=f32,c=f32,o=f32",
    "p=bf16,c=bf16,o=bf16",
    "p=f16,c=f16,o=f16",
)


def lines_of(table: str) -> list[list[str]]:
    """Returns the cells of each line of the body."""
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in table.splitlines()
        if "│" in line
    ]


def cells(table: str) -> dict[str, tuple[str, str]]:
    """Returns a policy and its source by path, with the method where it is not `__call__`."""
    header = next(line for line in table.splitlines() if "┃" in line).split("┃")[1:-1]
    assert [cell.strip() for cell in header[2:4]] == ["policy", "policy source"]
    rows = [line for line in lines_of(table) if line[1]]
    return {line[0] + "".join(line[1].split(" ")[1:]): (line[2], line[3]) for line in rows}

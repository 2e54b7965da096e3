"""Draws the pictures of the pages on compare, suggest and estimate into docs/pictures.

    python docs/make_pictures.py                    # all of them: two minutes
    python docs/make_pictures.py compare estimate   # some

`compare` and `suggest` run the code of docs/compare.md and docs/suggest.md, and draw its results.
`suggest` compiles for a TPU v5e: pip install 'mpmodules[accel]'. `estimate` draws the rows of eight
billion parameters that `python -m benchmarks estimates --write` stores, and `estimate_page` their
page in a browser: apt-get install chromium.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from make_audit_page import photograph

from policy.inspect.estimate.report import Estimate
from policy.inspect.estimate.rows import Buffer, Exchange, PolicyCost

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
STORED = DOCS.parent / "benchmarks" / "estimates" / "results" / "decoder_8b-v5e-16x16.json"


def names_of(page: str) -> dict[str, Any]:
    """Runs the code of a page below docs, and returns its names."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {"__name__": page}
    exec(compile("\n".join(blocks), page, "exec", dont_inherit=True), names)
    return names


def estimate_of(record: Mapping[str, Any]) -> Estimate:
    """Returns the estimate that is stored as JSON."""
    known = {field.name for field in dataclasses.fields(Estimate)}
    found = {name: value for name, value in record.items() if name in known}
    return Estimate(**found | {"rows": tuple(map(_row, record["rows"])), "notes": ()})


def _row(row: Mapping[str, Any]) -> PolicyCost:
    buffers = [Buffer(**buffer | {"shape": tuple(buffer["shape"])}) for buffer in row["buffers"]]
    exchanges = [Exchange(**exchange) for exchange in row["collectives"]]
    lists = {"buffers": buffers, "collectives": exchanges, "uncounted": row["uncounted"]}
    return PolicyCost(**{**row, **{name: tuple(value) for name, value in lists.items()}})


def stored_estimate() -> Estimate:
    """Returns the estimate of the decoder of eight billion parameters on 256 chips."""
    found = estimate_of(json.loads(STORED.read_text("utf-8")))
    return dataclasses.replace(found, name="Train step of 8 billion parameters")


def draw_compare(file: Path) -> None:
    file.write_text(names_of("compare.md")["comparison"].to_svg() + "\n", "utf-8")


def draw_suggest(file: Path) -> None:
    names_of("suggest.md")["front"].plot(file)


def draw_estimate(file: Path) -> None:
    stored_estimate().plot(file)


def draw_estimate_page(file: Path) -> None:
    page = file.with_suffix(".html")
    stored_estimate().save(page)
    photograph(page, file, (1500, 860))
    page.unlink()


DRAWN: dict[str, Callable[[Path], None]] = {
    "compare.svg": draw_compare,
    "suggest.png": draw_suggest,
    "estimate.png": draw_estimate,
    "estimate_page.png": draw_estimate_page,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [Path(name).stem for name in DRAWN]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=PICTURES, help="the folder to write to")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"There is no picture {unknown[0]!r}. Pictures: {', '.join(names)}.")
    options.out.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        if not options.names or Path(name).stem in options.names:
            draw(options.out / name)
            print(f"wrote {options.out / name}: {(options.out / name).stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()

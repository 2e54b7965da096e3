"""Tables of the trainers' models: one on each trainer's page, one of all on docs/ports.md."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.packages.cases import AUTOCAST, OWN, PORT
from benchmarks.packages.environment import ROOT
from benchmarks.packages.measure import Figures
from benchmarks.packages.rows import Row, into

RESULTS = ROOT / "benchmarks" / "results" / "trainers"
MARKS = ("<!-- trainers -->", "<!-- end of trainers -->")
WAYS = (PORT, OWN, AUTOCAST, "float32")
_MIB = 2**20


def load(name: str) -> dict[str, Any]:
    """Returns the stored results of a trainer by model; none where nothing is stored."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def row(name: str, record: dict[str, Any]) -> Row:
    """Returns a model's errors as a row of packages' table."""
    ways = {
        way: found if isinstance(found, str) else Figures(**found)
        for way, found in record["ways"].items()
    }
    return Row(name, ways, record["identical"])


def missed(name: str, record: dict[str, Any]) -> Iterator[str]:
    """Yields the bounds that a port misses."""
    if "ways" in record:
        for quantity in row(name, record).missed():
            yield f"{name}: {quantity}"


def _table(lines: Sequence[Sequence[str]], texts: int) -> str:
    head = [*["---"] * texts, *["---:"] * (len(lines[0]) - texts)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], head, *lines[1:]))


def page_table(found: dict[str, Any]) -> str:
    """Returns the table of a trainer's page: a line for each way to run each model."""
    targets = list(dict.fromkeys(target for each in found.values() for target in each["programs"]))
    lines = [["model", "", "outputs", "gradients", "float32 FLOPs", "findings"]]
    for target in targets:
        chip = target.partition(":")[0]
        quantity = "time" if target == "h100" else "cycles"
        lines[0] += [f"{chip} {quantity}", f"{chip} memory"]
    for name, record in found.items():
        for way in WAYS:
            errors = record["ways"].get(way)
            programs = [record["programs"].get(target, {}).get(way) for target in targets]
            if errors is None and not any(programs):
                continue
            cells = ["" if errors is None else errors, "", ""]
            if isinstance(errors, dict):
                cells = [f"{errors['outputs']:.1e}", f"{errors['gradients']:.1e}"]
                cells.append(f"{errors['share']:.1%}")
            kinds = record["findings"].get(way)
            cells.append("" if kinds is None else str(sum(kinds.values())))
            for target, each in zip(targets, programs, strict=True):
                cells += ["", ""] if each is None else _program(target, each)
            lines.append([name if way == PORT else "", way, *cells])
    return _table(lines, 2)


def _program(target: str, figures: dict[str, float]) -> list[str]:
    time = (
        f"{figures['seconds'] * 1e6:,.0f} us"
        if target == "h100"
        else f"{figures['cycles'] / 1e6:,.2f} M"
    )
    return [time, f"{figures['memory'] / _MIB:,.0f} MiB"]


def write(name: str, found: dict[str, Any]) -> None:
    """Stores a trainer's results, and puts their table between the marks of its page, if there is
    one.
    """
    RESULTS.mkdir(exist_ok=True)
    RESULTS.joinpath(f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    page = ROOT / "docs" / "trainers" / f"{name}.md"
    if page.exists():
        page.write_text(into(page.read_text(), page_table(found), *MARKS))


def write_overview(names: Sequence[str]) -> None:
    """Puts a row for each model of all trainers between the marks of docs/ports.md."""
    head = ["model", "lines", "outputs", "beside", "gradients", "beside", "cycles", "memory"]
    lines = [head]
    for name in names:
        for model, record in load(name).items():
            cells = row(f"[{model}](trainers/{name}.md)", record).cells()
            counts = f"-{record['removed']} +{record['added']}"
            lines.append([cells[0], counts, *cells[1:], *_ratios(record)])
    page = ROOT / "docs" / "ports.md"
    page.write_text(into(page.read_text(), _table(lines, 1), *MARKS))


def _ratios(record: dict[str, Any]) -> Iterator[str]:
    """Yields cycles and memory on v5e beside the model's own option, or autocast where it has
    none.
    """
    found = record["programs"].get("v5e:1x1", {})
    beside = found.get(OWN, found.get(AUTOCAST))
    for quantity in ("cycles", "memory"):
        ratio = found[PORT][quantity] / beside[quantity] if beside and PORT in found else None
        yield "" if ratio is None else f"{ratio:.2f}"

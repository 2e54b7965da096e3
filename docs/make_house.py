"""Draws docs/house.svg, the packages and their imports, and the table of inner packages in
docs/contributing.md.

    python docs/make_house.py

The picture is made from the imports in the sources, deferred ones included. `ROOMS` has the place
and the idea of each package; a package without a row is an error that names it.
tests/test_contributing.py holds both files to the sources.
"""

from __future__ import annotations

import ast
import functools
import html
import pathlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
PICTURE, PAGE = ROOT / "docs" / "house.svg", ROOT / "docs" / "contributing.md"
SOURCES = ("policy", "mpmodules", "examples", "benchmarks")
BEGIN, END = "<!-- packages -->\n", "<!-- end of packages -->\n"
Graph = Mapping[str, set[str]]


class Room(NamedTuple):
    """A package, or a file that stands alone: its idea, and its place in the picture."""

    idea: str
    column: float = 0
    row: int = 0


# From the ground up.
ROOMS: dict[str, Room] = {
    "policy/programs": Room("jaxprs: primitives, programs inside equations, paths", 2, 14),
    "policy/core": Room("the policy, rules and scope: which one is in force, and its casts", 2, 13),
    "policy/eight_bits": Room("matmuls and convolutions in 8 bits", 1, 12),
    "policy/functions": Room("reductions, losses and sums in reduction_dtype", 1, 11),
    "policy/quantized": Room("frozen parameters in 8 and 4 bits", 0, 10),
    "policy/grads": Room("loss scales, microbatches, float32 sums, sums across devices", 0, 12),
    "policy/optim": Room("optax in float32: master weights, moments, skipped steps", 2, 11),
    "policy/autocasting": Room("low precision for unchanged functions", 2, 9),
    "policy/inspect": Room("reports on programs: dtypes, hazards, errors and costs", 2, 8),
    "policy/porting": Room("Flax code with layers that obey a policy", 1, 8),
    "policy/command_line": Room("`python -m policy`", 2, 7),
    "policy": Room("the public API: the names that `policy` exports", 1, 6),
    "mpmodules/functions": Room("the maths of layers, arrays in and arrays out", 0, 5),
    "mpmodules/calls": Room(
        "calls of modules under a policy: boundaries, custom layers, ports", 1, 4
    ),
    "mpmodules/tracing": Room("Flax's modules as tracers read them", 2, 3),
    "mpmodules/layers": Room("parts that layers of both APIs share", 0, 3),
    "mpmodules": Room("the public API, checkpoints, registrations at import", 2, 1),
    "mpmodules/linen": Room("Flax's linen layers under a policy", 0, 2),
    "mpmodules/nnx": Room("Flax's nnx layers under a policy", 1, 2),
    "examples": Room("one file each, to copy from", 0, 1),
    "benchmarks": Room("ratios to Flax and others", 1, 0),
}
# Packages inside of others, which the picture has in their boxes.
INNER: dict[str, str] = {
    "policy/programs/tracing": "a call as a program of arrays",
    "policy/programs/rewriting": "interpreters, which evaluate a program as another one",
    "policy/programs/reading": "every equation with its place, and values as a graph",
    "policy/inspect/traced": "a traced call of a user",
    "policy/inspect/render": "text of reports",
    "policy/inspect/hlo": "compiled programs: memory, cycles, traffic, collectives",
    "policy/inspect/audit": "the dtypes of a program and its hazards",
    "policy/inspect/audit/checks": "a function for each hazard",
    "policy/inspect/audit/render": "the report as text",
    "policy/inspect/compare": "a function compared with itself in float32",
    "policy/inspect/estimate": "a policy's cost on absent devices",
    "policy/inspect/monitor": "a train step that returns statistics of its arrays",
    "policy/inspect/runs": "the log of a training run: its page, and advice",
    "policy/inspect/suggest": "the cheapest rules within an error budget",
    "mpmodules/linen/_layers": "a file for each kind of layer",
    "mpmodules/nnx/_layers": "a file for each kind of layer",
}


# --------------------------------------------------------------------------------------------------
# The imports
# --------------------------------------------------------------------------------------------------


def part_of(file: pathlib.PurePath) -> str:
    """Returns the package of a file, relative to the root.

    Packages below examples and benchmarks are parts of those.
    """
    top = file.parts[0]
    return top if top in ("examples", "benchmarks") else file.parent.as_posix()


def imported(tree: ast.Module, known: Mapping[str, object]) -> Iterator[str]:
    """Yields the modules among `known` that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names = f"{node.module}.{alias.name}", str(node.module)
                yield from [name for name in names if name in known][:1]


@functools.cache
def imports(root: pathlib.Path = ROOT) -> Graph:
    """Returns the imports of each package."""
    files = {}
    for path in sorted(path for source in SOURCES for path in root.glob(f"{source}/**/*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    part = {name: part_of(path.relative_to(root)) for name, path in files.items()}
    graph: dict[str, set[str]] = {each: set() for each in part.values()}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph[part[name]] |= {part[other] for other in imported(tree, files)} - {part[name]}
    return graph


def reached(graph: Graph, start: str) -> set[str]:
    """Returns the parts that one imports, directly or through others."""
    waiting, seen = [start], set()
    while waiting:
        fresh = graph[waiting.pop()] - seen
        seen |= fresh
        waiting.extend(fresh)
    return seen


def merged(graph: Graph, names: Mapping[str, str]) -> Graph:
    """Returns the graph with parts joined under the names that some of them are given."""
    joined: dict[str, set[str]] = {}
    for part, targets in graph.items():
        name = names.get(part, part)
        inside = {names.get(target, target) for target in targets} - {name}
        joined.setdefault(name, set()).update(inside)
    return joined


def boxes(graph: Graph) -> Graph:
    """Returns the imports between boxes of the picture."""
    return merged(graph, {inner: "/".join(inner.split("/")[:2]) for inner in INNER})


def arrows(graph: Graph) -> set[tuple[str, str]]:
    """Returns the imports between boxes of the picture, without those that others imply."""
    joined = boxes(graph)
    return {
        (part, target)
        for part, targets in joined.items()
        for target in targets
        if not any(target in reached(joined, other) for other in targets)
    }


def require_rooms(graph: Graph) -> None:
    """Raises LookupError where `ROOMS` and `INNER` are not the packages of the tree, or where an
    import goes upwards in the picture.
    """
    known = ROOMS.keys() | INNER.keys()
    if missing := sorted(graph.keys() - known):
        raise LookupError(f"{', '.join(missing)}: give each a row in docs/make_house.py.")
    if gone := sorted(known - graph.keys()):
        raise LookupError(f"{', '.join(gone)}: not in the tree, but in docs/make_house.py.")
    for part, targets in boxes(graph).items():
        for target in sorted(targets):
            if ROOMS[part].row >= ROOMS[target].row:
                raise LookupError(
                    f"{part} imports {target}: draw it above that in docs/make_house.py."
                )


# --------------------------------------------------------------------------------------------------
# The table and the picture
# --------------------------------------------------------------------------------------------------


def inside(part: str) -> list[str]:
    """Returns the packages inside the package of a box."""
    return [inner for inner in INNER if part.count("/") and inner.startswith(f"{part}/")]


def table() -> str:
    """Returns the table of the packages inside the boxes, from the ground up, in Markdown."""
    lines = ["| package | its idea |", "|---|---|"]
    lines += [f"| `{part}` | {INNER[part]} |" for box in ROOMS for part in inside(box)]
    return "\n".join(lines) + "\n"


WIDTH, HEIGHT, ACROSS, DOWN, MARGIN = 216, 56, 236, 82, 14
COLORS = {"policy": ("#eaf2fb", "#3b6ea5"), "mpmodules": ("#ebf6ec", "#3d8b4a")}
OTHERS = ("#f4f4f4", "#777777")
LEGEND = (
    "An arrow is an import. Imports that",
    "other arrows imply are left out.",
    "Nothing imports upwards.",
)


def corner(part: str) -> tuple[float, float]:
    """Returns the place of a box's upper left corner."""
    return MARGIN + ROOMS[part].column * ACROSS, MARGIN + ROOMS[part].row * DOWN


def text(x: float, y: float, size: int, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{more}>{html.escape(words)}</text>'


def box(part: str) -> Iterator[str]:
    """Yields a package's rectangle, name and idea."""
    x, y = corner(part)
    fill, stroke = COLORS.get(part.split("/")[0], OTHERS)
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="6" '
        f'fill="{fill}" stroke="{stroke}"/>'
    )
    yield text(x + 10, y + 18, 12, part, ' font-weight="bold"')
    for line, words in enumerate(textwrap.wrap(ROOMS[part].idea.replace("`", ""), 32)):
        yield text(x + 10, y + 34 + 14 * line, 11, words)


def arrow(part: str, target: str) -> str:
    """Returns a line from one box's lower edge to another's upper one."""
    (x, y), (to_x, to_y) = corner(part), corner(target)
    middle = WIDTH / 2
    return (
        f'<line x1="{x + middle:g}" y1="{y + HEIGHT:g}" x2="{to_x + middle:g}" y2="{to_y - 2:g}" '
        'stroke="#444444" marker-end="url(#head)"><title>'
        f"{html.escape(part)} -&gt; {html.escape(target)}</title></line>"
    )


def svg(parts: Iterable[str], lines: Iterable[tuple[str, str]]) -> str:
    """Returns the picture."""
    columns = max(room.column for room in ROOMS.values())
    rows = max(room.row for room in ROOMS.values())
    width = 2 * MARGIN + columns * ACROSS + WIDTH
    height = 2 * MARGIN + rows * DOWN + HEIGHT
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="Helvetica, Arial, sans-serif">',
        "<title>The packages and their imports</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#444444"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        *(arrow(*line) for line in sorted(lines)),
        *(piece for part in parts for piece in box(part)),
        *(text(MARGIN, 380 + 18 * i, 12, words) for i, words in enumerate(LEGEND)),
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def picture(graph: Graph) -> str:
    """Returns docs/house.svg for a graph of imports."""
    return svg(ROOMS, arrows(graph))


def with_table(page: str) -> str:
    """Returns the text of docs/contributing.md with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    require_rooms(imports())
    PICTURE.write_text(picture(imports()), encoding="utf-8")
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

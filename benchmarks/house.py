"""The size of the library, and the way of a call through its files.

python -m benchmarks.house            # lines of code by package, long functions and files
python -m benchmarks.house --calls    # and the files that calls and reports pass, in order
python -m benchmarks.house --write    # puts both into docs/architecture.md
python -m benchmarks.house --check    # fails where a size or a way is above its bound

A way is that of a first trace, in a process of its own: its frames are those of the library's
functions, its files those that they are in, and its moves the changes of file in their sequence.
Nothing is timed.
"""

from __future__ import annotations

import argparse
import ast
import io
import itertools
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("policy", "mpmodules")
TOOLS = ("policy.inspect", "policy.porting", "policy.command_line")
LONG_FUNCTION, LONG_FILE, SHORT = 60, 400, 10
# The figures of 2026-11-28, and the bounds of `--check`. A change lowers those bounds that it can;
# one that raises a bound says in its message what the new lines replace.
SIZES = {
    "lines of code": (35_538, 30_780),
    "lines of the runtime": (21_754, 19_930),
    "lines of tests": (42_571, 42_000),
    "lines of benchmarks": (13_039, 10_000),
    "words of pages": (75_359, 51_300),
    "tools that import mpmodules loads": (83, 0),
}
WAYS = {
    "a linen Dense": {"files": 10, "moves": 25},
    "an nnx Linear": {"files": 13, "moves": 32},
    "a linen module with a matmul of its own": {"files": 28, "moves": 141},
    "an nnx module with a matmul of its own": {"files": 28, "moves": 146},
    "a port of a linen model": {"files": 32, "moves": 287},
    "an update of two params": {"frames": 85},
    "an audit": {"traces": 1},
    "a compare": {"traces": 1},
    "an estimate of one policy": {"traces": 1},
}
_LAYOUT = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(text: str) -> int:
    """Returns the number of lines that hold code: no blanks, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return len(lines)


def words_of(page: str) -> int:
    """Counts the words of a page that hold a letter or a digit: no rules of tables."""
    return len(re.findall(r"[^\s|]*[A-Za-z0-9][^\s|]*", page))


def files(*folders: str, root: Path = ROOT) -> list[Path]:
    """Returns the Python files below some folders."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def code_by_package(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Returns the files and the lines of code of each package of the library."""
    found: dict[str, tuple[int, int]] = {}
    for path in files(*PACKAGES, root=root):
        package = path.parent.relative_to(root).as_posix()
        count, lines = found.get(package, (0, 0))
        found[package] = count + 1, lines + lines_of_code(path.read_text(encoding="utf-8"))
    return found


def long_parts(root: Path = ROOT) -> Iterator[tuple[str, int]]:
    """Yields the functions and files that are too long, with their lines, docstrings left out."""
    for path in files(*PACKAGES, root=root):
        name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        if (length := lines_of_code(text)) > LONG_FILE:
            yield name, length
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if ast.get_docstring(node, clean=False) is not None:
                    docstring = node.body[0]
                    length -= (docstring.end_lineno or 0) - docstring.lineno + 1
                if length > LONG_FUNCTION:
                    yield f"{name}: {node.name}", length


class Way(NamedTuple):
    """The way of a first trace.

    Attributes:
      files: the files of the library that it runs code of, in the order of their entry.
      frames: the number of calls of the library's functions.
      moves: the number of changes of file in the sequence of these calls.
      traces: the number of times that the function of a report was traced; 0 of other calls.
    """

    files: list[str]
    frames: int
    moves: int
    traces: int


def way_of(call: Callable[[], Any]) -> Way:
    """Returns the way of a call, the first of its kind in this process.

    Imports, lambdas and comprehensions are no calls of their own.
    """
    entered: list[str] = []
    inside = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def profile(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(inside) and code.co_name[0] != "<":
            entered.append(code.co_filename)

    sys.setprofile(profile)
    try:
        traces = call()
    finally:
        sys.setprofile(None)
    files = [Path(name).relative_to(ROOT).as_posix() for name in dict.fromkeys(entered)]
    moves = sum(before != after for before, after in itertools.pairwise(entered))
    return Way(files, len(entered), moves, traces if isinstance(traces, int) else 0)


def measured(name: str) -> Way:
    """Returns the way of a call of `CALLS`, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.house", "--way", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Way(**json.loads(done.stdout))


def _dense() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    from mpmodules import linen as nn

    layer, x = nn.Dense(4), jnp.ones((2, 3))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    return lambda: jax.eval_shape(layer.apply, variables, x)


def _linear() -> Callable[[], Any]:
    import jax.numpy as jnp

    from mpmodules import nnx

    layer, x = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
    return lambda: layer(x)


def _own_linen() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    from mpmodules import linen as nn

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return x @ self.param("w", nn.initializers.ones, (3, 4))

    return lambda: jax.eval_shape(
        Own().apply, {"params": {"w": jnp.ones((3, 4))}}, jnp.ones((2, 3))
    )


def _own_nnx() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    from mpmodules import nnx

    class Own(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((3, 4)))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...]

    model, x = Own(), jnp.ones((2, 3))
    return lambda: model(x)


def _port() -> Callable[[], Any]:
    import flax.linen as flax_nn
    import jax
    import jax.numpy as jnp

    from mpmodules import linen as nn

    class Foreign(flax_nn.Module):
        @flax_nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return flax_nn.Dense(4)(x)

    x, variables = jnp.ones((2, 3)), Foreign().init(jax.random.key(0), jnp.ones((2, 3)))
    port = nn.apply_policy(Foreign(), "mixed_bfloat16")
    return lambda: jax.eval_shape(port.apply, variables, x)


def _update() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp
    import optax

    import policy

    tx = policy.mixed_precision(optax.adam(1e-3), "mixed_bfloat16")
    params: Any = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    state = tx.init(params)
    return lambda: jax.eval_shape(tx.update, params, state, params)


def _report(run: Callable[[Callable[..., Any], Any], Any]) -> Callable[[], int]:
    import jax.numpy as jnp

    traces = 0

    def loss(x: Any) -> Any:
        nonlocal traces
        traces += 1
        return jnp.sum(jnp.tanh(x @ x.T))

    def counted() -> int:
        run(loss, jnp.ones((2, 3)))
        return traces

    return counted


def _audit() -> Callable[[], int]:
    import policy

    return _report(policy.audit)


def _compare() -> Callable[[], int]:
    import policy

    return _report(policy.compare)


def _estimate() -> Callable[[], int]:
    import policy

    policies = ["mixed_bfloat16"]
    return _report(lambda loss, x: policy.estimate(loss, x, policies=policies, on="cpu"))


# The calls, each made ready by a function: under a policy's scope, imports are done.
CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "a linen Dense": _dense,
    "an nnx Linear": _linear,
    "a linen module with a matmul of its own": _own_linen,
    "an nnx module with a matmul of its own": _own_nnx,
    "a port of a linen model": _port,
    "an update of two params": _update,
    "an audit": _audit,
    "a compare": _compare,
    "an estimate of one policy": _estimate,
}


def tools_loaded() -> list[str]:
    """Returns the modules of tools that `import mpmodules` loads."""
    program = f"import sys, mpmodules; print(*(m for m in sys.modules if m.startswith({TOOLS})))"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def runtime(code: dict[str, tuple[int, int]]) -> int:
    """Returns the lines of what calls, gradients and steps may enter: all packages but tools."""
    folders = tuple(tool.replace(".", "/") for tool in TOOLS)
    return sum(lines for package, (_, lines) in code.items() if not package.startswith(folders))


def lines_below(folder: str) -> int:
    return sum(lines_of_code(path.read_text(encoding="utf-8")) for path in files(folder))


def pages() -> list[Path]:
    return [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]


def words() -> int:
    return sum(words_of(page.read_text(encoding="utf-8")) for page in pages())


def found_sizes() -> dict[str, int]:
    """Returns what `SIZES` bounds."""
    code = code_by_package()
    return {
        "lines of code": sum(lines for _, lines in code.values()),
        "lines of the runtime": runtime(code),
        "lines of tests": lines_below("tests"),
        "lines of benchmarks": lines_below("benchmarks"),
        "words of pages": words(),
        "tools that import mpmodules loads": len(tools_loaded()),
    }


def check() -> list[str]:
    """Returns a line for each size or way that is above its bound."""
    over = [
        f"{name}: {value}, bound {SIZES[name][1]}"
        for name, value in found_sizes().items()
        if value > SIZES[name][1]
    ]
    for name, bounds in WAYS.items():
        way = measured(name)
        figures = way._asdict() | {"files": len(way.files)}
        over += [
            f"{name}: {figures[what]} {what}, bound {bound}"
            for what, bound in bounds.items()
            if figures[what] > bound
        ]
    return over


def sizes() -> str:
    """Returns the table of packages, with a line for all of them and for the tests."""
    lines = ["| package | files | lines of code |", "|---|---|---|"]
    found = code_by_package()
    lines += [f"| `{package}` | {count} | {code} |" for package, (count, code) in found.items()]
    counts, codes = zip(*found.values(), strict=True)
    lines.append(f"| together | {sum(counts)} | {sum(codes)} |")
    lines.append(f"| the runtime | | {runtime(found)} |")
    lines.append(f"| `tests` | {len(files('tests'))} | {lines_below('tests')} |")
    lines.append(f"| pages, words | {len(pages())} | {round(words(), -2)} |")
    return "\n".join(lines) + "\n"


def changes() -> str:
    """Returns the table of sizes before and now."""
    lines = ["| | 2026-11-28 | now |", "|---|---:|---:|"]
    lines += [f"| {name} | {SIZES[name][0]:,} | {now:,} |" for name, now in found_sizes().items()]
    return "\n".join(lines) + "\n"


def ways() -> str:
    """Returns the ways of all calls as a table, and the files of those that are no reports.

    The files of a short way have their ideas: the first lines of their docstrings.
    """
    table = ["| first trace of | files | frames | moves | traces |", "|---|---|---|---|---|"]
    lines = []
    for name in CALLS:
        way = measured(name)
        passed, traces = way.files, way.traces or ""
        table.append(f"| {name} | {len(passed)} | {way.frames} | {way.moves} | {traces} |")
        if way.traces:
            continue
        lines += [f"### {name[0].upper()}{name[1:]}", ""]
        for path in passed:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            idea = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
            lines.append(f"1. `{path}`{f': {idea}' if len(passed) <= SHORT else ''}")
        lines.append("")
    return "\n".join([*table, "", *lines])


def into(page: str, name: str, text: str) -> str:
    """Returns a page with a text between the marks of a name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--calls", action="store_true", help="the files that calls pass, too")
    options.add_argument("--write", action="store_true", help=f"put both into {PAGE.name}")
    options.add_argument("--check", action="store_true", help="fail above a bound")
    options.add_argument("--way", choices=CALLS, help="print the way of one call as JSON")
    arguments = options.parse_args()
    if arguments.way:
        from policy import use_policy

        with use_policy("mixed_bfloat16"):
            print(json.dumps(way_of(CALLS[arguments.way]())._asdict()))
        return
    if arguments.check:
        over = check()
        print("\n".join(over) or "Sizes and ways are within their bounds.")
        sys.exit(bool(over))
    print(sizes())
    for name, length in long_parts():
        print(f"long: {name} ({length} lines)")
    if arguments.calls or arguments.write:
        passed = ways()
        print(f"\n{passed}")
        if arguments.write:
            page = into(PAGE.read_text(encoding="utf-8"), "sizes", sizes())
            page = into(page, "changes", changes())
            PAGE.write_text(into(page, "ways", passed), encoding="utf-8")


if __name__ == "__main__":
    main()

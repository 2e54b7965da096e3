"""The size of the library, and the files that a call passes.

python -m benchmarks.house            # lines of code by package, long functions and files
python -m benchmarks.house --calls    # and the files that calls and reports pass, in order
python -m benchmarks.house --write    # puts both into docs/architecture.md
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("policy", "mpmodules")
LONG_FUNCTION, LONG_FILE, SHORT = 60, 400, 10
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


def files_passed(call: Callable[[], Any]) -> list[str]:
    """Returns the files of the library that a call runs code of, in the order of their entry.

    A policy's scope is open around it. What is imported, traced and cached once is no part of it.
    """
    from policy import use_policy

    seen: dict[str, None] = {}
    inside = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(inside):
            seen.setdefault(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    with use_policy("mixed_bfloat16"):
        call()
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    return list(seen)


def calls() -> dict[str, Callable[[], Any]]:
    """Returns a call of each kind, under a policy."""
    import flax.linen as flax_nn
    import jax
    import jax.numpy as jnp
    import optax

    import policy
    from mpmodules import linen as nn
    from mpmodules import nnx

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return x @ self.param("w", nn.initializers.ones, (3, 4))

    class Foreign(flax_nn.Module):
        @flax_nn.compact
        def __call__(self, x: jax.Array) -> Any:
            return flax_nn.Dense(4)(x)

    x, key = jnp.ones((2, 3)), jax.random.key(0)
    dense, own = nn.Dense(4), Own()
    port = nn.apply_policy(Foreign(), "mixed_bfloat16")
    with policy.use_policy("mixed_bfloat16"):
        linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
        variables = dense.init(key, x), own.init(key, x)
    ported = port.init(key, x)
    tx = policy.mixed_precision(optax.adam(1e-3), "mixed_bfloat16")
    params: Any = {"w": x}
    state = tx.init(params)

    return {
        "a linen Dense": lambda: dense.apply(variables[0], x),
        "an nnx Linear": lambda: linear(x),
        "a linen module with a matmul of its own": lambda: own.apply(variables[1], x),
        "a port of a linen model": lambda: port.apply(ported, x),
        "one step of the optimizer": lambda: policy.apply_gradients(tx, params, state, params),
        "an audit": lambda: policy.audit(jnp.sum, x),
    }


def sizes() -> str:
    """Returns the table of packages, with a line for all of them and for the tests."""
    lines = ["| package | files | lines of code |", "|---|---|---|"]
    found = code_by_package()
    lines += [f"| `{package}` | {count} | {code} |" for package, (count, code) in found.items()]
    counts, codes = zip(*found.values(), strict=True)
    lines.append(f"| together | {sum(counts)} | {sum(codes)} |")
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files("tests"))
    lines.append(f"| `tests`, all lines | {len(files('tests'))} | {tests} |")
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"]
    words = sum(words_of(page.read_text(encoding="utf-8")) for page in pages)
    lines.append(f"| pages, words | {len(pages)} | {round(words, -2)} |")
    return "\n".join(lines) + "\n"


def ways() -> str:
    """Returns the files that each call passes, those of a short way with their ideas: the first
    lines of their docstrings.
    """
    lines = []
    for name, call in calls().items():
        passed = files_passed(call)
        lines += [f"### {name[0].upper()}{name[1:]}: {len(passed)} files", ""]
        for path in passed:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            idea = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
            lines.append(f"1. `{path}`{f': {idea}' if len(passed) <= SHORT else ''}")
        lines.append("")
    return "\n".join(lines)


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
    arguments = options.parse_args()
    print(sizes())
    for name, length in long_parts():
        print(f"long: {name} ({length} lines)")
    if arguments.calls or arguments.write:
        passed = ways()
        print(f"\n{passed}")
        if arguments.write:
            page = into(PAGE.read_text(encoding="utf-8"), "sizes", sizes())
            PAGE.write_text(into(page, "ways", passed), encoding="utf-8")


if __name__ == "__main__":
    main()

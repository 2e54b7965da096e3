"""The API reference, docs/reference: every public name once, with an example and its arguments."""

import argparse
import dataclasses
import importlib
import inspect
import pathlib
import re
import types
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import flax.linen
import flax.nnx
import pytest

import mpmodules
import policy
from mpmodules import linen, nnx
from policy.command_line.command import _parser

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "reference"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
APIS = {linen: flax.linen, nnx: flax.nnx}
NAMESPACES = [
    importlib.import_module(f"policy.{name}")
    for name in (
        *("grads", "inspect", "losses", "optim", "quantized"),
        *("reductions", "sharding", "testing"),
    )
]
# Types that no face exports: of attributes of results, and of arguments.
OF_RESULTS = {
    "policy.inspect.audit.report.Operation",
    "policy.autocasting.report.Record",
    "policy.autocasting.report.Report",
    "policy.inspect.compare.comparison.OperandCodes",
    "policy.inspect.compare.comparison.Row",
    "policy.inspect.estimate.rows.Buffer",
    "policy.inspect.estimate.rows.Exchange",
    "policy.inspect.estimate.targets.Target",
    "policy.inspect.runs.advice.Advice",
    "policy.inspect.suggest.front.FrontPoint",
    "policy.inspect.suggest.suggestion.Evidence",
}
MODULES = {"mpmodules.mypy_plugin"}  # named in a project's settings, imported by mypy alone
WITHOUT_EXAMPLE = {"policy.LossScale"}  # a union, for annotations
FLAXS = "Flax's own description:"  # Flax's docstring begins here: its arguments are Flax's to name


@dataclasses.dataclass(frozen=True)
class Entry:
    """A directive that describes an object; `since` is the release of Flax that it needs, or ""."""

    page: str
    name: str
    members: tuple[str, ...]
    since: str


_DIRECTIVE = re.compile(
    r"^ *\.\. (?:auto(?:class|function|exception)|py:(?:data|module)):: ([\w.]+)\n"
    r"((?: +:\w+:.*\n(?: {6,}[\w, ]+\n)*)*)",
    re.MULTILINE,
)


def entries_of(page: str) -> Iterator[Entry]:
    text = PAGES[page]
    blocks = list(re.finditer(r"^\.\. since-flax:: ([\d.]+)\n(?:\n| +.*\n)*", text, re.MULTILINE))
    for found in _DIRECTIVE.finditer(text):
        members = re.search(r":members:((?:.*\n?)*)", found[2])
        listed = members[1].replace("\n", " ").split(",") if members else []
        since = [block[1] for block in blocks if block.start() < found.start() < block.end()]
        names = tuple(name.strip() for name in listed if name.strip())
        yield Entry(page, found[1], names, since[0] if since else "")


ENTRIES = [entry for page in PAGES for entry in entries_of(page)]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def is_here(entry: Entry) -> bool:
    return not entry.since or numbers(metadata.version("flax")) >= numbers(entry.since)


def value_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


HERE = [entry for entry in ENTRIES if is_here(entry) and entry.name not in MODULES]
VALUES = {entry.name: value_of(entry.name) for entry in HERE}


def table_of_other_names() -> Iterator[tuple[str, str, str]]:
    """Yields module, name and the full name that describes the object, of the index's table."""
    row = re.compile(r"^\| `([\w.]+)` \| (.*) \| `([\w.]+)` \|$", re.MULTILINE)
    for module, names, of in row.findall(PAGES["index"]):
        for name in re.findall(r"`(\w+)`", names):
            yield module, name, f"{of}.{name}"


OTHER_NAMES = {
    **{f"{module}.{name}": full for module, name, full in table_of_other_names()},
    "mpmodules.linen.normalize": "mpmodules.linen.standardize",
}


def is_ours(value: Any) -> bool:
    place = getattr(value, "__module__", None) or ""
    return place.partition(".")[0] in ("policy", "mpmodules")


def public_names(module: types.ModuleType) -> list[str]:
    """Returns the public names of a module that are ours, without its submodules."""
    if module in APIS:
        names = [name for name in dir(module) if is_ours(getattr(module, name))]
    else:
        names = module.__all__
    hidden = [n for n in names if n.startswith("_")]
    modules = [n for n in names if isinstance(getattr(module, n), types.ModuleType)]
    return sorted(set(names) - {*hidden, *modules})


FACES = (policy, *NAMESPACES, mpmodules, linen, nnx)
PUBLIC = {f"{module.__name__}.{name}" for module in FACES for name in public_names(module)}


def test_every_public_name_is_described_once_or_named_as_another():
    missing = PUBLIC - {*VALUES} - {*OTHER_NAMES}
    assert not missing, f"name them on a page of docs/reference: {', '.join(sorted(missing))}"
    names = [entry.name for entry in ENTRIES]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert not {*names} & {*OTHER_NAMES}
    by_object: dict[int, list[str]] = {}
    for name, value in VALUES.items():
        by_object.setdefault(id(value), []).append(name)
    assert [same for same in by_object.values() if len(same) > 1] == []
    assert {*VALUES} - PUBLIC == OF_RESULTS
    assert {*names} & MODULES == MODULES
    for name, full in OTHER_NAMES.items():
        assert name in PUBLIC and value_of(name) is VALUES[full], name


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.__name__)
def test_names_unchanged_from_flax_are_in_the_stub(api):
    theirs = APIS[api]
    public = {name: getattr(theirs, name) for name in dir(theirs) if not name.startswith("_")}
    values = {n: one for n, one in public.items() if not isinstance(one, types.ModuleType)}
    same = {name for name, value in values.items() if value is getattr(api, name)}
    stub = pathlib.Path(api.__file__ or "").with_suffix(".pyi").read_text(encoding="utf-8")
    flaxs = rf"^from {re.escape(theirs.__name__)}[\w.]* import (\w+) as \1$"
    assert same <= {n for n in re.findall(flaxs, stub, re.MULTILINE) if not n.startswith("_")}


@pytest.mark.cases(fast=100)
@pytest.mark.parametrize("name", sorted({*VALUES} - WITHOUT_EXAMPLE))
def test_a_docstring_has_an_example(name):
    own = (inspect.getdoc(VALUES[name]) or "").partition(FLAXS)[0]
    assert own, f"{name} has no docstring"
    assert ">>> " in own, f"{name} has no example in its docstring"


@pytest.mark.parametrize("entry", [e for e in HERE if e.members], ids=lambda entry: entry.name)
def test_members_have_docstrings(entry):
    for member in entry.members:
        assert inspect.getdoc(getattr(VALUES[entry.name], member)), f"{entry.name}.{member}"


_SECTION = re.compile(r"^(Args|Attributes):\n((?:\n| +.*\n?)+)", re.MULTILINE)
_TERM = re.compile(r"^(  ?)((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): ", re.MULTILINE)


# Other arguments are described elsewhere.
_ELSEWHERE = re.compile(r"[Aa]rguments(?: and \w+)? (?:as in `|are Flax's)")


def documented(docstring: str, section: str) -> set[str] | None:
    """Returns the names that a section of a docstring describes; None without that section."""
    found = [match[2] for match in _SECTION.finditer(docstring) if match[1] == section]
    if not found:
        return None
    names = {name for _, terms in _TERM.findall(found[0]) for name in terms.split(", ")}
    return {name.lstrip("*") for name in names}


def arguments_of(value: Any) -> set[str]:
    names = set(inspect.signature(value).parameters)
    if inspect.isclass(value) and names == {"args", "kwargs"}:  # a metaclass of Flax's
        names = set(inspect.signature(value.__init__).parameters)
    return names - {"self"}


def described_callables() -> Iterator[Any]:
    for name, value in VALUES.items():
        if inspect.isclass(value) and issubclass(value, Exception):
            continue
        if inspect.isfunction(value) or inspect.isclass(value):
            yield pytest.param(value, id=name)
    for entry in HERE:
        for member in entry.members:
            value = getattr(VALUES[entry.name], member)
            if (inspect.isfunction(value) or inspect.ismethod(value)) and is_ours(value):
                yield pytest.param(value, id=f"{entry.name}.{member}")


@pytest.mark.cases(fast=100)
@pytest.mark.parametrize("value", [*described_callables()])
def test_documented_arguments_are_those_of_the_signature(value):
    own, _, upstream = (inspect.getdoc(value) or "").partition(FLAXS)
    names = documented(own, "Args")
    known = arguments_of(value)
    if _ELSEWHERE.search(own):
        assert (names or set()) <= known
    elif names is not None:
        assert names == known
    elif inspect.isfunction(value) and not upstream:
        assert len(known) < 3, "a docstring of several arguments needs Args"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(value, id=name)
        for name, value in VALUES.items()
        if dataclasses.is_dataclass(value) and name.startswith("policy.")
    ],
)
def test_documented_attributes_are_the_fields(value):
    own = inspect.getdoc(value) or ""
    names = (documented(own, "Attributes") or set()) | (documented(own, "Args") or set())
    assert names == {f.name for f in dataclasses.fields(value) if not f.name.startswith("_")}


def test_every_page_is_in_the_index():
    others = set(PAGES) - {"index"}
    toctree = re.search(r"```\{toctree\}\n:hidden:\n\n((?:\w+\n)+)```", PAGES["index"])
    assert toctree is not None and set(toctree[1].split()) == others
    assert set(re.findall(r"\]\((\w+)\.md\)", PAGES["index"])) == others


def commands() -> dict[str, argparse.ArgumentParser]:
    groups = [a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(groups[0].choices)


def test_the_command_line_page_has_the_help_of_every_command():
    shown = re.findall(
        r"^## (\w+)$.*?^\.\. command-help:: (\w+)$", PAGES["command_line"], re.M | re.S
    )
    assert [(name, name) for name in commands()] == shown

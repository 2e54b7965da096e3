"""The order of the packages: each imports what is below it, and none imports itself through others.

Read from the syntax trees, imports for type checkers and deferred ones included.
"""

import collections
from collections.abc import Iterator

import pytest

from tests.policy.test_layout import imports, is_in, modules

# From the ground up. Packages of one line may import one another, but in no cycle.
ORDER = (
    ("policy.programs",),
    ("policy.core",),
    ("policy.functions", "policy.grads", "policy.eight_bits", "policy.quantized"),
    ("policy.optim", "policy.autocasting"),
    ("mpmodules.functions", "mpmodules.layers", "mpmodules.calls", "mpmodules.tracing"),
    ("mpmodules.linen", "mpmodules.nnx"),
    ("policy.inspect", "policy.porting"),
    ("policy.command_line",),
)


def package_of(name: str) -> str:
    """Returns the package of `ORDER` that a module is in; "" for the faces above all."""
    return next((each for line in ORDER for each in line if is_in(name, each)), "")


def height(package: str) -> int:
    return next(i for i, line in enumerate(ORDER) if package in line)


def between_packages() -> Iterator[tuple[str, str]]:
    """Yields the modules that import a module of another package, and that one."""
    for name, tree in modules().items():
        for target, _ in imports(tree):
            packages = package_of(name), package_of(target)
            if all(packages) and packages[0] != packages[1] and target in modules():
                yield name, target


def test_packages_import_downwards():
    for name, target in between_packages():
        assert height(package_of(name)) >= height(package_of(target)), (name, target)


def test_no_package_imports_itself_through_others():
    graph = collections.defaultdict(set)
    for name, target in between_packages():
        graph[package_of(name)].add(package_of(target))
    seen: dict[str, list[str]] = {}

    def visit(package: str, path: list[str]) -> None:
        assert package not in path, " imports ".join([*path, package])
        if package not in seen:
            for other in graph[package]:
                visit(other, [*path, package])
            seen[package] = path

    for package in list(graph):
        visit(package, [])
    assert len(seen) > 10


@pytest.mark.parametrize("name", ["mpmodules", "mpmodules.registration"])
def test_the_face_and_what_an_import_registers_import_no_tool(name):
    assert not [target for target, _ in imports(modules()[name]) if is_in(target, "policy.inspect")]

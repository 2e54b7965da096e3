"""The table of primitives: against JAX's, against its own sets, and as the only place that lists
them.
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

import flax
import jax
import jax.extend.core
import jax.extend.core.primitives
import pytest

import mpmodules
import policy
from policy.autocasting.calls import HANDLERS
from policy.programs import primitives
from policy.programs.primitives import CATEGORY_OF, HLO_COLLECTIVES, PRIMITIVES

TABLE = pathlib.Path(primitives.__file__)
# Readers of compiled programs: XLA's opcodes, of which some share a primitive's name.
OPCODES = pathlib.Path(policy.__file__ or "").parent / "inspect" / "hlo"
PACKAGES = [pathlib.Path(package.__file__ or "").parent for package in (policy, mpmodules)]

# Primitives of one end of the range of JAX versions that is supported, and not of the other.
NOT_IN_THE_OLDEST = """
    has_memory_space mosaic_gpu_reduce_max mosaic_gpu_reduce_min one_minus_square
    pbroadcast_dynamic polynomial relayout unreduced_pmax unreduced_pmin
"""
NOT_IN_THE_NEWEST = """
    box_get box_set closed_call core_call dot_product_attention_bwd_wrapper
    dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd_wrapper
    dot_product_attention_fwd_wrapper get_variable log_extend log_read new_box new_log
    new_variable pbroadcast_done pbroadcast_start psum_start reduced_vary_cast_p set_variable
    unreduced_psum_start unreduced_reduce_scatter_start vary_unreduced_cast_p
"""
OLDER_THAN_BOTH = "named_call"


def installed() -> set[str]:
    """Returns the names of the primitives in those public modules of JAX that are loaded."""
    modules = sys.modules.items()
    loaded = [one for name, one in modules if name.startswith("jax.") and "._" not in name]
    found = [value for module in loaded for value in vars(module).values()]
    return {value.name for value in found if isinstance(value, jax.extend.core.Primitive)}


def test_every_primitive_of_jax_has_a_category():
    names = installed()
    assert len(names) > 150
    assert names <= CATEGORY_OF.keys()


@pytest.mark.slow
def test_every_name_is_a_primitive_of_some_supported_jax():
    """Primitives of kernels are in no public module: their names are looked for in the sources."""
    roots = [pathlib.Path(package.__file__ or "").parent for package in (jax, flax)] + PACKAGES
    files = {path for root in roots for path in root.rglob("*.py")} - {TABLE}
    sources = (path.read_text(errors="replace") for path in files)
    written = {name for source in sources for name in re.findall(r"[\"']([\w-]+)[\"']", source)}
    elsewhere = {*NOT_IN_THE_OLDEST.split(), *NOT_IN_THE_NEWEST.split(), OLDER_THAN_BOTH}
    assert set(CATEGORY_OF) - written <= elsewhere <= set(CATEGORY_OF)


def test_a_primitive_stands_in_the_table_once():
    assert len(PRIMITIVES) == len(CATEGORY_OF)
    kinds = {(row.category, row.kind) for row in PRIMITIVES}
    assert len(kinds) == len({kind for _, kind in kinds})


def test_every_trait_is_a_set_of_its_name():
    traits = {trait for row in PRIMITIVES for trait in row.traits}
    assert {trait for trait in traits if "-" in trait} == set(HLO_COLLECTIVES.values())
    for trait in traits - set(HLO_COLLECTIVES.values()):
        named = {row.name for row in PRIMITIVES if trait in row.traits}
        assert named <= getattr(primitives, trait.upper())


def test_autocast_rewrites_what_holds_programs():
    control = {name for name, category in CATEGORY_OF.items() if category == "control"}
    assert set(HANDLERS) <= control <= {*HANDLERS, "custom_jvp_call_jaxpr"}


def words_of(node: ast.AST) -> list[str]:
    """Returns the strings of a display, of the arguments of a call, or of a text that is split."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.split()
    nodes = (
        node.args
        if isinstance(node, ast.Call)
        else [test.comparators[0] for test in node.values if isinstance(test, ast.Compare)]
        if isinstance(node, ast.BoolOp)
        else node.keys  # a mapping to functions is how a program is dispatched on
        if isinstance(node, ast.Dict) and any(isinstance(v, ast.Constant) for v in node.values)
        else getattr(node, "elts", [])
    )
    constants = [each.value for each in nodes if isinstance(each, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def collections_in(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Yields the line of each collection of strings of which two or more, and most, are names of
    primitives.

    Names of JAX's functions, and of the wrappers in name stacks, are other things: a few are called
    as primitives are.
    """
    for node in ast.walk(tree):
        words = words_of(node)
        known = {word for word in words if word in CATEGORY_OF}
        if len(known) > 1 and 2 * len(known) > len(set(words)):
            yield getattr(node, "lineno", 0), sorted(known)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_collection_of_primitives_stands_beside_the_table(package):
    files = [path for path in package.rglob("*.py") if not path.is_relative_to(OPCODES)]
    found = {
        f"{path.relative_to(package.parent)}:{line}": names
        for path in sorted({*files} - {TABLE})
        for line, names in collections_in(ast.parse(path.read_text()))
    }
    assert found == {}

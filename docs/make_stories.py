"""Executes the notebooks of docs/stories and saves them with their outputs.

    python docs/make_stories.py                # all of them: about two minutes on two cores
    python docs/make_stories.py float16_nan    # those that are named

The site executes them anew when it is built. The saved outputs are for readers of the repository.
Nothing that differs from one machine to the next is saved: times, versions and the kernel's path
are left out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

STORIES = Path(__file__).parent / "stories"
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path) -> None:
    """Executes a notebook in its folder, and writes it back."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    notebook.metadata.clear()
    notebook.metadata.update(kernelspec=KERNELSPEC, language_info={"name": "python"})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        # XLA writes there about missing GPUs. A warning fails in the tests.
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    nbformat.write(notebook, path)


def main(names: list[str]) -> None:
    root = str(STORIES.parents[1])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    for path in sorted(STORIES.glob("*.ipynb")):
        if not names or path.stem in names:
            execute(path)


if __name__ == "__main__":
    main(sys.argv[1:])

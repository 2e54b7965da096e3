"""Tells our package `policy` from others of that name that ``import policy`` may find, and says how
to remove them.

Imports nothing but the standard library, and runs none of the files that it finds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import site
import sys
from pathlib import Path


def require_own_policy() -> None:
    """Refuses another file or package of the name `policy` before it is run in place of ours.

    Raises:
      ImportError: `import policy` finds none of ours.
    """
    found = _found()
    if found is None or not _is_ours(found):
        raise ImportError(explanation(found))


def explanation(found: Path | None) -> str:
    """Returns the message on a package that shadows our `policy`, and the way out.

    Args:
      found: the file or the folder that `import policy` finds; None where it finds nothing.
    """
    way_out = (
        "the installation is broken. Reinstall it: pip install --force-reinstall --no-deps "
        "mpmodules."
    )
    return (
        "mpmodules needs its own package 'policy', but 'import policy' finds "
        f"{found or 'nothing'}: {_way_out(found) if found else way_out}"
    )


def _found() -> Path | None:
    try:
        spec = importlib.util.find_spec("policy")
    except ValueError:  # it is imported already, by something that gave it no spec
        file = getattr(sys.modules["policy"], "__file__", None)
        return None if file is None else Path(file).resolve()
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else spec.origin or "policy").resolve()


def _is_ours(found: Path) -> bool:
    source = found / "__init__.py"
    if not source.is_file():  # in an archive, or without sources: what lies beside us is ours
        return found.parent == Path(__file__).resolve().parents[1]
    return "from policy.core.messages import " in source.read_text(
        encoding="utf-8", errors="replace"
    )


def _way_out(found: Path) -> str:
    name, folder = f"{found.name}{'/' if found.is_dir() else ''}", found.parent
    distributions = _distributions(folder)
    sites = map(Path, (*site.getsitepackages(), site.getusersitepackages()))
    if distributions or folder in [each.resolve() for each in sites]:
        what = " and ".join(distributions) or "another distribution"
        uninstall = (
            " ".join(["pip uninstall", *distributions]) if distributions else "Uninstall that one"
        )
        return (
            f"{what} installs a top-level 'policy' too and shadows it. {uninstall}, then reinstall "
            "ours, since both write to one folder: pip install --force-reinstall --no-deps "
            "mpmodules. To keep both, give mpmodules a virtual environment of its own."
        )
    if folder == Path(sys.path[0] or os.curdir).resolve() and not sys.flags.safe_path:
        return (
            f"{name} beside your script shadows it. Rename {name}, or run `python -P`, which does "
            "not look there."
        )
    return (
        f"{name} in a folder of sys.path shadows it. Rename {name}, or take {folder} out of "
        "sys.path (PYTHONPATH)."
    )


def _distributions(folder: Path) -> list[str]:
    """Returns the names of the distributions in a folder, other than ours, that installed a
    `policy`.
    """
    names = []
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        top = (distribution.read_text("top_level.txt") or "").split()
        files = [file.parts[0] for file in distribution.files or ()]
        if distribution.name != "mpmodules" and {"policy", "policy.py"} & {*top, *files}:
            names.append(distribution.name)
    return sorted(names)

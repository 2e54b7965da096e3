"""Sphinx extension of the API reference: readable signatures, and layers of newer Flax releases.

Add this folder to `sys.path` and "api_reference" to `extensions` in conf.py. It sets up autodoc,
autosummary and napoleon, and their options. It adds

- signatures as they are written: annotations keep the names of the code (`DTypeLike`, not the union
  that it stands for), and layers show names and simple defaults;
- the default role `api`: a link where the name is in the reference, otherwise code;
- the directive ``since-flax``, whose content needs a release of Flax, as in

      .. since-flax:: 0.12.12

         .. autoclass:: mpmodules.nnx.RoPE
"""

from __future__ import annotations

import inspect
from importlib import metadata
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.util.docutils import SphinxDirective
from sphinx.util.inspect import stringify_signature

# Fields of `Policy` and functions of `policy` share these names: a link would guess.
AMBIGUOUS = frozenset(("param_dtype", "compute_dtype", "output_dtype", "reduction_dtype"))
FLAXS = "Flax's own description:"


# --------------------------------------------------------------------------------------------------
# Signatures
# --------------------------------------------------------------------------------------------------


class _Shown:
    """A default value, by its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list, dict, frozenset)) and not value:
        return value
    if isinstance(value, tuple):
        return _Shown(f"({', '.join(repr(_default(one)) for one in value)})")
    if isinstance(value, type) or inspect.isfunction(value):
        return _Shown(value.__name__ if "<" not in value.__qualname__ else "...")
    return _Shown(getattr(value, "__name__", "..."))


def _is_layer(obj: Any) -> bool:
    return inspect.isclass(obj) and obj.__module__.startswith("mpmodules.")


def readable_signature(obj: Any, *, is_method: bool = False) -> inspect.Signature | None:
    """Returns the signature of a function, method or class for the reference; None without one.

    Annotations are those of the code. Layers have none: Flax's are types of its own.
    """
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    if is_method and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    shown = [p.replace(default=_default(p.default)) for p in parameters if p.name != "parent"]
    result = signature.return_annotation
    if _is_layer(obj):
        shown = [p.replace(annotation=inspect.Parameter.empty) for p in shown]
    if inspect.isclass(obj):
        result = inspect.Signature.empty
    return signature.replace(parameters=shown, return_annotation=result)


def _process_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: Any, returns: Any
) -> tuple[str, str] | None:
    if what not in ("function", "method", "class", "exception") or signature is None:
        return None
    if inspect.isclass(obj) and issubclass(obj, (tuple, Warning)):
        return "", ""
    found = readable_signature(obj, is_method=what == "method")
    if found is None:
        return None
    arguments = found.replace(return_annotation=inspect.Signature.empty)
    text = stringify_signature(arguments)
    result = found.return_annotation
    if result is inspect.Signature.empty or what == "class":
        return text, ""
    return text, result if isinstance(result, str) else getattr(result, "__name__", str(result))


def _process_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Makes a heading of the line before Flax's own description of a layer."""
    lines[:] = [f".. rubric:: {line[:-1]}" if line == FLAXS else line for line in lines]


# --------------------------------------------------------------------------------------------------
# A role and a directive
# --------------------------------------------------------------------------------------------------


def api_role(
    name: str, rawtext: str, text: str, lineno: int, inliner: Any, options: Any = None, content=()
) -> tuple[list[nodes.Node], list[Any]]:
    """Links to an object of the reference where there is one of that name; otherwise code."""
    environment = inliner.document.settings.env
    if text in AMBIGUOUS or not text.replace(".", "").replace("_", "").isalnum():
        return [nodes.literal(text, text)], []
    role = environment.get_domain("py").role("obj")
    return role("py:obj", rawtext, text, lineno, inliner, options or {}, list(content))


class SinceFlax(SphinxDirective):
    """Parses its content where the installed Flax is a release or newer; otherwise says so."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        needed, installed = self.arguments[0], metadata.version("flax")
        if _numbers(installed) >= _numbers(needed):
            return self.parse_content_to_nodes()
        names = [line.partition("::")[2].strip() for line in self.content if ":: " in line]
        listed = ", ".join(f"``{name}``" for name in names if name)
        told = f"{listed}: this site was built with Flax {installed}, which lacks them."
        return self.parse_text_to_nodes(told)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


# --------------------------------------------------------------------------------------------------
# Set-up
# --------------------------------------------------------------------------------------------------


def _configure(app: Sphinx, config: Config) -> None:
    config.autodoc_member_order = "bysource"
    config.autodoc_typehints = "none"  # ours stand in the signatures; overloads are for checkers
    config.autodoc_inherit_docstrings = True
    config.autosummary_generate = False
    config.napoleon_numpy_docstring = False
    config.napoleon_use_ivar = True  # attributes as a list, not as objects of their own
    config.napoleon_use_rtype = False
    config.python_maximum_signature_line_length = 88
    config.default_role = "api"


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    for extension in ("autodoc", "autosummary", "napoleon"):
        app.setup_extension(f"sphinx.ext.{extension}")
    app.add_role("api", api_role)
    app.add_directive("since-flax", SinceFlax)
    app.connect("config-inited", _configure)
    app.connect("autodoc-process-signature", _process_signature)
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

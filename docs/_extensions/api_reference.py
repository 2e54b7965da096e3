"""Sphinx extension of the API reference: readable signatures, and layers of newer Flax releases.

Add this folder to `sys.path` and "api_reference" to `extensions` in conf.py. It sets up autodoc
and napoleon, and their options. It adds

- signatures as they are written: annotations keep the names of the code (`DTypeLike`, not the union
  that it stands for), and layers show names and simple defaults;
- the default role `api`: a link where the name is in the reference, otherwise code;
- the directive ``since-flax``, whose content needs a release of Flax, as in

      .. since-flax:: 0.12.12

         .. autoclass:: mpmodules.nnx.RoPE

- the directive ``command-help``, which shows the help of a command of ``python -m policy``.
"""

from __future__ import annotations

import inspect
import re
from importlib import metadata
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.domains.python._object import PyObject
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


def _annotation(annotation: Any, obj: Any) -> Any:
    """Returns an annotation of ours, which is a text; none of Flax's, or of a layer's fields."""
    is_layer = inspect.isclass(obj) and obj.__module__.startswith("mpmodules.")
    return annotation if isinstance(annotation, str) and not is_layer else inspect.Signature.empty


def readable_signature(obj: Any, *, is_method: bool = False) -> inspect.Signature | None:
    """Returns the signature of a function, method or class for the reference; None without one."""
    try:
        signature = inspect.signature(obj)
        if inspect.isclass(obj) and set(signature.parameters) == {"args", "kwargs"}:
            signature, is_method = inspect.signature(obj.__init__), True  # Flax's metaclass
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    if is_method and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    shown = [
        p.replace(default=_default(p.default), annotation=_annotation(p.annotation, obj))
        for p in parameters
        if p.name != "parent"
    ]
    result = _annotation(signature.return_annotation, obj)
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
    result = "" if inspect.isclass(obj) else found.return_annotation
    return stringify_signature(arguments), result if isinstance(result, str) else ""


_TERMS = re.compile(r"^ +\*{0,2}\w+(?:, \*{0,2}\w+)*:(?= )")
_UNCLOSED = re.compile(r"``([^`]+)`(?!`)")
_QUOTED = re.compile(r"(``[^`]+``|`[^`]+`)(?=[A-Za-z])|``[^`]+``|`[^`]+`")


def _process_docstring(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Makes valid reStructuredText of a docstring: ``*args, **kwargs:`` and plurals of names.

    The line before Flax's own description of a layer becomes a heading, and the attributes in it
    arguments, which they are.
    """
    is_flaxs = False
    for place, line in enumerate(lines):
        if line == FLAXS:
            line, is_flaxs = f".. rubric:: {line[:-1]}", True
        elif line == "Attributes:" and is_flaxs:
            line = "Args:"
        elif not line.lstrip().startswith((">>>", "...")):
            line = _TERMS.sub(lambda match: match[0].replace("*", r"\*"), line)
            if line.count("`") % 2:
                line = _UNCLOSED.sub(r"``\1``", line)
            else:
                line = _QUOTED.sub(lambda match: rf"{match[0]}\ " if match[1] else match[0], line)
        lines[place] = line


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


class CommandHelp(SphinxDirective):
    """Shows the output of ``python -m policy COMMAND --help``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        from policy.command_line.command import _parser

        (commands,) = (a.choices for a in _parser()._actions if isinstance(a.choices, dict))
        text = commands[self.arguments[0]].format_help()
        return [nodes.literal_block(text, text, language="text")]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


# --------------------------------------------------------------------------------------------------
# Set-up
# --------------------------------------------------------------------------------------------------


def _configure(app: Sphinx, config: Config) -> None:
    config.autodoc_member_order = "bysource"
    config.autodoc_typehints = "none"  # ours stand in the signatures; overloads are for checkers
    config.autodoc_inherit_docstrings = True
    config.napoleon_numpy_docstring = False
    config.napoleon_use_ivar = True  # attributes as a list, not as objects of their own
    config.napoleon_attr_annotations = False
    config.napoleon_use_rtype = False
    config.python_maximum_signature_line_length = 88
    config.add_module_names = True  # the names to import
    config.default_role = "api"
    config.smartquotes_action = "D"  # dashes alone: "float32" is a value


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    for extension in ("autodoc", "napoleon"):
        app.setup_extension(f"sphinx.ext.{extension}")
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.add_role("api", api_role)
    app.add_directive("since-flax", SinceFlax)
    app.add_directive("command-help", CommandHelp)
    app.connect("config-inited", _configure)
    app.connect("autodoc-process-signature", _process_signature)
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""A mypy plugin: classes of a user's own that derive from `mpmodules.nnx.Module` take
`dtype_policy=`.

In the settings of a project, in ``pyproject.toml``::

    [tool.mypy]
    plugins = ["mpmodules.mypy_plugin"]

The metaclass takes that argument, and no ``__init__`` has to declare it. mypy reads ``__init__``
and no metaclass, so without the plugin it reports ``Unexpected keyword argument "dtype_policy"``.
Everything else of mpmodules needs none.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_NAMED_OPT, ARG_STAR2, TypeInfo
from mypy.plugin import FunctionSigContext, Plugin
from mypy.types import CallableType, FunctionLike, Instance, UnionType, get_proper_type

_MODULE = "mpmodules.nnx._module.Module"


def plugin(version: str) -> type[Plugin]:
    """Returns the plugin; mypy asks for it by this name."""
    return _DtypePolicyPlugin


class _DtypePolicyPlugin(Plugin):
    def get_function_signature_hook(
        self, fullname: str
    ) -> Callable[[FunctionSigContext], FunctionLike] | None:
        """Returns the hook for the signature of a call of `fullname`, where that may be a class."""
        symbol = self.lookup_fully_qualified(fullname)  # None for a class that a function defines
        return _with_dtype_policy if symbol is None or isinstance(symbol.node, TypeInfo) else None


def _with_dtype_policy(context: FunctionSigContext) -> CallableType:
    signature = context.default_signature
    built = get_proper_type(signature.ret_type)
    if not (
        signature.is_type_obj() and isinstance(built, Instance) and built.type.has_base(_MODULE)
    ):
        return signature
    # The constructors of our own classes are to be right by themselves.
    if "dtype_policy" in signature.arg_names or built.type.fullname.startswith("mpmodules."):
        return signature
    (module,) = (base for base in built.type.mro if base.fullname == _MODULE)
    captured = module.names["dtype_policy"].type
    if captured is None:
        return signature
    policy = UnionType.make_union([captured, context.api.named_generic_type("builtins.str", [])])
    place = len(signature.arg_kinds) - (ARG_STAR2 in signature.arg_kinds)
    return signature.copy_modified(
        arg_names=[*signature.arg_names[:place], "dtype_policy", *signature.arg_names[place:]],
        arg_kinds=[*signature.arg_kinds[:place], ARG_NAMED_OPT, *signature.arg_kinds[place:]],
        arg_types=[*signature.arg_types[:place], policy, *signature.arg_types[place:]],
    )

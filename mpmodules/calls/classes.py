"""Classes of modules: whose they are, which obey policies, which of ours stand for Flax's; and
checks of how modules are written, built and ported. A mistake is rejected by its name, its value
and the way out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.core import Scope as FlaxScope

from policy.autocasting.source_lines import gives_float32, is_file_of_flax
from policy.core.messages import instruction_after, shown, warn_once
from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules
from policy.core.scope import RulesLike, computes_in_half, require_usable


def module_of(definition: Any) -> str:
    """Returns the name of the Python module that a class or function was defined in, or "" where it
    does not say.
    """
    return getattr(definition, "__module__", None) or ""


def package_of(definition: Any) -> str:
    """Returns the top-level package that a class or function was defined in, or "" where it does
    not say.
    """
    return module_of(definition).partition(".")[0]


def is_flax(definition: Any) -> bool:
    """Returns whether a class or function is Flax's own."""
    return package_of(definition) == "flax"


def is_upstream(definition: Any) -> bool:
    """Returns whether a class or function is Flax's own, or ours in its place, rather than a
    user's.
    """
    return package_of(definition) in ("flax", "mpmodules")


def upstream_attribute(package: types.ModuleType, name: str) -> Any:
    """Returns an attribute of a package of Flax's; a submodule that it lacks is imported."""
    try:
        return getattr(package, name)
    except AttributeError:
        submodule = f"{package.__name__}.{name}"
        if name.startswith("_") or importlib.util.find_spec(submodule) is None:
            raise
        return importlib.import_module(submodule)


def is_public(name: str) -> bool:
    """Returns whether a method of that name is public."""
    return name == "__call__" or not name.startswith("_")


# Our layer for each of Flax's; filled as the layers are defined.
LAYER_OF: dict[type, type] = {}


def register_layer(cls: Any) -> type | None:
    """Notes that one of our classes stands for Flax's class of its name, and returns that.

    Returns None of a class that stands for none.
    """
    for base in cls.__bases__:
        if base.__name__ == cls.__name__ and is_flax(base):
            cls._upstream_class, LAYER_OF[base] = base, cls
            return base
    return None


@functools.cache
def is_ours(cls: type | None) -> bool:
    """Returns whether a class is one of ours, rather than one of Flax's that only passes
    ``issubclass(_, Module)``.
    """
    return hasattr(cls, "_is_layer")


@functools.cache
def remedy_for(cls: type, api: str) -> str:
    """Returns the sentence on a class of modules that can obey no policy; "" of one of ours."""
    if is_ours(cls):
        return ""
    name = f"flax.{api}.{cls.__name__}" if is_flax(cls) else f"{cls.__name__} of flax.{api}"
    return (
        f"{name} obeys no policy: import {api} from mpmodules in its place, or call "
        f"mpmodules.{api}.apply_policy on the model."
    )


@functools.cache
def layer_class(cls: type) -> Any:
    """Returns our class for a Flax class, or for a user's that derives from it.

    Returns None for other classes.
    """
    return next((LAYER_OF[base] for base in cls.__mro__ if base in LAYER_OF), None)


_REFERENCES = (
    *(nnx.Pytree, nnx.Variable, nnx.State, nnx.GraphDef),
    *(linen.Module, linen.Variable, FlaxScope),
)


def is_reference(x: Any) -> bool:
    """Returns whether `x` is, or is tied to, state that a copy would lose.

    nnx Modules, Rngs and Variables are pytrees: a tree map over them gives the same dropout mask at
    every call and loses the updates of batch statistics. linen Modules, Scopes and Variables are
    references as well.
    """
    return isinstance(x, jax.Ref) or derives_from(type(x), *_REFERENCES)


# Modules of Flax's that call what they are given.
CALLERS = (
    *(linen.Sequential, linen.RNN, linen.Bidirectional),
    *(nnx.Sequential, nnx.RNN, nnx.Bidirectional),
)


@functools.cache
def derives_from(cls: type, *bases: type) -> bool:
    """As `issubclass`, but reads the order of inheritance alone.

    The metaclasses of Flax's modules ask every subclass, so `issubclass` with a class of one API
    would run code of the other.
    """
    return any(base in bases for base in cls.__mro__)


@functools.cache
def is_library(method: Any) -> bool:
    """Returns whether a method is Flax's or ours, also where it is transformed."""
    return is_upstream(inspect.unwrap(method))


def calls_users(module: Any) -> bool:
    """Returns whether one of `CALLERS` calls something else than cells of Flax's or ours."""
    if derives_from(type(module), linen.Sequential, nnx.Sequential):
        return True
    return not all(map(is_library, _cells_of(module)))


def _cells_of(module: Any) -> Iterator[Callable[..., Any]]:
    """Yields the methods of the cells that a loop calls."""
    if derives_from(type(module), linen.Bidirectional, nnx.Bidirectional):
        yield from _cells_of(module.forward_rnn)
        yield from _cells_of(module.backward_rnn)
    elif derives_from(type(module), linen.RNN, nnx.RNN):
        yield type(module.cell).__call__


class StandsForFlax(type):
    """Metaclass of our modules: a class of ours stands for Flax's class of that name in
    ``isinstance`` and ``issubclass``, so that such checks survive a port.

    The order of inheritance decides: the check of Flax's own metaclasses asks every subclass.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return type.__instancecheck__(cls.__dict__.get("_upstream_class", cls), instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls.__dict__.get("_upstream_class", cls), subclass)


class InstanceMethod:
    """A method of instances; looked up on the class, it is the function that the base class has.

    Code that asks whether a class overrides a method, as in ``type(self).encode is not
    Base.encode``, compares the functions of classes. A subclass that only puts something around a
    method must not look like an override.

    Args:
      shown: the function of the base class.
      run: the function that a call on an instance runs.
    """

    nowrap = True  # Flax wraps the descriptors of a module's class otherwise

    def __init__(self, shown: Callable[..., Any], run: Callable[..., Any]):
        self._shown, self.run = shown, run

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return self._shown if instance is None else types.MethodType(self.run, instance)


# --------------------------------------------------------------------------------------------------
# Constructors
# --------------------------------------------------------------------------------------------------


# Names under which others take a policy, or that a port may have had.
_NAMES_OF_A_POLICY = (
    "policy",
    "dtype",
    "param_dtype",
    "compute_dtype",
    "output_dtype",
    "mixed_precision",
)


def explain(error: TypeError, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Adds to a constructor's error how a policy is given, where one was given in another way."""
    said = str(error)
    if "A policy is given as dtype_policy" in said or "is a class attribute" in said:
        return  # the constructor of a part has said it
    unknown = next(
        (name for name in kwargs if f"unexpected keyword argument '{name}'" in said), None
    )
    if unknown in ("keep_inputs", "keep_outputs", "keep_params"):
        error.args = (
            f"{said}. {unknown} is a class attribute: write `{unknown} = (...)` in the body of the "
            "class.",
        )
    elif unknown and (
        unknown in _NAMES_OF_A_POLICY or difflib.get_close_matches(unknown, ["dtype_policy"])
    ):
        error.args = (f"{said}. {_way_out(cls, kwargs[unknown])}",)
    elif "positional argument" in said and (given := [arg for arg in args if _is_policy(arg)]):
        error.args = (f"{said}. {_way_out(cls, given[0])}",)


def _way_out(cls: type, value: Any) -> str:
    policy = str(value) if _is_policy(value) else "mixed_bfloat16"
    return f"A policy is given as dtype_policy: {cls.__name__}(..., dtype_policy={policy!r})."


def _is_policy(value: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        get_policy(value)
        return True
    return False


def policy_given(cls: type, given: Any) -> Policy:
    """Returns the policy that a module is given as `dtype_policy`; errors name the module."""
    try:
        return get_policy(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{cls.__name__}(dtype_policy={given!r}): {error}") from None


def reject_policy_in_body(cls: type) -> None:
    """Rejects a `dtype_policy` in the body of a class, which is no field and which nothing obeys.

    Raises:
      TypeError: there is one, without an annotation.
    """
    value, fields = vars(cls).get("dtype_policy"), vars(cls).get("__annotations__", {})
    if isinstance(value, str | Policy) and "dtype_policy" not in fields:
        raise TypeError(f"Nothing obeys {cls.__name__}.dtype_policy. {_way_out(cls, value)}")


def require_dtypes(layer: str, given: Mapping[str, Any]) -> None:
    """Rejects dtype arguments of a layer that are no dtypes.

    Args:
      layer: the name of the layer's class, for messages.
      given: the layer's arguments, by name.

    Raises:
      TypeError: `dtype` or `param_dtype` is neither None nor a dtype.
    """
    for name in ("dtype", "param_dtype"):
        value = given.get(name)
        if value is None:
            continue
        try:
            jnp.dtype(value)
        except TypeError:
            shown = f"{str(value)!r}" if isinstance(value, Policy) else repr(value)
            example = (
                f"={shown}" if _is_policy(value) else ", such as dtype_policy='mixed_bfloat16'"
            )
            raise TypeError(
                f"{layer}({name}={shown}): {name} is one dtype, such as jnp.bfloat16 or "
                f"'bfloat16'. A policy is given as dtype_policy{example}."
            ) from None


def require_names(cls: type, attribute: str, names: Any, *, example: str) -> None:
    """Rejects a class attribute that is no collection of names.

    Args:
      cls: the class.
      attribute: the attribute's name.
      names: its value.
      example: a name to show.

    Raises:
      TypeError: `names` is one text, or holds something that is no text.
    """
    is_collection = isinstance(names, Collection) and not isinstance(names, str)
    if not is_collection or not all(isinstance(name, str) for name in names):
        shown = (names,) if isinstance(names, str) else (example,)
        raise TypeError(
            f"{cls.__name__}.{attribute} should be a tuple of names, but got {names!r}: write "
            f"{attribute} = {shown!r}."
        )


@functools.cache  # errors are not cached
def require_attributes(cls: Any) -> None:
    """Rejects a class whose `keep_inputs` or `keep_outputs` names no argument of its methods, or
    whose `own_code` is no option.

    Raises:
      TypeError: `keep_inputs` is one text, or holds something that is no text; or `keep_outputs` is
        no mapping from indices or keys to names.
      ValueError: no public method takes an argument of a name in one of them; or `own_code` is
        neither None, "autocast" nor "keep".
    """
    if cls.own_code not in (None, "autocast", "keep"):
        raise ValueError(
            f"{cls.__name__}.own_code should be 'autocast', 'keep' or None, but got "
            f"{cls.own_code!r}."
        )
    inputs, outputs = cls.keep_inputs or (), cls.keep_outputs or {}
    require_names(cls, "keep_inputs", inputs, example="positions")
    is_mapping = isinstance(outputs, Mapping)
    if not is_mapping or not all(isinstance(name, str) for name in outputs.values()):
        raise TypeError(
            f"{cls.__name__}.keep_outputs should map outputs, by index or key, to the arguments "
            f"whose dtypes they keep, but got {outputs!r}: write keep_outputs = {{1: 'cache'}}."
        )
    known = _arguments_of(cls) if inputs or outputs else None
    for attribute, names in (("keep_inputs", inputs), ("keep_outputs", outputs.values())):
        unknown = [name for name in names if known is not None and name not in known]
        if unknown:
            raise ValueError(
                f"{cls.__name__}.{attribute} names {', '.join(map(repr, unknown))}, but its public "
                f"methods take {', '.join(sorted(known or ())) or 'no arguments'}."
            )


def _arguments_of(cls: type) -> set[str] | None:
    """Returns the names of arguments of a class's boundaries; None where one takes any name."""
    names: set[str] = set()
    for attribute in {name for base in cls.__mro__ for name in vars(base)}:
        method = inspect.getattr_static(cls, attribute)
        if not hasattr(method, "_policy_boundary"):
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return None
        names |= {p.name for p in parameters}
    return names


def reject_policy_set_by_hand(module: Any, captured: Policy | None) -> None:
    """Rejects a module whose attribute `dtype_policy` was set to another policy than it was built
    under.

    Raises:
      ValueError: the policy came too late for the parts of the module.
    """
    stored = vars(module).get("dtype_policy")
    if stored is None or (_is_policy(stored) and get_policy(stored) == captured):
        return
    raise policy_set_by_hand(module, stored)


def policy_set_by_hand(module: Any, stored: Any) -> ValueError:
    """Returns the error of a policy that was set as an attribute of a module."""
    name, shown = type(module).__name__, f"'{stored}'" if stored is not None else "None"
    return ValueError(
        f"{name}.dtype_policy was set to {shown} by hand, but no layer inside obeys that, "
        "because a policy is captured while a module is built. Build it with "
        f"{name}(..., dtype_policy={shown}), or call mpmodules.nnx.apply_policy(model, {shown})."
    )


# --------------------------------------------------------------------------------------------------
# Class attributes
# --------------------------------------------------------------------------------------------------


@functools.cache
def is_written_by_user(cls: type, upstream: type) -> bool:
    """Returns whether a class of ours is one that a user wrote, and derives from none of Flax's
    layers.

    Args:
      cls: a class of modules.
      upstream: Flax's base class of modules.
    """
    return getattr(cls, "_upstream_class", None) is upstream and package_of(cls) != "mpmodules"


def require_keep_params(cls: type) -> None:
    """Rejects a class whose own `keep_params` is no collection of names.

    Raises:
      TypeError: it is one text, or holds something that is no text.
    """
    require_names(cls, "keep_params", vars(cls).get("keep_params", ()), example="scale")


def warn_of_unknown_names(cls: type, params: Iterable[str]) -> None:
    """Warns of names in a class's `keep_params` that its modules have no parameter of.

    Args:
      cls: the class.
      params: the names of the modules' parameters.
    """
    keep: Collection[str] = getattr(cls, "keep_params", ())
    known = sorted(set(params))
    unknown = sorted(set(keep) - set(known))
    if unknown:
        warn_once(
            f"{cls.__name__}.keep_params names {', '.join(unknown)}, but no {cls.__name__} has "
            f"such a parameter. It has: {', '.join(known) or 'none'}."
        )


# --------------------------------------------------------------------------------------------------
# Ports
# --------------------------------------------------------------------------------------------------


OwnCode = Literal["autocast", "keep"] | None


@dataclasses.dataclass(frozen=True)
class PortOptions:
    """The arguments of `apply_policy`, checked."""

    policy: Policy
    rules: PolicyRules | None
    keep_explicit: bool
    own_code: Literal["autocast", "keep"]


def port_options(
    policy: Policy | str, rules: RulesLike | None, *, keep_explicit: bool, own_code: OwnCode
) -> PortOptions:
    """Returns the arguments of `apply_policy`, checked.

    `own_code` is "keep" where autocast has nothing to do.

    Raises:
      ValueError: options contradict each other, `own_code` is neither None, "autocast" nor "keep",
        or the policy or the rules are malformed.
    """
    policy = require_usable(get_policy(policy))
    rules = rules if rules is None or isinstance(rules, PolicyRules) else PolicyRules(rules)
    for _, rule_policy in rules or ():
        require_usable(rule_policy)
    if own_code not in (None, "autocast", "keep"):
        raise ValueError(f"own_code should be 'autocast', 'keep' or None, but got {own_code!r}.")
    if own_code == "autocast" and keep_explicit:
        raise ValueError(
            "own_code='autocast' runs a model's own code in the policy's dtypes, whatever the "
            "code names: leave out keep_explicit=True, or pass own_code='keep'."
        )
    is_kept = own_code == "keep" or keep_explicit or not computes_in_half(policy, rules)
    return PortOptions(policy, rules, keep_explicit, "keep" if is_kept else "autocast")


class GivenDtypes:
    """The dtype arguments of the layers of a port, which the policy replaces. Warns where they
    differ: a layer in float32 beside others was meant.

    Where all others are float32, too, a dtype of its own in the source was meant, such as
    ``dtype=float32`` or ``dtype=self.head_dtype``, and that of the whole model, ``self.dtype``, was
    not.

    Args:
      model: the model's class.
      policy: the policy.
      is_kept: whether an explicit `dtype` holds.
    """

    def __init__(self, model: type, policy: Policy, *, is_kept: bool):
        self.model, self.policy, self.is_kept = model, policy, is_kept
        self.seen: dict[str, str] = {}  # a layer's class, by what it was given
        self.is_mixed = False  # whether a layer was given another dtype than float32

    def note(self, layer: Any, dtype: Any) -> None:
        """Notes a layer that was given a `dtype`, or None, and perhaps a `param_dtype`."""
        if (cell := getattr(layer, "cell", None)) is not None:
            self.note(cell, getattr(cell, "dtype", None))
        if not hasattr(layer, "param_dtype"):
            return
        param_dtype = jnp.dtype(layer.param_dtype or jnp.float32)
        dtype = None if dtype is None or self.is_kept else jnp.dtype(dtype)
        self.is_mixed |= dtype is not None and dtype != jnp.float32
        lost = [
            f"{name}={given.name}"
            for name, given, default, held in (
                ("dtype", dtype, None, self.policy.compute_dtype),
                ("param_dtype", param_dtype, jnp.float32, self.policy.param_dtype),
            )
            if given is not None and given not in (default, held)
        ]
        self.seen.setdefault(", ".join(lost), type(layer).__name__)
        if len(self.seen) > 1:
            for given, name in self.seen.items():
                if given and (self.is_mixed or given != "dtype=float32" or self._says(layer)):
                    warn_once(
                        f"apply_policy({self.model.__name__}) gives all layers the dtypes of "
                        f"'{self.policy}', also {name}({given}), which differs from other layers. "
                        "If that is meant, write a rule for it, such as {'head': 'float32'}, or "
                        "pass keep_explicit=True."
                    )

    def _says(self, layer: Any) -> bool:
        """Returns whether a file of the model gives a layer a dtype of its own."""
        classes = {self.model, type(getattr(layer, "parent", self.model))} - {type(None)}
        modules = (sys.modules.get(cls.__module__) for cls in classes)
        files = {getattr(module, "__file__", None) or "" for module in modules}
        users = [file for file in files if not is_file_of_flax(file)]
        return not users or any(map(gives_float32, users))


def warn_where_dropped() -> None:
    """Warns where the `apply_policy` that calls this was called as a statement."""
    if instruction_after(sys._getframe(2)) == "POP_TOP":
        warn_once(
            "apply_policy returns another model, which was dropped, and leaves the one given as it "
            "is. Write `model = apply_policy(model, policy)`."
        )


def not_a_model(given: Any, expected: str, *, other: str) -> TypeError:
    """Returns the error of an `apply_policy` that is handed something else than a model.

    Args:
      given: the argument.
      expected: the kind of model that is taken.
      other: the package whose `apply_policy` takes the models of the other API.
    """
    if isinstance(given, type):
        return TypeError(
            f"apply_policy takes {expected} here, but got the class {given.__name__}: make an "
            "instance of it."
        )
    is_model = any(
        package_of(cls) == "flax" and cls.__name__ == "Module" for cls in type(given).__mro__
    )
    hint = f"Use {other}.apply_policy" if is_model else "Call apply_policy(model, policy)"
    return TypeError(
        f"apply_policy takes {expected} here, but got {shown(given)} of type "
        f"{type(given).__name__}. {hint}."
    )

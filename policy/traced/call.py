"""The program of a call under a policy: what runs in half precision, as `compare` and `suggest` take it apart."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from policy._jaxpr.module_names import make_jaxpr
from policy._jaxpr.primitives import MATMULS
from policy._jaxpr.subprograms import opened
from policy._jaxpr.trace import Arguments, lowered
from policy._jaxpr.upcast import dtype_of, dtypes_of, is_half
from policy._jaxpr.walk import walk
from policy.autocast.transform import autocast
from policy.callables import require_function
from policy.compare.pairing import Reference, reference_of
from policy.parameters import Params
from policy.policy import Policy, get_policy
from policy.precedence import DtypePolicyWarning
from policy.rules import PolicyRules
from policy.scope import RulesLike, require_usable, use_policy
from policy.traced.float32 import in_float32, wide_arguments
from policy.traced.gradients import explicit_or_lowered, places_of_parameters

Route = Literal["as written", "scope", "autocast"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A call as a program of its arrays.

    Attributes:
      jaxpr: the closed jaxpr.
      arguments: what it is called with.
      outputs: the name of each output.
      gradients: the name of each gradient, which come after the outputs.
      route: how it came to be half: as it is written, by the scope of a policy, or by autocast.
      reference: what the function computes in float32, paired with the jaxpr; None where it can't be traced so.
      refused: why it can't be.
    """

    jaxpr: Any
    arguments: Arguments
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    route: Route
    reference: Reference | None = None
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call to take apart.

    Attributes:
      fn: a function of arrays alone, or of trees of them.
      arguments: what it is called with.
      params: which of its arguments are parameters, as autocast takes it.
      is_lowered: whether the first of its arguments are the state of modules, or what the function held.
      loss_scale: what the loss is multiplied by before it is differentiated; None for no gradients.
    """

    fn: Callable[..., Any]
    arguments: Arguments
    params: Params
    is_lowered: bool
    loss_scale: float | None

    @classmethod
    def of(cls, what: str, fn: Any, args: Any, kwargs: Any, params: Params, loss_scale: float | None) -> Call:
        """The call of any function or module.

        Raises:
          TypeError: `fn` is no function, or it is called with no arrays, or with shapes; `params` is of no kind that
            says which arguments are parameters.
          ValueError: `params` names arguments of a call of modules.
        """
        require_function(fn, what)
        call = lowered(fn, args, kwargs)
        params = explicit_or_lowered(params, call)
        if call is not None:
            fn, args, kwargs = _returning(call.pure, call.result), call.args, call.kwargs
        arguments = Arguments.of(args, kwargs)
        if not arguments.arrays:
            raise TypeError(f"{what} measures what a function does to arrays, but was given none to call it with.")
        for name, array in zip(arguments.names(), arguments.arrays, strict=True):
            if isinstance(array, jax.ShapeDtypeStruct):
                raise TypeError(
                    f"{what} runs the function, but {name} is a shape, {array.dtype.name}{list(array.shape)}: give an "
                    "array. policy.audit does with shapes."
                )
        return cls(fn, arguments, params, call is not None, loss_scale)

    def differentiated(self) -> list[int]:
        """Returns the places of the arrays that gradients are taken by."""
        args, kwargs = self.arguments.filled(self.arguments.arrays)
        return places_of_parameters(self.fn, self.params, args, kwargs, self.arguments)

    def traced(self, policy: Policy | None, rules: PolicyRules | None, route: Route) -> Program:
        """The program of the call."""
        fn: Any = self.fn
        if route == "autocast":
            fn = autocast(fn, policy, params=self.params, rules=rules)
        flat = self._flat(fn) if self.loss_scale is None else self._with_gradients(fn)
        if route == "scope":
            with use_policy(policy, rules):
                jaxpr, shape = make_jaxpr(flat, return_shape=True)(*self.arguments.arrays)
        else:
            jaxpr, shape = make_jaxpr(flat, return_shape=True)(*self.arguments.arrays)
        names = [name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(shape[0])]
        taken = self.differentiated() if shape[1] else []
        inputs = input_paths(self.arguments, self.is_lowered)
        gradients = [inputs[i] for i in taken]
        return Program(jaxpr, self.arguments, tuple(names), tuple(gradients), route)

    def _flat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def flat(*arrays: Any) -> Any:
            args, kwargs = self.arguments.filled(arrays)
            return fn(*args, **kwargs), []

        return flat

    def _with_gradients(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        taken, scale = self.differentiated(), self.loss_scale
        if not taken:
            raise TypeError("There is no floating array among the arguments to take gradients of.")

        def flat(*arrays: Any) -> Any:
            def loss(taken_arrays: list[Any]) -> tuple[Any, Any]:
                every = list(arrays)
                for i, array in zip(taken, taken_arrays, strict=True):
                    every[i] = array
                args, kwargs = self.arguments.filled(every)
                out = fn(*args, **kwargs)
                return _loss(out).astype(jnp.float32) * scale, out

            gradients, out = jax.grad(loss, has_aux=True)([arrays[i] for i in taken])
            return out, gradients

        return flat


def _loss(out: Any) -> Any:
    """The loss in what a function returned: itself, or the first of a tuple.

    Raises:
      TypeError: it is no floating scalar.
    """
    loss = out
    while isinstance(loss, tuple) and loss:
        loss = loss[0]
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        found = type(loss).__name__ if dtype is None else f"{dtype.name}{list(shape or ())}"
        raise TypeError(
            f"Gradients are those of a loss, one floating number, or (loss, aux), but the function returned {found}. "
            "Return the loss, or leave out backward=True."
        )
    return loss


def _returning(pure: Callable[..., Any], result: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function without the state that it hands out: that is no result to measure."""
    return lambda *args, **kwargs: result(pure(*args, **kwargs))


# flax.nnx hands in state: by the module, or the place of the argument that it is of; its numbers are their `value`.
_OF_STATE = re.compile(r"(?:0|1/\d+)/(.+?)(?:/value)?")


def input_paths(arguments: Arguments, is_lowered: bool) -> list[str]:
    """The arrays as paths in the argument that holds them: ``params/Dense_0/kernel``; ``args[1]`` for an argument.

    Args:
      arguments: of a call.
      is_lowered: whether their first are the state of modules.
    """
    tree = jax.tree.unflatten(arguments.treedef, list(arguments.is_array))
    keys = [path for path, dynamic in jax.tree_util.tree_leaves_with_path(tree) if dynamic]
    paths = [name_of(path[2:]) or name for path, name in zip(keys, arguments.names(), strict=True)]
    matches = [_OF_STATE.fullmatch(path) if is_lowered else None for path in paths]
    short = [path if match is None else match[1] for path, match in zip(paths, matches, strict=True)]
    return short if len(set(short)) == len(set(paths)) else paths


def name_of(path: Any) -> str:
    """Returns the path of a leaf, its keys joined by ``/``; "" for the tree itself."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def checked_policy(policy: Policy | str | None) -> Policy | None:
    """The policy itself, from its text form too.

    Raises:
      TypeError, ValueError: it is none, or can't be honoured here.
    """
    return None if policy is None else require_usable(get_policy(policy))


def checked_rules(rules: RulesLike | None, policy: Policy | str | None) -> PolicyRules | None:
    """The rules themselves.

    Raises:
      TypeError, ValueError: they are none, or stand without a policy.
    """
    if rules is None:
        return None
    if policy is None:
        raise ValueError("rules= says what differs from a policy: give policy= with it, as policy='mixed_bfloat16'.")
    return rules if isinstance(rules, PolicyRules) else PolicyRules(rules)


class _Listening(PolicyRules):
    """No rules, but the paths of the modules that ask for theirs."""

    __slots__ = ("heard",)
    heard: set[str]

    def __init__(self, heard: set[str]):
        super().__init__([("(?!)", "float32")], strict=False)
        object.__setattr__(self, "heard", heard)

    def rule_for(self, path: str | None, cls: type | None = None, *, model: str = "") -> None:
        if path is not None:
            self.heard.add(path)


def program_of(
    call: Call, policy: Policy | None, modules: set[str] | None = None, rules: PolicyRules | None = None
) -> Program:
    """The program under a policy, paired with the function in float32.

    It is that of the layers that obey the policy's scope, or else autocast's.

    Args:
      call: what to trace.
      policy: None for the program as it is written.
      modules: where to put the paths of the modules that obey rules, if they are asked for.
      rules: the rules beside the policy, where the paths are not asked for.
    """
    return _with_reference(call, _in_half(call, policy, modules, rules))


def _in_half(call: Call, policy: Policy | None, modules: set[str] | None, rules: PolicyRules | None) -> Program:
    if policy is None:
        return call.traced(None, None, "as written")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DtypePolicyWarning)
        program = call.traced(policy, rules if modules is None else _Listening(modules), "scope")
    if is_half(policy.compute_dtype) and not multiplies_in_half(program.jaxpr):
        return call.traced(policy, rules, "autocast")
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=5)
    return program


def _with_reference(call: Call, program: Program) -> Program:
    """The program, with what the same call computes when it is traced in float32.

    Code that asks for a half dtype by name may have no such trace, whatever it raises then.
    """
    if not any(map(is_half, dtypes_of(opened(program.jaxpr)[0]))):
        return program  # it is float32's
    arguments = dataclasses.replace(call.arguments, arrays=wide_arguments(call.arguments.arrays))
    try:
        with in_float32(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wide = dataclasses.replace(call, arguments=arguments).traced(None, None, "as written")
    except Exception as error:
        return dataclasses.replace(program, refused=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    if wide.outputs != program.outputs or wide.gradients != program.gradients:
        return dataclasses.replace(program, refused="it returns other values than in half precision")
    return dataclasses.replace(program, reference=reference_of(program.jaxpr, wide.jaxpr))


def multiplies_in_half(jaxpr: Any) -> bool:
    """Returns whether a program has a matmul or convolution of half operands."""
    return any(
        site.name in MATMULS and any(is_half(d) for d in map(dtype_of, site.equation.invars) if d is not None)
        for site in walk(jaxpr)
    )


def short_text(policy: Policy) -> str:
    """The policy's name among the presets, or else its text form."""
    presets = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16", "float16")
    return next((name for name in presets if get_policy(name) == policy), str(policy))

"""autocast: mixed precision for code that can't be edited, as a function transformation."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import convert_element_type_p

from policy.autocasting.calls import HANDLERS, Recent
from policy.autocasting.evaluator import Evaluator
from policy.autocasting.own_code import operands_kept
from policy.autocasting.parameters import (
    ParamsArgument,
    other_state,
    parameters,
    require_params,
    warn_of_nnx_optimizer,
    warn_of_optimizer,
)
from policy.autocasting.report import Report
from policy.autocasting.requests import retracing, with_requests
from policy.autocasting.settings import Places, Settings
from policy.autocasting.sites import rejecting_sites
from policy.autocasting.values import CastValue, cast
from policy.core.dtypes import HIGHEST, precision_around
from policy.core.messages import require_function, warn_once
from policy.core.policy import Policy, get_policy
from policy.core.rules import PolicyRules, pattern_text
from policy.core.scope import RulesLike, computes_in_half, current_scope, enter, require_usable
from policy.programs.dtypes import F32, is_floating_dtype
from policy.programs.frameworks import make_jaxpr
from policy.programs.jaxprs import is_unwritten, opened, repeated_programs
from policy.programs.marks import ISLAND, computes_in
from policy.programs.primitives import known_primitives
from policy.programs.rewriting.outlining import outlined
from policy.programs.thread import during
from policy.programs.tracing.pure_calls import Arguments
from policy.programs.tracing.trace import (
    function_name,
    is_staged,
    lowered,
    with_static,
    without_static,
)
from policy.quantized.params import dequantize_params

_MOST_PROGRAMS = 64  # kept for each transformed function, one for each set of static arguments


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options of an autocast.

    Attributes:
      policy: the policy, or None for the one in force.
      params: the parameters among the arguments, as in `autocast`.
      settings: everything else.
      states: the positions of arguments that are state of modules other than parameters.
    """

    policy: Policy | None
    params: Any
    settings: Settings
    states: tuple[int, ...] = ()

    def resolved(self) -> Settings | None:
        """Returns the settings in force, or None if there is no policy."""
        scope = current_scope()
        if self.policy is not None:
            return dataclasses.replace(self.settings, policy=require_usable(self.policy))
        if scope.policy is None:
            return None
        rules = scope.rules if self.settings.rules is None else self.settings.rules
        return dataclasses.replace(self.settings, policy=require_usable(scope.policy), rules=rules)


def autocast(
    fn: Any = None,
    policy: Policy | str | None = None,
    *,
    params: ParamsArgument = None,
    rules: RulesLike | None = None,
    preset: Literal["memory", "conservative"] = "memory",
    allow: Collection[str] = (),
    deny: Collection[str] = (),
    opaque: Collection[str] = (),
    normalizes: Collection[str] = (),
    on_unknown: Literal["opaque", "raise"] = "opaque",
    enabled: bool = True,
) -> Any:
    """Runs matmuls and convolutions of `fn` in compute_dtype, sensitive operations in float32.

    The function is traced in float32, half-precision arguments included, and that program is
    evaluated with casts inserted. So its code needn't know about dtypes, and every JAX
    transformation applies to the result: jit, grad, vmap, scan, checkpoint, shard_map, in either
    order. It is compiled, and retraced for other shapes or another policy only; the requirements of
    `jax.jit` on functions apply. An nnx module among the arguments is updated; an `nnx.State` never
    is, as under `jax.jit` and unlike in an eager call that merges it. Put it around the loss, not
    around the train step: an optimizer update inside would run in half precision.

    >>> import jax.numpy as jnp
    >>> import policy
    >>> fn = policy.autocast(lambda w, x: jnp.dot(x, w), "mixed_bfloat16", params=0)
    >>> w, x = jnp.eye(4), jnp.ones((2, 4))
    >>> fn(w, x).dtype
    dtype('float32')
    >>> print(fn.explain(w, x))
    parameters: args[0]
      dot_general     1  bfloat16 -> bfloat16

    Args:
      fn: any function of arrays. If left out (or with the policy in its place), a decorator is
        returned.
      policy: a Policy or its text form; matmuls run in its compute_dtype. None is the one in force
        at the call, with its rules; without any, `fn` runs unchanged, with a `DtypePolicyWarning`.
      params: the arguments that are parameters, whose float32 yields to half-precision activations:
        positions, names of arguments, or a predicate on leaves. None: the `params` collection of a
        mapping that has one, otherwise the first positional argument if it is a container.
        Constants, positions and state that the call does not write meet activations in float32, and
        the result is half precision for what follows. Other arguments keep it in float32.
      rules: policies by module path, as everywhere: ``{"decoder/layer_3/.*": "f32"}``. A rule with
        a half-precision output_dtype for layers that are scanned over narrows the carry between
        them: ``{"layers": "bf16"}``. Other loops, and scanned layers without a rule, keep the
        dtypes of their carries.
      preset: "memory" keeps activations in half precision between matmuls; "conservative" is
        PyTorch's promotion, where params and normalizations make them float32 again.
      allow, deny, opaque: names of primitives to run in compute_dtype, in float32, or as they were
        traced.
      normalizes: module paths, as patterns of rules, of normalizations that are not recognized:
        under "memory" they run in float32 and return half precision. Quotients of x, or of x minus
        its mean, and a root of its second moment are recognized under any name.
      on_unknown: whether an unknown primitive runs as it was traced, or raises.
      enabled: False leaves `fn` as it is, in float32 also inside another autocast.

    Returns:
      A function of the same signature. Its outputs have the dtypes of `fn`'s.

    Raises:
      TypeError: `fn` is not a function, or `rules`, `allow`, ... are not of the kinds above.
      ValueError: a policy without a floating compute_dtype, an unknown primitive or preset, a
        primitive given twice; at the call, a rule or a path in `normalizes` that matches nothing.
    """
    if isinstance(fn, (str, Policy)) and policy is None:
        fn, policy = None, fn
    require_params(params)
    policy = None if policy is None else get_policy(policy)
    settings = Settings(
        policy or get_policy("float32"),
        None if rules is None else _checked_rules(rules),
        _one_of("preset", preset, "memory", "conservative") == "memory",
        known_primitives(allow, "allow"),
        known_primitives(deny, "deny"),
        known_primitives(opaque, "opaque"),
        _one_of("on_unknown", on_unknown, "opaque", "raise") == "raise",
        _checked_paths(normalizes),
    )
    twice = (settings.allow & settings.deny) | (settings.opaque & (settings.allow | settings.deny))
    if twice:
        raise ValueError(
            f"{', '.join(map(repr, sorted(twice)))} is in more than one of allow, deny and opaque: "
            "keep it in one of them."
        )
    transform = _Decorator(
        _transformed, options=_Options(policy, params, settings), enabled=enabled
    )
    return transform if fn is None else transform(fn)


class _Decorator(functools.partial):
    """`autocast` without a function: it decorates, and is no block."""

    def __enter__(self) -> None:
        raise TypeError("autocast(fn, policy) opens no block. Write `with use_policy(policy):`.")

    def __exit__(self, *_: Any) -> None: ...


def _one_of(argument: str, value: Any, *known: str) -> str:
    if value not in known:
        first, second = map(repr, known)
        raise ValueError(f"{argument} should be {first} or {second}, but got {value!r}.")
    return value


def _checked_rules(rules: RulesLike) -> PolicyRules:
    checked = rules if isinstance(rules, PolicyRules) else PolicyRules(rules)
    classes = [pattern_text(pattern) for pattern, _ in checked if isinstance(pattern, type)]
    if classes:
        raise TypeError(
            "autocast's rules select module paths, not classes, but got "
            f"{', '.join(classes)}: give a path pattern, as in {{'.*/norm': 'f32'}}."
        )
    return checked


def _checked_paths(normalizes: Any) -> PolicyRules | None:
    is_collection = isinstance(normalizes, Collection) and not isinstance(normalizes, (str, bytes))
    if not is_collection or not all(isinstance(pattern, str) for pattern in normalizes):
        raise TypeError(
            "normalizes should be a collection of module paths, such as "
            f"('blocks/.*/scale_shift',), but got {normalizes!r}."
        )
    return PolicyRules(dict.fromkeys(normalizes, "float32")) if normalizes else None


def _transformed(fn: Any, *, options: _Options, enabled: bool) -> Any:
    require_function(fn, "autocast")
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled should be True or False, but got {enabled!r}.")
    if enabled:
        return _Autocast(fn, options).wrapper()

    @functools.wraps(fn)
    def island(*args: Any, **kwargs: Any) -> Any:
        scope = dataclasses.replace(current_scope(), attention_policy=None)
        # A surrounding autocast leaves it in float32.
        with jax.named_scope(ISLAND), enter(scope):
            return fn(*args, **kwargs)

    return island


class _Autocast:
    """A transformed function, and the programs compiled for its static arguments."""

    def __init__(self, fn: Any, options: _Options):
        self.fn, self.options = fn, options
        self.programs: Recent[Any] = Recent(_MOST_PROGRAMS)
        self.pure: Recent[_Autocast] = Recent(_MOST_PROGRAMS)

    def wrapper(self) -> Callable[..., Any]:
        @functools.wraps(self.fn, updated=())
        def transformed(*args: Any, **kwargs: Any) -> Any:
            settings = self._settings()
            if settings is None:
                warn_once(
                    f"autocast({function_name(self.fn)}) has no policy of its own, and none is in "
                    "force here, so the function runs unchanged. Give it one, as in autocast(fn, "
                    "'mixed_bfloat16'), or call it in a use_policy block."
                )
                return self.fn(*args, **kwargs)
            if current_scope().in_full_precision and computes_in_half(settings.policy):
                warn_once(
                    f"autocast({function_name(self.fn)}) is called in full_precision(), and its "
                    f"own policy wins, '{settings.policy}'. Call the function without autocast "
                    "for float32."
                )
            warn_of_nnx_optimizer(args, kwargs)
            target, arguments, finish = self.lowered(args, kwargs)
            in_place = any(map(is_staged, arguments.arrays))
            program = target._rewritten if in_place else target._program
            # a trace around it in float32 can't tell that float32 is asked for: the mark does
            is_asked = in_place and settings.policy.compute_dtype == F32
            mark = computes_in(F32, None, HIGHEST) if is_asked else contextlib.nullcontext()
            with mark:
                return finish(without_static(program(arguments, settings)(*arguments.arrays)))

        transformed.explain = self.explain  # type: ignore[attr-defined]
        return transformed

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Reports the casts of a call without running it; the arguments may be shapes."""
        settings, report = self._settings(), Report()
        if settings is not None:
            target, arguments, _ = self.lowered(args, kwargs)
            jax.eval_shape(target._rewritten(arguments, settings, report), *arguments.arrays)
            report.complete()
        return report

    def _settings(self) -> Settings | None:
        settings, around = self.options.resolved(), precision_around()
        return None if settings is None else dataclasses.replace(settings, around=around)

    def lowered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Autocast, Arguments, Callable[[Any], Any]]:
        """Returns a pure function for the call, its arguments, and a function for its result.

        The first argument of a pure function that the call is lowered to is the parameters. Its
        autocast is not cached if its key has no hash.
        """
        call = lowered(self.fn, args, kwargs)
        if call is None:
            return self, Arguments.of(args, kwargs), lambda out: out
        options = dataclasses.replace(self.options, params=0, states=call.states)
        target = _Autocast(call.pure, options)
        with contextlib.suppress(TypeError):
            target = self.pure.get(call.key) or self.pure.keep(call.key, target)
        return target, Arguments.of(call.args, call.kwargs), call.finish

    def _program(self, arguments: Arguments, settings: Settings) -> Any:
        key = (arguments.key, settings)
        try:
            program = self.programs.get(key)
        except TypeError:  # a static argument that has no hash
            return self._rewritten(arguments, settings)
        if program is None:
            # the program outlives the arrays of its first call
            fixed = dataclasses.replace(arguments, arrays=[])
            program = self.programs.keep(key, jax.jit(self._rewritten(fixed, settings)))
        return program

    def _rewritten(
        self, arguments: Arguments, settings: Settings, report: Report | None = None
    ) -> Callable[..., Any]:
        """Returns the function of the arrays alone that traces `fn` and evaluates its program."""

        def flat(*arrays: Any, upcasts: bool = False) -> Any:
            given = arguments.filled(arrays)
            args, kwargs = dequantize_params(given) if upcasts else given
            return with_static(self.fn(*args, **kwargs))

        def rewritten(*arrays: Any) -> Any:
            attending = dataclasses.replace(
                current_scope(), attention_policy=settings.attention_policy
            )
            with (
                rejecting_sites(function_name(self.fn)),
                during(autocast=self.options.policy),
                enter(attending),
            ):
                compute, run = settings.policy.compute_dtype, flat
                try:
                    jaxpr, shape = _traced_in_float32(run, arrays)
                except ValueError as error:  # functions of `lax` take no quantized array
                    if "__jax_array__" not in str(error):
                        raise
                    run = functools.partial(flat, upcasts=True)
                    jaxpr, shape = _traced_in_float32(run, arrays)
                jaxpr = with_requests(jaxpr, lambda: _traced_in(compute, run, arrays), compute)
            args, kwargs = arguments.filled(arrays)
            marks = parameters(self.fn, self.options.params, args, kwargs)
            states = other_state(args, kwargs, self.options.states)
            params = list(itertools.compress(marks, arguments.is_array))
            is_state = itertools.compress(states, arguments.is_array)
            warn_of_optimizer(args, kwargs)
            if report is not None:
                report.parameters = list(itertools.compress(arguments.names(), params))
            # A report notes each equation at its path, and rules may tell the paths inside apart.
            shares = report is None and settings.rules is None and settings.normalizes is None
            body, consts = opened(outlined(jaxpr) if shares else jaxpr)
            places = Places(settings, repeated_programs(body) if shares else frozenset())
            evaluator = Evaluator(settings, places, HANDLERS, report)
            values = []
            for array, *facts in zip(arrays, params, is_state, is_unwritten(body), strict=True):
                yields, is_buffer, is_fixed = (fact and settings.narrows for fact in facts)
                is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
                array = array if is_key else jnp.asarray(array)
                values.append(CastValue(array, yields, is_table=is_buffer and is_fixed))
            outputs = evaluator.run(body, list(map(evaluator.constant, consts)), values)
            if self.options.settings.rules is not None:
                places.check(settings.rules)  # those of a scope may be meant for other code
            places.check(settings.normalizes)
            results = jax.tree.unflatten(jax.tree.structure(shape), [one.array for one in outputs])
            return jax.tree.map(_like, results, shape)

        rewritten.__name__ = function_name(self.fn)
        return rewritten


def _traced_in_float32(flat: Callable[..., Any], arrays: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the program of a function, half-precision arguments as float32, and its results.

    The results have the dtypes that the function gives them for its arguments as they are. A
    function that rejects half precision, such as an FFT, returns what it returns for float32, and
    state, such as a cache, in the dtype in which it came.
    """
    widened = functools.partial(jax.eval_shape, lambda array: array.astype(F32))
    wide = [widened(array) if _is_half(array) else array for array in arrays]
    jaxpr, shape = make_jaxpr(flat, return_shape=True)(*wide)
    if any(map(_is_half, arrays)):
        try:
            shape = jax.eval_shape(flat, *arrays)
        except (TypeError, ValueError, NotImplementedError):
            leaves, structure = jax.tree.flatten(shape)
            kept = operands_kept(opened(jaxpr)[0], len(leaves), first=-1)
            pairs = zip(leaves, kept, strict=True)
            shape = structure.unflatten(
                leaf if i is None else leaf.update(dtype=arrays[i].dtype) for leaf, i in pairs
            )
    return jaxpr, shape


def _traced_in(dtype: np.dtype, flat: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    """Returns the program of a function of floating arrays in a dtype."""

    def narrowed(array: Any) -> Any:
        is_float = is_floating_dtype(getattr(array, "dtype", np.bool_)) and array.dtype.itemsize > 1
        return jax.eval_shape(lambda array: array.astype(dtype), array) if is_float else array

    with enter(retracing(current_scope(), dtype)):
        return make_jaxpr(flat)(*map(narrowed, arrays))


def _is_half(array: Any) -> bool:
    dtype = getattr(array, "dtype", np.bool_)
    return is_floating_dtype(dtype) and dtype.itemsize == 2


def _like(array: Any, shape: jax.ShapeDtypeStruct) -> Any:
    """Casts an output to the dtype and weak type that it was traced with."""
    array = cast(array, shape.dtype) if is_floating_dtype(shape.dtype) else array
    if not shape.weak_type or jax.typeof(array).weak_type:
        return array
    return convert_element_type_p.bind(array, new_dtype=shape.dtype, weak_type=True, sharding=None)

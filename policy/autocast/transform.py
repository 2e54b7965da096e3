"""autocast: mixed precision for code that nobody can edit, as a function transformation."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core.primitives import convert_element_type_p

from policy._jaxpr.module_names import make_jaxpr
from policy._jaxpr.primitives import known_primitives
from policy._jaxpr.subprograms import opened
from policy._jaxpr.trace import Arguments, lowered
from policy.autocast import calls as calls
from policy.autocast.evaluator import Evaluator
from policy.autocast.memoization import repeated
from policy.autocast.report import Report
from policy.autocast.settings import Places, Settings
from policy.autocast.values import Value, cast, is_floating
from policy.callables import require_function
from policy.islands import ISLAND
from policy.parameters import Params, parameters, require_params, warn_of_nnx_optimizer, warn_of_optimizer
from policy.policy import Policy, get_policy
from policy.precedence import warn_once
from policy.rules import PolicyRules, name_of
from policy.scope import RulesLike, current_scope, require_usable

_MOST_PROGRAMS = 64  # kept for each transformed function, one for each set of static arguments


@dataclasses.dataclass(frozen=True)
class _Options:
    policy: Policy | None
    params: Any
    settings: Settings

    def resolved(self) -> Settings | None:
        """The settings in force, or None where there is no policy."""
        if self.policy is not None:
            return dataclasses.replace(self.settings, policy=require_usable(self.policy))
        scope = current_scope()
        if scope.policy is None:
            return None
        rules = scope.rules if self.settings.rules is None else self.settings.rules
        return dataclasses.replace(self.settings, policy=require_usable(scope.policy), rules=rules)


def autocast(
    fn: Any = None,
    policy: Policy | str | None = None,
    *,
    params: Params = None,
    rules: RulesLike | None = None,
    preset: Literal["memory", "conservative"] = "memory",
    allow: Collection[str] = (),
    deny: Collection[str] = (),
    opaque: Collection[str] = (),
    normalises: Collection[str] = (),
    on_unknown: Literal["opaque", "raise"] = "opaque",
    enabled: bool = True,
) -> Any:
    """`fn`, with its matmuls and convolutions in compute_dtype and what is sensitive in float32.

    The function is traced in the dtypes that it is called with, and that program is run again with casts put in. So
    nothing in it needs to know of dtypes, and everything that JAX can do with a function it can do with this one:
    jit, grad, vmap, scan, checkpoint, shard_map, in either order. It is compiled, and traced again for other shapes or
    another policy only; what `jax.jit` asks of a function is asked of this one. An nnx module among the arguments is
    updated; an `nnx.State` never is, as under `jax.jit` and unlike in an eager call that merges it. Put it around the
    loss, not around the train step: an optimizer update inside of it would run in half precision.

    Args:
      fn: any function of arrays. Left out (or with the policy in its place), a decorator is returned.
      policy: a Policy or its text form; its compute_dtype is what matmuls run in. None is the one in force at the call,
        and its rules; where none is, `fn` runs as it is, with a `DtypePolicyWarning`.
      params: which arguments are parameters, whose float32 yields to half activations: positions, names of arguments,
        or a predicate on leaves. None: the `params` collection of a mapping that has one, else the first positional
        argument if it is a container. Other arguments and closed-over arrays keep float32 what they are mixed with.
      rules: policies by module path, as everywhere: ``{"decoder/layer_3/.*": "f32"}``. One for layers that are scanned
        over, with a half output_dtype, narrows what each hands to the next: ``{"layers": "bf16"}``. Other loops, and
        that one without a rule, carry what they carried.
      preset: "memory" keeps activations in half between matmuls; "conservative" is PyTorch's promotion, where params
        and normalisations make them float32 again.
      allow, deny, opaque: names of primitives to run in compute_dtype, in float32, or as they were traced.
      normalises: module paths, as patterns of rules are, of normalisations beyond those that are found: under "memory"
        what stands there runs in float32 and hands on half. Quotients of x, or of x minus its mean, and a root of its
        second moment are found whatever their names.
      on_unknown: whether a primitive that is not known runs as it was traced, or raises.
      enabled: False leaves `fn` as it is, in float32 also inside of another autocast.

    Returns:
      A function of the same signature. Its outputs have the dtypes that `fn`'s have.

    Raises:
      TypeError: `fn` is no function, or `rules`, `allow`, ... are not of the kinds above.
      ValueError: a policy without a floating compute_dtype, an unknown primitive or preset, a primitive given twice; at
        the call, a rule or a path in `normalises` that matches nothing.
    """
    if isinstance(fn, (str, Policy)) and policy is None:
        fn, policy = None, fn
    options = _checked(policy, params, rules, preset, allow, deny, opaque, normalises, on_unknown)
    if fn is None:
        return functools.partial(_transformed, options=options, enabled=enabled)
    return _transformed(fn, options=options, enabled=enabled)


def _checked(
    policy: Any,
    params: Any,
    rules: Any,
    preset: Any,
    allow: Any,
    deny: Any,
    opaque: Any,
    normalises: Any,
    on_unknown: Any,
) -> _Options:
    if preset not in ("memory", "conservative"):
        raise ValueError(f"preset should be 'memory' or 'conservative', but got {preset!r}.")
    if on_unknown not in ("opaque", "raise"):
        raise ValueError(f"on_unknown should be 'opaque' or 'raise', but got {on_unknown!r}.")
    require_params(params)
    policy = None if policy is None else get_policy(policy)
    rules = None if rules is None else rules if isinstance(rules, PolicyRules) else PolicyRules(rules)
    classes = [name_of(pattern) for pattern, _ in rules or () if isinstance(pattern, type)]
    if classes:
        raise TypeError(
            f"autocast's rules go by module path, and know no classes, but got {', '.join(classes)}: give a path "
            "pattern, as in {'.*/norm': 'f32'}."
        )
    settings = Settings(
        policy or get_policy("float32"),
        rules,
        preset == "memory",
        known_primitives(allow, "allow"),
        known_primitives(deny, "deny"),
        known_primitives(opaque, "opaque"),
        on_unknown == "raise",
        _checked_paths(normalises),
    )
    twice = (settings.allow & settings.deny) | (settings.opaque & (settings.allow | settings.deny))
    if twice:
        raise ValueError(
            f"{', '.join(map(repr, sorted(twice)))} stands in more than one of allow, deny and opaque: leave it in one."
        )
    return _Options(policy, params, settings)


def _checked_paths(normalises: Any) -> PolicyRules | None:
    is_collection = isinstance(normalises, Collection) and not isinstance(normalises, (str, bytes))
    if not is_collection or not all(isinstance(pattern, str) for pattern in normalises):
        raise TypeError(
            f"normalises should be a collection of module paths, as ('blocks/.*/scale_shift',), but got {normalises!r}."
        )
    return PolicyRules(dict.fromkeys(normalises, "float32")) if normalises else None


def _transformed(fn: Any, *, options: _Options, enabled: bool) -> Any:
    require_function(fn, "autocast")
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled should be True or False, but got {enabled!r}.")
    if not enabled:
        return _as_traced(fn)
    return _Autocast(fn, options).wrapper()


def _as_traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fn` itself, which an autocast around it leaves in float32."""

    @functools.wraps(fn)
    def island(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(ISLAND):
            return fn(*args, **kwargs)

    return island


class _Autocast:
    """A transformed function, and the programs compiled for its static arguments."""

    def __init__(self, fn: Any, options: _Options):
        self.fn, self.options = fn, options
        self.programs: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self.pure: collections.OrderedDict[Any, _Autocast] = collections.OrderedDict()

    def wrapper(self) -> Callable[..., Any]:
        names = [name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(self.fn, name)]

        @functools.wraps(self.fn, assigned=names, updated=())
        def transformed(*args: Any, **kwargs: Any) -> Any:
            settings = self.options.resolved()
            if settings is None:
                warn_once(
                    f"autocast({_name_of(self.fn)}) has no policy of its own, and none is in force here: it runs as it "
                    "is. Give it one, as in autocast(fn, 'mixed_bfloat16'), or call it in a use_policy block."
                )
                return self.fn(*args, **kwargs)
            warn_of_nnx_optimizer(args, kwargs)
            target, arguments, finish = self.lowered(args, kwargs)
            return finish(target._program(arguments, settings)(*arguments.arrays))

        transformed.explain = self.explain  # type: ignore[attr-defined]
        return transformed

    def explain(self, *args: Any, **kwargs: Any) -> Report:
        """Reports the casts of a call with these arguments, without running it; shapes will do."""
        settings, report = self.options.resolved(), Report()
        if settings is not None:
            target, arguments, _ = self.lowered(args, kwargs)
            jax.eval_shape(target._rewritten(arguments, settings, report), *arguments.arrays)
            report.complete()
        return report

    def lowered(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[_Autocast, Arguments, Callable[[Any], Any]]:
        """The call as one of a function of arrays: what to call, with what, and what to do with the result."""
        call = lowered(self.fn, args, kwargs)
        if call is None:
            return self, Arguments.of(args, kwargs), lambda out: out
        return self._of_pure(call.key, call.pure), Arguments.of(call.args, call.kwargs), call.finish

    def _of_pure(self, key: Any, pure: Callable[..., Any]) -> _Autocast:
        """The autocast of a pure function, whose first argument are parameters; made anew where its key has no hash."""
        fresh = _Autocast(pure, dataclasses.replace(self.options, params=0))
        try:
            target = self.pure.pop(key, fresh)
        except TypeError:
            return fresh
        self.pure[key] = target
        if len(self.pure) > _MOST_PROGRAMS:
            self.pure.popitem(last=False)
        return target

    def _program(self, arguments: Arguments, settings: Settings) -> Any:
        key = (arguments.key, settings)
        try:
            program = self.programs.pop(key, None)
        except TypeError:  # a static argument that has no hash
            return self._rewritten(arguments, settings)
        if program is None:
            fixed = dataclasses.replace(arguments, arrays=[])  # the program outlives the arrays of its first call
            program = jax.jit(self._rewritten(fixed, settings))
        self.programs[key] = program
        if len(self.programs) > _MOST_PROGRAMS:
            self.programs.popitem(last=False)
        return program

    def _rewritten(self, arguments: Arguments, settings: Settings, report: Report | None = None) -> Callable[..., Any]:
        """The function of the arrays alone that traces `fn` and evaluates its program."""

        def flat(*arrays: Any) -> Any:
            args, kwargs = arguments.filled(arrays)
            return self.fn(*args, **kwargs)

        def rewritten(*arrays: Any) -> Any:
            jaxpr, shape = make_jaxpr(flat, return_shape=True)(*arrays)
            args, kwargs = arguments.filled(arrays)
            marks = parameters(self.fn, self.options.params, args, kwargs)
            params = [mark for mark, is_dynamic in zip(marks, arguments.is_array, strict=True) if is_dynamic]
            warn_of_optimizer(args, kwargs)
            if report is not None:
                report.note_parameters(arguments.names(), params)
            values = [
                Value(array if _is_key(array) else jnp.asarray(array), is_param and settings.narrows)
                for array, is_param in zip(arrays, params, strict=True)
            ]
            body, consts = opened(jaxpr)
            # A report notes each equation where it stands, and rules may tell apart what stands inside of it.
            shares = report is None and settings.rules is None and settings.normalises is None
            places = Places(settings, repeated(body) if shares else frozenset())
            outputs = Evaluator(settings, places, report=report).run(body, [Value(c) for c in consts], values)
            if self.options.settings.rules is not None:
                places.check(settings.rules)  # those of a scope may be meant for other code
            places.check(settings.normalises)
            leaves, structure = jax.tree.flatten(shape)
            results = [_like(output.array, leaf) for output, leaf in zip(outputs, leaves, strict=True)]
            return jax.tree.unflatten(structure, results)

        rewritten.__name__ = _name_of(self.fn)
        return rewritten


def _like(array: Any, shape: jax.ShapeDtypeStruct) -> Any:
    """An output in the dtype that it was traced with, and as weak a type."""
    array = cast(array, shape.dtype) if is_floating(shape.dtype) else array
    if not shape.weak_type or jax.typeof(array).weak_type:
        return array
    return convert_element_type_p.bind(array, new_dtype=shape.dtype, weak_type=True, sharding=None)


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _is_key(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)

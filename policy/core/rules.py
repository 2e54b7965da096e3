"""Ordered rules: pairs of a path pattern or layer class and the policy for matching modules."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from policy.core.messages import warn_once
from policy.core.policy import Policy, get_policy
from policy.programs.paths import folded, joined

# A model's class and a colon, before any group: `Net:encoder/.*`, but not `(?:encoder|decoder)/.*`.
_OF_MODEL = re.compile(r"((?:[^\\:?()\[\]]|\\.)+):(.*)", re.DOTALL)
_MOST_LISTED = 32  # paths that an error lists one by one

Pattern = str | type


def layer_class(cls: type) -> type:
    """Returns the class that a class pattern matches; the framework's class for one of our layers.

    A layer declares it in its own attribute `_upstream_class`, which subclasses do not inherit.
    """
    return cls.__dict__.get("_upstream_class", cls)


def pattern_text(pattern: Pattern) -> str:
    """Returns the text of a rule's pattern, for messages and summaries."""
    return f"'{pattern}'" if isinstance(pattern, str) else pattern.__name__


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class PolicyRules:
    """Ordered rules from path patterns and layer classes to policies.

    A path pattern is a regular expression that must match a module's full path, its names joined by
    ``/`` (the root's path is empty). A pattern that begins with a model's class and a colon applies
    to that model only, and ``Net:`` is the model itself; inspection tools name models so, and their
    modules if a program has several. A path printed by a tool matches its module even if it
    contains special characters. A class pattern matches its instances and the framework's own layer
    of that name. The first matching rule wins at a module, and applies to everything below until a
    rule matches there.

    Rules are values: immutable, hashable and compared by their contents.

    >>> import policy
    >>> rules = policy.PolicyRules({"encoder/layer_3/.*": "f32", "encoder/.*": "mixed_bfloat16"})
    >>> rules.match("encoder/layer_3/mlp").compute_dtype
    dtype('float32')
    >>> rules.match("head") is None
    True

    Args:
      rules: pairs, or a mapping, of pattern and policy (or a policy's text form).
      strict: raise if a rule matches no module.

    Raises:
      ValueError: a pattern is not a regular expression, or occurs twice.
      TypeError: a pattern is neither a text nor a class, or a policy is neither a Policy nor a
        text.
    """

    rules: tuple[tuple[Pattern, Policy], ...]
    strict: bool
    _hash: int = dataclasses.field(compare=False)

    def __init__(self, rules: RulesLike = (), *, strict: bool = True):
        if isinstance(rules, str) or not isinstance(rules, Iterable):
            raise TypeError(
                "Policy rules should be a dict or a list of (pattern, policy) pairs, but got "
                f"{rules!r}."
            )
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        checked = tuple(_checked_rule(pair) for pair in pairs)
        for i, (pattern, _) in enumerate(checked):
            if any(pattern == earlier for earlier, _ in checked[:i]):
                raise ValueError(
                    f"Rule {pattern_text(pattern)} is given twice, but only the first can match. "
                    "Delete one of them."
                )
        object.__setattr__(self, "rules", checked)
        object.__setattr__(self, "strict", bool(strict))
        object.__setattr__(self, "_hash", hash((checked, bool(strict))))

    @classmethod
    def from_texts(cls, texts: Iterable[str], *, strict: bool = True) -> PolicyRules:
        """Parses rules from ``PATH=TEXT`` pairs: ``["head=f32", "block_.*=p=f32,c=bf16"]``.

        A text is split at the first ``=`` that is followed by a valid policy, since both sides may
        contain others.

        Raises:
          ValueError: a text has no ``=``, or the constructor rejects the rules.
          TypeError: `texts` is a single text.
        """
        if isinstance(texts, str):
            expected = "Texts of policy rules should be a list of PATH=TEXT"
            raise TypeError(f"{expected}, but got the string {texts!r}.")
        return cls([_divided(text) for text in texts], strict=strict)

    def __len__(self) -> int:
        return len(self.rules)

    def __iter__(self) -> Iterator[tuple[Pattern, Policy]]:
        return iter(self.rules)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        pairs = ", ".join(f"({pattern_text(one)}, '{policy}')" for one, policy in self.rules)
        return f"PolicyRules([{pairs}]{'' if self.strict else ', strict=False'})"

    def __reduce__(self):
        return functools.partial(PolicyRules, strict=self.strict), (self.rules,)

    @property
    def has_paths(self) -> bool:
        """Returns whether any pattern is a path pattern."""
        return any(isinstance(pattern, str) for pattern, _ in self.rules)

    def match(self, path: str | None, cls: type | None = None, *, model: str = "") -> Policy | None:
        """Returns the policy of the first rule that matches a module's path or class, or None.

        Args:
          path: the module's path, its names joined by ``/``; None if it is unknown, which no path
            pattern matches.
          cls: the module's class, if it has one.
          model: the name of the model that the path starts from: its class or the name it was
            given.
        """
        rule = self.rule_for(path, cls, model=model)
        return None if rule is None else rule[1]

    def rule_for(
        self, path: str | None, cls: type | None = None, *, model: str = ""
    ) -> tuple[Pattern, Policy] | None:
        """Returns the first matching rule as (pattern, policy) or None; arguments as in `match`."""
        return next((rule for rule in self.rules if matches(rule[0], path, cls, model)), None)

    def rule_at(
        self, names: tuple[str, ...], cls: type | None = None, *, model: str = ""
    ) -> tuple[Pattern, Policy] | None:
        """Returns the rule of a module by the names that lead to it; arguments as in `match`.

        Where its own name holds slashes, a rule holds for it that matches the path before one.
        """
        path, above = joined(names), joined(names[:-1])
        rule = self.rule_for(path, cls, model=model)
        while rule is None and (path := path.rpartition("/")[0]) and path != above:
            rule = self.rule_for(path, model=model)
        return rule

    def of_model(self, model: str) -> PolicyRules:
        """Returns these rules without those that name another model."""
        kept = [(p, held) for p, held in self.rules if not isinstance(p, str) or _is_of(p, model)]
        return self if len(kept) == len(self.rules) else PolicyRules(kept, strict=self.strict)

    def check(
        self, paths: Iterable[str] | Mapping[str, type | Iterable[type] | None], *, model: str = ""
    ) -> None:
        """Raises if a rule matches none of the given modules, and warns of one that never applies.

        Such a rule matches only modules that one earlier rule matches, too.

        Args:
          paths: the modules' paths, or a mapping from path to the module's class (or classes).
            Without classes, class rules are not checked.
          model: the name of the model that the paths start from.

        Raises:
          ValueError: names every rule without a match and lists the paths. Long lists are folded:
            paths that differ in one number are shown as one, ``layers/0..29/norm``. Never raised if
            `strict` is False.
        """
        classes = paths if isinstance(paths, Mapping) else dict.fromkeys(paths)
        modules = {
            (path, model): (found,) if isinstance(found, type) else tuple(found or ())
            for path, found in classes.items()
        }
        self._check(modules, isinstance(paths, Mapping))

    def check_places(self, places: Iterable[tuple[str, str]]) -> None:
        """Checks path rules as `check` does.

        Args:
          places: pairs of a module's path and its model's name, "" outside of any model.
        """
        self._check(dict.fromkeys(places, ()), False)

    def _check(
        self, modules: Mapping[tuple[str, str], tuple[type, ...]], has_classes: bool
    ) -> None:
        """Raises and warns as `check` does, by the classes of each path and model."""
        if not self.strict:
            return
        applied = [(pattern, policy, _matched(pattern, modules)) for pattern, policy in self.rules]
        checked = [rule for rule in applied if has_classes or isinstance(rule[0], str)]
        unmatched = [pattern for pattern, _, where in checked if not where]
        if unmatched:
            paths = sorted({path for path, _ in modules if path})
            listed = ", ".join(folded(paths) if len(paths) > _MOST_LISTED else paths)
            listed = listed or "only the root, whose path is empty"
            rules = "Rules" if len(unmatched) > 1 else "Rule"
            raise ValueError(
                f"{rules} {', '.join(map(pattern_text, unmatched))} matched no module. Modules "
                f"seen: {listed}.{_without_class(unmatched, modules)} Rules for a part of a model "
                "that this call leaves out: PolicyRules(rules, strict=False)."
            )
        for i, (pattern, policy, where) in enumerate(applied):
            by = [other for other, held, there in applied[:i] if where <= there and held != policy]
            if where and by:
                warn_once(
                    f"Rule {pattern_text(pattern)} never applies: rule {pattern_text(by[0])} comes "
                    "first, and matches each module that it matches. Put the narrower rule first."
                )


# Arguments for rules. A pattern is a text or a class, which is checked when the rules are made; its
# type is Any, since mappings are invariant in their keys, and a dict of texts and classes is a
# ``dict[object, str]`` to mypy.
RulesLike = PolicyRules | Mapping[Any, Policy | str] | Iterable[tuple[Any, Policy | str]]


def as_rules(rules: RulesLike | None) -> PolicyRules | None:
    """Returns rules as `PolicyRules`; None stays None."""
    return rules if rules is None or isinstance(rules, PolicyRules) else PolicyRules(rules)


def _divided(text: str) -> tuple[str, str]:
    """Returns the pattern and the policy of ``PATH=TEXT``."""
    places = [place for place, character in enumerate(text) if character == "="]
    if not places:
        raise ValueError(f"Rule {text!r} should be PATH=TEXT, such as head=f32.")
    for place in places:
        with contextlib.suppress(TypeError, ValueError):
            get_policy(text[place + 1 :])
            return text[:place], text[place + 1 :]
    return text[: places[0]], text[places[0] + 1 :]


def _matched(
    pattern: Pattern, modules: Mapping[tuple[str, str], tuple[type, ...]]
) -> set[tuple[str, str]]:
    """Returns the modules that a pattern matches, by path and model."""
    return {
        (path, model)
        for (path, model), classes in modules.items()
        if any(matches(pattern, path, cls, model) for cls in classes or (None,))
    }


def matches(pattern: Pattern, path: str | None, cls: type | None = None, model: str = "") -> bool:
    """Returns whether a rule's pattern matches a module; arguments as in `PolicyRules.match`."""
    if not isinstance(pattern, str):
        return cls is not None and issubclass(cls, layer_class(pattern))
    if path is None or pattern == path:
        return path is not None
    _, below = _model_and_path(pattern)
    return _is_of(pattern, model) and _is_path(below, path)


def _is_path(pattern: str, path: str) -> bool:
    return pattern == path or _compiled(pattern).fullmatch(path) is not None


def _is_of(pattern: str, model: str) -> bool:
    """Returns whether a pattern names no model or this one."""
    of, _ = _model_and_path(pattern)
    return of is None or of == model or _compiled(of).fullmatch(model) is not None


@functools.cache
def _model_and_path(pattern: str) -> tuple[str | None, str]:
    """Splits a pattern into the model's name before the colon, or None, and the rest."""
    found = _OF_MODEL.fullmatch(pattern)
    return (None, pattern) if found is None else (found[1], found[2])


def _without_class(unmatched: Iterable[Pattern], places: Iterable[tuple[str, str]]) -> str:
    """Returns a hint if a pattern would match without the class that it begins with."""
    for pattern in unmatched:
        first, _, below = pattern.partition("/") if isinstance(pattern, str) else ("", "", "")
        if below and any(
            model and re.fullmatch(first, model) and _is_path(below, path) for path, model in places
        ):
            return f" Paths leave out the model's class: write {below!r}."
    return ""


def _checked_rule(pair: Any) -> tuple[Pattern, Policy]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        is_text = isinstance(pair, str) and "=" in pair
        from_texts = "PolicyRules.from_texts takes a list of PATH=TEXT"
        hint = from_texts if is_text else "Rules are written {'head': 'f32'}"
        raise TypeError(
            f"A policy rule should be a (pattern, policy) pair, but got {pair!r}. {hint}."
        )
    pattern, policy = pair
    if isinstance(pattern, str):
        try:
            _compiled(pattern)
        except re.error as error:
            hint = f" Write '.*' for any name, not '*': '{pattern.replace('*', '.*')}'."
            hint = hint if pattern[:1] == "*" else ""
            told = f"Rule '{pattern}' is not a regular expression: {error}.{hint}"
            raise ValueError(told) from None
    elif not isinstance(pattern, type):
        is_module = hasattr(pattern, "dtype_policy")
        got = f"a {type(pattern).__name__}: give its class" if is_module else repr(pattern)
        raise TypeError(
            f"A rule's pattern should be a path pattern or a layer class, but got {got}."
        )
    try:
        return pattern, get_policy(policy)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Rule {pattern_text(pattern)}: {error}") from None

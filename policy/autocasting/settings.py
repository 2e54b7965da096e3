"""The arguments of an autocast, and the resulting dtypes at each module path of a program."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from policy.core.dtypes import HIGHEST, ScaledMatmul
from policy.core.policy import Policy
from policy.core.precedence import note_obeyed
from policy.core.rules import PolicyRules
from policy.core.scope import computes_in_half, in_island, precision_within
from policy.programs import marks
from policy.programs.dtypes import F32
from policy.programs.marks import ISLAND
from policy.programs.paths import Path, divided, joined, once
from policy.programs.primitives import CATEGORY_OF, MATMULS
from policy.programs.thread import thread


class UnknownPrimitiveError(NotImplementedError):
    """Raised with ``on_unknown="raise"`` for a primitive without a category."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of an autocast.

    Attributes:
      policy: matmuls run in its compute_dtype.
      rules: policies by module path, or None.
      narrows: whether params yield to half-precision activations, and normalizations return half
        ("memory").
      allow, deny, opaque: primitives to run in compute_dtype, in float32, and as they were traced.
      strict: whether a primitive without a category is an error.
      normalizes: the paths of modules treated as normalizations, as rules whose policies are
        ignored; or None.
      narrows_scans: whether scanned layers with stacked parameters return half precision.
      around: the precision in force around the call, which is no word about a line.
    """

    policy: Policy
    rules: PolicyRules | None = None
    narrows: bool = True
    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    opaque: frozenset[str] = frozenset()
    strict: bool = False
    normalizes: PolicyRules | None = None
    narrows_scans: bool = False
    around: str | None = None

    def category(self, name: str) -> str:
        """Returns the category of a primitive.

        Raises:
          UnknownPrimitiveError: it has no category, and `strict` is set.
        """
        if name in self.opaque:
            return "opaque"
        if name in self.allow:
            return "compute" if name in MATMULS else "promote"
        if name in self.deny:
            return "fp32"
        category = CATEGORY_OF.get(name)
        if category is None and self.strict:
            raise UnknownPrimitiveError(
                f"autocast knows no category for the primitive {name!r}. List it in opaque=, "
                "allow= or deny=, or leave out on_unknown='raise'."
            )
        return category or "opaque"

    @property
    def attention_policy(self) -> Policy | None:
        """The policy of attention functions, if it is one for all module paths and operations."""
        is_ruled = self.rules is not None or self.policy.compute_dtype.itemsize >= F32.itemsize
        is_usual = self.category("dot_general") == "compute" and self.category("exp") == "fp32"
        return self.policy if is_usual and not is_ruled else None


@dataclasses.dataclass(frozen=True)
class Place:
    """The dtypes of the equations of one module path.

    Attributes:
      compute: the dtype of matmuls there; float32 keeps everything there in float32.
      matmul: the 8-bit dtypes of matmuls of one parameter there, or None.
      region: "applies" where a normalization computes values as large as its input, in float32, and
        returns half precision; "measures" where it computes statistics, which are float32 for every
        reader.
      is_ruled: whether a rule names the path: then nothing there is a normalization.
      is_layer: whether it is inside a layer that obeys a policy itself: its dtypes stay as they
        were traced.
      precision: the precision of matmuls there that were given none, or None for JAX's default.
      around: that in force around the call.
      is_unrounded: whether a line asks for a float32 result.
    """

    compute: np.dtype
    matmul: ScaledMatmul | None = None
    region: Literal["applies", "measures"] | None = None
    is_ruled: bool = False
    is_layer: bool = False
    precision: str | None = None
    around: str | None = None
    is_unrounded: bool = False

    def within(self, region: Literal["applies", "measures"]) -> Place:
        """Returns this place as part of a normalization, unless a rule or argument forbids it."""
        if self.region is not None or self.is_ruled or self.compute == F32:
            return self
        return dataclasses.replace(self, region=region)


class Places(dict[Path, Place]):
    """The places of a program by module path; remembers the paths for the check of the rules.

    Attributes:
      repeated: the identities of programs that are rewritten once for all equations that hold them.
      shared: the rewritten programs; see `policy.autocasting.calls`.
    """

    def __init__(self, settings: Settings, repeated: frozenset[int] = frozenset()):
        super().__init__()
        self.settings, self.repeated = settings, repeated
        self.shared: dict[Any, Any] = {}

    def __missing__(self, path: Path) -> Place:
        self[path] = self._find(path)
        return self[path]

    def _find(self, path: Path) -> Place:
        settings = self.settings
        if path and path[-1] == marks.UNROUNDED:
            return dataclasses.replace(self[path[:-1]], is_unrounded=True)
        marked, bare = marks.innermost(path), marks.without_marks(path)
        if isinstance(marked, str):
            return Place(F32, is_layer=True)
        policy = _rule_policy(settings.rules, bare)
        obeyed = policy or settings.policy
        compute, matmul = obeyed.compute_dtype, obeyed.matmul
        precision = precision_within(obeyed, settings.policy)
        if marked is not None:
            compute, matmul, precision = marked
            if precision is None and compute == F32 and computes_in_half(settings.policy):
                precision = HIGHEST  # of derivative rules, which are traced after the module's call
        if ISLAND in path:
            compute, matmul = F32, None
            precision = precision_within(in_island(obeyed), settings.policy)
        may_be_named = settings.narrows and policy is None and compute != F32
        named = may_be_named and _rule_policy(settings.normalizes, bare) is not None
        if thread.asked is not None:
            name, model = _names(bare)[-1]
            note_obeyed(model, name, obeyed)
        region = "applies" if named else None
        own = _match(settings.rules, bare) if path else None
        is_wide = own is not None and own.output_dtype.itemsize > compute.itemsize
        is_ruled, around = policy is not None, settings.around
        return Place(compute, matmul, region, is_ruled, False, precision, around, is_wide)

    def output_of(self, path: Path) -> np.dtype | None:
        """Returns the half-precision output dtype that a rule gives to this very path, or None."""
        self[path]  # known, for the check of the rules
        rules = self.settings.rules
        policy = _match(rules, marks.without_marks(path)) if path else None
        output = F32 if policy is None else policy.output_dtype
        return output if output.itemsize < F32.itemsize else None

    def check(self, rules: PolicyRules | None) -> None:
        """Raises if a rule matched no path."""
        if rules:
            paths = map(marks.without_marks, self)
            prefixes = {path[:n] for path in paths for n in range(len(path) + 1)}
            rules.check_places(sorted({name for path in prefixes for name in _names(path)}))


def _names(path: Path) -> list[tuple[str, str]]:
    """Returns (name below the model, model's name) for a path, as rules match it.

    The model's name is "" outside of any model.

    A name that occurs twice in a row may be one module whose call runs its base class's, and it
    matches either way.
    """
    model, below = divided(path) or ("", path)
    return [(joined(names), model) for names in dict.fromkeys((below, once(below)))]


def _rule_policy(rules: PolicyRules | None, path: Path) -> Policy | None:
    """Returns the policy of the rule that matches the path, or the nearest path above it."""
    lengths = range(len(path), 0, -1) if rules else ()
    found = (_match(rules, path[:length]) for length in lengths)
    return next((policy for policy in found if policy is not None), None)


def _match(rules: PolicyRules | None, path: Path) -> Policy | None:
    """Returns the policy of the rule that matches this very path, or None."""
    found = (rules.match(name, model=model) for name, model in _names(path)) if rules else ()
    return next((policy for policy in found if policy is not None), None)

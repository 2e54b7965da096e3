"""Follows dtypes from fields and parameters to layers, casts and calls."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable

import libcst as cst

from policy.porting import dtypes
from policy.porting.calls import read_call, read_dict
from policy.porting.definitions import (
    Project,
    all_parameters,
    assigned,
    is_self,
    last_name,
)
from policy.porting.dtypes import DATA, EXTERNAL, Slot
from policy.porting.edits import Edits
from policy.porting.slots import SlotReader, index_of, pairs
from policy.porting.sources import Elsewhere, ParsedFile, nodes_of, text_of

_SCALE = (
    'a loss scale is mixed_precision(tx, policy, loss_scale="dynamic") and '
    "policy.value_and_grad(..., loss_scale=loss_scale_of(opt_state))"
)


@dataclasses.dataclass(frozen=True)
class Note:
    """A line that is left alone, or that a reader should know of, and why."""

    source: ParsedFile
    node: cst.CSTNode
    text: str

    def __str__(self) -> str:
        return f"{self.source.path}:{self.source.line(self.node)}: {self.text}"


@dataclasses.dataclass(eq=False)
class Use:
    """A use of slots.

    Attributes:
      flows: the slots that it is passed to.
      edits: deletes it, if all slots of `flows` go.
      reason: why it stays; None if it may go.
      note: what a reader should know of if it goes.
    """

    source: ParsedFile
    node: cst.CSTNode
    slots: frozenset[Slot]
    flows: frozenset[Slot] = frozenset()
    edits: tuple[tuple[cst.CSTNode, object], ...] = ()
    reason: str | None = None
    note: str | None = None


class DtypeFlow(SlotReader):
    """The slots of a project whose names match a pattern, their uses, and those that go.

    Args:
      project: the given files.
      elsewhere: the other files of their packages.
      pattern: of the names of fields, parameters and variables to follow.
    """

    def __init__(self, project: Project, elsewhere: Elsewhere, pattern: re.Pattern[str]):
        super().__init__(project, pattern)
        self.elsewhere = elsewhere
        self.passed: set[Slot] = set()  # that calls in the given files pass
        self.uses: list[Use] = []
        self.notes: list[Note] = []
        self.kept: dict[Slot, Note] = {}
        self._chosen: set[Slot] = set()
        self._declared: dict[Slot, list[tuple[ParsedFile, cst.CSTNode]]] = {}
        self._tests: list[tuple[ParsedFile, cst.If, frozenset[Slot]]] = []
        for source in project.sources:
            self.visit(source, source.module)
        self._check_owners()
        self._settle()

    # ----------------------------------------------------------------------------------------------
    # Results
    # ----------------------------------------------------------------------------------------------

    def edits(self, source: ParsedFile) -> Edits:
        """Returns the edits of a file."""
        edits = Edits(source)
        for slot, places in self._declared.items():
            if slot not in self.kept:
                for where, node in places:
                    if where is source:
                        edits.remove(node)
        for use in self.uses:
            if use.source is source and self._goes(use):
                for node, change in use.edits:
                    edits.add(node, change)
        edits.settle()
        return edits

    def _goes(self, use: Use) -> bool:
        return use.reason is None and not (use.slots & self._chosen or use.flows & self.kept.keys())

    def left(self) -> list[Note]:
        """Returns the notes on slots that stay, and on other lines."""
        own = [note for slot, note in self.kept.items() if slot in self._declared]
        own += [Note(u.source, u.node, u.note) for u in self.uses if u.note and self._goes(u)]
        splatted: dict[tuple[ParsedFile, cst.CSTNode, str], list[str]] = {}
        for slot in sorted(self._declared.keys() - self.kept.keys()):
            kind, owner, name = slot
            if kind != "local" and (place := self.project.splatted.get(owner)):
                splatted.setdefault((*place, name), []).append(owner)
            elif kind != "local" and (where := self.elsewhere.splatting(owner)):
                text = f"`{name}` of {owner} goes: `**` of {where} should not hold it"
                own.append(Note(*self._declared[slot][0], text))
        for (source, node, name), owners in splatted.items():
            text = f"`{name}` of {', '.join(owners)} goes: `**` should not hold it"
            own.append(Note(source, node, text))
        return list({str(note): note for note in (*own, *self.notes)}.values())

    # ----------------------------------------------------------------------------------------------
    # Fixed point
    # ----------------------------------------------------------------------------------------------

    def keep(
        self,
        slots: Iterable[Slot],
        source: ParsedFile,
        node: cst.CSTNode,
        text: str,
        chosen: bool = False,
    ) -> bool:
        """Keeps slots for a reason; of those that are chosen by a caller, all uses stay too."""
        self._chosen |= set(slots) if chosen else set()
        new = [slot for slot in slots if slot not in self.kept and slot not in (DATA, EXTERNAL)]
        for slot in new:
            self.kept[slot] = Note(source, node, f"{slot_text(slot)} stays: {text}")
        return bool(new)

    def _settle(self) -> None:
        for slot, places in self._declared.items():
            text = None if self.is_scale else dtypes.stage(slot[2])
            if text is not None and not self._is_float32_softmax(slot):
                self.keep([slot], *places[0], text, chosen=True)
        changed = True
        while changed:
            changed = False
            for use in self.uses:
                changed |= self._settle_use(use)
            changed = changed or self._settle_tests()

    def _is_float32_softmax(self, slot: Slot) -> bool:
        """Returns whether a dtype of softmaxes is nothing but float32: a policy's is, too."""
        given = [use for use in self.uses if slot in use.flows]
        chosen = [self.constants(use.source, use.node) for use in given if not use.slots]
        return "softmax" in slot[2] and bool(chosen) and all(c == {"float32"} for c in chosen)

    def _settle_use(self, use: Use) -> bool:
        if use.reason is not None:
            return self.keep(use.slots, use.source, use.node, use.reason)
        stays = next((flow for flow in use.flows if flow in self.kept), None)
        changed = False
        if stays is not None:
            text = f"it reaches {slot_text(stays)}, which stays"
            changed = self.keep(use.slots | use.flows, use.source, use.node, text)
        if use.slots & self._chosen and not use.flows <= self._chosen:
            text = f"{slot_text(min(use.slots & self._chosen))} is passed to it"
            self.keep(use.flows, use.source, use.node, text, chosen=True)
            changed = True
        return changed

    def _settle_tests(self) -> bool:
        """Keeps the slots that are tested in an `if` that stays."""
        found = {source: self.edits(source) for source, _, _ in self._tests}
        changed = False
        for source, test, slots in self._tests:
            if not found[source].is_gone(test):
                text = f"`if {source.code(test.test)}` decides by it"
                changed |= self.keep(slots, source, test, text)
        return changed

    def _check_owners(self) -> None:
        """Keeps slots that other files pass or read, and parameters of special methods."""
        for slot, places in self._declared.items():
            kind, owner, name = slot
            for definition in self.project.definitions.get(owner, ()) if kind != "local" else ():
                order = self.project.order(definition)
                position = order.index(name) if name in order else None
                place = self.elsewhere.use_of(owner, name, position)
                if place:
                    self.keep([slot], *places[0], f"{place} uses it: port that file too", True)
                is_module = self.project.is_flax_class(definition)
                is_inner = is_module and slot in self.passed
                place = None if place or is_inner else self.elsewhere.reading(name, is_module)
                if kind == "field" and place:
                    self.keep([slot], *places[0], f"{place} reads it: port that file too")
            is_required = all(getattr(node, "default", 1) is None for _, node in places)
            if kind == "argument" and slot not in self.passed and is_required:
                self.keep([slot], *places[0], f"nothing in the given files calls {owner}", True)
            if kind == "argument" and owner in self.project.values:
                self.keep([slot], *places[0], f"{owner} is passed on as a function", True)
            if kind == "local" and self.elsewhere.imports(name):
                self.keep([slot], *places[0], "another file imports it: port that file too", True)
            if kind == "argument" and re.fullmatch("__\\w+__|setup", owner):
                self.keep([slot], *places[0], f"{owner} is called through its instances", True)

    # ----------------------------------------------------------------------------------------------
    # Declarations
    # ----------------------------------------------------------------------------------------------

    def _declare(self, slot: Slot, source: ParsedFile, node: cst.CSTNode) -> None:
        self._declared.setdefault(slot, []).append((source, node))

    def _declare_function(self, source: ParsedFile, node: cst.FunctionDef) -> None:
        for param in all_parameters(node):
            slot = self.of_parameter(source, node, param.name.value)
            if slot is not None:
                self._declare(slot, source, param)
                if param.default is not None:
                    self.use(source, param.default, flows=[slot])

    def _declare_fields(self, source: ParsedFile, node: cst.ClassDef) -> None:
        for line, after in zip(node.body.body, (*node.body.body[1:], None), strict=True):
            if not isinstance(line, cst.SimpleStatementLine):
                continue
            for target in assigned(line.body[0]):
                if isinstance(target, cst.Name) and self.follows(target.value):
                    slot = self.field(node.name.value, target.value)
                    self._declare(slot, source, line)
                    if after is not None and text_of(after) is not None:
                        self._declare(slot, source, after)
                    value = getattr(line.body[0], "value", None)
                    if value is not None:
                        self.use(source, value, flows=[slot])

    def _declare_assigned(self, source: ParsedFile, statement: cst.Assign | cst.AnnAssign) -> None:
        """Declares variables and attributes that get dtypes, and visits other values."""
        line = source.parent(statement)
        for target, value, places in pairs(statement):
            if value is None:
                continue
            slot, reason = self._assigned_slot(source, target, value)
            if slot is not None and reason is None:
                for node in places or (line,):
                    self._declare(slot, source, node)
                self.use(source, value, flows=[slot])
            elif slot is not None and reason is not None:
                self.keep([slot], source, value, reason, chosen=True)
                self.visit(source, value)
            elif reason is not None:
                self.use(source, value, reason=reason)
            else:
                self.visit(source, value)

    def _assigned_slot(
        self, source: ParsedFile, target: cst.BaseExpression, value: cst.BaseExpression
    ) -> tuple[Slot | None, str | None]:
        """Returns the slot that an assignment gives a dtype to, and why the dtype stays."""
        known = self.slots_or_none(source, value)
        if isinstance(target, cst.Subscript) and known is not None:
            key = str(getattr(index_of(target), "raw_value", ""))
            text = f"it is stored in `{source.code(target)}`"
            passed = self.project.unpacked(last_name(target)) if self.follows(key) else []
            self.keep([self.field(t.name, key) for t in passed], source, target, text, chosen=True)
            return None, text
        if isinstance(target, cst.Name):
            slot = self.local(source, target)
            if slot not in (self.of_name(source, target, 6) or ()):
                return None, None
            return slot, "it gets a value that is no dtype" if known is None else None
        if not isinstance(target, cst.Attribute) or not self.follows(target.attr.value):
            return None, None
        if not is_self(target.value):
            return None, f"it is set on `{source.code(target.value)}`" if known else None
        slot = self.field(source.class_of(target) or "", target.attr.value)
        by_data = known is None or known == {DATA}
        return slot, "its value is decided by data" if by_data else None

    # ----------------------------------------------------------------------------------------------
    # Uses
    # ----------------------------------------------------------------------------------------------

    def use(
        self,
        source: ParsedFile,
        node: cst.CSTNode,
        flows: Iterable[Slot] = (),
        edits: Iterable[tuple[cst.CSTNode, object]] = (),
        reason: str | None = None,
        note: str | None = None,
    ) -> None:
        known, flows = self.slots_or_none(source, node), frozenset(flows)
        slots = (known or frozenset()) - {DATA, EXTERNAL}
        chosen = self.constants(source, node) if flows else set()
        is_named = known is not None or self.follows(last_name(node))
        if flows and (not is_named or chosen - dtypes.FLOATS):
            what = ", ".join(chosen - dtypes.FLOATS) or f"`{source.code(node)}`"
            self.keep(flows, source, node, f"{what} is passed to it", chosen=True)
        for name in sorted(chosen & dtypes.HALF_FLOATS):
            self.note(source, node, f"{name} was chosen here: set a policy")
        self.uses.append(Use(source, node, slots - flows, flows, tuple(edits), reason, note))

    def note(self, source: ParsedFile, node: cst.CSTNode, text: str) -> None:
        self.notes.append(Note(source, node, text))

    def visit(self, source: ParsedFile, node: cst.CSTNode) -> None:
        if isinstance(node, (cst.Annotation, cst.Import, cst.ImportFrom, cst.Decorator)):
            return
        if isinstance(node, cst.BaseExpression):
            slots = self.slots(source, node)
            if slots is not None:
                self._other_use(source, node, slots)
                return
        if isinstance(node, cst.If) and self._test(source, node):
            return
        if isinstance(node, cst.FunctionDef):
            self._declare_function(source, node)
        elif isinstance(node, cst.ClassDef):
            self._declare_fields(source, node)
        elif isinstance(node, (cst.Assign, cst.AnnAssign)):
            if not isinstance(source.parent(source.parent(source.parent(node))), cst.ClassDef):
                self._declare_assigned(source, node)
                return
        elif isinstance(node, cst.Call):
            read_call(self, source, node)
            return
        elif isinstance(node, cst.Attribute):
            self.visit(source, node.value)
            return
        elif isinstance(node, cst.Param):
            if node.default is not None and not self.follows(node.name.value):
                self.visit(source, node.default)
            return
        elif isinstance(node, cst.Assert) and self._assertion(source, node):
            return
        if isinstance(node, cst.Dict) and read_dict(self, source, node):
            return
        for child in node.children:
            self.visit(source, child)

    def _test(self, source: ParsedFile, node: cst.If) -> bool:
        """Reads an `if` by slots; returns whether its branches are read too."""
        inner = node.test
        while isinstance(inner, (cst.UnaryOperation, cst.Comparison)):
            inner = inner.expression if isinstance(inner, cst.UnaryOperation) else inner.left
        slots = (self.slots(source, inner) or frozenset()) - {DATA, EXTERNAL}
        if not slots:
            return False
        if not self.is_scale and _refuses(node):
            self.use(source, inner, edits=[(node, None)])
            return True
        if not self.is_scale:
            self._tests.append((source, node, slots))
            for child in (node.body, node.orelse):
                if child is not None:
                    self.visit(source, child)
            return True
        code = source.code(node.test)
        negated = code.startswith("not ") or code.endswith("is None")
        branch = node.body if negated else node.orelse
        self.use(source, inner, edits=[(node, ("inline", branch))])
        self.note(source, node, _SCALE)
        if branch is not None:
            self.visit(source, branch)
        return True

    def _assertion(self, source: ParsedFile, node: cst.Assert) -> bool:
        """Deletes an assertion about a dtype that is passed along."""
        inner = [n for n in nodes_of(node.test) if isinstance(n, (cst.Name, cst.Attribute))]
        found = [n for n in inner if (self.slots(source, n) or frozenset()) - {DATA}]
        if isinstance(node.test, cst.Comparison) and not self.is_scale and not found:
            sides = [node.test.left, *(c.comparator for c in node.test.comparisons)]
            known = [self.slots(source, side) for side in sides]
            if {DATA} in known and None not in known:
                found = [] if self.constants(source, node.test) - dtypes.FLOATS else [node.test]
        for one in found:
            self.use(source, one, edits=[(source.parent(node), None)])
        return bool(found)

    def _other_use(self, source: ParsedFile, node: cst.CSTNode, slots: frozenset[Slot]) -> None:
        """Reads a use that is neither an argument nor a value of an assignment."""
        parent = source.parent(node)
        slots -= {DATA, EXTERNAL}
        if isinstance(parent, cst.Expr) or not slots:
            return
        if isinstance(parent, cst.Comparison) and (decided := self._decided(source, parent)):
            text = f"`{source.code(parent)}` is {decided} now, as in float32"
            edit = (parent, lambda _: cst.Name(decided))
            if isinstance(branches := source.parent(parent), cst.IfExp):
                edit = (branches, functools.partial(_chosen, name=_BRANCHES[decided]))
            self.use(source, node, edits=[edit], note=text)
            return
        what = {
            cst.Return: "it is returned",
            cst.ComparisonTarget: "it is compared",
            cst.Comparison: "it is compared",
            cst.DictElement: "it is stored in a dict",
            cst.FormattedStringExpression: "it is printed",
            cst.Element: "it is stored in a sequence",
        }.get(type(parent), "its use here is not understood")
        self.use(source, node, reason=f"{what} in `{_short(source, node)}`")

    def _decided(self, source: ParsedFile, node: cst.Comparison) -> str:
        """Returns "True" or "False" of a comparison with constants that decides a value, or ""."""
        parent, first = source.parent(node), node.comparisons[0]
        is_test = isinstance(parent, cst.IfExp) and parent.test is node
        named = self.constants(source, first)
        is_value = (isinstance(parent, cst.Assign) or is_test) and len(node.comparisons) == 1
        if not named or not is_value:
            return ""
        negated = isinstance(first.operator, (cst.NotEqual, cst.IsNot, cst.NotIn))
        return str(("float32" in named) != negated)


_BRANCHES = {"True": "body", "False": "orelse"}


def _chosen(updated: cst.IfExp, name: str) -> cst.BaseExpression:
    """Returns a branch of an expression, in its parentheses."""
    branch = getattr(updated, name)
    simple = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber)
    if isinstance(branch, simple) or branch.lpar:
        return branch
    return branch.with_changes(lpar=updated.lpar, rpar=updated.rpar)


def _refuses(node: cst.If) -> bool:
    """Returns whether an `if` only raises, for another dtype than one that is named."""
    statements = [one for line in node.body.body for one in getattr(line, "body", [line])]
    test = node.test
    differs = isinstance(test, cst.Comparison) and isinstance(
        test.comparisons[0].operator, (cst.NotEqual, cst.NotIn)
    )
    return differs and node.orelse is None and isinstance(statements[-1], cst.Raise)


def _short(source: ParsedFile, node: cst.CSTNode) -> str:
    statement = source.enclosing(node, cst.SimpleStatementLine, cst.If) or node
    inner = statement.test if isinstance(statement, cst.If) else statement
    code = source.code(inner)
    return code if len(code) <= 60 else f"{code[:57]}..."


def slot_text(slot: Slot) -> str:
    kind, owner, name = slot
    return f"`{name}`" if kind == "local" else f"`{name}` of {owner}"

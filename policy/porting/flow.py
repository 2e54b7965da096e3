"""Follows dtypes from fields and parameters to layers, casts and calls."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import libcst as cst

from policy.porting import dtypes
from policy.porting.calls import read_call, read_dict
from policy.porting.dtypes import DATA, EXTERNAL, Slot
from policy.porting.edits import Edit, Edits
from policy.porting.slots import SlotReader, Slots
from policy.porting.sources import Elsewhere, ParsedFile
from policy.porting.syntax import assigned, index_of, is_self, last_name, nodes_of, pairs, text_of

_SCALE = (
    'a loss scale is mixed_precision(tx, policy, loss_scale="dynamic") and '
    "policy.value_and_grad(..., loss_scale=loss_scale_of(opt_state))"
)


Change = Edit | str | None


@dataclasses.dataclass(eq=False)
class Use:
    """A use of slots.

    Attributes:
      flows: the slots that it is passed to.
      change: the edit that deletes it, if all slots of `flows` go, or why it stays.
      note: what a reader should know of if it goes.
    """

    node: cst.CSTNode
    slots: frozenset[Slot]
    flows: frozenset[Slot]
    change: Change
    note: str


class DtypeFlow(SlotReader):
    """The slots of a project whose names match a pattern, their uses, and those that go.

    Args:
      sources: the given files.
      elsewhere: the other files of their packages.
      pattern: of the names of fields, parameters and variables to follow.
    """

    def __init__(self, sources: Sequence[ParsedFile], elsewhere: Elsewhere, pattern: str):
        super().__init__(sources, pattern)
        self.elsewhere = elsewhere
        self.passed: set[Slot] = set()  # that calls in the given files pass
        self._uses: list[Use] = []
        self._notes: list[str] = []
        self._kept: dict[Slot, str] = {}  # with notes
        self._chosen: set[Slot] = set()
        self._declared: dict[Slot, list[cst.CSTNode]] = {}
        self._tests: list[tuple[cst.If, frozenset[Slot]]] = []
        for source in sources:
            self.visit(source.module)
        self._check_owners()
        self._settle()

    # ----------------------------------------------------------------------------------------------
    # Results
    # ----------------------------------------------------------------------------------------------

    def edits(self) -> Edits:
        gone = [nodes for slot, nodes in self._declared.items() if slot not in self._kept]
        edits = Edits((node, None) for nodes in gone for node in nodes)
        changes = [use.change for use in self._uses if self._goes(use)]
        edits.update(change for change in changes if isinstance(change, tuple))
        return edits

    def _goes(self, use: Use) -> bool:
        stays = use.slots & self._chosen or use.flows & self._kept.keys()
        return not stays and not isinstance(use.change, str)

    def notes(self) -> list[str]:
        """Returns the notes on slots that stay, and on other lines."""
        own = [note for slot, note in self._kept.items() if slot in self._declared]
        own += [self._note(u.node, u.note) for u in self._uses if u.note and self._goes(u)]
        splatted: dict[tuple[cst.CSTNode, str, str], list[str]] = {}
        for slot in sorted(self._declared.keys() - self._kept.keys()):
            kind, owner, name = slot
            call, where = self.splatted.get(owner), ""
            if call is None and (place := self.elsewhere.splatting(owner)):
                call, where = self._declared[slot][0], f" of {place}"
            if call is not None and kind != "local":
                splatted.setdefault((call, name, where), []).append(owner)
        for (node, name, where), owners in splatted.items():
            text = f"`{name}` of {', '.join(owners)} goes: `**`{where} should not hold it"
            own.append(self._note(node, text))
        return own + self._notes

    def _note(self, node: cst.CSTNode, text: str) -> str:
        return f"{self.place(node)}: {text}"

    # ----------------------------------------------------------------------------------------------
    # Fixed point
    # ----------------------------------------------------------------------------------------------

    def keep(
        self, slots: Iterable[Slot], node: cst.CSTNode, why: str, chosen: bool = False
    ) -> bool:
        """Keeps slots for a reason; of those that are chosen by a caller, all uses stay too."""
        self._chosen |= set(slots) if chosen else set()
        new = [slot for slot in slots if slot not in self._kept and slot not in (DATA, EXTERNAL)]
        for slot in new:
            self._kept[slot] = self._note(node, f"{slot_text(slot)} stays: {why}")
        return bool(new)

    def _settle(self) -> None:
        for slot, places in self._declared.items():
            text = None if self.is_scale else dtypes.stage(slot[2])
            if text is not None and not self._is_float32_softmax(slot):
                self.keep([slot], places[0], text, chosen=True)
        while sum(map(self._settle_use, self._uses)) or self._settle_tests():
            pass

    def _is_float32_softmax(self, slot: Slot) -> bool:
        """Returns whether a dtype of softmaxes is nothing but float32: a policy's is, too."""
        given = [use for use in self._uses if slot in use.flows and not use.slots]
        chosen = [self.constants(use.node) for use in given]
        return "softmax" in slot[2] and bool(chosen) and all(c == {"float32"} for c in chosen)

    def _settle_use(self, use: Use) -> bool:
        if isinstance(use.change, str):
            return self.keep(use.slots, use.node, use.change)
        stays = min((slot for slot in use.flows if slot in self._kept), default=None)
        text = f"it reaches {slot_text(stays)}, which stays" if stays else ""
        changed = stays is not None and self.keep(use.slots | use.flows, use.node, text)
        if use.slots & self._chosen and not use.flows <= self._chosen:
            text = f"{slot_text(min(use.slots & self._chosen))} is passed to it"
            self.keep(use.flows, use.node, text, chosen=True)
            changed = True
        return changed

    def _settle_tests(self) -> bool:
        """Keeps the slots that are tested in an `if` that stays."""
        edits = self.edits()
        changed = False
        for test, slots in self._tests:
            if not edits.is_gone(test):
                changed |= self.keep(slots, test, f"`if {self.code(test.test)}` decides by it")
        return changed

    def _check_owners(self) -> None:
        """Keeps slots that other files pass or read, and parameters of special methods."""
        for slot, places in self._declared.items():
            kind, owner, name = slot
            keep = functools.partial(self.keep, [slot], places[0])
            for definition in self.definitions.get(owner, ()) if kind != "local" else ():
                order = self.order(definition)
                position = order.index(name) if name in order else None
                is_module = self.is_flax_class(definition)
                if place := self.elsewhere.use_of(owner, name, position):
                    keep(f"{place} uses it: port that file too", True)
                    continue
                is_read = kind == "field" and not (is_module and slot in self.passed)
                if is_read and (place := self.elsewhere.reading(name, is_module)):
                    keep(f"{place} reads it: port that file too")
            is_argument = kind == "argument"
            is_required = all(getattr(node, "default", 1) is None for node in places)
            if kind == "local" and self.elsewhere.imports(name):
                keep("another file imports it: port that file too", True)
            if is_argument and slot not in self.passed and is_required:
                keep(f"nothing in the given files calls {owner}", True)
            if is_argument and owner in self.values:
                keep(f"{owner} is passed on as a function", True)
            if is_argument and re.fullmatch("__\\w+__|setup", owner):
                keep(f"{owner} is called through its instances", True)

    # ----------------------------------------------------------------------------------------------
    # Declarations
    # ----------------------------------------------------------------------------------------------

    def _declare(self, slot: Slot, value: cst.CSTNode | None, *nodes: cst.CSTNode) -> None:
        """Declares a slot by the nodes that go with it, and the dtype that it gets there."""
        self._declared.setdefault(slot, []).extend(nodes)
        if value is not None:
            self.use(value, flows=[slot])

    def _declare_fields(self, node: cst.ClassDef) -> None:
        for line, after in zip(node.body.body, (*node.body.body[1:], None), strict=True):
            one = line.body[0] if isinstance(line, cst.SimpleStatementLine) else line
            texts = [after] if after is not None and text_of(after) is not None else []
            for target in assigned(one):
                if isinstance(target, cst.Name) and self.follows(target.value):
                    slot = self.field(node.name.value, target.value)
                    self._declare(slot, getattr(one, "value", None), line, *texts)

    def _declare_assigned(self, statement: cst.Assign | cst.AnnAssign) -> None:
        """Declares variables and attributes that get dtypes, and visits other values."""
        for target, value, places in pairs(statement):
            slot, reason = self._assigned_slot(target, self.slots(value))
            if slot is not None and reason is None:
                self._declare(slot, value, *(places or (self.parent(statement),)))
            elif slot is None and reason is not None:
                self.use(value, change=reason)
            else:
                self.keep([slot] if slot else [], value, reason or "", chosen=True)
                self.visit(value)

    def _assigned_slot(self, target: cst.CSTNode, known: Slots) -> tuple[Slot | None, str | None]:
        """Returns the slot that an assignment gives a dtype to, and why the dtype stays."""
        if isinstance(target, cst.Subscript) and known is not None:
            key = str(getattr(index_of(target), "raw_value", ""))
            text = f"it is stored in `{self.code(target)}`"
            passed = self.unpacked(last_name(target)) if self.follows(key) else []
            self.keep([self.field(t.name, key) for t in passed], target, text, chosen=True)
            return None, text
        if isinstance(target, cst.Name):
            slot = self.local(target)
            if slot not in (self.of_name(target, 6) or ()):
                return None, None
            return slot, "it gets a value that is no dtype" if known is None else None
        if not isinstance(target, cst.Attribute) or not self.follows(target.attr.value):
            return None, None
        if not is_self(target.value):
            return None, f"it is set on `{self.code(target.value)}`" if known else None
        slot = self.field(self.class_of(target), target.attr.value)
        return slot, "its value is decided by data" if known in (None, {DATA}) else None

    # ----------------------------------------------------------------------------------------------
    # Uses
    # ----------------------------------------------------------------------------------------------

    def use(
        self, node: cst.CSTNode, flows: Iterable[Slot] = (), change: Change = None, note: str = ""
    ) -> None:
        known, flows = self.slots(node), frozenset(flows)
        slots = (known or frozenset()) - {DATA, EXTERNAL}
        chosen = self.constants(node) if flows else set()
        is_named = known is not None or self.follows(last_name(node))
        if flows and (not is_named or chosen - dtypes.FLOATS):
            what = ", ".join(sorted(chosen - dtypes.FLOATS)) or f"`{self.code(node)}`"
            self.keep(flows, node, f"{what} is passed to it", chosen=True)
        for name in sorted(chosen & dtypes.HALF_FLOATS):
            self.note(node, f"{name} was chosen here: set a policy")
        self._uses.append(Use(node, slots - flows, flows, change, note))

    def note(self, node: cst.CSTNode, text: str) -> None:
        self._notes.append(self._note(node, text))

    def visit(self, node: cst.CSTNode) -> None:
        if isinstance(node, (cst.Annotation, cst.Import, cst.ImportFrom, cst.Decorator)):
            return
        slots = self.slots(node) if isinstance(node, cst.BaseExpression) else None
        if slots is not None:
            self._other_use(node, slots - {DATA, EXTERNAL})
        elif isinstance(node, cst.Call):
            read_call(self, node)
        elif isinstance(node, cst.Attribute):
            self.visit(node.value)
        elif isinstance(node, cst.Param):
            slot = self.of_parameter(self.parent(self.parent(node)), node.name.value)
            if slot is not None and node.star == "":
                self._declare(slot, node.default, node)
            elif node.default is not None and not self.follows(node.name.value):
                self.visit(node.default)
        elif isinstance(node, (cst.Assign, cst.AnnAssign)) and not self._is_field(node):
            self._declare_assigned(node)
        elif not (
            (isinstance(node, cst.If) and self._test(node))
            or (isinstance(node, cst.Assert) and self._assertion(node))
            or (isinstance(node, cst.Dict) and read_dict(self, node))
        ):
            if isinstance(node, cst.ClassDef):
                self._declare_fields(node)
            for child in node.children:
                self.visit(child)

    def _is_field(self, node: cst.CSTNode) -> bool:
        return isinstance(self.parent(self.parent(self.parent(node))), cst.ClassDef)

    def _test(self, node: cst.If) -> bool:
        """Reads an `if` by slots; returns whether its branches are read too."""
        inner = node.test
        while isinstance(inner, (cst.UnaryOperation, cst.Comparison)):
            inner = inner.expression if isinstance(inner, cst.UnaryOperation) else inner.left
        slots = (self.slots(inner) or frozenset()) - {DATA, EXTERNAL}
        if not slots:
            return False
        branches = [node.body, node.orelse]
        if self.is_scale:
            code = self.code(node.test)
            negated = code.startswith("not ") or code.endswith("is None")
            branches = branches[:1] if negated else branches[1:]
            self.use(inner, change=(node, ("inline", branches[0])))
            self.note(node, _SCALE)
        elif _refuses(node):
            self.use(inner, change=(node, None))
            return True
        else:
            self._tests.append((node, slots))
        for branch in branches:
            if branch is not None:
                self.visit(branch)
        return True

    def _assertion(self, node: cst.Assert) -> bool:
        """Deletes an assertion about a dtype that is passed along."""
        inner = [n for n in nodes_of(node.test) if isinstance(n, (cst.Name, cst.Attribute))]
        found = [n for n in inner if (self.slots(n) or frozenset()) - {DATA}]
        if isinstance(node.test, cst.Comparison) and not self.is_scale and not found:
            sides = [node.test.left, *(c.comparator for c in node.test.comparisons)]
            known = [self.slots(side) for side in sides]
            if {DATA} in known and None not in known:
                found = [] if self.constants(node.test) - dtypes.FLOATS else [node.test]
        for one in found:
            self.use(one, change=(self.parent(node), None))
        return bool(found)

    def _other_use(self, node: cst.CSTNode, slots: frozenset[Slot]) -> None:
        """Reads a use that is neither an argument nor a value of an assignment."""
        parent = self.parent(node)
        if isinstance(parent, cst.Expr) or not slots:
            return
        if isinstance(parent, cst.Comparison) and (decided := self._decided(parent)):
            text = f"`{self.code(parent)}` is {decided} now, as in float32"
            edit = (parent, lambda _: cst.Name(decided))
            if isinstance(branches := self.parent(parent), cst.IfExp):
                name = "body" if decided == "True" else "orelse"
                edit = (branches, functools.partial(_chosen, name=name))
            self.use(node, change=edit, note=text)
            return
        statement = self.enclosing(node, cst.SimpleStatementLine, cst.If) or node
        code = self.code(statement.test if isinstance(statement, cst.If) else statement)
        code = code if len(code) <= 60 else f"{code[:57]}..."
        what = _OTHER_USES.get(type(parent), "its use here is not understood")
        self.use(node, change=f"{what} in `{code}`")

    def _decided(self, node: cst.Comparison) -> str:
        """Returns "True" or "False" of a comparison with constants that decides a value, or ""."""
        parent, first = self.parent(node), node.comparisons[0]
        is_test = isinstance(parent, cst.IfExp) and parent.test is node
        named = self.constants(first)
        is_value = (isinstance(parent, cst.Assign) or is_test) and len(node.comparisons) == 1
        if not named or not is_value:
            return ""
        negated = isinstance(first.operator, (cst.NotEqual, cst.IsNot, cst.NotIn))
        return str(("float32" in named) != negated)


_OTHER_USES = {
    cst.Return: "it is returned",
    cst.ComparisonTarget: "it is compared",
    cst.Comparison: "it is compared",
    cst.DictElement: "it is stored in a dict",
    cst.FormattedStringExpression: "it is printed",
    cst.Element: "it is stored in a sequence",
}


def _chosen(updated: cst.IfExp, name: str) -> cst.BaseExpression:
    """Returns a branch of an expression, in its parentheses."""
    branch = getattr(updated, name)
    simple = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.BaseNumber)
    if isinstance(branch, simple) or branch.lpar:
        return branch
    return branch.with_changes(lpar=updated.lpar, rpar=updated.rpar)


def _refuses(node: cst.If) -> bool:
    """Returns whether an `if` only raises, for another dtype than one that is named."""
    last, test = node.body.body[-1], node.test
    last = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last
    if node.orelse is not None or not isinstance(test, cst.Comparison):
        return False
    is_other = isinstance(test.comparisons[0].operator, (cst.NotEqual, cst.NotIn))
    return is_other and isinstance(last, cst.Raise)


def slot_text(slot: Slot) -> str:
    kind, owner, name = slot
    return f"`{name}`" if kind == "local" else f"`{name}` of {owner}"

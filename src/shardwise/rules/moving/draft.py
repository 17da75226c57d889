"""Draft: one file being rewritten. Rules put edits, needs and notes into it; `finish` makes the new text."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field, fields

from shardwise.findings import Edit, Severity, SourceFinding, Status
from shardwise.rules.moving.catalogue import KINDS
from shardwise.rules.moving.edits import change
from shardwise.rules.moving.support import IMPORTS, functions, is_ours
from shardwise.rules.source import FileContext

ROAD1 = "keep it on FSDP2 by importing from shardwise.fsdp1 instead of torch.distributed.fsdp"


@dataclass(slots=True)
class Draft:
    """What shall become of one file."""

    context: FileContext
    target: str
    """`torch` or `shardwise`."""
    edits: list[Edit] = field(default_factory=list)
    notes: list[SourceFinding] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Names that need an import, of `support.IMPORTS`."""
    helpers: set[str] = field(default_factory=set)
    """Functions to carry along."""
    features: set[str] = field(default_factory=set)
    """Which parts of them are used."""
    taken: set[ast.AST] = field(default_factory=set)
    """Nodes that a rule has rewritten, for later rules to leave alone."""

    def snapshot(self) -> Draft:
        """A copy to go back to, should a rule find that it cannot finish."""
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        return Draft(**{name: copy.copy(value) if name not in ("context",) else value for name, value in parts.items()})

    def restore(self, earlier: Draft) -> None:
        """Forget what has happened since."""
        for one in fields(self):
            setattr(self, one.name, getattr(earlier, one.name))

    def name(self, wanted: str) -> str:
        """Use an importable name in emitted code."""
        assert wanted in IMPORTS, wanted
        self.names.add(wanted)
        return wanted

    def helper(self, wanted: str, *features: str) -> str:
        """Use a carried function in emitted code."""
        assert wanted in functions(), wanted
        self.helpers.add(wanted)
        self.features.update(features)
        return wanted

    def nodes(self) -> list[ast.AST]:
        """Every node but those of functions that an earlier run has carried into the file."""
        if not self._has_carried():
            return list(self.context.parents)
        return [node for node in self.context.parents if not self._is_carried(node)]

    def calls(self) -> list[ast.Call]:
        """Every call, in source order, but those in carried functions."""
        if not self._has_carried():
            return self.context.calls
        return [call for call in self.context.calls if not self._is_carried(call)]

    def _has_carried(self) -> bool:
        return any(function.name in functions() for function in self.context.functions)

    def _is_carried(self, node: ast.AST) -> bool:
        function = self.context.enclosing_function(node)
        return function is not None and function.name in functions()

    def is_local(self, node: ast.AST, name: str) -> bool:
        """Whether a name means something else where `node` stands than emitted code would mean by it."""
        found = self.context.scope(node).find(name)
        if found is None:
            return False
        if not isinstance(found[0].node, ast.Module):
            return True
        return not any(is_ours(name, one.origin) for one in found[1])

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Put other text in place of a node."""
        self.edits.append(change(*self.context.positions.span(node), text))
        self.taken.add(node)

    def edit(self, start: int, end: int, text: str) -> None:
        """Put other text in place of a stretch."""
        self.edits.append(change(start, end, text))

    def edit_after_open(self, call: ast.Call, text: str) -> None:
        """Put text behind a call's opening bracket; no comma is left before the closing one."""
        offset = self.context.positions.span(call.func)[1]
        while self.context.text[offset] != "(":
            offset += 1
        empty = not call.args and not call.keywords
        self.edits.append(change(offset + 1, offset + 1, text.rstrip(", ") if empty else text))

    def insert_before(self, statement: ast.stmt, lines: list[str]) -> None:
        """Put statements in front of one that starts its line."""
        start, _ = self.context.positions.span(statement)
        if decorators := getattr(statement, "decorator_list", None):
            start = self.context.positions.span(decorators[0])[0] - 1
        indent = self.indent(statement)
        newline = self.newline
        text = "".join(f"{line}{newline}{indent}" for line in "\n".join(lines).split("\n"))
        self.edits.append(change(start, start, text))

    def indent(self, statement: ast.stmt) -> str:
        """The white space before a statement."""
        line = self.context.positions.line(statement.lineno)
        return line[: len(line) - len(line.lstrip(" \t\x0c"))]

    def starts_line(self, statement: ast.stmt) -> bool:
        """Whether nothing but white space stands before a statement on its line, and no `;` joins another."""
        start, _ = self.context.positions.span(statement)
        line_start = self.context.positions.starts[statement.lineno - 1]
        return self.context.text[line_start:start].strip() == ""

    @property
    def newline(self) -> str:
        """How the file ends its lines."""
        return "\r\n" if "\r\n" in self.context.text else "\n"

    def note(self, code: str, node: ast.AST, status: Status, message: str, fix: str = "") -> None:
        """Say something about a place."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        self.notes.append(
            SourceFinding(
                code=code,
                name=KINDS[code].name,
                message=message,
                where=f"{self.context.path}:{line}:{column}",
                severity=Severity.WARNING if status is Status.NEEDS_DECISION else Severity.NOTE,
                fix=fix,
                path=self.context.path,
                line=line,
                column=column,
                status=status,
            )
        )

    def rewritten(self, code: str, node: ast.AST, message: str, fix: str = "") -> None:
        """Say that a place is FSDP2 now."""
        self.note(code, node, Status.REWRITTEN, message, fix)

    def undecided(self, code: str, node: ast.AST, message: str, fix: str) -> None:
        """Say what a person must decide."""
        self.note(code, node, Status.NEEDS_DECISION, message, fix)

    def reported(self, code: str, node: ast.AST, message: str, fix: str = "") -> None:
        """Say what is worth knowing."""
        self.note(code, node, Status.REPORTED, message, fix)

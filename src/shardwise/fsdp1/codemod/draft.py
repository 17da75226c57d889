"""A draft of a rewritten file: edits, findings, emitted helpers."""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field, fields

from shardwise.findings import Edit, Severity, SourceFinding, Status
from shardwise.fsdp1.codemod.emitted import functions, is_ours, origins
from shardwise.source.edits import change
from shardwise.source.syntax import FileContext


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of finding."""

    code: str
    name: str
    summary: str


_KINDS = (
    ("SW101", "fsdp1-constructor", "FSDP(...) is FSDP1's constructor; FSDP2 shards in place, with fully_shard."),
    ("SW102", "fsdp1-class-as-value", "FSDP's class is passed around, subclassed or chosen at run time."),
    ("SW103", "fsdp1-enable-wrap", "enable_wrap and wrap build FSDP1 units while the model is being built."),
    ("SW110", "fsdp1-state-dict-type", "state_dict_type says how FSDP1 gathers a state dict."),
    ("SW111", "plain-state-dict", "state_dict() of a sharded model holds shards under FSDP2, not whole tensors."),
    ("SW112", "fsdp1-optimizer-state", "FSDP1 has calls of its own for the state of an optimizer."),
    ("SW113", "fsdp1-local-state-dict", "LOCAL_STATE_DICT holds flat shards, which FSDP2 does not have."),
    ("SW120", "fsdp1-clip-grad-norm", "clip_grad_norm_ is a method of FSDP1's models only."),
    ("SW121", "fsdp1-no-sync", "no_sync is a context of FSDP1's models; FSDP2 has a switch."),
    ("SW122", "sharded-grad-scaler", "ShardedGradScaler is FSDP1's; FSDP2 works with torch's own."),
    ("SW123", "fsdp1-type-check", "isinstance and annotations name FSDP1's class."),
    ("SW124", "summon-full-params", "summon_full_params gathers FSDP1's flat parameters."),
    ("SW125", "recomputation-after-sharding", "Activation checkpointing must be applied before fully_shard."),
    ("SW126", "fsdp1-inner-module", "`.module` reaches into FSDP1's wrapper; FSDP2 has none."),
    ("SW127", "flat-parameter", "FSDP1's flat parameters and handles do not exist in FSDP2."),
    ("SW128", "optimizer-before-sharding", "An optimizer built before fully_shard updates tensors nobody uses."),
    ("SW129", "offload-needs-gloo", "Offloaded gradients are on the CPU, where NCCL cannot reduce them."),
    ("SW130", "fsdp1-communication-hook", "register_comm_hook has no direct counterpart in FSDP2."),
    ("SW131", "fsdp1-static-call", "A function of FSDP1's class that works on FSDP1's models only."),
    ("SW132", "made-for-fsdp1", "A function that may know FSDP1's models only is handed the sharded model."),
    ("SW133", "wrapped-elsewhere", "No file given wraps a model: the one that does must move to FSDP2 as well."),
    ("SW134", "ranks-drawn-apart", "Ranks draw different weights, and each keeps its part of its own."),
    ("SW135", "whole-numbers", "Sizes and norms of sharded parameters are of the whole, not of a rank's part."),
    ("SW136", "forward-by-name", "FSDP2 gathers parameters when a module is called, not when its forward is."),
    ("SW180", "unreadable-source", "The file cannot be read as Python, so nothing in it is rewritten."),
)
KINDS = {code: FindingKind(code, name, summary) for code, name, summary in _KINDS}


KEEP_FSDP1_API = "keep it on FSDP2 by importing from shardwise.fsdp1 instead of torch.distributed.fsdp"


@dataclass(slots=True)
class FileDraft:
    """What shall become of one file."""

    context: FileContext
    target: str
    """`torch` or `shardwise`."""
    edits: list[Edit] = field(default_factory=list)
    notes: list[SourceFinding] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Names that need an import."""
    helpers: set[str] = field(default_factory=set)
    """Functions to emit."""
    features: set[str] = field(default_factory=set)
    """Their optional parameters that are needed."""
    taken: set[ast.AST] = field(default_factory=set)
    """Nodes that a rule has rewritten, for later rules to leave alone."""

    def snapshot(self) -> FileDraft:
        """A copy to go back to, should a rule find that it cannot finish."""
        parts = {one.name: getattr(self, one.name) for one in fields(self)}
        return FileDraft(
            **{name: copy.copy(value) if name not in ("context",) else value for name, value in parts.items()}
        )

    def restore(self, earlier: FileDraft) -> None:
        """Forget what has happened since."""
        for one in fields(self):
            setattr(self, one.name, getattr(earlier, one.name))

    def name(self, wanted: str) -> str:
        """Use an importable name in emitted code."""
        assert wanted in origins(), wanted
        self.names.add(wanted)
        return wanted

    def helper(self, wanted: str, *features: str) -> str:
        """Use a helper function in emitted code."""
        assert wanted in functions(), wanted
        self.helpers.add(wanted)
        self.features.update(features)
        return wanted

    def nodes(self) -> list[ast.AST]:
        """Every node but those of helpers that an earlier run has emitted into the file."""
        return [node for node in self.context.parents if not self._is_emitted(node)]

    def calls(self) -> list[ast.Call]:
        """Every call, in source order, but those in emitted helpers."""
        return [call for call in self.context.calls if not self._is_emitted(call)]

    def _is_emitted(self, node: ast.AST) -> bool:
        if not any(function.name in functions() for function in self.context.functions):
            return False
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

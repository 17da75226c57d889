"""A draft of a rewritten file: edits, findings, and helpers of `emitted_helpers.py`, which is never imported."""

from __future__ import annotations

import ast
import copy
import functools
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from shardwise.errors import SourceError
from shardwise.findings import Edit, Severity, SourceFinding, Status, source_finding
from shardwise.fsdp1.codemod.flow import Holds, Sharded, flow_of
from shardwise.fsdp1.codemod.program import Program
from shardwise.pages import read_pages
from shardwise.source.edits import apply, change
from shardwise.source.syntax import FileContext, Function, all_parameters, canonical

_FEATURES = "policy mp_policy buffer_dtype ignored param_init_fn sync_from_rank0 is_part use_orig_params "
_FEATURES += "strategy process_group device_mesh device_id"
FEATURES = frozenset(_FEATURES.split())
"""Parameters of helpers that only some programs need."""
_PREFIX = "_fsdp2"
IMPORTED_AS = "fsdp2_"
_UNMISTAKABLE = {"CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "OffloadPolicy"}


@functools.cache
def _helpers() -> FileContext:
    file = resources.files("shardwise.fsdp1").joinpath("emitted_helpers.py")
    return FileContext(file.read_text(encoding="utf-8"), file.name)


@functools.cache
def definitions() -> dict[str, Function | ast.ClassDef]:
    """All helper functions and classes by name."""
    return {one.name: one for one in _helpers().tree.body if isinstance(one, Function | ast.ClassDef)}


def fsdp1_parameters() -> list[str]:
    """The parameters of FSDP1's constructor."""
    return [one.arg for one in all_parameters(definitions()["_fully_shard_like_fsdp1"].args)]  # pyrefly: ignore


def emitted_in(context: FileContext) -> dict[str, Function | ast.ClassDef]:
    """The helpers that an earlier run has written into a file, by the name that they have there."""
    found = {}
    for one in context.tree.body:
        if isinstance(one, Function | ast.ClassDef):
            ours = definitions().get(one.name.removeprefix(_PREFIX))
            if ours is not None and ast.get_docstring(one) == ast.get_docstring(ours):
                found[one.name] = one
    return found


def name_in(context: FileContext, wanted: str) -> str:
    """The name of a helper in a file: another one where the file means something else by it."""
    is_taken = wanted in context.scopes[context.tree].names and wanted not in emitted_in(context)
    return _PREFIX + wanted if is_taken else wanted


@functools.cache
def origins() -> dict[str, str]:
    """Names that emitted code imports, and the public name that each stands for."""
    names = _helpers().scopes[_helpers().tree].names
    return {name: bindings[0].origin for name, bindings in names.items() if bindings[0].origin}


def is_ours(name: str, origin: str | None) -> bool:
    """Whether a name of a file, imported from `origin`, is the one emitted code means.

    Packages that run on several releases of torch re-export FSDP2's classes under names nobody else uses.
    """
    if not origin:
        return False
    return canonical(origin) == origins()[name] or (name in _UNMISTAKABLE and origin.endswith(f".{name}"))


def assemble(wanted: Iterable[str], features: Collection[str]) -> list[tuple[str, str]]:
    """The helpers asked for and those they call, as (name, text) in the order of their file.

    Args:
        wanted: Names of functions and classes.
        features: Of `FEATURES`, and other parameters, those that the program needs.
    """
    found: dict[str, str] = {}
    waiting = list(wanted)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _text(definitions()[name], features)
            waiting += definitions().keys() & set(re.findall(r"\w+", found[name]))
    return [(name, found[name]) for name in definitions() if name in found]


def names_used(text: str) -> list[str]:
    """The names in a text that need an import."""
    words = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return [name for name in origins() if name in words]


def _text(definition: Function | ast.ClassDef, features: Collection[str]) -> str:
    """The text of a helper without the parameters that are not needed and the `if` statements that test them."""
    parameters = all_parameters(definition.args) if isinstance(definition, Function) else []
    own_lines = {one.arg: one.lineno for one in parameters if one.lineno > definition.lineno}
    unwanted = FEATURES & own_lines.keys() - set(features)
    left_out: set[int] = set()
    for node in ast.walk(definition):
        if isinstance(node, ast.If) and any(getattr(one, "id", None) in unwanted for one in ast.walk(node.test)):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    used = {node.id for node in ast.walk(definition) if isinstance(node, ast.Name) and node.lineno not in left_out}
    if unwanted:  # else all are kept: FSDP1 settings that nothing reads are accepted
        left_out.update(line for name, line in own_lines.items() if name not in {*used, *features})
    first = min([definition.lineno, *(one.lineno for one in definition.decorator_list)])
    numbers = range(first, (definition.end_lineno or first) + 1)
    return "\n".join(_helpers().positions.line(number) for number in numbers if number not in left_out)


@dataclass(frozen=True, slots=True)
class FindingKind:
    """One kind of finding."""

    code: str
    name: str
    summary: str


_HEAD = re.compile(r"# (SW1[0-8]\d) (\S+)\n\n([^\n]+)\n")


@functools.cache
def finding_kinds() -> dict[str, FindingKind]:
    """The kinds of findings by code, from the first lines of their pages."""
    heads = (_HEAD.match(text) for text in read_pages("docs/rules").values())
    return {head[1]: FindingKind(*head.groups()) for head in heads if head is not None}


KEEP_FSDP1_API = "keep it on FSDP2 by importing from shardwise.fsdp1 instead of torch.distributed.fsdp"


class Blocked(Exception):
    """Code that stays as it is: why, what to do about it, and the place and code of the finding if not the usual."""

    def __init__(self, why: str, fix: str, node: ast.AST | None = None, code: str = "") -> None:
        super().__init__(why)
        self.why, self.fix, self.node, self.code = why, fix, node, code


def status_fields(code: str, status: Status) -> dict[str, Any]:
    """The fields of a finding that follow from its code: a rewritten setting of a framework is worth a look."""
    quiet = {Status.REPORTED, Status.REWRITTEN} if code <= "SW180" else {Status.REPORTED}
    severity = Severity.NOTE if status in quiet else Severity.WARNING
    return {"code": code, "name": finding_kinds()[code].name, "status": status, "severity": severity}


def finding_at(
    file: FileContext, node: ast.AST, code: str, message: str, status: Status, fix: str = "", edits: Iterable[Edit] = ()
) -> SourceFinding:
    """What became of the code at a node; the whole file's tree stands for its first line."""
    line, column = getattr(node, "lineno", 1), 1
    if isinstance(node, ast.expr | ast.stmt):
        column = file.positions.column(line, file.positions.span(node)[0])
    more = {"edits": tuple(edits), **status_fields(code, status)}
    return source_finding(file.path, line, column, message=message, fix=fix, **more)


@dataclass(slots=True)
class FileDraft:
    """What shall become of one file."""

    context: FileContext
    program: Program
    """All files given."""
    target: str
    """`torch` or `shardwise`."""
    edits: list[Edit] = field(default_factory=list)
    notes: list[SourceFinding] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """Names that need an import."""
    renamed: set[str] = field(default_factory=set)
    """Those that the file uses for something else, imported under another name."""
    helpers: set[str] = field(default_factory=set)
    """Functions and classes to emit."""
    features: set[str] = field(default_factory=set)
    """Their optional parameters that are needed."""
    taken: set[ast.AST] = field(default_factory=set)
    """Nodes that a rule has rewritten, for later rules to leave alone."""
    emitted: set[ast.AST] = field(init=False)
    """Nodes of helpers that an earlier run has emitted into the file."""

    def __post_init__(self) -> None:
        self.emitted = {inner for one in emitted_in(self.context).values() for inner in ast.walk(one)}

    def snapshot(self) -> dict[str, Any]:
        """What `restore` goes back to."""
        parts = ("edits", "notes", "names", "renamed", "helpers", "features", "taken")
        return {name: copy.copy(getattr(self, name)) for name in parts}

    def restore(self, earlier: dict[str, Any]) -> None:
        """Forget what has happened since."""
        for name, value in earlier.items():
            setattr(self, name, value)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Undo what the block did if it raises Blocked, or if its edits collide with earlier ones.

        Raises:
            Blocked: In both cases.
        """
        earlier = self.snapshot()
        try:
            yield
            apply(self.context.text, self.edits)
        except Blocked:
            self.restore(earlier)
            raise
        except SourceError:
            self.restore(earlier)
            raise Blocked("another rewrite touches the same lines", "rewrite it by hand") from None

    @property
    def sharded(self) -> Sharded:
        """Which variables hold a wrapped model."""
        return flow_of(self.program).file(self.context)

    def holds(self, node: ast.expr, method: str = "") -> Holds:
        """Whether an expression is a wrapped model; of a subclass, one that has no such method of its own."""
        return Holds.NEVER if method and self.sharded.has_own(node, method) else self.sharded.holds(node)

    def source(self, node: ast.expr | ast.stmt | None) -> str:
        """The text of a node; empty where there is none."""
        return self.context.source(node) if node is not None else ""

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """The offsets of a node's first character and behind its last."""
        return self.context.positions.span(node)

    def name(self, wanted: str) -> str:
        """Use an importable name in emitted code; the name that it has in this file.

        A file with its own `get_model_state_dict` keeps it. With its own `fully_shard` it may know FSDP2 already, and
        the name is refused later.
        """
        assert wanted in origins(), wanted
        bindings = self.context.scopes[self.context.tree].names.get(wanted, [])
        is_taken = bool(bindings) and not any(is_ours(wanted, one.origin) for one in bindings)
        is_taken &= origins()[wanted].startswith("torch.distributed.checkpoint.")
        (self.renamed if is_taken else self.names).add(wanted)
        return f"{IMPORTED_AS}{wanted}" if is_taken else wanted

    def helper(self, wanted: str, *features: str) -> str:
        """Use a helper function or class in emitted code; its name in this file."""
        assert wanted in definitions(), wanted
        self.helpers.add(wanted)
        self.features.update(features)
        return name_in(self.context, wanted)

    def nodes(self) -> list[ast.AST]:
        """Every node but those of helpers that an earlier run has emitted into the file."""
        return [node for node in self.context.parents if node not in self.emitted]

    def calls(self) -> list[ast.Call]:
        """Every call, in source order, but those in emitted helpers."""
        return [call for call in self.context.calls if call not in self.emitted]

    def method_calls(self, name: str) -> Iterator[tuple[ast.Call, ast.Attribute]]:
        """Every call `x.name(...)` that no rule has taken when its turn comes."""
        for call in self.calls():
            if isinstance(call.func, ast.Attribute) and call.func.attr == name and call not in self.taken:
                yield call, call.func

    def is_local(self, node: ast.AST, name: str) -> bool:
        """Whether a name means something else where `node` stands than emitted code would mean by it."""
        found = self.context.scope(node).find(name)
        if found is None or not isinstance(found[0].node, ast.Module):
            return found is not None
        return not any(is_ours(name, one.origin) for one in found[1])

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Put other text in place of a node."""
        self.edit(*self.span(node), text)
        self.taken.add(node)

    def edit(self, start: int, end: int, text: str) -> None:
        """Put other text in place of a stretch."""
        self.edits.append(change(start, end, text))

    def insert_before(self, statement: ast.stmt, lines: list[str]) -> None:
        """Put statements in front of one that starts its line."""
        start = self.span(statement)[0]
        text = "".join(f"{line}{self.newline}{self.indent(statement)}" for line in "\n".join(lines).split("\n"))
        self.edit(start, start, text)

    def indent(self, statement: ast.stmt) -> str:
        """The white space before a statement."""
        line = self.context.positions.line(statement.lineno)
        return line[: len(line) - len(line.lstrip(" \t\x0c"))]

    def starts_line(self, statement: ast.stmt) -> bool:
        """Whether nothing but white space stands before a statement on its line."""
        line_start = self.context.positions.starts[statement.lineno - 1]
        return self.context.text[line_start : self.span(statement)[0]].strip() == ""

    @property
    def newline(self) -> str:
        """How the file ends its lines."""
        return "\r\n" if "\r\n" in self.context.text else "\n"

    def note(self, code: str, node: ast.AST, status: Status, message: str, fix: str = "") -> None:
        """Say something about a place."""
        self.notes.append(finding_at(self.context, node, code, message, status, fix))

    def rewritten(self, code: str, node: ast.AST, message: str) -> None:
        """Say that a place is FSDP2 now."""
        self.note(code, node, Status.REWRITTEN, message)

    def undecided(self, code: str, node: ast.AST, message: str, fix: str) -> None:
        """Say what a person must decide."""
        self.note(code, node, Status.NEEDS_DECISION, message, fix)

    def reported(self, code: str, node: ast.AST, message: str, fix: str) -> None:
        """Say what is worth knowing."""
        self.note(code, node, Status.REPORTED, message, fix)

"""Finding: the result type of lint, migrate, check and verify. No torch, no I/O."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from shardwise.errors import SourceError


class Severity(enum.StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    """The run fails or trains wrongly."""
    WARNING = "warning"
    """It runs, but probably not as intended."""
    NOTE = "note"
    """Good to know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One problem or note, with a fix."""

    code: str
    """`SWnnn`; never reused for something else."""
    message: str
    """One sentence, naming the offending thing."""
    where: str = ""
    """`file:line`, a module's name, a config path or a rank."""
    severity: Severity = Severity.WARNING
    """How much it matters."""
    fix: str = ""
    """The smallest change that fixes it."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        fix = f" (fix: {self.fix})" if self.fix else ""
        return f"{place}{self.severity.value} {self.code}: {self.message}{fix}"


class Safety(enum.StrEnum):
    """Effect of a finding's edits on the program."""

    SAFE = "safe"
    """The program means the same, or what it plainly meant to."""
    UNSAFE = "unsafe"
    """Probably correct, but needs review."""
    MANUAL = "manual"
    """No edits: needs a decision."""


class Status(enum.StrEnum):
    """Outcome for the code of a `migrate` finding."""

    REWRITTEN = "rewritten"
    NEEDS_DECISION = "needs-decision"
    REPORTED = "reported"


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Replace the characters from `start` to `end` of a file's text by `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFinding(Finding):
    """A finding at a place in a source file; `where` is `path:line:column`."""

    path: str
    """As the user spelled it; `-` is standard input."""
    line: int
    """From 1."""
    column: int = 1
    """From 1, in characters."""
    end_line: int = 0
    """The last line of the code in question; 0 where only the place is known."""
    end_column: int = 0
    """Behind its last character."""
    name: str = ""
    """The rule's name, as in `optimizer-before-shard`."""
    safety: Safety = Safety.MANUAL
    """Whether `edits` may be applied without review."""
    status: Status = Status.REPORTED
    """For `migrate`: outcome for the code."""
    edits: tuple[Edit, ...] = ()
    """Edits of `--fix`, applied atomically."""


def source_finding(path: str, line: int, column: int, **fields: Any) -> SourceFinding:
    """A finding at a place of a file, with the other fields as given."""
    return SourceFinding(where=f"{path}:{line}:{column}", path=path, line=line, column=column, **fields)


def unreadable_source(path: str, error: SourceError, **fields: Any) -> SourceFinding:
    """A finding about a file that cannot be read, at the place that the error names; else at its start."""
    place = re.search(r":(\d+)(?::(\d+))?$", error.where)
    line, column = (int(place[1]), int(place[2] or 1)) if place else (1, 1)
    return source_finding(path, line, column, **fields)

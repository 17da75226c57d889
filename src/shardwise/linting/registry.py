"""The registry of lint rules: each is one small function with a code, a name, a severity and a safety."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from shardwise.findings import Edit, Safety, Severity, SourceFinding
from shardwise.source.statements import read_program
from shardwise.source.syntax import FileContext
from shardwise.source.usage import Shard, Usage
from shardwise.source.values import ProgramEvent

UNREADABLE = "SW200"
_HOMES = (
    "arguments",
    "checkpoints",
    "devices",
    "forward_calls",
    "gradients",
    "leftovers",
    "losses",
    "meta",
    "nesting",
    "order",
    "precision",
    "structure",
)


@dataclass(slots=True)
class LintContext:
    """A file as rules see it: its syntax, and what its program does."""

    file: FileContext
    _usages: list[Usage] | None = field(default=None, init=False)

    @property
    def usages(self) -> list[Usage]:
        """What the program does with its models, run by run; read on first use, for the rules that need it."""
        if self._usages is None:
            self._usages = [Usage(trace) for trace in read_program(self.file)]
        return self._usages

    @property
    def events(self) -> Iterator[tuple[Usage, ProgramEvent]]:
        """Every event of every run."""
        return ((usage, event) for usage in self.usages for event in usage.events)

    @property
    def shards(self) -> Iterator[tuple[Usage, Shard]]:
        """Every module that is sharded, in every run."""
        return ((usage, shard) for usage in self.usages for shard in usage.shards)

    def events_of(self, *names: str) -> Iterator[tuple[Usage, ProgramEvent]]:
        """Every call of one of these public names, in every run."""
        return ((usage, event) for usage, event in self.events if event.is_call_to(*names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Where a rule found something, and what it says."""

    node: ast.expr | ast.stmt | ast.alias
    message: str
    fix: str = ""
    edits: tuple[Edit, ...] = ()


Check = Callable[[LintContext], Iterator[Hit]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that lint looks for."""

    code: str
    name: str
    """The bad pattern, in kebab case."""
    summary: str
    """One sentence, the first of the function's docstring."""
    severity: Severity
    safety: Safety
    """Of its edits; manual where it has none."""
    preview: bool
    """New: runs only when asked for by its code, or with `--preview`."""
    check: Check

    def run(self, reading: LintContext) -> Iterator[SourceFinding]:
        """The rule's findings in one file, one a place."""
        seen: set[tuple[int, int]] = set()
        for hit in self.check(reading):
            finding = self._finding(reading.file, hit)
            if (finding.line, finding.column) not in seen:
                seen.add((finding.line, finding.column))
                yield finding

    def _finding(self, file: FileContext, hit: Hit) -> SourceFinding:
        node, positions = hit.node, file.positions
        start, end = positions.span(node)
        line, end_line = node.lineno, node.end_lineno or node.lineno
        column = positions.column(line, start)
        return SourceFinding(
            code=self.code,
            name=self.name,
            message=hit.message,
            where=f"{file.path}:{line}:{column}",
            severity=self.severity,
            fix=hit.fix,
            path=file.path,
            line=line,
            column=column,
            end_line=end_line,
            end_column=positions.column(end_line, end),
            safety=self.safety if hit.edits else Safety.MANUAL,
            edits=hit.edits,
        )


_RULES: dict[str, Rule] = {}


def rule(
    code: str, name: str, *, severity: Severity, safety: Safety = Safety.MANUAL, preview: bool = False
) -> Callable[[Check], Check]:
    """Register a function as a rule; the first line of its docstring is the rule's summary."""

    def register(check: Check) -> Check:
        summary = (check.__doc__ or "").partition("\n")[0]
        assert code not in _RULES, f"{code} is taken"
        assert summary, f"{code} has no docstring"
        _RULES[code] = Rule(
            code=code, name=name, summary=summary, severity=severity, safety=safety, preview=preview, check=check
        )
        return check

    return register


@cache
def all_rules() -> dict[str, Rule]:
    """Every lint rule by its code, in order."""
    for home in _HOMES:
        import_module(f"shardwise.linting.rules.{home}")
    return dict(sorted(_RULES.items()))

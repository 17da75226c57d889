"""The registry of lint rules: each is a small function with a code, a name, a severity and a safety."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pkgutil import iter_modules

from shardwise.findings import Edit, Safety, Severity, SourceFinding, source_finding
from shardwise.source.interpreter import read_program
from shardwise.source.syntax import FileContext, calls_in, checked_types
from shardwise.source.trace import Shard, Trace
from shardwise.source.values import ProgramEvent

UNREADABLE = "SW200"


class LintContext:
    """A file for rules: its syntax tree, and the traces of its program.

    Args:
        file: The parsed file; its program is interpreted on first use, for rules that need it.
    """

    def __init__(self, file: FileContext) -> None:
        self.file = file

    @cached_property
    def traces(self) -> list[Trace]:
        """Traces of the program: its models, optimizers and calls, one per entry point."""
        return read_program(self.file)

    @property
    def events(self) -> Iterator[tuple[Trace, ProgramEvent]]:
        """Yield every event of every trace."""
        return ((trace, event) for trace in self.traces for event in trace.events)

    @property
    def shards(self) -> Iterator[tuple[Trace, Shard]]:
        """Yield every sharded module of every trace."""
        return ((trace, shard) for trace in self.traces for shard in trace.shards)

    def events_of(self, *names: str) -> Iterator[tuple[Trace, ProgramEvent]]:
        """Yield every call of one of these public names, in every trace."""
        return ((trace, event) for trace, event in self.events if event.is_call_to(*names))

    def asks_kind(self, node: ast.AST) -> bool:
        """Whether the function around a node, or a function it calls, tests `isinstance(..., FSDPModule)`."""
        function = self.file.enclosing_function(node)
        called = [self.file.definition(one.func) for one in calls_in(function)] if function is not None else []
        around = [one for one in (function, *called) if one is not None]
        asked = [one for outer in around for inner in ast.walk(outer) for one in checked_types(inner)]
        return any(self.file.is_any(one, {"torch.distributed.fsdp.FSDPModule"}) for one in asked)


@dataclass(frozen=True, slots=True)
class Hit:
    """Location and message of a finding."""

    node: ast.expr | ast.stmt | ast.alias
    message: str
    fix: str = ""
    """Fix of this finding; empty: the rule's."""
    edits: tuple[Edit, ...] = ()


Check = Callable[[LintContext], Iterator[Hit]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A lint rule."""

    code: str
    name: str
    """The bad pattern, in kebab case."""
    summary: str
    """First sentence of the function's docstring."""
    severity: Severity
    safety: Safety
    """Safety of the rule's edits; manual if it has none."""
    preview: bool
    """Whether the rule is new: it runs only if selected by its code, or with `--preview`."""
    fix: str
    """Fix for findings that have none of their own."""
    check: Check

    def run(self, context: LintContext) -> list[SourceFinding]:
        """Return the rule's findings in one file, at most one per location."""
        found: dict[tuple[int, int], SourceFinding] = {}
        for hit in self.check(context):
            finding = self._finding(context.file, hit)
            found.setdefault((finding.line, finding.column), finding)
        return list(found.values())

    def _finding(self, file: FileContext, hit: Hit) -> SourceFinding:
        start, end = file.positions.span(hit.node)
        line, end_line = hit.node.lineno, hit.node.end_lineno or hit.node.lineno
        return source_finding(
            file.path,
            line,
            file.positions.column(line, start),
            code=self.code,
            name=self.name,
            message=hit.message,
            severity=self.severity,
            fix=hit.fix or self.fix,
            end_line=end_line,
            end_column=file.positions.column(end_line, end),
            safety=self.safety if hit.edits else Safety.MANUAL,
            edits=hit.edits,
        )


_RULES: dict[str, Rule] = {}


def rule(
    code: str,
    severity: Severity = Severity.ERROR,
    *,
    fix: str = "",
    safety: Safety = Safety.MANUAL,
    preview: bool = False,
) -> Callable[[Check], Check]:
    """Register a function as a rule with the function's name; the docstring's first line is the rule's summary."""

    def register(check: Check) -> Check:
        summary = (check.__doc__ or "").partition("\n")[0]
        assert code not in _RULES, f"{code} is taken"
        assert summary, f"{code} has no docstring"
        name = check.__name__.replace("_", "-")
        _RULES[code] = Rule(code, name, summary, severity, safety, preview, fix, check)
        return check

    return register


@cache
def all_rules() -> dict[str, Rule]:
    """Return every lint rule by code, sorted."""
    from shardwise.linting import rules

    for module in iter_modules(rules.__path__):
        import_module(f"{rules.__name__}.{module.name}")
    return dict(sorted(_RULES.items()))

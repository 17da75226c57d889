"""What a rewritten file must pass before it is written."""

from __future__ import annotations

import difflib
import re
import warnings
from collections import Counter
from collections.abc import Collection

from shardwise.findings import Severity, SourceFinding
from shardwise.fsdp1.codemod.imports import imported_elsewhere
from shardwise.fsdp1.codemod.program import Program
from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint_text


def failed_check(path: str, before: Program, after: Program, decided: Collection[int] = ()) -> str:
    """Why a rewritten Python file must not be written; empty if nothing is wrong with it.

    Args:
        path: Of the file.
        before: The program as it was.
        after: The program with every rewrite.
        decided: The lines of the file as it was about which a finding already tells a person.
    """
    text = after.texts[path]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about strings and comparisons of the file's own
            compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"would not compile: {error}"
    return _lost_import(path, before, after) or _new_error(path, before.texts[path], text, decided)


def _lost_import(path: str, before: Program, after: Program) -> str:
    old, new = before.file(path), after.file(path)
    lost = old.scopes[old.tree].names.keys() - new.scopes[new.tree].names.keys()
    if lost and not new.scopes[new.tree].stars:
        for name, place in sorted(imported_elsewhere(after, new).items()):
            if name in lost:
                return f"would no longer have {name}, which {place} takes from it"
    return ""


def _new_error(path: str, before: str, after: str, decided: Collection[int]) -> str:
    """What lint calls an error after the rewrite and did not before, and no finding tells a person about."""
    known = Counter(finding.code for finding in _errors(before, path))
    found = _errors(after, path)
    said = _became(before, after, decided) if found else set()
    for finding in found:
        known[finding.code] -= 1
        about = {finding.line, *map(int, re.findall(r"\bline (\d+)", finding.message))}
        if known[finding.code] < 0 and about.isdisjoint(said):
            return f"would have an error that lint finds, {finding.code} on line {finding.line}: {finding.message}"
    return ""


def _became(before: str, after: str, lines: Collection[int]) -> set[int]:
    """The lines of the new text that stand where these lines of the old one stood."""
    old, new = ([line.strip() for line in text.splitlines()] for text in (before, after))
    found = set[int]()
    for _, start, end, new_start, new_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        some = [line - 1 - start for line in lines if start < line <= end]
        is_same = end - start == new_end - new_start
        found.update(
            (new_start + one + 1 for one in some) if is_same else range(new_start + 1, new_end + 1) if some else ()
        )
    return found


def _errors(text: str, path: str) -> list[SourceFinding]:
    return [one for one in lint_text(text, path, LintSettings()).findings if one.severity is Severity.ERROR]

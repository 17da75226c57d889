"""The catalogue of known failures: one page each in docs/errors, whose header has the patterns. No torch."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

import yaml

from shardwise.pages import read_pages

_PAGE = re.compile(r"\A---\n(?P<head>.*?)^---\n# [^\n]*\n\n(?P<body>.*)\Z", re.DOTALL | re.MULTILINE)
_SECTION = re.compile(r"^## (?P<title>[^\n]+)\n\n(?P<text>.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A known failure."""

    code: str
    """`SW5nn`; never reused for something else."""
    name: str
    """In words, with hyphens."""
    kind: Literal["cause", "echo", "warning"]
    """An echo is a consequence of another rank's failure, on other ranks or in the launcher."""
    torch: str
    """Versions it occurs in."""
    patterns: tuple[re.Pattern[str], ...]
    what: str
    why: str
    fix: str
    with_shardwise: str = ""
    sources: tuple[str, ...] = ()
    alias: str = ""
    """What it was called before it had a code."""
    frames: re.Pattern[str] | None = None
    """Frames that must stand in the traceback before the message, where other programs raise the same one."""

    def find(self, text: str) -> re.Match[str] | None:
        """Where the failure's message stands in `text`, the earliest of its patterns."""
        matches = [match for pattern in self.patterns if (match := pattern.search(text))]
        return min(matches, key=lambda match: match.start(), default=None)


@functools.cache
def catalogue() -> dict[str, Failure]:
    """Every known failure by its code."""
    failures = [_read(text, name) for name, text in read_pages("docs/errors").items()]
    return {failure.code: failure for failure in failures}


def _read(text: str, name: str) -> Failure:
    page = _PAGE.match(text)
    assert page is not None, f"{name} has no head"
    head = yaml.safe_load(page["head"])
    sections = {match["title"]: match["text"].strip() for match in _SECTION.finditer(page["body"])}
    return Failure(
        **{name: head[name] for name in ("code", "name", "kind", "torch")},
        patterns=tuple(re.compile(pattern, re.MULTILINE) for pattern in head["patterns"]),
        what=page["body"].partition("## ")[0].strip(),
        why=sections["Why"],
        fix=sections["Fix"],
        with_shardwise=sections.get("With shardwise", ""),
        sources=tuple(head.get("sources", ())),
        alias=head.get("alias", ""),
        frames=re.compile(head["frames"]) if "frames" in head else None,
    )

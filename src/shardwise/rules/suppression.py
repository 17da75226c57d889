"""`# noqa` comments: which findings a reader of the code has already seen and allowed."""

from __future__ import annotations

import re

_CODES = r"(?P<codes>[A-Z]+[0-9]*(?:[,\s]+[A-Z]+[0-9]+)*)"
_LINE = re.compile(rf"#\s*noqa(?![\w-])(?:\s*:\s*{_CODES})?", re.IGNORECASE)
_FILE = re.compile(rf"^\s*#\s*shardwise\s*:\s*noqa(?:\s*:\s*{_CODES})?", re.IGNORECASE | re.MULTILINE)


def allowed_on(line: str, code: str) -> bool:
    """Whether a comment on this line allows `code`: a bare `noqa`, the code, or the start of it."""
    return "noqa" in line.lower() and any(_covers(match, code) for match in _LINE.finditer(line))


def allowed_in(text: str, code: str) -> bool:
    """Whether a line `# shardwise: noqa` or `# shardwise: noqa: CODES` allows `code` in the whole file."""
    return "noqa" in text and any(_covers(match, code) for match in _FILE.finditer(text))


def _covers(match: re.Match[str], code: str) -> bool:
    codes = match["codes"]
    return codes is None or any(code.startswith(one.upper()) for one in re.split(r"[,\s]+", codes) if one)

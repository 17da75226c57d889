"""Where things are in a text: `ast` counts UTF-8 bytes from the line's start, editors count characters."""

from __future__ import annotations

import ast
import re
from functools import cached_property

_LINE_END = re.compile(r"\r\n|\r|\n")


class Positions:
    """Translates between offsets in a text, lines and columns, and the places `ast` gives.

    Args:
        text: As the parser read it. Lines end as Python sees them, not as `str.splitlines` does.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._is_ascii = text.isascii()

    @cached_property
    def starts(self) -> list[int]:
        """The offset at which each line starts."""
        return [0, *(match.end() for match in _LINE_END.finditer(self.text))]

    def line(self, number: int) -> str:
        """A line by its number from 1, without its end; empty where there is none."""
        if not 1 <= number <= len(self.starts):
            return ""
        start = self.starts[number - 1]
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def offset(self, line: int, byte_column: int) -> int:
        """The offset of what `ast` calls (`lineno`, `col_offset`)."""
        start = self.starts[line - 1]
        if self._is_ascii:
            return start + byte_column
        return start + len(self.line(line).encode()[:byte_column].decode(errors="ignore"))

    def span(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword | ast.arg) -> tuple[int, int]:
        """The offsets of a node's first character and behind its last."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
        return self.offset(node.lineno, node.col_offset), self.offset(end_line, end_column)

    def column(self, line: int, offset: int) -> int:
        """The column, from 1 and in characters, of an offset on a line."""
        return offset - self.starts[line - 1] + 1

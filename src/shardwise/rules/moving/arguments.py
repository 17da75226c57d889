"""The argument list of a call, with its commas and comments: drop, change and add arguments in place."""

from __future__ import annotations

import ast
import re
import tokenize
from dataclasses import dataclass, field

from shardwise.findings import Edit
from shardwise.rules.moving.edits import change
from shardwise.rules.source import FileContext

_REST = re.compile(r"[ \t]*(#[^\r\n]*)?(\r\n|\n|\r)")
"""What may follow an argument that has its line to itself."""


@dataclass(slots=True)
class Argument:
    """One argument as it stands in the text."""

    name: str
    """The keyword or, once matched with a signature, the parameter; `*` and `**` for starred ones, else empty."""
    value: ast.expr
    start: int
    end: int
    """Behind the last character, closing brackets included."""
    value_start: int
    """Behind `name=`, or behind the stars."""
    comma: int | None = None
    """Where its comma is, if it has one."""


@dataclass(slots=True)
class ArgumentList:
    """The arguments of one call and what shall become of them."""

    context: FileContext
    call: ast.Call
    arguments: list[Argument]
    _open: int
    """Behind the opening bracket."""
    _dropped: set[int] = field(default_factory=set)
    _edits: list[Edit] = field(default_factory=list)
    _added: list[str] = field(default_factory=list)

    def text(self, argument: Argument) -> str:
        """The value's text, brackets around it included."""
        return self.context.text[argument.value_start : argument.end].strip()

    def drop(self, argument: Argument) -> None:
        """Take an argument out."""
        self._dropped.add(id(argument))

    def rename(self, argument: Argument, name: str) -> None:
        """Give the value to another keyword; the value's own text is not touched."""
        self._edits.append(change(argument.start, argument.value_start, f"{name}="))

    def wrap(self, argument: Argument, before: str, after: str) -> None:
        """Put text in place of `name=`, and behind the value."""
        self._edits.append(change(argument.start, argument.value_start, before))
        self._edits.append(change(argument.end, argument.end, after))

    def replace(self, argument: Argument, text: str) -> None:
        """Put other text in place of the whole argument."""
        self._edits.append(change(argument.start, argument.end, text))

    def add(self, text: str) -> None:
        """Add an argument at the end."""
        self._added.append(text)

    def kept(self) -> list[Argument]:
        """The arguments that are not dropped."""
        return [one for one in self.arguments if id(one) not in self._dropped]

    def edits(self) -> list[Edit]:
        """All of it, as edits of the file's text."""
        found = [edit for edit in self._edits if not self._is_dropped(edit)]
        kept = self.kept()
        last = kept[-1] if kept else None
        tail = [one for one in self.arguments if last is None or one.start > last.end]
        for argument in self.arguments:
            if id(argument) in self._dropped and argument not in tail:
                found.append(self._removal(argument))
        if tail and last is not None and not self._on_own_lines(tail):
            behind = tail[-1].end if tail[-1].comma is None else tail[-1].comma + 1
            found.append(self._region(last.end, behind))
            comma = None
        else:
            found += [self._removal(argument) for argument in tail]
            comma = last.comma if last is not None else None
        if self._added:
            found += self._additions(last, comma)
        return found

    def _is_dropped(self, edit: Edit) -> bool:
        """Whether an edit is of an argument that goes altogether."""
        gone = (one for one in self.arguments if id(one) in self._dropped)
        return any(one.start <= edit.start and edit.end <= one.end for one in gone)

    def _on_own_lines(self, tail: list[Argument]) -> bool:
        """Whether a run of arguments at the end shares no line with anything else."""
        text = self.context.text
        line_start = text.rfind("\n", 0, tail[0].start) + 1
        behind = tail[-1].end if tail[-1].comma is None else tail[-1].comma + 1
        return text[line_start : tail[0].start].strip() == "" and _REST.match(text, behind) is not None

    def _removal(self, argument: Argument) -> Edit:
        text = self.context.text
        end = argument.comma + 1 if argument.comma is not None else argument.end
        line_start = text.rfind("\n", 0, argument.start) + 1
        indent = text[line_start : argument.start]
        rest = _REST.match(text, end)
        if indent.strip() == "" and rest:
            comments = self._comments(argument.start, argument.end)
            if rest.group(1):
                one_line = "\n" not in text[argument.start : end]
                comments.append(f"# {text[argument.start : end]}  {rest.group(1)}" if one_line else rest.group(1))
            return change(line_start, rest.end(), "".join(f"{indent}{one}{rest.group(2)}" for one in comments))
        while end < len(text) and text[end] in " \t":
            end += 1
        if text[end] in "\r\n#" and indent.strip():  # the last on a line that others share: its space goes with it
            return self._region(len(text[: argument.start].rstrip(" \t")), end)
        return self._region(argument.start, end)

    def _region(self, start: int, end: int) -> Edit:
        """Remove a stretch, but none of the comments in it."""
        comments = self._comments(start, end)
        if not comments:
            return change(start, end, "")
        indent = re.match(r"[ \t]*", self.context.positions.line(self.call.lineno))
        lead = (indent.group() if indent else "") + "    "
        return change(start, end, ",  " + f"\n{lead}".join(comments) + "\n" + lead)

    def _comments(self, start: int, end: int) -> list[str]:
        return [comment for offset, comment in _comments_in(self.context, self.call) if start <= offset < end]

    def _additions(self, last: Argument | None, comma: int | None) -> list[Edit]:
        text = self.context.text
        if last is None:
            return [change(self._open, self._open, ", ".join(self._added))]
        line_start = text.rfind("\n", 0, last.start) + 1
        lead = re.compile(r"[ \t]*").match(text, line_start)
        joint = "\n" + lead.group() if lead and line_start > self._open else " "
        more = f",{joint}".join(self._added)
        comment = re.compile(r"[ \t]*#[^\r\n]*").match(text, last.end if comma is None else comma + 1)
        if comma is None and comment:
            return [change(last.end, last.end, ","), change(comment.end(), comment.end(), joint.strip(" ") + more)]
        if comma is None:
            return [change(last.end, last.end, f",{joint}{more}")]
        place = comment.end() if comment else comma + 1
        return [change(place, place, joint + more + ("" if joint == " " else ","))]


def read_arguments(context: FileContext, call: ast.Call) -> ArgumentList:
    """The arguments of a call with their exact extent.

    Raises:
        ValueError: The text cannot be matched with the tree, as inside an f-string.
    """
    open_at, pieces = _split(context, call)
    nodes: list[ast.expr | ast.keyword] = sorted(
        [*call.args, *call.keywords], key=lambda node: (node.lineno, node.col_offset)
    )
    if len(nodes) != len(pieces):
        raise ValueError(f"{len(nodes)} arguments, {len(pieces)} pieces")
    found = []
    for node, (start, end, comma) in zip(nodes, pieces, strict=True):
        value = node.value if isinstance(node, ast.keyword) else node
        if isinstance(node, ast.keyword) and node.arg is None:
            name, value_start = "**", start + 2
        elif isinstance(node, ast.keyword):
            equals = re.compile(r"\w+\s*=\s*").match(context.text, start)
            if equals is None:
                raise ValueError("a keyword without a name")
            name, value_start = node.arg or "", equals.end()
        elif isinstance(node, ast.Starred):
            name, value, value_start = "*", node.value, start + 1
        else:
            name, value_start = "", start
        found.append(Argument(name, value, start, end, value_start, comma))
    return ArgumentList(context, call, found, open_at)


def _tokens(context: FileContext, call: ast.Call) -> list[tuple[tokenize.TokenInfo, int]]:
    """The tokens from the call's opening bracket to its end, with their offsets."""
    start = context.positions.span(call.func)[1]
    end = context.positions.span(call)[1]
    while context.text[start] in " \t\\\r\n)":  # brackets around the function itself
        start += 1
    piece = context.text[start:end]
    starts = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", piece))]
    lines = [piece[a:b] for a, b in zip(starts, [*starts[1:], len(piece)], strict=True)]
    reader = iter(lines)
    tokens = tokenize.generate_tokens(lambda: next(reader, ""))
    try:
        found = [one for one in tokens if one.type not in (tokenize.ENDMARKER, tokenize.NEWLINE, tokenize.DEDENT)]
        return [(one, start + starts[one.start[0] - 1] + one.start[1]) for one in found]
    except (tokenize.TokenError, IndentationError, IndexError) as error:
        raise ValueError(str(error)) from None


_IGNORED = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT}


def _split(context: FileContext, call: ast.Call) -> tuple[int, list[tuple[int, int, int | None]]]:
    depth, pieces, open_at = 0, [], 0
    start: int | None = None
    last_end = 0
    for token, offset in _tokens(context, call):
        if token.type in _IGNORED:
            continue
        opens, closes = token.string in "([{", token.string in ")]}"
        if token.type == tokenize.OP and opens:
            depth += 1
            if depth == 1:
                open_at = offset + 1
                continue
        if token.type == tokenize.OP and closes:
            depth -= 1
            if depth == 0:
                break
        if token.type == tokenize.OP and token.string == "," and depth == 1:
            if start is not None:
                pieces.append((start, last_end, offset))
            start = None
            continue
        start = offset if start is None else start
        last_end = offset + len(token.string)
    if start is not None:
        pieces.append((start, last_end, None))
    return open_at, pieces


def _comments_in(context: FileContext, call: ast.Call) -> list[tuple[int, str]]:
    return [(offset, token.string) for token, offset in _tokens(context, call) if token.type == tokenize.COMMENT]

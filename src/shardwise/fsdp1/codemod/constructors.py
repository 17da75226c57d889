"""FSDP's constructor calls and their arguments."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwise.findings import Edit
from shardwise.fsdp1.codemod.draft import Blocked, FileDraft
from shardwise.fsdp1.codemod.emitted import settings
from shardwise.fsdp1.codemod.evaluating import SAME
from shardwise.fsdp1.codemod.program import Program, is_constant, iterated
from shardwise.source.edits import change
from shardwise.source.syntax import FSDP1, FileContext, Positions

_REST = re.compile(r"[ \t]*(#[^\r\n]*)?(\r\n|\n|\r)")
"""What may follow an argument that has its line to itself."""
_BLANK = re.compile(r"[ \t]*")
_COMMENT = re.compile(r"[ \t]*#[^\r\n]*")


@dataclass(slots=True, eq=False)
class WrittenArgument:
    """One argument as it stands in the text."""

    name: str
    """The keyword; `*` and `**` for starred ones, empty for one by position."""
    value: ast.expr
    start: int
    end: int
    """Behind the last character, closing brackets included."""
    value_start: int
    """Behind `name=`, or behind the stars."""
    comma: int | None
    """Where its comma is, if it has one."""
    is_dropped: bool = False

    @property
    def behind(self) -> int:
        """Behind its comma, if it has one."""
        return self.end if self.comma is None else self.comma + 1


@dataclass(slots=True)
class ArgumentList:
    """The arguments of one call and what shall become of them."""

    context: FileContext
    call: ast.Call
    arguments: list[WrittenArgument]
    _open: int
    """Behind the opening bracket."""
    _comments: list[tuple[int, str]]
    _edits: list[Edit] = field(default_factory=list)
    _added: list[str] = field(default_factory=list)

    def text(self, argument: WrittenArgument) -> str:
        """The value's text, brackets around it included."""
        return self.context.text[argument.value_start : argument.end].strip()

    def rename(self, argument: WrittenArgument, name: str) -> None:
        """Give the value to another keyword; the value's own text is not touched."""
        self.wrap(argument, f"{name}=", "")

    def wrap(self, argument: WrittenArgument, before: str, after: str) -> None:
        """Put text in place of `name=`, and behind the value."""
        self._edits.append(change(argument.start, argument.value_start, before))
        self._edits += [change(argument.end, argument.end, after)] if after else []

    def replace(self, argument: WrittenArgument, text: str) -> None:
        """Put other text in place of the whole argument."""
        self._edits.append(change(argument.start, argument.end, text))

    def add(self, *texts: str) -> None:
        """Add arguments at the end."""
        self._added += texts

    def kept(self) -> list[WrittenArgument]:
        """The arguments that are not dropped."""
        return [one for one in self.arguments if not one.is_dropped]

    def edits(self) -> list[Edit]:
        """All of it, as edits of the file's text."""
        kept, gone = self.kept(), [one for one in self.arguments if one.is_dropped]
        found = [
            edit for edit in self._edits if not any(one.start <= edit.start and edit.end <= one.end for one in gone)
        ]
        last = kept[-1] if kept else None
        tail = [one for one in gone if last is None or one.start > last.end]
        comma = last.comma if last is not None else None
        joins_tail = bool(tail) and last is not None and not self._on_own_lines(tail)
        if joins_tail and last is not None:
            gone = [one for one in gone if one not in tail]
            found.append(self._region(last.end, tail[-1].behind))
            comma = None
        end = 0
        for one in map(self._removal, gone):  # the blanks between two belong to the first
            found.append(replace(one, start=max(one.start, end)))
            end = one.end
        return found + (self._additions(last, comma, joins_tail) if self._added else [])

    def _on_own_lines(self, tail: list[WrittenArgument]) -> bool:
        """Whether a run of arguments at the end shares no line with anything else."""
        text, start = self.context.text, tail[0].start
        return not text[text.rfind("\n", 0, start) + 1 : start].strip() and bool(_REST.match(text, tail[-1].behind))

    def _removal(self, argument: WrittenArgument) -> Edit:
        text, start, end = self.context.text, argument.start, argument.behind
        line_start = text.rfind("\n", 0, start) + 1
        indent = text[line_start:start]
        rest = _REST.match(text, end)
        if indent.strip() == "" and rest:
            comments = self._comments_in(start, argument.end)
            if rest.group(1):
                one_line = "\n" not in text[start:end]
                comments.append(f"# {text[start:end]}  {rest.group(1)}" if one_line else rest.group(1))
            return change(line_start, rest.end(), "".join(f"{indent}{one}{rest.group(2)}" for one in comments))
        while text[end] in " \t":
            end += 1
        if text[end] in "\r\n#" and indent.strip():  # the last on a line that others share: its space goes with it
            start = len(text[:start].rstrip(" \t"))
        return self._region(start, end)

    def _region(self, start: int, end: int) -> Edit:
        """Remove a stretch, but none of the comments in it."""
        comments = self._comments_in(start, end)
        line = self.context.positions.line(self.call.lineno)
        lead = line[: len(line) - len(line.lstrip(" \t"))] + "    "
        return change(start, end, ",  " + f"\n{lead}".join(comments) + "\n" + lead if comments else "")

    def _comments_in(self, start: int, end: int) -> list[str]:
        return [comment for offset, comment in self._comments if start <= offset < end]

    def _additions(self, last: WrittenArgument | None, comma: int | None, joins_tail: bool) -> list[Edit]:
        text = self.context.text
        if last is None:
            return [change(self._open, self._open, ", ".join(self._added))]
        line_start = text.rfind("\n", 0, last.start) + 1
        lead = _BLANK.match(text, line_start)
        joint = "\n" + lead.group() if lead and line_start > self._open else " "
        more = f",{joint}".join(self._added)
        end = last.end if comma is None else comma + 1
        comment = None if joins_tail else _COMMENT.match(text, end)  # else the region behind it keeps the comment
        place = comment.end() if comment else end
        if comma is not None:
            return [change(place, place, joint + more + ("" if joint == " " else ","))]
        if comment:
            return [change(end, end, ","), change(place, place, joint.strip(" ") + more)]
        return [change(end, end, f",{joint}{more}")]


_IN_STRING = ("the call is inside an f-string", "take it out of the string")
_IGNORED = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.ENDMARKER, tokenize.NEWLINE, tokenize.DEDENT}


def read_arguments(context: FileContext, call: ast.Call) -> ArgumentList:
    """The arguments of a call with their exact extent.

    Raises:
        Blocked: The text cannot be matched with the tree, as inside an f-string.
    """
    tokens = _tokens(context, call)
    depth, open_at, is_fresh = 0, 0, True
    extents: list[tuple[int, int, int | None]] = []
    for token, offset in tokens:
        if token.type in _IGNORED:
            continue
        operator = token.string if token.type == tokenize.OP else " "
        depth += (operator in "([{") - (operator in ")]}")
        if depth == 0:
            break
        if depth == 1 and operator in "([{":
            open_at = offset + 1
        elif depth == 1 and operator == ",":
            extents[-1] = (*extents[-1][:2], offset)
            is_fresh = True
        else:
            start = offset if is_fresh else extents.pop()[0]
            extents.append((start, offset + len(token.string), None))
            is_fresh = False
    nodes = sorted([*call.args, *call.keywords], key=lambda node: (node.lineno, node.col_offset))
    if len(nodes) != len(extents):
        raise Blocked(*_IN_STRING)
    found = []
    for node, (start, end, comma) in zip(nodes, extents, strict=True):
        name, value_start, value = "", start, node
        if isinstance(node, ast.keyword | ast.Starred):
            name = "*" if isinstance(node, ast.Starred) else node.arg or "**"
            equals = re.compile(r"\w+\s*=\s*|\*+").match(context.text, start)
            if equals is None:
                raise Blocked(*_IN_STRING)
            value_start, value = equals.end(), node.value
        found.append(WrittenArgument(name, value, start, end, value_start, comma))  # pyrefly: ignore
    comments = [(offset, token.string) for token, offset in tokens if token.type == tokenize.COMMENT]
    return ArgumentList(context, call, found, open_at, comments)


def _tokens(context: FileContext, call: ast.Call) -> list[tuple[tokenize.TokenInfo, int]]:
    """The tokens from the call's opening bracket to its end, with their offsets."""
    start, end = context.positions.span(call.func)[1], context.positions.span(call)[1]
    while context.text[start] in " \t\\\r\n)":  # brackets around the function itself
        start += 1
    text = context.text[start:end]
    starts = Positions(text).starts
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text, newline="").readline))
        return [(one, start + starts[min(one.start[0], len(starts)) - 1] + one.start[1]) for one in tokens]
    except (tokenize.TokenError, IndentationError):
        raise Blocked(*_IN_STRING) from None


CODE = "SW101"
_OLD_NAMES = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_parameters": "ignored_states"}
_LATER = ast.IfExp | ast.BoolOp | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
"""Expressions of which a part may run never, or often."""


@dataclass(slots=True)
class Wrap:
    """One constructor call in the making; everything a target needs to write it anew."""

    draft: FileDraft
    call: ast.Call
    list: ArgumentList
    by_name: dict[str, WrittenArgument]
    is_partial: bool
    dropped: list[str] = field(default_factory=list)
    """What FSDP2 does by itself, or does not have, said in the finding."""

    @property
    def context(self) -> FileContext:
        """The file."""
        return self.draft.context

    @property
    def statement(self) -> ast.stmt:
        """The statement around the call."""
        return self.context.statement(self.call)

    @property
    def targets(self) -> list[ast.expr]:
        """What the statement assigns to."""
        return self.statement.targets if isinstance(self.statement, ast.Assign) else []

    @property
    def has_stars(self) -> bool:
        """Whether arguments arrive by `*args` or `**kwargs`."""
        return any(name.startswith("*") for name in self.by_name)

    def value(self, name: str) -> ast.expr | None:
        """The expression given for a parameter."""
        argument = self.by_name.get(name)
        return argument.value if argument else None

    def text(self, name: str) -> str:
        """The text given for a parameter, ready to stand in another argument list."""
        return self.list.text(self.by_name[name])

    def drop(self, *names: str) -> None:
        """Leave arguments out."""
        for name in names:
            if name in self.by_name:
                self.by_name[name].is_dropped = True

    def rename(self, name: str, new_name: str) -> None:
        """Give an argument to another keyword."""
        self.list.rename(self.by_name[name], new_name)

    def same_calls(self) -> list[ast.Call]:
        """The calls of FSDP by the same name, this one among them."""
        name = self.draft.source(self.call.func)
        return [call for call in self.context.calls if self.draft.source(call.func) == name]

    @property
    def is_inner(self) -> bool:
        """Whether the module is a part of one that is wrapped later: written so, or one of a loop's."""
        module = moved_text(self.context, self.value("module"))
        others = [call for call in self.same_calls() if call is not self.call and call.args]
        outer = {moved_text(self.context, call.args[0]) for call in others}
        return bool(module) and (is_part_of(module, outer) or self._in_loop_over(outer))

    def _in_loop_over(self, outer: set[str]) -> bool:
        for parent in self.context.ancestors(self.call):
            texts = [self.draft.source(one) for one in iterated(parent)]
            if any(re.search(rf"(?<![\w.]){re.escape(one)}[.\[)]", text) for one in outer for text in texts):
                return True
            if isinstance(parent, ast.For):
                return False
        return False

    @property
    def is_plain(self) -> bool:
        """Whether statements can be put in front of the call without changing what runs."""
        around = itertools.takewhile(lambda one: one is not self.statement, self.context.ancestors(self.call))
        return (
            not self.is_partial
            and self.draft.starts_line(self.statement)
            and not any(isinstance(one, _LATER) for one in around)
            and isinstance(self.statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return)
        )


def moved_text(context: FileContext, module: ast.expr | None) -> str:
    """The text of a module without the methods that return it: `model.to(device)` is no part of `model`."""
    while isinstance(module, ast.Call) and isinstance(module.func, ast.Attribute) and module.func.attr in SAME:
        module = module.func.value
    return context.source(module) if module is not None else ""


def is_part_of(text: str, wholes: Iterable[str]) -> bool:
    """Whether an expression is an attribute or item of another one, as their texts show."""
    return any(re.match(rf"{re.escape(one)}[.\[]", text) for one in wholes)


def are_nested(texts: Iterable[str]) -> bool:
    """Whether one of some expressions is an attribute or item of another."""
    return any(is_part_of(one, texts) for one in texts)


def is_certain(context: FileContext, program: Program, node: ast.expr | None) -> bool:
    """Whether an expression is FSDP's class and nothing else: imported, or another name for it."""
    if program.origins(context, node) != {FSDP1} or not isinstance(node, ast.Name):
        return isinstance(node, ast.Attribute) and program.origins(context, node) == {FSDP1}
    # `except ImportError: FSDP = None` does not count.
    given = [one.value for one in context.bindings(node) if not one.origin and not is_constant(one.value, None)]
    return all(is_certain(context, program, one) for one in given)


def read(draft: FileDraft, call: ast.Call, is_partial: bool) -> Wrap:
    """Match the arguments of a call with FSDP's parameters.

    Raises:
        Blocked: A parameter does not exist.
    """
    listed = read_arguments(draft.context, call)
    parameters = settings()
    positional = iter(["cls", *parameters] if is_partial else parameters)
    by_name: dict[str, WrittenArgument] = {}
    for argument in listed.arguments:
        name = argument.name or next(positional, "")
        name = _OLD_NAMES.get(name, name)
        if not name:
            raise Blocked("it has more arguments than FSDP", "remove them")
        if name in ("*", "**"):
            name = f"{name}{len(by_name)}"
        elif name not in (*parameters, "cls"):
            raise Blocked(f"FSDP has no argument {name!r}", f"remove {name}=, or rename it")
        by_name[name] = argument
    return Wrap(draft, call, listed, by_name, is_partial)

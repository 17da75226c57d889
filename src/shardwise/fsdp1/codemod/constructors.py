"""FSDP's constructor calls and their arguments."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwise.findings import Edit
from shardwise.fsdp1.codemod.draft import KEEP_FSDP1_API, FileDraft
from shardwise.fsdp1.codemod.program import Program, is_constant
from shardwise.source.edits import change
from shardwise.source.syntax import FSDP1, FileContext

_REST = re.compile(r"[ \t]*(#[^\r\n]*)?(\r\n|\n|\r)")
"""What may follow an argument that has its line to itself."""


@dataclass(slots=True)
class WrittenArgument:
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
    arguments: list[WrittenArgument]
    _open: int
    """Behind the opening bracket."""
    _dropped: set[int] = field(default_factory=set)
    _edits: list[Edit] = field(default_factory=list)
    _added: list[str] = field(default_factory=list)

    def text(self, argument: WrittenArgument) -> str:
        """The value's text, brackets around it included."""
        return self.context.text[argument.value_start : argument.end].strip()

    def drop(self, argument: WrittenArgument) -> None:
        """Take an argument out."""
        self._dropped.add(id(argument))

    def rename(self, argument: WrittenArgument, name: str) -> None:
        """Give the value to another keyword; the value's own text is not touched."""
        self._edits.append(change(argument.start, argument.value_start, f"{name}="))

    def wrap(self, argument: WrittenArgument, before: str, after: str) -> None:
        """Put text in place of `name=`, and behind the value."""
        self._edits.append(change(argument.start, argument.value_start, before))
        self._edits.append(change(argument.end, argument.end, after))

    def replace(self, argument: WrittenArgument, text: str) -> None:
        """Put other text in place of the whole argument."""
        self._edits.append(change(argument.start, argument.end, text))

    def add(self, text: str) -> None:
        """Add an argument at the end."""
        self._added.append(text)

    def kept(self) -> list[WrittenArgument]:
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

    def _on_own_lines(self, tail: list[WrittenArgument]) -> bool:
        """Whether a run of arguments at the end shares no line with anything else."""
        text = self.context.text
        line_start = text.rfind("\n", 0, tail[0].start) + 1
        behind = tail[-1].end if tail[-1].comma is None else tail[-1].comma + 1
        return text[line_start : tail[0].start].strip() == "" and _REST.match(text, behind) is not None

    def _removal(self, argument: WrittenArgument) -> Edit:
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

    def _additions(self, last: WrittenArgument | None, comma: int | None) -> list[Edit]:
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
        found.append(WrittenArgument(name, value, start, end, value_start, comma))
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


CODE = "SW101"
PARAMETERS = (
    "module",
    "process_group",
    "sharding_strategy",
    "cpu_offload",
    "auto_wrap_policy",
    "backward_prefetch",
    "mixed_precision",
    "ignored_modules",
    "param_init_fn",
    "device_id",
    "sync_module_states",
    "forward_prefetch",
    "limit_all_gathers",
    "use_orig_params",
    "ignored_states",
    "device_mesh",
)
_OLD_NAMES = {"fsdp_auto_wrap_policy": "auto_wrap_policy", "ignored_parameters": "ignored_states"}


class Blocked(Exception):
    """The call cannot be rewritten: what stands in the way, and what to do about it."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


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

    def value(self, name: str) -> ast.expr | None:
        """The expression given for a parameter."""
        argument = self.by_name.get(name)
        return argument.value if argument else None

    def text(self, name: str) -> str:
        """The text given for a parameter, ready to stand in another argument list."""
        argument = self.by_name.get(name)
        return self.list.text(argument) if argument else "None"

    def drop(self, name: str, why: str = "") -> None:
        """Leave an argument out, and say why if it says something."""
        if name in self.by_name:
            self.list.drop(self.by_name[name])
            if why:
                self.dropped.append(why)

    @property
    def is_inner(self) -> bool:
        """Whether the module is a part of one that is wrapped later: written so, or one of a loop's."""
        module = self.value("module")
        if module is None:
            return False
        text = self.context.source(module)
        others = [one.args[0] for one in self.context.calls if one is not self.call and one.args and self._is_same(one)]
        outer = {self.context.source(one) for one in others}
        return any(re.match(rf"{re.escape(one)}[.\[]", text) for one in outer) or self._in_loop_over(outer)

    def _is_same(self, call: ast.Call) -> bool:
        """Whether another call calls the same thing: FSDP by the same name."""
        return self.context.source(call.func) == self.context.source(self.call.func)

    def _in_loop_over(self, outer: set[str]) -> bool:
        for parent in self.context.ancestors(self.call):
            if isinstance(parent, ast.For | ast.comprehension):
                text = self.context.source(parent.iter)
                return any(re.search(rf"(?<![\w.]){re.escape(one)}[.\[)]", text) for one in outer)
            generators = getattr(parent, "generators", [])
            for one in generators:
                text = self.context.source(one.iter)
                if any(re.search(rf"(?<![\w.]){re.escape(name)}[.\[)]", text) for name in outer):
                    return True
        return False

    @property
    def is_plain(self) -> bool:
        """Whether statements can be put in front of the call without changing what runs."""
        if self.is_partial or not self.draft.starts_line(self.statement):
            return False
        node: ast.AST = self.call
        while node is not self.statement:
            parent = self.context.parents[node]
            if isinstance(parent, ast.IfExp | ast.BoolOp | ast.Lambda | ast.comprehension | ast.ListComp | ast.SetComp):
                return False
            if isinstance(parent, ast.DictComp | ast.GeneratorExp):
                return False
            node = parent
        return isinstance(self.statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return)


def find(context: FileContext, program: Program) -> Iterator[tuple[ast.Call, bool]]:
    """Every call of FSDP's constructor, and every `partial` of it (True), in source order."""
    for call in context.calls:
        if program.is_any(context, call.func, {FSDP1}):
            yield call, False
        elif call.args and program.is_any(context, call.args[0], {FSDP1}) and _is_partial(context, call):
            yield call, True


def is_certain(context: FileContext, program: Program, node: ast.expr) -> bool:
    """Whether an expression is FSDP's class and nothing else: imported, or another name for it."""
    if program.origins(context, node) != {FSDP1}:
        return False
    if isinstance(node, ast.Attribute):
        return True
    for binding in context.bindings(node) if isinstance(node, ast.Name) else []:
        if binding.origin or is_constant(binding.value, None):
            continue  # `except ImportError: FSDP = None`
        if not isinstance(binding.value, ast.Name | ast.Attribute) or not is_certain(context, program, binding.value):
            return False
    return isinstance(node, ast.Name)


def _is_partial(context: FileContext, call: ast.Call) -> bool:
    return context.is_any(call.func, {"functools.partial"})


def read(draft: FileDraft, call: ast.Call, is_partial: bool) -> Wrap:
    """Match the arguments of a call with FSDP's parameters.

    Raises:
        Blocked: A parameter does not exist, or is given twice.
    """
    try:
        listed = read_arguments(draft.context, call)
    except ValueError:
        raise Blocked("the call is inside an f-string", "take it out of the string") from None
    position = -1 if is_partial else 0
    by_name: dict[str, WrittenArgument] = {}
    for argument in listed.arguments:
        if argument.name == "":
            if position >= len(PARAMETERS):
                raise Blocked("it has more arguments than FSDP", "remove them")
            name = "cls" if position < 0 else PARAMETERS[position]
            position += 1
            if is_partial and position == 1 and name != "cls":
                name = PARAMETERS[0]
        else:
            name = _OLD_NAMES.get(argument.name, argument.name)
        if name in ("*", "**"):
            name = f"{name}{len(by_name)}"
        elif name not in (*PARAMETERS, "cls"):
            raise Blocked(f"FSDP has no argument {name!r}", f"remove {name}=, or rename it")
        by_name[name] = argument
    return Wrap(draft, call, listed, by_name, is_partial)


def has_stars(wrap: Wrap) -> bool:
    """Whether arguments arrive by `*args` or `**kwargs`."""
    return any(name.startswith("*") for name in wrap.by_name)


def leave(draft: FileDraft, call: ast.Call, blocked: Blocked) -> None:
    """Note why a call is left alone."""
    draft.undecided(CODE, call, f"FSDP(...) is left alone: {blocked.why}", f"{blocked.fix}; or {KEEP_FSDP1_API}")

"""FSDP's constructor calls: their arguments, and FSDP1's policies, precision and placement for fully_shard."""

from __future__ import annotations

import ast
import io
import itertools
import re
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shardwise.config.fsdp1_names import HYBRID, KEEPS_UNSHARDED
from shardwise.findings import Edit
from shardwise.fsdp1.codemod.draft import Blocked, FileDraft, fsdp1_parameters
from shardwise.fsdp1.codemod.evaluating import SAME
from shardwise.fsdp1.codemod.flow import flow_of
from shardwise.fsdp1.codemod.program import (
    Program,
    called_fsdp_name,
    fsdp_name,
    is_constant,
    is_none,
    iterated_around,
    single_value,
    strategy,
)
from shardwise.source.edits import change
from shardwise.source.syntax import FSDP1, FileContext, Positions, argument_of, last_name

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
        loops = iterated_around(self.context, self.call)
        in_loop = any(re.search(rf"(?<![\w.]){re.escape(one)}[.\[)]", text) for one in outer for text in loops)
        return bool(module) and (is_part_of(module, outer) or in_loop)

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
    parameters = fsdp1_parameters()
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


Options = list[tuple[str, str]]
"""Arguments of `fully_shard` or of a helper, as names and texts."""


def classes(wrap: Wrap, node: ast.expr | None) -> list[str]:
    """The class expressions that a policy written in the call picks, as text; none for any other policy."""
    picked: ast.expr | None = None
    match node:
        case ast.Call(args=[policy], keywords=[ast.keyword(arg="transformer_layer_cls", value=value)]):
            is_partial = wrap.context.is_any(node.func, {"functools.partial"})
            is_known = fsdp_name(wrap.context, policy) == "wrap.transformer_auto_wrap_policy"
            picked = value if is_partial and is_known else None
        case ast.Call(args=[value], keywords=[]) | ast.Call(args=[], keywords=[ast.keyword(value=value)]):
            picked = value if called_fsdp_name(wrap.context, node) == "wrap.ModuleWrapPolicy" else None
    elements = picked.elts if isinstance(picked, ast.Set | ast.List | ast.Tuple) else []
    is_open = any(isinstance(one, ast.Starred) for one in elements)
    return [] if is_open else [wrap.draft.source(one) for one in elements]


_SWITCHES = ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs")
_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype", *_SWITCHES, "_module_classes_to_ignore")


def convert_precision(wrap: Wrap, *, has_policy: bool) -> tuple[Options, set[str]]:
    """Rewrite `mixed_precision=`.

    Returns:
        Options for a helper, and the features of the helper that they need; both empty where `fully_shard` itself
        can be told.
    """
    node = wrap.value("mixed_precision")
    if node is None or is_none(node):
        wrap.drop("mixed_precision")
        return [], set()
    literal = _own_literal(wrap, node)
    if literal is not None:
        wrap.rename("mixed_precision", "mp_policy")
        return _convert_literal(wrap, literal, has_policy)
    end = ", is_root=False)" if wrap.is_inner else ")"
    wrap.list.wrap(wrap.by_name["mixed_precision"], f"**{wrap.draft.helper('_precision')}(", end)
    return [], {"mp_policy", "buffer_dtype", "cast_unit_inputs", "in_full"}


def _own_literal(wrap: Wrap, node: ast.expr) -> ast.Call | None:
    """The `MixedPrecision(...)` that the argument is, if nobody else can see it and nothing in it is odd."""
    context = wrap.context
    value = node
    if isinstance(node, ast.Name):
        value, bindings, home = single_value(context, node), context.bindings(node), context.scope(node).find(node.id)
        uses = [context.scope(one).find(one.id) for one in context.loads(node.id)]
        num_uses = sum(one is not None and home is not None and one[0] is home[0] for one in uses)
        if len(bindings) != 1 or bindings[0].value is not value or num_uses != 1:
            return None
    if not isinstance(value, ast.Call) or called_fsdp_name(context, value) != "MixedPrecision":
        return None
    names = {keyword.arg for keyword in value.keywords}
    switches = [keyword.value for keyword in value.keywords if keyword.arg in _SWITCHES] + value.args[3:]
    is_clear = not names & {None, "_module_classes_to_ignore"} and all(
        isinstance(one, ast.Constant) for one in switches
    )
    starred = any(isinstance(one, ast.Starred) for one in value.args)
    return value if is_clear and not starred and (value.args or names) else None


def _convert_literal(wrap: Wrap, call: ast.Call, has_policy: bool) -> tuple[Options, set[str]]:
    listed = read_arguments(wrap.context, call)
    given = {one.name or _FIELDS[position]: one for position, one in enumerate(listed.arguments)}
    wrap.draft.replace(call.func, wrap.draft.name("MixedPrecisionPolicy"))
    options: Options = []
    features: set[str] = {"mp_policy"} if has_policy else set()
    switches = {name: is_constant(one.value, True) for name, one in given.items() if name in _SWITCHES}
    if switches.get("keep_low_precision_grads"):
        raise Blocked(
            "keep_low_precision_grads has no counterpart: gradients have the dtype parameters are stored in",
            "store the parameters in 16 bits, or leave it out",
        )
    param, reduce, buffers = (given.get(name) for name in _FIELDS[:3])
    if param is not None and not is_none(param.value):
        # FSDP1 reduces in `param_dtype` when told nothing; FSDP2 does not in every release.
        text = listed.text(param)
        if reduce is None:
            listed.add(f"reduce_dtype={text}")
        elif is_none(reduce.value):
            listed.replace(reduce, f"reduce_dtype={text}")
        elif not _is_torchs(wrap, reduce.value) and listed.text(reduce) != text:
            listed.replace(reduce, f"reduce_dtype={_bracketed(listed.text(reduce))} or {_bracketed(text)}")
    for name in _FIELDS[:2]:
        if name in given and not given[name].name:
            listed.rename(given[name], name)
    for name in ("buffer_dtype", *switches):
        if name in given:
            given[name].is_dropped = True
    if buffers is not None and not is_none(buffers.value):
        options.append(("buffer_dtype", listed.text(buffers)))
        features |= {"buffer_dtype", "mp_policy"}
    if switches.get("cast_forward_inputs"):
        options += [("cast_unit_inputs", "True")] if has_policy else []
    elif not switches.get("cast_root_forward_inputs", True) or wrap.is_inner:
        listed.add("cast_forward_inputs=False")
    wrap.draft.edits += listed.edits()
    return options, features


def _is_torchs(wrap: Wrap, node: ast.expr) -> bool:
    return any(origin.startswith("torch.") for origin in wrap.context.origins(node))


def _bracketed(text: str) -> str:
    return text if text.replace(".", "").replace("_", "").isalnum() else f"({text})"


def convert_offload(wrap: Wrap) -> Options:
    """Rewrite `cpu_offload=`; the options that `fully_shard` is to be told."""
    node = wrap.value("cpu_offload")
    text = "OffloadPolicy()" if node is None or is_constant(node, False) else _offload_text(wrap, node)
    if text is None:
        helper = wrap.draft.helper("_offload_policy")
        wrap.list.wrap(wrap.by_name["cpu_offload"], f"offload_policy={helper}(", ")")
        return []
    wrap.drop("cpu_offload")
    if text == "OffloadPolicy()":
        return []
    wrap.draft.names.update(re.findall(r"\b(?:CPU)?OffloadPolicy(?=\(\))", text))
    return [("offload_policy", text)]


def _offload_text(wrap: Wrap, node: ast.expr) -> str | None:
    """The FSDP2 policy for an expression; None where it is known only at run time."""
    if isinstance(node, ast.IfExp):
        yes, no = _offload_text(wrap, node.body), _offload_text(wrap, node.orelse)
        if yes is None or no is None:
            return None
        return yes if yes == no else f"{yes} if {wrap.draft.source(node.test)} else {no}"
    value = single_value(wrap.context, node)
    told = argument_of(value, 0, "offload_params") if isinstance(value, ast.Call) else None
    if not is_none(node) and called_fsdp_name(wrap.context, value) != "CPUOffload":
        return None
    if told is None or is_constant(told, False):
        return "OffloadPolicy()"
    if is_constant(told, True):
        return "CPUOffloadPolicy()"
    return f"CPUOffloadPolicy() if {wrap.draft.source(told)} else OffloadPolicy()" if value is node else None


_WHERE = ("process_group", "device_mesh", "device_id")
_AXES = 'mesh_dim_names=("replicate", "shard")'
_BUILDERS = {"torch.distributed.device_mesh.init_device_mesh", "torch.distributed.init_device_mesh"}
_LOCAL = {"rank", "local_rank", "gpu", "gpu_id", "localrank", "local_rank_id"}


def _device_kind(wrap: Wrap, node: ast.expr | None) -> str:
    """What `device_id` is: `current` (or nothing), `cpu`, `cuda` (with an index), or `unknown`."""
    if node is None or is_none(node):
        return "current"
    match resolved := single_value(wrap.context, node):
        case ast.IfExp():
            kinds = {_device_kind(wrap, resolved.body), _device_kind(wrap, resolved.orelse)}
            return kinds.pop() if len(kinds) == 1 else "unknown"
        case ast.Call(func=ast.Attribute(attr="current_device") as function):
            return "cpu" if wrap.context.is_any(function, {"torch.cpu.current_device"}) else "current"
        case ast.Call() if wrap.context.is_any(resolved.func, {"torch.device"}):
            return _torch_device(resolved)
        case ast.Constant(value=bool()):
            return "unknown"
        case ast.Constant(value=str(name)):
            return "cpu" if name == "cpu" else "cuda" if re.fullmatch(r"cuda:\d+", name) else "unknown"
        case ast.Constant(value=int()) | ast.BinOp(op=ast.Mod()):
            return "cuda"
        case ast.Call(func=ast.Name(id="int")) | ast.Call(func=ast.Attribute(attr="get_rank")):
            return "cuda"
    last = re.split(r"\W+", wrap.draft.source(node).rstrip("])\"' "))[-1].lower()
    return "cuda" if last in _LOCAL else "unknown"


def _torch_device(call: ast.Call) -> str:
    match call.args:
        case [ast.Constant(value="cpu"), *_]:
            return "cpu"
        case [ast.Constant(value="cuda")] if not call.keywords:
            return "current"
        case [ast.Constant(value=str(name)), *_] if name == "cuda" or name.startswith("cuda:"):
            return "cuda"
        case [ast.JoinedStr(values=[ast.Constant(value="cuda:"), *_]), *_]:
            return "cuda"
    return "unknown"


_SETS_DEVICE = re.compile(r"set_device\w*\(|cuda\.device\(|CUDA_VISIBLE_DEVICES|\bAccelerator\(")
_ON_A_DEVICE = re.compile(r"\.(?:to|cuda)\([^()\n]*(?:rank|device|gpu|cuda:)")


def _has_no_device(wrap: Wrap) -> bool:
    """Whether FSDP1 took the device from a model that was moved to one, and no file makes that the current one."""
    program, path = wrap.draft.program, wrap.context.path
    is_moved = is_none(wrap.value("device_id")) and _ON_A_DEVICE.search(wrap.context.text) is not None
    if not is_moved or not any("nccl" in one for one in program.texts.values()):
        return False
    flow, setters = flow_of(program), [one for one, text in program.texts.items() if _SETS_DEVICE.search(text)]
    scripts = [one for one, text in program.texts.items() if setters and (one in setters or "__main__" in text)]
    return not flow.run_with(path, setters, [*flow.files, *scripts])


_CONTAINERS = re.compile(r"(?<!\w)Module(?:Dict|List)\b")


def refuse_container(wrap: Wrap) -> None:
    """Leave a call alone whose model is what functions of the program say that they return: a container.

    Raises:
        Blocked: `fully_shard` takes no such model; FSDP1 runs the `forward` that the object was given, or none.
    """
    made = wrap.value("module")
    for _ in range(8):  # `model = build().cuda()`, and FSDP(model.to(dtype))
        made = single_value(wrap.context, made) if made is not None else None
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in SAME:
            made = made.func.value
    if not isinstance(made, ast.Call):
        return
    program, name = wrap.draft.program, last_name(made.func)
    known = program.function(wrap.context, made.func)
    files = program.files(re.compile(rf"\bdef {name}\(").search) if name and known is None else ()
    makers = [one for context in files for one in context.functions if one.name == name]
    makers += [known[1]] if known is not None else []
    found = [_CONTAINERS.search(ast.unparse(one.returns)) if one.returns is not None else None for one in makers]
    kinds = {kind[0] for kind in found if kind is not None}
    if kinds and None not in found:
        raise Blocked(
            f"{min(kinds)} has no forward, so fully_shard refuses it",
            "give it a class with a forward, or shard what is in it",
        )


def convert_placement(wrap: Wrap) -> Options:
    """Drop or rewrite the four arguments.

    Returns:
        `fully_shard` options as (name, text), for those that read as constants; what is known only at run time has
        been written into the argument list already, by a helper.
    """
    if _has_no_device(wrap):
        wrap.dropped.append(
            "fully_shard uses the current device, which nothing sets here: call torch.cuda.set_device first"
        )
    wrap.drop(*(name for name in _WHERE if is_none(wrap.value(name))))
    member = strategy(wrap.context, wrap.value("sharding_strategy"))
    kind = _device_kind(wrap, wrap.value("device_id"))
    mesh, group = wrap.value("device_mesh"), wrap.value("process_group")
    is_clear = member is not None and is_none(group) and kind != "unknown" and (kind != "cuda" or wrap.is_plain)
    if mesh is not None and not is_none(mesh):
        is_clear = is_clear and member != "NO_SHARD" and _has_right_axes(wrap, mesh, member)
    elif member in (*HYBRID, "NO_SHARD"):
        is_clear = is_clear and (kind == "cpu" or "torch.cuda." in wrap.context.text)
    if member is None or not is_clear:
        return _at_run_time(wrap, member, kind)
    wrap.drop("sharding_strategy", "device_id")
    if kind == "cuda":
        _set_device(wrap)
    text = _mesh_text(wrap, member, kind)
    wrap.drop("device_mesh")
    reshard = member in KEEPS_UNSHARDED
    return [("mesh", text)] * bool(text) + [("reshard_after_forward", "False")] * reshard


def _has_right_axes(wrap: Wrap, mesh: ast.expr, member: str | None) -> bool:
    """Whether the mesh has the number of axes that the strategy takes, with names where FSDP2 needs them."""
    num_axes = 2 if member in HYBRID else 1
    built = single_value(wrap.context, mesh)
    if isinstance(built, ast.Subscript):  # mesh["dp"]
        names = built.slice.elts if isinstance(built.slice, ast.Tuple) else [built.slice]
        is_named = all(isinstance(one, ast.Constant) and isinstance(one.value, str) for one in names)
        return is_named and len(names) == num_axes
    if not (isinstance(built, ast.Call) and wrap.context.is_any(built.func, _BUILDERS)):
        return False
    shape, named = argument_of(built, 1, "mesh_shape"), argument_of(built, 2, "mesh_dim_names")
    return isinstance(shape, ast.Tuple) and len(shape.elts) == num_axes and (num_axes == 1 or not is_none(named))


def _mesh_text(wrap: Wrap, member: str, kind: str) -> str:
    """The mesh to give; empty where `fully_shard` makes the same one itself."""
    if not is_none(wrap.value("device_mesh")):
        return wrap.text("device_mesh")
    if kind != "cpu" and member not in (*HYBRID, "NO_SHARD"):
        return ""
    device, world = "cpu" if kind == "cpu" else "cuda", "dist.get_world_size()"
    wrap.draft.names |= {"init_device_mesh", "dist"}
    if member in HYBRID:
        per_node = f"{wrap.draft.name('torch')}.{device}.device_count()"
        return f'init_device_mesh("{device}", ({world} // {per_node}, {per_node}), {_AXES})'
    if member == "NO_SHARD":
        wrap.dropped.append("NO_SHARD keeps a whole copy on every rank: a mesh with a shard axis of 1")
        return f'init_device_mesh("{device}", ({world}, 1), {_AXES})'
    return f'init_device_mesh("cpu", ({world},))'


def _set_device(wrap: Wrap) -> None:
    """`fully_shard` uses the current device: make it the one that `device_id` named, unless that is done already."""
    text = wrap.text("device_id")
    calls = wrap.context.calls_to("torch.cuda.set_device", "torch.cuda.device")
    if not any(call.args and wrap.draft.source(call.args[0]) == text for call in calls):
        wrap.draft.insert_before(wrap.statement, [f"{wrap.draft.name('torch')}.cuda.set_device({text})"])


def _at_run_time(wrap: Wrap, member: str | None, kind: str) -> Options:
    """Leave it to `_placement` or `_mesh`, in place of the first of the arguments."""
    draft, told = wrap.draft, wrap.by_name.get("sharding_strategy")
    given = [name for name in _WHERE if not is_none(wrap.value(name)) and (name, kind) != ("device_id", "current")]
    where = ", ".join(f"{name}={wrap.text(name)}" for name in given)
    draft.features.update(given)
    wrap.drop(*_WHERE)
    if member in ("FULL_SHARD", "SHARD_GRAD_OP"):
        wrap.drop("sharding_strategy")
        options = [("mesh", f"{draft.helper('_mesh')}({where})")] if given else []
        return options + [("reshard_after_forward", "False")] * (member == "SHARD_GRAD_OP")
    helper = draft.helper("_placement", "strategy")
    if told is None:
        return [("**", f"**{helper}({where})")]
    wrap.list.wrap(told, f"**{helper}(", f", {where})" if where else ")")
    return []

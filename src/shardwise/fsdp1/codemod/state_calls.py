"""Calls that set a state dict type, and the blocks under it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.fsdp1.codemod.draft import FileDraft
from shardwise.fsdp1.codemod.program import Program, called_fsdp_name, fsdp_name, is_none, single_value
from shardwise.source.edits import change
from shardwise.source.syntax import FileContext, argument_of

FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
_PARAMETERS = ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config")
_FIELDS = ("offload_to_cpu", "rank0_only")


@dataclass(frozen=True, slots=True)
class Gather:
    """How FSDP1 hands out one state dict, as far as reading tells."""

    kind: str | None
    """FULL_STATE_DICT and so on; None where only the run knows."""
    offload: bool | None = False
    rank0_only: bool | None = False
    kind_text: str = ""
    """The expressions themselves, for what only the run knows."""
    config_text: str = "None"

    @property
    def is_known(self) -> bool:
        """Whether nothing is left to the run."""
        return None not in (self.kind, self.offload, self.rank0_only)


@dataclass(frozen=True, slots=True)
class StateSettings:
    """FSDP1's settings in force at some place."""

    model: Gather
    optimizer: Gather


DEFAULT = StateSettings(Gather(FULL), Gather(FULL, offload=True))
"""Where nothing was said: whole tensors on every rank, an optimizer's on the CPU."""


def read_settings(context: FileContext, call: ast.Call) -> StateSettings | None:
    """The settings that a call makes; None where its arguments cannot be told apart."""
    given: dict[str, ast.expr] = dict(zip(_PARAMETERS, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg not in _PARAMETERS:
            return None
        given[keyword.arg] = keyword.value
    if "state_dict_type" not in given or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    kind_node = given["state_dict_type"]
    kind = _kind(context, kind_node)
    gathers = []
    for name, offload in (("state_dict_config", False), ("optim_state_dict_config", True)):
        config = given.get(name)
        offload_to_cpu, rank0_only = _fields(context, config, default_offload=offload)
        text = "None" if config is None else context.source(config)
        gathers.append(Gather(kind, offload_to_cpu, rank0_only, context.source(kind_node), text))
    return StateSettings(*gathers)


def _kind(context: FileContext, node: ast.expr) -> str | None:
    name = fsdp_name(context, single_value(context, node)) or ""
    member = name.removeprefix("StateDictType.")
    return member if name.startswith("StateDictType.") and member in (FULL, SHARDED, LOCAL) else None


def _fields(context: FileContext, node: ast.expr | None, *, default_offload: bool) -> tuple[bool | None, bool | None]:
    """`offload_to_cpu` and `rank0_only` of a config; None where only the run knows."""
    if is_none(node):
        return default_offload, False
    assert node is not None
    call = single_value(context, node)
    name = called_fsdp_name(context, call)
    if name is None or not name.endswith("StateDictConfig") or not isinstance(call, ast.Call):
        return None, None
    found: dict[str, bool | None] = {"offload_to_cpu": "Optim" in name, "rank0_only": False}
    given = [*zip(_FIELDS, call.args, strict=False), *((keyword.arg, keyword.value) for keyword in call.keywords)]
    for field, value in given:
        if field is None:
            return None, None
        found[field] = value.value if isinstance(value, ast.Constant) and isinstance(value.value, bool) else None
    return found["offload_to_cpu"], found["rank0_only"]


STATE_CODE, PLAIN_CODE, OPTIMIZER_CODE, LOCAL_CODE = "SW110", "SW111", "SW112", "SW113"


class NotRewritable(Exception):
    """A state-dict call that stays as it is: where, why, and what a person should do."""

    def __init__(self, node: ast.AST, why: str, fix: str, code: str = STATE_CODE) -> None:
        super().__init__(why)
        self.node, self.why, self.fix, self.code = node, why, fix, code


@dataclass(frozen=True, slots=True)
class StateCallWriter:
    """Writes calls of `torch.distributed.checkpoint.state_dict` into one draft."""

    draft: FileDraft

    def model_state(self, model: str, gather: Gather) -> str:
        """What `model.state_dict()` gave."""
        if not gather.is_known:
            return self._at_run_time("_model_state", [model], gather)
        self._refuse_local(gather)
        return self._gathered(f"{self.draft.name('get_model_state_dict')}({model}", gather)

    def load_model(self, model: str, state: str, gather: Gather, strict: str = "") -> str:
        """What `model.load_state_dict(state)` did."""
        extra = [f"strict={strict}"] if strict else []
        if gather.kind is None:
            return self._at_run_time("_load_model_state", [model, state, *extra], gather, config=False)
        self._refuse_local(gather)
        options = self._options(full_state_dict=gather.kind == FULL, extra=extra)
        return f"{self.draft.name('set_model_state_dict')}({model}, {state}{options})"

    def optimizer_state(self, model: str, optimizer: str, gather: Gather) -> str:
        """What `FSDP.optim_state_dict(model, optimizer)` gave."""
        if not gather.is_known:
            return self._at_run_time("_optimizer_state", [model, optimizer], gather)
        self._refuse_local(gather)
        return self._gathered(f"{self.draft.name('get_optimizer_state_dict')}({model}, {optimizer}", gather)

    def whole_state(self, model: str) -> str:
        """`model.state_dict()` where the model may also be a plain one."""
        return f"{self.draft.helper('_whole_state')}({model})"

    def load_whole_state(self, model: str, state: str, strict: str = "") -> str:
        """`model.load_state_dict(state)` where the model may also be a plain one."""
        more = f", strict={strict}" if strict else ""
        return f"{self.draft.helper('_load_whole_state')}({model}, {state}{more})"

    def load_optimizer(self, model: str, optimizer: str, state: str, gather: Gather, *, sure: bool = True) -> str:
        """What loading the result of `FSDP.optim_state_dict_to_load(...)` into the optimizer did.

        Not `sure`: the model may also be a plain one, whose optimizer loads its state itself.
        """
        if gather.kind is None or gather.rank0_only is None:
            if not sure:
                raise NotRewritable(self.draft.context.tree, "what it loads is only known at run time", "write it out")
            return self._at_run_time("_load_optimizer_state", [model, optimizer, state], gather)
        self._refuse_local(gather)
        is_full = gather.kind == FULL
        switches = {"full_state_dict": is_full, "broadcast_from_rank0": is_full and gather.rank0_only}
        if not sure:
            told = "".join(f", {name}=True" for name, value in switches.items() if value)
            return f"{self.draft.helper('_load_optimizer')}({model}, {optimizer}, {state}{told})"
        options = self._options(**switches)
        return f"{self.draft.name('set_optimizer_state_dict')}({model}, {optimizer}, {state}{options})"

    def _gathered(self, start: str, gather: Gather) -> str:
        """A `get_*_state_dict` call, and what it takes to have the values where FSDP1 had them."""
        offload, rank0_only = bool(gather.offload), bool(gather.rank0_only)
        if gather.kind != FULL:
            return f"{start}{self._options(cpu_offload=offload)})"
        if offload and rank0_only:
            return f"{start}{self._options(full_state_dict=True, cpu_offload=True)})"
        call = f"{start}{self._options(full_state_dict=True)})"
        if offload:
            return f"{self.draft.helper('_on_cpu')}({call})"
        return f"{self.draft.helper('_on_rank0')}({call})" if rank0_only else call

    def _options(self, *, extra: list[str] | None = None, **switches: object) -> str:
        given = [f"{name}=True" for name, value in switches.items() if value] + (extra or [])
        return f", options={self.draft.name('StateDictOptions')}({', '.join(given)})" if given else ""

    def _at_run_time(self, helper: str, arguments: list[str], gather: Gather, *, config: bool = True) -> str:
        kind = gather.kind_text or f"{self.draft.name('StateDictType')}.{gather.kind}"
        told = [f"kind={kind}"] + ([f"config={gather.config_text}"] if config and gather.config_text != "None" else [])
        return f"{self.draft.helper(helper)}({', '.join([*arguments, *told])})"

    def _refuse_local(self, gather: Gather) -> None:
        if gather.kind == LOCAL:
            raise NotRewritable(
                self.draft.context.tree,
                "LOCAL_STATE_DICT holds FSDP1's flat shards, which FSDP2 does not have",
                "save SHARDED_STATE_DICT instead; `shardwise ckpt convert` reads checkpoints that are there already",
                LOCAL_CODE,
            )


_SETTER = "FullyShardedDataParallel.set_state_dict_type"
_RANK_ZERO = re.compile(
    r"rank\w*(\(\))?\s*==\s*0|not\s+[\w.]*rank\b|is_main|main_process|is_master|master_process|is_rank_?0"
)


def under_rank_zero(context: FileContext, call: ast.Call) -> bool:
    """Whether only rank 0 comes to a call."""
    for inner, outer in _chain(context, call):
        if isinstance(outer, ast.If) and any(inner is one for one in outer.body):
            test = ast.unparse(outer.test)
            if _RANK_ZERO.search(test) and " or " not in test and " and " not in test:
                return True
    return False


def rules_out(context: FileContext, call: ast.Call) -> bool:
    """Whether a wrapped model cannot come to a call: it is in the other branch of a test for FSDP, or behind it."""
    for inner, outer in _chain(context, call):
        if isinstance(outer, ast.If | ast.IfExp) and _asks_for_fsdp(outer.test) is not None:
            orelse = outer.orelse if isinstance(outer, ast.If) else [outer.orelse]
            if any(inner is one for one in orelse) is _asks_for_fsdp(outer.test) and inner is not outer.test:
                return True
        for body in (getattr(outer, "body", None), getattr(outer, "orelse", None)):
            if isinstance(body, list) and any(inner is one for one in body):
                before = body[: next(index for index, one in enumerate(body) if one is inner)]
                if any(_leaves_for_fsdp(one) for one in before):
                    return True
    return False


def _asks_for_fsdp(test: ast.expr) -> bool | None:
    """True for `isinstance(m, FSDP)`, `args.fsdp`, `mode == "fsdp"`; False for their negation; None for other tests."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _asks_for_fsdp(test.operand)
        return None if inner is None else not inner
    text = ast.unparse(test).lower()
    if "fsdp" not in text or isinstance(test, ast.BoolOp):
        return None
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.IsNot | ast.NotIn):
        return "none" in text or "false" in text
    return not (isinstance(test, ast.Compare) and ("none" in text or "false" in text))


def _leaves_for_fsdp(statement: ast.stmt) -> bool:
    """`if isinstance(m, FSDP): ...; return`: what follows is for other models."""
    if not isinstance(statement, ast.If) or _asks_for_fsdp(statement.test) is not True or statement.orelse:
        return False
    return isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def sets_types_globally(program: Program) -> bool:
    """Whether some file sets a state-dict type in one function for calls in another."""
    return program.remember("sets_types_globally", _sets_types_globally)


def _sets_types_globally(program: Program) -> bool:
    return any(
        fsdp_name(context, call.func) == _SETTER and not _used_nearby(context, call)
        for context in program.files(lambda text: ".set_state_dict_type" in text)
        for call in context.calls
    )


def _used_nearby(context: FileContext, call: ast.Call) -> bool:
    model, function = argument_of(call, 0, "module"), context.enclosing_function(call)
    text = ast.unparse(model) if model is not None else ""
    for one in context.calls:
        if one.lineno > call.lineno and context.enclosing_function(one) is function:
            if isinstance(one.func, ast.Attribute) and one.func.attr in ("state_dict", "load_state_dict"):
                if ast.unparse(one.func.value) == text:
                    return True
            elif "optim_state_dict" in (fsdp_name(context, one.func) or ""):
                return True
    return False


def _chain(context: FileContext, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for parent in context.ancestors(node):
        yield node, parent
        node = parent


_HEADER_END = re.compile(r"(?:[\s),]|#[^\n]*\n)*:[ \t]*(?P<comment>#[^\r\n]*)?\r?\n")


def dissolve(draft: FileDraft, block: ast.With, call: ast.Call) -> None:
    """Remove one context from a `with`; if it was the only one, the statement around its body too.

    Raises:
        NotRewritable: The body stands on the line of the `with`, or its lines cannot be moved.
    """
    context = draft.context
    others = [item for item in block.items if item.context_expr is not call]
    if any(item.optional_vars is not None for item in block.items if item not in others):
        raise NotRewritable(call, "the context is given a name", "take the `as` away")
    start, end = context.positions.span(block)[0], _last(draft, block)
    header = _HEADER_END.match(context.text, end)
    if header is None or not draft.starts_line(block):
        raise NotRewritable(call, "the body stands on the same line", "put it on a line of its own")
    if others:
        kept = ", ".join(_item(draft, item) for item in others)
        draft.edits.append(change(start, header.end(), f"with {kept}:{_comment(header)}{draft.newline}"))
        return
    # From the word `with` to the first character of the body: the `with`'s own indentation serves it.
    first = re.compile(r"\s*").match(context.text, header.end())
    body = first.end() if first else header.end()
    remark = f"{header['comment']}{draft.newline}{draft.indent(block)}" if header["comment"] else ""
    draft.edits.append(change(start, body, remark))
    _move_out(draft, block, body)


def remove_statement(draft: FileDraft, statement: ast.stmt) -> None:
    """Take a statement away with its line; `pass` stays where it was the only one."""
    context = draft.context
    start, end = context.positions.span(statement)
    siblings = context.block(statement)
    rest = re.compile(r"[ \t]*(#[^\r\n]*)?(\r?\n|$)").match(context.text, end)
    if len(siblings) < 2 or rest is None or not draft.starts_line(statement):
        draft.edits.append(change(start, end, "pass"))
    elif statement is siblings[-1]:
        draft.edits.append(change(context.positions.starts[statement.lineno - 1], rest.end(), ""))
    else:  # up to what follows: the indentation before the statement serves it
        behind = re.compile(r"\s*").match(context.text, rest.end())
        draft.edits.append(change(start, behind.end() if behind else rest.end(), ""))


def drop_dead_configs(draft: FileDraft, program: Program) -> None:
    """Remove `policy = FullStateDictConfig(...)` where only settings that are gone now had used it."""
    context = draft.context
    gone = [call for call in draft.taken if isinstance(call, ast.Call) and _is_setting(context, call)]
    inside = {id(node) for call in gone for node in ast.walk(call)}
    for statement in [node for node in context.parents if isinstance(node, ast.Assign)] if gone else []:
        target = statement.targets[0]
        name = called_fsdp_name(context, statement.value) or ""
        if not (name.endswith("StateDictConfig") and isinstance(target, ast.Name) and len(statement.targets) == 1):
            continue
        uses = [one for one in context.parents if isinstance(one, ast.Name) and one.id == target.id]
        is_dead = any(id(one) in inside for one in uses) and all(one is target or id(one) in inside for one in uses)
        is_alone = all(target.id not in text for path, text in program.texts.items() if path != context.path)
        is_emitted = any(re.search(rf"\b{target.id}\b", edit.text) for edit in draft.edits)
        if is_dead and not is_emitted and (is_alone or context.enclosing_function(statement) is not None):
            remove_statement(draft, statement)


def _is_setting(context: FileContext, call: ast.Call) -> bool:
    return (fsdp_name(context, call.func) or "").endswith("state_dict_type")


def _last(draft: FileDraft, block: ast.With) -> int:
    item = block.items[-1]
    return draft.context.positions.span(item.optional_vars or item.context_expr)[1]


def _item(draft: FileDraft, item: ast.withitem) -> str:
    text = draft.context.source(item.context_expr)
    return f"{text} as {draft.context.source(item.optional_vars)}" if item.optional_vars is not None else text


def _comment(header: re.Match[str]) -> str:
    return f"  {header['comment']}" if header["comment"] else ""


def _move_out(draft: FileDraft, block: ast.With, body_start: int) -> None:
    """Take one level of indentation from every line of the body that is not inside a string."""
    context, positions = draft.context, draft.context.positions
    outer, inner = draft.indent(block), draft.indent(block.body[0])
    if not inner.startswith(outer) or inner == outer:
        raise NotRewritable(block, "its lines are indented in mixed ways", "indent them alike")
    width, in_string = len(inner) - len(outer), _string_lines(context.text)
    edits = list(draft.edits)
    first = next(number for number, start in enumerate(positions.starts, 1) if start >= body_start)
    for number in range(first, (block.end_lineno or first) + 1):
        line = positions.line(number)
        start = positions.starts[number - 1]
        if number in in_string or not line.strip() or any(one.start < start + len(inner) <= one.end for one in edits):
            continue
        if line[: len(inner)] == inner or (line.lstrip().startswith("#") and line.startswith(outer)):
            have = len(line) - len(line.lstrip(" \t"))
            draft.edits.append(change(start + len(outer), start + len(outer) + min(width, have - len(outer)), ""))


def _string_lines(text: str) -> set[int]:
    """Lines that start inside a string: their white space belongs to it."""
    found: set[int] = set()
    try:
        starts: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kind = tokenize.tok_name[token.type]
            if kind == "STRING":
                found.update(range(token.start[0] + 1, token.end[0] + 1))
            elif kind == "FSTRING_START":
                starts.append(token.start[0])
            elif kind == "FSTRING_END" and starts:
                found.update(range(starts.pop() + 1, token.end[0] + 1))
    except (tokenize.TokenError, IndentationError):
        pass
    return found

"""Calls that set a state dict type, what they become, and the blocks under them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.config.fsdp1_names import HYBRID
from shardwise.fsdp1.codemod.draft import Blocked, FileDraft
from shardwise.fsdp1.codemod.flow import Sharded, flow_of
from shardwise.fsdp1.codemod.program import (
    Program,
    called_fsdp_name,
    fsdp_name,
    given_by_name,
    is_constant,
    is_none,
    once,
    single_value,
    strategy,
)
from shardwise.source import facts
from shardwise.source.syntax import FileContext, argument_of, calls_in

STATE_CODE, PLAIN_CODE, OPTIMIZER_CODE, LOCAL_CODE = "SW110", "SW111", "SW112", "SW113"
FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
_PARAMETERS = ("module", "state_dict_type", "state_dict_config", "optim_state_dict_config")


@dataclass(frozen=True, slots=True)
class Gather:
    """How FSDP1 hands out one state dict, as far as reading tells."""

    kind: str | None
    """FULL_STATE_DICT and so on; None where only the run knows."""
    offload: bool | None = False
    rank0_only: bool | None = False
    kind_text: str = ""
    """The expressions themselves, for what only the run knows."""
    config_text: str = ""

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


def static_name(context: FileContext, call: ast.Call) -> str:
    """`state_dict_type` for a call of `FSDP.state_dict_type`; empty for other calls."""
    owner, _, name = fsdp_name(context, call.func).partition(".")
    return name if owner == "FullyShardedDataParallel" else ""


def read_settings(context: FileContext, call: ast.Call) -> StateSettings | None:
    """The settings that a call makes; None where its arguments cannot be told apart."""
    given = given_by_name(call, _PARAMETERS)
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    if "state_dict_type" not in given or set(given) - set(_PARAMETERS) or starred:
        return None
    kind_node = given["state_dict_type"]
    name = fsdp_name(context, single_value(context, kind_node))
    kind = next((one for one in (FULL, SHARDED, LOCAL) if name == f"StateDictType.{one}"), None)
    gathers = []
    for parameter, offload in zip(_PARAMETERS[2:], (False, True), strict=True):
        config = given.get(parameter)
        told = (offload, False) if config is None or is_none(config) else _fields(context, config)
        text = "" if config is None or is_none(config) else context.source(config)
        gathers.append(Gather(kind, *told, context.source(kind_node), text))
    return StateSettings(*gathers)


def _fields(context: FileContext, node: ast.expr) -> tuple[bool | None, bool | None]:
    """`offload_to_cpu` and `rank0_only` of a config; None where only the run knows."""
    call = single_value(context, node)
    name = called_fsdp_name(context, call)
    if not isinstance(call, ast.Call) or not name.endswith("StateDictConfig"):
        return None, None
    given = given_by_name(call, ("offload_to_cpu", "rank0_only"))
    if None in given:
        return None, None
    told = {key: next((one for one in (True, False) if is_constant(value, one)), None) for key, value in given.items()}
    return told.get("offload_to_cpu", "Optim" in name), told.get("rank0_only", False)


def write_get(draft: FileDraft, what: str, arguments: Sequence[str], gather: Gather) -> str:
    """What `model.state_dict()` or, for an `optimizer`, `FSDP.optim_state_dict(model, optimizer)` gave."""
    if not gather.is_known:
        return _at_run_time(draft, f"_{what}_state", arguments, gather)
    _refuse_local(gather)
    is_full, both = gather.kind == FULL, gather.offload and gather.rank0_only
    if is_full and gather.rank0_only and what == "model" and _tells_groups_apart(draft):
        return f"{draft.helper('_on_first_rank')}({', '.join([*arguments, *['offload=True'] * bool(gather.offload)])})"
    options = _options(draft, full_state_dict=is_full, cpu_offload=gather.offload if not is_full else both)
    call = f"{draft.name(f'get_{what}_state_dict')}({', '.join(arguments)}{options})"
    if is_full and not both and (gather.offload or gather.rank0_only):
        call = f"{draft.helper('_on_cpu' if gather.offload else '_on_rank0')}({call})"
    # Without state there is nothing to take, and torch would step the optimizer to make some.
    return f"({call} if {arguments[1]}.state else {{}})" if what == "optimizer" else call


_RANK_OF_GROUP = re.compile(
    r"(local|parallel|dp|mp|tp|shard|node|group)_?rank\b(\(\))?\s*[=!]=\s*0|get_rank\([^)]+\)\s*[=!]="
)


def _tells_groups_apart(draft: FileDraft) -> bool:
    """Whether a file asks for the first rank of a group, and models may be sharded over groups: each has a rank 0."""
    return _RANK_OF_GROUP.search(draft.context.text) is not None and shards_in_groups(draft.program)


@once
def shards_in_groups(program: Program) -> bool:
    """Whether models may be sharded over some of the ranks."""
    for file in flow_of(program).files.values():
        for call in file.constructors:
            given = {one.arg: one.value for one in call.keywords}
            is_told = any(not is_none(given.get(name)) for name in ("process_group", "device_mesh"))
            if is_told or None in given or strategy(file.context, given.get("sharding_strategy")) in (*HYBRID, None):
                return True
    return False


def write_load_model(draft: FileDraft, model: str, state: str, gather: Gather, strict: str = "") -> str:
    """What `model.load_state_dict(state)` did."""
    extra = [f"strict={strict}"] if strict else []
    if gather.kind is None:
        return _at_run_time(draft, "_load_model_state", [model, state, *extra], gather, has_config=False)
    _refuse_local(gather)
    options = _options(draft, *extra, full_state_dict=gather.kind == FULL)
    return f"{draft.name('set_model_state_dict')}({model}, {state}{options})"


def write_load_optimizer(
    draft: FileDraft, model: str, optimizer: str, state: str, gather: Gather, *, sure: bool = True
) -> str:
    """What loading the result of `FSDP.optim_state_dict_to_load(...)` into the optimizer did.

    Not `sure`: the model may also be a plain one, whose optimizer loads its state itself.
    """
    if gather.kind is None or gather.rank0_only is None:
        if not sure:
            raise Blocked("what it loads is only known at run time", "write it out")
        return _at_run_time(draft, "_load_optimizer_state", [model, optimizer, state], gather)
    _refuse_local(gather)
    is_full = gather.kind == FULL
    switches = {"full_state_dict": is_full, "broadcast_from_rank0": is_full and gather.rank0_only}
    if sure:
        name, more = draft.name("set_optimizer_state_dict"), _options(draft, **switches)
    else:
        name = draft.helper("_load_optimizer")
        more = "".join(f", {switch}=True" for switch, value in switches.items() if value)
    return f"{name}({model}, {optimizer}, {state}{more})"


def _options(draft: FileDraft, *extra: str, **switches: object) -> str:
    given = [*(f"{name}=True" for name, value in switches.items() if value), *extra]
    return f", options={draft.name('StateDictOptions')}({', '.join(given)})" if given else ""


def _at_run_time(
    draft: FileDraft, helper: str, arguments: Sequence[str], gather: Gather, *, has_config: bool = True
) -> str:
    kind = gather.kind_text or f"{draft.name('StateDictType')}.{gather.kind}"
    config = [f"config={gather.config_text}"] if has_config and gather.config_text else []
    return f"{draft.helper(helper)}({', '.join([*arguments, f'kind={kind}', *config])})"


def _refuse_local(gather: Gather) -> None:
    if gather.kind == LOCAL:
        raise Blocked(
            "LOCAL_STATE_DICT holds FSDP1's flat shards, which FSDP2 does not have",
            "save SHARDED_STATE_DICT instead; `shardwise ckpt convert` reads checkpoints that are there already",
            code=LOCAL_CODE,
        )


def only_on_some_ranks(context: FileContext, call: ast.Call) -> bool:
    """Whether a test for the rank stands between a call and the function around it, and the others do not call too."""
    for test, _, others in context.tests_before(call):
        calls = (one for outer in others for one in calls_in(outer))
        if facts.asks_for_rank_zero(context, test) is not None and context.source(call) not in map(
            context.source, calls
        ):
            return True
    function = context.enclosing_function(call)
    return function is not None and any(map(facts.is_rank_zero_decorator, function.decorator_list))


def is_entered_on_some_ranks(file: Sharded, call: ast.Call, hops: int = 3) -> bool:
    """Whether a call, or every known call of the function around it, is on some ranks only."""
    sites = file.flow.sites_of(file.context.enclosing_function(call)) if hops else []
    return only_on_some_ranks(file.context, call) or (
        bool(sites) and all(is_entered_on_some_ranks(caller, site, hops - 1) for site, caller in sites)
    )


def rules_out(context: FileContext, call: ast.Call) -> bool:
    """Whether a wrapped model cannot come to a call: it is in the other branch of a test for FSDP, or behind it."""
    return any(_asks_for_fsdp(test) is (not taken) for test, taken, _ in context.tests_before(call))


def _asks_for_fsdp(test: ast.expr) -> bool | None:
    """True for `isinstance(m, FSDP)`, `args.fsdp`, `mode == "fsdp"`; False for their negation; None for other tests."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _asks_for_fsdp(test.operand)
        return None if inner is None else not inner
    text = ast.unparse(test).lower()
    if "fsdp" not in text or isinstance(test, ast.BoolOp):
        return None
    is_negative = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.IsNot | ast.NotIn)
    return is_negative == (isinstance(test, ast.Compare) and ("none" in text or "false" in text))


@once
def sets_types_globally(program: Program) -> bool:
    """Whether some file sets a state-dict type in one function for calls in another."""
    return any(
        static_name(context, call) == "set_state_dict_type" and not _is_used_nearby(context, call)
        for context in program.files(lambda text: ".set_state_dict_type" in text)
        for call in context.calls
    )


def set_by_helper(program: Program, context: FileContext, call: ast.Call) -> int | None:
    """The line of a function, other than FSDP1's own, that is entered around a call and sets a state-dict type."""
    for _, entered in context.entered_calls(call):
        found = program.function(context, entered.func)
        body = ast.unparse(found[1]) if found is not None else ast.unparse(entered.func)
        is_setting = "state_dict_type" in body or (found is None and "state_dict" in body)
        if is_setting and static_name(context, entered) != "state_dict_type":
            return entered.lineno
    return None


def _is_used_nearby(context: FileContext, call: ast.Call) -> bool:
    model, function = argument_of(call, 0, "module"), context.enclosing_function(call)
    text = ast.unparse(model) if model is not None else ""
    for one in context.calls:
        if one.lineno > call.lineno and context.enclosing_function(one) is function:
            match one.func:
                case ast.Attribute(attr="state_dict" | "load_state_dict", value=owner) if ast.unparse(owner) == text:
                    return True
            if "optim_state_dict" in fsdp_name(context, one.func):
                return True
    return False


_HEADER_END = re.compile(r"(?:[\s),]|#[^\n]*\n)*:[ \t]*(?P<comment>#[^\r\n]*)?\r?\n")
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r"\"{3}|'{3}|\\\n")
"""One that may have several lines."""


def dissolve(draft: FileDraft, block: ast.With, call: ast.Call) -> None:
    """Remove one context from a `with`; if it was the only one, the statement around its body too.

    Raises:
        Blocked: The body stands on the line of the `with`, or its lines cannot be moved.
    """
    text, start = draft.context.text, draft.span(block)[0]
    others = [item for item in block.items if item.context_expr is not call]
    if any(item.optional_vars is not None for item in block.items if item not in others):
        raise Blocked("the context is given a name", "take the `as` away")
    last = block.items[-1].optional_vars or block.items[-1].context_expr
    header = _HEADER_END.match(text, draft.span(last)[1])
    if header is None or not draft.starts_line(block):
        raise Blocked("the body stands on the same line", "put it on a line of its own")
    comment = header["comment"]
    if others:
        kept = ", ".join(
            draft.source(one.context_expr) + (f" as {draft.source(one.optional_vars)}" if one.optional_vars else "")
            for one in others
        )
        draft.edit(start, header.end(), f"with {kept}:{f'  {comment}' if comment else ''}{draft.newline}")
        return
    # From the word `with` to the first character of the body: the `with`'s own indentation serves it.
    first = _SPACE.match(text, header.end())
    body = first.end() if first else header.end()
    draft.edit(start, body, f"{comment}{draft.newline}{draft.indent(block)}" if comment else "")
    _move_out(draft, block, body)


def _move_out(draft: FileDraft, block: ast.With, body_start: int) -> None:
    """Take one level of indentation from every line of the body that is not inside a string."""
    positions, edits = draft.context.positions, list(draft.edits)
    outer, inner = draft.indent(block), draft.indent(block.body[0])
    if not inner.startswith(outer) or inner == outer:
        raise Blocked("its lines are indented in mixed ways", "indent them alike", block)
    width, in_string = len(inner) - len(outer), _string_lines(draft.context)
    for number in range(block.lineno + 1, (block.end_lineno or block.lineno) + 1):
        line, start = positions.line(number), positions.starts[number - 1]
        is_edited = any(one.start < start + len(inner) <= one.end for one in edits)
        if start < body_start or number in in_string or not line.strip() or is_edited:
            continue
        if line.startswith(inner) or (line.lstrip().startswith("#") and line.startswith(outer)):
            have = len(line) - len(line.lstrip(" \t"))
            draft.edit(start + len(outer), start + len(outer) + min(width, have - len(outer)), "")


def _string_lines(context: FileContext) -> set[int]:
    """Lines that start inside a string: their white space belongs to it."""
    strings = [one for one in context.nodes(ast.Constant, ast.JoinedStr) if _STRING.search(context.source(one))]
    return {line for one in strings for line in range(one.lineno + 1, (one.end_lineno or one.lineno) + 1)}


def remove_statement(draft: FileDraft, statement: ast.stmt) -> None:
    """Take a statement away with its line; `pass` stays where it was the only one."""
    text, (start, end) = draft.context.text, draft.span(statement)
    siblings = draft.context.block(statement)
    rest = re.compile(r"[ \t]*(#[^\r\n]*)?(\r?\n|$)").match(text, end)
    if len(siblings) < 2 or rest is None or not draft.starts_line(statement):
        draft.edit(start, end, "pass")
    elif statement is siblings[-1]:
        draft.edit(draft.context.positions.starts[statement.lineno - 1], rest.end(), "")
    else:  # up to what follows: the indentation before the statement serves it
        behind = _SPACE.match(text, rest.end())
        draft.edit(start, behind.end() if behind else rest.end(), "")


def drop_dead_configs(draft: FileDraft) -> None:
    """Remove `policy = FullStateDictConfig(...)` where only settings that are gone now had used it."""
    context = draft.context
    gone = [one for one in draft.taken if called_fsdp_name(context, one).endswith("state_dict_type")]
    inside = {node for call in gone for node in ast.walk(call)}
    for statement in list(context.parents) if gone else []:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name) as target], value=value) if called_fsdp_name(
                context, value
            ).endswith("StateDictConfig"):
                uses = {one for one in context.parents if isinstance(one, ast.Name) and one.id == name} - {target}
                others = [text for path, text in draft.program.texts.items() if path != context.path]
                is_local = context.enclosing_function(statement) is not None or all(name not in one for one in others)
                is_emitted = any(re.search(rf"\b{name}\b", edit.text) for edit in draft.edits)
                if uses and uses <= inside and is_local and not is_emitted:
                    remove_statement(draft, statement)

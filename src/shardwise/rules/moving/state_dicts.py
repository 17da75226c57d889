"""State dicts of wrapped models: `state_dict_type`, `set_state_dict_type`, and plain `state_dict()`, the silent one."""

from __future__ import annotations

import ast

from shardwise.errors import SourceError
from shardwise.rules.moving import optimizer_state
from shardwise.rules.moving.draft import ROAD1, Draft
from shardwise.rules.moving.edits import apply_edits
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds
from shardwise.rules.moving.state_blocks import dissolve, drop_dead_configs, remove_statement
from shardwise.rules.moving.state_calls import OPTIMIZER_CODE, PLAIN_CODE, STATE_CODE, Unmovable, Writer
from shardwise.rules.moving.state_reach import rules_out, sets_types_globally, under_rank_zero
from shardwise.rules.moving.state_settings import DEFAULT, Settings, model_argument, read_settings
from shardwise.rules.moving.support import functions
from shardwise.rules.moving.values import fsdp_name
from shardwise.rules.source import FileContext

_OWNER = "FullyShardedDataParallel."
_METHODS = ("state_dict", "load_state_dict")
_CONTEXTS = ("state_dict_type", "set_state_dict_type", "get_state_dict_type")
_HARMLESS = {"isinstance", "print", "type", "len", "id", "hasattr", "getattr", "str", "next", "sum"}


def rewrite_state_dicts(draft: Draft, program: Program) -> None:
    """Rewrite every state-dict call of a file that FSDP1 had a say in; leave and report what cannot be.

    Args:
        draft: The file.
        program: All files given.
    """
    context, handled = draft.context, set[ast.AST]()
    for call in context.calls:
        name = (fsdp_name(context, call.func) or "").removeprefix(_OWNER)
        if name in _CONTEXTS:
            _attempt(draft, call, handled, name)
    for call in context.calls:
        if call not in handled and call not in draft.taken:
            _plain(draft, program, call)
    for call in context.calls_to(*optimizer_state.READS_SHARDED):
        if call not in draft.taken:
            message = "load_sharded_optimizer_state_dict reads FSDP1's shards only"
            draft.undecided(OPTIMIZER_CODE, call, message, _READ_FIX)
    drop_dead_configs(draft, program)


def _attempt(draft: Draft, call: ast.Call, handled: set[ast.AST], name: str) -> None:
    """One setting and all calls that it governs: rewritten together, or left together."""
    context = draft.context
    earlier = draft.snapshot()
    governed = [one for one in _governed(context, call, name) if one not in handled]
    try:
        if name == "get_state_dict_type":
            raise Unmovable(call, "FSDP2 keeps no state-dict type", "remember the options yourself")
        settings = read_settings(context, call)
        if settings is None:
            raise Unmovable(call, f"the arguments of {name} cannot be told apart", "write them out")
        block = _block(context, call)
        if name == "state_dict_type" and block is None:
            raise Unmovable(call, "the context is stored, not entered here", _BY_HAND)
        if not governed:
            raise Unmovable(call, "the state dict is taken elsewhere", _BY_HAND)
        _refuse_leaks(context, call, block)
        for one in governed:
            _rewrite(draft, one, settings)
        if block is not None:
            dissolve(draft, block, call)
        else:
            remove_statement(draft, context.statement(call))
        draft.taken.update(ast.walk(call))
        _check(draft, call)
        draft.rewritten(STATE_CODE, call, f"{name} became options of get_ and set_model_state_dict")
    except Unmovable as problem:
        draft.restore(earlier)
        at = call if isinstance(problem.node, ast.Module) else problem.node
        draft.undecided(problem.code, at, f"{name} is left alone: {problem.why}", f"{problem.fix}; or {ROAD1}")
    handled.update([call, *governed])


def _check(draft: Draft, call: ast.Call) -> None:
    """Raise if the edits so far cannot be made together."""
    try:
        apply_edits(draft.context.text, draft.edits)
    except SourceError:
        raise Unmovable(call, "another rewrite touches the same lines", "rewrite it by hand") from None


_READ_FIX = (
    "fill a dict with get_optimizer_state_dict(model, optimizer) and let torch.distributed.checkpoint.load read it"
)
_BY_HAND = "call get_model_state_dict(model, options=StateDictOptions(...)) where the state dict is taken"


def _governed(context: FileContext, call: ast.Call, name: str) -> list[ast.Call]:
    """The calls whose outcome a setting decides, as far as the function around it goes."""
    model = model_argument(call)
    if model is None:
        return []
    text, block = ast.unparse(model), _block(context, call)
    inside = block or context.enclosing_function(call) or context.tree
    found = []
    for one in context.calls:
        if one is call or _subject(context, one) != text or inside not in set(context.ancestors(one)):
            continue
        nearest = _nearest(context, one, text)
        if nearest is not block or (block is None and one.lineno < call.lineno):
            continue
        found.append(one)
    return found if name != "get_state_dict_type" else []


def _block(context: FileContext, call: ast.Call) -> ast.With | None:
    """The `with` that a call is a context of."""
    item = context.parents[call]
    block = context.parents.get(item)
    return block if isinstance(item, ast.withitem) and isinstance(block, ast.With) else None


def _subject(context: FileContext, call: ast.Call) -> str | None:
    """The model, as text, whose state a call hands out or takes in."""
    if optimizer_state.method(context, call):
        model = optimizer_state.model_of(context, call)
        return ast.unparse(model) if model is not None else None
    if isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS:
        return ast.unparse(call.func.value)
    return None


def _nearest(context: FileContext, call: ast.Call, model: str) -> ast.With | None:
    """The innermost `with FSDP.state_dict_type(model, ...)` around a call."""
    for one in context.ancestors(call):
        if isinstance(one, ast.With):
            for item in one.items:
                inner = item.context_expr
                if isinstance(inner, ast.Call) and fsdp_name(context, inner.func) == f"{_OWNER}state_dict_type":
                    given = model_argument(inner)
                    if given is not None and ast.unparse(given) == model:
                        return one
    return None


def _refuse_leaks(context: FileContext, call: ast.Call, block: ast.With | None) -> None:
    """Raise if the model goes to a function inside the block, which may take a state dict there."""
    model = model_argument(call)
    if block is None or model is None:
        return
    text = ast.unparse(model)
    for one in context.calls:
        if one is call or block not in set(context.ancestors(one)) or optimizer_state.method(context, one):
            continue
        given = [*one.args, *(keyword.value for keyword in one.keywords)]
        name = ast.unparse(one.func).rsplit(".", 1)[-1]
        if name not in _HARMLESS and any(ast.unparse(value) == text for value in given):
            raise Unmovable(one, f"{name}() gets the model, and may take its state dict", _BY_HAND)


def _rewrite(draft: Draft, call: ast.Call, settings: Settings, *, sure: bool = True) -> None:
    """Rewrite one call. Not `sure`: the model may also be a plain one, whose own method must stay."""
    context, writer = draft.context, Writer(draft)
    names = draft.names.copy()
    if under_rank_zero(context, call):
        raise Unmovable(
            call,
            "it is called on one rank only, and gathering takes all of them",
            "call it on every rank and use the result on rank 0",
        )
    if optimizer_state.method(context, call):
        optimizer_state.rewrite_call(writer, call, settings)
    else:
        draft.replace(call, _model_call(writer, call, settings, sure=sure))
    draft.taken.update(ast.walk(call))
    for name in draft.names - names:
        found = context.scope(call).find(name)
        if found is not None and not isinstance(found[0].node, ast.Module):
            raise Unmovable(call, f"{name} is a name of its own in this function", "rename it")


def _model_call(writer: Writer, call: ast.Call, settings: Settings, *, sure: bool) -> str:
    """`model.state_dict()` or `model.load_state_dict(...)` in FSDP2's words."""
    context = writer.draft.context
    assert isinstance(call.func, ast.Attribute)
    model = context.source(call.func.value)
    if call.func.attr == "state_dict":
        if call.args or call.keywords:
            raise Unmovable(call, "state_dict() has arguments", "take the whole state dict, then choose from it")
        return writer.model_state(model, settings.model) if sure else writer.whole_state(model)
    given: dict[str | None, ast.expr] = dict(zip(("state_dict", "strict"), call.args, strict=False))
    given.update((keyword.arg, keyword.value) for keyword in call.keywords)
    if set(given) - {"state_dict", "strict"} or "state_dict" not in given or len(call.args) > 2:
        raise Unmovable(call, "load_state_dict() has arguments without a counterpart", "leave them out")
    strict = given.get("strict")
    told = "" if strict is None or ast.unparse(strict) == "True" else context.source(strict)
    state = context.source(given["state_dict"])
    return (
        writer.load_model(model, state, settings.model, told) if sure else writer.load_whole_state(model, state, told)
    )


def _plain(draft: Draft, program: Program, call: ast.Call) -> None:
    """A call outside any setting: whole tensors, as FSDP1 gave by default."""
    context = draft.context
    is_optimizer = optimizer_state.method(context, call) is not None
    holds = Holds.ALWAYS if is_optimizer else _holds(draft, program, call)
    if holds is Holds.NEVER:
        return
    earlier = draft.snapshot()
    code = OPTIMIZER_CODE if is_optimizer else PLAIN_CODE
    try:
        if sets_types_globally(program):
            raise Unmovable(call, "set_state_dict_type decides elsewhere what it gives", _BY_HAND, code)
        _rewrite(draft, call, DEFAULT, sure=holds is Holds.ALWAYS)
        _check(draft, call)
        draft.rewritten(code, call, f"{_shown(context, call)} is gathered as FSDP1 did")
    except Unmovable as problem:
        draft.restore(earlier)
        message = f"{_shown(context, call)} is left alone: {problem.why}"
        draft.undecided(problem.code if is_optimizer else code, call, message, problem.fix)


def _holds(draft: Draft, program: Program, call: ast.Call) -> Holds:
    """Whether the call is a wrapped model's: ALWAYS only where it was wrapped in the same function, before."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS):
        return Holds.NEVER
    context, model = draft.context, call.func.value
    sharded = program.sharded(context)
    holds = sharded.holds(model)
    function = context.enclosing_function(call)
    if holds is Holds.NEVER or rules_out(context, call) or (function is not None and function.name in functions()):
        return Holds.NEVER
    wrapped_here = any(
        context.enclosing_function(one) is function
        and isinstance(statement := context.statement(one), ast.Assign)
        and ast.unparse(statement.targets[0]) == ast.unparse(model)
        for one in sharded.constructors
    )
    return Holds.ALWAYS if holds is Holds.ALWAYS and wrapped_here else Holds.SOMETIMES


def _shown(context: FileContext, call: ast.Call) -> str:
    return f"{context.source(call.func)}()"

"""State dicts of models and optimizers."""

from __future__ import annotations

import ast
import re

from shardwise.fsdp1.codemod.draft import KEEP_FSDP1_API, Blocked, FileDraft
from shardwise.fsdp1.codemod.flow import Holds, wraps_models
from shardwise.fsdp1.codemod.model_calls import model_text
from shardwise.fsdp1.codemod.program import given_by_name, is_constant, is_none
from shardwise.fsdp1.codemod.state_calls import (
    DEFAULT,
    FULL,
    OPTIMIZER_CODE,
    PLAIN_CODE,
    SHARDED,
    STATE_CODE,
    Gather,
    StateSettings,
    dissolve,
    drop_dead_configs,
    is_entered_on_some_ranks,
    read_settings,
    remove_statement,
    rules_out,
    set_by_helper,
    sets_types_globally,
    static_name,
    write_get,
    write_load_model,
    write_load_optimizer,
)
from shardwise.source.syntax import FileContext, argument_of, given_to, last_name

_GETS = {
    "optim_state_dict": ("model", "optim", "optim_state_dict", "group"),
    "full_optim_state_dict": ("model", "optim", "optim_input", "rank0_only", "group"),
    "sharded_optim_state_dict": ("model", "optim", "group"),
}
_LOADS = {
    "optim_state_dict_to_load": ("model", "optim", "optim_state_dict", "is_named_optimizer", "load_directly", "group"),
    "scatter_full_optim_state_dict": ("optim_state_dict", "model", "optim_input", "optim", "group"),
    "shard_full_optim_state_dict": ("optim_state_dict", "model", "optim_input", "optim"),
    "flatten_sharded_optim_state_dict": ("optim_state_dict", "model", "optim"),
}
_OF_LOADS = {
    "scatter_full_optim_state_dict": Gather(FULL, rank0_only=True),
    "shard_full_optim_state_dict": Gather(FULL),
    "flatten_sharded_optim_state_dict": Gather(SHARDED),
}
"""What they take in, whatever the settings."""
_REKEY = "rekey_optim_state_dict"
_OLD_NAMES = ("full_optim_state_dict", "sharded_optim_state_dict")
"""Of the state, in older torch."""
_READS_SHARDED = "torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict"
_OPTIMIZERS_OWN = {"param_groups", "state", "state_dict", "load_state_dict", "zero_grad", "step", "add_param_group"}
_OPTIMIZERS_OWN |= {"defaults", "train", "eval", "__class__"}
_LOAD_FIX = "load it with set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(...))"


def _blocked(node: ast.AST, why: str, fix: str) -> Blocked:
    return Blocked(why, fix, node, OPTIMIZER_CODE)


def _optimizer_method(context: FileContext, call: ast.Call) -> str:
    """The FSDP1 call about optimizer state that this is, by its name; empty for other calls."""
    name = static_name(context, call)
    return name if name in (*_GETS, *_LOADS, _REKEY) else ""


def _optimizer_arguments(context: FileContext, call: ast.Call) -> dict[str | None, ast.expr]:
    name = static_name(context, call)
    parameters = _GETS.get(name) or _LOADS.get(name) or ()
    if name == "optim_state_dict_to_load" and _state_comes_first(context, call):
        parameters = ("optim_state_dict", "model", "optim", *parameters[3:])
    given = given_by_name(call, parameters)
    return {"optim_state_dict" if name in _LOADS and key in _OLD_NAMES else key: one for key, one in given.items()}


def _state_comes_first(context: FileContext, call: ast.Call) -> bool:
    """Before torch 2.1 the state was the first argument, as names mostly tell."""
    first, second, *_ = [*(context.source(one).lower() for one in call.args), "", ""]
    says_state = any(word in first for word in ("state", "osd", "optim", "checkpoint", "ckpt"))
    says_model = any(word in second for word in ("model", "module", "net"))
    return says_state and says_model and first.rpartition(".")[2] not in {"model", "module", "fsdp_model", "net"}


def _rewrite_optimizer_call(draft: FileDraft, call: ast.Call, settings: StateSettings) -> None:
    """Rewrite one call, and for a load the statement that hands its result to the optimizer.

    Raises:
        Blocked: An argument has no counterpart, or the result goes elsewhere.
    """
    context = draft.context
    name = static_name(context, call)
    if name == _REKEY:
        raise _blocked(
            call,
            f"{name} renames the entries of a saved state, which FSDP2 always names by parameter",
            "load the saved state with set_optimizer_state_dict, which takes names; convert older files offline",
        )
    given = _optimizer_arguments(context, call)
    if "model" not in given or any(isinstance(one, ast.Starred) for one in call.args):
        raise _blocked(call, f"the arguments of {name} cannot be told apart", _LOAD_FIX)
    _refuse_wrapper(context, call, given.get("optim"))
    if (
        name in _GETS
        and draft.source(given.get("optim_state_dict")) == f"{draft.source(given.get('optim'))}.state_dict()"
    ):
        del given["optim_state_dict"]  # what it takes by itself
    for unknown in ("optim_input", "group", "optim_state_dict" if name in _GETS else "is_named_optimizer"):
        if not is_none(given.get(unknown)) and not is_constant(given.get(unknown), False):
            raise _blocked(call, f"{name}({unknown}=...) has no counterpart", f"leave {unknown} out")
    if name in _GETS:
        _rewrite_get(draft, call, name, given, settings.optimizer)
    else:
        _rewrite_load(draft, call, name, given, settings.optimizer)


def _rewrite_get(
    draft: FileDraft, call: ast.Call, name: str, given: dict[str | None, ast.expr], gather: Gather
) -> None:
    if "optim" not in given:
        raise _blocked(call, f"{name} is called without the optimizer", "pass the optimizer")
    if name == "full_optim_state_dict":
        rank0 = given.get("rank0_only")
        if rank0 is not None and not isinstance(rank0, ast.Constant):
            raise _blocked(call, "rank0_only is only known at run time", "write it out")
        gather = Gather(FULL, offload=True, rank0_only=rank0 is None or bool(rank0.value))
    elif name == "sharded_optim_state_dict":
        gather = Gather(SHARDED)
    model = draft.source(given["model"])
    if gather.is_known and not _takes_state_before(draft.context, call, model):
        model = f"{draft.helper('_reshard')}({model})"  # whose parameters an evaluation may have left unsharded
    draft.replace(call, write_get(draft, "optimizer", [model, draft.source(given["optim"])], gather))


def _takes_state_before(context: FileContext, call: ast.Call, model: str) -> bool:
    """Whether the model's own state dict is taken before on every way to a call, which reshards the model."""
    home, around = context.enclosing_function(call), set(context.ancestors(call))
    for one in context.calls:
        parent = context.parents[context.statement(one)]
        is_before = (one.lineno, one.col_offset) < (call.lineno, call.col_offset)
        is_always = parent in around and not isinstance(parent, ast.If | ast.Try)
        is_same = context.source(one.func) == f"{model}.state_dict" and context.enclosing_function(one) is home
        if is_same and is_before and is_always:
            return True
    return False


def _rewrite_load(
    draft: FileDraft, call: ast.Call, name: str, given: dict[str | None, ast.expr], gather: Gather
) -> None:
    context = draft.context
    if "optim_state_dict" not in given:
        raise _blocked(call, f"{name} is called without the state", _LOAD_FIX)
    model, state = draft.source(given["model"]), draft.source(given["optim_state_dict"])
    gather = Gather(SHARDED) if _read_sharded(draft, given) else _OF_LOADS.get(name, gather)
    if isinstance(given.get("load_directly"), ast.Constant) and "optim" in given:
        draft.replace(call, write_load_optimizer(draft, model, draft.source(given["optim"]), state, gather))
        return
    parent, statement = context.parents[call], context.statement(call)
    is_direct = _loaded_into(parent, call) is not None
    for load, loaded in [(parent, call)] if is_direct else _later_loads(context, call):
        optimizer = _loaded_into(load, loaded)
        _refuse_wrapper(context, call, optimizer)
        is_sure = is_direct or context.parents[statement] in context.ancestors(load)  # made for every run that loads it
        source = state if is_direct else draft.source(loaded)
        new = write_load_optimizer(draft, model, draft.source(optimizer), source, gather, sure=is_sure)
        draft.replace(load, new)  # pyrefly: ignore
    if isinstance(statement, ast.Assign) and draft.source(statement.targets[0]) == state and not is_direct:
        remove_statement(draft, statement)
    elif not is_direct:
        draft.replace(call, state)


def _loaded_into(node: ast.AST, state: ast.expr) -> ast.expr | None:
    """`optimizer` for `optimizer.load_state_dict(state)`."""
    match node:
        case ast.Call(func=ast.Attribute(attr="load_state_dict", value=owner), args=[one], keywords=[]) if one is state:
            return owner
    return None


def _refuse_wrapper(context: FileContext, call: ast.Call, optimizer: ast.expr | None) -> None:
    """Refuse an optimizer that the function uses for what torch's have not: FSDP1 asks for a state dict only.

    Raises:
        Blocked: With what it has.
    """
    home, name = context.enclosing_function(call), getattr(optimizer, "id", None)
    for node in context.parents if name else ():
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=used) if owner == name and used not in _OPTIMIZERS_OWN:
                if context.enclosing_function(node) is home:
                    raise _blocked(
                        call,
                        f"{name} is no optimizer of torch: it has .{used} (line {node.lineno})",
                        "pass the optimizer inside it to get_ or set_optimizer_state_dict",
                    )


def _read_sharded(draft: FileDraft, given: dict[str | None, ast.expr]) -> bool:
    """Rewrite the `load_sharded_optimizer_state_dict` that made the state; it reads FSDP1's shards only."""
    state, found = given["optim_state_dict"], False
    if not (isinstance(state, ast.Subscript) and isinstance(state.value, ast.Name) and "optim" in given):
        return False
    for made in [binding.value for binding in draft.context.bindings(state.value)]:
        if isinstance(made, ast.Call) and draft.context.is_any(made.func, {_READS_SHARDED}):
            told = {keyword.arg: draft.source(keyword.value) for keyword in made.keywords}
            if set(told) - {"model_state_dict", "optimizer_key", "storage_reader", "planner"} or made.args:
                raise _blocked(made, "its arguments cannot be told apart", "write them as keywords")
            words = [draft.source(given["model"]), draft.source(given["optim"]), told["optimizer_key"]]
            words += [told["storage_reader"], *([f"planner={told['planner']}"] if "planner" in told else [])]
            start, end = draft.span(made)  # what was rewritten inside goes with it
            draft.edits = [edit for edit in draft.edits if not start <= edit.start <= edit.end <= end]
            draft.replace(made, f"{draft.helper('_read_optimizer_state')}({', '.join(words)})")
            draft.taken.update(ast.walk(made))
            found = True
    return found


def _later_loads(context: FileContext, call: ast.Call) -> list[tuple[ast.AST, ast.Name]]:
    """The calls `optimizer.load_state_dict(x)` for `x = FSDP...(...)`, if `x` is used for nothing else.

    Raises:
        Blocked: It is used for something else, made in several ways, or never loaded.
    """
    function, name = context.enclosing_function(call), _target(context, call)
    made = [one for one in context.calls if static_name(context, one) in _LOADS and _target(context, one) == name]
    nearby = [one for one in made if context.enclosing_function(one) is function]
    end = call.end_lineno or 0, call.end_col_offset or 0
    uses = [one for one in context.loads(name) if context.enclosing_function(one) is function]
    uses = [one for one in uses if (one.lineno, one.col_offset) > end]
    loads = [(context.parents[use], use) for use in uses if _loaded_into(context.parents[use], use) is not None]
    if not name or len(nearby) > 1 or not uses or len(loads) < len(uses):
        raise _blocked(call, "the state made for FSDP1's optimizer is not loaded here", f"{_LOAD_FIX} instead")
    return loads


def _target(context: FileContext, call: ast.Call) -> str:
    """The name that a call's result is assigned to; empty where it is not one name."""
    match context.parents[call]:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


_METHODS = ("state_dict", "load_state_dict")
_CONTEXTS = ("state_dict_type", "set_state_dict_type", "get_state_dict_type")
_IS_OPTIMIZER = re.compile(r"(optim\w*|opt)(\.optimizer)?$", re.IGNORECASE)
_OF_OTHERS = re.compile(r"optim|(^|[._])opt$|sched|scaler|sampler|loader|dataset|tokenizer", re.IGNORECASE)
"""Names of objects that have a state, but are no models."""
_HARMLESS = {"isinstance", "print", "type", "len", "id", "hasattr", "getattr", "str", "next", "sum"}
_CALLED = {"state_dict": "get_model_state_dict(model)", "load_state_dict": "set_model_state_dict(model, state)"}
_READ_FIX = (
    "fill a dict with get_optimizer_state_dict(model, optimizer) and let torch.distributed.checkpoint.load read it"
)
_BY_HAND = "call get_model_state_dict(model, options=StateDictOptions(...)) where the state dict is taken"


def rewrite_state_dicts(draft: FileDraft) -> None:
    """Rewrite every state-dict call of a file that FSDP1 had a say in; leave and report what cannot be."""
    context, handled, calls = draft.context, set[ast.AST](), draft.calls()
    for call in calls:
        if (name := static_name(context, call)) in _CONTEXTS:
            _rewrite_setting(draft, call, handled, name)
    for call in calls:
        if call not in handled and call not in draft.taken:
            _rewrite_plain(draft, call)
    for node in draft.nodes():
        match node:
            case ast.Attribute(attr="state_dict" | "load_state_dict" as name, ctx=ast.Load(), value=model):
                is_called = getattr(context.parents[node], "func", None) is node
                if not is_called and node not in draft.taken and draft.sharded.has_inside(model):
                    message = f"{draft.source(node)} is handed on uncalled: its state would be of this rank's shards"
                    draft.undecided(PLAIN_CODE, node, message, f"hand on a function that calls {_CALLED[name]}")
    for call in context.calls_to(_READS_SHARDED):
        if call not in draft.taken:
            message = "load_sharded_optimizer_state_dict reads FSDP1's shards only"
            draft.undecided(OPTIMIZER_CODE, call, message, _READ_FIX)
    drop_dead_configs(draft)
    _report_optimizer_states(draft)
    _report_saves(draft)


def _rewrite_setting(draft: FileDraft, call: ast.Call, handled: set[ast.AST], name: str) -> None:
    """One setting and all calls that it governs: rewritten together, or left together."""
    context = draft.context
    item = context.parents[call]
    block = context.parents.get(item) if isinstance(item, ast.withitem) else None
    block = block if isinstance(block, ast.With) else None
    found = _governed(context, call, block) if name != "get_state_dict_type" else []
    governed = [one for one in found if one not in handled]
    handled.add(call)
    try:
        with draft.attempt():
            if name == "get_state_dict_type":
                raise Blocked("FSDP2 keeps no state-dict type", "remember the options yourself")
            settings = read_settings(context, call)
            if settings is None:
                raise Blocked(f"the arguments of {name} cannot be told apart", "write them out")
            if name == "state_dict_type" and block is None:
                raise Blocked("the context is stored, not entered here", _BY_HAND)
            if not governed and not (block is not None and _is_for_nothing(draft, call, block)):
                raise Blocked("the state dict is taken elsewhere", _BY_HAND)
            _refuse_leaks(context, call, block)
            for one in governed:
                _rewrite_call(draft, one, settings)
            if block is not None:
                dissolve(draft, block, call)
            else:
                remove_statement(draft, context.statement(call))
            draft.taken.update(ast.walk(call))
            became = (
                "became options of get_ and set_model_state_dict" if governed else "is gone: an optimizer ignores it"
            )
            draft.rewritten(STATE_CODE, call, f"{name} {became}")
    except Blocked as blocked:
        message, fix = f"{name} is left alone: {blocked.why}", f"{blocked.fix}; or {KEEP_FSDP1_API}"
        draft.undecided(blocked.code or STATE_CODE, blocked.node or call, message, fix)
    handled.update(governed)


def _governed(context: FileContext, call: ast.Call, block: ast.With | None) -> list[ast.Call]:
    """The calls whose outcome a setting decides, as far as the function around it goes."""
    model = argument_of(call, 0, "module")
    text = ast.unparse(model) if model is not None else ""
    inside = block or context.enclosing_function(call) or context.tree
    same = [one for one in context.calls if one is not call and text and _subject(context, one) == text]
    return [
        one
        for one in same
        if inside in context.ancestors(one)
        and _nearest(context, one, text) is block
        and (block is not None or one.lineno >= call.lineno)
    ]


def _is_for_nothing(draft: FileDraft, call: ast.Call, block: ast.With) -> bool:
    """Whether a block takes no state dict but those of optimizers, which FSDP1's setting does not touch."""
    context = draft.context
    inside = [one for one in context.calls if block in context.ancestors(one) and one is not call]
    states = [one for one in inside if isinstance(one.func, ast.Attribute) and one.func.attr in _METHODS]
    others = [one.func for one in inside if one not in states and call not in context.ancestors(one)]
    is_own = any(draft.program.function(context, one) or draft.source(one).startswith("self.") for one in others)
    is_optimizers = all(_IS_OPTIMIZER.search(draft.source(one.func.value)) for one in states)  # pyrefly: ignore
    return bool(states) and is_optimizers and not is_own


def _report_saves(draft: FileDraft) -> None:
    """Say of each `model.save_pretrained(path)` that it would save shards."""
    for call, func in draft.method_calls("save_pretrained"):
        is_given = any(one.arg in ("state_dict", None) for one in call.keywords)
        holds = draft.holds(func.value)
        is_whole = any("full_params" in draft.source(one) for _, one in draft.context.entered_calls(call))
        if not holds or is_given or is_whole or rules_out(draft.context, call):
            continue
        report = draft.undecided if holds is Holds.ALWAYS else draft.reported
        message = (
            "save_pretrained() of a sharded model takes its state dict, which holds shards; FSDP1's held whole tensors"
        )
        fix = "on every rank: state_dict=get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        report(PLAIN_CODE, call, message, fix)


def _report_optimizer_states(draft: FileDraft) -> None:
    """Say of each `optimizer.state_dict()` beside a wrapped model whose state it is."""
    context = draft.context
    for call, func in draft.method_calls("state_dict"):
        function = context.enclosing_function(call)
        if _IS_OPTIMIZER.search(draft.source(func.value)) and any(
            draft.holds(node)
            for node in draft.nodes()
            if isinstance(node, ast.Name | ast.Attribute) and context.enclosing_function(node) is function
        ):
            draft.reported(
                OPTIMIZER_CODE,
                call,
                "this is the state of this rank's part, as with FSDP1, but in DTensors: files of FSDP1 do not load",
                "for a file that any number of ranks can load: get_optimizer_state_dict(model, optimizer, "
                "options=StateDictOptions(full_state_dict=True))",
            )


def _subject(context: FileContext, call: ast.Call) -> str:
    """The model, as text, whose state a call hands out or takes in; empty for other calls."""
    model = None
    if _optimizer_method(context, call):
        model = _optimizer_arguments(context, call).get("model")
    elif isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS:
        model = call.func.value
    return ast.unparse(model) if model is not None else ""


def _nearest(context: FileContext, call: ast.Call, model: str) -> ast.With | None:
    """The innermost `with FSDP.state_dict_type(model, ...)` around a call."""
    for block, entered in context.entered_calls(call):
        given = argument_of(entered, 0, "module") if static_name(context, entered) == "state_dict_type" else None
        if given is not None and ast.unparse(given) == model:
            return block
    return None


def _refuse_leaks(context: FileContext, call: ast.Call, block: ast.With | None) -> None:
    """Raise if the model goes to a function inside the block, which may take a state dict there."""
    model = argument_of(call, 0, "module")
    if block is None or model is None:
        return
    for one in context.calls:
        if one is call or block not in context.ancestors(one) or _optimizer_method(context, one):
            continue
        name = ast.unparse(one.func).rpartition(".")[2]
        if name not in _HARMLESS and any(ast.unparse(value) == ast.unparse(model) for value in given_to(one)):
            raise Blocked(f"{name}() gets the model, and may take its state dict", _BY_HAND, one)


def _rewrite_call(draft: FileDraft, call: ast.Call, settings: StateSettings, *, sure: bool = True) -> None:
    """Rewrite one call. Not `sure`: the model may also be a plain one, whose own method must stay."""
    context, names = draft.context, draft.names.copy()
    if is_entered_on_some_ranks(draft.sharded, call):
        fix = "call it on every rank and use the result on rank 0"
        raise Blocked("it is called on one rank only, and gathering takes all of them", fix, call)
    if _optimizer_method(context, call):
        _rewrite_optimizer_call(draft, call, settings)
    else:
        draft.replace(call, _model_call(draft, call, settings.model, sure=sure))
    draft.taken.update(ast.walk(call))
    for name in sorted(draft.names - names):
        found = context.scope(call).find(name)
        if found is not None and not isinstance(found[0].node, ast.Module):
            raise Blocked(f"{name} is a name of its own in this function", "rename it", call)


def _model_call(draft: FileDraft, call: ast.Call, gather: Gather, *, sure: bool) -> str:
    """`model.state_dict()` or `model.load_state_dict(...)` in FSDP2's words."""
    assert isinstance(call.func, ast.Attribute)
    model = model_text(draft, call.func.value)
    if call.func.attr == "state_dict":
        if call.args or call.keywords:
            raise Blocked("state_dict() has arguments", "take the whole state dict, then choose from it", call)
        if "torch.compile(" in draft.context.text:
            message = "names in the state dict no longer begin with _orig_mod., which torch.compile adds and FSDP1 kept"
            draft.reported(PLAIN_CODE, call, message, "strip the prefix from files that were saved before")
        return write_get(draft, "model", [model], gather) if sure else f"{draft.helper('_whole_state')}({model})"
    if gather.kind == SHARDED and not _fills_state(draft.context, call):
        message = "files of FSDP1's sharded state dicts hold ShardedTensors, which FSDP2 does not load"
        fix = "save them again after the rewrite; or convert them: `shardwise ckpt convert`"
        draft.reported(STATE_CODE, call, message, fix)
    given = given_by_name(call, _LOAD_PARAMETERS)
    if set(given) - set(_LOAD_PARAMETERS) or "state_dict" not in given or len(call.args) > 2:
        raise Blocked("load_state_dict() has arguments without a counterpart", "leave them out", call)
    state, strict = draft.source(given["state_dict"]), draft.source(given.get("strict"))
    strict = "" if strict == "True" else strict
    if sure:
        return write_load_model(draft, model, state, gather, strict)
    return f"{draft.helper('_load_whole_state')}({model}, {state}{f', strict={strict}' if strict else ''})"


_LOAD_PARAMETERS = ("state_dict", "strict")


def _fills_state(context: FileContext, load: ast.Call) -> bool:
    """Whether the same function takes a state dict before, for torch.distributed.checkpoint to fill."""
    home = context.enclosing_function(load)
    taken = [one for one in context.calls if last_name(one.func) == "state_dict" and one.lineno < load.lineno]
    return any(context.enclosing_function(one) is home for one in taken)


def _rewrite_plain(draft: FileDraft, call: ast.Call) -> None:
    """A call outside any setting: whole tensors, as FSDP1 gave by default."""
    is_optimizer = bool(_optimizer_method(draft.context, call))
    holds = Holds.ALWAYS if is_optimizer else _holds(draft, call)
    if not holds:
        return
    code, shown = OPTIMIZER_CODE if is_optimizer else PLAIN_CODE, f"{draft.source(call.func)}()"
    try:
        with draft.attempt():
            if sets_types_globally(draft.program):
                raise Blocked("set_state_dict_type decides elsewhere what it gives", _BY_HAND, code=code)
            if (line := set_by_helper(draft.program, draft.context, call)) is not None:
                raise Blocked(f"the function called on line {line} decides what it gives", _BY_HAND, code=code)
            _rewrite_call(draft, call, DEFAULT, sure=holds is Holds.ALWAYS)
            draft.rewritten(code, call, f"{shown} is gathered as FSDP1 did")
    except Blocked as blocked:
        code = blocked.code or STATE_CODE if is_optimizer else code
        draft.undecided(code, call, f"{shown} is left alone: {blocked.why}", blocked.fix)


def _holds(draft: FileDraft, call: ast.Call) -> Holds:
    """Whether the call is a wrapped model's: ALWAYS only where it was wrapped in the same function, before."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in _METHODS):
        return Holds.NEVER
    context, model = draft.context, call.func.value
    function = context.enclosing_function(call)
    holds = draft.holds(model) or Holds(draft.sharded.has_inside(model) or _may_come(draft, model))
    if not holds or rules_out(context, call) or draft.sharded.has_own(model, call.func.attr):
        return Holds.NEVER
    nearby = [one for one in draft.sharded.constructors if context.enclosing_function(one) is function]
    bound = [context.statement(one) for one in nearby]
    texts = {ast.unparse(one.targets[0]) for one in bound if isinstance(one, ast.Assign)}
    return holds if ast.unparse(model) in texts else Holds.SOMETIMES


def _may_come(draft: FileDraft, model: ast.expr) -> bool:
    """Whether wrapped models may come here unseen: the emitted helper takes anything that has a state."""
    context = draft.context
    if "fsdp" not in context.text.lower() or _OF_OTHERS.search(draft.source(model)):
        return False
    function = context.enclosing_function(model)
    wraps = any(context.enclosing_function(one) is function for one in draft.sharded.constructors)
    return not wraps and draft.sharded.is_unknown(model) and wraps_models(draft.program)

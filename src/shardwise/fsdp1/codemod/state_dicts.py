"""State dicts of models and optimizers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.errors import SourceError
from shardwise.fsdp1.codemod.draft import KEEP_FSDP1_API, FileDraft
from shardwise.fsdp1.codemod.emitted import functions
from shardwise.fsdp1.codemod.program import Program, fsdp_name, is_none
from shardwise.fsdp1.codemod.sharded import Holds
from shardwise.fsdp1.codemod.state_calls import (
    DEFAULT,
    FULL,
    OPTIMIZER_CODE,
    PLAIN_CODE,
    SHARDED,
    STATE_CODE,
    Gather,
    NotRewritable,
    StateCallWriter,
    StateSettings,
    dissolve,
    drop_dead_configs,
    read_settings,
    remove_statement,
    rules_out,
    sets_types_globally,
    under_rank_zero,
)
from shardwise.source.edits import apply
from shardwise.source.syntax import FileContext, argument_of, given_to

_OWNER = "FullyShardedDataParallel."
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
_OPTIMIZER_BY_HAND = ("rekey_optim_state_dict",)
METHODS = (*_GETS, *_LOADS, *_OPTIMIZER_BY_HAND)
READS_SHARDED = {"torch.distributed.checkpoint.optimizer.load_sharded_optimizer_state_dict"}
_OPTIMIZERS_OWN = {"param_groups", "state", "state_dict", "load_state_dict", "zero_grad", "step", "add_param_group"}
_OPTIMIZERS_OWN |= {"defaults", "train", "eval", "__class__"}
_LOAD_FIX = "load it with set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(...))"


def method(context: FileContext, call: ast.Call) -> str | None:
    """The FSDP1 call about optimizer state that this is, by its name."""
    name = (fsdp_name(context, call.func) or "").removeprefix(_OWNER)
    return name if name in METHODS and fsdp_name(context, call.func) != name else None


def model_of(context: FileContext, call: ast.Call) -> ast.expr | None:
    """The model that such a call is about."""
    name = method(context, call)
    return _arguments(context, call, name).get("model") if name else None


def rewrite_call(writer: StateCallWriter, call: ast.Call, settings: StateSettings) -> None:
    """Rewrite one call, and for a load the statement that hands its result to the optimizer.

    Raises:
        NotRewritable: An argument has no counterpart, or the result goes elsewhere.
    """
    context = writer.draft.context
    name = method(context, call)
    assert name is not None
    if name in _OPTIMIZER_BY_HAND:
        raise NotRewritable(
            call,
            f"{name} renames the entries of a saved state, which FSDP2 always names by parameter",
            "load the saved state with set_optimizer_state_dict, which takes names; convert older files offline",
            OPTIMIZER_CODE,
        )
    given = _arguments(context, call, name)
    if "model" not in given or any(isinstance(one, ast.Starred) for one in call.args):
        raise NotRewritable(call, f"the arguments of {name} cannot be told apart", _LOAD_FIX, OPTIMIZER_CODE)
    _refuse_wrapper(context, call, given.get("optim"))
    if name in _GETS:
        _get(writer, call, name, given, settings)
    else:
        _load(writer, call, name, given, settings)


def _get(
    writer: StateCallWriter, call: ast.Call, name: str, given: dict[str, ast.expr], settings: StateSettings
) -> None:
    _refuse(call, name, given, "optim_input", "group", "optim_state_dict")
    if "optim" not in given:
        raise NotRewritable(call, f"{name} is called without the optimizer", "pass the optimizer", OPTIMIZER_CODE)
    gather = settings.optimizer
    if name == "full_optim_state_dict":
        rank0 = given.get("rank0_only")
        if rank0 is not None and not isinstance(rank0, ast.Constant):
            raise NotRewritable(call, "rank0_only is only known at run time", "write it out", OPTIMIZER_CODE)
        gather = Gather(FULL, offload=True, rank0_only=rank0 is None or bool(rank0.value))
    elif name == "sharded_optim_state_dict":
        gather = Gather(SHARDED)
    source = writer.draft.context.source
    writer.draft.replace(call, writer.optimizer_state(source(given["model"]), source(given["optim"]), gather))


def _load(
    writer: StateCallWriter, call: ast.Call, name: str, given: dict[str, ast.expr], settings: StateSettings
) -> None:
    _refuse(call, name, given, "optim_input", "group", "is_named_optimizer")
    context, draft = writer.draft.context, writer.draft
    gather = {
        "scatter_full_optim_state_dict": Gather(FULL, rank0_only=True),
        "shard_full_optim_state_dict": Gather(FULL),
        "flatten_sharded_optim_state_dict": Gather(SHARDED),
    }.get(name, settings.optimizer)
    if "optim_state_dict" not in given:
        raise NotRewritable(call, f"{name} is called without the state", _LOAD_FIX, OPTIMIZER_CODE)
    model, state = context.source(given["model"]), context.source(given["optim_state_dict"])
    if _read_sharded(writer, given):
        gather = Gather(SHARDED)
    parent = context.parents[call]
    if isinstance(given.get("load_directly"), ast.Constant) and "optim" in given:
        draft.replace(call, writer.load_optimizer(model, context.source(given["optim"]), state, gather))
    elif isinstance(parent, ast.Call) and _loads(parent, call):
        _refuse_wrapper(context, call, parent.func.value)  # pyrefly: ignore
        optimizer = context.source(parent.func.value)  # pyrefly: ignore
        draft.replace(parent, writer.load_optimizer(model, optimizer, state, gather))
    else:
        statement = context.statement(call)
        for load in _later_loads(context, call):
            _refuse_wrapper(context, call, load.func.value)  # pyrefly: ignore
            optimizer, argument = context.source(load.func.value), context.source(load.args[0])  # pyrefly: ignore
            sure = _always_before(context, statement, load)
            draft.replace(load, writer.load_optimizer(model, optimizer, argument, gather, sure=sure))
        if isinstance(statement, ast.Assign) and context.source(statement.targets[0]) == state:
            remove_statement(draft, statement)
        else:
            draft.replace(call, state)


def _refuse_wrapper(context: FileContext, call: ast.Call, optimizer: ast.expr | None) -> None:
    """Refuse an optimizer that the function uses for what torch's have not: FSDP1 asks for a state dict only.

    Raises:
        NotRewritable: With what it has.
    """
    if not isinstance(optimizer, ast.Name):
        return
    home = context.enclosing_function(call)
    for node in context.parents:
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == optimizer.id):
            continue
        if node.attr not in _OPTIMIZERS_OWN and context.enclosing_function(node) is home:
            raise NotRewritable(
                call,
                f"{optimizer.id} is no optimizer of torch: it has .{node.attr} (line {node.lineno})",
                "pass the optimizer inside it to get_ or set_optimizer_state_dict",
                OPTIMIZER_CODE,
            )


def _always_before(context: FileContext, statement: ast.stmt, load: ast.Call) -> bool:
    """Whether the state is made for every run that loads it."""
    return context.parents[statement] in set(context.ancestors(load))


def _read_sharded(writer: StateCallWriter, given: dict[str, ast.expr]) -> bool:
    """Rewrite the `load_sharded_optimizer_state_dict` that made the state; it reads FSDP1's shards only."""
    context, draft = writer.draft.context, writer.draft
    state, found = given["optim_state_dict"], False
    if not (isinstance(state, ast.Subscript) and isinstance(state.value, ast.Name) and "optim" in given):
        return False
    for binding in context.bindings(state.value):
        made = binding.value
        if isinstance(made, ast.Call) and context.is_any(made.func, READS_SHARDED):
            told = {keyword.arg: context.source(keyword.value) for keyword in made.keywords}
            if set(told) - {"model_state_dict", "optimizer_key", "storage_reader", "planner"} or made.args:
                raise NotRewritable(
                    made, "its arguments cannot be told apart", "write them as keywords", OPTIMIZER_CODE
                )
            words = [context.source(given["model"]), context.source(given["optim"]), told["optimizer_key"]]
            words += [told["storage_reader"], *([f"planner={told['planner']}"] if "planner" in told else [])]
            start, end = context.positions.span(made)  # what was rewritten inside goes with it
            draft.edits = [edit for edit in draft.edits if not start <= edit.start <= edit.end <= end]
            draft.replace(made, f"{draft.helper('_read_optimizer_state')}({', '.join(words)})")
            draft.taken.update(ast.walk(made))
            found = True
    return found


def _later_loads(context: FileContext, call: ast.Call) -> list[ast.Call]:
    """The calls `optimizer.load_state_dict(x)` for `x = FSDP...(...)`, if `x` is used for nothing else.

    Raises:
        NotRewritable: It is used for something else, or never loaded.
    """
    problem = NotRewritable(
        call, "the state made for FSDP1's optimizer is not loaded here", f"{_LOAD_FIX} instead", OPTIMIZER_CODE
    )
    statement = context.parents[call]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        raise problem
    if sum(1 for one in context.calls if _is_sibling(context, one, call, targets[0].id)) > 1:
        raise problem  # made in several ways, loaded in one
    uses = list(_uses_after(context, targets[0], call))
    loads = []
    for use in uses:
        parent = context.parents[use]
        if not (isinstance(parent, ast.Call) and _loads(parent, use)):
            raise problem
        loads.append(parent)
    if not loads:
        raise problem
    return loads


def _is_sibling(context: FileContext, one: ast.Call, call: ast.Call, name: str) -> bool:
    """Whether a call makes a state of the same name in the same function."""
    statement = context.parents[one]
    if not isinstance(statement, ast.Assign) or method(context, one) not in _LOADS:
        return False
    is_same = context.enclosing_function(one) is context.enclosing_function(call)
    return is_same and any(isinstance(target, ast.Name) and target.id == name for target in statement.targets)


def _uses_after(context: FileContext, target: ast.Name, call: ast.Call) -> Iterator[ast.Name]:
    function = context.enclosing_function(call)
    for node in context.loads(target.id):
        is_later = (node.lineno, node.col_offset) > (call.end_lineno or 0, call.end_col_offset or 0)
        if is_later and context.enclosing_function(node) is function:
            yield node


def _loads(parent: ast.Call, loaded: ast.expr) -> bool:
    is_load = isinstance(parent.func, ast.Attribute) and parent.func.attr == "load_state_dict"
    return is_load and len(parent.args) == 1 and not parent.keywords and parent.args[0] is loaded


def _arguments(context: FileContext, call: ast.Call, name: str) -> dict[str, ast.expr]:
    parameters = _GETS.get(name) or _LOADS.get(name) or ()
    if name == "optim_state_dict_to_load" and _state_comes_first(context, call):
        parameters = ("optim_state_dict", "model", "optim", *parameters[3:])
    given = dict(zip(parameters, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is not None:
            given[_KEYWORDS.get((name, keyword.arg), keyword.arg)] = keyword.value
    return given


# Older torch called the state by other names.
_KEYWORDS = {
    ("scatter_full_optim_state_dict", "full_optim_state_dict"): "optim_state_dict",
    ("shard_full_optim_state_dict", "full_optim_state_dict"): "optim_state_dict",
    ("flatten_sharded_optim_state_dict", "sharded_optim_state_dict"): "optim_state_dict",
}


def _state_comes_first(context: FileContext, call: ast.Call) -> bool:
    """Before torch 2.1 the state was the first argument, as names mostly tell."""
    if len(call.args) < 2:
        return False
    first, second = context.source(call.args[0]).lower(), context.source(call.args[1]).lower()
    says_model = [any(word in text for word in ("model", "module", "net")) for text in (first, second)]
    says_state = any(word in first for word in ("state", "osd", "optim", "checkpoint", "ckpt"))
    return says_state and says_model[1] and not _is_model(first)


def _is_model(text: str) -> bool:
    return text.rsplit(".", 1)[-1] in {"model", "module", "fsdp_model", "net", "self.model"}


def _refuse(call: ast.Call, name: str, given: dict[str, ast.expr], *unknown: str) -> None:
    for one in unknown:
        value = given.get(one)
        if not is_none(value) and not (isinstance(value, ast.Constant) and value.value is False):
            raise NotRewritable(call, f"{name}({one}=...) has no counterpart", f"leave {one} out", OPTIMIZER_CODE)


_METHODS = ("state_dict", "load_state_dict")
_CONTEXTS = ("state_dict_type", "set_state_dict_type", "get_state_dict_type")
_HARMLESS = {"isinstance", "print", "type", "len", "id", "hasattr", "getattr", "str", "next", "sum"}


def rewrite_state_dicts(draft: FileDraft, program: Program) -> None:
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
    for call in context.calls_to(*READS_SHARDED):
        if call not in draft.taken:
            message = "load_sharded_optimizer_state_dict reads FSDP1's shards only"
            draft.undecided(OPTIMIZER_CODE, call, message, _READ_FIX)
    drop_dead_configs(draft, program)


def _attempt(draft: FileDraft, call: ast.Call, handled: set[ast.AST], name: str) -> None:
    """One setting and all calls that it governs: rewritten together, or left together."""
    context = draft.context
    earlier = draft.snapshot()
    governed = [one for one in _governed(context, call, name) if one not in handled]
    try:
        if name == "get_state_dict_type":
            raise NotRewritable(call, "FSDP2 keeps no state-dict type", "remember the options yourself")
        settings = read_settings(context, call)
        if settings is None:
            raise NotRewritable(call, f"the arguments of {name} cannot be told apart", "write them out")
        block = _block(context, call)
        if name == "state_dict_type" and block is None:
            raise NotRewritable(call, "the context is stored, not entered here", _BY_HAND)
        if not governed:
            raise NotRewritable(call, "the state dict is taken elsewhere", _BY_HAND)
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
    except NotRewritable as problem:
        draft.restore(earlier)
        at = call if isinstance(problem.node, ast.Module) else problem.node
        draft.undecided(problem.code, at, f"{name} is left alone: {problem.why}", f"{problem.fix}; or {KEEP_FSDP1_API}")
    handled.update([call, *governed])


def _check(draft: FileDraft, call: ast.Call) -> None:
    """Raise if the edits so far cannot be made together."""
    try:
        apply(draft.context.text, draft.edits)
    except SourceError:
        raise NotRewritable(call, "another rewrite touches the same lines", "rewrite it by hand") from None


_READ_FIX = (
    "fill a dict with get_optimizer_state_dict(model, optimizer) and let torch.distributed.checkpoint.load read it"
)
_BY_HAND = "call get_model_state_dict(model, options=StateDictOptions(...)) where the state dict is taken"


def _governed(context: FileContext, call: ast.Call, name: str) -> list[ast.Call]:
    """The calls whose outcome a setting decides, as far as the function around it goes."""
    model = argument_of(call, 0, "module")
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
    if method(context, call):
        model = model_of(context, call)
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
                    given = argument_of(inner, 0, "module")
                    if given is not None and ast.unparse(given) == model:
                        return one
    return None


def _refuse_leaks(context: FileContext, call: ast.Call, block: ast.With | None) -> None:
    """Raise if the model goes to a function inside the block, which may take a state dict there."""
    model = argument_of(call, 0, "module")
    if block is None or model is None:
        return
    text = ast.unparse(model)
    for one in context.calls:
        if one is call or block not in set(context.ancestors(one)) or method(context, one):
            continue
        name = ast.unparse(one.func).rsplit(".", 1)[-1]
        if name not in _HARMLESS and any(ast.unparse(value) == text for value in given_to(one)):
            raise NotRewritable(one, f"{name}() gets the model, and may take its state dict", _BY_HAND)


def _rewrite(draft: FileDraft, call: ast.Call, settings: StateSettings, *, sure: bool = True) -> None:
    """Rewrite one call. Not `sure`: the model may also be a plain one, whose own method must stay."""
    context, writer = draft.context, StateCallWriter(draft)
    names = draft.names.copy()
    if under_rank_zero(context, call):
        raise NotRewritable(
            call,
            "it is called on one rank only, and gathering takes all of them",
            "call it on every rank and use the result on rank 0",
        )
    if method(context, call):
        rewrite_call(writer, call, settings)
    else:
        draft.replace(call, _model_call(writer, call, settings, sure=sure))
    draft.taken.update(ast.walk(call))
    for name in draft.names - names:
        found = context.scope(call).find(name)
        if found is not None and not isinstance(found[0].node, ast.Module):
            raise NotRewritable(call, f"{name} is a name of its own in this function", "rename it")


def _model_call(writer: StateCallWriter, call: ast.Call, settings: StateSettings, *, sure: bool) -> str:
    """`model.state_dict()` or `model.load_state_dict(...)` in FSDP2's words."""
    context = writer.draft.context
    assert isinstance(call.func, ast.Attribute)
    model = context.source(call.func.value)
    if call.func.attr == "state_dict":
        if call.args or call.keywords:
            raise NotRewritable(call, "state_dict() has arguments", "take the whole state dict, then choose from it")
        return writer.model_state(model, settings.model) if sure else writer.whole_state(model)
    given: dict[str | None, ast.expr] = dict(zip(("state_dict", "strict"), call.args, strict=False))
    given.update((keyword.arg, keyword.value) for keyword in call.keywords)
    if set(given) - {"state_dict", "strict"} or "state_dict" not in given or len(call.args) > 2:
        raise NotRewritable(call, "load_state_dict() has arguments without a counterpart", "leave them out")
    strict = given.get("strict")
    told = "" if strict is None or ast.unparse(strict) == "True" else context.source(strict)
    state = context.source(given["state_dict"])
    return (
        writer.load_model(model, state, settings.model, told) if sure else writer.load_whole_state(model, state, told)
    )


def _plain(draft: FileDraft, program: Program, call: ast.Call) -> None:
    """A call outside any setting: whole tensors, as FSDP1 gave by default."""
    context = draft.context
    is_optimizer = method(context, call) is not None
    holds = Holds.ALWAYS if is_optimizer else _holds(draft, program, call)
    if holds is Holds.NEVER:
        return
    earlier = draft.snapshot()
    code = OPTIMIZER_CODE if is_optimizer else PLAIN_CODE
    try:
        if sets_types_globally(program):
            raise NotRewritable(call, "set_state_dict_type decides elsewhere what it gives", _BY_HAND, code)
        _rewrite(draft, call, DEFAULT, sure=holds is Holds.ALWAYS)
        _check(draft, call)
        draft.rewritten(code, call, f"{_shown(context, call)} is gathered as FSDP1 did")
    except NotRewritable as problem:
        draft.restore(earlier)
        message = f"{_shown(context, call)} is left alone: {problem.why}"
        draft.undecided(problem.code if is_optimizer else code, call, message, problem.fix)


def _holds(draft: FileDraft, program: Program, call: ast.Call) -> Holds:
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

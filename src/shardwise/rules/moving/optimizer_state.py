"""`FSDP.optim_state_dict` and its older relatives become `get_` and `set_optimizer_state_dict`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from shardwise.rules.moving.state_blocks import remove_statement
from shardwise.rules.moving.state_calls import OPTIMIZER_CODE, Unmovable, Writer
from shardwise.rules.moving.state_settings import FULL, SHARDED, Gather, Settings
from shardwise.rules.moving.values import fsdp_name, is_none
from shardwise.rules.source import FileContext

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
_BY_HAND = ("rekey_optim_state_dict",)
METHODS = (*_GETS, *_LOADS, *_BY_HAND)
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


def rewrite_call(writer: Writer, call: ast.Call, settings: Settings) -> None:
    """Rewrite one call, and for a load the statement that hands its result to the optimizer.

    Raises:
        Unmovable: An argument has no counterpart, or the result goes elsewhere.
    """
    context = writer.draft.context
    name = method(context, call)
    assert name is not None
    if name in _BY_HAND:
        raise Unmovable(
            call,
            f"{name} renames the entries of a saved state, which FSDP2 always names by parameter",
            "load the saved state with set_optimizer_state_dict, which takes names; convert older files offline",
            OPTIMIZER_CODE,
        )
    given = _arguments(context, call, name)
    if "model" not in given or any(isinstance(one, ast.Starred) for one in call.args):
        raise Unmovable(call, f"the arguments of {name} cannot be told apart", _LOAD_FIX, OPTIMIZER_CODE)
    _refuse_wrapper(context, call, given.get("optim"))
    if name in _GETS:
        _get(writer, call, name, given, settings)
    else:
        _load(writer, call, name, given, settings)


def _get(writer: Writer, call: ast.Call, name: str, given: dict[str, ast.expr], settings: Settings) -> None:
    _refuse(call, name, given, "optim_input", "group", "optim_state_dict")
    if "optim" not in given:
        raise Unmovable(call, f"{name} is called without the optimizer", "pass the optimizer", OPTIMIZER_CODE)
    gather = settings.optimizer
    if name == "full_optim_state_dict":
        rank0 = given.get("rank0_only")
        if rank0 is not None and not isinstance(rank0, ast.Constant):
            raise Unmovable(call, "rank0_only is only known at run time", "write it out", OPTIMIZER_CODE)
        gather = Gather(FULL, offload=True, rank0_only=rank0 is None or bool(rank0.value))
    elif name == "sharded_optim_state_dict":
        gather = Gather(SHARDED)
    source = writer.draft.context.source
    writer.draft.replace(call, writer.optimizer_state(source(given["model"]), source(given["optim"]), gather))


def _load(writer: Writer, call: ast.Call, name: str, given: dict[str, ast.expr], settings: Settings) -> None:
    _refuse(call, name, given, "optim_input", "group", "is_named_optimizer")
    context, draft = writer.draft.context, writer.draft
    gather = {
        "scatter_full_optim_state_dict": Gather(FULL, rank0_only=True),
        "shard_full_optim_state_dict": Gather(FULL),
        "flatten_sharded_optim_state_dict": Gather(SHARDED),
    }.get(name, settings.optimizer)
    if "optim_state_dict" not in given:
        raise Unmovable(call, f"{name} is called without the state", _LOAD_FIX, OPTIMIZER_CODE)
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
        Unmovable: With what it has.
    """
    if not isinstance(optimizer, ast.Name):
        return
    home = context.enclosing_function(call)
    for node in context.parents:
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == optimizer.id):
            continue
        if node.attr not in _OPTIMIZERS_OWN and context.enclosing_function(node) is home:
            raise Unmovable(
                call,
                f"{optimizer.id} is no optimizer of torch: it has .{node.attr} (line {node.lineno})",
                "pass the optimizer inside it to get_ or set_optimizer_state_dict",
                OPTIMIZER_CODE,
            )


def _always_before(context: FileContext, statement: ast.stmt, load: ast.Call) -> bool:
    """Whether the state is made for every run that loads it."""
    return context.parents[statement] in set(context.ancestors(load))


def _read_sharded(writer: Writer, given: dict[str, ast.expr]) -> bool:
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
                raise Unmovable(made, "its arguments cannot be told apart", "write them as keywords", OPTIMIZER_CODE)
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
        Unmovable: It is used for something else, or never loaded.
    """
    problem = Unmovable(
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
    for node in context.parents:
        if isinstance(node, ast.Name) and node.id == target.id and isinstance(node.ctx, ast.Load):
            is_later = (node.lineno, node.col_offset) > (call.end_lineno or 0, call.end_col_offset or 0)
            if is_later and context.enclosing_function(node) is function:
                yield node


def _loads(parent: ast.Call, argument: ast.expr) -> bool:
    is_load = isinstance(parent.func, ast.Attribute) and parent.func.attr == "load_state_dict"
    given = [*parent.args, *(keyword.value for keyword in parent.keywords)]
    return is_load and len(given) == 1 and given[0] is argument and bool(parent.args)


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
            raise Unmovable(call, f"{name}({one}=...) has no counterpart", f"leave {one} out", OPTIMIZER_CODE)

"""The order of sharding, activation checkpointing and optimizers."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePath

from shardwise.fsdp1.codemod.constructors import Wrap
from shardwise.fsdp1.codemod.draft import FileDraft
from shardwise.fsdp1.codemod.flow import Holds, Sharded, flow_of, wraps_models
from shardwise.fsdp1.codemod.leftovers import with_types_changed
from shardwise.fsdp1.codemod.program import (
    Program,
    given_by_name,
    is_constant,
    is_simple,
    iterated,
    once,
)
from shardwise.source.edits import change
from shardwise.source.syntax import (
    FileContext,
    Function,
    all_parameters,
    argument_of,
    attributes_in,
    calls_in,
    given_to,
    last_name,
)
from shardwise.source.trace import makes_optimizer
from shardwise.source.values import ObjectRef

ORDER_CODE, OPTIMIZER_CODE = "SW125", "SW128"
_APPLIES = re.compile(r"^(apply|enable|setup|add)_\w*checkpoint\w*$|^apply_(\w+_)?ac$")
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_APPLY = {
    f"{_WRAPPERS}.{name}" for name in ("apply_activation_checkpointing", "apply_activation_checkpointing_wrapper")
}
_MAX_HOPS = 3
_TRAINS = {"backward", "step", "zero_grad", "load_state_dict"}
"""Methods that a function which only prepares a model does not call."""


def rewrite_order(draft: FileDraft) -> None:
    """Move recomputation before sharding where nothing stands in between."""
    context = draft.context
    for wrap in _rewritten(draft):
        home, names = context.enclosing_function(wrap), _model_names(draft, wrap)
        for call in draft.calls():
            if context.enclosing_function(call) is not home or call.lineno <= wrap.lineno:
                continue
            if names.isdisjoint(map(context.source, given_to(call))):
                continue
            reached = _reached(draft.program, context, call, names)
            applies = context.is_any(call.func, _APPLY) or any(
                other.is_any(getattr(one, "func", None), _APPLY)
                for other, function in reached
                for one in ast.walk(function)
            )
            if not (applies and _move_up(draft, call, wrap, reached)) and (applies or _looks_like_it(draft, call)):
                draft.undecided(
                    ORDER_CODE,
                    call,
                    "activation checkpointing is applied after sharding: FSDP2 would recompute around its gathering",
                    "apply it before the model is sharded, and shard the wrapped blocks",
                )


def report_reentrant(draft: FileDraft) -> None:
    """Note reentrant checkpointing, around which FSDP2 takes one forward before each backward."""
    for node in draft.nodes() if wraps_models(draft.program) else ():
        match node:
            case (
                ast.Attribute(attr="REENTRANT")
                | ast.keyword(arg="use_reentrant", value=ast.Constant(value=True))
                | ast.Call(func=ast.Attribute(attr="gradient_checkpointing_enable"), args=[], keywords=[])
            ):
                message = "reentrant checkpointing: after several forwards and one backward, gradients stay unreduced"
                draft.reported(ORDER_CODE, node, message, "use_reentrant=False, which transformers 5 has by default")


def _rewritten(draft: FileDraft) -> list[ast.Call]:
    """The constructor calls that are `fully_shard` now."""
    found = draft.sharded.constructors.items()
    return [call for call, is_partial in found if not is_partial and call in draft.taken]


def _model_names(draft: FileDraft, wrap: ast.Call) -> set[str]:
    """The names by which the wrapped model is known."""
    statement = draft.context.statement(wrap)
    names = {draft.source(one) for one in (statement.targets if isinstance(statement, ast.Assign) else [])}
    return (names | {draft.source(argument_of(wrap, 0, "module"))}) - {""}


def _reached(
    program: Program, context: FileContext, call: ast.Call, names: set[str], hops: int = 0
) -> list[tuple[FileContext, ast.AST]]:
    """The function of the program that is handed one of `names`, and those that this one hands it on to."""
    found = program.function(context, call.func) if hops < _MAX_HOPS else None
    if found is None:
        return []
    other, function = found
    given = given_by_name(call, [one.arg for one in function.args.args if one.arg != "self"])
    handed = {name for name, value in given.items() if name and context.source(value) in names}
    reached: list[tuple[FileContext, ast.AST]] = [found]
    for inner in ast.walk(function):
        if isinstance(inner, ast.Call) and any(other.source(one) in handed for one in given_to(inner)):
            reached += _reached(program, other, inner, handed, hops + 1)
    return reached


def _looks_like_it(draft: FileDraft, call: ast.Call) -> bool:
    """A function with a name that says what it does to the model, of a file not given or in a way not known."""
    name = draft.source(call.func).rpartition(".")[2]
    found = draft.program.function(draft.context, call.func)
    is_unknown = found is None or "checkpoint_wrapper" in found[0].source(found[1])
    return _APPLIES.search(name) is not None and is_unknown


def _move_up(draft: FileDraft, call: ast.Call, wrap: ast.Call, reached: list[tuple[FileContext, ast.AST]]) -> bool:
    """Put the statement in front of the one that shards, if both are in one block and nothing between minds."""
    context, positions = draft.context, draft.context.positions
    target = context.statement(wrap)
    moved = _block_member(draft, call, target)
    trains = not _TRAINS.isdisjoint(attributes_in(*(function for _, function in reached)))
    if moved is None or trains or not _can_move(draft, moved, target):
        return False
    lead, place = positions.starts[moved.lineno - 1], positions.starts[target.lineno - 1]
    while lead:  # comment lines right above belong to it
        above = context.text.rfind("\n", 0, lead - 1) + 1
        line = context.text[above:lead]
        if not line.strip().startswith("#") or not line.startswith(draft.indent(moved)):
            break
        lead = above
    stop = positions.line_end(draft.span(moved)[1])
    piece = with_types_changed(draft, moved, lead, stop)
    module = argument_of(wrap, 0, "module")
    new_name = draft.source(target.targets[0]) if isinstance(target, ast.Assign) else ""
    old_name = draft.source(module)
    if module is not None and new_name and not is_simple(module):
        # The model is built in the call itself: it gets its name first.
        draft.replace(module, new_name)
        piece = f"{draft.indent(target)}{new_name} = {old_name}{draft.newline}{piece}"
    elif new_name and old_name and new_name != old_name:
        piece = re.sub(rf"(?<![\w.]){re.escape(new_name)}(?!\w)", old_name, piece)
    draft.edits = [change(place, place, piece), change(lead, stop, ""), *draft.edits]
    draft.taken.update(ast.walk(moved))
    draft.rewritten(
        ORDER_CODE, call, "activation checkpointing moved before sharding: recomputed inside, sharded outside"
    )
    return True


def _block_member(draft: FileDraft, node: ast.AST, target: ast.stmt) -> ast.stmt | None:
    """The statement around `node` that stands in the same block as `target`; alone in its `if`, or none."""
    context = draft.context
    current = context.statement(node)
    while context.parents.get(current) is not context.parents[target]:
        parent = context.parents.get(current)
        if not isinstance(parent, ast.If) or parent.orelse:
            return None
        current = parent
    return current if current in context.block(target) else None


def _can_move(draft: FileDraft, moved: ast.stmt, target: ast.stmt) -> bool:
    """Whether nothing between the two gives a name that the moved statement reads, and nothing in it is rewritten."""
    siblings, (start, end) = draft.context.block(target), draft.span(moved)
    between = siblings[siblings.index(target) + 1 : siblings.index(moved)]
    given = _names(between, ast.Store)
    for node in (node for statement in between for node in ast.walk(statement)):
        if isinstance(node, Function):
            given.add(node.name)
        elif isinstance(node, ast.alias):
            given.add((node.asname or node.name).split(".")[0])
    is_touched = any(start <= edit.start and edit.end <= end for edit in draft.edits)
    is_touched |= "_fsdp_wrapped_module" in draft.context.text[start:end]  # reaches into wrappers that are gone
    is_free = draft.starts_line(moved) and draft.starts_line(target) and moved not in draft.taken
    return is_free and not is_touched and not _names([moved], ast.Load) & given


def _names(statements: Iterable[ast.stmt], kind: type[ast.expr_context]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}


_IS_OPTIMIZER = re.compile(r"^torch\.optim\.(?!lr_scheduler)\w+$|(?:^|\.)(?:AdamW|Adam|SGD|Adafactor|AdamW8bit|Lion)$")
_TAKES = ("parameters", "named_parameters")
_MARKS = re.compile(r"\bsetattr\(|\b(p|param|parameter|weight|bias|v)\.\w+ = |Parameter\(")
_OWN = {"data", "grad", "requires_grad", "weight", "bias"}
_NAMED = re.compile(r"optim|(^|_)opt$", re.IGNORECASE)


def kept_optimizers(wrap: Wrap) -> list[str]:
    """The places of optimizers that are, or may be, built before a constructor and cannot be moved behind it."""
    draft, own = wrap.draft, wrap.context.path
    early = [one for one in _early(draft, wrap.call) if not _to_move(draft, one[2], wrap.call)]
    places = {(path, call.lineno) for path, call, _ in early}
    places |= {(own, line) for line in _handed_in(wrap)}
    return [f"line {line}" if path == own else f"{path}:{line}" for path, line in sorted(places)]


def _keeps_parameters(wrap: ast.Call) -> bool:
    """Whether FSDP1 may have kept the parameters that optimizers hold."""
    told = {one.arg: one.value for one in wrap.keywords}
    return None in told or not is_constant(told.get("use_orig_params", ast.Constant(False)), False)


@once
def marked_parameters(program: Program) -> bool:
    """Whether the program sets attributes on parameters, which `fully_shard` replaces."""
    return any(
        _is_mark(context, node)
        for context in program.files(_MARKS.search)
        for node in context.nodes(ast.Attribute, ast.Call)
    )


@once
def groups_by_name(program: Program) -> bool:
    """Whether a file chooses weight decay by the names of parameters, which FSDP1 replaces by flat ones."""
    return any(program.files(lambda text: "weight_decay" in text and "named_parameters" in text))


def _is_mark(context: FileContext, node: ast.Attribute | ast.Call) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="setattr"), args=[owner, _, _]):
            pass
        case ast.Attribute(ctx=ast.Store(), value=owner, attr=name) if name not in _OWN:
            pass
        case _:
            return False
    if last_name(owner) in ("weight", "bias"):
        return True
    for binding in context.bindings(owner) if isinstance(owner, ast.Name) else ():
        made = binding.value
        if isinstance(made, ast.Call) and last_name(made.func) == "Parameter":
            return True
        for outer in itertools.islice(context.ancestors(binding.node), 3):
            if any(last_name(call.func) in _TAKES for one in iterated(outer) for call in calls_in(one)):
                return True
    return False


def _handed_in(wrap: Wrap) -> list[int]:
    """The line of the function around, if it is given the model and its optimizer, and FSDP1 could keep the two."""
    function = _given_model(wrap)
    if function is None or wrap.has_stars:
        return []
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    kept = {one.arg for one in all_parameters(function.args)}
    kept -= {node.id for node in names if node.lineno > wrap.call.lineno}
    return [function.lineno] if kept & {"optimizer", "optimizers", "optim", "opt"} else []


def _given_model(wrap: Wrap) -> Function | None:
    """The function around a constructor, if it is given the model, and FSDP1 may have kept the model's parameters."""
    function = wrap.context.enclosing_function(wrap.call)
    given = {one.arg for one in all_parameters(function.args)} if function is not None else set()
    return function if getattr(wrap.value("module"), "id", None) in given and _keeps_parameters(wrap.call) else None


def may_come_late(wrap: Wrap) -> bool:
    """Whether a caller that is not given may have built the optimizer already, whose parameters FSDP1 kept."""
    function = _given_model(wrap)
    if function is None:
        return False
    names = [node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return not wrap.draft.sharded.flow.sites_of(function) and not any(map(_NAMED.search, names))


def goes_elsewhere(wrap: Wrap) -> bool:
    """Whether a constructor's model is returned to callers of which none is given, tests aside."""
    flow, context = wrap.draft.sharded.flow, wrap.context
    waiting = [context.enclosing_function(wrap.call)]
    for function in waiting:
        if function is None or not flow.matters(flow.look_up(function)):
            return False
        sites = [one for one in flow.sites_of(function) if not _is_test(one[1].context)]
        waiting += {caller.context.enclosing_function(site) for site, caller in sites} - {*waiting}
    return True


def _is_test(context: FileContext) -> bool:
    path = PurePath(context.path)
    return path.name.startswith("test_") or not {"test", "tests"}.isdisjoint(path.parts)


def move_optimizers(draft: FileDraft) -> None:
    """Move each optimizer built too early, and what depends on it, behind the constructor."""
    context, positions = draft.context, draft.context.positions
    for wrap in _rewritten(draft):
        place = positions.line_end(draft.span(context.statement(wrap))[1])
        for _, call, taken in _early(draft, wrap):
            moved = _to_move(draft, taken, wrap)
            for statement in moved:
                if statement in draft.taken:
                    continue
                start, end = positions.starts[statement.lineno - 1], positions.line_end(draft.span(statement)[1])
                draft.edits += [change(start, end, ""), change(place, place, context.text[start:end])]
                draft.taken.update(ast.walk(statement))
            if moved:
                message = "the optimizer moved behind the sharding, whose parameters it must update"
                draft.rewritten(OPTIMIZER_CODE, call, message)


def _early(draft: FileDraft, wrap: ast.Call) -> list[tuple[str, ast.Call, ast.Call]]:
    """Optimizers of the program: path, call, and the call that takes their parameters before the model is wrapped.

    Where FSDP1 may have kept the parameters, those of which only the order is known count too.
    """
    sharded, found = draft.sharded, []
    flow, models, names = sharded.flow, sharded.wrapped_by(wrap), _model_names(draft, wrap)
    shared = {wrap, *flow.reached_from(sharded, wrap)}.union(*map(_identities, models))
    linked = [_optimizers_by_link(draft.program).get(one, {}) for one in shared]
    calls = {call: file for several in linked for call, file in several.items() if file is not sharded}
    for call, file in (dict.fromkeys(_optimizers(sharded, names), sharded) | calls).items():
        before, is_open = list[ast.Call](), _keeps_parameters(wrap) or _is_beside(draft, call, wrap, names)
        for home, taken, owners in _taken(file, call):
            is_its = any(_are_related(one, other) for one in models for other in owners)
            is_later = any(one.whole.site is wrap for one in owners)  # its model, if not for the order
            is_open = is_open and not is_its and (is_later or not _is_of_another(models, home, taken, owners))
            if (is_its or is_later) and flow.may_precede((home, taken), (sharded, wrap), is_known=not is_its):
                before.append(taken)
        if not before and is_open and flow.may_precede((file, call), (sharded, wrap), is_known=True):
            before = [call]
        found += [(file.context.path, call, one) for one in before[:1]]
    return found


def _taken(file: Sharded, call: ast.Call) -> Iterator[tuple[Sharded, ast.Call, set[ObjectRef]]]:
    """The calls that took the parameters which a call is given."""
    return file.taken_from(value for one in given_to(call) for value in file.values(one))


def _identities(value: ObjectRef) -> set[object]:
    """What a value must have in common with another that may be the same object or a part of it."""
    return {value.whole, value.whole.site, value.whole.definition or value.whole}


@once
def _optimizers_by_link(program: Program) -> dict[object, dict[ast.Call, Sharded]]:
    """Optimizers, by the functions that they are reached from and the objects whose parameters they are given."""
    found: dict[object, dict[ast.Call, Sharded]] = {}
    for file in list(flow_of(program).files.values()):
        for call in _optimizers(file, set()):
            owners = (one for _, _, several in _taken(file, call) for one in several)
            for key in set(file.flow.reached_from(file, call)).union(*map(_identities, owners)):
                found.setdefault(key, {})[call] = file
    return found


def _is_beside(draft: FileDraft, call: ast.Call, wrap: ast.Call, names: set[str]) -> bool:
    """Whether a call of the same function is given the model, or called on it, by a name of the constructor."""
    context = draft.context
    if call not in context.parents or context.enclosing_function(call) is not context.enclosing_function(wrap):
        return False
    return not names.isdisjoint(_around(context, call))


def _around(context: FileContext, call: ast.Call) -> set[str]:
    """What a call is given, is called on, and gives back beside its result, as text."""
    receiver = [call.func.value] if isinstance(call.func, ast.Attribute) else []  # model.make_optimizer()
    elements = [one for target in context.targets(call) for one in getattr(target, "elts", [])]  # model, optim = make()
    return {context.source(one) for one in [*given_to(call), *receiver, *elements]}


def _is_of_another(models: Iterable[ObjectRef], home: Sharded, taken: ast.Call, owners: Iterable[ObjectRef]) -> bool:
    """Whether parameters are known to be of another model than those that are wrapped."""
    if isinstance(taken.func, ast.Attribute) and home.holds(taken.func.value) is Holds.ALWAYS:
        return True
    made = [one.whole.site for one in (*models, *owners)]
    return bool(models) and bool(owners) and all(isinstance(one, ast.Call) and home.is_foreign(one) for one in made)


def _optimizers(file: Sharded, models: set[str]) -> Iterator[ast.Call]:
    """The calls of a file that make optimizers; those known by a name alone must be given parameters or a model."""
    context = file.context
    for call in context.calls:
        origins, source = context.callee(call).origins, context.source(call.func)
        if any(map(_IS_OPTIMIZER.search, origins)) or _makes_own(file, call):
            yield call
            continue
        names = [last_name(one) for to in context.targets(call) for one in (to, *getattr(to, "elts", []))]
        is_named = "torch.optim" in source or last_name(call.func) == "add_param_group"
        is_named |= any(one.rpartition("_")[2] == "opt" or makes_optimizer(one) for one in names)
        is_given = not models.isdisjoint(_around(context, call)) or "parameters(" in context.source(call)
        is_named = is_named or makes_optimizer(last_name(call.func))
        if is_named and is_given and call not in file.constructors and file.is_foreign(call):
            yield call


def _makes_own(file: Sharded, call: ast.Call) -> bool:
    """Whether a call makes an optimizer of a class of the program."""
    match file.program.definition(file.context, call.func):
        case context, ast.ClassDef() as made:
            return file.program.is_optimizer(context, made)
    return False


def _are_related(one: ObjectRef, other: ObjectRef) -> bool:
    """Whether two objects are the same, or one is a part of the other; objects of one class may be the same."""
    shorter = min(len(one.path), len(other.path))
    is_same = one.whole == other.whole or (
        one.whole.definition is not None and one.whole.definition is other.whole.definition
    )
    return is_same and one.path[:shorter] == other.path[:shorter]


def _to_move(draft: FileDraft, call: ast.Call, wrap: ast.Call) -> list[ast.stmt]:
    """The optimizer's statement and those up to the constructor that need it; none where that is not possible."""
    if call not in draft.context.parents:
        return []
    first, target = draft.context.statement(call), draft.context.statement(wrap)
    block = draft.context.block(target)
    if first not in block:
        return []
    moved: list[ast.stmt] = [first]
    stay: list[ast.stmt] = []
    for statement in block[block.index(first) + 1 : block.index(target)]:
        needs_it = _names([statement], ast.Load) & _names(moved, ast.Store)
        (moved if needs_it else stay).append(statement)
    can_move = all(isinstance(one, ast.Assign) and draft.starts_line(one) for one in moved)
    is_needed = _names([target], ast.Load) & _names(moved, ast.Store)
    is_changed = _names(stay, ast.Store) & _names(moved, ast.Load)
    return moved if can_move and draft.starts_line(target) and not is_needed and not is_changed else []

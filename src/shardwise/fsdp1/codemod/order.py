"""The order of sharding, optimizers and type checks."""

from __future__ import annotations

import ast
import re
from pathlib import PurePath

from shardwise.fsdp1.codemod import constructors
from shardwise.fsdp1.codemod.constructors import Blocked, Wrap
from shardwise.fsdp1.codemod.draft import FileDraft
from shardwise.fsdp1.codemod.emitted import is_ours
from shardwise.fsdp1.codemod.program import Program, is_constant, is_simple
from shardwise.fsdp1.codemod.sharded import INTERNAL
from shardwise.source.edits import change
from shardwise.source.syntax import FSDP1, FileContext, Function, all_parameters, argument_of, checked_types, given_to

_SAYS = re.compile(r"fsdp_?v?[12]|fsdp_?version", re.IGNORECASE)
_FOLDER = re.compile(r"fsdp_?v?2", re.IGNORECASE)
_NOTHING = re.compile(r"^fsdp2_[A-Z]|^FSDP1$")  # as `imports` calls a class of ours; as some call FSDP1's class


def tells_apart(draft: FileDraft, program: Program) -> int | None:
    """The line on which a file tells FSDP1 from FSDP2, by a name or by a check of both types; None if it does not."""
    context = draft.context
    if any(_FOLDER.search(part) for part in PurePath(context.path).parts[-2:]):
        return 1
    if not _SAYS.search(context.text) and "FSDPModule" not in context.text:
        return None
    lines = [line for node in draft.nodes() for line in _named(node)]
    lines += _checked(draft, program)
    return min(lines, default=None)


def names_both(context: FileContext, node: ast.expr, program: Program) -> bool:
    """Whether FSDP1's class stands beside FSDP2's, so that either will do: `(FSDP, FSDPModule)`."""
    parent = context.parents[node]
    if isinstance(parent, ast.Tuple | ast.List):
        return any(_is_fsdp2(context, one, program) for one in parent.elts)
    if isinstance(parent, ast.BinOp):
        return any(_is_fsdp2(context, one, program) for one in ast.walk(parent) if isinstance(one, ast.expr))
    return False


def _named(node: ast.AST) -> list[int]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            pass
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            pass
        case ast.ImportFrom(names=aliases):
            name = " ".join(one.name for one in aliases)
        case _:
            return []
    return [node.lineno] if _SAYS.search(name) and not _NOTHING.match(name) else []  # pyrefly: ignore


def _checked(draft: FileDraft, program: Program) -> list[int]:
    """Lines of checks for FSDP2's class, in a file that also checks for FSDP1's alone."""
    context, first, second = draft.context, False, []
    for call in draft.calls():
        kinds = checked_types(call)
        has_new = any(_is_fsdp2(context, one, program) for one in kinds)
        first |= not has_new and any(program.is_any(context, one, {FSDP1}) for one in kinds)
        second += [call.lineno] if has_new else []
    return second if first else []


def _is_fsdp2(context: FileContext, node: ast.expr, program: Program) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and any(
        is_ours("FSDPModule", origin) for origin in program.origins(context, node)
    )


TYPE_CHECK_CODE = "SW123"
_BECAME = "the class became FSDPModule, which every sharded module is"


def rewrite_type_checks(draft: FileDraft, program: Program) -> None:
    """Rewrite every use of the class as a type."""
    context = draft.context
    for call in draft.calls():
        if context.origins(call.func) == {f"{FSDP1}.fsdp_modules"} and call not in draft.taken:
            _modules(draft, call)
    for node in draft.nodes():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            _quoted(draft, program, node)
        if not isinstance(node, ast.Name | ast.Attribute) or node in draft.taken:
            continue
        if is_type_use(context, node) and program.origins(context, node) == {FSDP1}:
            if names_both(context, node, program):
                draft.taken.add(node)
                continue
            draft.replace(node, draft.name("FSDPModule"))
            draft.rewritten(TYPE_CHECK_CODE, node, _BECAME)


def with_types_changed(draft: FileDraft, program: Program, statement: ast.stmt, start: int, stop: int) -> str:
    """The text from `start` to `stop`, which holds a statement that is moved, with its uses of the class rewritten."""
    context = draft.context
    piece = context.text[start:stop]
    uses = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Name | ast.Attribute)
        and is_type_use(context, node)
        and program.origins(context, node) == {FSDP1}
    ]
    for node in sorted(uses, key=lambda one: context.positions.span(one), reverse=True):
        first, last = context.positions.span(node)
        piece = piece[: first - start] + draft.name("FSDPModule") + piece[last - start :]
        draft.rewritten(TYPE_CHECK_CODE, node, _BECAME)
    return piece


def is_type_use(context: FileContext, node: ast.expr) -> bool:
    """The second argument of isinstance, alone or in a tuple; an annotation; `type(x) is FSDP`."""
    child: ast.AST = node
    for parent in context.ancestors(node):
        match parent:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, second]):
                return second is child
            case ast.Tuple() | ast.BinOp(op=ast.BitOr()) | ast.Subscript() | ast.List():
                child = parent
            case ast.arg() | ast.AnnAssign():
                return parent.annotation is child
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return parent.returns is child
            case ast.Compare(left=ast.Call(func=ast.Name(id="type"))):
                return True
            case ast.MatchClass():
                return parent.cls is child
            case _:
                return False
    return False


def _modules(draft: FileDraft, call: ast.Call) -> None:
    """`FSDP.fsdp_modules(m, root_only=...)`."""
    if len(call.args) != 1 or call.keywords:
        draft.undecided(
            TYPE_CHECK_CODE,
            call,
            "fsdp_modules(..., root_only=...) has no counterpart",
            "[m for m in model.modules() if isinstance(m, FSDPModule)], and keep the roots",
        )
        draft.taken.update(ast.walk(call.func))
        return
    if _reaches_inside(draft, call):
        draft.undecided(
            TYPE_CHECK_CODE,
            call,
            "fsdp_modules is left alone: the loop over it works on what only FSDP1's models have",
            "leave the loop out for FSDP2's models, or write it anew for them",
        )
        draft.taken.update(ast.walk(call.func))
        return
    model = draft.context.source(call.args[0])
    name = draft.name("FSDPModule")
    draft.replace(call, f"[module for module in {model}.modules() if isinstance(module, {name})]")
    draft.taken.update(ast.walk(call))
    draft.rewritten(TYPE_CHECK_CODE, call, "fsdp_modules became a walk over the modules")


def _reaches_inside(draft: FileDraft, call: ast.Call) -> bool:
    """Whether a call is what a loop goes over, which reaches into FSDP1's internals."""
    loop = draft.context.parents[call]
    if not (isinstance(loop, ast.For) and loop.iter is call and isinstance(loop.target, ast.Name)):
        return False
    used = [one for one in ast.walk(loop) if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name)]
    return any(one.attr in INTERNAL and one.value.id == loop.target.id for one in used)  # pyrefly: ignore


def _quoted(draft: FileDraft, program: Program, node: ast.Constant) -> None:
    """An annotation in quotes."""
    context, value = draft.context, node.value
    if not isinstance(value, str) or not re.fullmatch(r"[\w.\[\], |]+", value) or not is_type_use(context, node):
        return
    scope = context.scopes[context.tree]
    for word in set(re.findall(r"\b\w+\b", value)):
        origins = {one.origin for one in scope.names.get(word, [])}
        if origins and all(one.endswith(".FullyShardedDataParallel") and one.startswith("torch.") for one in origins):
            text = context.source(node)
            draft.replace(node, re.sub(rf"\b{word}\b", draft.name("FSDPModule"), text))
            draft.rewritten(TYPE_CHECK_CODE, node, _BECAME)
            return


ORDER_CODE = "SW125"
_APPLIES = re.compile(r"^(apply|enable|setup|add)_\w*checkpoint\w*$|^apply_(\w+_)?ac$")
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_APPLY = {
    f"{_WRAPPERS}.{name}" for name in ("apply_activation_checkpointing", "apply_activation_checkpointing_wrapper")
}
_MAX_HOPS = 3
_TRAINS = {"backward", "step", "zero_grad", "load_state_dict"}
"""Methods that a function which only prepares a model does not call."""


def rewrite_order(draft: FileDraft, program: Program) -> None:
    """Move recomputation before sharding where nothing stands in between."""
    context = draft.context
    wraps = [call for call, is_partial in constructors.find(context, program) if not is_partial]
    for wrap in wraps:
        if wrap not in draft.taken:
            continue
        home = context.enclosing_function(wrap)
        for call in draft.calls():
            if context.enclosing_function(call) is not home or call is wrap:
                continue
            if call.lineno > wrap.lineno and _recomputes(draft, program, call, wrap):
                _move_up(draft, program, call, wrap)
            elif call.lineno > wrap.lineno and _looks_like_it(draft, program, call, wrap):
                _leave(draft, call)


def model_names(draft: FileDraft, wrap: ast.Call) -> set[str]:
    """The names by which the wrapped model is known."""
    context = draft.context
    module = argument_of(wrap, 0, "module")
    names = {context.source(module)} if module is not None else set()
    statement = context.statement(wrap)
    if isinstance(statement, ast.Assign):
        names |= {context.source(target) for target in statement.targets}
    return names


def _recomputes(draft: FileDraft, program: Program, call: ast.Call, wrap: ast.Call) -> bool:
    """Whether a call applies activation checkpointing to the wrapped model, itself or through a function."""
    context, names = draft.context, model_names(draft, wrap)
    if not any(context.source(one) in names for one in given_to(call)):
        return False
    if context.is_any(call.func, _APPLY):
        return True
    return any(
        other.is_any(inner.func, _APPLY)
        for other, function in _reached(program, context, call, names)
        for inner in ast.walk(function)
        if isinstance(inner, ast.Call)
    )


def _reached(
    program: Program, context: FileContext, call: ast.Call, names: set[str], hops: int = 0
) -> list[tuple[FileContext, ast.AST]]:
    """The function of the program that is handed one of `names`, and those that this one hands it on to."""
    found = program.function(context, call.func) if hops < _MAX_HOPS else None
    if found is None:
        return []
    other, function = found
    handed = _parameters(context, call, function, names)
    reached: list[tuple[FileContext, ast.AST]] = [found]
    for inner in ast.walk(function):
        if isinstance(inner, ast.Call) and any(other.source(one) in handed for one in given_to(inner)):
            reached += _reached(program, other, inner, handed, hops + 1)
    return reached


def _parameters(context: FileContext, call: ast.Call, function: Function, names: set[str]) -> set[str]:
    """The parameters of a function by which it gets one of `names`."""
    positional = [one.arg for one in function.args.args if one.arg != "self"]
    given = zip(positional, call.args, strict=False)
    handed = {parameter for parameter, value in given if context.source(value) in names}
    return handed | {one.arg for one in call.keywords if one.arg and context.source(one.value) in names}


def _only_prepares(program: Program, context: FileContext, call: ast.Call, names: set[str]) -> bool:
    """Whether a call does nothing that has to come after sharding."""
    return not any(
        isinstance(node, ast.Attribute) and node.attr in _TRAINS
        for _, function in _reached(program, context, call, names)
        for node in ast.walk(function)
    )


def _move_up(draft: FileDraft, program: Program, call: ast.Call, wrap: ast.Call) -> None:
    """Put the statement in front of the one that shards, if both are in one block and nothing between minds."""
    context = draft.context
    target = context.statement(wrap)
    moved = _block_member(draft, call, target)
    prepares = _only_prepares(program, context, call, model_names(draft, wrap))
    if moved is None or not _can_move(draft, moved, target, wrap) or not prepares:
        _leave(draft, call)
        return
    text, end = context.text, context.positions.span(moved)[1]
    line_start = context.positions.starts[moved.lineno - 1]
    stop = context.positions.line_end(end)
    lead = _comments_above(text, line_start, draft.indent(moved))
    place = context.positions.starts[target.lineno - 1]
    piece = with_types_changed(draft, program, moved, lead, stop)
    module = argument_of(wrap, 0, "module")
    new_name = context.source(target.targets[0]) if isinstance(target, ast.Assign) else ""
    old_name = context.source(module) if module is not None else ""
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


def _leave(draft: FileDraft, call: ast.Call) -> None:
    draft.undecided(
        ORDER_CODE,
        call,
        "activation checkpointing is applied after sharding: FSDP2 would recompute around its gathering",
        "apply it before the model is sharded, and shard the wrapped blocks",
    )


def _looks_like_it(draft: FileDraft, program: Program, call: ast.Call, wrap: ast.Call) -> bool:
    """A function with a name that says what it does to the model, of a file not given or in a way not known."""
    context = draft.context
    name = context.source(call.func).rpartition(".")[2]
    found = program.function(context, call.func)
    if not _APPLIES.search(name) or (found is not None and "checkpoint_wrapper" not in found[0].source(found[1])):
        return False
    return any(context.source(one) in model_names(draft, wrap) for one in given_to(call))


def _comments_above(text: str, line_start: int, indent: str) -> int:
    """The start of the comment lines right above, which belong to a statement."""
    while line_start:
        previous = text.rfind("\n", 0, line_start - 1) + 1
        line = text[previous:line_start]
        if not line.strip().startswith("#") or not line.startswith(indent):
            return line_start
        line_start = previous
    return line_start


def _block_member(draft: FileDraft, node: ast.AST, target: ast.stmt) -> ast.stmt | None:
    """The statement around `node` that stands in the same block as `target`; alone in its `if`, or none."""
    context = draft.context
    block = context.parents[target]
    current = context.statement(node)
    while context.parents.get(current) is not block:
        parent = context.parents.get(current)
        if not isinstance(parent, ast.If) or parent.orelse:
            return None
        current = parent
    return current if current in context.block(target) else None


def _can_move(draft: FileDraft, moved: ast.stmt, target: ast.stmt, wrap: ast.Call) -> bool:
    """Whether nothing between the two gives a name that the moved statement reads, and nothing in it is rewritten."""
    context = draft.context
    if not draft.starts_line(moved) or not draft.starts_line(target) or moved in draft.taken:
        return False
    siblings = context.block(target)
    between = siblings[siblings.index(target) + 1 : siblings.index(moved)]
    read = {node.id for node in ast.walk(moved) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    given = {
        node.id
        for statement in between
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    given |= {node.name for statement in between for node in ast.walk(statement) if isinstance(node, Function)}
    given |= {
        (alias.asname or alias.name).split(".")[0]
        for statement in between
        for node in ast.walk(statement)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    start, end = context.positions.span(moved)
    touched = any(start <= edit.start and edit.end <= end for edit in draft.edits)
    touched |= "_fsdp_wrapped_module" in context.text[start:end]  # reaches into wrappers that are gone
    return not read & given and not touched


OPTIMIZER_ORDER_CODE = "SW128"
_HANDED = {"optimizer", "optimizers", "optim", "opt"}
_OPTIMIZER = re.compile(
    r"^torch\.optim\.(?!lr_scheduler)\w+$|(?:^|\.)(?:AdamW|Adam|SGD|Adafactor|AdamW8bit|Lion|Adagrad|FusedAdam)$"
)


def refuse_early_optimizers(draft: FileDraft, wrap: Wrap) -> None:
    """Refuse a constructor that comes after its optimizer, where the optimizer cannot be moved.

    Raises:
        Blocked: With the line of the optimizer.
    """
    lines = [one.lineno for one in _early(draft, wrap.call) if _to_move(draft, one, wrap.call) is None]
    lines += [*_handed_out(draft, wrap.call), *_handed_in(wrap)]
    if lines:
        raise Blocked(
            f"the optimizer of line {min(lines)} is built before it, and would update tensors nobody uses",
            "build the optimizer after the model is sharded, or sw.shard(model, optimizers=optimizer)",
        )


def _handed_in(wrap: Wrap) -> list[int]:
    """The line of the function around, if it is given the model and its optimizer, and FSDP1 could keep the two."""
    told, function = wrap.value("use_orig_params"), wrap.context.enclosing_function(wrap.call)
    if told is None or is_constant(told, False) or function is None:
        return []
    parameters = {one.arg for one in all_parameters(function.args)}
    module = wrap.value("module")
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    rebuilt = {node.id for node in names if node.lineno > wrap.call.lineno}
    given = isinstance(module, ast.Name) and module.id in parameters
    return [function.lineno] if given and (parameters & _HANDED) - rebuilt else []


def _handed_out(draft: FileDraft, wrap: ast.Call) -> list[int]:
    """Lines before the constructor on which a function hands out an optimizer of the model, used behind it."""
    context, names = draft.context, model_names(draft, wrap)
    home = context.enclosing_function(wrap)
    ours = [node for node in context.parents if isinstance(node, ast.Name) and context.enclosing_function(node) is home]
    used = {node.id for node in ours if isinstance(node.ctx, ast.Load) and node.lineno > wrap.lineno}
    bound_later = {node.id for node in ours if isinstance(node.ctx, ast.Store) and node.lineno > wrap.lineno}
    lines = []
    for node in ours:
        statement = context.statement(node)
        is_bound = isinstance(node.ctx, ast.Store) and "optim" in node.id.lower() and node.lineno < wrap.lineno
        if not is_bound or not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            continue
        if node.id not in used or node.id in bound_later or context.are_exclusive(statement.value, wrap):
            continue
        if any(_OPTIMIZER.search(origin) for origin in context.origins(statement.value.func)):
            continue  # `_early` has it
        given = {context.source(one) for one in statement.value.args}
        given |= {context.source(keyword.value) for keyword in statement.value.keywords}
        targets = {context.source(one) for target in statement.targets for one in getattr(target, "elts", [])}
        if names & (given | targets):
            lines.append(statement.lineno)
    return lines


def move_optimizers(draft: FileDraft, program: Program) -> None:
    """Move each optimizer built too early, and what depends on it, behind the constructor."""
    for wrap, is_partial in constructors.find(draft.context, program):
        if is_partial or wrap not in draft.taken:
            continue
        for call in _early(draft, wrap):
            _move(draft, call, wrap)


def _early(draft: FileDraft, wrap: ast.Call) -> list[ast.Call]:
    """Optimizers of the wrapped model that the same function builds before it wraps."""
    context, names = draft.context, model_names(draft, wrap)
    home = context.enclosing_function(wrap)
    found = []
    for call in context.calls:
        if call.lineno >= wrap.lineno or context.enclosing_function(call) is not home:
            continue
        if not any(_OPTIMIZER.search(origin) for origin in context.origins(call.func)):
            continue
        asked = [node for node in ast.walk(call) if isinstance(node, ast.Attribute)]
        given = {context.source(node.value) for node in asked if node.attr in ("parameters", "named_parameters")}
        if given & names and not context.are_exclusive(call, wrap):
            found.append(call)
    return found


def _to_move(draft: FileDraft, call: ast.Call, wrap: ast.Call) -> list[ast.stmt] | None:
    """The optimizer's statement and those up to the constructor that need it; None where that is not possible."""
    context = draft.context
    first, target = context.statement(call), context.statement(wrap)
    block = context.block(target)
    if first not in block or not isinstance(first, ast.Assign) or not all(map(draft.starts_line, (first, target))):
        return None
    moved: list[ast.stmt] = [first]
    given = _names(first, ast.Store)
    last = block.index(target)
    for statement in block[block.index(first) + 1 : last]:
        if _names(statement, ast.Load) & given:
            if not isinstance(statement, ast.Assign) or not draft.starts_line(statement):
                return None
            moved.append(statement)
            given |= _names(statement, ast.Store)
    stays = [one for one in block[block.index(first) : last] if one not in moved]
    changed = set().union(*(_names(one, ast.Store) for one in stays)) if stays else set()
    read = set().union(*(_names(one, ast.Load) for one in moved))
    return None if _names(target, ast.Load) & given or (changed & read) else moved


def _names(statement: ast.stmt, kind: type[ast.expr_context]) -> set[str]:
    found = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, kind))
    return {node.id for node in found}


def _move(draft: FileDraft, call: ast.Call, wrap: ast.Call) -> None:
    context = draft.context
    statements = _to_move(draft, call, wrap) or []
    text, target = context.text, context.statement(wrap)
    place = context.positions.line_end(context.positions.span(target)[1])
    for statement in statements:
        start = context.positions.starts[statement.lineno - 1]
        end = context.positions.line_end(context.positions.span(statement)[1])
        draft.edits += [change(start, end, ""), change(place, place, text[start:end])]
        draft.taken.update(ast.walk(statement))
    draft.rewritten(
        OPTIMIZER_ORDER_CODE, call, "the optimizer moved behind the sharding, whose parameters it must update"
    )

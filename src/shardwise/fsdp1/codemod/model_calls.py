"""Calls on an FSDP model other than its constructor: accumulation, clipping, forward, parameters."""

from __future__ import annotations

import ast
import builtins
import re

from shardwise.fsdp1.codemod.constructors import ArgumentList, WrittenArgument, read_arguments
from shardwise.fsdp1.codemod.draft import Blocked, FileDraft
from shardwise.fsdp1.codemod.flow import Holds, flow_of
from shardwise.fsdp1.codemod.program import Program, is_constant, iterated_around, once
from shardwise.fsdp1.codemod.state_calls import shards_in_groups
from shardwise.source.syntax import (
    FSDP1,
    FileContext,
    Function,
    attributes_in,
    calls_in,
    given_to,
    last_name,
    name_on_self,
)
from shardwise.source.trace import makes_optimizer

_OTHERS = re.compile(r"^self$|^cls$|accelerator|fabric|plugin|strategy", re.IGNORECASE)


def rewrite_no_sync(draft: FileDraft) -> None:
    """Rewrite `model.no_sync()`, `model.no_sync` passed on uncalled, and questions whether the model has it."""
    context, moved = draft.context, set[str]()
    for node in draft.nodes():
        if not (isinstance(node, ast.Attribute) and node.attr == "no_sync" and isinstance(node.ctx, ast.Load)):
            continue
        if not draft.holds(node.value, "no_sync") and not _may_be_wrapped(draft, node.value):
            continue
        parent, model = context.parents[node], draft.source(node.value)
        is_called = isinstance(parent, ast.Call) and parent.func is node
        if isinstance(parent, ast.Call) and is_called and (parent.args or parent.keywords):
            continue  # of a library that is handed the model
        helper = draft.helper("_no_sync")
        if isinstance(parent, ast.Call) and is_called:
            draft.replace(parent, f"{helper}({model})")
        else:
            draft.replace(node, f"{draft.name('functools')}.partial({helper}, {model})")
        draft.taken.update((node, parent))
        moved.add(model)
        message = "no_sync became a context that switches the reduction of gradients off and on again"
        draft.rewritten("SW121", node, message)
    if moved:
        _report_discarded(draft)
    for call in draft.calls():
        match call:
            case ast.Call(func=ast.Name(id="hasattr"), args=[one, ast.Constant(value="no_sync")]) if (
                draft.source(one) in moved
            ):
                asks = f"isinstance({draft.source(one)}, {draft.name('FSDPModule')})"
                draft.replace(call, f"({draft.source(call)} or {asks})")
                draft.rewritten("SW121", call, "the question for no_sync is also answered for FSDP2's models")


def _report_discarded(draft: FileDraft) -> None:
    """Note where gradients are cleared that a backward in no_sync may have left: not right after a step."""
    for call, func in draft.method_calls("zero_grad"):
        block = draft.context.block(statement := draft.context.statement(call))
        place = block.index(statement)
        around = [*block[:place], *(one for one in block[place:] if isinstance(one, ast.Expr))]
        if any(last_name(one.func) == "step" for each in around for one in calls_in(each)):
            continue
        fix = f"end every window of accumulation with a backward outside of no_sync before {draft.source(func)}()"
        message = (
            "zero_grad() does not clear what backward in no_sync has added up, as FSDP1's did: it is in the next step"
        )
        draft.reported("SW121", call, message, fix)


def _may_be_wrapped(draft: FileDraft, node: ast.expr) -> bool:
    """A model from elsewhere, in a file that has to do with FSDP: the emitted helper takes any that has `no_sync`."""
    if "torch.distributed.fsdp" not in draft.context.text or not isinstance(node, ast.Name | ast.Attribute):
        return False
    return (
        not draft.sharded.has_own(node, "no_sync")
        and not _OTHERS.search(draft.source(node).rpartition(".")[2])
        and not draft.context.origins(node)
    )


CLIPPING_CODE = "SW120"
_OTHER_CLIPPING = re.compile(r"self$|super|utils|accelerator|fabric|engine|trainer|strategy|plugin|optim|scaler|clip")
_FUNCTIONS = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_norm"}
_ARGUMENTS = {"max_norm", "norm_type", "error_if_nonfinite"}
"""Those that shardwise's function has as well."""


def rewrite_clipping(draft: FileDraft) -> None:
    """Rewrite the method, and the use of torch's result where it is a sharded number now."""
    for call, func in [*draft.method_calls("clip_grad_norm_"), *draft.method_calls("clip_grad_norm")]:
        if func.attr == "clip_grad_norm_" and _is_model(draft, call, func.value):
            _rewrite_method(draft, call, func)
        elif draft.context.is_any(func, _FUNCTIONS):
            _rewrite_function(draft, call)


def _is_model(draft: FileDraft, call: ast.Call, node: ast.expr) -> bool:
    """Plain modules have no such method; accelerators and engines of other libraries do, and take the parameters."""
    last = draft.source(node).rpartition(".")[2].lower()
    if draft.sharded.has_own(node, "clip_grad_norm_") or draft.program.is_fsdp(draft.context, node):
        return False
    if draft.holds(node) or last.endswith(("model", "module", "net")) or last == "fsdp":
        return True
    given = "".join([*map(draft.source, call.args[:1]), *(keyword.arg or "" for keyword in call.keywords)])
    is_other = _OTHER_CLIPPING.search(last) or draft.context.origins(call.func)
    return "fsdp" in draft.context.text.lower() and "param" not in given and not is_other


def _rewrite_method(draft: FileDraft, call: ast.Call, func: ast.Attribute) -> None:
    if draft.target == "shardwise":
        name, given = f"{draft.name('sw')}.clip_grad_norm_", draft.source(func.value)
    else:
        is_plain = isinstance(draft.context.parents[call], ast.Expr)
        is_plain = is_plain and not _ignores(draft.program) and not _is_low(draft.program)
        name = f"{draft.name('torch')}.nn.utils.clip_grad_norm_" if is_plain else draft.helper("_clip_grad_norm")
        given = f"{draft.source(func.value)}.parameters()"
    draft.edit(*draft.span(func), name)
    behind = draft.context.text.index("(", draft.span(func)[1]) + 1
    draft.edit(behind, behind, f"{given}, " if call.args or call.keywords else given)
    draft.taken.update((call, func, func.value))
    message = "the method became a function of the parameters; its norm is over all ranks, as before"
    if _ignores(draft.program) and _names_ignored(draft.program):
        message += ", but over this rank's own gradients of ignored parameters: average those first"
    draft.rewritten(CLIPPING_CODE, call, message)


def _rewrite_function(draft: FileDraft, call: ast.Call) -> None:
    """FSDP1 clipped by the norm of each rank's own part; FSDP2's is over all ranks, and its result is sharded."""
    match call.args:
        case [ast.Call(func=ast.Attribute(attr="parameters", value=model)), *_] if draft.sharded.has_inside(model):
            draft.reported(
                CLIPPING_CODE,
                call,
                "FSDP1 clipped each rank by the norm of its own part here; FSDP2 clips by the norm over all ranks",
                "nothing, unless the old behaviour was meant",
            )
        case _:
            return
    if isinstance(draft.context.parents[call], ast.Expr) and draft.holds(model) and not _ignores(draft.program):
        return
    is_known = len(call.args) <= 3 and {one.arg for one in call.keywords} <= _ARGUMENTS
    if draft.target == "shardwise" and is_known:
        draft.replace(call.func, f"{draft.name('sw')}.clip_grad_norm_")
    else:
        draft.replace(call.func, draft.helper("_clip_grad_norm"))
    draft.taken.add(call)


@once
def _ignores(program: Program) -> bool:
    """Whether some parameters may be left whole, whose gradients torch does not clip together with DTensors."""
    given = [one.arg for file in flow_of(program).files.values() for call in file.constructors for one in call.keywords]
    return any(name is None or name.startswith("ignored") for name in given)


_IGNORED = re.compile(r"\bignored_(?:modules|parameters|states)\b")


@once
def _names_ignored(program: Program) -> bool:
    """Whether a file names ignored parameters, which settings of an FSDP(...) call may then have."""
    return any(map(_IGNORED.search, program.texts.values()))


_LOW = re.compile(
    r"\btorch_dtype\b|default_(?:tensor_)?(?:d?type)\(|\.half\(\)|\.bfloat16\(\)|\.to\([^()]*torch\.(?:b?float16|half)"
)


@once
def _is_low(program: Program) -> bool:
    """Whether parameters may be in float16 or bfloat16, in which FSDP1 took no norms."""
    return any(map(_LOW.search, program.texts.values()))


FORWARD_CODE = "SW136"
_POLICY = re.compile(r"\b(?:transformer_layer_cls|ModuleWrapPolicy)\b")


def rewrite_forward_calls(draft: FileDraft) -> None:
    """Call the model itself; for a part of it, say what happens."""
    for call, func in draft.method_calls("forward"):
        is_model = draft.holds(func.value) is Holds.ALWAYS or _may_be_called(draft, func.value)
        if is_model or not units_named(draft.program).isdisjoint(_made_of(draft.context, func.value)):
            draft.edit(draft.span(func.value)[1], draft.span(func)[1], "")
            draft.taken.add(call)
            what = "model" if is_model else "unit"
            draft.rewritten(FORWARD_CODE, call, f"the {what} is called itself: .forward() goes past FSDP2's gathering")
        elif _is_part(draft, func.value):
            draft.undecided(
                FORWARD_CODE,
                call,
                "the forward of a part of the sharded model is called: it goes past FSDP2's gathering",
                "call the part itself; if it is no unit of its own, model.unshard() before",
            )


def _may_be_called(draft: FileDraft, node: ast.expr) -> bool:
    """Whether an expression is a wrapped model on some runs, and on all of them what runs its forward when called."""
    if not draft.holds(node) or draft.source(node) in ("self", "super()"):
        return False
    owners = [one.definition for one in draft.sharded.values(node) if one.definition is not None and not one.path]
    return all(one.bases for one in owners)


@once
def units_named(program: Program) -> frozenset[str]:
    """The classes that policies of the program name as units."""
    found = set[str]()
    for context in program.files(_POLICY.search):
        for call in context.calls:
            given = call.args if last_name(call.func) == "ModuleWrapPolicy" else []
            given += [one.value for one in call.keywords if one.arg in ("transformer_layer_cls", "module_classes")]
            found |= {last_name(one) for value in given for one in ast.walk(value)}
    return frozenset(found - {""})


def runs_units(program: Program, path: str) -> bool:
    """Whether a file may call the forward of a unit by its name."""
    text = program.texts[path]
    return ".forward(" in text and any(name in text for name in units_named(program))


def _made_of(context: FileContext, node: ast.expr) -> set[str]:
    """The classes of which a class makes the `self.name` that an expression, or the loop around it, is about."""
    owner = context.enclosing_class(node)
    around = iterated_around(context, node) if isinstance(node, ast.Name) else []
    names = {name_on_self(one) for text in [context.source(node), *around] for one in ast.walk(ast.parse(text.strip()))}
    found = set[str]()
    for one in ast.walk(owner) if owner is not None else ():
        places = one.targets if isinstance(one, ast.Assign) else [one.func] if isinstance(one, ast.Call) else []
        if any(name_on_self(inner) in names - {""} for place in places for inner in ast.walk(place)):
            found |= {last_name(made.func) for made in calls_in(one)}
    return found


def _is_part(draft: FileDraft, node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if isinstance(node, ast.Name | ast.Attribute) and draft.holds(node) is Holds.ALWAYS:
            return True
    return False


FULL_PARAMS_CODE = "SW124"
_PARAMETERS = ("module", "recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
_FORWARD = {"forward", "generate", "sample", "encode", "decode", "predict", "inference", "infer", "evaluate"}
_FORWARD |= {"generate_text", "chat", "beam_search", "greedy_search"}
_PART = re.compile(r"model|net|unet|vae|encoder|decoder|backbone|transformer|\w*(head|norm|proj|projector|embed\w*)")
"""Names of modules inside a model, which run when they are called."""


def rewrite_full_params(draft: FileDraft) -> None:
    """Rewrite each `with FSDP.summon_full_params(model, ...)`."""
    for call, func in draft.method_calls("summon_full_params"):
        is_static = draft.context.origins(func) == {f"{FSDP1}.summon_full_params"}
        if not is_static and not draft.holds(func.value):
            continue
        draft.taken.update(ast.walk(call.func))
        try:
            _rewrite_full_params(draft, call)
        except Blocked as blocked:
            draft.undecided(
                FULL_PARAMS_CODE,
                call,
                f"summon_full_params is left alone: {blocked.why}",
                "to read: parameter.full_tensor() or a full state dict; to run the model: nothing, it gathers by "
                "itself; to change parameters: change the DTensors; or sw.full_params(model)",
            )


def _rewrite_full_params(draft: FileDraft, call: ast.Call) -> None:
    statement = draft.context.statement(call)
    items = statement.items if isinstance(statement, ast.With | ast.AsyncWith) else []
    body = statement.body if any(call in ast.walk(item.context_expr) for item in items) else []  # pyrefly: ignore
    listed = read_arguments(draft.context, call)
    given = {argument.name or _PARAMETERS[index]: argument for index, argument in enumerate(listed.arguments[:6])}
    if "module" not in given or set(given) - set(_PARAMETERS[:5]) or not body:
        raise Blocked("what the parameters are gathered for cannot be read here", "")
    if _runs(body, listed.text(given["module"])):
        _rewrite_as_run(draft, call, listed, given, body)
        return
    for name, argument in given.items():
        argument.is_dropped = name == "offload_to_cpu"
        if argument.name == "" and name != "module":
            listed.rename(argument, name)
    if "writeback" not in given:
        listed.add("writeback=True")  # FSDP1's default
    is_torch = draft.target == "torch"
    draft.replace(call.func, draft.helper("_full_params") if is_torch else f"{draft.name('sw')}.full_params")
    draft.edits += listed.edits()
    draft.rewritten(FULL_PARAMS_CODE, call, "the parameters stand in full, as plain tensors, until the block ends")


def _rewrite_as_run(
    draft: FileDraft, call: ast.Call, listed: ArgumentList, given: dict[str, WrittenArgument], body: list[ast.stmt]
) -> None:
    """A forward gathers what it needs by itself; what runs outside of it finds the root gathered."""
    writes = any(name.endswith("_") and not name.endswith("__") for name in attributes_in(*body))
    if writes and not ("writeback" in given and is_constant(given["writeback"].value, False)):
        raise Blocked("the block both runs the model and changes its parameters", "")
    for name, argument in given.items():
        argument.is_dropped = name not in ("module", "recurse")
        if name == "recurse" and not argument.name:
            listed.rename(argument, "recurse")
    draft.replace(call.func, draft.helper("_unsharded"))
    draft.edits += listed.edits()
    message = "the model runs in this block: its units are gathered, in the dtype they compute in"
    draft.rewritten(FULL_PARAMS_CODE, call, message)


def _runs(body: list[ast.stmt], model: str) -> bool:
    """Whether the block calls the model, or a method that does."""
    calls = [node for one in body for node in ast.walk(one) if isinstance(node, ast.Call)]
    for name in (ast.unparse(call.func) for call in calls):
        owner, _, method = name.rpartition(".")
        is_own = owner.startswith(model.split(".")[0]) and method in _FORWARD
        is_own |= name.startswith(f"{model}.") and (name.endswith("]") or _PART.fullmatch(method) is not None)
        if name in (model, f"{model}.module") or is_own or method in ("generate", "sample"):
            return True
    return False


INNER_CODE = "SW126"


def rewrite_inner_modules(draft: FileDraft) -> None:
    """Take `.module` off wrapped models."""
    context = draft.context
    for node in draft.nodes():
        if not isinstance(node, ast.Attribute) or node.attr not in ("module", "_fsdp_wrapped_module"):
            continue
        if node in draft.taken or any(
            isinstance(one, ast.Call) and one in draft.taken for one in context.ancestors(node)
        ):
            continue
        # Nothing but FSDP1's wrapper has `_fsdp_wrapped_module`, and nothing will.
        holds = draft.holds(node.value, "module") if node.attr == "module" else Holds.ALWAYS
        if (holds is not Holds.ALWAYS or node.attr != "module") and _is_guarded(draft, node):
            continue
        if holds is Holds.ALWAYS and isinstance(node.ctx, ast.Load):
            draft.edit(draft.span(node.value)[1], draft.span(node)[1], "")
            draft.taken.add(node)
            draft.rewritten(INNER_CODE, node, f".{node.attr} is gone: the sharded model is the module itself")
        elif holds and isinstance(node.ctx, ast.Load):
            draft.replace(node, model_text(draft, node))
            draft.rewritten(INNER_CODE, node, ".module is taken where there is one: DDP has it, FSDP2 does not")


def model_text(draft: FileDraft, node: ast.expr) -> str:
    """A model, as text, without the `.module` of FSDP1's wrapper."""
    if not isinstance(node, ast.Attribute) or node.attr != "module" or not draft.holds(node.value):
        return draft.source(node)
    model = draft.source(node.value)
    if draft.holds(node.value) is Holds.ALWAYS:
        return model
    return f'({model}.module if hasattr({model}, "module") else {model})'


def _is_guarded(draft: FileDraft, node: ast.Attribute) -> bool:
    """Whether code around asks first: by hasattr or by the type of another wrapper, not by FSDP1's own."""
    around = draft.context.ancestors(node)
    tests = [one.test for one in around if isinstance(one, ast.If | ast.IfExp | ast.While)]
    asked = [one for test in tests for one in ast.walk(test) if isinstance(one, ast.Call)]
    asked = [one for one in asked if getattr(one.func, "id", "") in ("hasattr", "isinstance", "getattr")]
    return any(not draft.program.checks_fsdp(draft.context, one) for one in asked)


_SCALER = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"


def rewrite_scalers(draft: FileDraft) -> None:
    """Rewrite every use of the class."""
    for node in draft.nodes():
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load) or node in draft.taken:
            continue
        parent = draft.context.parents[node]
        if draft.context.origins(node) != {_SCALER} or isinstance(parent, ast.Attribute):
            continue
        is_call, name = isinstance(parent, ast.Call) and parent.func is node, "torch.amp.GradScaler"
        is_own = is_call and (_ignores(draft.program) or _is_low(draft.program) or shards_in_groups(draft.program))
        draft.replace(node, draft.helper("_GradScaler") if is_own else f"{draft.name('torch')}.amp.GradScaler")
        if is_call:
            listed = read_arguments(draft.context, parent)  # pyrefly: ignore
            for argument in listed.arguments:
                argument.is_dropped = argument.name == "process_group" and not is_own
            for first in listed.arguments[:1]:
                is_text = isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
                if not first.name and not is_text and isinstance(first.value, ast.Constant | ast.BinOp):
                    listed.rename(first, "init_scale")  # torch's first argument was the scale once
            draft.edits += listed.edits()
        own = "a torch.amp.GradScaler that takes whole and float16 gradients too, and agrees over all ranks"
        draft.rewritten("SW122", node, f"ShardedGradScaler became {own if is_own else name}")
    for call in draft.context.calls_to("torch.amp.GradScaler", "torch.cuda.amp.GradScaler"):
        if _ignores(draft.program) and _names_ignored(draft.program) and call not in draft.emitted:
            message = "unscale_() raises where some gradients are whole, of ignored parameters, beside DTensors"
            draft.undecided(
                "SW122", call, message, "one optimizer and scaler for each kind, or shardwise.fsdp1's ShardedGradScaler"
            )


RESHARD_CODE = "SW138"
TAKES = ("parameters", "named_parameters")


def rewrite_after_forward(draft: FileDraft) -> None:
    """Reshard where a forward has left the root's parameters unsharded and the shards are wanted."""
    for call in draft.calls():
        model = clipped = _clipped_after_forward(draft, call)
        if model is None and call not in draft.taken:
            model = _rebuilt_for(draft, call) or _cleared_after_forward(draft, call) or _switched(draft, call)
        statement = draft.context.statement(call)
        if model is None or not draft.starts_line(statement):
            continue
        draft.insert_before(statement, [f"{draft.helper('_reshard')}({draft.source(model)})"])
        message = "a forward without backward leaves the root unsharded: it is resharded first, as the shards are meant"
        later = "; the next forward uses the updated root, where FSDP1's used the values from before the step"
        draft.rewritten(RESHARD_CODE, call, message + (later if clipped is not None else ""))


_IDLE = {*dir(builtins), "train", "to", "parameters", "named_parameters", "requires_grad_", "info", "append", "cuda"}
_IDLE |= {"state_dict", "load_state_dict", "modules", "named_modules", "children", "numel", "watch", "barrier"}
"""What does not run a model that it is given or called on."""
_RUNS_NOT = re.compile(
    r"wrap|shard|fsdp|checkpoint|optim|sched|count|freeze|save|load|resume|build|make|create|log|print"
)


def _rebuilt_for(draft: FileDraft, call: ast.Call) -> ast.expr | None:
    """The model of an optimizer that is built where the model may have run: in a loop, or after it was handed on."""
    is_known = any(one.startswith("torch.optim.") for one in draft.context.origins(call.func))
    if not is_known and not makes_optimizer(last_name(call.func)):
        return None
    methods = [one.func for one in calls_in(call)]
    taken = [one.value for one in methods if isinstance(one, ast.Attribute) and one.attr in TAKES]
    held = [one for one in [*taken, *given_to(call)] if isinstance(one, ast.Name | ast.Attribute) and draft.holds(one)]
    return held[0] if held and (_is_repeated(draft, call) or _has_run(draft, call, held[0])) else None


def _is_repeated(draft: FileDraft, node: ast.AST) -> bool:
    """Whether code is in a loop that shards no models."""
    loops = [one for one in draft.context.ancestors(node) if isinstance(one, ast.For | ast.While)]
    return bool(loops) and {node for loop in loops for node in ast.walk(loop)}.isdisjoint(draft.sharded.constructors)


def _switched(draft: FileDraft, call: ast.Call) -> ast.expr | None:
    """The model whose parameters get another `requires_grad` where it may have run: a forward asks the shards."""
    match call.func:
        case ast.Attribute(attr="requires_grad_", value=model) if draft.holds(model):
            place = call
        case ast.Attribute(attr=name, value=model) if name in TAKES and draft.holds(model):
            place = draft.context.parents[call]
            inside = [one for one in ast.walk(place) if isinstance(one, ast.Attribute)]
            is_set = any(one.attr == "requires_grad" and isinstance(one.ctx, ast.Store) for one in inside)
            if not isinstance(place, ast.For) or not (is_set or any(one.attr == "requires_grad_" for one in inside)):
                return None
        case _:
            return None
    home = draft.context.enclosing_function(place)
    makes = any(draft.context.enclosing_function(one) is home for one in draft.sharded.constructors)
    may_run = not makes and isinstance(home, Function) and not _SETS_UP.search(home.name)
    return model if may_run or _is_repeated(draft, place) or _has_run(draft, call, model) else None


_SETS_UP = re.compile(r"init|set_?up|wrap|shard|fsdp|build|make|create|load|prepare|config|main", re.IGNORECASE)
"""Names of functions that run before the models do."""


def _clipped_after_forward(draft: FileDraft, call: ast.Call) -> ast.expr | None:
    """The model whose gradients are clipped where it may have run after a backward, as in an evaluation."""
    match call:
        case ast.Call(func=ast.Attribute(attr="clip_grad_norm_", value=model)) if draft.holds(model):
            if draft.target == "shardwise":
                return None  # sw.clip_grad_norm_ is given the model and reshards it
        case ast.Call(args=[ast.Call(func=ast.Attribute(attr="parameters", value=model)), *_]) if draft.holds(model):
            if not draft.context.is_any(call.func, _FUNCTIONS):
                return None
        case _:
            return None
    before = _calls_before(draft, call)
    backward = [one.lineno for one in before if "backward" in last_name(one.func)]
    if backward:
        return model if _has_run(draft, call, model, min(backward)) else None
    own = [one for one in before if isinstance(one.func, ast.Attribute) and draft.source(one.func.value) == "self"]
    own = [one for one in own if draft.sharded.has_own(one.func.value, last_name(one.func))]  # pyrefly: ignore
    return model if any(_may_run(draft.context, one) for one in own) else None


def _calls_before(draft: FileDraft, place: ast.Call) -> list[ast.Call]:
    """The calls above a place in the function around it."""
    home = draft.context.enclosing_function(place)
    above = [call for call in draft.calls() if call.lineno < place.lineno]
    return [call for call in above if draft.context.enclosing_function(call) is home]


def _has_run(draft: FileDraft, place: ast.Call, model: ast.expr, since: int = 0) -> bool:
    """Whether the model may have run before a place, in the function around: called, or handed to a function."""
    context = draft.context
    for call in _calls_before(draft, place):
        if call.lineno <= since or call in draft.taken:
            continue
        is_itself = draft.source(call.func) == draft.source(model)
        is_handed = _may_run(context, call) and any(map(draft.sharded.has_inside, given_to(call)))
        if (is_itself or is_handed) and not context.are_exclusive(call, place):
            return True
    return False


def _may_run(context: FileContext, call: ast.Call) -> bool:
    """Whether a call may run the models that it is given, as far as its name shows."""
    name, is_torchs = last_name(call.func), any(one.startswith("torch.") for one in context.origins(call.func))
    is_class = name[:1].isupper() or name in context.classes
    return not is_class and not is_torchs and name not in _IDLE and not _RUNS_NOT.search(name)


def _cleared_after_forward(draft: FileDraft, call: ast.Call) -> ast.expr | None:
    """The model of `model.zero_grad()` between a forward and its backward."""
    match call.func:
        case ast.Attribute(attr="zero_grad", value=model) if draft.holds(model):
            block = draft.context.block(statement := draft.context.statement(call))
            place, text = block.index(statement), draft.source(model)
            runs = any(draft.source(one.func) == text for before in block[:place] for one in calls_in(before))
            trains = any(last_name(one.func) == "backward" for after in block[place:] for one in calls_in(after))
            return model if runs and trains else None
    return None

"""Calls on an FSDP model other than its constructor: accumulation, clipping, forward, parameters."""

from __future__ import annotations

import ast
import re

from shardwise.fsdp1.codemod.constructors import ArgumentList, WrittenArgument, read_arguments
from shardwise.fsdp1.codemod.draft import KEEP_FSDP1_API, FileDraft
from shardwise.fsdp1.codemod.program import Program, is_constant
from shardwise.fsdp1.codemod.sharded import FLAT, Holds, Sharded
from shardwise.source.syntax import FSDP1, FileContext, Function, argument_of, given_to

ACCUMULATION_CODE = "SW121"
_OTHERS = re.compile(r"^self$|^cls$|accelerator|fabric|plugin|strategy", re.IGNORECASE)


def rewrite_no_sync(draft: FileDraft, program: Program) -> None:
    """Rewrite `model.no_sync()` and `model.no_sync` passed on uncalled."""
    context, sharded = draft.context, program.sharded(draft.context)
    moved: set[str] = set()
    for node in draft.nodes():
        if not (isinstance(node, ast.Attribute) and node.attr == "no_sync" and isinstance(node.ctx, ast.Load)):
            continue
        if sharded.holds(node.value) is Holds.NEVER and not _may_be_wrapped(draft, node.value):
            continue
        parent, model = context.parents[node], context.source(node.value)
        if isinstance(parent, ast.Call) and parent.func is node and (parent.args or parent.keywords):
            continue  # of a library that is handed the model
        helper = draft.helper("_no_sync")
        if isinstance(parent, ast.Call) and parent.func is node:
            draft.replace(parent, f"{helper}({model})")
        else:
            draft.name("functools")
            draft.replace(node, f"functools.partial({helper}, {model})")
        draft.taken.update((node, parent))
        moved.add(model)
        draft.rewritten(
            ACCUMULATION_CODE,
            node,
            "no_sync became a context that switches the reduction of gradients off and on again",
        )
    _rewrite_questions(draft, moved)


def _rewrite_questions(draft: FileDraft, moved: set[str]) -> None:
    """`hasattr(model, "no_sync")`, where that is asked before: FSDP2's models have none and can do it."""
    context = draft.context
    for call in draft.calls():
        if not (isinstance(call.func, ast.Name) and call.func.id == "hasattr" and len(call.args) == 2):
            continue
        model = context.source(call.args[0])
        if model in moved and isinstance(call.args[1], ast.Constant) and call.args[1].value == "no_sync":
            draft.replace(call, f"({context.source(call)} or isinstance({model}, {draft.name('FSDPModule')}))")
            draft.rewritten(ACCUMULATION_CODE, call, "the question for no_sync is also answered for FSDP2's models")


def _may_be_wrapped(draft: FileDraft, node: ast.expr) -> bool:
    """A model from elsewhere, in a file that has to do with FSDP: the emitted helper takes any that has `no_sync`."""
    context = draft.context
    if "torch.distributed.fsdp" not in context.text or not isinstance(node, ast.Name | ast.Attribute):
        return False
    last = context.source(node).rpartition(".")[2]
    return _OTHERS.search(last) is None and not context.origins(node)


CLIPPING_CODE = "SW120"
_ARGUMENTS = {"max_norm", "norm_type", "error_if_nonfinite"}
"""Those that shardwise's function has as well."""
_OTHER_CLIPPING = re.compile(r"self$|super|utils|accelerator|fabric|engine|trainer|strategy|plugin|optim|scaler|clip")
_FUNCTIONS = {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_norm"}


def rewrite_clipping(draft: FileDraft, program: Program) -> None:
    """Rewrite the method, and the use of torch's result where it is a sharded number now."""
    context, sharded = draft.context, program.sharded(draft.context)
    for call in draft.calls():
        if call in draft.taken or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr == "clip_grad_norm_" and _is_model(draft, call, sharded.holds(call.func.value)):
            _method(draft, call, call.func)
        elif context.is_any(call.func, _FUNCTIONS):
            _function(draft, call, sharded)


def _is_model(draft: FileDraft, call: ast.Call, holds: Holds) -> bool:
    """Plain modules have no such method; accelerators and engines of other libraries do, and take the parameters."""
    if holds is not Holds.NEVER:
        return True
    context = draft.context
    last = context.source(call.func.value).rpartition(".")[2].lower()  # pyrefly: ignore[missing-attribute]
    if last.endswith(("model", "module", "net")) or last == "fsdp":
        return True
    first = context.source(call.args[0]) if call.args else ""
    given = first + "".join(keyword.arg or "" for keyword in call.keywords)
    is_other = _OTHER_CLIPPING.search(last) is not None or bool(context.origins(call.func))
    return "fsdp" in context.text.lower() and "param" not in given and not is_other


def _method(draft: FileDraft, call: ast.Call, func: ast.Attribute) -> None:
    context = draft.context
    model = context.source(func.value)
    start, end = context.positions.span(func)
    if draft.target == "shardwise":
        draft.name("sw")
        draft.edit(start, end, "sw.clip_grad_norm_")
        draft.edit_after_open(call, f"{model}, ")
    else:
        draft.name("torch")
        is_used = not isinstance(context.parents[call], ast.Expr)
        name = draft.helper("_clip_grad_norm") if is_used else "torch.nn.utils.clip_grad_norm_"
        draft.edit(start, end, name)
        draft.edit_after_open(call, f"{model}.parameters(), ")
    draft.taken.update((call, func, func.value))
    draft.rewritten(
        CLIPPING_CODE, call, "the method became a function of the parameters; its norm is over all ranks, as before"
    )


def _function(draft: FileDraft, call: ast.Call, sharded: object) -> None:
    """FSDP1 clipped by the norm of each rank's own part; FSDP2's is over all ranks, and its result is sharded."""
    context = draft.context
    first = call.args[0] if call.args else None
    if not (isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters"):
        return
    holds = sharded.holds(first.func.value)  # pyrefly: ignore[missing-attribute]
    if holds is Holds.NEVER:
        return
    draft.reported(
        CLIPPING_CODE,
        call,
        "FSDP1 clipped each rank by the norm of its own part here; FSDP2 clips by the norm over all ranks",
        "nothing, unless the old behaviour was meant",
    )
    if isinstance(context.parents[call], ast.Expr):
        return
    known = len(call.args) <= 3 and {one.arg for one in call.keywords} <= {
        "max_norm",
        "norm_type",
        "error_if_nonfinite",
    }
    if draft.target == "shardwise" and known:
        draft.name("sw")
        draft.replace(call.func, "sw.clip_grad_norm_")
    else:
        draft.replace(call.func, draft.helper("_clip_grad_norm"))
    draft.taken.add(call)


FORWARD_CALLS_CODE = "SW136"


def rewrite_forward_calls(draft: FileDraft, program: Program) -> None:
    """Call the model itself; for a part of it, say what happens."""
    context, sharded = draft.context, program.sharded(draft.context)
    for call in draft.calls():
        func = call.func
        if call in draft.taken or not (isinstance(func, ast.Attribute) and func.attr == "forward"):
            continue
        if sharded.holds(func.value) is Holds.ALWAYS:
            draft.edit(context.positions.span(func.value)[1], context.positions.span(func)[1], "")
            draft.taken.add(call)
            draft.rewritten(
                FORWARD_CALLS_CODE, call, "the model is called itself: .forward() goes past FSDP2's gathering"
            )
        elif _is_part(sharded, func.value):
            draft.undecided(
                FORWARD_CALLS_CODE,
                call,
                "the forward of a part of the sharded model is called: it goes past FSDP2's gathering",
                "call the part itself; if it is no unit of its own, model.unshard() before",
            )


def _is_part(sharded: Sharded, node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if isinstance(node, ast.Name | ast.Attribute) and sharded.holds(node) is Holds.ALWAYS:
            return True
    return False


FULL_PARAMS_CODE = "SW124"
_PARAMETERS = ("module", "recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
_FORWARD = {"forward", "generate", "sample", "encode", "decode", "predict", "inference", "infer", "evaluate"}
_FORWARD |= {"generate_text", "chat", "beam_search", "greedy_search"}


def rewrite_full_params(draft: FileDraft, program: Program) -> None:
    """Rewrite each `with FSDP.summon_full_params(model, ...)`."""
    sharded = program.sharded(draft.context)
    for call in draft.calls():
        if call in draft.taken or not isinstance(call.func, ast.Attribute) or call.func.attr != "summon_full_params":
            continue
        is_static = draft.context.origins(call.func) == {f"{FSDP1}.summon_full_params"}
        if is_static or sharded.holds(call.func.value) is not Holds.NEVER:
            _rewrite(draft, call, is_static, sharded)


def _rewrite(draft: FileDraft, call: ast.Call, is_static: bool, sharded: Sharded) -> None:
    context = draft.context
    draft.taken.update(ast.walk(call.func))
    try:
        listed = read_arguments(context, call)
    except ValueError:
        listed = ArgumentList(context, call, [], 0)
    given = {argument.name or _PARAMETERS[index]: argument for index, argument in enumerate(listed.arguments[:6])}
    body = _body(draft, call)
    if "module" not in given or set(given) - set(_PARAMETERS) or "with_grads" in given or body is None:
        _leave(draft, call, "what the parameters are gathered for cannot be read here")
        return
    model = listed.text(given["module"])
    if _runs(context.source, body, model):
        if _is_on(given.get("writeback"), default=True) and _writes(body):
            _leave(draft, call, "the block both runs the model and changes its parameters")
            return
        _run_forward(draft, call, listed, given)
        return
    if "offload_to_cpu" in given and not is_constant(given["offload_to_cpu"].value, False):
        listed.drop(given["offload_to_cpu"])
    _swap(draft, call, listed, given)


def _body(draft: FileDraft, call: ast.Call) -> list[ast.stmt] | None:
    """The statements under the context, where it is entered at once."""
    for parent in draft.context.ancestors(call):
        if isinstance(parent, ast.With | ast.AsyncWith):
            return parent.body if any(call in ast.walk(item.context_expr) for item in parent.items) else None
        if isinstance(parent, ast.stmt):
            return None
    return None


def _runs(source: object, body: list[ast.stmt], model: str) -> bool:
    """Whether the block calls the model, or a method that does."""
    for statement in body:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            owner, _, method = name.rpartition(".")
            if name in (model, f"{model}.module") or (owner.startswith(model.split(".")[0]) and method in _FORWARD):
                return True
            if method in ("generate", "sample"):
                return True
    return False


def _writes(body: list[ast.stmt]) -> bool:
    return any(
        isinstance(node, ast.Attribute) and (node.attr.endswith("_") and not node.attr.endswith("__"))
        for statement in body
        for node in ast.walk(statement)
    )


def _is_on(argument: WrittenArgument | None, *, default: bool) -> bool:
    return default if argument is None else not is_constant(argument.value, False)


def _run_forward(draft: FileDraft, call: ast.Call, listed: ArgumentList, given: dict[str, WrittenArgument]) -> None:
    """A forward gathers what it needs by itself; what runs outside of it finds the root gathered."""
    for name, argument in given.items():
        if name not in ("module", "recurse"):
            listed.drop(argument)
        elif argument.name == "" and name == "recurse":
            listed.rename(argument, "recurse")
    draft.replace(call.func, draft.helper("_gathered"))
    draft.edits += listed.edits()
    draft.rewritten(
        FULL_PARAMS_CODE, call, "the model runs in this block: its units are gathered, in the dtype they compute in"
    )


def _swap(draft: FileDraft, call: ast.Call, listed: ArgumentList, given: dict[str, WrittenArgument]) -> None:
    for name, argument in given.items():
        if argument.name == "" and name != "module":
            listed.rename(argument, name)
    if "writeback" not in given:
        listed.add("writeback=True")  # FSDP1's default
    if "offload_to_cpu" in given:
        listed.drop(given["offload_to_cpu"])
    if draft.target == "shardwise":
        draft.name("sw")
        draft.replace(call.func, "sw.full_params")
    else:
        draft.replace(call.func, draft.helper("_full_params"))
    draft.edits += listed.edits()
    draft.rewritten(FULL_PARAMS_CODE, call, "the parameters stand in full, as plain tensors, until the block ends")


def _leave(draft: FileDraft, call: ast.Call, why: str) -> None:
    draft.undecided(
        FULL_PARAMS_CODE,
        call,
        f"summon_full_params is left alone: {why}",
        "to read: parameter.full_tensor() or a full state dict; to run the model: nothing, it gathers by itself; "
        "to change parameters: change the DTensors; or sw.full_params(model)",
    )


HANDING_OUT_CODE = "SW132"
_SAYS = re.compile(r"fsdp", re.IGNORECASE)
_PRIVATE = "torch.distributed.fsdp._"


def report_handed_out(draft: FileDraft, program: Program) -> None:
    """Note each call that hands a wrapped model to a function made for FSDP1, by what it does or is called."""
    context, sharded = draft.context, program.sharded(draft.context)
    for call in draft.calls():
        name = context.source(call.func).rpartition(".")[2]
        if call in draft.taken or not _SAYS.search(name) or sharded.holds(call.func) is not Holds.NEVER:
            continue
        models = [one for one in given_to(call) if isinstance(one, ast.Name | ast.Attribute)]
        if not any(sharded.holds(one) is Holds.ALWAYS for one in models) or _is_torchs(context, call):
            continue
        found = program.function(context, call.func)
        if (found is None and not _is_foreign(context, program, call)) or (found and not _knows_internals(*found)):
            continue  # rewritten where it is
        why = "works on FSDP1's internals" if found is not None else "is of a file not given, and named after FSDP"
        draft.undecided(
            HANDING_OUT_CODE,
            call,
            f"{name} is handed the sharded model; it {why}",
            f"see whether it takes FSDP2's models, or leave the call out; or {KEEP_FSDP1_API}",
        )


def _is_foreign(context: FileContext, program: Program, call: ast.Call) -> bool:
    """Whether a function is imported from a module that is not among the files given."""
    for origin in context.origins(call.func, raw=True):
        parts = origin.split(".")
        modules = [".".join(parts[:end]) for end in range(1, len(parts))]
        if not origin.startswith(".") and not any(program.find_module(context, one) for one in modules):
            return True
    return False


def _is_torchs(context: FileContext, call: ast.Call) -> bool:
    return any(origin.startswith(("torch.", "shardwise.")) for origin in context.origins(call.func, raw=True))


def _knows_internals(context: FileContext, function: Function) -> bool:
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name | ast.Attribute)]
    if any(isinstance(node, ast.Attribute) and node.attr in FLAT for node in names):
        return True
    return any(origin.startswith(_PRIVATE) for node in names for origin in context.origins(node, raw=True))


INNER_MODULES_CODE = "SW126"
_NAMES = ("module", "_fsdp_wrapped_module")


def rewrite_inner_modules(draft: FileDraft, program: Program) -> None:
    """Take `.module` off wrapped models."""
    context, sharded = draft.context, program.sharded(draft.context)
    for node in draft.nodes():
        if not (isinstance(node, ast.Attribute) and node.attr in _NAMES) or node in draft.taken:
            continue
        if any(one in draft.taken for one in context.ancestors(node) if isinstance(one, ast.Call)):
            continue
        holds = sharded.holds(node.value)
        if node.attr == "_fsdp_wrapped_module":  # nothing else has it, and nothing will
            holds = Holds.ALWAYS if not _is_guarded(context, node, program) else Holds.NEVER
        if holds is Holds.NEVER or (holds is Holds.SOMETIMES and _is_guarded(context, node, program)):
            continue
        model = context.source(node.value)
        if holds is Holds.ALWAYS:
            draft.edit(context.positions.span(node.value)[1], context.positions.span(node)[1], "")
            draft.taken.add(node)
            draft.rewritten(INNER_MODULES_CODE, node, f".{node.attr} is gone: the sharded model is the module itself")
        elif isinstance(node.ctx, ast.Load):
            draft.replace(node, f'({model}.module if hasattr({model}, "module") else {model})')
            draft.rewritten(INNER_MODULES_CODE, node, ".module is taken where there is one: DDP has it, FSDP2 does not")


def _is_guarded(context: FileContext, node: ast.Attribute, program: Program) -> bool:
    """Whether code around asks first: by hasattr or by the type of another wrapper, not by FSDP1's own."""
    for parent in context.ancestors(node):
        if isinstance(parent, ast.If | ast.IfExp | ast.While) and any(
            isinstance(one, ast.Call)
            and isinstance(one.func, ast.Name)
            and one.func.id in ("hasattr", "isinstance", "getattr")
            and not program.names_fsdp(context, one)
            for one in ast.walk(parent.test)
        ):
            return True
    return False


OFFLOADING_CODE = "SW129"


def rewrite_backends(draft: FileDraft, program: Program) -> None:
    """Add gloo to `init_process_group("nccl")` where the program offloads."""
    context = draft.context
    if not _offloads(draft, program):
        return
    for call in context.calls_to("torch.distributed.init_process_group"):
        backend = argument_of(call, 0, "backend")
        if isinstance(backend, ast.Constant) and backend.value == "nccl":
            draft.replace(backend, '"cpu:gloo,cuda:nccl"')
            draft.rewritten(OFFLOADING_CODE, call, "gloo joins nccl: offloaded gradients are on the CPU")
        elif backend is not None and not isinstance(backend, ast.Constant):
            draft.reported(
                OFFLOADING_CODE,
                call,
                "offloaded gradients are on the CPU, where NCCL cannot reduce them",
                'use "cpu:gloo,cuda:nccl" where the backend is "nccl"',
            )


def _offloads(draft: FileDraft, program: Program) -> bool:
    """Whether this file, or one that it belongs to, asks FSDP to offload."""
    return (
        "CPUOffloadPolicy" in draft.names
        or "_offload_policy" in draft.helpers
        or ("offload=" in draft.context.text and ("CPUOffload(" in draft.context.text))
    )


SCALING_CODE = "SW122"
_NAME = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"


def rewrite_scalers(draft: FileDraft, program: Program) -> None:
    """Rewrite every use of the class."""
    context = draft.context
    for node in draft.nodes():
        if not isinstance(node, ast.Name | ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if node in draft.taken or context.origins(node) != {_NAME} or isinstance(context.parents[node], ast.Attribute):
            continue
        if _is_alias(node, context.parents[node]):
            continue
        draft.name("torch")
        draft.replace(node, "torch.amp.GradScaler")
        parent = context.parents[node]
        if isinstance(parent, ast.Call) and parent.func is node:
            _arguments(draft, parent)
        draft.rewritten(SCALING_CODE, node, "ShardedGradScaler became torch.amp.GradScaler")


def _is_alias(node: ast.expr, parent: ast.AST) -> bool:
    """A variable that holds a scaler resolves to the class by its assignment only where that is the class itself."""
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and isinstance(parent, ast.Assign)


def _arguments(draft: FileDraft, call: ast.Call) -> None:
    listed = read_arguments(draft.context, call)
    for argument in listed.arguments:
        if argument.name == "process_group":
            listed.drop(argument)
    first = listed.arguments[0] if listed.arguments else None
    is_number = first is not None and isinstance(first.value, ast.Constant | ast.BinOp)
    if first is not None and not first.name and is_number and not isinstance(getattr(first.value, "value", 0), str):
        listed.rename(first, "init_scale")  # torch's first argument was the scale once
    draft.edits += listed.edits()


SHARDED_NUMBERS_CODE = "SW135"
_LISTS = ("parameters", "named_parameters")
_COUNTS = ("numel", "nelement")
_REDUCTIONS = {f"torch.distributed.{name}" for name in ("all_reduce", "reduce", "all_gather", "reduce_scatter")}
_LOOPS = ast.For | ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


def report_numbers(draft: FileDraft, program: Program) -> None:
    """Note loops over a sharded model's parameters that count their elements or take norms of their gradients."""
    _report_reductions(draft, program)
    sharded = program.sharded(draft.context)
    for loop in draft.nodes():
        if not isinstance(loop, _LOOPS):
            continue
        iterated = [loop.iter] if isinstance(loop, ast.For) else [one.iter for one in loop.generators]
        models = [one.func.value for one in iterated if _lists_parameters(one)]  # pyrefly: ignore
        if not any(sharded.holds(one) is Holds.ALWAYS for one in models):
            continue
        if any(isinstance(one, ast.Attribute) and one.attr in _COUNTS for one in ast.walk(loop)):
            draft.reported(
                SHARDED_NUMBERS_CODE,
                loop,
                "numel() of a sharded parameter counts the whole of it now; with FSDP1 it counted this rank's part",
                "do not multiply the sum by the number of ranks, nor add it up over them",
            )
        if any(_is_norm(one) for one in ast.walk(loop)):
            draft.reported(
                SHARDED_NUMBERS_CODE,
                loop,
                "the norm of a sharded gradient is over all ranks now, and a DTensor",
                "take .full_tensor() of it, and do not add it up over ranks again",
            )


def _report_reductions(draft: FileDraft, program: Program) -> None:
    """Note branches for FSDP1's models that add something up over ranks."""
    context = draft.context
    for branch in draft.nodes():
        if not isinstance(branch, ast.If) or not any(program.names_fsdp(context, one) for one in ast.walk(branch.test)):
            continue
        calls = [one for statement in branch.body for one in ast.walk(statement) if isinstance(one, ast.Call)]
        added = [one for one in calls if context.is_any(one.func, _REDUCTIONS)]
        if added:
            draft.reported(
                SHARDED_NUMBERS_CODE,
                added[0],
                "what FSDP1's models had in parts is added up over ranks here; numbers from DTensors are of the whole",
                "leave the reduction out if it is of sizes or norms of parameters and gradients",
            )


def _lists_parameters(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _LISTS


def _is_norm(node: ast.AST) -> bool:
    """`p.grad.norm()`, `torch.norm(p.grad)` and the like."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "norm" in node.func.attr):
        return False
    return any(isinstance(one, ast.Attribute) and one.attr == "grad" for one in ast.walk(node))

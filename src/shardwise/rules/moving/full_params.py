"""`FSDP.summon_full_params(...)`: by what the block does with the parameters, reading, writing or a forward."""

from __future__ import annotations

import ast

from shardwise.rules.moving.arguments import Argument, ArgumentList, read_arguments
from shardwise.rules.moving.draft import Draft
from shardwise.rules.moving.program import Program
from shardwise.rules.moving.sharded import Holds, Sharded
from shardwise.rules.moving.values import is_constant
from shardwise.rules.names import FSDP1

CODE = "SW124"
_PARAMETERS = ("module", "recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
_FORWARD = {"forward", "generate", "sample", "encode", "decode", "predict", "inference", "infer", "evaluate"}
_FORWARD |= {"generate_text", "chat", "beam_search", "greedy_search"}


def rewrite_full_params(draft: Draft, program: Program) -> None:
    """Rewrite each `with FSDP.summon_full_params(model, ...)`."""
    sharded = program.sharded(draft.context)
    for call in draft.calls():
        if call in draft.taken or not isinstance(call.func, ast.Attribute) or call.func.attr != "summon_full_params":
            continue
        is_static = draft.context.origins(call.func) == {f"{FSDP1}.summon_full_params"}
        if is_static or sharded.holds(call.func.value) is not Holds.NEVER:
            _rewrite(draft, call, is_static, sharded)


def _rewrite(draft: Draft, call: ast.Call, is_static: bool, sharded: Sharded) -> None:
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


def _body(draft: Draft, call: ast.Call) -> list[ast.stmt] | None:
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


def _is_on(argument: Argument | None, *, default: bool) -> bool:
    return default if argument is None else not is_constant(argument.value, False)


def _run_forward(draft: Draft, call: ast.Call, listed: ArgumentList, given: dict[str, Argument]) -> None:
    """A forward gathers what it needs by itself; what runs outside of it finds the root gathered."""
    for name, argument in given.items():
        if name not in ("module", "recurse"):
            listed.drop(argument)
        elif argument.name == "" and name == "recurse":
            listed.rename(argument, "recurse")
    draft.replace(call.func, draft.helper("_gathered"))
    draft.edits += listed.edits()
    draft.rewritten(CODE, call, "the model runs in this block: its units are gathered, in the dtype they compute in")


def _swap(draft: Draft, call: ast.Call, listed: ArgumentList, given: dict[str, Argument]) -> None:
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
    draft.rewritten(CODE, call, "the parameters stand in full, as plain tensors, until the block ends")


def _leave(draft: Draft, call: ast.Call, why: str) -> None:
    draft.undecided(
        CODE,
        call,
        f"summon_full_params is left alone: {why}",
        "to read: parameter.full_tensor() or a full state dict; to run the model: nothing, it gathers by itself; "
        "to change parameters: change the DTensors; or sw.full_params(model)",
    )

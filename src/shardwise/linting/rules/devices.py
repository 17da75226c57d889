"""Rules about devices: the current device, CPU offload, and models built on the meta device."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source import facts
from shardwise.source.edits import change
from shardwise.source.syntax import FULLY_SHARD, FileContext, argument_of, calls_in, last_name
from shardwise.source.trace import Trace
from shardwise.source.values import Constant, ObjectRef, Param, ProgramEvent, StateDict, Value, nested, owners_of_params

_INIT = "torch.distributed.init_process_group"
_OFFLOAD = "torch.distributed.fsdp.CPUOffloadPolicy"
_INIT_MESH = "torch.distributed.device_mesh.init_device_mesh"
_RANK = re.compile(r"^(local_|global_)?rank$")
_SETS_DEVICE = frozenset({"set_device", "set_device_index", "init_distributed"})


@rule("SW220", fix='init_process_group("cpu:gloo,cuda:nccl")', safety=Safety.UNSAFE)
def offload_with_nccl_only(context: LintContext) -> Iterator[Hit]:
    """CPU offload needs a process group that can reduce CPU tensors.

    Why: offloaded gradients are on the CPU, and NCCL cannot run collectives on them, such as those of clipping.
    Symptom: `No backend type associated with device type cpu`.
    """
    for _, event in context.events_of(_INIT) if any(True for _ in context.events_of(_OFFLOAD)) else ():
        if event.argument(0, "backend") in ({Constant("nccl")}, {Constant("cuda:nccl")}):
            literal = argument_of(event.node, 0, "backend") if isinstance(event.node, ast.Call) else None
            span = context.file.positions.span(literal) if isinstance(literal, ast.Constant) else None
            edits = (change(*span, '"cpu:gloo,cuda:nccl"'),) if span else ()
            message = "parameters are offloaded to the CPU, but this process group has only NCCL"
            yield Hit(event.node, message, edits=edits)


@rule(
    "SW235", Severity.WARNING, fix='torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) right after init_process_group'
)
def no_device_set(context: LintContext) -> Iterator[Hit]:
    """Without `torch.cuda.set_device`, FSDP puts the parameters of every local rank on GPU 0.

    Why: `fully_shard` uses the current device. FSDP1 had an argument `device_id`, and migrated code often lacks
    `set_device`. A mesh sets the device of a rank only if that rank has not used a GPU before.
    """
    names = {last_name(call.func) for call in context.file.calls}
    text = context.file.text
    if names & _SETS_DEVICE or "CUDA_VISIBLE_DEVICES" in text:
        return
    for trace in context.traces:
        inits = trace.calls_to(_INIT)
        meshes = trace.calls_to(_INIT_MESH, FULLY_SHARD)  # both set the device of a rank that has not used a GPU
        if not inits or not any(event.is_call_to(FULLY_SHARD) for event in meshes) or "device_id" in inits[0].keywords:
            continue
        moved = next((event for event in trace.events[: meshes[0].order] if _moves_to_gpu(event)), None)
        if moved is not None:
            message = "no device is set for this rank, so FSDP puts every local rank's parameters on GPU 0"
            yield Hit(moved.node, message)
            continue
        uses_nccl = Constant("nccl") in inits[0].argument(0, "backend")
        if uses_nccl and "init_device_mesh" not in names and "local_rank" not in text.lower():
            message = "no device is set for this rank; it depends on the launcher which GPU it gets"
            yield Hit(inits[0].node, message)


def _moves_to_gpu(event: ProgramEvent) -> bool:
    """Whether an event moves something to a GPU: `.cuda()`, `.to("cuda")`, `.to(f"cuda:{rank}")`, `.to(rank)`."""
    if event.is_store or event.origins or event.method != "to" or not event.args:
        return event.method == "cuda" and not event.is_store and not event.origins
    given = next(iter(getattr(event.node, "args", [])), None)
    is_cuda = any(facts.is_device(value, "cuda") for value in event.args[0]) or facts.is_device_text(given, "cuda")
    return is_cuda or _RANK.match(getattr(given, "id", "")) is not None


@rule("SW236", fix='model.to_empty(device="cpu")')
def offload_materialized_on_gpu(context: LintContext) -> Iterator[Hit]:
    """With CPU offload, parameters are materialized on the CPU.

    Symptom: `FSDP parameters should be materialized on CPU when enabling CPU offloading`.
    """
    for trace, event in context.events:
        device = event.argument(0, "device") if event.method == "to_empty" else ()
        if device and all(facts.is_device(value, "cuda") for value in device):
            for shard in trace.shards:
                policies = shard.event.argument(None, "offload_policy")
                is_offloaded = policies and all(_OFFLOAD in getattr(value, "origins", ()) for value in policies)
                if is_offloaded and shard.subject in event.receiver:
                    yield Hit(event.node, "parameters are offloaded, but materialized on the GPU")


# A call that receives the model may initialize it, unless it is one of these.
_METHODS = (
    "parameters named_parameters buffers named_buffers modules named_modules children named_children state_dict "
    "train eval to cuda cpu half float bfloat16 requires_grad_ zero_grad compile set_requires_gradient_sync "
    "set_is_last_backward set_reshard_after_backward set_modules_to_forward_prefetch set_modules_to_backward_prefetch "
    "to_empty forward reshard unshard backward step append extend items values keys"
)
_FUNCTIONS = (
    "print len isinstance type list tuple set enumerate zip sum any all id repr str range filter sorted reversed map "
    "getattr hasattr next iter max min"
)
_HARMLESS_METHODS, _HARMLESS_CALLS = frozenset(_METHODS.split()), frozenset(_FUNCTIONS.split())
_HARMLESS_ORIGINS = re.compile(
    r"^(torch\.(optim|compile|nn\.utils|save|distributed\.(fsdp|barrier|algorithms))|logging|wandb|tqdm"
    r"|torch\.distributed\.checkpoint\.(save|async_save|state_dict\.get_))"
)
_RESUMING = re.compile(r"resum|restore|from_checkpoint|from_ckpt|load_checkpoint|load_ckpt|checkpoint_path|ckpt_path")
_TRANSFORMERS = re.compile(r"transformers\.\w+(ForCausalLM\.from_config|ForCausalLM$|LM\.from_config)")
_LOADERS = (facts.SET_MODEL, facts.SET_BOTH, "torch.distributed.checkpoint.load")


@rule("SW209", fix="call the model's initializer after to_empty, or load a checkpoint with set_model_state_dict")
def meta_without_init(context: LintContext) -> Iterator[Hit]:
    """A model built on the meta device is trained from uninitialized memory.

    Why: `to_empty` only allocates memory. The parameters must be initialized or loaded afterwards.
    Symptom: NaN or wrong losses; without `to_empty`, an error at the first forward.
    """
    for trace in context.traces:
        for model in _sharded_on_meta(trace):
            emptied = [event for event in trace.events if event.method == "to_empty" and model in event.receiver]
            shard = next(shard.event for shard in trace.shards if trace.are_related(shard.subject, model))
            after = emptied[-1] if emptied else shard  # before it there was no memory to write to
            until = min((event.order for event, module in trace.forwards if module == model), default=len(trace.events))
            writers = [event for event in trace.events if _may_write(trace, event, model, after)]
            writers = [event for event in writers if event.order < until or event.root is not after.root]
            is_trained = any(model in optimizer.owners for optimizer in trace.optimizers)
            is_trained |= any(module == model for _, module in trace.entered)
            if any(_materializes(context.file, trace, event, model) for event in trace.events):
                continue
            if is_trained and all(_is_for_resuming(event) for event in writers):
                message = "the model is on the meta device and its parameters are never allocated or initialized"
                if emptied:
                    message = (
                        "to_empty leaves the parameters uninitialized, and nothing initializes or loads them after"
                    )
                    message += " it when nothing is resumed" if writers else " it"
                assert isinstance(model.site, ast.Call), "only calls make things on meta"
                yield Hit(emptied[-1].node if emptied else model.site, message)


def _materializes(file: FileContext, trace: Trace, event: ProgramEvent, model: ObjectRef) -> bool:
    """Whether the model or a part of it is passed to a function of the file that looks for meta tensors."""
    function = file.definition(event.node.func) if event.is_inlined and isinstance(event.node, ast.Call) else None
    given = (value for values in event.args for value in values)
    return (
        function is not None
        and any(_belongs(trace, value, model) for value in given)
        and any(getattr(node, "attr", "") == "is_meta" for node in ast.walk(function))
    )


def _is_for_resuming(event: ProgramEvent) -> bool:
    """Whether an event happens only when a checkpoint is resumed, and not in a new run."""
    texts = (f"{guard.key} {ast.unparse(guard.test)}" for guard in event.guards if guard.taken)
    return any(_RESUMING.search(text) for text in texts)


def _sharded_on_meta(trace: Trace) -> set[ObjectRef]:
    """Return models built on the meta device that are sharded as a whole or in parts."""
    owners = {shard.subject.whole for shard in trace.shards if not shard.is_automatic}
    return {one for one in owners if one.on_meta and not any(holder.on_meta for holder in trace.owners.get(one, ()))}


def _may_write(trace: Trace, event: ProgramEvent, model: ObjectRef, after: ProgramEvent) -> bool:
    """Whether an event may initialize the model: it involves the model and is not known to be harmless."""
    if event.order <= after.order and event.root is after.root:
        return False
    if event.is_inlined or any(event is optimizer.event for optimizer in trace.optimizers):
        return False
    is_own = any(_belongs(trace, value, model) for value in event.receiver)
    if event.is_store:  # `trainer.model = model` writes to the trainer
        return is_own
    given = frozenset().union(*event.args, *(entry.values for entry in event.keywords.values()))
    states = [value for value in nested(given) if isinstance(value, StateDict)]
    if not is_own and not any(_belongs(trace, value, model) for value in (*given, *states)):
        return False
    if event.method in _HARMLESS_METHODS and event.receiver:
        return False
    if any(isinstance(one, Param | StateDict) for one in nested(event.receiver, depth=2)):
        return event.method.endswith("_")  # torch's suffix of in-place operations
    if any(_is_forward(trace, value, model) for value in event.called):
        return False
    if is_own and not event.origins:
        return True
    names = event.origins or ({event.method} if not event.receiver else set())
    return not any(_HARMLESS_ORIGINS.match(name) or name in _HARMLESS_CALLS for name in names)


def _is_forward(trace: Trace, called: Value, model: ObjectRef) -> bool:
    """Whether the model or a module of it is called; in `model.name()` only if `name` is known to be a module."""
    if called == model or any(shard.subject == called for shard in trace.shards):
        return True
    return isinstance(called, ObjectRef) and not called.path and _belongs(trace, called, model)


def _belongs(trace: Trace, value: Value, model: ObjectRef) -> bool:
    owners = {value.owner if isinstance(value, StateDict) else value, *owners_of_params(frozenset({value}))}
    return any(isinstance(one, ObjectRef) and (one == model or trace.is_part_of(one, model)) for one in owners)


@rule("SW210", fix="recompute them after to_empty, or call sw.materialize(model) instead")
def buffers_lost_by_to_empty(context: LintContext) -> Iterator[Hit]:
    """Non-persistent buffers are uninitialized after `to_empty`, and no checkpoint restores them.

    Why: a state dict does not contain them. Rotary tables and masks must be computed again after `to_empty`.
    Symptom: NaN or wrong losses, often only on some ranks.
    """
    for trace, event in context.events:
        for model in event.receiver if event.method == "to_empty" else ():
            if isinstance(model, ObjectRef) and model.on_meta and _has_lost_buffers(context.file, model):
                writers = [one for one in trace.events if _may_write(trace, one, model, event)]
                if writers and all(one.method == "load_state_dict" or one.is_call_to(*_LOADERS) for one in writers):
                    message = "non-persistent buffers stay uninitialized: loading a checkpoint skips them"
                    yield Hit(event.node, message)


def _has_lost_buffers(file: FileContext, model: ObjectRef) -> bool:
    """Whether the model's class, or a class of this file that it builds, registers a non-persistent buffer."""
    if model.definition is None:
        return any(map(_TRANSFORMERS.match, model.origins))
    calls = [call for definition in built_classes(file, model.definition) for call in calls_in(definition)]
    return any(
        getattr(call.func, "attr", "") == "register_buffer"
        and getattr(argument_of(call, 2, "persistent"), "value", None) is False
        for call in calls
    )


def built_classes(file: FileContext, definition: ast.ClassDef) -> list[ast.ClassDef]:
    """Return a class, and the classes of this file that it instantiates, directly or indirectly."""
    found = [definition]
    for one in found:
        inner = [file.definition(call.func) for call in calls_in(one)]
        found += dict.fromkeys(each for each in inner if isinstance(each, ast.ClassDef) and each not in found)
    return found

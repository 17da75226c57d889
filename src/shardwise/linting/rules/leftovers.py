"""Rules about remains of FSDP1: private import paths, unused imports, FSDP1 calls on an FSDP2 model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.edits import change, without_names
from shardwise.source.syntax import FSDP1, FSDP1_NAMES, FSDP2_NAMES, FileContext, checked_types
from shardwise.source.torch_pin import PUBLIC_FSDP2, oldest_torch, project_torch
from shardwise.source.trace import Trace
from shardwise.source.values import ObjectRef, ProgramEvent, modules

_PRIVATE = re.compile(r"^torch\.distributed\.(_composable\.fsdp|fsdp\._fully_shard)(\.|$)")
_FSDP1_MODULES = re.compile(
    r"^torch\.distributed\.fsdp(\.(wrap|api|sharded_grad_scaler|fully_sharded_data_parallel))?$"
)
_IMPORTS_PRIVATE = re.compile(r"_composable|fsdp\._fully_shard")
_FROM = re.compile(r"from\s+([\w.]+)")
_FSDP1_METHODS = {
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
    "no_sync": "model.set_requires_gradient_sync(is_last_micro_step)",
    "summon_full_params": "full_tensor() to read, unshard() and reshard() to run",
    "state_dict_type": "get_model_state_dict(model, options=StateDictOptions(...))",
    "set_state_dict_type": "get_model_state_dict(model, options=StateDictOptions(...))",
    "optim_state_dict": "get_optimizer_state_dict(model, optimizer)",
    "optim_state_dict_to_load": "set_optimizer_state_dict(model, optimizer, state_dict)",
    "full_optim_state_dict": "get_optimizer_state_dict with StateDictOptions(full_state_dict=True, cpu_offload=True)",
    "sharded_optim_state_dict": "get_optimizer_state_dict(model, optimizer)",
    "scatter_full_optim_state_dict": "set_optimizer_state_dict with broadcast_from_rank0",
    "shard_full_optim_state_dict": "set_optimizer_state_dict with full_state_dict=True",
    "fsdp_modules": "[m for m in model.modules() if isinstance(m, FSDPModule)]",
}
_SCALER = "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"


@rule("SW190", Severity.WARNING, fix="from torch.distributed.fsdp import ...", safety=Safety.SAFE)
def private_fsdp2_import(context: LintContext) -> Iterator[Hit]:
    """FSDP2 is public: `torch.distributed.fsdp` since torch 2.6.

    Why: the private paths of earlier versions exist only for compatibility.
    """
    file = context.file
    oldest = project_torch([file.path], oldest_torch) if _IMPORTS_PRIVATE.search(file.text) else None
    if oldest is not None and oldest[0] < PUBLIC_FSDP2:
        return  # these versions have only the private path
    for node in file.nodes(ast.ImportFrom):
        module = _FROM.match(file.text, file.positions.span(node)[0])
        is_public = all(alias.name in FSDP2_NAMES for alias in node.names)
        if module and _PRIVATE.match(module[1]) and is_public and not _is_fallback(file, node):
            edit = change(module.start(1), module.end(1), "torch.distributed.fsdp")
            yield Hit(node, f"{module[1]} is private", edits=(edit,))
    for alias in (alias for node in file.nodes(ast.Import) for alias in node.names):
        # `import torch.distributed._composable.fsdp as f`, if only public names of it are used.
        if not _PRIVATE.match(alias.name) or alias.asname is None or _is_fallback(file, file.parents[alias]):
            continue
        uses = [file.parents[node] for node in file.nodes(ast.Name) if node.id == alias.asname]
        if all(isinstance(use, ast.Attribute) and use.attr in FSDP2_NAMES for use in uses):
            start = file.positions.span(alias)[0]
            edit = change(start, start + len(alias.name), "torch.distributed.fsdp")
            fix = f"import torch.distributed.fsdp as {alias.asname}"
            yield Hit(alias, f"{alias.name} is private", fix, (edit,))


def _is_fallback(file: FileContext, node: ast.AST) -> bool:
    """Whether an import is one of several alternatives, or for old torch: its path is then intended."""
    around = next((one for one in file.ancestors(node) if isinstance(one, ast.Try | ast.If | ast.ExceptHandler)), None)
    return around is not None and getattr(getattr(around, "test", None), "id", "") != "TYPE_CHECKING"


@rule("SW191", Severity.WARNING, fix="remove the import", safety=Safety.SAFE)
def leftover_fsdp1_import(context: LintContext) -> Iterator[Hit]:
    """FSDP1's names are imported by a file that uses none of them.

    Why: the file was migrated to FSDP2, or never used FSDP1; readers mistake it for FSDP1 code.
    """
    file = context.file
    imports = file.nodes(ast.ImportFrom) if not file.path.endswith("__init__.py") else []
    imported = [(node, alias) for node in imports for alias in node.names if _is_fsdp1(node, alias)]
    if not imported or not _used_names(file).isdisjoint(alias.asname or alias.name for _, alias in imported):
        return
    for node, alias in imported:
        is_reexport = alias.asname == alias.name
        if not is_reexport and isinstance(file.parents[node], ast.Module):
            message = f"{alias.name} of FSDP1 is imported but not used"
            gone = node.names if all(_is_fsdp1(node, one) for one in node.names) else [alias]
            yield Hit(alias, message, edits=tuple(without_names(file, node, gone, drop_comment=True)))


def _is_fsdp1(node: ast.ImportFrom, alias: ast.alias) -> bool:
    if node.level or not _FSDP1_MODULES.match(node.module or ""):
        return False
    return alias.name in FSDP1_NAMES or (not (node.module or "").endswith(".fsdp") and alias.name != "*")


def _used_names(file: FileContext) -> set[str]:
    """Return the names that are used, including those in strings: annotations and `__all__` are often strings."""
    strings = [node.value for node in file.nodes(ast.Constant) if isinstance(node.value, str)]
    return {node.id for node in file.nodes(ast.Name)} | {name for text in strings for name in re.findall(r"\w+", text)}


@rule("SW192")
def fsdp1_call_on_fsdp2_model(context: LintContext) -> Iterator[Hit]:
    """FSDP1's methods and functions do not work on a model sharded by `fully_shard`.

    Symptom: `AttributeError`; `FSDP.state_dict_type` silently does nothing.
    """
    for trace, event in context.events:
        if event.method in _FSDP1_METHODS and not event.is_store and _is_on_fsdp2(trace, event):
            if context.asks_kind(event.node):
                continue
            message = f"{event.method} is FSDP1's; the model is sharded by fully_shard"
            yield Hit(event.node, message, _FSDP1_METHODS[event.method])
        elif event.is_call_to(_SCALER) and trace.shards and not any(True for _ in context.file.calls_to(FSDP1)):
            yield Hit(event.node, "ShardedGradScaler is FSDP1's", 'torch.amp.GradScaler("cuda") handles DTensors')


def _is_on_fsdp2(trace: Trace, event: ProgramEvent) -> bool:
    static = any(origin.startswith(f"{FSDP1}.") for origin in event.origins)
    if event.origins and not static:
        return False
    subjects = modules(event.argument(0, "module", "model") if static else event.receiver)
    return any(trace.is_sharded(one, event) and not _has_own(one, event.method) for one in subjects)


def _has_own(model: ObjectRef, method: str) -> bool:
    body = model.definition.body if model.definition is not None else []
    return any(getattr(statement, "name", "") == method for statement in body)


@rule("SW194", fix="isinstance(model, FSDPModule)")
def fsdp1_isinstance(context: LintContext) -> Iterator[Hit]:
    """`isinstance(model, FullyShardedDataParallel)` is never true for a model sharded by `fully_shard`.

    Why: `fully_shard` makes the model an `FSDPModule`; the branch is silently skipped.
    """
    for trace, event in context.events:
        is_asked = any(context.file.is_any(one, {FSDP1}) for one in checked_types(event.node)[:1])
        if is_asked and any(trace.is_sharded(module, event) for module in modules(event.args[0])):
            yield Hit(event.node, "the model is an FSDPModule, never FSDP1's FullyShardedDataParallel")

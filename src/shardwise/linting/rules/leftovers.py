"""Rules about FSDP1 left behind: private import paths, unused imports, FSDP1 calls on an FSDP2 model."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from shardwise.findings import Edit, Safety, Severity
from shardwise.linting.registry import Hit, LintContext, rule
from shardwise.source.syntax import FSDP1, FSDP1_NAMES, FSDP2_NAMES, FULLY_SHARD, FileContext
from shardwise.source.usage import Module, Usage, modules
from shardwise.source.values import ProgramEvent

_PRIVATE = re.compile(r"^torch\.distributed\.(_composable\.fsdp|fsdp\._fully_shard)(\.|$)")
_FSDP1_MODULES = re.compile(
    r"^torch\.distributed\.fsdp(\.(wrap|api|sharded_grad_scaler|fully_sharded_data_parallel))?$"
)
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


@rule("SW190", "private-fsdp2-import", severity=Severity.WARNING, safety=Safety.SAFE)
def private_fsdp2_import(reading: LintContext) -> Iterator[Hit]:
    """FSDP2 is public: `torch.distributed.fsdp` since torch 2.6.

    Why: the private paths it had before are kept for compatibility only.
    """
    for node in _imports(reading.file):
        module = node.module or ""
        if not _PRIVATE.match(module) or node.level:
            continue
        if all(alias.name in FSDP2_NAMES for alias in node.names) and not _is_fallback(reading.file, node):
            yield Hit(
                node=node,
                message=f"{module} is private",
                fix="from torch.distributed.fsdp import ...",
                edits=(_module_edit(reading.file, node),),
            )
    yield from _private_modules(reading.file)


def _private_modules(file: FileContext) -> Iterator[Hit]:
    """`import torch.distributed._composable.fsdp as f`, where only public names of it are used."""
    for alias in [alias for node in file.parents if isinstance(node, ast.Import) for alias in node.names]:
        if not _PRIVATE.match(alias.name) or alias.asname is None or _is_fallback(file, file.parents[alias]):
            continue
        used = {
            parent.attr if isinstance(parent := file.parents[node], ast.Attribute) else ""
            for node in file.parents
            if isinstance(node, ast.Name) and node.id == alias.asname
        }
        if used <= FSDP2_NAMES:
            start = file.positions.span(alias)[0]
            yield Hit(
                node=alias,
                message=f"{alias.name} is private",
                fix=f"import torch.distributed.fsdp as {alias.asname}",
                edits=(Edit(start=start, end=start + len(alias.name), text="torch.distributed.fsdp"),),
            )


def _imports(file: FileContext) -> Iterator[ast.ImportFrom]:
    return (node for node in file.parents if isinstance(node, ast.ImportFrom))


def _is_fallback(file: FileContext, node: ast.AST) -> bool:
    """Whether an import is one of several tried, or one for old torch: then its path is meant."""
    for parent in file.ancestors(node):
        if isinstance(parent, ast.Try | ast.If | ast.ExceptHandler):
            return not (isinstance(parent, ast.If) and getattr(parent.test, "id", "") == "TYPE_CHECKING")
    return False


def _module_edit(file: FileContext, node: ast.ImportFrom) -> Edit:
    start = file.positions.span(node)[0]
    match = re.compile(r"from\s+([\w.]+)").match(file.text, start)
    assert match is not None, "an import of a module starts so"
    return Edit(start=match.start(1), end=match.end(1), text="torch.distributed.fsdp")


@rule("SW191", "leftover-fsdp1-import", severity=Severity.WARNING, safety=Safety.SAFE)
def leftover_fsdp1_import(reading: LintContext) -> Iterator[Hit]:
    """FSDP1's names are imported by a file that uses none of them.

    Why: it was moved to FSDP2, or never used FSDP1; readers take it for FSDP1 code.
    """
    file = reading.file
    if file.path.endswith("__init__.py"):
        return
    imported = [(node, alias) for node in _imports(file) for alias in node.names if _is_fsdp1(node, alias)]
    used = _used_names(file)
    if not imported or any((alias.asname or alias.name) in used for _, alias in imported):
        return
    for node, alias in imported:
        if _is_fallback(file, node) or _is_reexport(alias) or not isinstance(file.parents[node], ast.Module):
            continue
        yield Hit(
            node=alias,
            message=f"{alias.name} of FSDP1 is imported but not used",
            fix="remove the import",
            edits=_removal(file, node, alias),
        )


def _is_fsdp1(node: ast.ImportFrom, alias: ast.alias) -> bool:
    if node.level or not _FSDP1_MODULES.match(node.module or ""):
        return False
    return alias.name in FSDP1_NAMES or (not (node.module or "").endswith(".fsdp") and alias.name != "*")


def _is_reexport(alias: ast.alias) -> bool:
    return alias.asname is not None and alias.asname == alias.name


def _used_names(file: FileContext) -> set[str]:
    """Names that are read, also inside strings: annotations and `__all__` are often strings."""
    used: set[str] = set()
    for node in file.parents:
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.update(re.findall(r"\w+", node.value))
    return used


def _removal(file: FileContext, node: ast.ImportFrom, alias: ast.alias) -> tuple[Edit, ...]:
    """Take one name out of an import, or the statement where it is the only one or all of them go."""
    ours = [one for one in node.names if _is_fsdp1(node, one)]
    if len(ours) == len(node.names):
        starts = file.positions.starts
        end_line = node.end_lineno or node.lineno
        end = starts[end_line] if end_line < len(starts) else len(file.text)
        line = file.positions.line(end_line)[file.positions.span(node)[1] - starts[end_line - 1] :]
        if (line.strip() and not line.strip().startswith("#")) or node.col_offset:
            return ()  # `import a; import b`: a person can do it
        return (Edit(start=starts[node.lineno - 1], end=end, text=""),)
    start, end = file.positions.span(alias)
    behind = re.compile(r"[ \t]*,[ \t]*(?:#[^\r\n]*)?(?:\r\n|\r|\n)?[ \t]*").match(file.text, end)
    before = re.compile(r",[ \t]*$").search(file.text, 0, start)
    if behind is not None:
        return (Edit(start=start, end=behind.end(), text=""),)
    return (Edit(start=before.start(), end=end, text=""),) if before is not None else ()


@rule("SW192", "fsdp1-call-on-fsdp2-model", severity=Severity.ERROR)
def fsdp1_call_on_fsdp2_model(reading: LintContext) -> Iterator[Hit]:
    """FSDP1's methods and functions do not work on a model sharded by `fully_shard`.

    Symptom: `AttributeError`; `FSDP.state_dict_type` silently does nothing.
    """
    for usage, event in reading.events:
        if event.method in _FSDP1_METHODS and not event.is_store and _is_on_fsdp2(usage, event):
            yield Hit(
                node=event.node,
                message=f"{event.method} is FSDP1's; the model is sharded by fully_shard",
                fix=_FSDP1_METHODS[event.method],
            )
        elif event.is_call_to(_SCALER) and usage.shards and not _uses_fsdp1(reading):
            yield Hit(
                node=event.node,
                message="ShardedGradScaler is FSDP1's",
                fix='torch.amp.GradScaler("cuda") handles DTensors',
            )


def _uses_fsdp1(reading: LintContext) -> bool:
    return any(True for _ in reading.file.calls_to(FSDP1))


def _is_on_fsdp2(usage: Usage, event: ProgramEvent) -> bool:
    static = any(origin.startswith(f"{FSDP1}.") for origin in event.origins)
    if event.origins and not static:
        return False
    subjects = modules(event.argument(0, "module") or event.argument(0, "model") if static else event.receiver)
    return any(_is_plainly_sharded(usage, subject, event) for subject in subjects)


def _is_plainly_sharded(usage: Usage, subject: Module, event: ProgramEvent) -> bool:
    own = getattr(getattr(subject, "definition", None), "body", [])
    if any(getattr(statement, "name", "") == event.method for statement in own):
        return False  # the model has a method of that name
    return usage.is_sharded(subject, event) and all(
        shard.event.is_call_to(FULLY_SHARD) or shard.is_automatic for shard in usage.shards if shard.subject == subject
    )


@rule("SW194", "fsdp1-isinstance", severity=Severity.ERROR)
def fsdp1_isinstance(reading: LintContext) -> Iterator[Hit]:
    """`isinstance(model, FullyShardedDataParallel)` is never true for a model sharded by `fully_shard`.

    Why: sharding makes it an `FSDPModule`; the branch is silently skipped.
    """
    for usage, event in reading.events:
        call = event.node
        if event.method != "isinstance" or event.receiver or not isinstance(call, ast.Call) or len(call.args) != 2:
            continue
        if reading.file.is_any(call.args[1], {FSDP1}) and any(
            usage.is_sharded(module, event) for module in modules(event.args[0])
        ):
            yield Hit(
                node=call,
                message="the model is an FSDPModule, never FSDP1's FullyShardedDataParallel",
                fix="isinstance(model, FSDPModule)",
            )

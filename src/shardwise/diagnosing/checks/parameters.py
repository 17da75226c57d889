"""Are the model's parameters what FSDP2 trains? Local."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise import compat
from shardwise.diagnosing.checks.subject import Subject
from shardwise.findings import Finding, Severity
from shardwise.sharding.layout import local_tensor

_SHORT = (torch.bfloat16, torch.float16)


def unsharded(subject: Subject) -> Iterator[Finding]:
    """SW401: trainable parameters that no group shards and nobody averages."""
    gathered = [group for group in subject.groups.values() if compat.is_gathered(group)]  # said elsewhere
    in_groups = {subject.name_of(param.sharded_param) for group in gathered for param in group.fsdp_params}
    for name, parameter in subject.parameters.items():
        is_plain = parameter.requires_grad and not isinstance(parameter, DTensor)
        if is_plain and name not in subject.averaged and name not in in_groups:
            yield Finding(
                code="SW401",
                message="a trainable parameter is an ordinary tensor: its gradient is not averaged, and ranks drift "
                "apart",
                where=name,
                severity=Severity.ERROR,
                fix="shard the whole model, root last; what must stay whole: ShardConfig(ignored=(...,)), which "
                "averages it",
            )


def replaced(subject: Subject) -> Iterator[Finding]:
    """SW402: a registered parameter is not the one its group gathers and reduces."""
    for group_name, group in subject.groups.items():
        for fsdp_param in group.fsdp_params:
            registered, shard = compat.registered_parameter(fsdp_param), fsdp_param.sharded_param
            if compat.is_gathered(group) or registered is None:
                continue  # said elsewhere
            if registered is not shard or registered.dtype != local_tensor(shard).dtype:
                yield Finding(
                    code="SW402",
                    message="the parameter was replaced after sharding (assigned, or `p.data = ...`): its group still "
                    "gathers the old one",
                    where=subject.name_of(shard) or group_name,
                    severity=Severity.ERROR,
                    fix="change values in place: `with torch.no_grad(): parameter.copy_(...)`, or "
                    "shardwise.full_params(model, writeback=True)",
                )


def sixteen_bit(subject: Subject) -> Iterator[Finding]:
    """SW403: trainable parameters stored in 16 bits, which lose small updates."""
    short = [name for name, p in subject.parameters.items() if p.requires_grad and p.dtype in _SHORT]
    if short:
        dtype = str(subject.parameters[short[0]].dtype).removeprefix("torch.")
        yield Finding(
            code="SW403",
            message=f"{len(short)} trainable parameters are stored in {dtype}: an update smaller than 1/256 of a "
            "weight is lost",
            where=short[0],
            fix="model.float() before sharding; `PrecisionConfig(param_dtype='bfloat16')` still computes in 16 bits",
        )


def several_dtypes(subject: Subject) -> Iterator[Finding]:
    """SW404: a group with trainable parameters of several dtypes, which FSDP2 refuses at the first forward."""
    for name, group in subject.groups.items():
        dtypes = {str(p.dtype) for p in compat.sharded_parameters(group) if p.requires_grad}
        if len(dtypes) > 1:
            yield Finding(
                code="SW404",
                message=f"one group holds trainable parameters of {', '.join(sorted(dtypes))}: FSDP2 refuses that "
                "at the first forward",
                where=name,
                severity=Severity.ERROR,
                fix="shard the modules of each dtype as groups of their own, or cast; shardwise.shard does it by "
                "itself",
            )


def on_meta(subject: Subject) -> Iterator[Finding]:
    """SW405: parameters or buffers without values."""
    tensors = {**subject.parameters, **dict(subject.model.named_buffers())}
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        yield Finding(
            code="SW405",
            message=f"{len(empty)} tensors have no values yet (meta device)",
            where=empty[0],
            severity=Severity.ERROR,
            fix="shardwise.materialize(model), or shardwise.load_weights(model, path)",
        )


def ties(subject: Subject) -> Iterator[Finding]:
    """SW406: weights that are tied by the plan or by the model's own word, and no longer are one tensor."""
    pairs = [(p.fqn, alias) for p in subject.planned for alias in p.aliases]
    pairs += _tied_by_config(subject.model)
    for first, second in pairs:
        if _tensor(subject.model, first) is not _tensor(subject.model, second):
            yield Finding(
                code="SW406",
                message=f"{second} should be the same tensor as {first}, and is not: each would go its own way",
                where=second,
                severity=Severity.ERROR,
                fix="tie them before sharding (`head.weight = embedding.weight`), and do not assign to them afterwards",
            )


def _tied_by_config(model: nn.Module) -> list[tuple[str, str]]:
    """What transformers says about input and output embeddings."""
    config = getattr(model, "config", None)
    getters: list[Any] = [getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output")]
    if not getattr(config, "tie_word_embeddings", False) or not all(getters):
        return []
    try:
        ends = [get() for get in getters]
    except (NotImplementedError, AttributeError):
        return []
    names = {id(module): name for name, module in model.named_modules()}
    found = [f"{names[id(end)]}.weight" for end in ends if id(end) in names and hasattr(end, "weight")]
    return [(found[0], found[1])] if len(found) == 2 else []


def _tensor(model: nn.Module, name: str) -> object:
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner)._parameters.get(leaf)

"""What ranks do in the GPU tests of shardwise.fsdp1: the same steps with torch's FSDP1 and with ours."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardwise.fsdp1 as our_fsdp
from shardwise.models.transformer import Block
from tests.fsdp1_pairs import quiet
from tests.gpu.jobs import loss_of, small, start_ranks, tokens


def compare(settings: dict[str, Any]) -> dict[str, float]:
    """Largest differences of losses, norms, weights and optimizer state after three steps."""
    rank, _ = start_ranks()
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        with quiet():
            real, ours = (_train(api, rank, dict(settings)) for api in (torch_fsdp, our_fsdp))
    finally:
        dist.destroy_process_group()
    return {
        "loss": max(abs(a - b) for a, b in zip(ours["losses"], real["losses"], strict=True)),
        "norm": max(abs(a - b) for a, b in zip(ours["norms"], real["norms"], strict=True)),
        "parameter": _largest(ours["model"], real["model"]),
        "optimizer": max(_largest(ours["optimizer"][name], state) for name, state in real["optimizer"].items()),
        "on_cpu": float(ours["shards_on_cpu"] == real["shards_on_cpu"] == bool(settings.get("offload"))),
        "saved_on_cpu": float(all(value.device.type == "cpu" for value in ours["model"].values())),
    }


def _train(api: Any, rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    unit_class = api.FullyShardedDataParallel
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16) if settings.get("bf16") else None
    model = small()
    if rank and settings.get("sync"):
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
    unit = unit_class(
        model,
        device_id=torch.cuda.current_device(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        cpu_offload=CPUOffload(offload_params=bool(settings.get("offload"))),
        sharding_strategy=ShardingStrategy[settings.get("strategy", "FULL_SHARD")],
        mixed_precision=precision,
        sync_module_states=bool(settings.get("sync")),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(unit.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(unit, tokens(rank, step).cuda())
        loss.backward()
        norms.append(unit.clip_grad_norm_(0.5).item())
        optimizer.step()
        losses.append(loss.item())
    on_cpu = all(parameter.device.type == "cpu" for parameter in unit.parameters())
    configs = (api.FullStateDictConfig(offload_to_cpu=True), api.FullOptimStateDictConfig(offload_to_cpu=True))
    with unit_class.state_dict_type(unit, StateDictType.FULL_STATE_DICT, *configs):
        states = {"model": dict(unit.state_dict()), "optimizer": unit_class.optim_state_dict(unit, optimizer)["state"]}
    return {"losses": losses, "norms": norms, "shards_on_cpu": on_cpu, **states}


def _largest(ours: dict[str, Any], real: dict[str, Any]) -> float:
    assert ours.keys() == real.keys()
    return max((ours[name].float().cpu() - value.float().cpu()).abs().max().item() for name, value in real.items())

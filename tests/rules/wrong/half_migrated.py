"""FSDP1 turned into FSDP2 by search and replace."""

import functools

import torch
import torch.distributed as dist
from torch.distributed._composable.fsdp import fully_shard  # expect: SW190
from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from my_models import Block, build_model


def wrap(model, mesh, config):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)  # expect: SW193
    return fully_shard(
        model,
        auto_wrap_policy=policy,  # expect: SW193
        device_mesh=mesh,  # expect: SW193
        cpu_offload=CPUOffload(offload_params=config.offload),  # expect: SW193
        use_orig_params=True,  # expect: SW193
    )


def train(config, mesh, loader):
    model = wrap(build_model(config), mesh, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    scaler = ShardedGradScaler()  # expect: SW192
    for step, batch in enumerate(loader):
        if (step + 1) % config.accumulate:
            with model.no_sync():  # expect: SW192
                scaler.scale(model(batch).mean()).backward()
            continue
        scaler.scale(model(batch).mean()).backward()
        if isinstance(model, FSDP):  # expect: SW194
            model.clip_grad_norm_(1.0)  # expect: SW192
        scaler.step(optimizer)
        scaler.update()
    save_policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):  # expect: SW192
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, config.path)  # expect: SW221


def build(config, mesh):
    model = build_model(config)
    fully_shard(model.blocks[0], mesh)  # expect: SW215
    fully_shard(model.blocks[1], mesh=mesh, reshard_after_foward=False)  # expect: SW215
    fully_shard(model.blocks[2], mesh=mesh, mp_policy=None)  # expect: SW215
    return model

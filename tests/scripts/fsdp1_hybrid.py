"""HYBRID_SHARD on two groups of two: shard inside a group, replicate between them.

torchrun --nproc-per-node 4 fsdp1_hybrid.py --out /tmp/checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--num-shards", type=int, default=2)
    return parser.parse_args(argv)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    num_copies = dist.get_world_size() // args.num_shards
    mesh = init_device_mesh(device.type, (num_copies, args.num_shards), mesh_dim_names=("replicate", "shard"))
    model = FSDP(
        GPT(),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad(set_to_none=True)
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        log(step, loss, norm=norm.item())

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state_dict = model.state_dict()
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(state_dict, os.path.join(args.out, "model.pt"))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

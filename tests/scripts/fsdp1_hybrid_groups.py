"""HYBRID_SHARD with a pair of process groups, as scripts of before device meshes have it.

torchrun --nproc-per-node 4 fsdp1_hybrid_groups.py --out /tmp/checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args(argv)


def make_groups(device):
    layout = init_device_mesh(device.type, (dist.get_world_size() // 2, 2))
    return layout.get_group(1), layout.get_group(0)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    shard_group, replicate_group = make_groups(device)
    model = FSDP(
        GPT(),
        process_group=(shard_group, replicate_group),
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
        auto_wrap_policy=ModuleWrapPolicy([Block]),
        device_id=device,
        limit_all_gathers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)

    states = model.state_dict()
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(states, os.path.join(args.out, "model.pt"))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Wrap by size, shard gradients and optimizer state only, save and load with plain state_dict() calls.

torchrun --nproc-per-node 2 fsdp1_size_based.py --out /tmp/checkpoint
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from small_models import GPT, batch_of, language_loss, log
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    BackwardPrefetch,
    ShardingStrategy,
)
from torch.distributed.fsdp.fully_sharded_data_parallel import (
    FullyShardedDataParallel as FSDP,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--min-params", type=int, default=3000)
    return parser.parse_args(argv)


def save(model, path):
    states = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(states, path)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    my_auto_wrap_policy = functools.partial(size_based_auto_wrap_policy, min_num_params=args.min_params)
    model = FSDP(
        GPT(),
        auto_wrap_policy=my_auto_wrap_policy,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "model.pt")

    for step in range(args.steps):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)

    save(model, path)
    dist.barrier()
    model.load_state_dict(torch.load(path, map_location="cpu"))
    model.eval()
    with torch.no_grad():
        tokens = batch_of(99, dist.get_rank(), device)
        log(args.steps, language_loss(model(tokens), tokens))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

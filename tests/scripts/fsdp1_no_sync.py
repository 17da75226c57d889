"""Accumulate gradients over micro-batches without communication, then clip and step.

torchrun --nproc-per-node 2 fsdp1_no_sync.py --out /tmp/checkpoint
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=3)
    return parser.parse_args(argv)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = FSDP(GPT(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        total = torch.zeros((), device=device)
        for micro_step in range(args.accumulate):
            tokens = batch_of(10 * step + micro_step, dist.get_rank(), device)
            is_last = micro_step == args.accumulate - 1
            context = contextlib.nullcontext() if is_last else model.no_sync()
            with context:
                loss = language_loss(model(tokens), tokens) / args.accumulate
                loss.backward()
            total += loss.detach()
        norm = model.clip_grad_norm_(max_norm=0.3)
        optimizer.step()
        optimizer.zero_grad()
        log(step, total, norm=float(norm))

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

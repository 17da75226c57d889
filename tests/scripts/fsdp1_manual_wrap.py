"""Wrap block by block by hand, then the whole; read whole parameters with summon_full_params.

torchrun --nproc-per-node 2 fsdp1_manual_wrap.py --out /tmp/checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_models import GPT, batch_of, language_loss, log
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args(argv)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = GPT()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FSDP(block, device_id=device)
    model = FSDP(model, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)

    with FSDP.summon_full_params(model, writeback=False):
        largest = max(p.abs().max().item() for p in model.parameters())
        log(args.steps, loss, largest=largest)

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

"""Wrap by transformer block, train, save a full state dict from rank 0.

torchrun --nproc-per-node 2 fsdp1_transformer_policy.py --out /tmp/checkpoint
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args(argv)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = GPT()
    wrap_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(model, auto_wrap_policy=wrap_policy, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)

    save_policy = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save_policy):
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

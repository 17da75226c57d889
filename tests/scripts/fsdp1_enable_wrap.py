"""A model whose parts wrap themselves when they are built inside enable_wrap.

torchrun --nproc-per-node 2 fsdp1_enable_wrap.py --out /tmp/checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_models import VOCABULARY, Block, batch_of, language_loss, log
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import enable_wrap, wrap


class Stack(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.first = wrap(Block(width))
        self.second = wrap(Block(width))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.second(self.first(self.embedding(tokens))))


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args(argv)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FSDP, device_id=device, use_orig_params=True):
        model = wrap(Stack())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)

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

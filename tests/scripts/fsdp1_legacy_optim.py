"""The older optimizer calls: full_optim_state_dict on rank 0, scatter_full_optim_state_dict on resuming.

torchrun --nproc-per-node 2 fsdp1_legacy_optim.py --out /tmp/checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(argv)


def build(device):
    model = FSDP(GPT(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def run(model, optimizer, device, first, last):
    for step in range(first, last):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model, optimizer = build(device)
    run(model, optimizer, device, 0, args.steps)
    states = model.state_dict()
    full_osd = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save({"model": states, "optimizer": full_osd}, os.path.join(args.out, "model.pt"))
    dist.barrier()

    torch.manual_seed(1)
    model, optimizer = build(device)
    saved = torch.load(os.path.join(args.out, "model.pt"), map_location="cpu")
    model.load_state_dict(saved["model"])
    full_osd = saved["optimizer"] if dist.get_rank() == 0 else None
    sharded_osd = FSDP.scatter_full_optim_state_dict(full_osd, model, optim=optimizer)
    optimizer.load_state_dict(sharded_osd)
    run(model, optimizer, device, args.steps, 2 * args.steps)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Save model and optimizer as full state dicts from rank 0, build everything anew and continue from them.

torchrun --nproc-per-node 2 fsdp1_resume.py --out /tmp/checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(argv)


def build(device):
    model = FSDP(GPT(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer


def run(model, optimizer, device, first, last):
    for step in range(first, last):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)


def save_checkpoint(model, optimizer, path):
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
    )
    model_state = model.state_dict()
    optim_state = FSDP.optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save({"model": model_state, "optimizer": optim_state}, path)
    dist.barrier()


def load_checkpoint(model, optimizer, path):
    checkpoint = torch.load(path, map_location="cpu")
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=False),
        FullOptimStateDictConfig(rank0_only=False),
    ):
        model.load_state_dict(checkpoint["model"])
        optim_state = FSDP.optim_state_dict_to_load(
            model=model, optim=optimizer, optim_state_dict=checkpoint["optimizer"]
        )
        optimizer.load_state_dict(optim_state)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    os.makedirs(args.out, exist_ok=True)
    path = os.path.join(args.out, "model.pt")

    model, optimizer = build(device)
    run(model, optimizer, device, 0, args.steps)
    save_checkpoint(model, optimizer, path)

    torch.manual_seed(1)
    model, optimizer = build(device)
    load_checkpoint(model, optimizer, path)
    run(model, optimizer, device, args.steps, 2 * args.steps)
    save_checkpoint(model, optimizer, path)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Sharded state dicts with torch.distributed.checkpoint, saved and loaded.

torchrun --nproc-per-node 2 fsdp1_dcp.py --out /tmp/checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args(argv)


def build(device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = FSDP(
        GPT(), device_mesh=mesh, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=device, use_orig_params=True
    )
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def run(model, optimizer, device, first, last):
    for step in range(first, last):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)


def save_checkpoint(model, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def load_checkpoint(model, folder):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state_dict = {"model": model.state_dict()}
        dcp.load(state_dict, checkpoint_id=folder)
        model.load_state_dict(state_dict["model"])


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model, optimizer = build(device)
    run(model, optimizer, device, 0, args.steps)
    save_checkpoint(model, os.path.join(args.out, "dcp"))

    torch.manual_seed(1)
    model, optimizer = build(device)
    load_checkpoint(model, os.path.join(args.out, "dcp"))
    run(model, optimizer, device, args.steps, 2 * args.steps)


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

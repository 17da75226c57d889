"""Checkpointing code that does everything under `if rank == 0`."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.fsdp import fully_shard


def save_full(model, path):
    if dist.get_rank() == 0:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)  # expect: SW222
        torch.save(state, path)


def save_early_return(model, optimizer, path, rank):
    if rank != 0:
        return
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))  # expect: SW222
    torch.save(state, path)


def save_sharded(model, optimizer, folder):
    is_main = int(os.environ["RANK"]) == 0
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if is_main:
        os.makedirs(folder, exist_ok=True)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)  # expect: SW222


class Trainer:
    def __init__(self, model, args):
        self.args = args
        self.rank = dist.get_rank()
        for block in model.blocks:
            fully_shard(block)
        self.model = fully_shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def evaluate(self, batch):
        if self.rank == 0:
            with torch.no_grad():
                return self.model(batch)  # expect: SW222
        return None

    def log_weights(self):
        if self.args.verbose and self.rank == 0:
            for name, parameter in self.model.named_parameters():
                print(name, parameter.full_tensor().norm())  # expect: SW222

    def save(self, path):
        checkpoint = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.rank == 0:
            torch.save(checkpoint, path)  # expect: SW221

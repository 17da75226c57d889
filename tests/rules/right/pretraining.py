"""Everything a run needs, done right: nothing is to be found here."""

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, width=8, depth=4):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def build(args):
    mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    with torch.device("meta"):
        model = Model()
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=lambda module: isinstance(module, Block)
    )
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    if args.offload:
        settings["offload_policy"] = CPUOffloadPolicy()
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    model.to_empty(device="cpu" if args.offload else "cuda")
    model.init_weights()
    return model


def main(args):
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = AppState(model, optimizer)
    if args.resume:
        dcp.load({"app": state}, checkpoint_id=args.resume)
    for step, batch in enumerate(args.data):
        is_last = (step + 1) % 4 == 0
        model.set_requires_gradient_sync(is_last)
        model(batch).sum().backward()
        if is_last:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor()
            if dist.get_rank() == 0:
                print(norm.item(), f"{norm:.3f}")
            optimizer.step()
            optimizer.zero_grad()
    dcp.save({"app": state}, checkpoint_id=args.folder)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(full, "model.pt")
    torch.save(torch.get_rng_state(), f"rng_{dist.get_rank()}.pt")


def load(model, path):
    state = torch.load(path) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def save_with_both_branches(model, path):
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        torch.save(get_model_state_dict(model, options=options), path)
    else:
        get_model_state_dict(model, options=options)

"""Code that looks like a mistake and is none: other branches, re-pointed optimizers, dictionaries filled elsewhere."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        return self.project(x)

    def embed(self, x):
        return self.project(x)


def save_by_kind(build, path):
    model = build()
    if dist.get_world_size() > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if dist.get_world_size() == 1:
        torch.save(model.state_dict(), path)
    if isinstance(model, FSDPModule):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    else:
        torch.save(model.state_dict(), path)


def repoint(model):
    optimizer = torch.optim.AdamW(model.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    after = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [after[names[parameter]] for parameter in group["params"]]
    return optimizer


def unsharded_by_hand(x):
    head = Head()
    fully_shard(head)
    head.unshard()
    features = head.embed(x) + head.forward(x)
    head.reshard()
    return features


def add_state(states, model):
    states["model"] = model.state_dict()


class Resumer:
    def __init__(self, model):
        self.model = model
        self.states = {}

    def resume(self, path):
        self.states["model"] = self.model.state_dict()
        dcp.load(self.states, checkpoint_id=path)


def filled_elsewhere(model, fill, path):
    states = {}
    fill(states, model)
    dcp.load(states, checkpoint_id=path)
    others = {}
    add_state(others, model)
    dcp.load(others, checkpoint_id=path)


def settings_by_level(build, level):
    model = build()
    if level >= 2:
        fully_shard(model, reshard_after_forward=False)
    elif level == 1:
        fully_shard(model)
    if level < 1:
        fully_shard(model)
    return model


def one_model_a_size(build):
    models = []
    for width in (8, 16, 32):
        model = build(width)
        for block in model.blocks:
            fully_shard(block)
        models.append(fully_shard(model))
    return models

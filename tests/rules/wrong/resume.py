"""Resumes a run: every load here loads nothing, or fails."""

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def build():
    model = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def resume_distributed(folder):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = {"model": {}, "optim": {}}
    dcp.load(checkpoint, checkpoint_id=folder)  # expect: SW225
    state = {
        "model": get_model_state_dict(model),
        "optim": optimizer.state_dict(),  # expect: SW226
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    optimizer.load_state_dict(state["optim"])
    return model, optimizer


def resume_full(path):
    model = build()
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])  # expect: SW223
    return model


def resume_safetensors(path):
    model = build()
    set_model_state_dict(model, load_file(path))  # expect: SW223
    return model


def resume_broadcast(path):
    model = build()
    state = torch.load(path, map_location="cpu", weights_only=True)
    set_model_state_dict(
        model,
        state,
        broadcast_from_rank0=True,  # expect: SW224
        options=StateDictOptions(full_state_dict=True),
    )
    return model


def resume_nothing(folder):
    model = build()
    states = dict()
    dcp.load(state_dict=states, checkpoint_id=folder)  # expect: SW225
    return model

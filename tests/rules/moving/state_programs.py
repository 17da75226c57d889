"""FSDP1 checkpoint code in small: `save(model, optimizer)` and `load(model, optimizer, model_state, optim_state)`."""

from __future__ import annotations

HEADER = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
"""
LOAD_FULL = """
def load(model, optimizer, model_state, optim_state):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(model_state)
        flat = FSDP.optim_state_dict_to_load(model, optimizer, optim_state)
    optimizer.load_state_dict(flat)
"""
PROGRAMS = {
    "optimizer_first": (
        """
def save(model, optimizer):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        optim_state = FSDP.optim_state_dict(model, optimizer)
        return model.state_dict(), optim_state
""",
        LOAD_FULL,
    ),
    "rank_zero_on_cpu": (
        """
policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


def save(model, optimizer):
    # gathers everything
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, policy, FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    ):  # on rank 0
        model_state = model.state_dict()
        text = '''a string
            that keeps its spaces'''
        optim_state = FSDP.optim_state_dict(model, optimizer)
        assert text.endswith("            that keeps its spaces")
    return model_state, optim_state
""",
        """
def load(model, optimizer, model_state, optim_state):
    states = [model_state]
    dist.broadcast_object_list(states)
    with FSDP.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, None, FullOptimStateDictConfig(rank0_only=True)
    ):
        model.load_state_dict(states[0])
        optim_state = FSDP.optim_state_dict_to_load(model, optimizer, optim_state)
        optimizer.load_state_dict(optim_state)
""",
    ),
    "everywhere_by_default": (
        """
def save(model, optimizer):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict(), FSDP.optim_state_dict(model, optimizer)
""",
        LOAD_FULL,
    ),
    "everywhere_on_cpu": (
        """
def save(model, optimizer):
    with torch.no_grad(), FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=False),
        FullOptimStateDictConfig(True, False),
    ):
        model_state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    return model_state, optim_state
""",
        LOAD_FULL,
    ),
    "rank_zero_in_place": (
        """
def save(model, optimizer):
    config = FullStateDictConfig(rank0_only=True)
    optim_config = FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optim_config):
        model_state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    return model_state, optim_state
""",
        """
def load(model, optimizer, model_state, optim_state):
    states = [model_state, optim_state]
    dist.broadcast_object_list(states)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states[1]))
""",
    ),
    "plain": (
        """
def save(model: FSDP, optimizer):
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer)
""",
        """
def load(model: FSDP, optimizer, model_state, optim_state):
    model.load_state_dict(model_state, strict=True)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=optim_state))
""",
    ),
    "older_calls": (
        """
def save(model, optimizer):
    FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    model_state = model.state_dict()
    optim_state = FSDP.full_optim_state_dict(model, optimizer)
    return model_state, optim_state
""",
        """
def load(model: FSDP, optimizer, model_state, optim_state):
    model.load_state_dict(model_state)
    sharded = FSDP.scatter_full_optim_state_dict(optim_state if dist.get_rank() == 0 else None, model, optim=optimizer)
    optimizer.load_state_dict(sharded)
""",
    ),
    "whole_on_every_rank": (
        """
def save(model: FSDP, optimizer):
    return model.state_dict(), FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
""",
        """
def load(model: FSDP, optimizer, model_state, optim_state):
    model.load_state_dict(model_state)
    sharded = FSDP.shard_full_optim_state_dict(optim_state, model, optim=optimizer)
    optimizer.load_state_dict(sharded)
""",
    ),
    "known_at_run_time": (
        """
def save(model, optimizer, kind=StateDictType.FULL_STATE_DICT, rank0_only=True):
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    optim_config = FullOptimStateDictConfig(rank0_only=rank0_only)
    with FSDP.state_dict_type(model, kind, config, optim_config):
        model_state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    return model_state, optim_state
""",
        """
def load(model, optimizer, model_state, optim_state, kind=StateDictType.FULL_STATE_DICT):
    states = [model_state, optim_state]
    dist.broadcast_object_list(states)
    with FSDP.state_dict_type(model, kind):
        model.load_state_dict(states[0])
        optim_state = FSDP.optim_state_dict_to_load(model, optimizer, states[1])
        optimizer.load_state_dict(optim_state)
""",
    ),
}


def source(name: str) -> str:
    """The text of one program."""
    save, load = PROGRAMS[name]
    return f"{HEADER}\n{save}\n{load}"

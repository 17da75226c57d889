import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict, StateDictOptions


def load(model, sd):
    set_model_state_dict(model, sd, broadcast_from_rank0=True, full_state_dict=True)  # expect: SW224


def save(model):
    return get_model_state_dict(model, full_state_dict=True, cpu_offload=True)  # expect: SW224

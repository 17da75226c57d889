import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions

RANK = int(os.environ["RANK"])


def save(model):
    if RANK == 0:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))  # expect: SW222
        torch.save(sd, "x")

import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

from torch.distributed.checkpoint import state_dict as dsd
import torch.distributed.checkpoint as dcp


def save(model, opt, rank):
    if rank == 0:
        m, o = dsd.get_state_dict(model, opt, options=dsd.StateDictOptions(full_state_dict=True))  # expect: SW222


def save2(state, rank):
    if rank > 0:
        return
    dcp.save(state, checkpoint_id="x")  # expect: SW222

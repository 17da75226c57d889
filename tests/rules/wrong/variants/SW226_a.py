import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

import torch.distributed.checkpoint as dcp


def resume(model, path):
    opt = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "opt": opt.state_dict()}  # expect: SW226
    dcp.load(state_dict=state, checkpoint_id=path)
    opt.load_state_dict(state["opt"])

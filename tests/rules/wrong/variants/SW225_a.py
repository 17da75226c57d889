import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import *
from torch.distributed.device_mesh import init_device_mesh

import torch.distributed.checkpoint as dcp


def load(path):
    sd = {}
    sd["model"] = {}
    sd["optim"] = {}
    dcp.load(sd, storage_reader=dcp.FileSystemReader(path))  # expect: SW225
    return sd

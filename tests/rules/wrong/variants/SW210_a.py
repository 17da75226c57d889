import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy

from transformers import AutoModelForCausalLM, AutoConfig
from torch.distributed.checkpoint.state_dict import set_model_state_dict, StateDictOptions

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("x"))
for l in model.model.layers:
    fully_shard(l)
fully_shard(model)
model.to_empty(device="cuda")  # expect: SW210
sd = torch.load("x.pt", mmap=True)
set_model_state_dict(model, sd, options=StateDictOptions(full_state_dict=True))
opt = torch.optim.AdamW(model.parameters())

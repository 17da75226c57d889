import torch
import torch.distributed.fsdp as fsdp

kw = {"mp_policy": fsdp.MixedPrecisionPolicy(torch.float16, cast_forward_inputs=True)}  # expect: SW211

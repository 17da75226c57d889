"""The strategy is read from a config, as it was for FSDP1; 'hybrid' has lost its mesh."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from my_models import build_model


def apply_fsdp(model, args):
    if args.sharding_strategy == "full":
        reshard_after_forward = True
    elif args.sharding_strategy == "hybrid":  # expect: SW219
        reshard_after_forward = True
    else:
        raise ValueError(args.sharding_strategy)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)  # expect: SW211, SW212
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mp_policy=policy)


def main(args):
    dist.init_process_group("nccl")
    model = build_model(args).to("cuda")  # expect: SW235
    apply_fsdp(model, args)
    optimizer = torch.optim.Adam(model.parameters())
    for batch in range(args.steps):
        model.set_requires_gradient_sync(False)  # expect: SW232
        model(batch).backward()
        optimizer.step()

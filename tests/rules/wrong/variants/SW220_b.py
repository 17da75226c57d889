import os, torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy


class Trainer:
    def __init__(self, args):
        self.setup_dist()
        self.model = build()
        policy = CPUOffloadPolicy() if args.cpu_offload else None
        for l in self.model.layers:
            fully_shard(l, **({"offload_policy": policy} if policy else {}))
        fully_shard(self.model)

    def setup_dist(self):
        dist.init_process_group(backend="nccl", init_method="env://")  # expect: SW220
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

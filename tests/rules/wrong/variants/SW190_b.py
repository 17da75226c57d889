from torch.distributed.fsdp._fully_shard import FSDPModule  # expect: SW190
import torch.distributed._composable.fsdp as cfsdp  # expect: SW190

cfsdp.fully_shard(m)

from torch.distributed._composable.fsdp import fully_shard, MixedPrecisionPolicy  # expect: SW190

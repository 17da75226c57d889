"""Composer's config classes by shape: the fields, the defaults and the constructor of its `utils/parallelism.py`."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(init=False)
class FSDPConfig:
    """Takes any attribute, as Composer's does."""

    activation_checkpointing: bool = False
    activation_checkpointing_reentrant: bool = True
    activation_cpu_offload: bool = False
    auto_wrap: bool = True
    te_checkpoint_wrapper: bool = False
    te_shard_fp8_weight: bool = False
    backward_prefetch: str = "BACKWARD_POST"
    backward_prefetch_limit: int = 1
    cpu_offload: bool = False
    data_parallel_shard_degree: int = -1
    data_parallel_replicate_degree: int | None = None
    forward_prefetch: bool = False
    forward_prefetch_limit: int = 1
    ignored_modules: Any = None
    keep_low_precision_grads: bool = False
    limit_all_gathers: bool = True
    load_monolith_rank0_only: bool = False
    load_planner: Any = None
    mixed_precision: str = "DEFAULT"
    process_group: Any = None
    save_planner: Any = None
    sharded_ckpt_prefix_dir: str = "ep{epoch}-ba{batch}"
    sharding_strategy: str = "FULL_SHARD"
    state_dict_type: str = "full"
    sync_module_states: bool = False
    use_orig_params: bool = True
    verbose: bool = False
    _device_mesh: Any = field(default=None, init=False, repr=False)

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)


@dataclass
class FSDP2Config:
    device_mesh: Any = None
    reshard_after_forward: bool | int = True
    activation_checkpointing: bool = False
    activation_cpu_offload: bool = False
    state_dict_type: str = "sharded"
    load_monolith_rank0_only: bool = False
    mixed_precision: str = "DEFAULT"
    verbose: bool = False
    _sync_module_states: bool = field(default=False, init=False, repr=False)


@dataclass
class TPConfig:
    device_mesh: Any = None
    tensor_parallel_degree: int = 1
    layer_plan: Any = None


@dataclass
class ParallelismConfig:
    fsdp: FSDPConfig | None = None
    tp: TPConfig | None = None
    fsdp2: FSDP2Config | None = None

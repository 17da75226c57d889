"""FSDP1 programs in small: each defines `wrap(model)`, and is run as it is and as `migrate` rewrites it."""

from __future__ import annotations

HEADER = """
import functools
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    _or_policy,
)
from tests.rules.moving.toys import Block, Other
"""

BODIES = {
    "root_only": 'return FSDP(model, device_id=torch.device("cpu"))',
    "literal_classes": """
    model = FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,  # for the optimizer
    )
    return model
""",
    "module_wrap_policy": """
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy([Block, Other]), device_id=torch.device("cpu"))
""",
    "policy_by_name": """
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    wrapped = FSDP(model, None, ShardingStrategy.SHARD_GRAD_OP, None, policy, device_id=torch.device("cpu"))
    return wrapped
""",
    "size_based": """
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
    return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
""",
    "or_policy": """
    leaf = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear) and m.bias is None)
    blocks = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=(Block,))
    policy = functools.partial(_or_policy, policies=[leaf, blocks])
    return FSDP(module=model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
""",
    "strategy_at_run_time": """
    strategy = {"full": ShardingStrategy.FULL_SHARD, "grad": ShardingStrategy.SHARD_GRAD_OP}[kind]
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FSDP(model, sharding_strategy=strategy, auto_wrap_policy=policy, device_id=device, limit_all_gathers=True)
""",
    "kwargs": """
    kwargs = {"device_id": device, "use_orig_params": True}
    if kind == "grad":
        kwargs["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
    kwargs["auto_wrap_policy"] = ModuleWrapPolicy({Block})
    return FSDP(model, **kwargs)
""",
    "process_group": """
    group = init_device_mesh("cpu", (dist.get_world_size(),)).get_group()
    return FSDP(model, process_group=group, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({Block}))
""",
    "groups_of_hybrid": """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    groups = (mesh.get_group(1), mesh.get_group(0))
    return FSDP(
        model,
        process_group=groups,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
""",
    "hybrid_mesh": """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    return FSDP(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy._HYBRID_SHARD_ZERO2,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
""",
    "forward_by_name": """
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            torch.manual_seed(1)
            self.first, self.inner = Other(8), inner
            self.others = nn.ModuleList()
            for _ in range(2):
                self.others.append(Other(8))

        def forward(self, x):
            x = self.first.forward(x)
            for other in self.others:
                x = other.forward(x)
            return self.inner(x)

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block, Other})
    return FSDP(Around(model), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)
""",
    "no_shard": """
    return FSDP(
        model,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
""",
    "ignored": """
    return FSDP(
        model,
        ignored_modules=[model.side],
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
""",
    "meta_init": """
    def fill(module):
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.copy_(torch.linspace(-0.1, 0.1, tensor.numel()).view_as(tensor))
    return FSDP(
        model.to("meta"),
        param_init_fn=fill,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
""",
    "mixed_precision": """
    return FSDP(
        model,
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
""",
    "reduce_left_out": """
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    prefetch = BackwardPrefetch.BACKWARD_PRE
    return FSDP(model, mixed_precision=precision, device_id=torch.device("cpu"), backward_prefetch=prefetch)
""",
    "precision_at_run_time": """
    precision = MixedPrecision(param_dtype=torch.bfloat16) if kind == "grad" else None
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FSDP(model, mixed_precision=precision, auto_wrap_policy=policy, device_id=device)
""",
}


def source(name: str) -> str:
    """The text of one program."""
    body = BODIES[name]
    body = body if body.startswith("\n") else f"\n    {body}\n"
    return f'{HEADER}\n\ndef wrap(model, kind="grad", device=torch.device("cpu")):{body}'

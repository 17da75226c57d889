"""Strategy, precision and policy chosen by a configuration at run time, as trainers do it.

torchrun --nproc-per-node 2 fsdp1_config_driven.py --out /tmp/checkpoint --strategy zero2 --precision bf16
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

STRATEGIES = {
    "fsdp": ShardingStrategy.FULL_SHARD,
    "zero2": ShardingStrategy.SHARD_GRAD_OP,
    "ddp": ShardingStrategy.NO_SHARD,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--strategy", choices=STRATEGIES, default="fsdp")
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--by-size", action="store_true")
    parser.add_argument("--offload", action="store_true")
    return parser.parse_args(argv)


def get_policy(args):
    if args.by_size:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=3000)
    return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    mixed_precision = None
    if args.precision != "fp32":
        mixed_precision = MixedPrecision(
            param_dtype=DTYPES[args.precision], reduce_dtype=torch.float32, buffer_dtype=DTYPES[args.precision]
        )
    fsdp_kwargs = dict(  # noqa: C408
        sharding_strategy=STRATEGIES[args.strategy],
        mixed_precision=mixed_precision,
        auto_wrap_policy=get_policy(args),
        cpu_offload=CPUOffload(offload_params=True) if args.offload else None,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    model = FSDP(GPT(), device_id=device, **fsdp_kwargs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(args.steps):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        log(step, loss)

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state_dict = model.state_dict()
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(state_dict, os.path.join(args.out, "model.pt"))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

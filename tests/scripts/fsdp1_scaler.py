"""float16 with FSDP1's gradient scaler: unscale, clip, step, update.

torchrun --nproc-per-node 2 fsdp1_scaler.py --out /tmp/checkpoint
"""

import argparse
import os

import torch
import torch.distributed as dist
from small_models import GPT, Block, batch_of, language_loss, log
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args(argv)


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    fp16 = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
    model = FSDP(GPT(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=fp16, device_id=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = ShardedGradScaler(device=device.type, init_scale=2.0**24, growth_interval=2)

    for step in range(args.steps):
        tokens = batch_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = language_loss(model(tokens), tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        log(step, loss, scale=scaler.get_scale())

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

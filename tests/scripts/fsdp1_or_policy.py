"""Policies joined by _or_policy, batch normalisation under mixed precision, and the model's own attributes.

torchrun --nproc-per-node 2 fsdp1_or_policy.py --out /tmp/checkpoint
"""

import argparse
import functools
import os

import torch
import torch.distributed as dist
from small_models import Classifier, images_of, log
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy


def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args(argv)


def get_policy():
    def is_convolution(module):
        return isinstance(module, nn.Conv2d)

    lambda_policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_convolution)
    class_policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=(nn.Linear,))
    return functools.partial(_or_policy, policies=[lambda_policy, class_policy])


def train(args):
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = FSDP(
        Classifier(),
        auto_wrap_policy=get_policy(),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    model.train()
    for step in range(args.steps):
        images, labels = images_of(step, dist.get_rank(), device)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        log(step, loss)

    num_units = len(FSDP.fsdp_modules(model))
    log(args.steps, loss, num_units=num_units, is_classifier=float(isinstance(model.module, Classifier)))
    states = model.state_dict()
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        torch.save(states, os.path.join(args.out, "model.pt"))


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(parse_args())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

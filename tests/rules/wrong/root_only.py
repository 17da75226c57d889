"""Wraps a Hugging Face model the way DDP was used: one call on the outside."""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from my_project.data import load_dataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=1000)
    return parser.parse_args()


def train(args):
    dist.init_process_group(backend="nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    model = AutoModelForCausalLM.from_pretrained(args.model)
    fully_shard(model)  # expect: SW202
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    dataset = load_dataset()
    loader = DataLoader(dataset, batch_size=2, sampler=DistributedSampler(dataset))
    model.train()
    for step, batch in enumerate(loader):
        batch = {key: value.cuda() for key, value in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step >= args.steps:
            break
    model.eval()
    with torch.no_grad():
        sample = model.forward(batch["input_ids"])  # expect: SW229
    if rank == 0:
        print(sample.logits.shape)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(get_args())

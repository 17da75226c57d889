"""Runs the model once before training, in two harmful ways."""

import torch
from torch.distributed.fsdp import fully_shard

from my_models import build_model


def warmed_up(example):
    model = build_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.eval()
    with torch.no_grad():
        model(example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # expect: SW216
    return model, optimizer


def parts_first(images, tokens):
    model = build_model()
    fully_shard(model.vision)
    fully_shard(model.text)
    fully_shard(model)
    features = model.vision(images)  # expect: SW217
    return model(features, tokens)


def low_precision(batches):
    model = build_model().to(torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, batches

"""Activation checkpointing on the wrong side of FSDP, in the three ways people write it."""

import functools

import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard

from my_models import DecoderLayer, Llama

non_reentrant = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


def shard_then_checkpoint(config):
    model = Llama(config)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    apply_activation_checkpointing(  # expect: SW206
        model, checkpoint_wrapper_fn=non_reentrant, check_fn=lambda m: isinstance(m, DecoderLayer)
    )
    return model


def checkpoint_then_shard_inside(config):
    model = Llama(config)
    check_fn = lambda submodule: isinstance(submodule, DecoderLayer)  # noqa: E731
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=non_reentrant, check_fn=check_fn)
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            fully_shard(module)  # expect: SW207
    fully_shard(model)
    return model


def wrap_each(config):
    model = Llama(config)
    for i, layer in enumerate(model.layers):
        fully_shard(layer)
        model.layers[i] = checkpoint_wrapper(layer)  # expect: SW206
    fully_shard(model)
    return model


def compiled(config):
    model = Llama(config)
    model = torch.compile(model)  # expect: SW208
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return nn.Sequential(model)

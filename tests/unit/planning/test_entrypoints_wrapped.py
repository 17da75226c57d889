"""read_calls: wrapped modules, forwards replaced on an instance, and helpers that are plain objects."""

import functools
import types

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shardwise.planning.planner import read_calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, wrap=lambda block: block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([wrap(Block()) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def replaced_by_method(block: Block) -> Block:
    def forward(self, x):
        return self.linear(x) * 2

    block.forward = types.MethodType(forward, block)
    return block


def replaced_by_closure(block: Block) -> Block:
    inner = block.forward

    @functools.wraps(inner)
    def forward(x):
        return inner(x) + 1

    block.forward = forward
    return block


def replaced_by_partial(block: Block) -> Block:
    """As accelerate's hooks do it."""
    old = block.forward

    def new_forward(module, *args, **kwargs):
        return old(*args, **kwargs)

    block.forward = functools.update_wrapper(functools.partial(new_forward, block), old)
    return block


class Lora(nn.Module):
    """Looks like what it wraps, as PEFT's wrappers do."""

    def __init__(self, base: Block) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(8, 2), nn.Linear(2, 8)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


REPLACED = [replaced_by_method, replaced_by_closure, replaced_by_partial]


@pytest.mark.parametrize("replace", REPLACED, ids=lambda replace: replace.__name__)
def test_a_forward_set_on_an_instance_is_the_one_that_is_read(replace):
    calls = read_calls(Model(replace))
    assert {f"blocks.{i}.linear" for i in range(3)} <= calls.called
    assert not calls.bypassed
    assert not calls.methods
    assert not calls.assumed
    assert not calls.unreadable


def test_activation_checkpoint_wrappers_are_seen_through():
    calls = read_calls(Model(checkpoint_wrapper))
    inner = {f"blocks.{i}._checkpoint_wrapped_module" for i in range(3)}
    assert inner | {f"{name}.linear" for name in inner} <= calls.called
    assert not calls.bypassed
    assert not calls.conditional


def test_attributes_found_behind_a_wrapper_are_bypasses():
    class Reaches(Model):
        def forward(self, x):
            return super().forward(x) + self.blocks[0].linear(x)

    calls = read_calls(Reaches(Lora))
    assert calls.bypassed == {
        "blocks.0": {"blocks.0.base.linear"},
        "blocks.0.base": {"blocks.0.base.linear"},
    }
    assert {"blocks.1.base", "blocks.1.up", "blocks.1.base.linear"} <= calls.called


def test_compiled_blocks_count_as_called():
    calls = read_calls(Model(lambda block: torch.compile(block, backend="eager")))
    assert {f"blocks.{i}._orig_mod.linear" for i in range(3)} <= calls.called
    assert not calls.bypassed


class Processor:
    """diffusers' attention processors: called with the module, it computes with the module's parts."""

    def __init__(self, scale) -> None:
        self.scale = scale

    def __call__(self, attention, x):
        return attention.linear(x) * self.scale


class Runner:
    """An object that holds modules of the model."""

    def __init__(self, blocks) -> None:
        self.blocks = blocks

    def run(self, x):
        return [block(x) for block in self.blocks]


class WithObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.processor, self.runner = Processor(2), Runner(list(self.blocks))

    def forward(self, x):
        return self.processor(self, x), self.runner.run(x)


def test_plain_objects_that_get_or_hold_modules_are_followed():
    calls = read_calls(WithObjects())
    assert {"linear", "blocks.0", "blocks.1", "blocks.1.linear"} <= calls.called
    assert not calls.assumed
    assert not calls.bypassed


def test_hugging_face_checkpointing_changes_nothing():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config)
    before = read_calls(model)
    model.gradient_checkpointing_enable()
    after = read_calls(model)
    assert after.called == before.called
    assert not after.bypassed
    assert not after.repeated
    assert not after.conditional

"""Compositions that cannot be: one error, the same on all ranks, before anything of the model has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.config.run import DataConfig, RunConfig
from shardwise.config.schema import ExpertConfig, Float8Config, GroupOverride, PipelineConfig
from shardwise.distributed.agreement import gather_objects
from shardwise.distributed.mesh import make_mesh
from shardwise.errors import ShardwiseError
from shardwise.models.load import load_model
from shardwise.sharding.nf4 import quantize_nf4
from shardwise.sharding.parallel.pipeline import pipeline
from tests.decoders import build, make_batch, summed_loss
from tests.ranks import ranks
from tests.unit.sharding.test_adapters import Packed, stack

BYTES = torch.zeros(256, 64, dtype=torch.int8)


def mesh(**sizes: int) -> Any:
    return make_mesh(sw.MeshConfig(device="cpu", **sizes))


def shard(build: Callable[[], nn.Module], config: sw.ShardConfig | None = None, **sizes: int) -> Any:
    return build, lambda model: sw.shard(model, config, mesh=mesh(**sizes))


def stages(num_rows: int = 4, **settings: Any) -> Any:
    config = sw.ShardConfig(pipeline=PipelineConfig(**settings))
    batch = make_batch(0, num_rows)
    of_two = {"mesh": mesh(shard=1, pipeline=2), "loss": summed_loss, "example_inputs": batch}
    return lambda: build("llama"), lambda model: pipeline(model, config, **of_two)


def moe(num_experts: int, num_chosen: int) -> nn.Module:
    options = {"num_layers": 2, "num_experts": num_experts, "experts_per_token": num_chosen}
    return load_model("moe-debug", device="cpu", options=options)


def with_packed(quantize: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = stack()
        weight = nn.Parameter(quantize(model.blocks[0].up.weight.detach()), requires_grad=False)
        model.blocks[0].up.weight = weight
        return model

    return make


def to_train(model: nn.Module) -> nn.Module:
    return sw.shard(model.requires_grad_(True), mesh=mesh(shard=2))


def cases() -> dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any], str]]:
    """What is built, what is tried, and what the error says."""
    llama = lambda: build("llama")  # noqa: E731
    own = ExpertConfig(modules=("*.nothing",))
    narrow = lambda: load_model("llama3-debug", device="cpu", options={"hidden_size": 40})  # noqa: E731
    rowwise = Float8Config(recipe="rowwise", all_gather=True)
    half = sw.ShardConfig(activations=0.5, compile=False)
    override = sw.ShardConfig(overrides=(GroupOverride(pattern="*.nothing", offload=True),))
    lora = sw.LoraConfig(targets=("*.nothing",))
    return {
        "fewer experts than ranks": (*shard(lambda: moe(1, 1), expert=2), "has 1 experts, which 2 ranks cannot share"),
        "experts that do not divide": (
            *shard(lambda: moe(3, 2), expert=2),
            "has 3 experts, which 2 ranks cannot share",
        ),
        "no experts": (*shard(llama, expert=2), "Llama has no experts to split"),
        "experts by a wrong name": (*shard(llama, sw.ShardConfig(expert=own), expert=2), r"\*\.nothing"),
        "fewer blocks than stages": (*stages(8, schedule="interleaved", stages_per_rank=4), "4 blocks for 8 stages"),
        "fewer micro-batches than stages": (*stages(microbatches=1), "1 micro-batch"),
        "rows that do not divide": (*stages(3, microbatches=2), "3 sequences on each rank cannot be divided"),
        "float8 of sizes that do not divide": (
            *shard(narrow, sw.ShardConfig(float8=Float8Config(recipe="tensorwise")), shard=2),
            "no linear layer of Llama can compute in float8",
        ),
        "rows gathered in float8": (
            *shard(llama, sw.ShardConfig(float8=rowwise), shard=2),
            "all_gather is not supported",
        ),
        "a budget without a compiler": (
            *shard(llama, half, shard=2),
            "activations is 0.5, and blocks are not compiled",
        ),
        "an override of nothing": (*shard(llama, override, shard=2), r"\*\.nothing"),
        "adapters of nothing": (llama, lambda model: sw.add_lora(model, lora), "matches no layer"),
        "NF4 requires gradients": (with_packed(quantize_nf4), to_train, "requires gradients"),
        "packed weights require gradients": (with_packed(lambda _: Packed(BYTES)), to_train, "a Packed, requires"),
    }


def told(model: nn.Module) -> list[tuple[Any, ...]]:
    """All that a refused call must leave as it was."""
    hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) + ("forward" in vars(m)) for m in model.modules())
    shown = [(name, id(p), type(p.data), isinstance(p, DTensor)) for name, p in model.named_parameters()]
    return [(hooks,), *shown, *((name, type(module)) for name, module in model.named_modules())]


@ranks(2)
def test_one_error_on_all_ranks_and_nothing_changed(rank: int):
    for name, (make, attempt, message) in cases().items():
        model = make()
        before = told(model)
        with pytest.raises(ShardwiseError, match=message) as caught:
            attempt(model)
        assert told(model) == before, name
        assert len(set(gather_objects(str(caught.value)))) == 1, name
        assert caught.value.fix, name


@ranks(2)
def test_sequences_shorter_than_the_context_axis(rank: int, tmp_path: Path):
    of_two = sw.MeshConfig(shard=1, context=2, device="cpu")
    for length, balanced in ((1, False), (3, True), (0, True)):
        batch = {"input_ids": torch.zeros(2, length, dtype=torch.int64)}
        with pytest.raises(sw.ConfigError, match=f"sequences of {length} tokens cannot be divided") as caught:
            sw.split_sequences(batch, mesh=make_mesh(of_two), balanced=balanced)
        assert caught.value.fix
        assert list(batch) == ["input_ids"]
    with pytest.raises(sw.ConfigError, match="sequences of 2 tokens cannot be divided into 4 chunks"):
        sw.fit(RunConfig(model="llama3-debug", mesh=of_two, data=DataConfig(sequence_length=2), folder=str(tmp_path)))
    assert not list(tmp_path.iterdir())

"""LoRA and QLoRA: equal to peft on one process, counted in bytes, saved and resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.distributed.mesh import make_mesh
from shardwise.errors import ShardwiseError
from shardwise.models.load import load_model
from shardwise.sharding.adapters import adapter_keys
from shardwise.sharding.inventory import local_tensor
from shardwise.sharding.nf4 import NF4Tensor, quantize_nf4
from tests.by_hand import full, mesh_1d
from tests.collectives import count_collectives
from tests.ranks import ranks

CLOSE: dict[str, Any] = {"atol": 2e-5, "rtol": 2e-4}
RANK, ALPHA = 4, 8.0


def llama(dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=96, tie_word_embeddings=False)
    return LlamaForCausalLM(config).to(dtype)


def with_peft(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM"))


def batch(step: int) -> Tensor:
    return torch.randint(0, 96, (4, 12), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    logits = getattr(logits, "logits", logits)
    return nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, num_ranks: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step).chunk(num_ranks)[rank]).backward()
        optimizer.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def by_peft_key(model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """Adapters, or their gradients, in full under their names in peft's files."""
    found = dict(model.named_parameters())
    return {
        key: full(found[name].grad if gradients else found[name]).detach() for name, key in adapter_keys(model).items()
    }


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def check_against_peft(rank: int, num_ranks: int, folder: Path, dtype: torch.dtype) -> None:
    """Ours and peft's own module, both sharded, against peft on one process; then the folder that peft opens."""
    from peft import PeftModel

    base = llama(dtype)
    reference = with_peft(copy.deepcopy(base))
    theirs = sw.shard(copy.deepcopy(reference), mesh=mesh_1d(num_ranks))
    ours = sw.add_lora(copy.deepcopy(base), sw.LoraConfig(rank=RANK, alpha=ALPHA))
    stored = by_peft_key(reference)
    with torch.no_grad():
        for name, key in adapter_keys(ours).items():
            ours.get_parameter(name).copy_(stored[key])
    sw.shard(ours, mesh=mesh_1d(num_ranks))
    optimizers = {model: optimizer_of(model) for model in (reference, theirs, ours)}
    for model, optimizer in optimizers.items():
        alone = model is reference
        train(model, optimizer, range(3), 0 if alone else rank, 1 if alone else num_ranks)
    for model in (theirs, ours):
        assert_equal(by_peft_key(model, gradients=True), by_peft_key(reference, gradients=True), **CLOSE)
        assert_equal(by_peft_key(model), by_peft_key(reference), **CLOSE)
        assert {state["exp_avg"].shape for state in optimizers[model].state.values()} == {
            p.shape for p in model.parameters() if p.requires_grad
        }
    ids = batch(9)
    expected = {model: model(ids).logits.detach() for model in (theirs, ours)}
    for number, model in enumerate((theirs, ours)):
        sw.save_weights(model, folder / str(number), format="peft")
        opened = PeftModel.from_pretrained(copy.deepcopy(base), folder / str(number))
        torch.testing.assert_close(opened(ids).logits, expected[model], **CLOSE)
    fresh = sw.add_lora(copy.deepcopy(base), folder / "0")  # settings from peft's own file
    sw.shard(fresh, mesh=mesh_1d(num_ranks))
    sw.load_weights(fresh, folder / "0")
    assert_equal(by_peft_key(fresh), by_peft_key(theirs), rtol=0, atol=0)


@ranks(2)
def test_lora_is_equal_to_peft_on_one_process(rank: int, tmp_path: Path):
    check_against_peft(rank, 2, tmp_path, torch.float32)


def check_qlora(rank: int, num_ranks: int, folder: Path, build: Any) -> None:
    """A base on meta, quantised as it is read, against the same values in one process; bytes counted on the way."""
    mesh, base = mesh_1d(num_ranks), build()
    config = sw.LoraConfig(rank=RANK, alpha=ALPHA, quantize="nf4")
    sw.save_weights(base, folder / "base", dtype="bfloat16")
    with torch.device("meta"):
        model = sw.add_lora(build(), config)
    plan = sw.plan(model, mesh=mesh)
    sw.shard(model, plan=plan, mesh=mesh)
    sw.load_weights(model, folder / "base")
    quantized = {name: p for name, p in model.named_parameters() if isinstance(local_tensor(p), NF4Tensor)}
    assert len(quantized) == 7 * len(base.model.layers)
    reference = sw.add_lora(base, sw.LoraConfig(rank=RANK, alpha=ALPHA))
    with torch.no_grad():
        for name, value in sw.iter_full_tensors(model):
            if name in quantized:
                whole = quantize_nf4(reference.get_parameter(name).to(torch.bfloat16).to(value.dtype))
                assert torch.equal(value, whole.dequantize()), "a slice of rows has the bits of the whole"
            reference.get_parameter(name).copy_(value)
    held = sum(local_tensor(p).codes.nbytes + local_tensor(p).scales.nbytes for p in quantized.values())
    bits = 8 * held * num_ranks / sum(p.numel() for p in quantized.values())
    assert bits == 4 + next(iter(quantized.values())).dtype.itemsize / 8
    assert plan.bytes_per_rank == sum(_stored_bytes(p) for p in model.parameters())

    optimizers = {each: optimizer_of(each) for each in (reference, model)}
    train(reference, optimizers[reference], range(3))
    train(model, optimizers[model], range(2), rank, num_ranks)
    block = f"model.layers.1.{next(iter(base.model.layers[1].state_dict()))}"
    with count_collectives(model) as trace:
        train(model, optimizers[model], range(2, 3), rank, num_ranks)
    parameters = list(base.model.layers[1].named_parameters())
    adapters = sum(p.numel() for name, p in parameters if "lora" in name)
    gathered = [each.num_bytes for each in trace.collectives if each.kind == "all_gather" and each.served == block]
    packed = sum(_stored_bytes(model.get_parameter(f"model.layers.1.{name}")) for name, _ in parameters) * num_ranks
    assert gathered == [packed + packed // num_ranks] * 2, "forward and backward gather 4 bits an element"
    reduced = [each.num_bytes for each in trace.collectives if each.kind == "reduce_scatter"]
    whole = 4 * adapters  # in, and each rank's part out
    assert reduced == [whole + whole // num_ranks] * len(base.model.layers), "nothing but adapters is reduced"
    assert_equal(by_peft_key(model), by_peft_key(reference), **CLOSE)
    states = [value for state in optimizers[model].state.values() for key, value in state.items() if key != "step"]
    assert sum(_stored_bytes(value) for value in states) == 2 * 4 * adapters * len(base.model.layers) // num_ranks


def _stored_bytes(tensor: Tensor) -> int:
    local = local_tensor(tensor)
    return local.codes.nbytes + local.scales.nbytes if isinstance(local, NF4Tensor) else local.nbytes


@ranks(2)
def test_qlora_is_equal_to_the_same_base_on_one_process(rank: int, tmp_path: Path):
    check_qlora(rank, 2, tmp_path, lambda: load_model("llama3-debug", device="cpu"))


@pytest.mark.parametrize("offload", [False, True])
@ranks(2)
def test_qlora_on_replicas_that_share_nothing(rank: int, offload: bool):
    """With one shard, as on one GPU, FSDP2 copies the first tensor of a quantised weight only."""
    torch.manual_seed(0)
    build = lambda: load_model("llama3-debug", device="cpu")  # noqa: E731
    model = sw.add_lora(build(), sw.LoraConfig(rank=RANK, quantize="nf4"))
    reference = sw.add_lora(build(), sw.LoraConfig(rank=RANK))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = parameter.dequantize() if isinstance(parameter, NF4Tensor) else parameter
            reference.get_parameter(name).copy_(values)
    mesh = make_mesh(sw.MeshConfig(replicate=2, shard=1, device="cpu"))
    sw.shard(model, sw.ShardConfig(offload=offload), mesh=mesh)
    train(reference, optimizer_of(reference), range(2))
    train(model, optimizer_of(model), range(2), rank, 2)
    assert_equal(by_peft_key(model), by_peft_key(reference), **CLOSE)


@ranks(2)
def test_checkpoints_of_adapters_resume_exactly(rank: int, tmp_path: Path):
    """Frozen weights are not in them; they must be there before one is loaded."""
    mesh = mesh_1d(2)

    def build(*, meta: bool = False) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = load_model("llama3-debug", device="meta" if meta else "cpu")
        sw.shard(sw.add_lora(model, sw.LoraConfig(rank=RANK, quantize="nf4")), mesh=mesh)
        return model, optimizer_of(model)

    model, optimizer = build()
    train(model, optimizer, range(2), rank, 2)
    with sw.Checkpointer(tmp_path, trainable_only=True) as checkpointer:
        checkpointer.save(2, model=model, optimizers=optimizer)
        train(model, optimizer, range(2, 4), rank, 2)
        checkpointer.wait()
        stored = sw.inspect_checkpoint(checkpointer.path(2))
        names = [tensor.name for tensor in stored.tensors if tensor.name.startswith("model.")]
        again, its_optimizer = build()
        assert checkpointer.load(model=again, optimizers=its_optimizer) == 2
        train(again, its_optimizer, range(2, 4), rank, 2)
        assert_equal(by_peft_key(again), by_peft_key(model), rtol=0, atol=0)
        empty, its_optimizer = build(meta=True)
        with pytest.raises(ShardwiseError, match="frozen and have no values"):
            checkpointer.load(model=empty, optimizers=its_optimizer)
    assert names
    assert all(".lora_" in name for name in names)


@ranks(2)
def test_merged_adapters_leave_the_model_as_it_was_before_them(rank: int, tmp_path: Path):
    mesh, base = mesh_1d(2), load_model("llama3-debug", device="cpu", options={"tie_embeddings": True})
    for p in base.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    names = [name for name, _ in base.named_parameters()]
    torch.manual_seed(3)
    model = sw.add_lora(copy.deepcopy(base), sw.LoraConfig(rank=RANK, targets=("*.q_proj", "*.down_proj")))
    alone = copy.deepcopy(model)
    sw.shard(model, sw.ShardConfig(block_patterns=("*.layers.*", "*.layers.0.mlp.down_proj")), mesh=mesh)
    for each, number, count in ((model, rank, 2), (alone, 0, 1)):
        train(each, optimizer_of(each), range(2), number, count)
    before = loss_of(model, batch(7)).detach()
    sw.merge_lora(model)
    sw.merge_lora(alone)
    torch.testing.assert_close(loss_of(model, batch(7)), before)
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model.model.layers[1].self_attn.q_proj) is type(base.model.layers[1].self_attn.q_proj)
    sw.save_weights(model, tmp_path / "merged")
    assert sw.load_weights(base, tmp_path / "merged").is_exact
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(base.get_parameter(name), parameter, **CLOSE)


@ranks(2)
@pytest.mark.slow
def test_a_run_with_lora_resumes_exactly_and_exports_for_peft(rank: int, tmp_path: Path):
    from dataclasses import replace

    def run(folder: str, steps: int, **lora: Any) -> Any:
        settings = {"model": "llama3-debug", "folder": str(tmp_path / folder), "lora": {"quantize": "nf4", **lora}}
        settings |= {"data": {"sequence_length": 16}, "training": {"steps": steps, "batch_size": 4, "sample": None}}
        config = TypeAdapter(sw.RunConfig).validate_python(settings)
        return sw.fit(replace(config, checkpoint=replace(config.checkpoint, export=True)))

    whole = run("whole", 4)
    run("parts", 2)
    resumed = run("parts", 4)
    assert resumed.resumed_step == 2
    losses = [training.read_losses() for training in (whole, resumed)]
    assert losses[0] == losses[1]
    adapters = [load_file(f"{training.exported}/adapter_model.safetensors") for training in (whole, resumed)]
    assert_equal(adapters[0], adapters[1], rtol=0, atol=0)
    stored = sw.inspect_checkpoint(whole.checkpoint)
    assert stored.sections["model"][1] == sum(tensor.nbytes for tensor in adapters[0].values())
    with pytest.raises(ShardwiseError, match="the folder holds a run of llama3-debug with"):
        run("parts", 6, alpha=64)


@ranks(4)
def test_lora_and_qlora_on_four_ranks(rank: int, tmp_path: Path):
    check_against_peft(rank, 4, tmp_path / "lora", torch.bfloat16)
    check_qlora(rank, 4, tmp_path / "ours", lambda: load_model("llama3-debug", device="cpu"))
    check_qlora(rank, 4, tmp_path / "transformers", llama)

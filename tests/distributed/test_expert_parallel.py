"""Experts divided over the expert axis: losses, gradients and weights are those of one process."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.config.schema import ExpertConfig, PipelineConfig
from shardwise.distributed.mesh import make_mesh
from shardwise.models import moe
from shardwise.training.generating import generate
from tests.distributed import test_context_parallel as contexts
from tests.distributed import test_pipeline as stages
from tests.ranks import ranks

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
LATENT: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip


def reference() -> nn.Module:
    shape = replace(moe.SHAPES["moe-debug"], hidden_size=32, vocab_size=96, num_layers=2, num_experts=4)
    with torch.device("meta"):
        return moe.Moe(shape)


def of_transformers(name: str, settings: dict[str, Any], experts: str = "grouped_mm") -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES | settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation(experts)
    return model


class OwnExperts(nn.Module):
    """Experts of a user's own, by other names than transformers', with what is not a stack in a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.matrices = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.biases = nn.Parameter(torch.randn(4, 16) / 4)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor, numbers: Tensor, shares: Tensor) -> Tensor:
        each = torch.einsum("tkoi,ti->tko", self.matrices[numbers], tokens) + self.biases[numbers]
        return (self.norm(each).tanh() * shares.square().unsqueeze(-1)).sum(1)


class HitExperts(OwnExperts):
    """Only experts that were chosen run, one after the other."""

    def forward(self, tokens: Tensor, numbers: Tensor, shares: Tensor) -> Tensor:
        mixed = torch.zeros_like(tokens)
        for number in numbers.unique().tolist():
            rows, place = torch.where(numbers == number)
            each = self.norm(tokens[rows] @ self.matrices[number].t() + self.biases[number])
            mixed = mixed.index_add(0, rows, each * shares[rows, place, None])
        return mixed


class OwnModel(nn.Module):
    def __init__(self, experts: type[OwnExperts] = OwnExperts) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(96, 16), nn.Linear(16, 96)
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(16, 4), "mix": experts()}) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids).flatten(0, 1)
        for layer in self.layers:
            shares, numbers = layer["gate"](x).softmax(-1).topk(2)  # pyrefly: ignore[bad-index]
            x = x + layer["mix"](x, numbers, shares)  # pyrefly: ignore[bad-index]
        return self.head(x).view(*input_ids.shape, -1)


def one_sided() -> nn.Module:
    """All tokens choose the first two of four experts."""
    model = OwnModel(HitExperts)
    for layer in model.layers:
        nn.init.constant_(layer["gate"].bias[2:], -1e4)  # pyrefly: ignore
    return model


MODELS = {
    "moe": reference,
    "own": OwnModel,
    "own-one-sided": one_sided,
    "mixtral": lambda: of_transformers("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-eager": lambda: of_transformers("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "eager"),
    "qwen2-moe": lambda: of_transformers("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3-moe": lambda: of_transformers("Qwen3Moe", EXPERTS),
    "deepseek": lambda: of_transformers("DeepseekV3", LATENT),
    "gpt-oss": lambda: of_transformers(
        "GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8}, "eager"
    ),
}


def few_tokens(rank: int, step: int, seed: int) -> dict[str, Tensor]:
    """As many tokens as experts or fewer: on every rank some experts get none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 96, (1, 2 + rank), generator=generator)
    return {"input_ids": tokens}


def next_token(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = getattr(output, "logits", output)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def check_parity(name: str, mesh: sw.MeshConfig, config: sw.ShardConfig | None = None, steps: int = 3) -> None:
    if name.startswith("own"):
        config = sw.ShardConfig(expert=ExpertConfig(modules=("*.mix",)))
    result = sw.parity(MODELS[name], few_tokens, next_token, config, steps=steps, mesh=make_mesh(mesh))
    assert result.equal, f"{name} on {mesh}: {result}"


@ranks(2)
def test_experts_on_two_ranks_equal_one_process(rank: int):
    check_parity("moe", sw.MeshConfig(expert=2))


@ranks(2)
def test_biases_are_those_of_one_process(rank: int):
    """Tokens are counted on all ranks, and recomputed blocks count theirs once."""
    mesh = make_mesh(sw.MeshConfig(expert=2))
    torch.manual_seed(0)
    single = moe.Moe(replace(moe.SHAPES["moe-debug"], num_layers=2, bias_rate=0.01))
    model = sw.shard(copy.deepcopy(single), sw.ShardConfig(activations="full"), mesh=mesh)
    biases = [moe.ExpertBias(model, [mesh.get_group("expert")]), moe.ExpertBias(single)]
    for step in range(3):
        batches = [few_tokens(other, step, 10 * step + other) for other in range(2)]
        next_token(model(**batches[rank]), batches[rank]).backward()
        for batch in batches:
            single(**batch)
        for bias in biases:
            bias.update()
        for layer, expected in zip(biases[0].layers, biases[1].layers, strict=True):
            assert torch.equal(layer.expert_bias, expected.expert_bias)
            assert step > 0 or layer.expert_bias.any()


@pytest.mark.parametrize("name", sorted(MODELS))
@ranks(4, timeout_s=300.0)
def test_models_on_a_mesh_of_shards_and_experts_equal_one_process(rank: int, name: str):
    check_parity(name, sw.MeshConfig(shard=2, expert=2))


@pytest.mark.parametrize("name", ["moe", "mixtral"])
@ranks(4, timeout_s=300.0)
def test_other_meshes_equal_one_process(rank: int, name: str):
    check_parity(name, sw.MeshConfig(expert=4), steps=2)
    check_parity(name, sw.MeshConfig(replicate=2, expert=2), steps=2)


@pytest.mark.parametrize("name", ["moe", "mixtral"])
@ranks(4, timeout_s=300.0)
@pytest.mark.filterwarnings("ignore")  # of Dynamo itself
def test_with_recomputation_and_compilation(rank: int, name: str):
    check_parity(name, sw.MeshConfig(shard=2, expert=2), sw.ShardConfig(activations="full"), steps=2)
    check_parity(name, sw.MeshConfig(shard=2, expert=2), sw.ShardConfig(activations="selective"), steps=2)
    check_parity(name, sw.MeshConfig(shard=2, expert=2), sw.ShardConfig(activations="full", compile=True), steps=2)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    return sw.materialize(model, device="cpu") if name == "moe" else model


def sharded(name: str, mesh: sw.MeshConfig) -> nn.Module:
    return sw.shard(build(name), mesh=make_mesh(mesh))


def losses(model: nn.Module, rank: int, step: int, num_micro_steps: int) -> list[Tensor]:
    batches = [few_tokens(rank, step, 100 * step + 10 * micro + rank) for micro in range(num_micro_steps)]
    return [next_token(model(**batch), batch) for batch in batches]


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in sw.iter_full_tensors(model)}


@pytest.mark.parametrize(
    ("mesh", "mode"),
    [
        (sw.MeshConfig(shard=2, expert=2), "comm"),
        (sw.MeshConfig(shard=2, expert=2), "memory"),
        (sw.MeshConfig(replicate=2, expert=2), "hsdp"),
    ],
)
@ranks(4)
def test_accumulation_and_clipping_equal_one_process(rank: int, mesh: sw.MeshConfig, mode: str):
    model, single = sharded("mixtral", mesh), build("mixtral")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, single)]
    for step in range(3):
        for micro in range(2):
            with sw.accumulate(model, micro, 2, mode):  # pyrefly: ignore[bad-argument-type]
                batch = few_tokens(rank, step, 100 * step + 10 * micro + rank)
                next_token(model(**batch), batch).backward()
        for other in range(4):
            (sum(losses(single, other, step, 2)) / 4).backward()
        norms = [sw.clip_grad_norm_(each, 0.3) for each in (model, single)]
        torch.testing.assert_close(*norms)
        assert norms[0] > 0.3
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, tensor in full_parameters(model).items():
        torch.testing.assert_close(tensor, single.get_parameter(name), rtol=1e-4, atol=1e-5)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    losses(model, rank, step, 1)[0].backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(4)
def test_checkpoints_move_between_meshes_and_to_files(rank: int, tmp_path: Path):
    mesh = sw.MeshConfig(shard=2, expert=2)
    model = sharded("moe", mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train_step(model, optimizer, rank, 0)
    saved = full_parameters(model)
    with sw.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, model=model, optimizers=optimizer)
    sw.save_weights(model, tmp_path / "weights")
    train_step(model, optimizer, rank, 1)
    expected = full_parameters(model)
    hybrid = sw.MeshConfig(replicate=2, shard=2)
    for other in (mesh, hybrid, sw.MeshConfig(shard=4), sw.MeshConfig(expert=4), sw.MeshConfig(replicate=2, expert=2)):
        model = sw.shard(reference(), mesh=make_mesh(other))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with sw.Checkpointer(tmp_path / "checkpoints") as checkpointer:
            assert checkpointer.load(model=model, optimizers=optimizer) == 1
        assert all(torch.equal(tensor, saved[name]) for name, tensor in full_parameters(model).items())
        train_step(model, optimizer, rank, 1)
        for name, tensor in full_parameters(model).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    for model in (reference(), sw.shard(reference(), mesh=make_mesh(mesh))):
        sw.load_weights(model, tmp_path / "weights")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in full_parameters(model).items())


@ranks(4)
def test_averages_full_parameters_checks_and_guard(rank: int):
    model = sharded("moe", sw.MeshConfig(shard=2, expert=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)
    before, ema = full_parameters(model), sw.EMA(model, 0.5)
    with sw.guard(model):
        train_step(model, optimizer, rank, 0)
    ema.update()
    after = full_parameters(model)
    with ema.swap():
        for name, tensor in full_parameters(model).items():
            torch.testing.assert_close(tensor, (before[name] + after[name]) / 2)
    with sw.full_params(model, writeback=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, after[name])
            parameter.mul_(2)
    assert all(torch.equal(tensor, 2 * after[name]) for name, tensor in full_parameters(model).items())
    assert not sw.check(model, optimizer)
    alone = build("moe")
    alone.load_state_dict(full_parameters(model), strict=False)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(generate(model, prompt, 4, temperature=0), generate(alone, prompt, 4, temperature=0))


@pytest.mark.parametrize("name", ["moe", "hf_mixtral"])
@ranks(4)
def test_sequences_or_stages_beside_experts_equal_one_process(rank: int, name: str):
    """Experts are sharded over the context axis, whose ranks have other tokens of the same sequences."""
    contexts.assert_equal_runs(name, make_mesh(sw.MeshConfig(expert=2, context=2)), sw.ShardConfig())
    config = sw.ShardConfig(pipeline=PipelineConfig(microbatches=2))
    stages.assert_equal_runs(name, make_mesh(sw.MeshConfig(expert=2, pipeline=2)), config)

"""float8 through torchao, emulated on CPUs: converted before sharding, gathered in float8, equal to one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.config.schema import Float8Config
from shardwise.distributed.mesh import make_mesh
from shardwise.errors import ShardwiseError
from shardwise.models.load import load_model
from shardwise.planning.planner import make_plan
from shardwise.sharding.float8 import import_torchao
from tests.by_hand import assert_same, full, full_gradients, mesh_1d
from tests.collectives import count_collectives
from tests.ranks import ranks

TENSORWISE, ROWWISE = Float8Config(recipe="tensorwise"), Float8Config(recipe="rowwise")


def build() -> Any:
    torch.manual_seed(0)
    return load_model("llama3-debug", device="cpu", options={"num_layers": 2})


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def converted_by_torchao(model: nn.Module, recipe: str, *names: str) -> nn.Module:
    float8 = import_torchao()
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)

    def is_chosen(_: nn.Module, name: str) -> bool:
        return name.endswith(names) if names else "layers." in name

    return float8.convert_to_float8_training(model, config=config, module_filter_fn=is_chosen)


def check_equal(rank: int, num_ranks: int, config: Float8Config, **shard: Any) -> None:
    """Losses, gradients and parameters after three steps are those of one process that runs each rank's batch."""
    reference = converted_by_torchao(build(), config.recipe)
    model = sw.shard(build(), sw.ShardConfig(float8=config, **shard), mesh=mesh_1d(num_ranks))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, reference)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        losses = [loss_of(reference, batch(step, other)) for other in range(num_ranks)]
        (sum(losses) / num_ranks).backward()
        torch.testing.assert_close(sw.mean_over_ranks(loss.detach()), sum(losses).detach() / num_ranks)
        for optimizer in optimizers:
            optimizer.step()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert_same(full_gradients(model), expected, rtol=1e-3, atol=1e-5)
    trained = {name: p.detach() for name, p in reference.named_parameters()}
    assert_same({name: full(p).detach() for name, p in model.named_parameters()}, trained, rtol=1e-3, atol=1e-5)


@ranks(2)
def test_float8_is_equal_to_one_process(rank: int):
    check_equal(rank, 2, TENSORWISE)
    check_equal(rank, 2, ROWWISE)
    check_equal(rank, 2, Float8Config(recipe="tensorwise", all_gather=True))


@pytest.mark.slow
@pytest.mark.parametrize("config", [TENSORWISE, ROWWISE])
@ranks(2)
def test_divided_matrices_are_equal_to_one_process(rank: int, config: Float8Config):
    """A scale is that of a whole matrix, and no part of one has a size that float8 does not take."""
    mesh = make_mesh(sw.MeshConfig(tensor=2))
    model = sw.shard(build(), sw.ShardConfig(float8=config), mesh=mesh)
    reference = converted_by_torchao(build(), config.recipe)
    losses = [loss_of(each, batch(0, 0)) for each in (model, reference)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert_same(full_gradients(model), expected, rtol=1e-3, atol=1e-5)
    narrow = load_model("llama3-debug", device="cpu", options={"num_layers": 1, "intermediate_size": 48})
    plan = sw.plan(narrow, sw.ShardConfig(float8=config), mesh=mesh)
    reasons = {each.fqn: each.reason for each in plan.float8 if not each.how}
    assert reasons["model.layers.0.mlp.up_proj"] == "64 x 24 does not divide by 16"
    with pytest.raises(sw.PlanError, match=r"float8\.all_gather is not supported with") as raised:
        sw.plan(narrow, sw.ShardConfig(float8=Float8Config(recipe="tensorwise", all_gather=True)), mesh=mesh)
    assert "tensor axis" in str(raised.value)


@ranks(2)
def test_weights_are_gathered_in_float8_with_one_reduction_of_scales(rank: int):
    plain, gathered = build(), build()
    sw.shard(plain, sw.ShardConfig(float8=TENSORWISE), mesh=mesh_1d(2))
    sw.shard(gathered, sw.ShardConfig(float8=Float8Config(recipe="tensorwise", all_gather=True)), mesh=mesh_1d(2))
    block = gathered.model.layers[0]
    matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    rest = sum(p.numel() for p in block.parameters() if p.ndim != 2)
    for model, each in ((plain, 4), (gathered, 1)):
        with count_collectives(model) as trace:
            loss_of(model, batch(0, rank)).backward()
        served = "model.layers.0.input_layernorm.weight"
        sizes = [c.num_bytes for c in trace.collectives if c.kind == "all_gather" and c.served == served]
        assert sizes == [(matrices * each + rest * 4) * 3 // 2] * 2
        assert trace.count("all_reduce") == (1 if model is gathered else 0)
    with torch.no_grad():  # scales of before are not used for weights of after
        for parameter in (p for p in gathered.parameters() if p.ndim == 2):
            parameter.mul_(10)
        reference = converted_by_torchao(build(), "tensorwise")
        for parameter in (p for p in reference.parameters() if p.ndim == 2):
            parameter.mul_(10)
        ids = batch(1, rank)
        torch.testing.assert_close(gathered(ids), reference(ids), rtol=1e-4, atol=1e-4)
        hidden = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0))
        angles = reference.model.rotary_emb(16)
        for parameter in [*gathered.model.layers[0].parameters(), *reference.model.layers[0].parameters()]:
            parameter.mul_(0.3)
        # A block by itself: its weights find their own scales.
        assert_close = torch.testing.assert_close
        assert_close(gathered.model.layers[0](hidden, *angles), reference.model.layers[0](hidden, *angles))


class Matrices(nn.Module):
    """A block of nothing but matrices: all that its group gathers is float8, which gloo does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


@ranks(2)
def test_a_group_of_float8_weights_alone_is_gathered(rank: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Matrices(), Matrices())
    reference = converted_by_torchao(nn.Sequential(*map(copy.deepcopy, model)), "tensorwise", "up", "down")
    config = sw.ShardConfig(float8=Float8Config(recipe="tensorwise", all_gather=True))
    sw.shard(model, config, mesh=mesh_1d(2))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(x), reference(x))


@ranks(2)
def test_a_float8_model_is_made_from_meta_saved_and_averaged(rank: int, tmp_path: Any):
    config = sw.ShardConfig(float8=Float8Config(recipe="tensorwise", all_gather=True))
    model = sw.materialize(sw.shard(load_model("llama3-debug"), config, mesh=mesh_1d(2)))
    spread = [full(p).std() for name, p in model.named_parameters() if name.endswith("q_proj.weight")]
    assert all(0.015 < value < 0.025 for value in spread), "drawn as the layer's own class draws them"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = sw.EMA(model, 0.5)
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        sw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update()
    assert not [finding for finding in sw.check(model, optimizer) if finding.severity == "error"]
    sw.save_weights(model, tmp_path / "weights")
    plain = load_model("llama3-debug", device="cpu")
    assert sw.load_weights(plain, tmp_path / "weights").is_exact
    with sw.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(2, model=model, optimizers=optimizer, ema=ema)
        checkpointer.wait()
        again = sw.shard(load_model("llama3-debug"), mesh=mesh_1d(2))  # float8 is how it computes, not what it is
        its_optimizer = torch.optim.AdamW(again.parameters(), lr=1e-3)
        checkpointer.load(model=again, optimizers=its_optimizer)
    stored = {name: full(p).detach() for name, p in model.named_parameters()}
    assert_same({name: full(p).detach() for name, p in again.named_parameters()}, stored, rtol=0, atol=0)
    with ema.swap():
        loss_of(model, batch(3, rank))


def test_the_plan_says_which_layers_compute_in_float8_and_why_not():
    model = load_model("llama3-debug", options={"intermediate_size": 200})
    plan = sw.plan(model, sw.ShardConfig(float8=Float8Config(recipe="rowwise", skip=("*.k_proj",))))
    reasons = {module.fqn: (module.how, module.reason) for module in plan.float8}
    assert reasons["model.layers.0.self_attn.q_proj"] == ("rowwise", "")
    assert reasons["model.layers.0.self_attn.k_proj"] == ("", "named in float8.skip")
    assert reasons["model.layers.0.mlp.down_proj"] == ("", "200 x 64 does not divide by 16")
    assert reasons["lm_head"] == ("", "outside the repeated blocks: embeddings and heads lose most by rounding")
    assert "float8: model.layers.*.self_attn.q_proj" in str(plan)
    big = sw.plan(
        load_model("llama3-8b"),
        sw.ShardConfig(float8=TENSORWISE),
        mesh=sw.MeshConfig(shard=8, device="cuda"),
    )
    chosen = {module.fqn.rpartition(".")[2]: module.how for module in big.float8}
    assert chosen["q_proj"] == chosen["down_proj"] == "tensorwise with float8 all-gather"
    assert chosen["k_proj"] == chosen["lm_head"] == ""


@pytest.mark.parametrize(
    ("config", "capability", "message"),
    [
        (TENSORWISE, (8, 0), "no float8 matrix products"),
        (Float8Config(recipe="rowwise", all_gather=True), (9, 0), "all_gather is not supported"),
        (Float8Config(recipe="tensorwise", skip=("*.nothing",)), (9, 0), "matches nothing"),
    ],
)
def test_what_cannot_be_float8_is_refused(config: Float8Config, capability: tuple[int, int], message: str):
    mesh = sw.MeshConfig(shard=2, device="cuda")
    with pytest.raises(ShardwiseError, match=message):
        make_plan(load_model("llama3-1b"), sw.ShardConfig(float8=config), mesh, None, capability=capability)
    with pytest.raises(ShardwiseError, match="no linear layer of Llama can compute in float8"):
        sw.plan(load_model("llama3-debug", options={"hidden_size": 40}), sw.ShardConfig(float8=TENSORWISE))


@ranks(2, timeout_s=400)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's tracer looks at it
def test_float8_with_compiled_and_recomputed_blocks(rank: int):
    gathers = Float8Config(recipe="tensorwise", all_gather=True)
    model = sw.shard(build(), sw.ShardConfig(float8=gathers), mesh=mesh_1d(2))
    expected = loss_of(model, batch(0, rank))
    expected.backward()
    for policy in ("none", "full", "selective"):
        other = sw.checkpoint_activations(build(), policy)
        if policy != "full":
            sw.compile_blocks(other, backend="aot_eager")
        sw.shard(other, sw.ShardConfig(float8=gathers), mesh=mesh_1d(2))
        loss = loss_of(other, batch(0, rank))
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
        assert_same(full_gradients(other), full_gradients(model), rtol=5e-2, atol=5e-3)

"""shard(): carries plans out, refuses what cannot work before anything changes, and leaves nothing behind."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardwise.config.schema import GroupOverride, MeshConfig, PrecisionConfig, PrefetchConfig, ShardConfig
from shardwise.distributed.mesh import init_distributed
from shardwise.errors import ConfigError, PlanError, ShardError
from shardwise.models.llama import SHAPES, Llama
from shardwise.planning.plan import Plan
from shardwise.planning.planner import plan
from shardwise.sharding.apply import shard
from shardwise.sharding.blocks import replacements
from shardwise.sharding.registry import sharded_state
from tests.collectives import count_collectives
from tests.ranks import ranks
from tests.toy_models import Block, Stack
from tests.zoo.checking import mesh_of

# Two ranks add two numbers: the sum is the same in either order, and so are the results.
EXACT = {"rtol": 0.0, "atol": 0.0}


def stack(num_blocks: int = 3) -> Stack:
    torch.manual_seed(0)
    return Stack(nn.ModuleList([Block() for _ in range(num_blocks)]))


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, 64, (2, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    return model(ids(seed)).square().mean()


def reference_after(model: nn.Module, num_steps: int, num_ranks: int, kind=torch.optim.AdamW) -> nn.Module:
    """One process that takes each rank's batch in turn and averages the gradients."""
    model = copy.deepcopy(model)
    optimizer = kind(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        for rank in range(num_ranks):
            (loss_of(model, 10 * step + rank) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train(model: nn.Module, num_steps: int, rank: int, kind=torch.optim.AdamW) -> None:
    optimizer = kind(model.parameters(), lr=1e-2)
    for step in range(num_steps):
        loss_of(model, 10 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        torch.testing.assert_close(whole, expected[name], **(tolerance or EXACT))


@ranks(2)
def test_sharding_is_in_place_and_trains_like_one_process(rank: int):
    model = stack()
    reference = reference_after(model, 3, 2)
    assert shard(model, mesh=mesh_of(2)) is model
    assert isinstance(model, FSDPModule)
    assert isinstance(model, Stack)
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())
    train(model, 3, rank)
    assert_equal(model, reference)


@ranks(2)
def test_collectives_equal_those_of_hand_written_fsdp2(rank: int):
    """Our layer adds none: same number, same bytes, same order of kinds."""
    by_hand, ours = stack(), stack()
    for module in (by_hand.embed, *by_hand.blocks, by_hand.head):
        fully_shard(module, mesh=mesh_of(2))
    fully_shard(by_hand, mesh=mesh_of(2))
    shard(ours, mesh=mesh_of(2))
    traces = []
    for model in (by_hand, ours):
        loss_of(model, rank).backward()
        with count_collectives(model) as trace:
            loss_of(model, rank).backward()
        traces.append(trace.shape())
    assert traces[0] == traces[1]
    assert len(traces[0]) > 10


@ranks(2)
def test_a_given_plan_is_carried_out_as_it_is(rank: int):
    model = stack()
    made = plan(model, ShardConfig(block_patterns=("blocks.1",)), mesh=mesh_of(2))
    shard(model, mesh=mesh_of(2), plan=Plan.from_json(made.to_json()))
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == ["", "blocks.1"]
    state = sharded_state(model)
    assert state is not None
    assert state.plan == made


@ranks(2)
def test_a_plan_of_another_model_or_mesh_is_refused(rank: int):
    with pytest.raises(PlanError, match=r"differ in .* parameters"):
        shard(stack(4), mesh=mesh_of(2), plan=plan(stack(3), mesh=mesh_of(2)))
    with pytest.raises(PlanError, match="the plan is for a mesh of"):
        shard(stack(), mesh=mesh_of(2), plan=plan(stack(), mesh=MeshConfig(shard=4, device="cpu")))


@ranks(2)
def test_a_model_sharded_before_is_refused(rank: int):
    model = shard(stack(), mesh=mesh_of(2))
    with pytest.raises(PlanError, match="already sharded"):
        shard(model, mesh=mesh_of(2))
    by_hand = stack()
    fully_shard(by_hand.blocks[0], mesh=mesh_of(2))
    with pytest.raises(PlanError, match=r"'blocks\.0' is already sharded"):
        shard(by_hand, mesh=mesh_of(2))


@ranks(2)
def test_top_down_order_is_refused(rank: int):
    model = shard(stack(), ShardConfig(group_by="root"), mesh=mesh_of(2))
    with pytest.raises(PlanError, match="never top-down") as error:
        shard(model.blocks[0], mesh=mesh_of(2))
    assert "outermost" in error.value.fix


@ranks(2)
def test_a_refused_model_is_unchanged(rank: int):
    model = stack()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(PlanError):
        shard(model, ShardConfig(block_patterns=("nowhere",)), mesh=mesh_of(2))
    assert {name: id(p) for name, p in model.named_parameters()} == {name: old for name, (old, _) in before.items()}
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


@ranks(2)
def test_ranks_with_different_plans_all_raise_and_show_the_difference(rank: int):
    config = ShardConfig(block_patterns=("blocks.0",) if rank == 0 else ("blocks.1",))
    with pytest.raises(ShardError, match="the sharding plan") as error:
        shard(stack(), config, mesh=mesh_of(2))
    assert "blocks.1" in str(error.value)


@ranks(2)
def test_an_error_on_one_rank_reaches_all(rank: int):
    config = ShardConfig(block_patterns=("nowhere",)) if rank == 1 else ShardConfig()
    with pytest.raises(PlanError, match="nowhere"):
        shard(stack(), config, mesh=mesh_of(2))


@ranks(4)
def test_all_ranks_of_a_mesh_with_two_axes_raise_though_one_differs(rank: int):
    """Ranks that agree along the first axis must not wait for others along the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = stack()
    with torch.no_grad():
        if rank == 3:
            next(model.parameters()).add_(1.0)
    with pytest.raises(ShardError, match="the model's weights") as error:
        shard(model, mesh=mesh)
    assert error.value.where == "ranks [3] differ from rank 0"
    config = ShardConfig(block_patterns=("nowhere",)) if rank == 3 else ShardConfig()
    with pytest.raises(PlanError, match="nowhere"):
        shard(stack(), config, mesh=mesh)


@ranks(2)
def test_ranks_with_different_weights_all_raise(rank: int):
    model = stack()
    if rank == 1:
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)
    with pytest.raises(ShardError, match="the model's weights") as error:
        shard(model, mesh=mesh_of(2))
    assert "blocks.1.up.weight" in str(error.value)
    assert "sync_from_rank_zero" in error.value.fix


@ranks(2)
def test_a_mesh_that_does_not_fit_the_world_is_refused(rank: int):
    with pytest.raises(ConfigError, match="a 2 x 2 mesh needs 4 ranks, got 2") as error:
        init_distributed(MeshConfig(replicate=2, shard=2, device="cpu"))
    assert "mesh.shard = 1" in error.value.fix


@ranks(2)
def test_optimizers_built_before_are_pointed_at_the_shards(rank: int):
    model = stack()
    reference = reference_after(model, 3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shard(model, mesh=mesh_of(2), optimizers=[optimizer])
    for step in range(3):
        loss_of(model, 10 * step + rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, reference)


@ranks(2)
def test_an_optimizer_left_behind_raises_at_its_first_step(rank: int):
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, mesh=mesh_of(2))
    loss_of(model, rank).backward()
    with pytest.raises(ShardError, match="optimizer") as error:
        optimizer.step()
    assert "shard(model, optimizers=[optimizer])" in error.value.fix


@ranks(2)
def test_an_optimizer_of_another_model_is_refused(rank: int):
    optimizer = torch.optim.SGD(stack().parameters(), lr=0.1)
    with pytest.raises(ShardError):
        shard(stack(), mesh=mesh_of(2), optimizers=[optimizer])


@ranks(2)
def test_an_optimizer_built_after_a_forward_without_gradients_trains(rank: int):
    """FSDP2 leaves the root gathered there, and parameters() would list temporary copies."""
    model = stack()
    reference = reference_after(model, 2, 2)
    shard(model, mesh=mesh_of(2))
    with torch.no_grad():
        model(ids(0))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    train(model, 2, rank)
    assert_equal(model, reference)


@ranks(2)
def test_an_evaluation_between_backward_and_step_changes_nothing(rank: int):
    model = stack()
    reference = reference_after(model, 3, 2)
    shard(model, mesh=mesh_of(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        loss_of(model, 10 * step + rank).backward()
        with torch.no_grad():
            model(ids(99))
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(model, reference)


@ranks(2)
@pytest.mark.parametrize(
    "config",
    [
        ShardConfig(reshard_after_forward=False),
        ShardConfig(reshard_after_forward=True),
        ShardConfig(offload=True),
        ShardConfig(prefetch=PrefetchConfig(forward=2, backward=2)),
        ShardConfig(prefetch=PrefetchConfig(early_root=True)),
        ShardConfig(block_classes=("Block",)),
        ShardConfig(group_by="children"),
        ShardConfig(min_group_params=300),
        ShardConfig(shard_dim="first"),
        ShardConfig(unused_parameters="reduce"),
        ShardConfig(overrides=(GroupOverride(pattern="*.norm", reshard_after_forward=False),)),
        ShardConfig(activations="full"),
    ],
    ids=[
        "keep",
        "reshard",
        "offload",
        "prefetch",
        "early",
        "class",
        "children",
        "size",
        "first",
        "unused",
        "island",
        "ac",
    ],
)
def test_every_setting_trains_the_same(rank: int, config: ShardConfig):
    model = stack()
    reference = reference_after(model, 3, 2)
    shard(model, config, mesh=mesh_of(2))
    train(model, 3, rank)
    assert_equal(model, reference)


@ranks(2)
def test_blocks_are_recomputed_and_compiled_as_the_config_says(rank: int):
    model = shard(stack(), ShardConfig(activations="full", compile=True), mesh=mesh_of(2))
    kinds = [type(forward).__name__ for forward in replacements(model.blocks[0])]
    assert kinds == ["CompiledForward", "CheckpointedForward"]
    assert not list(replacements(model.head))


@ranks(2)
def test_weights_loaded_after_an_early_gather_are_used(rank: int):
    model = shard(stack(), ShardConfig(prefetch=PrefetchConfig(early_root=True)), mesh=mesh_of(2))
    with torch.no_grad():
        expected = model(ids(0))
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, 2, rank)
    model.load_state_dict(saved)
    with torch.no_grad():
        assert torch.equal(model(ids(0)), expected)


@ranks(4)
@pytest.mark.parametrize("config", [ShardConfig(), ShardConfig(reshard_after_forward=2)], ids=["flat", "int"])
def test_four_ranks_train_the_same(rank: int, config: ShardConfig):
    model = stack()
    reference = reference_after(model, 3, 4)
    shard(model, config, mesh=mesh_of(4))
    train(model, 3, rank)
    # Four numbers added in another order differ in the last bit, which AdamW's division can make larger.
    assert_equal(model, reference, rtol=1e-4, atol=1e-5)


@ranks(4)
def test_hybrid_sharding_trains_the_same_and_replicas_stay_equal(rank: int):
    model = stack()
    reference = reference_after(model, 3, 4)
    shard(model, mesh=mesh_of(2, 2))
    assert all(p.placements == (Replicate(), Shard(0)) for p in model.parameters())
    train(model, 3, rank)
    assert_equal(model, reference, rtol=1e-4, atol=1e-5)
    local = torch.cat([p.to_local().flatten() for p in model.parameters()])
    others = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(others, local, group=mesh_of(2, 2).get_group("replicate"))
    assert torch.equal(others[0], others[1])


@ranks(1)
def test_one_rank_takes_the_same_path(rank: int):
    model = stack()
    reference = reference_after(model, 3, 1)
    shard(model, mesh=mesh_of(1))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    train(model, 3, rank)
    assert_equal(model, reference)


@ranks(2)
def test_bfloat16_compute_stays_near_float32(rank: int):
    model = stack()
    reference = reference_after(model, 3, 2, torch.optim.SGD)
    config = ShardConfig(precision=PrecisionConfig(param_dtype="bfloat16", output_dtype="float32"))
    shard(model, config, mesh=mesh_of(2))
    with torch.no_grad():
        assert model(ids(0)).dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())
    train(model, 3, rank, torch.optim.SGD)
    # bfloat16 keeps 8 bits, so a gradient is right to about 1 % of its largest element (below 0.1 here); three
    # steps of 1e-2 make that 3e-5. AdamW would step by the sign of gradients that are noise.
    assert_equal(model, reference, rtol=0.0, atol=5e-5)
    moved = [(p.full_tensor() - q).abs().max() for p, q in zip(model.parameters(), stack().parameters(), strict=True)]
    assert max(moved) > 20 * 5e-5, "too little happened for the tolerance to mean anything"


@ranks(2)
def test_bfloat16_arithmetic_is_that_of_hand_written_fsdp2(rank: int):
    """Bit for bit: same casts at the same places."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Llama(SHAPES["llama3-debug"]))
    by_hand, ours = models
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (by_hand.model.embed_tokens, *by_hand.model.layers, by_hand.lm_head, by_hand):
        fully_shard(module, mesh=mesh_of(2), mp_policy=policy)
    shard(ours, ShardConfig(precision=PrecisionConfig(param_dtype="bfloat16")), mesh=mesh_of(2))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(4):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(ids(10 * step + rank)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1], step
    assert losses[0] > 0


@ranks(2)
def test_several_models_each_have_their_own_root(rank: int):
    """A generator and a discriminator trained against each other, and a frozen teacher."""
    generator, discriminator, teacher = stack(), nn.Sequential(Block(64), Block(64), nn.Linear(64, 1)), stack()
    teacher.requires_grad_(False)
    models = (generator, discriminator, teacher)
    references = [copy.deepcopy(model) for model in models]
    for model in models:
        shard(model, mesh=mesh_of(2))

    def loss(of: tuple[nn.Module, ...] | list[nn.Module], seed: int) -> torch.Tensor:
        fake = of[0](ids(seed))
        return of[1](fake).mean() + (fake - of[2](ids(seed))).square().mean() + of[1](fake.detach()).square().mean()

    loss(models, rank).backward()
    for seed in range(2):
        (loss(references, seed) / 2).backward()
    for model, reference in zip(models[:2], references[:2], strict=True):
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.grad is not None, name
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-5, atol=1e-7)
    assert all(p.grad is None for p in teacher.parameters())


@ranks(2)
def test_a_sharded_model_can_be_collected(rank: int):
    model = shard(stack(), mesh=mesh_of(2))
    loss_of(model, rank).backward()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@ranks(2)
def test_an_unnamed_two_axis_mesh_is_refused(rank: int):
    with pytest.raises(PlanError, match="has no axis names"):
        shard(stack(), mesh=init_device_mesh("cpu", (1, 2)))

"""Composer's configs as they are: dictionaries, YAML and Composer's own objects; sharded equals one process."""

import copy
import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import shardwise as sw
from shardwise.sharding.blocks import CheckpointedForward, replacements
from tests.by_hand import Block, assert_same, full, loss_of, tiny, tokens
from tests.composer_objects import FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig
from tests.distributed.test_prepare import Composed, composed, plan_of
from tests.ranks import ranks

DEFAULTS = dataclasses.asdict(FSDPConfig())
POST = "ignore:backward_prefetch"  # Composer's default
RUN_FILE = """
run_name: mine
model: {name: mpt_causal_lm, init_device: meta, attn_config: {attn_impl: flash}}
optimizer: {name: decoupled_adamw, lr: 6.0e-4}
train_loader: {name: text, dataset: {shuffle: true}}
precision: amp_bf16
verbose: true
fsdp_config:
  sharding_strategy: SHARD_GRAD_OP
  mixed_precision: PURE
  activation_checkpointing: true
  activation_checkpointing_reentrant: false
  activation_cpu_offload: false
  limit_all_gathers: true
callbacks: {speed_monitor: {window_size: 10}}
"""


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, mine: list[int]) -> dict[str, Tensor]:
    """Three steps on the batches of the ranks in `mine`: every parameter and the mean losses."""
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        step_losses = [loss_of(model, tokens(rank, step)) for rank in mine]
        (sum(step_losses) / len(mine)).backward()  # pyrefly: ignore[missing-attribute]
        optimizer.step()
        losses.append(torch.stack(step_losses).detach().mean())
    return {"losses": torch.stack(losses)} | {name: full(p.detach()) for name, p in model.named_parameters()}


def assert_equals_one_process(model: nn.Module, config: Any, rank: int) -> None:
    """Shard, train three steps and compare with one process that has the batches of all ranks."""
    num_ranks = dist.get_world_size()
    alone = copy.deepcopy(model)
    expected = trained(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), list(range(num_ranks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sw.prepare_fully_shard(model, optimizer, config)
    result = trained(model, optimizer, [rank])
    dist.all_reduce(result["losses"])
    result["losses"] /= num_ranks
    assert_same(result, expected)


def prepared(config: Any, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = sw.prepare_fully_shard(tiny() if model is None else model, None, config)
    return model, plan_of(model)


def reasons_of(plan: Any, key: str) -> list[str]:
    return [reason for reason in (*plan.reasons, *plan.warnings) if re.match(rf"{key}\b", reason)]


def checkpointed(model: nn.Module) -> list[str]:
    kinds = {name: [type(r) for r in replacements(module)] for name, module in model.named_modules()}
    return [name for name, found in kinds.items() if CheckpointedForward in found]


@ranks(2)
def test_the_mesh_of_one_config_is_not_the_next_models(rank: int) -> None:
    first = sw.prepare_fully_shard(tiny(), None, {"data_parallel_replicate_degree": 2})
    assert plan_of(first).axes == (("replicate", 2), ("shard", 1))
    assert plan_of(sw.prepare_fully_shard(tiny())).axes == (("shard", 2),)
    again = sw.prepare_fully_shard(tiny(), None, {"sharding_strategy": "NO_SHARD"})
    states = [sw.sharding.registry.sharded_state(model) for model in (first, again)]
    assert states[0].mesh is states[1].mesh  # the same process groups


@pytest.mark.parametrize("build", [tiny, composed])
@pytest.mark.parametrize(
    ("config", "axes"),
    [
        (FSDPConfig(), {"shard": 2}),
        (FSDPConfig(activation_checkpointing=True, activation_cpu_offload=True), {"shard": 2}),
        (DEFAULTS | {"sharding_strategy": "NO_SHARD"}, {"replicate": 2, "shard": 1}),
        (DEFAULTS | {"sharding_strategy": "HYBRID_SHARD"}, {"shard": 2}),
        ({"fsdp": DEFAULTS | {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True}}, {"shard": 2}),
        (ParallelismConfig(fsdp2=FSDP2Config(reshard_after_forward=2, activation_cpu_offload=True)), {"shard": 2}),
    ],
)
@ranks(2)
@pytest.mark.filterwarnings(POST)
def test_sharded_equals_one_process(rank: int, config: Any, axes: dict[str, int], build: Any) -> None:
    model = build()
    assert_equals_one_process(model, config, rank)
    assert dict(plan_of(model).axes) == axes


@ranks(2)
def test_no_field_of_the_default_is_dropped(rank: int) -> None:
    with pytest.warns(UserWarning, match="backward_prefetch: FSDP2 unshards the next group"):
        _, plan = prepared(FSDPConfig())
    carried_out = {  # by their defaults: nothing to do
        "activation_checkpointing", "activation_cpu_offload", "auto_wrap", "te_checkpoint_wrapper",
        "te_shard_fp8_weight", "cpu_offload", "data_parallel_shard_degree", "data_parallel_replicate_degree",
        "forward_prefetch", "ignored_modules", "process_group", "sharding_strategy", "sync_module_states",
        "_device_mesh",
    }  # fmt: skip
    said = {name for name in DEFAULTS if len(reasons_of(plan, name)) == 1}
    assert said | carried_out == DEFAULTS.keys()
    assert [warning.partition(":")[0] for warning in plan.warnings] == ["backward_prefetch"]


@pytest.mark.parametrize(("local", "axes"), [(1, {"replicate": 2, "shard": 1}), (2, {"shard": 2})])
@ranks(2)
def test_bare_hybrid_shards_within_a_machine(rank: int, local: int, axes: dict[str, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(local))
        patch.setenv("LOCAL_RANK", str(rank % local))
        model = tiny()
        assert_equals_one_process(model, {"sharding_strategy": "HYBRID_SHARD"}, rank)
    plan = plan_of(model)
    assert dict(plan.axes) == axes
    over = "one machine of 2" if local == 2 else "2 machines of 1"
    text = f"HYBRID_SHARD: replicated over {over} ranks, which share one copy"
    assert reasons_of(plan, "sharding_strategy") == [f"sharding_strategy: {text}"]


@pytest.mark.parametrize("launcher", ["torchrun", "none"])
@ranks(4)
def test_bare_hybrid_on_machines_of_two_ranks(rank: int, launcher: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if launcher == "torchrun":
            patch.setenv("LOCAL_WORLD_SIZE", "2")
            patch.setenv("LOCAL_RANK", str(rank % 2))
        else:  # told by host
            for name in ("RANK", "WORLD_SIZE"):
                patch.delenv(name)
            patch.setattr("socket.gethostname", lambda: f"host{rank // 2}")
        _, plan = prepared({"sharding_strategy": "_HYBRID_SHARD_ZERO2"})
    assert dict(plan.axes) == {"replicate": 2, "shard": 2}
    _, plan = prepared({"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 1})
    assert dict(plan.axes) == {"replicate": 4, "shard": 1}


@ranks(3)
def test_bare_hybrid_on_unlike_machines_is_refused(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2" if rank < 2 else "1")
        patch.setenv("LOCAL_RANK", str(rank % 2))
        with pytest.raises(sw.ConfigError, match="needs the same number of consecutive ranks on every machine"):
            prepared({"sharding_strategy": "HYBRID_SHARD"})


@ranks(2)
def test_a_mesh_of_one_axis_under_no_shard_replicates(rank: int) -> None:
    config = {"sharding_strategy": "NO_SHARD", "device_mesh": init_device_mesh("cpu", (2,))}
    assert dict(prepared(config)[1].axes) == {"replicate": 2, "shard": 1}
    config["device_mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(sw.ConfigError, match="NO_SHARD, but the mesh shards over 2 ranks"):
        prepared(config)


@ranks(2)
def test_degrees_that_contradict_the_mesh_are_refused(rank: int) -> None:
    config = {"device_mesh": init_device_mesh("cpu", (2,)), "data_parallel_shard_degree": 1}
    with pytest.raises(sw.ConfigError, match="data_parallel_shard_degree: is 1, but the mesh has 2"):
        prepared(config)


@ranks(2)
def test_composers_private_mesh_is_used_with_a_warning(rank: int) -> None:
    config = FSDPConfig(backward_prefetch="BACKWARD_PRE", data_parallel_replicate_degree=2)
    config._device_mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, plan = prepared(config)
    assert sorted(str(warning.message) for warning in caught) == list(plan.warnings)
    assert {text.partition(":")[0] for text in plan.warnings} == {"_device_mesh", "sharding_strategy"}
    assert [size for _, size in plan.axes] == [2, 1]


@ranks(2)
def test_activations_are_recomputed_and_offloaded_on_the_blocks(rank: int) -> None:
    model, plan = prepared({"activation_checkpointing": True, "activation_cpu_offload": True})
    assert checkpointed(model) == ["blocks.0", "blocks.1"]
    for key in ("activation_checkpointing", "activation_cpu_offload"):
        assert reasons_of(plan, key) == [f"{key}: of 2 modules, first blocks.0"]
    inputs = torch.ones(2, 6, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        outputs = sw.prepare_fully_shard(tiny(), None, {"activation_cpu_offload": True}).blocks[0](inputs)
    assert inputs.data_ptr() not in kept  # packed inside, to a copy in CPU memory
    outputs.sum().backward()  # on CPU an output that is saved is its own copy, and keeps the graph until backward


class Choosing(Composed):
    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        return module is self.blocks[1] or (isinstance(module, nn.Linear) and module is not self.head)


@ranks(2)
def test_the_model_chooses_what_is_recomputed(rank: int) -> None:
    torch.manual_seed(0)
    model = Choosing()
    model.frozen._activation_checkpointing = False
    assert_equals_one_process(model, {"activation_checkpointing": True}, rank)
    assert checkpointed(model) == ["blocks.0.up", "blocks.0.down", "blocks.1"]  # the outermost
    model = tiny()
    model.blocks[0]._activation_checkpointing = False
    assert checkpointed(prepared({"activation_checkpointing": True}, model)[0]) == ["blocks.1"]


@ranks(2)
@pytest.mark.filterwarnings(POST)
def test_key_order_may_differ_between_ranks(rank: int) -> None:
    config = DEFAULTS | {"sharding_strategy": "SHARD_GRAD_OP", "ignored_modules": {"blocks.1", "frozen"}}
    keys = sorted(config, reverse=rank == 1)
    assert_equals_one_process(tiny(), {key: config[key] for key in keys}, rank)


class RootSettings(Composed):
    def fsdp_wrap_fn(self, module: nn.Module) -> Any:
        return {"reshard_after_forward": True} if module is self else isinstance(module, Block)


@ranks(2)
def test_the_wrap_function_may_answer_settings_at_the_root(rank: int) -> None:
    torch.manual_seed(0)
    model = RootSettings()
    assert_equals_one_process(model, {"reshard_after_forward": False}, rank)
    groups = {group.name: group.reshard_after_forward for group in plan_of(model).groups}
    assert groups == {"blocks.0": False, "blocks.1": False, "(root)": True}


@ranks(2)
def test_a_root_marked_not_to_be_wrapped_is_noted(rank: int) -> None:
    model = tiny()
    model._fsdp_wrap = False
    _, plan = prepared({}, model)
    assert len(reasons_of(plan, "_fsdp_wrap")) == 1
    assert plan.root.name == "(root)"


@ranks(2)
def test_resharding_over_two_of_two_ranks_is_true(rank: int) -> None:
    model = tiny()
    config = {"reshard_after_forward": 2, "activations": "full"}
    assert_equals_one_process(model, config, rank)
    assert [group.reshard_after_forward for group in plan_of(model).groups if "blocks" in group.name] == [True, True]
    assert checkpointed(model) == ["blocks.0", "blocks.1"]  # also our own setting, which was dropped


@pytest.mark.parametrize(("name", "dtype"), [("PURE", None), ("DEFAULT", None), ("PURE", "amp_bf16")])
@ranks(2)
def test_a_named_precision_says_one_thing(rank: int, name: str, dtype: str | None) -> None:
    config = {"mixed_precision": name} | ({"precision": dtype} if dtype else {})
    _, plan = prepared(config)
    (said,) = [reason for reason in plan.reasons if "computes" in reason or "recision" in reason]
    assert f"mixed_precision: {name}: computes in {'bfloat16' if dtype else 'the stored dtype'}" in said


@pytest.mark.parametrize("form", ["path", "loaded", "nested"])
@ranks(2)
def test_a_run_file_is_read_for_its_fsdp_settings(rank: int, form: str, tmp_path: Path) -> None:
    config: Any = yaml.safe_load(RUN_FILE)
    if form == "path":
        config = tmp_path / f"run{rank}.yaml"
        config.write_text(RUN_FILE)
    if form == "nested":
        trainer: dict[str, Any] = {"parallelism_config": {"fsdp": config.pop("fsdp_config"), "fsdp2": None, "tp": None}}
        config = config | {"trainer": trainer, "precision": "fp32"}
        trainer["precision"] = "amp_bf16"
    model, plan = prepared(config)
    assert {(group.param_dtype, group.reduce_dtype) for group in plan.groups} == {("bfloat16", "bfloat16")}
    assert {group.reshard_after_forward for group in plan.groups} == {False}
    assert checkpointed(model) == ["blocks.0", "blocks.1"]
    (said,) = reasons_of(plan, "config")
    where = "trainer.parallelism_config.fsdp" if form == "nested" else "fsdp_config"
    assert said == (
        f"config: settings of {where}; not about sharding: callbacks, model, optimizer, run_name, train_loader, verbose"
    )


@ranks(2)
def test_a_run_file_without_fsdp_settings_gives_the_defaults(rank: int) -> None:
    for config in (ParallelismConfig(), {"model": "mpt", "parallelism_config": None}):
        _, plan = prepared(config)
        assert reasons_of(plan, "config")[0].startswith("config: settings of the defaults")
    _, plan = prepared(ParallelismConfig(tp=TPConfig(tensor_parallel_degree=1)))
    assert reasons_of(plan, "tp") == ["tp: tensor_parallel_degree is 1: nothing to do"]


@pytest.mark.parametrize("form", ["degree", "objects"])
@ranks(2)
def test_tensor_parallelism_is_built_from_the_degree(rank: int, form: str) -> None:
    alone, model = tiny(), tiny()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (alone, model)]
    fsdp = FSDPConfig(mixed_precision="FULL", backward_prefetch="BACKWARD_PRE")
    styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    config: Any = ParallelismConfig(fsdp=fsdp, tp=TPConfig(tensor_parallel_degree=2, layer_plan=styles))
    config = {"tensor_parallel_degree": 2} if form == "degree" else config
    sw.prepare_fully_shard(model, optimizers[1], config)
    assert dict(plan_of(model).axes)["tensor"] == 2
    weight = next(each for each in plan_of(model).parameters if each.fqn == "blocks.0.down.weight")
    assert weight.splits == (("tensor", 1, 2),)
    assert_same(trained(model, optimizers[1], [0]), trained(alone, optimizers[0], [0]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"fsdp_config": {}, "parallelism_config": {"fsdp": {}}}, "fsdp_config, parallelism_config.fsdp"),
        (ParallelismConfig(fsdp=FSDPConfig(), fsdp2=FSDP2Config()), "fsdp, fsdp2"),
        ({"fsdp_config": {}, "sharding_strategy": "NO_SHARD", "precision": "fp32"}, "fsdp_config, sharding_strategy"),
    ],
)
@ranks(2)
def test_settings_in_two_places_are_refused(rank: int, config: Any, names: str) -> None:
    with pytest.raises(sw.ConfigError, match=f"two places: {names}; keep one"):
        prepared(config)


@ranks(2)
def test_what_cannot_be_carried_out_is_refused_by_name_all_at_once(rank: int) -> None:
    fsdp = FSDPConfig(te_checkpoint_wrapper=True, te_shard_fp8_weight=True, process_group="node", shardin_strategy=1)
    fsdp.activation_checkpointing = "yes"  # pyrefly: ignore[bad-assignment]
    tp = TPConfig(tensor_parallel_degree=0, layer_plan={"head": object()})
    model = tiny()
    config = {"precision": "amp_fp8", "parallelism_config": ParallelismConfig(fsdp=fsdp, tp=tp)}
    with pytest.raises(sw.ConfigError, match=r"^8 problems") as raised:
        prepared(config, model)
    found = {line.partition(": ")[0] for line in raised.value.where.splitlines()}
    assert found == {
        "te_checkpoint_wrapper", "te_shard_fp8_weight", "process_group", "shardin_strategy",
        "activation_checkpointing", "precision", "parallelism_config.tp.tensor_parallel_degree",
        "parallelism_config.tp.layer_plan.head",
    }  # fmt: skip
    assert not isinstance(model, FSDPModule)

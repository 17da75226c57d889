"""Constructor calls, argument by argument: what is kept, what is left out, what blocks the whole."""

from __future__ import annotations

import ast
import itertools

import pytest

from shardwise.findings import SourceFinding, Status
from shardwise.fsdp1.codemod.draft import FEATURES, assemble, definitions
from shardwise.fsdp1.codemod.program import Program
from shardwise.fsdp1.codemod.rewriting import rewrite

IMPORTS = """\
import functools
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, transformer_auto_wrap_policy

"""


def moved(body: str, target: str = "torch", *, imports: str = IMPORTS) -> tuple[str, list[SourceFinding]]:
    program = Program({"program.py": imports + body})
    text, findings = rewrite(program.file("program.py"), program, target)
    ast.parse(text)
    return text, findings


def status_of(findings: list[SourceFinding], code: str = "SW101") -> list[Status]:
    return [finding.status for finding in findings if finding.code == code]


@pytest.mark.parametrize(
    "imports",
    [
        "from fairscale.nn import FullyShardedDataParallel as FSDP\n",
        "from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP\n",
        "def FSDP(model):\n    return model\n",
    ],
)
def test_other_things_of_that_name_are_left_alone(imports: str):
    text, findings = moved("model = FSDP(model)\n", imports=imports)
    assert text == imports + "model = FSDP(model)\n"
    assert not findings


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("FSDP(model)", "fully_shard(model)"),
        ("FSDP(module=model)", "fully_shard(module=model)"),
        ("FSDP(model, use_orig_params=True, limit_all_gathers=True)", "fully_shard(model)"),
        (
            "FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
            "fully_shard(model, reshard_after_forward=False)",
        ),
        ("FSDP(model, None, ShardingStrategy.SHARD_GRAD_OP)", "fully_shard(model, reshard_after_forward=False)"),
        ("FSDP(model, cpu_offload=CPUOffload())", "fully_shard(model)"),
        (
            "FSDP(model, cpu_offload=CPUOffload(offload_params=True) if args.offload else None)",
            "fully_shard(model, offload_policy=CPUOffloadPolicy() if args.offload else OffloadPolicy())",
        ),
        (
            "FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))",
            "fully_shard(model, mp_policy=MixedPrecisionPolicy("
            "param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16))",
        ),
        ("functools.partial(FSDP, use_orig_params=True)", "functools.partial(fully_shard)"),
        ("FSDP(model, sync_module_states=True)", "_shard_units(model, sync_from_rank0=True)"),
        ("FSDP(model, ignored_modules=[model.head])", "_shard_units(model, ignored=[model.head])"),
        (
            "FSDP(model, process_group=group)",
            "fully_shard(model, mesh=_mesh(process_group=group))",
        ),
        (
            "FSDP(model, sharding_strategy=args.strategy)",
            "fully_shard(model, **_placement(args.strategy))",
        ),
        ("FSDP(model, **settings)", "_fully_shard_like_fsdp1(model, **settings)"),
    ],
)
def test_call_in_plain_torch(call: str, expected: str):
    text, findings = moved(f"wrapped = {call}\n")
    assert f"wrapped = {expected}\n" in text
    assert status_of(findings) == [Status.REWRITTEN]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
            'sw.shard(model, sw.ShardConfig(group_by="root", precision=sw.PrecisionConfig(param_dtype="storage", '
            'reduce_dtype="storage"), reshard_after_forward=False))',
        ),
        ("FSDP(model, auto_wrap_policy=policy)", "_sw_shard(model, policy=policy)"),
        ("FSDP(model, ignored_modules=[model.head])", "_shard_units(model, ignored=[model.head])"),
    ],
)
def test_call_in_shardwise(call: str, expected: str):
    text, findings = moved(f"wrapped = {call}\n", "shardwise")
    assert f"wrapped = {expected}\n" in text
    assert status_of(findings) == [Status.REWRITTEN]


def test_hybrid_strategy_gets_a_named_mesh():
    text, _ = moved(
        "model = FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=torch.cuda.current_device())\n"
    )
    assert "dist.get_world_size() // torch.cuda.device_count()" in text
    assert 'mesh_dim_names=("replicate", "shard")' in text


def test_classes_in_the_call_become_a_loop():
    text, _ = moved("model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block, Other}))\n")
    assert "for block in reversed(list(model.modules())):  # children first\n" in text
    assert "    if isinstance(block, (Block, Other)) and block is not model:\n        fully_shard(block)\n" in text


def test_comments_of_arguments_survive():
    body = "model = FSDP(\n    model,  # ours\n    limit_all_gathers=True,  # see the issue\n    # last\n)\n"
    text, _ = moved(body)
    assert all(comment in text for comment in ("# ours", "# see the issue", "# last"))


@pytest.mark.parametrize(
    "call",
    [
        "FSDP(model, auto_wrap_policy=CustomPolicy(choose))",
        "FSDP(model, mixed_precision=MixedPrecision(torch.float16, keep_low_precision_grads=True))",
        "FSDP(model, device_ids=[0])",
    ],
)
def test_call_that_cannot_be_rewritten_stays_whole_and_offers_road_1(call: str):
    text, findings = moved(f"model = {call}\n")
    assert f"model = {call}\n" in text
    (finding,) = (finding for finding in findings if finding.code == "SW101")
    assert finding.status is Status.NEEDS_DECISION
    assert "shardwise.fsdp1" in finding.fix


def test_methods_stay_where_the_constructor_stays():
    body = "model = FSDP(model, device_ids=[0])\nmodel.clip_grad_norm_(1.0)\n"
    text, findings = moved(body)
    assert text == IMPORTS + body
    assert status_of(findings, "SW120") == [Status.NEEDS_DECISION]


def test_class_chosen_at_run_time_is_a_function_now():
    text, findings = moved("wrapper = FSDP if sharded else plain\nmodel = wrapper(model)\n")
    assert "wrapper = _fully_shard_like_fsdp1 if sharded else plain\nmodel = wrapper(model)\n" in text
    assert status_of(findings) == [Status.REWRITTEN]


def test_function_with_a_local_name_of_ours_is_left_alone():
    body = "def build(model, new):\n    if new:\n        from elsewhere import fully_shard\n    return FSDP(model)\n"
    text, findings = moved(body)
    assert text == IMPORTS + body
    assert status_of(findings) == [Status.NEEDS_DECISION]


def test_file_with_another_thing_of_that_name_is_left_alone():
    body = "def fully_shard(model):\n    return model\n\n\nmodel = FSDP(model)\n"
    text, findings = moved(body)
    assert text == IMPORTS + body
    assert status_of(findings) == [Status.NEEDS_DECISION]


def test_carried_functions_import_what_the_file_calls_otherwise_under_another_name():
    own = "if parallel:\n    from elsewhere import DeviceMesh\n\n"
    text, findings = moved(own + "model = FSDP(model, process_group=group)\n")
    assert status_of(findings) == [Status.REWRITTEN]
    assert "from torch.distributed.device_mesh import DeviceMesh as fsdp2_DeviceMesh\n" in text
    assert "return fsdp2_DeviceMesh.from_group(" in text


def test_parts_of_a_model_do_not_cast_their_inputs():
    body = (
        "for index, block in enumerate(model.blocks):\n"
        "    model.blocks[index] = FSDP(block, mixed_precision=MixedPrecision(param_dtype=torch.float16))\n"
        "model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.float16))\n"
    )
    text, _ = moved(body)
    lines = [line for line in text.splitlines() if "MixedPrecisionPolicy(" in line]
    assert ["cast_forward_inputs=False" in line for line in lines] == [True, False]


AC = "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing\n"
POLICIES = """\
from .base import apply_base


def recompute(model):
    return apply_base(model, None)
"""
BASE = f"""\
{AC}

def apply_base(model, blocks):
    apply_activation_checkpointing(model, check_fn=blocks)
"""
SHARD_THEN_RECOMPUTE = """\
from package import policies

model = FSDP(model)
if recomputed:
    policies.recompute(model)
"""


@pytest.mark.parametrize("more", ["", "    model.train().backward()\n"], ids=["prepares", "trains"])
def test_recomputation_behind_two_functions_of_other_modules_is_seen(more: str):
    files = {"package/policies.py": POLICIES, "package/base.py": BASE + more}
    program = Program({"main.py": IMPORTS + SHARD_THEN_RECOMPUTE, **files})
    text, findings = rewrite(program.file("main.py"), program, "torch")
    assert status_of(findings, "SW125") == [Status.NEEDS_DECISION if more else Status.REWRITTEN]
    assert (text.index("policies.recompute(model)") < text.index("fully_shard(model")) is not bool(more)


def test_unused_imports_go_and_others_stay():
    text, _ = moved("model = FSDP(model)\n")
    assert "FullyShardedDataParallel" not in text
    assert "import CPUOffload, MixedPrecision, ShardingStrategy" in text  # never used: not ours to judge


def test_emitted_helpers_are_valid_in_every_combination():
    for size in (0, 1, 2, len(FEATURES)):
        for features in itertools.combinations(sorted(FEATURES), size):
            for _, text in assemble(definitions(), features):
                compile(text, "helper", "exec")


DEVICES = {
    "moved": ("", "model.to(rank)", True),
    "set": ("torch.cuda.set_device(rank)\n", "model.to(rank)", False),
    "any": ("", "model.cuda()", False),
    "given": ("", "model.to(rank), device_id=rank", False),
}


@pytest.mark.parametrize("name", DEVICES)
def test_device_that_only_the_model_is_moved_to_is_told(name: str):
    before, given, is_told = DEVICES[name]
    _, findings = moved(f'dist.init_process_group("nccl")\n{before}model = FSDP({given})\n')
    told = [finding.message for finding in findings if finding.code == "SW101"]
    assert ["current device" in message for message in told] == [is_told]


@pytest.mark.parametrize(
    ("offload", "backend"),
    [("CPUOffload(offload_params=False)", '"nccl"'), ("CPUOffload()", '"nccl"'),
     ("CPUOffload(offload_params=True)", '"cpu:gloo,cuda:nccl"')],
)  # fmt: skip
def test_gloo_joins_only_where_something_is_offloaded(offload: str, backend: str):
    text, _ = moved(f'dist.init_process_group("nccl")\nmodel = FSDP(model, cpu_offload={offload})\n')
    assert f"dist.init_process_group({backend})" in text

"""Accelerate YAML: what is converted means the same to accelerate's own launcher; the rest is refused, never bent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardwise.findings import Status
from shardwise.fsdp1.codemod.framework_files import convert_yaml

FULL = """\
# how we launch
distributed_type: FSDP
mixed_precision: bf16  # the H100s have it
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer   # one block
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  # do not change
  fsdp_sharding_strategy: FULL_SHARD  # was SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
"""
READ_BY_LAUNCHER = """
import json, os, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", sys.argv[1], "x.py"]))
environment = prepare_multi_gpu_env(args)
os.environ.update(environment)
from accelerate.utils import FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin()
sizes = None
if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG"):
    from accelerate.parallelism_config import ParallelismConfig
    parallelism = ParallelismConfig()
    sizes = [parallelism.dp_replicate_size, parallelism.dp_shard_size]
print(json.dumps({"version": plugin.fsdp_version, "reshard": plugin.reshard_after_forward, "sizes": sizes,
                  "offload": type(plugin.cpu_offload).__name__, "state_dict": plugin.state_dict_type.name,
                  "wrap": plugin.transformer_cls_names_to_wrap}))
"""


def with_setting(**changes: object) -> str:
    """FULL with some settings changed; None removes one."""
    lines = FULL.splitlines(keepends=True)
    for key, value in changes.items():
        at = next((i for i, line in enumerate(lines) if line.strip().startswith(f"{key}:")), None)
        indent = "  " if key.startswith("fsdp_") else ""
        if at is None:
            lines.insert(7, f"{indent}{key}: {value}\n")
        else:
            lines[at] = "" if value is None else f"{indent}{key}: {value}\n"
    return "".join(lines)


def statuses(text: str) -> list[Status]:
    return [finding.status for finding in convert_yaml(text, "a.yaml")[1]]


@pytest.mark.parametrize(
    "text",
    [
        "model: fsdp\nlayers: 3\n",
        "fsdp_config: {}\ndistributed_type: FSDP\n",
        FULL.replace("distributed_type: FSDP", "distributed_type: DEEPSPEED"),
        with_setting(fsdp_version=2, fsdp_sharding_strategy=None, fsdp_reshard_after_forward="true"),
        "fsdp_config:\n  fsdp_mode: fsdp2\n  my_own: 1\n",
        "{{ helm }} fsdp\n",
        "fsdp_config:\n\t- fsdp_sharding_strategy: [\n",
    ],
    ids=["other", "empty", "deepspeed", "fsdp2", "own-keys", "template", "broken"],
)
def test_files_without_an_fsdp1_config_are_left_alone(text: str):
    assert convert_yaml(text, "a.yaml") == (text, [])


def test_full_shard_is_converted_and_everything_else_stays_as_it_is():
    converted, findings = convert_yaml(FULL, "a.yaml")
    before, after = yaml.safe_load(FULL)["fsdp_config"], yaml.safe_load(converted)["fsdp_config"]
    assert after == {
        "fsdp_auto_wrap_policy": before["fsdp_auto_wrap_policy"],
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": True,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_version": 2,
    }
    kept = [line for line in FULL.splitlines(keepends=True) if line in converted.splitlines(keepends=True)]
    assert len(kept) == len(FULL.splitlines()) - 5  # four settings dropped, one changed
    assert "  fsdp_reshard_after_forward: true  # was SHARD_GRAD_OP\n" in converted
    assert findings[0].status is Status.REWRITTEN
    assert findings[0].code == "SW181"


@pytest.mark.parametrize("text", [FULL, with_setting(fsdp_sharding_strategy="HYBRID_SHARD", num_machines=2)])
def test_a_second_conversion_changes_nothing(text: str):
    converted, _ = convert_yaml(text, "a.yaml")
    assert converted != text
    assert convert_yaml(converted, "a.yaml") == (converted, [])


@pytest.mark.parametrize(
    ("strategy", "reshards"),
    [("FULL_SHARD", True), ("full_shard", True), (1, True), ("SHARD_GRAD_OP", False), ('"2"', False)],
)
def test_strategies_are_read_by_name_and_by_number(strategy: object, reshards: bool):
    converted, _ = convert_yaml(with_setting(fsdp_sharding_strategy=strategy), "a.yaml")
    assert yaml.safe_load(converted)["fsdp_config"]["fsdp_reshard_after_forward"] is reshards


@pytest.mark.parametrize(
    "change",
    [
        {"fsdp_sharding_strategy": "NO_SHARD"},
        {"fsdp_sharding_strategy": 3},
        {"fsdp_sharding_strategy": "${oc.env:STRATEGY}"},
        {"fsdp_sharding_strategy": "HYBRID_SHARD"},
        {"fsdp_sharding_strategy": 4, "num_machines": None},
        {"fsdp_sharding_strategy": "HYBRID_SHARD", "num_machines": 3},
        {"fsdp_state_dict_type": "LOCAL_STATE_DICT"},
        {"fsdp_cpu_ram_efficient_loading": "false"},
        {"fsdp_cpu_ram_efficient_loading": "false", "fsdp_sync_module_states": None},
        {"fsdp_activation_checkpointing": "true"},
        {"fsdp_sharding_strategy": None, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
        {"fsdp_something_new": 1},
    ],
    ids=str,
)
def test_what_would_change_its_meaning_is_left_with_a_reason(change: dict[str, object]):
    text = with_setting(**change)
    converted, findings = convert_yaml(text, "a.yaml")
    assert converted == text
    assert {finding.status for finding in findings} == {Status.NEEDS_DECISION}
    assert all(finding.fix for finding in findings)


def test_weights_stay_unbroadcast_where_nobody_asked_for_it():
    text = with_setting(fsdp_cpu_ram_efficient_loading="false", fsdp_sync_module_states="false")
    assert Status.REWRITTEN in statuses(text)


def test_hybrid_shard_keeps_its_replicate_axis():
    converted, _ = convert_yaml(with_setting(fsdp_sharding_strategy="HYBRID_SHARD", num_machines=2), "a.yaml")
    mesh = yaml.safe_load(converted)["parallelism_config"]
    assert (mesh["parallelism_config_dp_replicate_size"], mesh["parallelism_config_dp_shard_size"]) == (2, 4)


def test_the_default_state_dict_of_fsdp1_is_written_out():
    converted, _ = convert_yaml(with_setting(fsdp_state_dict_type=None), "a.yaml")
    assert yaml.safe_load(converted)["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"


def test_notes_name_what_only_changes_speed_or_memory():
    text = with_setting(
        fsdp_backward_prefetch="BACKWARD_POST", fsdp_forward_prefetch="true", fsdp_use_orig_params="false"
    )
    _, findings = convert_yaml(text, "a.yaml")
    noted = {finding.line for finding in findings if finding.status is Status.REPORTED}
    lines = text.splitlines()
    named = ("fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_use_orig_params")
    assert {lines[number - 1].strip().split(":")[0] for number in noted} >= set(named)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n# the end\n"])
def test_line_ends_and_the_end_of_the_file_survive(newline: str, end: str):
    text = (FULL.removesuffix("machine_rank: 0\n").rstrip("\n") + end).replace("\n", newline)
    converted, _ = convert_yaml(text, "a.yaml")
    assert yaml.safe_load(converted)["fsdp_config"]["fsdp_version"] == 2
    assert converted.count("\r\n") == (converted.count("\n") if newline == "\r\n" else 0)
    assert converted.endswith(end.replace("\n", newline).lstrip("\r\n"))


def test_inline_and_merged_configs_are_refused():
    inline = "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_offload_params: false}\n"
    merged = (
        "base: &b\n  fsdp_offload_params: false\ndistributed_type: FSDP\nfsdp_config:\n  <<: *b\n  fsdp_version: 1\n"
    )
    spread = inline.replace(", ", ",\n  ")
    for text in (inline, spread, merged):
        converted, findings = convert_yaml(text, "a.yaml")
        assert converted == text
        assert [finding.status for finding in findings] == [Status.NEEDS_DECISION]


def test_an_anchored_config_is_edited_once():
    config = "".join(line for line in FULL.splitlines(keepends=True) if line.startswith("  ")).replace("fsdp", "fsdp")
    text = f"one:\n  distributed_type: FSDP\n  fsdp_config: &f\n{config.replace('  ', '    ')}two:\n"
    text += "  distributed_type: FSDP\n  fsdp_config: *f\n"
    converted, findings = convert_yaml(text, "a.yaml")
    assert [finding.status for finding in findings].count(Status.REWRITTEN) == 1
    assert yaml.safe_load(converted)["two"]["fsdp_config"]["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"reshard": True, "offload": "CPUOffloadPolicy", "state_dict": "SHARDED_STATE_DICT", "sizes": None}),
        (
            {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2", "num_machines": 2, "fsdp_offload_params": "false"},
            {"reshard": False, "offload": "OffloadPolicy", "state_dict": "SHARDED_STATE_DICT", "sizes": [2, 4]},
        ),
        (
            {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_state_dict_type": None},
            {"reshard": False, "offload": "CPUOffloadPolicy", "state_dict": "FULL_STATE_DICT", "sizes": None},
        ),
    ],
    ids=["full", "hybrid", "grad-op"],
)
@pytest.mark.slow
def test_the_launcher_reads_the_converted_file_as_meant(change: dict, expected: dict, tmp_path: Path):
    """Accelerate itself, in a process of its own: what its launcher makes of the file."""
    pytest.importorskip("accelerate")
    path = tmp_path / "config.yaml"
    path.write_text(convert_yaml(with_setting(**change), "a.yaml")[0])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_BY_LAUNCHER, str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"version": 2, "wrap": ["BertLayer"], **expected}

"""YAML of Composer is converted where FSDP2Config can say it; that of Lightning and transformers is reported."""

import pytest
import yaml

from shardwise.findings import Status
from shardwise.fsdp1.codemod.framework_files import convert_yaml

COMPOSER = """\
model:
  name: mpt
  init_device: {init}
fsdp_config:
  # ZeRO-3
  sharding_strategy: {strategy}
  mixed_precision: PURE   # all bf16
  activation_checkpointing: true
  activation_cpu_offload: false
  limit_all_gathers: true
  sync_module_states: true
  {more}
loggers: {{}}
"""


def composer(strategy: str = "FULL_SHARD", init: str = "mixed", more: str = "verbose: false") -> str:
    return COMPOSER.format(strategy=strategy, init=init, more=more)


@pytest.mark.parametrize(("strategy", "reshards"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", False)])
def test_composer_config_becomes_that_of_fsdp2(strategy: str, reshards: bool):
    converted, findings = convert_yaml(composer(strategy), "c.yaml")
    assert yaml.safe_load(converted)["fsdp_config"] == {
        "reshard_after_forward": reshards,
        "mixed_precision": "PURE",
        "activation_checkpointing": True,
        "activation_cpu_offload": False,
        "verbose": False,
        "state_dict_type": "full",  # FSDP2Config's own default is sharded
    }
    assert "  # ZeRO-3\n" in converted
    assert "PURE   # all bf16\n" in converted
    assert (findings[0].code, findings[0].status) == ("SW182", Status.REWRITTEN)
    assert any("FSDP_VERSION=2" in finding.message for finding in findings)
    assert convert_yaml(converted, "c.yaml") == (converted, [])


@pytest.mark.parametrize(
    "text",
    [
        composer("HYBRID_SHARD"),
        composer("NO_SHARD"),
        composer("${strategy}"),
        composer(init="cpu"),
        composer(more="cpu_offload: true"),
        composer(more="process_group: node"),
        composer(more="data_parallel_shard_degree: 8"),
        composer(more="data_parallel_replicate_degree: 2"),
        composer(more="keep_low_precision_grads: true"),
        composer(more="sharded_ckpt_prefix_dir: mine-{batch}"),
        composer(more="auto_wrap: false"),
        composer(more="some_new_thing: 1"),
    ],
)
def test_what_fsdp2config_cannot_say_is_left_with_a_reason(text: str):
    converted, findings = convert_yaml(text, "c.yaml")
    assert converted == text
    assert [finding.status for finding in findings] == [Status.NEEDS_DECISION]
    assert findings[0].fix


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("trainer:\n  devices: 4\n  strategy: fsdp\n", 3, "ModelParallelStrategy"),
        (
            "trainer:\n  strategy:\n    class_path: lightning.pytorch.strategies.FSDPStrategy\n"
            "    init_args:\n      sharding_strategy: HYBRID_SHARD\n",
            3,
            "replicate",
        ),
        (
            "s:\n  class_path: pytorch_lightning.strategies.FSDPStrategy\n  init_args: {sharding_strategy: NO_SHARD}\n",
            2,
            "ddp",
        ),
    ],
)
def test_lightning_strategies_are_reported_with_what_to_write(text: str, line: int, word: str):
    converted, findings = convert_yaml(text, "l.yaml")
    assert converted == text
    assert [(one.code, one.line, one.status) for one in findings] == [("SW183", line, Status.NEEDS_DECISION)]
    assert word in findings[0].fix


@pytest.mark.parametrize("text", ["strategy: fsdp\nname: x\n", "trainer:\n  devices: 4\n  strategy: ddp  # not fsdp\n"])
def test_other_strategies_are_left_alone(text: str):
    assert convert_yaml(text, "l.yaml") == (text, [])


def test_trainer_arguments_are_reported_unless_they_say_version_2():
    text = "fsdp: full_shard auto_wrap\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: Block\n"
    _, findings = convert_yaml(text, "t.yaml")
    assert [(one.code, one.status) for one in findings] == [("SW184", Status.NEEDS_DECISION)]
    assert convert_yaml(text + "  fsdp_version: 2\n", "t.yaml")[1] == []

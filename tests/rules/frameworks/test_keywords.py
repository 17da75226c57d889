"""FSDP1 settings handed to a framework from Python."""

import ast

import pytest

from shardwise.findings import Status
from shardwise.fsdp1.codemod.framework_files import framework_findings
from shardwise.source.edits import apply
from shardwise.source.syntax import FileContext

IMPORTS = """\
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy, StateDictType
"""


def findings(text: str):
    return framework_findings(FileContext(text, "x.py"))


def migrated(text: str) -> str:
    return apply(text, [edit for finding in findings(text) for edit in finding.edits])


def keywords(text: str) -> dict[str, str]:
    call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return {str(keyword.arg): ast.unparse(keyword.value) for keyword in call.keywords}


@pytest.mark.parametrize(
    "text",
    [
        IMPORTS + "p = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)\n",
        "from mine import FullyShardedDataParallelPlugin as P\np = P(sharding_strategy='FULL_SHARD')\n",
        "from transformers import TrainingArguments\na = TrainingArguments(fsdp='')\n",
        "from transformers import TrainingArguments as A\na = A(fsdp='auto_wrap', fsdp_config={'fsdp_version': 2})\n",
        "from lightning import Trainer\nt = Trainer(strategy='ddp')  # no fsdp\n",
        "from composer import Trainer\nt = Trainer(parallelism_config={'tp': {}})  # no fsdp\n",
        "from composer import Trainer\nt = Trainer(parallelism_config={'fsdp': {'reshard_after_forward': True}})\n",
    ],
)
def test_what_is_not_fsdp1_is_left_alone(text: str):
    assert findings(text) == []


@pytest.mark.parametrize("last", ["use_orig_params=True", "state_dict_type='SHARDED_STATE_DICT'"])
def test_plugin_with_a_strategy_moves_to_version_2(last: str):
    text = f"""{IMPORTS}plugin = FullyShardedDataParallelPlugin(
    limit_all_gathers=True,
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,  # ZeRO-2
    backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
    cpu_offload=True,
    state_dict_type=StateDictType.FULL_STATE_DICT,
    ignored_modules=frozen,
    {last if "state" not in last else "forward_prefetch=False"},
)
"""
    after = migrated(text)
    assert keywords(after) == {
        "fsdp_version": "2",
        "reshard_after_forward": "False",
        "cpu_offload": "True",
        "state_dict_type": "StateDictType.FULL_STATE_DICT",
        "ignored_modules": "frozen",
    }
    assert "reshard_after_forward=False,  # ZeRO-2\n" in after
    assert [finding.status for finding in findings(text)] == [Status.REWRITTEN]
    assert findings(after) == []


def test_plugin_on_one_line_stays_on_one_line():
    text = (
        IMPORTS
        + "p = FullyShardedDataParallelPlugin(sharding_strategy='FULL_SHARD', state_dict_type='FULL_STATE_DICT')\n"
    )
    assert migrated(text) == text.replace(
        "sharding_strategy='FULL_SHARD'", "fsdp_version=2, reshard_after_forward=True"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "sharding_strategy='NO_SHARD', state_dict_type='FULL_STATE_DICT'",
        "sharding_strategy='HYBRID_SHARD', state_dict_type='FULL_STATE_DICT'",
        "sharding_strategy=chosen, state_dict_type='FULL_STATE_DICT'",
        "sharding_strategy='FULL_SHARD'",
        "sharding_strategy='FULL_SHARD', state_dict_type='FULL_STATE_DICT', sync_module_states=True",
        "sharding_strategy='FULL_SHARD', state_dict_type='FULL_STATE_DICT', cpu_offload=CPUOffload(True)",
        "sharding_strategy='FULL_SHARD', state_dict_type='FULL_STATE_DICT', param_init_fn=init",
        "sharding_strategy='FULL_SHARD', state_dict_type='FULL_STATE_DICT', mixed_precision_policy=MixedPrecision()",
        "**settings",
    ],
)
def test_plugin_that_would_change_is_left_with_a_reason(arguments: str):
    text = f"{IMPORTS}p = FullyShardedDataParallelPlugin({arguments})\n"
    assert {finding.status for finding in findings(text)} == {Status.NEEDS_DECISION}
    assert migrated(text) == text


def test_plugin_without_a_strategy_follows_the_launcher():
    found = findings(IMPORTS + "p = FullyShardedDataParallelPlugin(state_dict_config=config)\n")
    assert [(one.code, one.line, one.status) for one in found] == [("SW181", 3, Status.REPORTED)]


def test_composer_settings_get_the_call_to_write():
    text = """\
from composer import Trainer
fsdp = {"sharding_strategy": "SHARD_GRAD_OP", "mixed_precision": "PURE", "limit_all_gathers": True}
trainer = Trainer(model, parallelism_config={"fsdp": fsdp})
"""
    (found,) = findings(text)
    call = "FSDP2Config(reshard_after_forward=False, mixed_precision=\"PURE\", state_dict_type='full')"
    assert (found.code, found.line, found.status) == ("SW182", 3, Status.NEEDS_DECISION)
    assert call in found.fix


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("from lightning.fabric import Fabric\nf = Fabric(strategy='fsdp')\n", "SW183", 2),
        ("import lightning as L\ns = L.pytorch.strategies.FSDPStrategy(sharding_strategy='NO_SHARD')\n", "SW183", 2),
        ("from transformers import TrainingArguments\n\na = TrainingArguments('o', fsdp='full_shard')\n", "SW184", 3),
        ("from composer import Trainer\nt = Trainer(fsdp_config=cfg.fsdp)\n", "SW182", 2),
    ],
)
def test_trainers_and_strategies_are_reported(text: str, code: str, line: int):
    assert [(one.code, one.line, one.status) for one in findings(text)] == [(code, line, Status.NEEDS_DECISION)]
    assert findings(text)[0].fix

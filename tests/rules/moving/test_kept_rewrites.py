"""What migrate makes of whole FSDP1 scripts and of small programs, to the letter; findings but for their prose."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from shardwise.fsdp1.codemod.migrate import Target, migrate
from tests.golden import same_as_kept
from tests.rules.moving import programs, state_programs

SCRIPTS = sorted((Path(__file__).parents[2] / "scripts").glob("fsdp1_*.py"))
HEAD = """\
import functools
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, CPUOffload
from torch.distributed.fsdp import FullStateDictConfig, FullOptimStateDictConfig, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy
from models import Block

"""
SPELLINGS = {
    "comment_after_the_last": "model = FSDP(\n    model,\n    device_id=0  # mine\n)\n",
    "comma_and_comment": "model = FSDP(\n    model,\n    device_id=0,  # mine\n)\n",
    "comma_on_one_line": "model = FSDP(model, device_id=0,)\n",
    "on_one_line": "model = FSDP(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)\n",
    "closing_beside_the_last": "model = FSDP(model,\n             device_id=0)\n",
    "positional": "model = FSDP(model, None, ShardingStrategy.FULL_SHARD, CPUOffload(offload_params=True))\n",
    "unpacked": "model = FSDP(model, **settings)\n",
    "starred": "model = FSDP(*parts)\n",
    "subclass": "class Mine(FSDP):\n    def go(self):\n        return self.module\n",
    "static": "states = FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)\nkinds = [FSDP, int]\n",
    "as_a_value": "wrapper = FSDP\nmodel = wrapper(model)\nok = isinstance(model, FSDP)\n",
    "optimizer_first": (
        "optimizer = torch.optim.AdamW(model.parameters())\nschedule = make(optimizer)\nmodel = FSDP(model)\n"
    ),
    "optimizer_with_uses_between": (
        "optimizer = torch.optim.AdamW(model.parameters())\nnumber = 3\nschedule = make(optimizer)\n"
        "print(schedule)\nmodel = FSDP(model)\n"
    ),
    "optimizer_in_another_block": (
        "optimizer = torch.optim.AdamW(model.parameters())\nif sharded:\n    model = FSDP(model)\n"
    ),
    "full_state": (
        "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, rank0_only=True),\n"
        "                          FullOptimStateDictConfig(rank0_only=True)):\n"
        "    torch.save({'model': model.state_dict(), 'optim': FSDP.optim_state_dict(model, optimizer)}, path)\n"
    ),
    "state_settings_of_the_run": (
        "config = FullStateDictConfig(offload_to_cpu=cpu, rank0_only=first)\n"
        "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):\n    state = model.state_dict()\n"
    ),
    "policy_in_a_call": (
        "model = FSDP(model, auto_wrap_policy=functools.partial(\n    transformer_auto_wrap_policy,\n"
        "    transformer_layer_cls={Block},\n), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))\n"
    ),
    "clip_and_no_sync": (
        "model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))\nfor index, batch in enumerate(loader):\n"
        "    with model.no_sync():\n        model(batch).sum().backward()\n    norm = model.clip_grad_norm_(1.0)\n"
    ),
    "nested": "model.a = FSDP(model.a)\nmodel.b = FSDP(FSDP(model.b), device_id=0)\nmodel = FSDP(model)\n",
    "in_a_lambda": "wrap = lambda m: FSDP(m, use_orig_params=True)\nmodel = wrap(model)\n",
    "tabs": ("def f(model):\n\tif True:\n\t\tmodel = FSDP(\n\t\t\tmodel,\n\t\t\tdevice_id=0\n\t\t)\n\treturn model\n"),
    "windows_lines": "model = FSDP(\r\n    model,\r\n    device_id=0\r\n)\r\n",
    "semicolons": "a = 1; model = FSDP(model); b = 2\n",
    "scalers": (
        "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\nfrom torch.distributed import fsdp\n"
        "a = ShardedGradScaler()\nb = ShardedGradScaler(2.0**10, process_group=group)\n"
        "c = ShardedGradScaler('cuda', init_scale=8, process_group=None)\nd = ShardedGradScaler(process_group=group)\n"
        "kinds = [ShardedGradScaler, int]\nmake = ShardedGradScaler\ne = make(5.0)\nprint(ShardedGradScaler, 1024)\n"
        "f = fsdp.sharded_grad_scaler.ShardedGradScaler(512)\n"
    ),
    "import_alone_in_a_body": (
        "def f(model):\n    if new:\n        from torch.distributed.fsdp import BackwardPrefetch\n"
        "    return FSDP(model, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)\n"
    ),
    "import_first_in_a_body": (
        "def f(model):\n    from torch.distributed.fsdp import BackwardPrefetch\n"
        "    return FSDP(model, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)\n"
    ),
    "import_with_a_semicolon": (
        "from torch.distributed.fsdp import BackwardPrefetch; number = 1\n"
        "model = FSDP(model, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)\n"
    ),
    "import_with_a_comment": (
        "from torch.distributed.fsdp import BackwardPrefetch  # mine\n"
        "model = FSDP(model, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)\n"
    ),
    "import_in_a_try": (
        "try:\n    from torch.distributed.fsdp import BackwardPrefetch\n"
        "except ImportError:\n    BackwardPrefetch = None\n"
        "model = FSDP(model, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)\n"
    ),
    "import_among_others": (
        "from torch.distributed.fsdp import (\n    BackwardPrefetch,  # mine\n    FSDPModule,\n"
        "    StateDictType as T,\n)\n"
        "model = FSDP(model, backward_prefetch=BackwardPrefetch.BACKWARD_PRE)\nok = isinstance(model, FSDPModule)\n"
    ),
    "summon": (
        "with FSDP.summon_full_params(model, recurse=False, writeback=False, rank0_only=True):\n    print(model.w)\n"
    ),
}
TEXTS = {
    **{f"spelled_{name}": HEAD + text for name, text in SPELLINGS.items()},
    **{script.stem: script.read_text() for script in SCRIPTS},
    **{name: programs.source(name) for name in programs.BODIES},
    **{f"states_{name}": state_programs.source(name) for name in state_programs.PROGRAMS},
}


@pytest.mark.parametrize("target", ["torch", "shardwise"])
@pytest.mark.parametrize("name", TEXTS)
def test_rewrites(tmp_path: Path, name: str, target: Target):
    path = tmp_path / "program.py"
    path.write_bytes(TEXTS[name].encode())
    migration = migrate([path], target=target, num_processes=1)
    (file,) = migration.files
    lines = difflib.unified_diff(TEXTS[name].splitlines(), file.output.splitlines(), lineterm="", n=0)
    kept = {
        "summary": migration.summary,
        "findings": [f"{each.line}:{each.column} {each.code} {each.status.value}" for each in file.findings],
        "change": [line for line in lines if not line.startswith(("---", "+++"))],
    }
    same_as_kept("rewrites", f"{name} to {target}", kept)

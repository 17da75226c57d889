"""Every rewritten program compiles, still imports, is stable and is clean to lint; what is not is left as it was."""

from __future__ import annotations

import itertools
import random
import tokenize
from io import StringIO
from pathlib import Path

import pytest

from shardwise.findings import Severity, Status
from shardwise.fsdp1 import emitted_helpers
from shardwise.fsdp1.codemod.framework_files import convert_yaml
from shardwise.fsdp1.codemod.migrate import MigratedFile, failed_check, migrate
from shardwise.fsdp1.codemod.program import Program
from shardwise.linting.files import LintSettings
from shardwise.linting.lint import lint_text

HEAD = "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"


def run(folder: Path, **texts: str) -> dict[str, MigratedFile]:
    for name, text in texts.items():
        (folder / f"{name}.py").write_bytes(text.encode())
    return {Path(file.path).stem: file for file in migrate([folder], num_processes=1).files}


def test_both_kinds_of_ignored_are_left_to_a_person(tmp_path: Path):
    text = HEAD + "def wrap(model, a, b):\n    return FSDP(model, ignored_modules=a, ignored_states=b)\n"
    file = run(tmp_path, train=text)["train"]
    assert not file.changed
    assert any("ignored" in one.message and one.status is Status.NEEDS_DECISION for one in file.findings)


@pytest.mark.parametrize("use", ["from wrapping import FSDP", "import wrapping\nkind = wrapping.FSDP"])
def test_an_import_that_another_file_takes_stays(tmp_path: Path, use: str):
    wrapping = HEAD + "def wrap(model):\n    return FSDP(model)\n"
    check = "import torch\n" + use + "\nkinds = [FSDP, int]\n" if "from" in use else use + "\n"
    files = run(tmp_path, wrapping=wrapping, other=check)
    assert files["wrapping"].changed
    assert "FullyShardedDataParallel as FSDP" in files["wrapping"].output


@pytest.mark.parametrize(
    "call",
    [
        "FSDP(model, device_id=0,  # mine\n        use_orig_params=True)",
        "FSDP(\n        model, # the model\n        # about flags\n        use_orig_params=True, # flat\n    )",
        "FSDP(model, cpu_offload=CPUOffload(\n        # why\n        offload_params=True,\n    ))",
        "FSDP(model, sharding_strategy=(  # how\n        ShardingStrategy.FULL_SHARD\n    ))",
    ],
)
def test_line_ends_and_comments_survive(tmp_path: Path, call: str):
    text = HEAD + "from torch.distributed.fsdp import CPUOffload, ShardingStrategy\n"
    text += f"def wrap(model):\n    return {call}\n"
    file = run(tmp_path, train=text.replace("\n", "\r\n"))["train"]
    assert file.changed
    assert file.output.count("\n") == file.output.count("\r\n")
    assert all(comment in file.output for comment in comments_of(text))


def comments_of(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    return {token.string.strip("# \r\n") for token in tokens if token.type == tokenize.COMMENT}


def test_new_imports_stand_before_their_first_use(tmp_path: Path):
    text = "import torch\n" + HEAD + "from nets import model\nmodel = FSDP(model)\nimport os\nprint(os.name, model)\n"
    output = run(tmp_path, train=text)["train"].output
    assert output.index("import fully_shard") < output.index("fully_shard(model")


def test_imports_that_only_the_old_call_used_go(tmp_path: Path):
    text = "import functools\nfrom torch.distributed.fsdp.wrap import transformer_auto_wrap_policy\n" + HEAD
    text += "from nets import Block\n\n\ndef wrap(model):\n"
    text += "    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})\n"
    text += "    return FSDP(model, auto_wrap_policy=functools.partial(\n"
    text += "        transformer_auto_wrap_policy, transformer_layer_cls={Block}))\n"
    output = run(tmp_path, train=text.replace(text.splitlines(True)[7], ""))["train"].output
    assert "functools" not in output


def test_an_accelerate_key_without_its_prefix_is_not_renamed():
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: NO_WRAP\n  sharding_strategy: FULL_SHARD\n"
    output, findings = convert_yaml(text, "a.yaml")
    assert output == text
    assert any("sharding_strategy" in one.message and one.status is Status.NEEDS_DECISION for one in findings)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("x = f(a=1, a=2)\n", "would not compile: keyword argument repeated"),
        ("x = 1\n", "would no longer have FSDP, which b.py:1 takes from it"),
        (
            HEAD + "import torch\nfrom torch.distributed.fsdp import fully_shard\nmodel = torch.nn.Linear(2, 2)\n"
            "optimizer = torch.optim.SGD(model.parameters())\nfully_shard(model)\noptimizer.step()\n",
            "would have an error that lint finds, SW201",
        ),
        (HEAD + "model = None\n", ""),
    ],
)
def test_a_failed_check_is_named(output: str, why: str):
    before = {"a.py": HEAD, "b.py": "from a import FSDP\n"}
    assert failed_check("a.py", Program(before), Program(before | {"a.py": output}))[: len(why) or None] == why


def test_an_error_that_fsdp1_had_as_well_holds_no_rewrite_back(tmp_path: Path):
    text = "import torch\n" + HEAD + "from torch.distributed.fsdp import MixedPrecision\n"
    text += "model = FSDP(build(), mixed_precision=MixedPrecision(param_dtype=torch.float16))\n"
    text += "model(batch).sum().backward()\n"
    assert run(tmp_path, train=text)["train"].changed


def test_an_error_on_a_line_that_needs_a_decision_holds_no_rewrite_back(tmp_path: Path):
    text = HEAD + "from torch.distributed.fsdp import StateDictType\nmodel = FSDP(build())\n"
    text += "FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)\nmodel(batch).sum().backward()\n"
    file = run(tmp_path, train=text)["train"]
    assert file.changed
    assert any(one.line == 4 and one.status is Status.NEEDS_DECISION for one in file.findings)


def test_an_error_on_such_a_line_that_is_changed_as_well_holds_no_rewrite_back(tmp_path: Path):
    text = "import torch\n" + HEAD + "model = FSDP(build())\noptimizer = torch.optim.SGD(model.parameters())\n"
    text += "model(batch).sum().backward()\nif rank == 0:\n    torch.save(model.module.state_dict(), path)\n"
    file = run(tmp_path, train=text)["train"]
    assert "    torch.save(model.state_dict(), path)" in file.output
    assert any(one.line == 7 and one.status is Status.NEEDS_DECISION for one in file.findings)


IMPORTS = (
    "from torch.distributed.fsdp import (\n    CPUOffload,\n    FullyShardedDataParallel as FSDP,  # FSDP1\n"
    "    FullStateDictConfig,\n    MixedPrecision,\n    ShardingStrategy,\n    StateDictType,\n)\n",
    "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy\n"
    "from torch.distributed.fsdp import CPUOffload, FullStateDictConfig, StateDictType\n",
)
ARGUMENTS = (
    ("", "auto_wrap_policy=ModuleWrapPolicy({nn.Linear})", "auto_wrap_policy=policy"),
    ("", "mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)  # half\n    ", "mixed_precision=precision"),
    ("", "sharding_strategy=ShardingStrategy.SHARD_GRAD_OP", "sharding_strategy=ShardingStrategy.NO_SHARD"),
    ("", "cpu_offload=CPUOffload(offload_params=True)", "sync_module_states=True", "ignored_modules=[model[0]]"),
    ("", "device_id=torch.cuda.current_device()", "use_orig_params=True"),
)
LOOPS = (
    "loss = model(batch).sum()\nloss.backward()\noptimizer.step()\n",
    "with model.no_sync():\n    model(batch).sum().backward()\nmodel.clip_grad_norm_(1.0)\noptimizer.step()\n",
)
SAVES = (
    "",
    "state = model.state_dict()\nif rank == 0:\n    torch.save(state, 'a.pt')\n",
    "config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)\n"
    "with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):\n    state = model.state_dict()\n"
    "if rank == 0:\n    torch.save(state, 'a.pt')\n",
)


def drawn(seed: int) -> str:
    draw = random.Random(seed).choice
    given = ", ".join(one for one in (draw(kinds) for kinds in ARGUMENTS) if one)
    body = "model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))\n"
    body += "precision = MixedPrecision(param_dtype=torch.bfloat16)\n" if "=precision" in given else ""
    body += "policy = ModuleWrapPolicy({nn.Linear})\n" if "=policy" in given else ""
    body += f"model = FSDP(model{', ' * bool(given)}{given})\n"
    body += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" + draw(LOOPS) + draw(SAVES)
    if draw((True, False)):
        body = "def main(rank, batch):\n" + "".join(f"    {line}" for line in body.splitlines(True))
    head = "import torch\nimport torch.distributed as dist\nfrom torch import nn\n" + draw(IMPORTS)
    head += "from torch.distributed.fsdp.wrap import ModuleWrapPolicy\n\n"
    if not body.startswith("def"):
        head += "dist.init_process_group('cpu:gloo,cuda:nccl')\nrank, batch = dist.get_rank(), torch.ones(1, 8)\n"
    return (head + body).replace("\n", draw(("\n", "\r\n")))


def test_drawn_programs_compile_are_stable_and_clean(tmp_path: Path):
    texts = {f"p{seed}": drawn(seed) for seed in range(60)}
    for (name, text), index in zip(texts.items(), itertools.count()):
        folder = tmp_path / str(index)
        folder.mkdir()
        output = run(folder, **{name: text})[name].output
        assert output != text, text
        compile(output, name, "exec")
        assert output.count("\n") == output.count("\r\n") or "\r" not in text
        errors = [one for one in lint_text(output, name, LintSettings()).findings if one.severity is Severity.ERROR]
        assert not errors, f"{errors[0]}\n{output}"
        again = run(folder, **{name: output})
        assert name not in again or not again[name].changed


def test_a_helper_of_a_file_that_is_left_alone_stays_for_fsdp1_too(tmp_path: Path):
    train = HEAD + "from steps import clip\n\n\ndef train(model, batches):\n    model = FSDP(model)\n"
    train += "    for batch in batches:\n        loss = model(batch)\n"
    train += "        for p in model.parameters():\n            p.grad = None\n"
    train += "        loss.backward()\n        clip(model)\n"
    files = run(tmp_path, train=train, steps="def clip(model):\n    return model.clip_grad_norm_(1.0)\n")
    assert not files["train"].changed, "gradients cleared between forward and backward are an error with FSDP2"
    assert not files["steps"].changed
    assert any("is left alone" in one.message for one in files["steps"].findings)


def test_lint_finds_nothing_in_the_helpers_that_migrate_writes():
    path = Path(emitted_helpers.__file__)
    assert not lint_text(path.read_text(), "train.py", LintSettings()).findings


NESTED = "def wrap(model):\n    model = FSDP(model)\n    model.layers = FSDP(model.layers)\n    return model\n"
CHECKS = HEAD + "def show(model):\n    print(isinstance(model, FSDP))\n"
SHARES = HEAD + "def other(model):\n    return FSDP(model)\n"


@pytest.mark.parametrize(
    ("main", "changed"),
    [
        ("from wrapper import wrap\nfrom show import show\n\nshow(wrap(build()))\n", False),
        ("from other import other\nfrom show import show\n\nshow(other(build()))\n", True),
    ],
    ids=["of_one_left_alone", "of_another"],
)
def test_a_use_stays_with_the_constructors_that_may_feed_it(tmp_path: Path, main: str, changed: bool):
    files = run(tmp_path, wrapper=HEAD + NESTED, show=CHECKS, main=main, other=SHARES)
    assert not files["wrapper"].changed, "lint refuses a model sharded before its parts"
    assert files["other"].changed
    assert files["show"].changed is changed
    assert changed or any("is left alone" in one.message for one in files["show"].findings)

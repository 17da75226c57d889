"""`shardwise plan`: the tree, one group in full, JSON, and what a wrong command is told."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.models.load import load_model
from shardwise.planning.plan import Group, Plan, PlannedParameter
from tests.contract.command_line import Ran, run
from tests.zoo import cases

ROOT = Path(__file__).parents[3]
NOISY = """
import os, subprocess, sys, torch
print("imported")
def build():
    print("built")
    sys.__stdout__.write("buffered\\n")
    os.write(1, b"written\\n")
    subprocess.run([sys.executable, "-c", "print('started')"], check=True)
    return torch.nn.Linear(4, 4)
"""
PRINTED = ("imported", "built", "buffered", "written", "started")


def plan(*arguments: str, folder: Path | None = None) -> Ran:
    return run("plan", *arguments, folder=folder)


def lines_of(*arguments: str) -> list[str]:
    ran = plan(*arguments)
    assert (ran.status, ran.errors) == (0, "")
    return ran.output.splitlines()


def test_commands_on_the_page_print_what_it_says():
    """Among them the plan of llama3-8b on eight GPUs, to the letter."""
    blocks = re.findall(r"^```console\n\$ shardwise ([^\n]*)\n(.*?)^```$", page(), re.MULTILINE | re.DOTALL)
    assert "plan llama3-8b --gpus 8" in [command for command, _ in blocks]
    for command, expected in blocks:
        ran = run(*command.split())
        assert (ran.status, ran.output, ran.errors) == (0, expected, "")


def page() -> str:
    return (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_printed_plan_is_the_command_s():
    expected = str(sw.plan(load_model("llama3-debug"), mesh=sw.MeshConfig(shard=4, device="cuda")))
    assert lines_of("llama3-debug", "--gpus", "4") == expected.splitlines()


def test_json_is_the_plan_s():
    ran = plan("llama3-debug", "--gpus", "4", "--format", "json")
    expected = sw.plan(load_model("llama3-debug"), mesh=sw.MeshConfig(shard=4, device="cuda"))
    assert ran.output == expected.to_json() + "\n"


def test_ranks_and_device_come_from_the_options():
    assert "over shard 64 (cuda)" in lines_of("llama3-debug", "--gpus", "64")[0]
    assert "computes in bfloat16" in lines_of("llama3-debug", "--gpus", "64")[1]
    here = torch.accelerator.current_accelerator()
    assert f"over shard 3 ({here.type if here else 'cpu'})" in lines_of("llama3-debug", "--nproc", "3")[0]
    assert f"over shard {torch.accelerator.device_count() or 2} " in lines_of("llama3-debug")[0]


def test_hybrid_sharding_shows():
    hybrid = ["--set", "mesh.replicate=2"]
    assert "over replicate 2 x shard 4 (cuda)" in lines_of("llama3-debug", "--gpus", "8", *hybrid)[0]
    assert "over replicate 2 x shard 3 " in lines_of("llama3-debug", *hybrid, "--set", "mesh.shard=3")[0]


def test_several_axes_are_drawn_below_the_plan():
    settings = ("--set", "mesh.context=2", "--set", "mesh.pipeline=2")
    lines = lines_of("llama3-debug", "--gpus", "8", *settings)
    mesh = sw.MeshConfig(shard=2, context=2, pipeline=2, device="cuda")
    assert lines[-4:] == sw.draw_mesh(mesh).splitlines()
    assert any("2 pipeline stages: a rank holds the groups of its stages" in line for line in lines)
    assert "sequences are divided over 2 ranks; keys" in lines[-5]


def test_adapters_are_part_of_the_plan():
    lines = lines_of("llama3-debug", "--nproc", "2", "--set", "lora.quantize=nf4")
    assert lines[-1].endswith("NF4Tensor: 4.5 bits an element")


def test_run_file_gives_model_mesh_and_sharding(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "model: tutorial\nmodel_options: {num_layers: 3}\nmesh: {replicate: 2}\nshard: {reshard_after_forward: false}\n"
    )
    ran = plan("run.yaml", "--gpus", "4", folder=tmp_path)
    assert "over replicate 2 x shard 2 (cuda)" in ran.output
    assert "blocks.0 … blocks.2  3 groups, each" in ran.output
    assert "; reshard]" not in ran.output
    assert "; reshard]" in plan("run.yaml", "--set", "shard.reshard_after_forward=true", folder=tmp_path).output
    assert plan("absent.yaml", folder=tmp_path).status == 2


def test_large_models_take_one_line_a_kind_of_group():
    lines = lines_of("llama3-405b", "--gpus", "512", "--set", "mesh.replicate=4")[:-3]  # the drawing of the ranks
    assert len(lines) <= 12
    assert any(
        line.startswith("├─ model.layers.0 … model.layers.125  126 groups, each 3.19B parameters") for line in lines
    )
    assert [line[0] for line in lines if line[0] in "├└"] == ["├", "├", "├", "└"]
    assert not any(line.startswith("│") for line in lines[-2:]), "nothing hangs from the last row"


def test_replicated_norms_take_one_line():
    case = cases("hard_cases")["openpi_bfloat16"]
    text = str(sw.plan(case.build(), case.config, mesh=sw.MeshConfig(shard=4, device="cpu")))
    (row,) = [line for line in text.splitlines() if "replicated:" in line]
    assert "experts.action.layers.*.input_layernorm.weight" in row
    assert "float32, 12 parameters, 1.12 KiB" in row
    assert text.count("float32 among bfloat16 in one module") == 1
    assert max(len(line) for line in text.splitlines() if "groups, each" in line) < 200, "names of seven modules"


def group(name: str, reason: str = "as it is", **settings: object) -> Group:
    weight = PlannedParameter(fqn=f"{name}.weight", shape=(4, 4), dtype="float32")
    return Group(modules=(name,), kind="block", parameters=(weight,), reason=reason, **settings)


def rows_of(*groups: Group) -> list[str]:
    return str(Plan(model="Model", device="cpu", axes=(("shard", 2),), groups=groups)).splitlines()[1:]


def test_alternating_groups_are_folded_and_keep_what_they_differ_in():
    size = "16 parameters, 64 B"
    policy = "[float32 → storage, reduce storage; keep unsharded]"
    odd = [group(f"layers.{i}", f"one of {i}", offload=bool(i % 2)) for i in range(12)]
    assert rows_of(*odd) == [
        f"├─ layers.0, layers.2, … layers.10  6 groups, each {size}  {policy}",
        "│    one of *",
        f"└─ layers.1, layers.3, … layers.11  6 groups, each {size}  {policy[:-1]}; offload to CPU]",
    ]
    for settings in (
        {"reduce_dtype": "float64"}, {"output_dtype": "float64"}, {"entry_points": ("b:go",)}, {"held": True},
        {"param_dtype": "float64"}, {"reshard_after_forward": True}, {"reason": "another"}, {"pin_memory": True},
    ):  # fmt: skip
        assert len([row for row in rows_of(group("a.0"), group("a.1", **settings)) if "parameters" in row]) == 2
    assert len(rows_of(group("a.0"), group("a.1", forward_prefetch=("a.0",)))) == 2, "the last has none ahead"
    assert rows_of(group("a"), group("b"))[-1].startswith("└─ b"), "a reason is printed once"


def test_explain_tells_everything_about_a_group():
    text = "\n".join(
        lines_of("llama3-debug", "--gpus", "8", "--set", "shard.prefetch.forward=1", *explain("model.layers.0"))
    )
    assert text.startswith("model.layers.0: block, ")
    for fact in (
        r"reason +Block, one of \d+ in model.layers", r"computes in bfloat16: ", r"mesh +shard 8 \(cuda\)",
        r"storage +float32", r"compute +bfloat16", r"reduce +float32", r"inputs +cast to bfloat16",
        r"after forward +reshard", r"offload +no", r"prefetch in forward +model.layers.1", r"entry points +calling",
        r"model.layers.0.mlp.up_proj.weight  float32 \[\d+, \d+\], .* per rank; shard on dim 0",
    ):  # fmt: skip
        assert re.search(fact, text), fact


def explain(name: str) -> list[str]:
    return ["--explain", name]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("(root)", "(root)"),
        ("model.norm.weight", "(root)"),
        ("model.layers.1.mlp", "model.layers.1"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_groups_are_found_by_module_and_parameter(name: str, found: str):
    assert lines_of("llama3-debug", *explain(name))[0].startswith(f"{found}: ")
    ran = plan("llama3-debug", *explain(name), "--format", "json")
    assert [module or "(root)" for module in json.loads(ran.output)["modules"]] == [found]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama3-8"], "did you mean 'llama3-8b'?"),
        (["no_such_module:build"], "there is no module 'no_such_module'"),
        (["llama3-debug", "--set", "shard.ofload=true"], "did you mean 'offload'?"),
        (["llama3-debug", "--set", "shard"], "not of the form a.b=value"),
        (["llama3-debug", "--set", "mesh.shard=3", "--nproc", "2"], "a 1 x 3 mesh needs 3 ranks, got 2"),
        (["llama3-debug", "--set", "mesh.device=cpu", "--gpus", "2"], "mesh.device is cpu"),
        (["llama3-debug", "--set", "mesh.shard=0"], "mesh.shard"),
        (["llama3-debug", "--nproc", "2", "--gpus", "2"], "--nproc is 2 and --gpus is 2"),
        (["llama3-debug", "--gpus", "0"], "--gpus"),
        (["llama3-debug", "--explain", "model.layer.1"], "(did you mean 'model.layers.1'?)"),
        (["llama3-debug", "--explain", "model.layers"], "(did you mean 'model.layers.0'?)"),
        (["llama3-debug", "--set", "shard.block_classes=[Blok]"], "did you mean 'Block'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_input_exits_with_two(arguments: list[str], message: str):
    ran = plan(*arguments)
    assert (ran.status, ran.output) == (2, "")
    assert message in ran.errors
    assert "Traceback" not in ran.errors


def test_a_callable_that_raises_is_named_with_its_line(tmp_path: Path):
    (tmp_path / "raising.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2, 2).weight.sum().item()\n"
    )
    ran = plan("raising:build", folder=tmp_path)
    assert (ran.status, ran.output) == (2, "")
    assert "error: raising:build cannot be built: RuntimeError: " in ran.errors
    assert f"where: {tmp_path / 'raising.py'}:3 in build" in ran.errors
    assert "meta" in ran.errors


def test_standard_output_is_the_plan_s_alone(tmp_path: Path):
    (tmp_path / "noisy_plan.py").write_text(NOISY)
    command = [sys.executable, "-m", "shardwise", "plan", "noisy_plan:build", "--nproc", "2", "--format", "json"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=tmp_path, env=buffered, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert Plan.from_json(done.stdout).model == "Linear"
    assert sorted(done.stderr.split()) == sorted(PRINTED)


def test_the_model_is_built_on_meta_and_prints_elsewhere(tmp_path: Path):
    (tmp_path / "on_meta.py").write_text(
        "import torch\ndef build():\n    made = torch.nn.Linear(4, 4)\n    print(made.weight.device)\n    return made\n"
    )
    ran = plan("on_meta:build", "--nproc", "2", "--format", "json", folder=tmp_path)
    assert ran.errors == "meta\n"
    assert Plan.from_json(ran.output).model == "Linear"


def test_plan_is_listed():
    assert re.search(r"plan +Show how a model will be sharded, and why", run("--help").output)

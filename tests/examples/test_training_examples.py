"""Every run file in examples/training is started by the commands in its header, and every setting has an example."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import itertools
import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from examples.training import prepare

from shardwise.config.load import load
from shardwise.config.run import RunConfig
from shardwise.training.loop import fit
from shardwise.training.run_folder import Training
from tests.ranks import ranks

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples/training").glob("*.yaml"))
NAMES = [file.stem for file in FILES]
MOST_STEPS = 20
NEEDS = {
    "float8": "torchao",
    "lora": "peft",
    "dataset": "datasets",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "tokenizer": "tokenizers",
}
SMALLER = {
    "bytes": {"training.batch_size": 4, "data.sequence_length": 32},
    "llama3_1b": {"model": "llama3-debug", "training.batch_size": 2, "data.sequence_length": 32, "mesh.device": "cpu"},
}


@dataclasses.dataclass(frozen=True)
class Command:
    """One line of a header."""

    environment: dict[str, str]
    program: str
    arguments: list[str]

    @property
    def num_ranks(self) -> int:
        return int((self.values_of("--nproc") or ["2"])[-1])

    @property
    def settings(self) -> list[str]:
        return self.values_of("--set")

    def values_of(self, option: str) -> list[str]:
        return [value for name, value in zip(self.arguments, self.arguments[1:], strict=False) if name == option]


def commands_of(name: str) -> list[Command]:
    """The indented lines of the comment that a file begins with."""
    lines = (ROOT / f"examples/training/{name}.yaml").read_text().splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return [_command(shlex.split(line[1:])) for line in header if line.startswith("#     ")]


def _command(words: list[str]) -> Command:
    environment = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    program, *arguments = words[len(environment) :]
    return Command(environment, program, arguments)


@contextlib.contextmanager
def environment_of(command: Command) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in command.environment.items():
            patch.setenv(name, value)
        yield


def is_training(command: Command) -> bool:
    return command.program == "shardwise"


@pytest.mark.parametrize("name", NAMES)
def test_header_says_how_to_start_the_run(name: str):
    commands = commands_of(name)
    trainings = [command for command in commands if is_training(command)]
    assert trainings
    for command in trainings:
        assert command.arguments[:2] == ["train", f"examples/training/{name}.yaml"]
        assert isinstance(config_of(name, command), RunConfig)
    for command in commands:
        if not is_training(command):
            assert command.program == "python"
            assert command.arguments[:2] == ["-m", "examples.training.prepare"]
            assert all(callable(getattr(prepare, part)) for part in command.arguments[2:])


def test_every_setting_of_a_run_has_an_example():
    shown = {path for file in FILES for path in paths_in(yaml.safe_load(file.read_text()))}
    sections = ("data", "optimizer", "schedule", "training", "checkpoint", "metrics")
    known = {f"{s}.{field.name}" for s in sections for field in dataclasses.fields(getattr(RunConfig(), s))}
    assert sorted(known - shown) == []
    assert {"model_options.num_experts", "weights", "deterministic", "seed", "mesh.replicate"} <= shown


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("optimizer.name", {"adamw", "sgd", "muon"}),
        ("schedule.name", {"constant", "linear", "wsd"}),  # cosine is the default
        ("checkpoint.format", {"sharded", "full", "dcp"}),
        ("training.accumulation", {"comm", "hsdp"}),
        ("training.on_bad_loss", {"skip", "rewind"}),  # stop is the default
        ("data.format", {"jsonl", "tokens", "dataset", "callable"}),
        ("data.pack", {True, False}),
        ("shard.precision.param_dtype", {"bfloat16"}),
        ("shard.prefetch.forward", {2}),
        ("shard.offload", {True}),
        ("shard.activations", {"full", "offload"}),
        ("shard.float8.recipe", {"tensorwise"}),
        ("mesh.replicate", {2}),
        ("mesh.context", {2}),
        ("mesh.expert", {2}),
        ("mesh.pipeline", {2}),
    ],
)
def test_every_choice_has_an_example(setting: str, values: set[Any]):
    chosen = set()
    for name in NAMES:
        for command in commands_of(name):
            if is_training(command):
                value: Any = config_of(name, command)
                for part in setting.split("."):
                    value = getattr(value, part)
                chosen.add(value)
    assert values <= chosen


def paths_in(settings: dict[str, Any], before: str = "") -> Iterator[str]:
    for name, value in settings.items():
        yield f"{before}{name}"
        if isinstance(value, dict):
            yield from paths_in(value, f"{before}{name}.")


def config_of(name: str, command: Command, *, smaller: bool = False) -> RunConfig:
    file = ROOT / f"examples/training/{name}.yaml"
    config = load(RunConfig, file, command.settings)
    if not smaller:
        return config
    changes = {"training.steps": min(config.training.steps, MOST_STEPS), "training.sample_tokens": 8}
    changes |= {"training.evaluation_batches": 2, **SMALLER.get(name, {})}
    return load(RunConfig, file, [*command.settings, *(f"{path}={value}" for path, value in changes.items())])


@contextlib.contextmanager
def folder_with_examples(folder: Path, rank: int) -> Iterator[None]:
    """Work where runs may be written, and where the paths in the run files hold."""
    if rank == 0:
        (folder / "examples").symlink_to(ROOT / "examples")
    dist.barrier()
    with contextlib.chdir(folder):
        yield


def run_example(name: str, folder: Path, rank: int) -> list[Training]:
    """Carry out the commands of a header on the ranks that there are, in fewer steps."""
    trained = []
    with folder_with_examples(folder, rank):
        for command in commands_of(name):
            if is_training(command):
                assert command.num_ranks == dist.get_world_size()
                with environment_of(command):
                    trained.append(fit(config_of(name, command, smaller=True)))
                check_is_whole(trained[-1])
            elif rank == 0:
                for part in command.arguments[2:]:
                    getattr(prepare, part)()
            dist.barrier()
    return trained


def check_is_whole(training: Training) -> None:
    assert training.steps == training.total_steps
    assert training.stopped is None
    assert training.last_loss is not None
    assert math.isfinite(training.last_loss)
    assert training.checkpoint is not None
    assert Path(training.checkpoint).exists()


ON_FOUR = [name for name in NAMES if {c.num_ranks for c in commands_of(name) if is_training(c)} == {4}]
ON_TWO = [name for name in NAMES if {c.num_ranks for c in commands_of(name) if is_training(c)} == {2}]
FAST = ("own_model",)


def marked(name: str) -> Any:
    needed = NEEDS.get(name, "json")
    absent = pytest.mark.skipif(importlib.util.find_spec(needed) is None, reason=f"{needed} is not installed")
    return pytest.param(name, marks=[absent, *([] if name in FAST else [pytest.mark.slow])])


# wandb leaves a server running until its process ends, which ranks that outlive the test do not.
@pytest.mark.parametrize("name", [marked(name) for name in ON_TWO if name != "wandb"])
@ranks(2, timeout_s=240)
def test_example_runs_on_two_ranks(rank: int, name: str, tmp_path: Path):
    trained = run_example(name, tmp_path, rank)
    CHECKS.get(name, lambda trained: None)([tmp_path / training.folder for training in trained])
    if name in LEARNS:
        assert trained[0].first_loss is not None
        assert trained[0].last_loss is not None
        assert trained[0].last_loss < trained[0].first_loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
@ranks(4, timeout_s=240)
def test_example_runs_on_four_ranks(rank: int, name: str, tmp_path: Path):
    run_example(name, tmp_path, rank)


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses_of(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records_of(folder) if "loss" in record]


def check_went_on(folders: list[Path]) -> None:
    assert folders[0] == folders[1]
    assert [step for step, _ in losses_of(folders[1])] == list(range(1, 21))


def check_profile(folders: list[Path]) -> None:
    assert [step for step, _ in losses_of(folders[0])] == [2, 4, 6, 8, 10]
    assert {file.name for file in folders[0].glob("profile/*")} == {"rank0.json"}


def check_export(folders: list[Path]) -> None:
    import transformers

    exported = folders[0] / "export"
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, local_files_only=True)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(exported / "tokenizer.json"))
    assert tokenizer("def f(x):").input_ids
    assert model.config.vocab_size == 512


def check_adapters(folders: list[Path]) -> None:
    import peft
    import transformers

    assert folders[0] == folders[1]
    assert [step for step, _ in losses_of(folders[1])] == list(range(1, 21))
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[0].parent / "prepared/llama")
    opened = peft.PeftModel.from_pretrained(base, folders[1] / "export")
    assert any(p.abs().max() > 0 for name, p in opened.named_parameters() if "lora_B" in name)


def check_evaluations(folders: list[Path]) -> None:
    steps = [record["step"] for record in records_of(folders[0]) if "evaluation_loss" in record]
    assert steps == [10, 20]


def check_tensorboard(folders: list[Path]) -> None:
    assert list(folders[0].glob("tensorboard/events*"))


CHECKS = {
    "lora": check_adapters,
    "full_state_dict": check_went_on,
    "dcp_state_dict": check_went_on,
    "pipeline": check_went_on,
    "metrics": check_profile,
    "fine_tuning": check_export,
    "evaluation": check_evaluations,
    "tensorboard": check_tensorboard,
}
LEARNS = {"tutorial", "muon", "sgd", "moe", "multimodal", "own_model", "fine_tuning", "accumulation"}


def run_command(command: Command, folder: Path) -> str:
    environment = {**os.environ, **command.environment, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{folder}"
    program = [sys.executable, "-m", "shardwise.cli.main"] if is_training(command) else [sys.executable]
    done = subprocess.run(
        [*program, *command.arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [marked(name) for name in ("resume", "wandb", "fine_tuning")])
def test_commands_of_the_header_run_as_they_are(name: str, tmp_path: Path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands_of(name):
        printed = run_command(command, tmp_path)
        if is_training(command):
            assert "trained " in printed
    if name == "resume":
        assert [step for step, _ in losses_of(tmp_path / "runs/resume")] == list(range(1, 21))
        assert [step for step, _ in losses_of(tmp_path / "runs/resumed_elsewhere")] == list(range(21, 26))

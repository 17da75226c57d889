"""What machines read: fields of every JSON output and of every file, and exit statuses, all from real invocations."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from tests.contract.command_line import ROOT, Ran, run
from tests.contract.samples import RUN_STEPS, STEP, run_checkpoint, value_of
from tests.contract.shapes import shape_of

CLEAN = "import torch\n\nprint(torch.ones(1))\n"
WRONG = """import torch
from torch.distributed._composable.fsdp import fully_shard

model = build()
optimizer = torch.optim.AdamW(model.parameters())
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
"""
FSDP1 = """from elsewhere import prepare_modules_for_fsdp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

model = FSDP(model, use_orig_params=True)
prepare_modules_for_fsdp(model)
"""
UNREADABLE = "from torch.distributed.fsdp import fully_shard\ndef (:\n"
LOG = """[rank1]: AssertionError: Expects to be in one of (<ShardedState.UNSHARDED: 3>,) not ShardedState.SHARDED
[rank0]: RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4321
"""
BROKEN = "def build():\n    raise RuntimeError('a bug of the user')\n"
_TIMEOUT_S = 120
# Each makes `doctor` say something on any machine.
DOCTORED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_P2P_DISABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


class Work:
    """A folder with samples of every format, damaged copies of them, and sources to lint and migrate."""

    def __init__(self, samples: Path, folder: Path) -> None:
        self.samples, self.folder = samples, folder
        self.sharded = samples / "checkpoints" / f"step-{STEP:08d}"
        for name, text in {"clean.py": CLEAN, "wrong.py": WRONG, "fsdp1.py": FSDP1, "broken.py": BROKEN}.items():
            (folder / name).write_text(text)
        (folder / "unreadable.py").write_text(UNREADABLE)
        (folder / "log.txt").write_text(LOG)
        (folder / "unknown.txt").write_text("something nobody has heard of\n")
        (folder / "bad.yaml").write_text("modle: tutorial\n")
        (folder / "dumps").mkdir()
        for rank, size in enumerate((3, 4)):
            (folder / "dumps" / f"rank_{rank}").write_bytes(pickle.dumps({"entries": [_collective(size)]}))
        self.flipped = self._damaged("flipped", _flip)
        self.missing = self._damaged("missing", lambda file: file.unlink())
        self.foreign = folder / "foreign.safetensors"
        save_file({"weight": value_of("foreign", (3, 2))}, self.foreign)
        self.other = folder / "other.pt"
        torch.save({"model": {"a": value_of("a", (11, 6)), "b": value_of("b", (2,))}, "epoch": 1}, self.other)
        self.third = folder / "third.pt"
        torch.save({"model": {"a": value_of("a", (6, 11)), "b": value_of("c", (2,))}, "epoch": 2}, self.third)
        self.numbered = folder / "numbered.pt"
        torch.save(_numbered(), self.numbered)
        self.shared = folder / "shared.pt"
        torch.save(_with_shared_state(), self.shared)
        self.garbage = folder / "garbage.pt"
        self.garbage.write_bytes(b"not a checkpoint")

    def run(self, *arguments: str | Path, stdin: str = "") -> Ran:
        """Run the command in the folder."""
        return run(*arguments, stdin=stdin, folder=self.folder)

    def json(self, *arguments: str | Path, stdin: str = "") -> Any:
        """What a command prints with `--format json`."""
        ran = self.run(*arguments, "--format", "json", stdin=stdin)
        try:
            return json.loads(ran.output)
        except ValueError:
            raise AssertionError(f"{arguments} printed no JSON:\n{ran.output}\n{ran.errors}") from None

    def doctored(self) -> Any:
        """What `doctor` says where there is something to say, on any machine."""
        with odd_environment():
            return self.json("doctor", "--ranks", "0")

    def _damaged(self, name: str, damage: Any) -> Path:
        copy = self.folder / name / self.sharded.name
        shutil.copytree(self.sharded, copy)
        damage(copy / "__1_0.distcp")
        return copy


def describe_outputs(work: Work) -> dict[str, Any]:
    """The fields of what each command prints for machines."""
    inspected = [work.json("ckpt", "inspect", path) for path in _checkpoints(work)]
    verified = [work.json("ckpt", "verify", path) for path in (work.sharded, work.flipped, work.foreign)]
    converted = [
        work.json("ckpt", "convert", work.sharded, work.folder / "as.pt", "--to", "full"),
        work.json("ckpt", "convert", work.sharded, work.folder / "as", "--to", "safetensors"),
    ]
    compared = [work.json("ckpt", "diff", work.other, path) for path in (work.other, work.third, work.sharded)]
    linted = [work.json("lint", name) for name in ("wrong.py", "clean.py")]
    migrated = [work.json("migrate", name) for name in ("fsdp1.py", "clean.py")]
    return {
        "ckpt inspect": shape_of(inspected, maps=("dtypes", "sections", "values", "left_out"), opaque=("details",)),
        "ckpt verify": shape_of(verified),
        "ckpt convert": shape_of(converted, maps=("left_out",)),
        "ckpt diff": shape_of(compared),
        "lint": shape_of(linted),
        "lint --format sarif": shape_of([json.loads(work.run("lint", "wrong.py", "--format", "sarif").output)]),
        "lint --format github": _annotations(work.run("lint", "wrong.py", "--format", "github").output),
        "migrate": shape_of(migrated),
        "migrate --format sarif": shape_of([json.loads(work.run("migrate", "fsdp1.py", "--format", "sarif").output)]),
        "migrate --format github": _annotations(work.run("migrate", "fsdp1.py", "--format", "github").output),
        "explain RULE": shape_of([work.json("explain", "SW201")]),
        "explain ERROR": shape_of([work.json("explain", "SW502")]),
        "explain FILE": shape_of([work.json("explain", name) for name in ("log.txt", "unknown.txt")]),
        "explain FOLDER": shape_of(work.json("explain", "dumps"), maps=("doing",)),
        "doctor": shape_of([work.doctored()], maps=("versions", "variables"), opaque=("gpus", "launcher")),
        "train --print-config": _yaml_keys(work.run("train", "--print-config", "--nproc", "2").output),
    }


def describe_training(work: Work) -> dict[str, Any]:
    """The fields of what commands print that start ranks, and their exit statuses."""
    shutil.copytree(work.samples / "run", work.folder / "run")
    shutil.copy(work.samples / "text.txt", work.folder)
    resume = ["train", "run/config.yaml", "--nproc", "1", "--set", "training.steps=5", "--set", "checkpoint.every=1"]
    trained, stopped = work.run(*resume, "--format", "json"), _stopped(work)
    compared = work.run("parity", "tutorial", "--nproc", "2", "--steps", "1", *_small(), "--format", "json")
    doctored = work.json("doctor", "--ranks", "1")

    def status_with(*changes: str) -> int:
        named = [f"folder={changes[0].partition('.')[0]}", "checkpoint.resume=never", *changes]
        return work.run(*resume, *(argument for change in named for argument in ("--set", change))).status

    return {
        "train": shape_of([json.loads(trained.output), json.loads(stopped.output)]),
        "parity": shape_of([json.loads(compared.output)], opaque=("first_difference",)),
        "doctor collectives": shape_of(doctored["collectives"]),
        "exit statuses": {
            "train: complete": trained.status,
            "train: stopped by a signal": stopped.status,
            "train: numbers that are not finite": status_with("optimizer.learning_rate=1e30"),
            "train: no such device": status_with("mesh.device=mtia"),
            "parity: equal": compared.status,
        },
    }


def _stopped(work: Work) -> Ran:
    """A run that is told to stop when it has made a step."""
    folder = work.folder / "stopped"
    changes = ["training.steps=1000000", "checkpoint.resume=never", "folder=stopped"]
    arguments = [argument for change in changes for argument in ("--set", change)]
    command = [sys.executable, "-m", "shardwise", "train", "run/config.yaml", "--nproc", "1", *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    with subprocess.Popen(
        [*command, "--format", "json"],
        cwd=work.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + _TIMEOUT_S
            while time.monotonic() < deadline and process.poll() is None:
                if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size:
                    process.terminate()
                    break
                time.sleep(0.05)
            output, errors = process.communicate(timeout=_TIMEOUT_S)
        finally:
            process.kill()
    return Ran(process.returncode, output, errors)


def describe_files(samples: Path) -> dict[str, Any]:
    """The names of the files that are written, and the fields of those that hold text."""
    manifests = [json.loads(path.read_text()) for path in sorted(samples.rglob("manifest.json"))]
    lines = [json.loads(line) for line in (samples / "run" / "metrics.jsonl").read_text().splitlines()]
    plan = "details.models.*.plan"
    return {
        "names": {str(path.relative_to(samples)): "" for path in sorted(samples.rglob("*")) if path.is_file()},
        "manifest.json": shape_of(
            manifests,
            maps=("files", "values", "aliases", "structure", "tensors", "details.models", "details.models.*.mesh"),
            opaque=("values.*", "structure.*", plan),
        ),
        "constants": {
            "manifest.json": {name: manifests[0][name] for name in ("format", "version", "block_bytes")},
            "plan": {"format": json.loads((samples / "plan.json").read_text())["format"]},
        },
        "names in a checkpoint": dict.fromkeys(_tensor_names(samples), ""),
        "plan": shape_of([json.loads((samples / "plan.json").read_text())]),
        "metrics.jsonl": shape_of(lines),
        "config.yaml of a run": _yaml_keys((samples / "run" / "config.yaml").read_text()),
        "safetensors metadata": shape_of(_safetensors_metadata(samples)),
        "safetensors index": shape_of(
            [json.loads(path.read_text()) for path in sorted(samples.rglob("*.safetensors.index.json"))],
            maps=("weight_map",),
        ),
        "shardwise.json of a full file": shape_of(_records(samples), maps=("xxh3",)),
        "__shardwise__ of a full file": shape_of(_notes(samples), opaque=("values", "structure", "paths")),
        "fsdp1_layout.json": shape_of(
            [json.loads((samples / "fsdp1-local" / "fsdp1_layout.json").read_text())], maps=("ties",)
        ),
    }


def describe_statuses(work: Work) -> dict[str, int]:
    """Exit statuses of real invocations, by what they are about."""
    new = work.folder / "new.pt"
    cases: dict[str, Iterable[str | Path]] = {
        "--help": ["--help"],
        "--version": ["--version"],
        "unknown command": ["trian"],
        "unknown option": ["lint", "--bogus", "clean.py"],
        "missing argument": ["ckpt", "verify"],
        "lint: nothing found": ["lint", "clean.py"],
        "lint: something found": ["lint", "wrong.py"],
        "lint: found, but not selected": ["lint", "--select", "SW202", "wrong.py"],
        "lint: a file that is not Python": ["lint", "unreadable.py"],
        "lint: no such file": ["lint", "absent.py"],
        "lint: no such code": ["lint", "--select", "SW999", "clean.py"],
        "migrate: nothing to do": ["migrate", "clean.py"],
        "migrate: something to decide": ["migrate", "fsdp1.py"],
        "migrate: no such file": ["migrate", "absent.py"],
        "explain: a rule": ["explain", "SW201"],
        "explain: an error": ["explain", "SW502"],
        "explain: a log": ["explain", "log.txt"],
        "explain: a log that nothing is known about": ["explain", "unknown.txt"],
        "explain: neither a code nor a file": ["explain", "SW000"],
        "explain: dumps": ["explain", "dumps"],
        "explain: a folder without dumps": ["explain", "missing"],
        "ckpt inspect: fine": ["ckpt", "inspect", work.sharded],
        "ckpt inspect: a file is missing": ["ckpt", "inspect", work.missing],
        "ckpt inspect: no such path": ["ckpt", "inspect", "absent"],
        "ckpt inspect: no checkpoint": ["ckpt", "inspect", work.garbage],
        "ckpt inspect: a model that cannot be built": ["ckpt", "inspect", work.sharded, "--model", "broken:build"],
        "ckpt inspect: no such model": ["ckpt", "inspect", work.sharded, "--model", "broken:absent"],
        "ckpt verify: fine": ["ckpt", "verify", work.sharded],
        "ckpt verify: only a note": ["ckpt", "verify", work.foreign],
        "ckpt verify: bytes were flipped": ["ckpt", "verify", work.flipped],
        "ckpt verify: a file is missing": ["ckpt", "verify", work.missing],
        "ckpt verify: no checkpoint": ["ckpt", "verify", work.garbage],
        "ckpt verify: no such path": ["ckpt", "verify", "absent"],
        "ckpt convert: fine": ["ckpt", "convert", work.sharded, new, "--to", "full"],
        "ckpt convert: the target is there": ["ckpt", "convert", work.sharded, new, "--to", "full"],
        "ckpt convert: no such format": ["ckpt", "convert", work.sharded, new, "--to", "pickle"],
        "ckpt convert: no such dtype": ["ckpt", "convert", work.sharded, "new", "--dtype", "float3"],
        "ckpt convert: no size": ["ckpt", "convert", work.sharded, "new", "--max-shard-size", "large"],
        "ckpt convert: damaged": ["ckpt", "convert", work.flipped, "new"],
        "ckpt diff: equal": ["ckpt", "diff", work.sharded, work.sharded],
        "ckpt diff: different": ["ckpt", "diff", work.sharded, work.other],
        "ckpt diff: no such path": ["ckpt", "diff", work.sharded, "absent"],
        "train: the settings are printed": ["train", "--print-config", "--nproc", "2"],
        "train: no such setting": ["train", "bad.yaml"],
        "train: no such value": ["train", "--set", "training.steps=many"],
        "train: no such file": ["train", "absent.yaml"],
        "train: fewer ranks than one": ["train", "--nproc", "0"],
        "parity: no such setting": ["parity", "tutorial", "--set", "modle=1"],
    }
    return {name: work.run(*arguments).status for name, arguments in cases.items()} | dict(_lint_tables(work))


def _lint_tables(work: Work) -> Iterator[tuple[str, int]]:
    """The keys of `[tool.shardwise.lint]`, each of which must be known and do what it says."""
    tables = {
        "select": 'select = ["SW202"]',
        "ignore": 'ignore = ["SW1", "SW2"]',
        "exclude": 'exclude = ["wrong.py"]',
        "preview": "preview = true",
        "per-file-ignores": '[tool.shardwise.lint.per-file-ignores]\n"wrong.py" = ["SW"]',
        "an unknown key": 'selct = ["SW202"]',
    }
    for name, table in tables.items():
        with _pyproject(work.folder, f"[tool.shardwise.lint]\n{table}\n"):
            yield f"lint: {name} in pyproject.toml", work.run("lint", ".").status


@contextmanager
def odd_environment() -> Iterator[None]:
    """Variables that `doctor` has something to say about."""
    before = dict(os.environ)
    os.environ.update(DOCTORED)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _pyproject(folder: Path, text: str) -> Iterator[None]:
    hidden = folder / "unreadable.py"
    broken = hidden.read_text()
    hidden.unlink()
    (folder / "pyproject.toml").write_text(text)
    try:
        yield
    finally:
        (folder / "pyproject.toml").unlink()
        hidden.write_text(broken)


def _checkpoints(work: Work) -> list[Path]:
    folder = work.samples
    run = [run_checkpoint(folder, kind) for kind in RUN_STEPS]
    names = ("full.pt", "weights", "weights.safetensors", "weights.pt", "converted.pt", "fsdp1-local")
    return [work.sharded, work.missing, work.numbered, work.foreign, *(folder / name for name in names), *run]


def _small() -> list[str]:
    options = json.dumps({"width": 8, "num_layers": 1, "num_heads": 2})
    return ["--set", f"model_options={options}", "--set", "mesh.device=cpu"]


def _yaml_keys(text: str) -> dict[str, str]:
    """The keys of a settings file; which of them a run has is told by `settings.py`."""
    return {path: "" for path in shape_of([yaml.safe_load(text)], opaque=("model_options",)) if not path.endswith("[]")}


def _annotations(text: str) -> dict[str, str]:
    """The kinds of workflow commands, and the properties of each."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if match := re.match(r"::(\w+) (.*?)::", line):
            found[match[1]] = ", ".join(sorted(part.partition("=")[0] for part in match[2].split(",")))
    return found


def _tensor_names(samples: Path) -> list[str]:
    """How tensors and values are called in a checkpoint; torch's versions differ in the options of a group."""
    manifest = json.loads((samples / "checkpoints" / f"step-{STEP:08d}" / "manifest.json").read_text())
    ours = re.compile(
        r"optim\.param_groups\.\d+\.(lr|betas|eps|weight_decay|params)|(?!optim\.param_groups|rng|scheduler).*"
    )
    return sorted(filter(ours.fullmatch, manifest["structure"]))


def _safetensors_metadata(samples: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(samples.rglob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        found.append(json.loads(data[8 : 8 + length]).get("__metadata__", {}))
    return found


def _records(samples: Path) -> list[Any]:
    found = []
    for path in sorted(samples.rglob("*.pt")):
        with zipfile.ZipFile(path) as archive:
            found += [json.loads(archive.read(name)) for name in archive.namelist() if name.endswith("/shardwise.json")]
    return found


def _notes(samples: Path) -> list[Any]:
    files = [samples / "full.pt", samples / "converted.pt"]
    states = [torch.load(path, weights_only=True) for path in files]
    return [json.loads(state["__shardwise__"]) for state in states if "__shardwise__" in state]


def _collective(size: int) -> dict[str, Any]:
    """As torch's flight recorder writes it."""
    return {
        "collective_seq_id": 1,
        "profiling_name": "gloo:all_reduce",
        "input_sizes": [[size]],
        "input_dtypes": ["Float"],
        "process_group": ["0", "default_pg"],
        "state": "scheduled",
        "frames": [],
    }


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2000] ^= 1
    file.write_bytes(data)


def _numbered() -> dict[str, Any]:
    """A model and an optimizer's own state dict, which numbers its parameters."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _with_shared_state() -> dict[str, Any]:
    """Two optimizer states of a parameter in the same memory, as FSDP1 leaves them on CPUs."""
    weight = value_of("weight", (4, 3))
    state = {"weight": {"step": torch.tensor(3.0), "exp_avg": weight, "exp_avg_sq": weight}}
    groups = [{"lr": 0.1, "params": ["weight"]}]
    return {"model": {"weight": value_of("model.weight", (4, 3))}, "optim": {"state": state, "param_groups": groups}}

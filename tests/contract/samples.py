"""Small samples of every file that shardwise writes, whose every tensor follows from its name.

python -m tests.contract.samples FOLDER    is run on each of two ranks by `write_samples`
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise as sw

ROOT = Path(__file__).parents[2]
NUM_RANKS = 2
STEP = 7
SEED = 5
"""Of rank 0's random numbers when they were saved; rank 1's is one more."""
RUN_STEPS = {"sharded": 2, "full": 3, "dcp": 4}
"""Which checkpoint of the stored run has which format, by its step."""
_TIMEOUT_S = 240
_WIDTH, _VOCABULARY = 6, 11


class Block(nn.Module):
    """Sizes that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 9), nn.Linear(9, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied ends, blocks, a scalar parameter, and buffers of several dtypes."""

    def __init__(self, *, with_scalar: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.ones(())) if with_scalar else None
        self.register_buffer("scale", torch.ones(_WIDTH))
        self.register_buffer("narrow", torch.ones(3, 2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x * self.scale)
        return logits if self.temperature is None else logits * self.temperature


def run_checkpoint(folder: Path, kind: str) -> Path:
    """Where the stored run's checkpoint of a format lies."""
    return folder / "run" / "checkpoints" / f"step-{RUN_STEPS[kind]:08d}{'.pt' if kind == 'full' else ''}"


def value_of(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor that a name stands for; its numbers are exact in 16 bits too."""
    seed = zlib.crc32(name.encode())
    numbers = (torch.arange(math.prod(shape), dtype=torch.int64) * (seed % 97 + 1) + seed % 1009) % 251 - 125
    numbers = numbers.reshape(shape)
    if dtype is torch.bool:
        return numbers % 2 == 0
    return numbers if not dtype.is_floating_point else (numbers / 64).to(dtype)


def expected_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the stored model holds, by the names of its state dict; tied names hold the same."""
    aliases = {"head.weight": "embed.weight"}
    return {
        name: value_of(f"model.{aliases.get(name, name)}", tuple(tensor.shape), tensor.dtype)
        for name, tensor in model.state_dict().items()
    }


def expected_moment(name: str, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """What the stored optimizer holds for a parameter."""
    value = value_of(f"optim.{name}.{key}", shape)
    return value.abs() if key == "exp_avg_sq" else value


def expected_average(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """What the stored moving average holds for a parameter."""
    return value_of(f"ema.{name}", shape)


def expected_extra() -> dict[str, Any]:
    """What was saved beside model and optimizer."""
    return {
        "epoch": 3,
        "pair": (1, "two"),
        "nothing": None,
        "rate": 0.1,
        "bytes": b"\x00\xff",
        "infinite": math.inf,
        "nested": {"flags": [True, 1.5], "empty": {}},
        "tensor": value_of("extra.tensor", (4, 3)),
    }


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Two groups: matrices are decayed, the rest is not."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.003, betas=(0.8, 0.95))


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def fill_model(model: nn.Module) -> None:
    """Give every parameter and buffer the value of its name."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        _put(tensor, value_of(f"model.{name}", tuple(tensor.shape), tensor.dtype))


def _fill_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        state["step"].fill_(STEP)
        for key in ("exp_avg", "exp_avg_sq"):
            _put(state[key], expected_moment(name, key, tuple(parameter.shape)))


def _put(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        if isinstance(tensor, DTensor):
            value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
        tensor.copy_(value)


def sharded_run() -> tuple[nn.Module, torch.optim.AdamW, torch.optim.lr_scheduler.LRScheduler, sw.EMA]:
    """The sample model on the ranks of this group, with an optimizer, a schedule and a moving average."""
    torch.manual_seed(0)
    model = sw.shard(Net(), mesh=sw.init_distributed(sw.MeshConfig(device="cpu")))
    optimizer = make_optimizer(model)
    return model, optimizer, make_scheduler(optimizer), sw.EMA(model, 0.9)


def write_samples(folder: Path) -> None:
    """Write every sample into `folder`, on two ranks.

    Raises:
        RuntimeError: A rank failed; with what it printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    ranks = []
    for rank in range(NUM_RANKS):
        launch = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": NUM_RANKS,
            "LOCAL_WORLD_SIZE": NUM_RANKS,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environment = {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in launch.items()}}
        command = [sys.executable, "-m", "tests.contract.samples", str(folder)]
        ranks.append(
            subprocess.Popen(
                command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [rank.communicate(timeout=_TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(f"rank {number}:\n{output}" for number, output in enumerate(outputs)))


def _write_on_rank(folder: Path) -> None:
    """Everything, in the order in which it is listed in `docs/checkpoint-format.md` and `docs/checkpoints.md`."""
    model, optimizer, scheduler, average = sharded_run()
    _fill_optimizer(model, optimizer)  # takes a step, which moves the weights
    fill_model(model)
    for name, shadow in average.state_dict()["shadow"].items():
        _put(shadow, expected_average(name, tuple(shadow.shape)))
    with warnings.catch_warnings(action="ignore"):  # that the optimizer's last step was before the schedule's first
        for _ in range(STEP):
            scheduler.step()
    random.seed(SEED + dist.get_rank())
    torch.manual_seed(SEED + dist.get_rank())
    objects: dict[str, Any] = {"optimizers": optimizer, "scheduler": scheduler, "ema": average}
    with sw.Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save(STEP, model=model, extra=expected_extra(), metric=0.25, **objects)
    sw.save_full(folder / "full.pt", model=model, extra=expected_extra(), **objects)
    sw.save_weights(model, folder / "weights", max_shard_bytes=600)
    sw.save_weights(model, folder / "weights.safetensors")
    sw.save_weights(model, folder / "weights.pt", "torch")
    if dist.get_rank() == 0:
        source = folder / "checkpoints" / f"step-{STEP:08d}"
        sw.convert_checkpoint(source, folder / "converted" / f"step-{STEP:08d}", "dcp")
        sw.convert_checkpoint(source, folder / "converted.pt", "full")
        sw.convert_checkpoint(source, folder / "converted-weights", "safetensors", dtype="bfloat16")
        plan = sw.plan(Net(), mesh=model.embed.weight.device_mesh)
        (folder / "plan.json").write_text(plan.to_json(indent=1) + "\n")
    _write_fsdp1(folder / "fsdp1-local")
    _write_checks(folder.parent / "checks.json")
    _write_run(folder)


def _write_fsdp1(folder: Path) -> None:
    """FSDP1's LOCAL state dict, and our record of its layout beside it."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from shardwise.checkpointing.formats.fsdp1 import record_flat_params

    folder.mkdir(exist_ok=True)
    rank = dist.get_rank()
    plain = Net(with_scalar=False)
    fill_model(plain)
    with warnings.catch_warnings(action="ignore"):  # FSDP1 is going away
        model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu"))
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            torch.save(model.state_dict(), folder / f"model.{rank:05d}-of-{NUM_RANKS:05d}.pt")
    if rank == 0:
        record_flat_params(model, folder)
    dist.barrier()


def _write_checks(path: Path) -> None:
    """The codes that `sw.check` gives models with one mistake each, and their severities."""
    mesh = sw.init_distributed(sw.MeshConfig(device="cpu"))
    found: list[Any] = []

    def by_hand(model: Net) -> Net:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def fresh() -> Net:
        model = Net(with_scalar=False)
        fill_model(model)
        return model

    plain = fresh()
    early = make_optimizer(plain)
    found += sw.check(plain)  # not sharded
    found += sw.check(by_hand(plain), early)  # the optimizer holds what the model no longer uses
    found += sw.check(fully_shard(fresh(), mesh=mesh))  # by the root alone
    found += sw.check(by_hand(fresh().bfloat16()))
    mixed = fresh()
    mixed.blocks[0].up.bfloat16()
    found += sw.check(by_hand(mixed))
    model = by_hand(fresh())
    model.set_requires_gradient_sync(False)
    found += sw.check(model)
    model.set_requires_gradient_sync(True)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.long))
    found += sw.check(model)  # stands unsharded
    model.reshard()
    twice = torch.optim.SGD([model.embed.weight], lr=0.1)
    found += sw.check(model, [torch.optim.SGD(model.parameters(), lr=0.1), twice])
    model.scale += dist.get_rank()
    found += sw.check(model)  # differs between ranks
    model.scale.fill_(math.nan)
    found += sw.check(model)  # as if never written
    model.blocks[0].up.weight = nn.Parameter(model.blocks[0].up.weight.detach().clone())
    found += sw.check(model)
    ignoring = fresh()
    fully_shard(ignoring, mesh=mesh, ignored_params={ignoring.blocks[0].up.weight})  # pyrefly: ignore
    with torch.no_grad():
        ignoring.blocks[0].up.weight.add_(dist.get_rank())
    found += sw.check(ignoring)
    tied = sw.shard(fresh(), mesh=mesh)
    tied.head.weight = nn.Parameter(tied.embed.weight.detach().clone())
    found += sw.check(tied)
    with torch.device("meta"):
        found += sw.check(sw.shard(Net(with_scalar=False), mesh=mesh))
    if dist.get_rank() == 0:
        path.write_text(json.dumps({finding.code: finding.severity.value for finding in found}))


def run_settings() -> dict[str, Any]:
    """A run that takes a moment; its paths are relative."""
    return {
        "model": "tutorial",
        "model_options": {"width": 4, "num_layers": 1, "num_heads": 2},
        "mesh": {"device": "cpu"},
        "data": {"source": "text.txt", "sequence_length": 16, "evaluation_fraction": 0.2},
        "training": {"batch_size": 4, "sample": None, "ema_decay": 0.9},
        "checkpoint": {"every": None, "keep_last": None},
        "folder": "run",
    }


def _write_run(folder: Path) -> None:
    """A run's folder, with a checkpoint of each format, metrics, settings and exported weights."""
    from shardwise.config.load import load

    os.chdir(folder)
    if dist.get_rank() == 0:
        Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    dist.barrier()
    for kind, steps in RUN_STEPS.items():
        changes = [f"checkpoint.format={kind}", f"training.steps={steps}", f"checkpoint.export={kind == 'dcp'}"]
        sw.fit(load(sw.RunConfig, run_settings(), changes))


if __name__ == "__main__":
    # Not "__main__": classes are stored under the names of their modules.
    from tests.contract import samples

    samples._write_on_rank(Path(sys.argv[1]).resolve())
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort an interpreter that shuts down
